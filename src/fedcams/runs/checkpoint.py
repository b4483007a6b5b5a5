"""Checkpoints: a run continues from its last one after a kill at any moment. The simulator and Flower share the format.

<folder>/state.json           the round, the run's identity, small state, the round and digest of each client's rows,
                              the checksum of the next file, the digests of the rounds' lines and of what
                              `theory_every` measured, and one of all this
<folder>/<round>.safetensors  the model, the averaged model, the optimizer's vectors
<folder>/spare.safetensors    the tensors of the previous round, no longer needed; the next ones are written over them
<folder>/rows/                a RowStore on disk: what clients keep (in a simulation)
<folder>/replicas/            a second RowStore: the clients' models, if the downlink keeps them at the server

The current checkpoint is the one that `state.json` names. A new one is written next to it, in four steps:

1. write the rows that changed to `rows/` and `replicas/`, where the snapshots keep the old ones
2. write `<round>.safetensors`
3. replace `state.json`: in this one moment, the new checkpoint becomes the current one
4. move the snapshots of the rows to the new round, and remove the old `.safetensors`

After a kill before step 3, the rows of step 1 are newer than the snapshot and are rolled back. After a kill between
steps 3 and 4, they belong to the current checkpoint, and the next start moves the snapshot.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import safetensors

from fedcams.durable import private_folder, sealed, unsealed
from fedcams.errors import ResidualError
from fedcams.rounds import Server, ServerState
from fedcams.rows import Versions
from fedcams.runs.files import disk_errors, write_private
from fedcams.runs.folder import RunError
from fedcams.runs.state import file_checksum, pack, restore_, write_tensors

STATE, SPARE, ROWS, REPLICAS = "state.json", "spare.safetensors", "rows", "replicas"
VERSION = 2
LAST_READER = {1: "0.1.0"}
"""Format -> the last version of fedcams that reads it."""


class Rows(Protocol):
    """Rows that are saved with every checkpoint: `fedcams.rows.SavedRows` or `DirectRows`."""

    def save(self) -> Versions:
        """Make the current rows durable, in addition to those of the last checkpoint; return their versions."""

    def mark(self, round: int) -> None:
        """Record that the checkpoint of this round is complete."""

    def load(self, round: int, expected: Versions) -> None:
        """Restore the rows of this round's checkpoint."""

    def clear(self) -> None:
        """Remove all rows, because there is no checkpoint."""


class Checkpoint:
    """The checkpoint of one run, and the rows that belong to it."""

    def __init__(
        self,
        folder: Path,
        server: Server,
        identity: Mapping[str, Any],
        rows: Mapping[str, Rows],
        keep_spare: bool = False,
    ) -> None:
        """Describe the checkpoint in this folder; a run can continue from it only if it has the same `identity`.

        With `keep_spare`, the tensors of the previous round stay, and the next ones are written over them. That is
        faster, but takes space on disk.
        """
        self.folder, self.server, self.identity, self.rows = folder, server, dict(identity), dict(rows)
        self.keep_spare = keep_spare
        self.lines = ""
        """The digest of the lines of the loaded checkpoint's rounds; empty before `load`."""
        self.theory = ""
        """The same for the lines of `theory.jsonl`; empty for a run without them."""
        layouts = (server.layout, server.buffer_layout)
        self._layouts = [None if layout is None else layout.id.hex() for layout in layouts]

    # -- saving ------------------------------------------------------------------------------------------------------

    def save(self, state: ServerState, lines: str = "", last: bool = False, theory: str = "") -> None:
        """Make this state the checkpoint; `lines` and `theory` are digests of the lines that its rounds left.

        A run does not continue from its `last` state, so that checkpoint has no rows and no secret key, and says so.
        """
        kept = {} if last else self.rows
        left_out = [*self.rows, *(["secret"] if state.secret else [])] if last else []
        state = state._replace(secret="") if last else state
        with disk_errors("write", self.folder):
            private_folder(self.folder)
            digests = {"lines": lines, **({"theory": theory} if theory else {})}
            self._write(state, digests, {name: rows.save() for name, rows in kept.items()}, left_out)
            for rows in kept.values():
                rows.mark(state.round)
            self._tidy(f"{state.round}.safetensors", last, *kept)

    def _write(
        self, state: ServerState, digests: dict[str, str], versions: dict[str, Versions], left_out: list[str]
    ) -> None:
        small, tensors = pack(state, self.server)
        spare = self.folder / SPARE
        over = spare if spare.exists() else None
        path = self.folder / f"{state.round}.safetensors"
        with disk_errors("write", path):
            checksum = write_tensors(path, tensors, over)
        values = {
            "fedcams_checkpoint": VERSION,
            "round": state.round,
            "identity": self.identity,
            "layouts": self._layouts,
            "tensors": checksum,
            "rows": versions,
            "left_out": left_out,
            **digests,
            "state": small,
        }
        write_private(self.folder / STATE, sealed(values))

    def _tidy(self, current: str, last: bool, *kept: str) -> None:
        """Remove what the new checkpoint does not need."""
        old = sorted(path for path in self.folder.glob("*.safetensors") if path.name not in (current, SPARE))
        if self.keep_spare and old and not last:
            old.pop().replace(self.folder / SPARE)
        for path in old:
            path.unlink()
        for name in self.rows:
            if name not in kept and (self.folder / name).exists():
                shutil.rmtree(self.folder / name)

    # -- loading -----------------------------------------------------------------------------------------------------

    def load(self, start: ServerState) -> ServerState:
        """Return the state to continue from, and restore its rows; return `start` if no checkpoint was completed.

        Refuses a damaged checkpoint, or one of another run, and leaves it unchanged.
        """
        values = read_state(self.folder, self.identity)
        if values is None:
            self._clear()
            return start
        if values["layouts"] != self._layouts:
            found = f"layouts are {values['layouts']} there and {self._layouts} here"
            raise RunError(f"{self.folder / STATE}: a checkpoint of another model: {found}; {start_over(self.folder)}")
        state = self._load_state(values, start)
        self._load_rows(values)
        self.lines, self.theory = values.get("lines", ""), values.get("theory", "")
        return state

    def _clear(self) -> None:
        """Remove what a kill before the first checkpoint left behind."""
        with disk_errors("clear", self.folder):
            private_folder(self.folder)
            for path in [*self.folder.glob("*.safetensors"), *self.folder.glob("*.tmp")]:
                path.unlink()
            for rows in self.rows.values():
                rows.clear()

    def _load_state(self, values: dict[str, Any], start: ServerState) -> ServerState:
        path = self.folder / f"{values['round']}.safetensors"
        with disk_errors("read", path, start_over(self.folder)):
            found = file_checksum(path)
        if found != values["tensors"]:
            raise RunError(
                f"{path}: damaged, checksum {found:08x} instead of {values['tensors']:08x}; {start_over(self.folder)}"
            )
        try:
            with safetensors.safe_open(path, "pt") as file:
                return restore_(values["round"], values["state"], file.keys(), file.get_tensor, self.server, start)
        except (AttributeError, KeyError, TypeError) as error:  # undamaged, so the state's fields have changed since
            raise RunError(
                f"{path}: written by another version of fedcams ({error!r}); {start_over(self.folder)}"
            ) from error

    def _load_rows(self, values: dict[str, Any]) -> None:
        for name, rows in self.rows.items():
            try:
                rows.load(values["round"], values["rows"].get(name, []))
            except ResidualError as error:
                found = f"{self.folder / name}: damaged ({error}); a run needs all of its rows to continue"
                raise RunError(f"{found}: {start_over(self.folder)}") from error


