"""The peak memory of one side of a round, in a separate process: `flower_memory.py client|server|both d spec`.

Prints a line of JSON for each side: `side`, `peak`, the most bytes beyond what the side starts with, and `model`, the
bytes of the model.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from fedcams import Method, encode
from fedcams.flower import FedCAMS, uplink
from fedcams.flower.arrays import ArrayNames
from fedcams.flower.grid_round import instruction_about
from fedcams.flower.records import ABOUT, INSTRUCTION, REST, from_array, message_record, to_array
from fedcams.layout import Layout
from fedcams.rounds import Instruction
from flower_grid import CannedGrid, identify

TENSORS = 20
RNG = np.random.default_rng(0)


def resident() -> int:
    return int(re.findall(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    return int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024


def model(d: int) -> ArrayRecord:
    return ArrayRecord({f"w{i}": to_array(torch.zeros(d // TENSORS).numpy()) for i in range(TENSORS)})


def layout(d: int) -> Layout:
    return Layout(tuple(f"w{i}" for i in range(TENSORS)), ((d // TENSORS,),) * TENSORS)


def app(message: Message, context: Context) -> Message:
    """Changes every array, one at a time, as a frugal app would: it needs no memory in addition to the model."""
    arrays = message.content.array_records["arrays"]
    for name in list(arrays):
        values = from_array(arrays.pop(name)).copy()
        values += RNG.standard_normal(len(values), np.float32)
        arrays[name] = to_array(values)
    return Message(RecordDict({"arrays": arrays}), reply_to=message)


def client(d: int, spec: str, folder: Path) -> int:
    """Three train messages through the mod; the peak beyond the message itself, which is the model, in any of them."""
    identify()
    mod, context = uplink(spec, state_dir=folder), Context(1, 1, {"site-id": 0}, RecordDict(), {})
    names = ArrayNames(layout(d).names, layout(d), None)
    told = instruction_about("m", Method(uplink=spec), names)
    most = 0
    for round in (1, 2, 3):
        parts = Instruction(round, 0, 1, {"model": encode("identity", torch.zeros(d), layout(d))}).to_parts()
        records = RecordDict(
            {INSTRUCTION: message_record(parts), ABOUT: told, REST: ArrayRecord(), "config": ConfigRecord()}
        )
        message = Message(records, 1, "train")
        del parts, records
        forget_peak()
        before = resident()
        reply = mod(message, context, app)
        assert "fedcams.reply" in reply.content, reply.content
        most = max(most, peak() - before)
        del message, reply
    return most


def server(d: int, spec: str, folder: Path, cohort: int = 8) -> int:
    """Two rounds; the peak beyond the arrays that the app hands over and the replies that wait in Flower's store."""
    torch.manual_seed(0)
    grid = CannedGrid(cohort, encode(spec, torch.randn(d), layout(d)))
    strategy = FedCAMS(server="fedams(lr=0.001)", uplink=spec, checkpoint=folder / "server", min_available=cohort)
    arrays = model(d)
    forget_peak()
    before = resident()
    strategy.start(grid, arrays, 2, timeout=600.0)
    return peak() - before


def main() -> None:
    side, d, spec = sys.argv[1], int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "sign"
    torch.set_num_threads(1)
    for name, measure in {"client": client, "server": server}.items():
        if side in (name, "both"):
            with tempfile.TemporaryDirectory() as folder:
                measure(TENSORS * 1000, spec, Path(folder) / "warm")  # imports and compiles
                print(json.dumps({"side": name, "peak": measure(d, spec, Path(folder)), "model": 4 * d}))


if __name__ == "__main__":
    main()
