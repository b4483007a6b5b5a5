"""The files of a run: written completely or not at all, or extended by whole lines, by one process at a time."""

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
    """Turn errors of the system and of row stores into a RunError, which names the path and the fix."""
    try:
        with os_errors(RunError, what, path, fix):
            yield
    except ResidualError as error:
        raise RunError(str(error)) from error


def write_file(path: Path, data: bytes) -> None:
    """Write a whole file durably: a kill at any moment leaves either the old file or the new one."""
    with disk_errors("write", path):
        write_whole(path, data)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder for this process, or refuse; the system releases the lock however the process ends."""
    with disk_errors("open", folder):
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"{folder}: another process is using this run; let it finish, or end it first") from None
        except OSError:
            pass  # some network file systems cannot lock folders; running without a lock beats not running
        yield
    finally:
        os.close(descriptor)


class Lines:
    """A file with one JSON object per line, line i for round i; it grows by whole lines."""

    def __init__(self, path: Path, keep: int) -> None:
        """Open or create the file, and cut it back to the lines of the first `keep` rounds."""
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
        """Add a line. It survives a kill of the process and, after `sync`, a crash of the machine."""
        rest = memoryview(f"{line}\n".encode())
        with disk_errors("write", self.path):
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]

    def sync(self) -> None:
        """Make all lines durable."""
        with disk_errors("sync", self.path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def end_of(path: Path, count: int) -> int:
    """Return the offset after line `count`; refuses a file whose first lines are not those of rounds 1 to `count`."""
    with disk_errors("read", path, RESTORE):
        *lines, _ = path.read_bytes().split(b"\n", count)  # what follows the last of these lines may be anything
    rounds = [_round(line) for line in lines]
    if rounds != list(range(1, count + 1)):
        wrong = next((i for i, found in enumerate(rounds, start=1) if found != i), len(rounds) + 1)
        raise RunError(
            f"{path}: damaged, line {wrong} is not that of round {wrong}, but the checkpoint is of round {count}; "
            f"{RESTORE}"
        )
    return sum(len(line) + 1 for line in lines)


def _round(line: bytes) -> object:
    try:
        return json.loads(line)["round"]
    except (ValueError, TypeError, KeyError):
        return None