def saved_round(folder: Path, identity: Mapping[str, Any]) -> int | None:
    """Return the round of the checkpoint in this folder; None if there is none. Refuses one of another run."""
    values = read_state(folder, identity)
    return None if values is None else int(values["round"])


def clear_after_last(folder: Path, round: int) -> None:
    """Remove what a kill right after the last round's checkpoint left behind; that checkpoint has no rows."""
    with disk_errors("clear", folder):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name not in (STATE, f"{round}.safetensors"):
                path.unlink()


def read_state(folder: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the contents of `state.json`; None if no checkpoint was completed. Refuses damage, and another run."""
    path = folder / STATE
    values = read_sealed(path, start_over(folder))
    if values is None:
        return None
    if (version := values.get("fedcams_checkpoint")) != VERSION:
        raise RunError(f"{path}: {old_format(version, VERSION)}; {start_over(folder)}")
    theirs = {key: value for key, value in values["identity"].items() if key != "rounds" or key in identity}
    changed = differences(identity, theirs)  # the number of rounds counts only where a schedule follows it
    if changed:
        raise RunError(f"{path} is a checkpoint of another run: {changed}; {start_over(folder)}")
    return values


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Return in words how the saved run ("there") and this one ("here") differ; an empty string if they do not."""
    keys = [key for key in {**theirs, **ours} if ours.get(key) != theirs.get(key)]
    return ", ".join(f"{key} is {theirs.get(key)!r} there and {ours.get(key)!r} here" for key in keys)


def old_format(found: Any, known: int) -> str:
    """Return the sentence that explains why this version cannot read a format."""
    if found in LAST_READER:
        version = LAST_READER[found]
        return f"written by fedcams {version.rsplit('.', 1)[0]}; version {version} is the last one that reads it"
    return f"format {found}, this fedcams reads {known}"


def read_sealed(path: Path, fix: str) -> dict[str, Any] | None:
    """Return the values that `sealed` wrote; None if there is no file. Refuses a file whose digest does not match."""
    if not path.exists():
        return None
    with disk_errors("read", path, fix):
        data = path.read_bytes()
    if (values := unsealed(data)) is None:
        raise RunError(f"{path}: damaged, its contents do not match its digest; {fix}")
    return values


def start_over(folder: Path) -> str:
    """Return what to do about a checkpoint that cannot be used; a finished run does not run again without one."""
    return (
        f"restore it, or delete {folder} and resume to run from the first round; "
        "if the run is finished, delete its whole folder instead and start it again"
    )
