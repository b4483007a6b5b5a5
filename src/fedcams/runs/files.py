"""The files of a run: written completely or not at all, or extended by whole lines, by one process at a time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from fedcams.durable import EVERYONE, REPAIR, os_errors, sync_folder, write_whole
from fedcams.errors import ResidualError
from fedcams.runs.folder import RunError

FOLDERS = ("checkpoint", "rows", "replicas", "replies", "held", "tensorboard", "wandb")
SUFFIXES = (".json", ".jsonl", ".toml", ".safetensors", ".reply", ".rows", ".spare", ".held", ".staged", ".tmp")
"""The names of folders, and the ends of names of files, that runs, their trackers and clients write."""
RESTORE = "restore the file, or delete the folder and start the run again"


@contextlib.contextmanager
def disk_errors(what: str, path: Path, fix: str = REPAIR) -> Iterator[None]:
    """Turn errors of the system and of row stores into a RunError, which names the path and the fix."""
    try:
        with os_errors(RunError, what, path, fix):
            yield
    except ResidualError as error:
        raise RunError(str(error)) from error


def write_private(path: Path, data: bytes) -> None:
    """Write a whole file for its owner alone; a kill at any moment leaves either the old file or the new one."""
    with disk_errors("write", path):
        write_whole(path, data)


def write_public(path: Path, data: bytes) -> None:
    """Write a file that describes a run in the same way; who may read it is up to the umask."""
    with disk_errors("write", path):
        write_whole(path, data, mode=EVERYONE)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder for this process, or refuse; the system releases the lock however the process ends.

    Refuses symbolic links in place of what runs and clients write there: they would lead outside of the folder.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        raise RunError(
            f"{folder}: folders of runs need the file locks of Linux or macOS; on Windows, use WSL, "
            "or simulate without a folder"
        ) from None
    with disk_errors("open", folder):
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"{folder}: another process is using this run; let it finish, or end it first") from None
        except OSError:
            pass  # some network file systems cannot lock folders; run without a lock there
        _refuse_links(folder)
        yield
    finally:
        os.close(descriptor)


def _refuse_links(folder: Path) -> None:
    """Refuse a symbolic link in the folder, or in one of ours in it, that has the name of something we write."""
    with disk_errors("read", folder), os.scandir(folder) as entries:
        ours = [entry for entry in entries if entry.name in FOLDERS or Path(entry.name).suffix in SUFFIXES]
    for entry in ours:
        _refuse_link(Path(entry.path))
        if entry.name in FOLDERS and entry.is_dir():
            _refuse_links(Path(entry.path))


def refuse_linked_folders(folder: Path) -> None:
    """Refuse a symbolic link in place of a folder of ours, which may have been planted since `locked` looked for any.

    Files need no second look: they are never written through a link.
    """
    for path in (folder / name for name in FOLDERS):
        _refuse_link(path)
        if path.is_dir():
            refuse_linked_folders(path)


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise RunError(
            f"{path} is a symbolic link, and nothing outside of {path.parent} is written or deleted; remove it"
        )


class Lines:
    """A file with one JSON object per line, in the order of their rounds; it grows by whole lines."""

    def __init__(self, path: Path, keep: int, digest: str = "", mode: int = EVERYONE, gaps: bool = False) -> None:
        """Open or create the file, and cut it back to the lines of the first `keep` rounds.

        Every round has a line, unless there may be `gaps`. Refuses other lines than those that had this `digest`, if
        it is given. A file that has other names too, as in a backup of hard links, is copied first: what the other
        names lead to stays unchanged.
        """
        self.path = path
        with disk_errors("open", path):
            if path.is_file() and (found := path.lstat()).st_nlink > 1:
                write_whole(path, path.read_bytes(), mode=stat.S_IMODE(found.st_mode))
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, mode)
        try:
            with disk_errors("cut back", path):
                os.ftruncate(self._descriptor, end_of(path, keep, digest, gaps))
                sync_folder(path.parent)
                self._hash = hash_of(path.read_bytes())
        except BaseException:
            self.close()
            raise

    def append(self, line: str) -> None:
        """Add a line. It survives a kill of the process and, after `sync`, a crash of the machine."""
        rest = memoryview(f"{line}\n".encode())
        self._hash.update(rest)
        with disk_errors("write", self.path):
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]

    @property
    def digest(self) -> str:
        """A digest of all lines."""
        return self._hash.hexdigest()

    def sync(self) -> None:
        """Make all lines durable."""
        with disk_errors("sync", self.path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def end_of(path: Path, count: int, digest: str = "", gaps: bool = False) -> int:
    """Return the offset after the lines of the first `count` rounds; what follows them may be anything.

    Refuses a file whose first lines are not those of rounds 1 to `count`, some of which may lack one if there may be
    `gaps`, or no longer have this `digest`, if given.
    """
    with disk_errors("read", path, RESTORE):
        data = path.read_bytes()
    *lines, _ = data.split(b"\n") if gaps else data.split(b"\n", count)
    rounds = [_round(line) for line in lines]
    if gaps:
        lines = lines[: _rising(rounds, count)]
    elif rounds != list(range(1, count + 1)):
        wrong = next((i for i, found in enumerate(rounds, start=1) if found != i), len(rounds) + 1)
        raise RunError(
            f"{path}: damaged, line {wrong} is not that of round {wrong}, but the checkpoint is of round {count}; "
            f"{RESTORE}"
        )
    end = sum(len(line) + 1 for line in lines)
    if digest and hash_of(data[:end]).hexdigest() != digest:
        raise RunError(f"{path}: changed, its lines up to round {count} are not those of the checkpoint; {RESTORE}")
    return end


def hash_of(data: bytes) -> hashlib.blake2b:
    """Return the hash of some lines, to which further ones can be added."""
    return hashlib.blake2b(data, digest_size=16)


def _rising(rounds: list[object], last: int) -> int:
    """Return how many of these rounds, from the first, rise and are at most `last`."""
    before = 0
    for place, found in enumerate(rounds):
        if not isinstance(found, int) or not before < found <= last:
            return place
        before = found
    return len(rounds)


def _round(line: bytes) -> object:
    try:
        return json.loads(line)["round"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
