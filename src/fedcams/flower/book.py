"""What the server must not forget: where a run stands, and what became of every update.

<checkpoint>/run.json             what defines the run, and the name under which clients keep its residuals
<checkpoint>/state.json           the round, small state, and the checksum of the next file
<checkpoint>/<round>.safetensors  the model, under the names of its tensors, and the optimizer's vectors
<checkpoint>/spare.safetensors    those of the round before, of no more use: the next ones are written over them
<checkpoint>/ledger.jsonl         one line a round: who was asked, whose update was accepted under which digest, who was
                                  refused and why, who did not answer; no clock in it
<checkpoint>/replies/             replies of the round in progress
<checkpoint>/replicas/            what clients hold, for a downlink that keeps it at the server

A round counts when `state.json` names it: its line, tensors and replicas are on disk by then, and no instruction names
an acceptance before. Replicas that are newer than the last round that counts are taken back.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from fedcams.bits.checksum import crc32_of
from fedcams.durable import write_whole
from fedcams.rounds import Server, ServerState
from fedcams.runs.files import Lines, disk_errors, write_file
from fedcams.runs.folder import RunError
from fedcams.runs.state import pack, restore

RUN, STATE, LEDGER, REPLIES, REPLICAS = "run.json", "state.json", "ledger.jsonl", "replies", "replicas"
SPARE = "spare.safetensors"
VERSION = 1
KINDS = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}
PIECE = 2**24


class Book:
    """The checkpoint folder of one run; the caller has locked it, see `fedcams.runs.files.locked`."""

    def __init__(self, folder: Path, name: str, identity: Mapping[str, Any], server: Server) -> None:
        """Opens the run in the folder, or begins it; refuses a folder of another run."""
        self.folder, self.server = folder, server
        self.run = self._identify(name, {"fedcams_flower": VERSION, "name": name, **identity})
        self._ledger: Lines | None = None

    def _identify(self, name: str, identity: Mapping[str, Any]) -> str:
        path = self.folder / RUN
        if path.exists():
            with disk_errors("read", path):
                known = json.loads(path.read_bytes())
            changed = [key for key in identity if known.get(key) != identity[key]]
            if changed:
                found = ", ".join(f"{key} is {known.get(key)!r} there and {identity[key]!r} here" for key in changed)
                raise RunError(f"{path}: another run: {found}; give its settings, or another checkpoint folder")
            return str(known["run"])
        # a new run under an old name must not meet the residuals that clients still have of that one
        run = f"{name}-{secrets.token_hex(4)}"
        write_file(path, json.dumps({**identity, "run": run}, indent=1).encode())
        return run

    # -- going on ------------------------------------------------------------------------------------------------

    def load(self, start: ServerState) -> ServerState:
        """The state to go on from, in the memory of `start`, which it is where no round was finished."""
        state = start
        if (self.folder / STATE).exists():
            saved = json.loads((self.folder / STATE).read_bytes())
            path = self.folder / f"{saved['round']}.safetensors"
            with disk_errors("read", path):
                found = crc32_of(_pieces(path))
            if found != saved["tensors"]:
                raise RunError(f"{path}: damaged, checksum {found:08x} instead of {saved['tensors']:08x}; restore it")
            with safetensors.safe_open(path, "pt") as file:
                state = restore(saved["round"], saved["state"], file.keys(), file.get_tensor, self.server, start)
        self._ledger = Lines(self.folder / LEDGER, keep=state.round)
        self._align_replicas(state.round)
        return state

    def _align_replicas(self, round: int) -> None:
        """After a kill between state and snapshot the rows are those of the round; otherwise newer ones go."""
        rows = self.server.replicas
        if rows is not None:
            (rows.rollback if (rows.snapshot_round or 0) == round else rows.snapshot)(round)

    def save(self, state: ServerState, line: Mapping[str, Any]) -> None:
        """Makes a round count."""
        assert self._ledger is not None, "load comes first"
        self._ledger.append(json.dumps(line))
        self._ledger.sync()
        small, tensors = pack(state, self.server)
        path, spare = self.folder / f"{state.round}.safetensors", self.folder / SPARE
        with disk_errors("write", path):
            checksum = write_tensors(path, tensors, over=spare if spare.exists() else None)
        write_file(
            self.folder / STATE, json.dumps({"round": state.round, "state": small, "tensors": checksum}).encode()
        )
        if self.server.replicas is not None:
            self.server.replicas.snapshot(state.round)
        for old in self.folder.glob("*.safetensors"):
            if old != path:
                old.replace(spare)

    def close(self) -> None:
        """Lets go of the ledger."""
        if self._ledger is not None:
            self._ledger.close()


def read_ledger(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's ledger that count; one cut short or not yet counted is left out."""
    if not (folder / STATE).exists():
        return []
    rounds = json.loads((folder / STATE).read_bytes())["round"]
    return [json.loads(line) for line in (folder / LEDGER).read_bytes().split(b"\n")[:rounds]]


def write_tensors(path: Path, tensors: Mapping[str, Tensor], over: Path | None = None) -> int:
    """A safetensors file, written from where the tensors lie: the library's own copies them. Returns its CRC-32.

    `over` as in `write_whole`.
    """
    header, at = {}, 0
    for name, tensor in tensors.items():
        end = at + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": KINDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    parts: list[bytes | memoryview] = [len(text).to_bytes(8, "little"), text, *map(_bytes, tensors.values())]
    write_whole(path, *parts, over=over)
    return crc32_of(parts)


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            yield piece
