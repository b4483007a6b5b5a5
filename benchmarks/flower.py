"""What fedcams costs on top of Flower: the mod per client, and the strategy per reply. Run by `make bench`.

The app answers at once and the grid is in this process, so only fedcams is timed: parsing and checking messages,
converting arrays, error feedback, encoding, and writing and syncing files. Between two messages there is a pause, in
which a client would train and the disk catches up. The rows `disk` are the lower bound: as many bytes as a residual,
written and synced in the same run, as a new file and over an old one. The first two messages of a process load compiled
kernels and create the files that later messages write over, so they are listed separately.
`--save` writes `benchmarks/records/flower.json`, and `flower.md`, which docs/deploying.md shows.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from recording import environment, save
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from fedcams import Method, compressor, encode
from fedcams.bench.timing import Grid
from fedcams.flower import FedCAMS, uplink
from fedcams.flower.arrays import ArrayNames
from fedcams.flower.grid_round import GridRound, instruction_about
from fedcams.flower.records import ABOUT, INSTRUCTION, REPLY, REST, message_parts, message_record
from fedcams.models import build
from fedcams.rounds import Accepted, Instruction, Reply
from fedcams.rounds.server import start
from flower_grid import CannedGrid, identify

COHORT = 10
SPECS = ("sign", "topk(ratio=1/64)", "topk(ratio=1/64, values=bf16)")
PAUSE = 0.5
"""Seconds between two messages."""
WARM = 2
"""Messages, or rounds, that are listed separately."""
RECORD = Path(__file__).parent / "records" / "flower.json"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=10, help="rounds of each; the best and the median are shown")
    options.add_argument("--save", action="store_true", help=f"write {RECORD.name} and {RECORD.stem}.md")
    chosen = options.parse_args()
    identify()
    torch.manual_seed(0)
    arrays = ArrayRecord(build("resnet18", (3, 32, 32), 10, seed=1).state_dict())
    names = ArrayNames.of(arrays)
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder:
        for spec in SPECS:
            first, times[f"client {spec}"] = apart(client(Path(folder), spec, arrays, names, chosen.rounds))
            times.setdefault("first of a process", first)
            _, times[f"reply {spec}"] = apart(reply(Path(folder), spec, arrays, names, chosen.rounds))
        for name, over in {"disk new": False, "disk over": True}.items():
            _, times[name] = apart(disk(Path(folder) / name, 4 * names.layout.d, over, chosen.rounds))
    found = table(times, names.layout.d)
    Console().print(found.to_rich())
    if chosen.save:
        about_it = {"d": names.layout.d, "cohort": COHORT, "runs": chosen.rounds, "pause": PAUSE}
        record = {**about_it, "environment": environment(), "milliseconds": times}
        save(RECORD, record)
        RECORD.with_suffix(".md").write_text(found.to_markdown() + "\n" + caption(record))


def apart(times: Iterable[float]) -> tuple[list[float], list[float]]:
    """Return the first times in order, and the others sorted."""
    every = list(times)
    return every[:WARM], sorted(every[WARM:])


def disk(path: Path, size: int, over: bool, rounds: int) -> Iterator[float]:
    """Yield the milliseconds to write and sync this many bytes."""
    data = torch.randn(size // 4).numpy().data.cast("B")
    for _ in range(WARM + rounds):
        time.sleep(PAUSE)
        began = time.perf_counter()
        with path.open("r+b" if over and path.exists() else "wb", buffering=0) as file:
            done = 0
            while done < size:
                done += file.write(data[done:])
            os.fsync(file.fileno())
        yield 1000 * (time.perf_counter() - began)


def client(folder: Path, spec: str, arrays: ArrayRecord, names: ArrayNames, rounds: int) -> Iterator[float]:
    """Yield the milliseconds of one training message through the mod, which also resolves the previous reply."""
    mod, context = uplink(spec, state_dir=folder / "sites"), Context(1, 1, {"site-id": 0}, RecordDict(), {})
    name = f"bench{SPECS.index(spec)}"
    told = instruction_about(name, Method(uplink=compressor(spec)), names)
    x, buffers = names.vectors(ArrayRecord(dict(arrays)))
    assert buffers is not None
    model, apart = encode("identity", x, names.layout), encode("identity", buffers, names.buffer_layout)
    accepted = None
    for round in range(1, WARM + rounds + 1):
        parts = Instruction(round, 0, 1, {"model": model, "buffers": apart}, accepted).to_parts()
        rest, config = names.rest(arrays), ConfigRecord()
        content = RecordDict({INSTRUCTION: message_record(parts), ABOUT: told, REST: rest, "config": config})
        message = Message(content, 1, "train")
        after = names.join(x + 0.01 * torch.randn(len(x)), buffers, rest)
        app = Answering(Message(RecordDict({"arrays": after}), reply_to=message))
        time.sleep(PAUSE)
        began = time.perf_counter()
        sent = mod(message, context, app)
        took = 1000 * (time.perf_counter() - began)
        accepted = Accepted(round, Reply.from_parts(message_parts(sent.content.array_records[REPLY], 2**40)).digest)
        yield took


class Answering:
    """An app that returns a prepared answer."""

    def __init__(self, answer: Message) -> None:
        self.answer = answer

    def __call__(self, message: Message, context: Context) -> Message:
        return self.answer


def reply(folder: Path, spec: str, arrays: ArrayRecord, names: ArrayNames, rounds: int) -> Iterator[float]:
    """Yield the milliseconds per client of a round of ten clients, including instructions and checkpoint."""
    place = folder / f"server{SPECS.index(spec)}"
    place.mkdir()
    strategy = FedCAMS(server="fedams(lr=0.001, eps=1e-3)", uplink=spec, checkpoint=place, min_available=COHORT)
    assert names.buffer_layout is not None
    buffers = encode("identity", torch.zeros(names.buffer_layout.d), names.buffer_layout)
    grid = CannedGrid(COHORT, encode(spec, 0.01 * torch.randn(names.layout.d), names.layout), buffers)
    checkpoint = strategy.open_checkpoint(names, WARM + rounds)
    server = checkpoint.server
    state = checkpoint.load(start(server, *names.vectors(ArrayRecord(dict(arrays)))))
    loop = GridRound(strategy, server, names, names.rest(arrays), checkpoint, 60.0, ConfigRecord())
    for _ in range(WARM + rounds):
        time.sleep(PAUSE)
        began = time.perf_counter()
        state, line, _ = loop.advance_(grid, state)
        took = 1000 * (time.perf_counter() - began) / COHORT
        assert len(line["accepted"]) == COHORT, line
        yield took
    checkpoint.close()


def table(times: dict[str, list[float]], d: int) -> Grid:
    rows = []
    for name, values in times.items():
        kind, _, which = name.partition(" ")
        bounds = f"{min(values):.1f}", f"{statistics.median(values):.1f}", f"{max(values):.1f}"
        rows.append((kind, f"`{which}`" if kind in ("client", "reply") else which, *bounds))
    return Grid(f"ms on top of Flower, d = {d:,}", ("what", "which", "best", "median", "worst"), rows)


def caption(record: dict[str, Any]) -> str:
    """Return a caption that says how the numbers were measured."""
    where = record["environment"]
    text = f"""Milliseconds at d = {record["d"]:,} (a ResNet-18). *Client*: one message through the mod, files synced.
        *Reply*: a round of {record["cohort"]} replies, including the checkpoint, divided by their number. *First*: the
        first messages of a process, which load compiled kernels. *Disk*: as many bytes as a residual, written and
        synced, as a new file and over an old one. {record["runs"]} of each, {record["pause"]} s apart,
        on {where["cores"]} cores
        ({where["cpu"]}), Python {where["python"]}, torch {where["torch"]}: `make bench`,
        [flower.json](../benchmarks/records/flower.json)."""
    return f"\n{textwrap.fill(' '.join(text.split()), 118, break_long_words=False, break_on_hyphens=False)}\n"


if __name__ == "__main__":
    main()
