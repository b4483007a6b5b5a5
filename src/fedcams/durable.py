"""Files that are written completely or not at all: a kill at any moment leaves the old file or the new one."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fedcams.errors import FedcamsError

REPAIR = "free space or make the folder writable; what was stored before is intact"
OWNER_ONLY = 0o600
"""The permissions of clients' state and checkpoints, whatever the process's umask."""
EVERYONE = 0o666
"""The mode of files that describe a run, as far as the umask allows."""
PIECE = 2**23
"""Bytes per piece of a long file; pieces are synced while the next ones are written."""


def write_whole(path: Path, *parts: bytes | memoryview, over: Path | None = None, mode: int = OWNER_ONLY) -> None:
    """Write `parts` to a file under a temporary name, sync it and rename it to `path`.

    `over` is a file that is no longer needed, which the new one overwrites: for tens of megabytes, a file system takes
    longer to free and allocate space than to write. `mode` gives the permissions of a new file, subject to the umask.
    Links are never followed: their targets stay unchanged. Raises OSError if the system refuses.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with open(_open_own(temporary, over, mode), "wb", buffering=0) as file:
            _write(file, [memoryview(part).cast("B") for part in parts])
            _sync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)  # still there only if something failed
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a text for others to read, such as a table, in the same way: a link in its place is not followed."""
    write_whole(path, text.encode(errors="backslashreplace"), mode=EVERYONE)  # JSON may contain half a character


def _open_own(temporary: Path, over: Path | None, mode: int) -> int:
    """Open a file that nothing else shares: `over` under the temporary name, as it is, or a new one."""
    if over is not None and is_own(over):
        over.replace(temporary)
        return os.open(temporary, os.O_WRONLY | os.O_NOFOLLOW)
    temporary.unlink(missing_ok=True)
    return os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)


def is_own(path: Path) -> bool:
    """Return whether a path is a file that no other name leads to; a backup may consist of hard links."""
    found = path.lstat()
    return stat.S_ISREG(found.st_mode) and found.st_nlink == 1


def private_folder(folder: Path) -> None:
    """Make a folder, and those above it, that only their owner may enter; an existing one stays unchanged."""
    for path in reversed([folder, *folder.parents]):
        if path == folder or not path.exists():
            path.mkdir(0o700, exist_ok=True)  # refuses what is not a folder


def own_folder(folder: Path) -> None:
    """Make a folder and those above it. Raises OSError if it is a symbolic link, which may lead anywhere."""
    if folder.is_symlink():
        raise OSError(errno.ENOTDIR, f"{folder.name} is a symbolic link, which is not followed")
    folder.mkdir(parents=True, exist_ok=True)


def _write(file: io.FileIO, parts: list[memoryview]) -> None:
    """Write all parts; long ones in pieces, each synced while the next is written."""
    pieces = [part[at : at + PIECE] for part in parts for at in range(0, len(part), PIECE)]
    with ThreadPoolExecutor(1) as disk:
        syncs = [disk.submit(_sync, file.fileno()) for piece in pieces if _write_piece(file, piece) == PIECE]
    for sync in syncs:
        sync.result()  # the system reports a failed write only once
    if stat.S_ISREG((found := os.fstat(file.fileno())).st_mode) and found.st_size != file.tell():
        file.truncate()


def _write_piece(file: io.FileIO, piece: memoryview) -> int:
    done = 0
    while done < len(piece):
        done += file.write(piece[done:])
    return done


def _sync(descriptor: int) -> None:
    """Make contents and length durable, but not the times, which would need a journal commit of the file system."""
    getattr(os, "fdatasync", os.fsync)(descriptor)


def sync_folder(folder: Path) -> None:
    """Make renames and removals in a folder durable; fsync of a file does not."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sealed(values: Mapping[str, Any]) -> bytes:
    """Return values and their digest as JSON, for `unsealed` to read."""
    digest = hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()
    return json.dumps({**values, "digest": digest}).encode()


def unsealed(data: bytes) -> dict[str, Any] | None:
    """Return the values that `sealed` wrote; None if any byte differs from what it wrote."""
    try:
        values = dict(json.loads(data))
        del values["digest"]
        return values if sealed(values) == data else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


@contextlib.contextmanager
def os_errors(error: type[FedcamsError], what: str, path: Path, fix: str = REPAIR) -> Iterator[None]:
    """Turn an OSError inside the `with` block into `error`, whose message says `what` failed, the path and the fix."""
    try:
        yield
    except OSError as refused:
        raise error(f"cannot {what} {path}: {refused.strerror or refused}; {fix}") from refused
