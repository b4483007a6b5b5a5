"""Checkpoints: where a run can go on after a kill at any moment.

checkpoint/state.json           the round, what the checkpoint belongs to, small state, and the next file's digest
checkpoint/<round>.safetensors  the model, the optimizer's vectors
checkpoint/residuals/           a ResidualStore on disk
checkpoint/replicas/            another one, where the downlink keeps a model of every client

The checkpoint is what `state.json` names; a new one comes to stand beside the old one until it replaces that file:

1. the rows that changed go to `residuals/` and `replicas/`, where the snapshots keep the old ones
2. `<round>.safetensors` is written
3. `state.json` is replaced: the one moment in which the new checkpoint takes the place of the old one
4. the rows' snapshots move to the new round, and the old `.safetensors` is removed

After a kill before 3 the rows of step 1 are newer than the snapshot and are rolled back; after a kill between 3 and 4
they are those of the checkpoint, and the snapshot is moved then.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import safetensors.torch

from fedcams.errors import ResidualError
from fedcams.experiment import Experiment
from fedcams.rounds import ServerState
from fedcams.runs.files import disk_errors, write_file
from fedcams.runs.folder import RunError
from fedcams.runs.rows import SavedRows, Versions
from fedcams.runs.state import pack, unpack
from fedcams.simulation import Simulation

STATE, VERSION = "state.json", 1
RESIDUALS, REPLICAS = "residuals", "replicas"


class Checkpoints:
    """The checkpoint of one run; the rows it saves and brings back are those of the simulation's stores."""

    def __init__(self, folder: Path, experiment: Experiment, simulation: Simulation) -> None:
        self.folder, self.experiment, self.server = folder, experiment, simulation.server
        stores = {RESIDUALS: simulation.uplink.store, REPLICAS: self.server.replicas}
        self._rows = {name: SavedRows(store, folder / name) for name, store in stores.items() if store is not None}
        layouts = (self.server.layout, self.server.buffer_layout)
        self._layouts = [None if layout is None else layout.id.hex() for layout in layouts]

    # -- saving --------------------------------------------------------------------------------------------------

    def save(self, state: ServerState) -> None:
        """Makes this state the one to go on from; takes memory for three copies of its tensors."""
        last = state.round == self.experiment.rounds
        kept = {} if last else self._rows  # nobody goes on from the last round, and rows are most of the bytes
        with disk_errors("write", self.folder):
            self._save_state(state, {name: rows.save() for name, rows in kept.items()})
            for rows in kept.values():
                rows.mark(state.round)
            _keep_only(self.folder, f"{state.round}.safetensors", *kept)

    def _save_state(self, state: ServerState, versions: dict[str, Versions]) -> None:
        small, tensors = pack(state, self.server)
        # copies: safetensors refuses tensors that share memory
        data = safetensors.torch.save({name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()})
        write_file(self.folder / f"{state.round}.safetensors", data)
        values = {
            "fedcams_checkpoint": VERSION,
            "round": state.round,
            "experiment": self.experiment.to_dict(),
            "layouts": self._layouts,
            "tensors": _digest(data),
            RESIDUALS: versions.get(RESIDUALS, []),
            REPLICAS: versions.get(REPLICAS, []),
            "state": small,
        }
        write_file(self.folder / STATE, json.dumps({**values, "digest": _digest(_canonical(values))}).encode())

    # -- going on ------------------------------------------------------------------------------------------------

    def load(self, start: ServerState) -> ServerState:
        """The state to go on from, with the store's rows brought back; `start` where no checkpoint was completed.

        What is refused is left as it was.
        """
        values = read_state(self.folder, self.experiment)
        if values is None:
            with disk_errors("clear", self.folder):
                self.folder.mkdir(exist_ok=True)
                _keep_only(self.folder)
            return start
        if values["layouts"] != self._layouts:
            found = f"layouts are {values['layouts']} there and {self._layouts} here"
            raise RunError(f"{self.folder / STATE}: a checkpoint of another model: {found}; {_anew(self.folder)}")
        state = self._load_state(values, start)
        self._load_rows(values)
        return state

    def _load_state(self, values: dict[str, Any], start: ServerState) -> ServerState:
        path = self.folder / f"{values['round']}.safetensors"
        with disk_errors("read", path, _anew(self.folder)):
            data = path.read_bytes()
        if _digest(data) != values["tensors"]:
            raise RunError(f"{path}: damaged, its bytes are not those that were written; {_anew(self.folder)}")
        try:
            return unpack(values["round"], values["state"], safetensors.torch.load(data), self.server, start)
        except (AttributeError, KeyError, TypeError) as error:  # undamaged, so the state's fields have changed since
            raise RunError(
                f"{path}: written by another version of fedcams ({error!r}); {_anew(self.folder)}"
            ) from error

    def _load_rows(self, values: dict[str, Any]) -> None:
        for name, rows in self._rows.items():
            try:
                rows.load(values["round"], values[name])
            except ResidualError as error:
                found = f"{self.folder / name}: damaged ({error}); a run cannot go on without one of its rows"
                raise RunError(f"{found}: {_anew(self.folder)}") from error


def is_last(folder: Path, experiment: Experiment) -> bool:
    """Whether the last round was saved; removes what a kill right after that left behind."""
    values = read_state(folder, experiment)
    if values is None or values["round"] != experiment.rounds:
        return False
    with disk_errors("clear", folder):
        _keep_only(folder, f"{experiment.rounds}.safetensors")
    return True


def read_state(folder: Path, experiment: Experiment) -> dict[str, Any] | None:
    """What `state.json` says; None where no checkpoint was completed. Refuses what is damaged or foreign."""
    path = folder / STATE
    if not path.exists():
        return None
    with disk_errors("read", path, _anew(folder)):
        data = path.read_bytes()
    try:
        values = dict(json.loads(data))
        whole = values.pop("digest") == _digest(_canonical(values))
    except (ValueError, TypeError, KeyError):
        whole = False
    if not whole:
        raise RunError(f"{path}: damaged, it is not what was written; {_anew(folder)}")
    if values["fedcams_checkpoint"] != VERSION:
        raise RunError(f"{path}: format {values['fedcams_checkpoint']}, this fedcams reads {VERSION}; {_anew(folder)}")
    own, other = experiment.to_dict(), values["experiment"]
    changed = [
        f"{key} is {other[key]!r} there and {own.get(key)!r} here" for key in other if own.get(key) != other[key]
    ]
    if changed:
        raise RunError(f"{path}: a checkpoint of another experiment: {', '.join(changed)}; {_anew(folder)}")
    return values


def _keep_only(folder: Path, *names: str) -> None:
    """Removes everything besides `state.json` and these."""
    for path in folder.iterdir():
        if path.name not in (STATE, *names):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _anew(folder: Path) -> str:
    return f"restore it, or delete {folder} and resume to run from the first round"


def _canonical(values: dict[str, Any]) -> bytes:
    return json.dumps(values, sort_keys=True).encode()


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
