"""Files that are whole or not there: a kill at any moment leaves what was there before or what was written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from fedcams.errors import FedcamsError

REPAIR = "free space or make the folder writable; what was stored before is intact"


def write_whole(path: Path, *parts: bytes | memoryview) -> None:
    """Writes a file under a temporary name, makes it last and gives it its name."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)  # still there only where something failed
    sync_folder(path.parent)


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
