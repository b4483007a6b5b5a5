"""Files that are whole or not there: a kill at any moment leaves what was there before or what was written."""

from __future__ import annotations

import contextlib
import io
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fedcams.errors import FedcamsError

REPAIR = "free space or make the folder writable; what was stored before is intact"


PIECE = 2**23
"""Bytes after which a long file begins to be synced while the rest is written."""


def write_whole(path: Path, *parts: bytes | memoryview, over: Path | None = None) -> None:
    """Writes a file under a temporary name, makes it last and gives it its name.

    `over` is a file that nobody needs any more, whose place on the disk the new one takes: to give back tens of
    megabytes and find others takes a file system longer than to write them.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        if over is not None:
            over.replace(temporary)
        with open(temporary, "wb", buffering=0, opener=_as_it_is) as file:
            _write(file, [memoryview(part).cast("B") for part in parts])
            _sync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)  # still there only where something failed
    sync_folder(path.parent)


def _as_it_is(path: str, flags: int) -> int:
    """Opens without cutting off what is there: that is written over."""
    return os.open(path, flags & ~os.O_TRUNC, 0o666)


def _write(file: io.FileIO, parts: list[memoryview]) -> None:
    """Writes all of it; of what is long, the disk takes the first pieces in while the next ones are written."""
    pieces = [part[at : at + PIECE] for part in parts for at in range(0, len(part), PIECE)]
    with ThreadPoolExecutor(1) as disk:
        syncs = [disk.submit(_sync, file.fileno()) for piece in pieces if _write_piece(file, piece) == PIECE]
    for sync in syncs:
        sync.result()  # the system tells of a failed write only once
    if stat.S_ISREG((found := os.fstat(file.fileno())).st_mode) and found.st_size != file.tell():
        file.truncate()


def _write_piece(file: io.FileIO, piece: memoryview) -> int:
    done = 0
    while done < len(piece):
        done += file.write(piece[done:])
    return done


def _sync(descriptor: int) -> None:
    """Makes contents and length last; not the times, which would cost a turn of the file system's journal."""
    getattr(os, "fdatasync", os.fsync)(descriptor)


def sync_folder(folder: Path) -> None:
    """Makes renames and removals in a folder last; fsync of a file alone does not."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def os_errors(error: type[FedcamsError], what: str, path: Path, fix: str = REPAIR) -> Iterator[None]:
    """Turns what the system refuses into an error of ours that names the path and the fix."""
    try:
        yield
    except OSError as refused:
        raise error(f"cannot {what} {path}: {refused.strerror}; {fix}") from refused
