"""Files of a run: written whole or grown by whole lines, and one writer at a time."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

from fedcams.durable import REPAIR, os_errors, sync_folder, write_whole
from fedcams.errors import ResidualError
from fedcams.runs.folder import RunError

RESTORE = "restore the file, or delete the folder and start the run again"


@contextlib.contextmanager
def disk_errors(what: str, path: Path, fix: str = REPAIR) -> Iterator[None]:
    """Raise a RunError that names the path and the fix for what the system or the rows on disk refuse inside."""
    try:
        with os_errors(RunError, what, path, fix):
            yield
    except ResidualError as error:
        raise RunError(str(error)) from error


def write_file(path: Path, data: bytes) -> None:
    """Write a whole file durably: a kill at any moment leaves what was there before or the new."""
    with disk_errors("write", path):
        write_whole(path, data)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder for this process, or refuse; the lock ends with the process, however that ends."""
    with disk_errors("open", folder):
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"{folder}: another process is at this run; let it finish, or end it first") from None
        except OSError:
            pass  # some network file systems have no locks on folders, and the run is worth more than the lock
        yield
    finally:
        os.close(descriptor)


class Lines:
    """A file with one JSON object a line, line i that of round i; it grows by whole lines."""

    def __init__(self, path: Path, keep: int) -> None:
        """Opens the file, or makes it, and cuts it back to the lines of the first `keep` rounds."""
        self.path = path
        with disk_errors("open", path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            with disk_errors("cut back", path):
                os.ftruncate(self._descriptor, end_of(path, keep))
                sync_folder(path.parent)
        except BaseException:
            self.close()
            raise

    def append(self, line: str) -> None:
        """Add a line. It survives a kill of the process; after `sync` also a failure of the machine."""
        rest = memoryview(f"{line}\n".encode())
        with disk_errors("write", self.path):
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]

    def sync(self) -> None:
        """Wait until all lines are on disk."""
        with disk_errors("sync", self.path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def end_of(path: Path, count: int) -> int:
    """Return where line `count` ends; refuses a file whose first lines are not those of rounds 1 to `count`."""
    with disk_errors("read", path, RESTORE):
        *lines, _ = path.read_bytes().split(b"\n", count)  # what follows the last of these lines may be anything
    rounds = [_round(line) for line in lines]
    if rounds != list(range(1, count + 1)):
        wrong = next((i for i, found in enumerate(rounds, start=1) if found != i), len(rounds) + 1)
        raise RunError(
            f"{path}: damaged, line {wrong} is not that of round {wrong} but the checkpoint is of round {count}; "
            f"{RESTORE}"
        )
    return sum(len(line) + 1 for line in lines)


def _round(line: bytes) -> object:
    try:
        return json.loads(line)["round"]
    except (ValueError, TypeError, KeyError):
        return None
