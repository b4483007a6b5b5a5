"""Files that are whole or not there: a kill at any moment leaves what was there before or what was written."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fedcams.errors import FedcamsError

REPAIR = "free space or make the folder writable; what was stored before is intact"


PIECE = 2**23
"""Bytes after which a long file begins to be synced while the rest is written."""


def write_whole(path: Path, *parts: bytes | memoryview, head: Callable[[], bytes] | None = None) -> None:
    """Writes a file under a temporary name, makes it last and gives it its name.

    `head` is asked last for what stands at the start of the file, in place of what was written there: a checksum may
    be found while the file is written.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("wb", buffering=0) as file:
            _write(file, [memoryview(part).cast("B") for part in parts])
            if head is not None:
                os.pwrite(file.fileno(), head(), 0)
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)  # still there only where something failed
    sync_folder(path.parent)


def _write(file: io.FileIO, parts: list[memoryview]) -> None:
    """Writes all of it; of what is long, the disk takes the first pieces in while the next ones are written."""
    pieces = [part[at : at + PIECE] for part in parts for at in range(0, len(part), PIECE)]
    with ThreadPoolExecutor(1) as disk:
        syncs = [disk.submit(os.fsync, file.fileno()) for piece in pieces if _write_piece(file, piece) == PIECE]
    for sync in syncs:
        sync.result()  # the system tells of a failed write only once


def _write_piece(file: io.FileIO, piece: memoryview) -> int:
    done = 0
    while done < len(piece):
        done += file.write(piece[done:])
    return done


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
