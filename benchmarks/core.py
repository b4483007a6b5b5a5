"""The core, compared with memory bandwidth and with the same work done by library calls. Run by `make bench`.

Everything is timed alternately in one process and printed as ratios; `--save` writes `benchmarks/records/core.json` and
`core.md`, the table that docs/speed.md shows.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from recording import environment, import_seconds, save
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fedcams import Aggregator, ErrorFeedback, Layout, RowStore, encode, server
from fedcams.bench.timing import REPEATS, Setup, best_of
from fedcams.registry import registered
from fedcams.wire import pack

D = 11_173_962  # ResNet-18 with ten classes
RATIO = 64
RECORD = Path(__file__).parent / "records" / "core.json"


class Limit(NamedTuple):
    """The time allowed, in copies, and the minimum speedup over the library calls."""

    copies: float
    baseline: str = ""
    speedup: float = 0.0


LIMITS = {
    "encode sign": Limit(6, "torch + packbits", 7),
    "encode topk(ratio=1/64)": Limit(6, "torch.topk", 20),
    "encode topk(ratio=1/64, values=bf16)": Limit(6, "torch.topk", 20),
    "encode ternary(ratio=1/16)": Limit(5, "torch.topk, signs", 20),
    "encode blockq": Limit(8, "torch, 4 bits", 4),
    "aggregate sign": Limit(4),
    "aggregate topk(ratio=1/64)": Limit(2),
    "aggregate topk(ratio=1/64, values=bf16)": Limit(2),
    "aggregate ternary(ratio=1/16)": Limit(1.5),
    "aggregate blockq": Limit(4),
}
SPECS = [name.removeprefix("encode ") for name in LIMITS if name.startswith("encode")]
COHORT = 10


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--turns", type=int, default=10, help=f"turns of {REPEATS} timings each; the best counts")
    options.add_argument("--save", action="store_true", help=f"write {RECORD.name} and {RECORD.stem}.md")
    chosen = options.parse_args()
    torch.manual_seed(0)
    delta = torch.randn(D)
    times = best_of(chosen.turns, contenders(delta))
    for name in times:
        times[name] /= COHORT if name.startswith("aggregate") else 1
    seconds = import_seconds()
    Console().print(table(times), f"import fedcams, beyond torch: {seconds:.2f} s")
    if chosen.save:
        sizes = {spec: len(encode(spec, delta)) for spec in ("identity", *SPECS)}
        record = {
            "d": D,
            "runs": REPEATS * chosen.turns,
            "environment": environment(),
            "milliseconds": times,
            "bytes": sizes,
        }
        record["import_seconds"] = seconds
        save(RECORD, record)
        RECORD.with_suffix(".md").write_text(markdown(record))


def contenders(delta: Tensor) -> dict[str, Setup]:
    residual = torch.randn(D)
    steps = {f"step {name}": step_setup(name, delta) for name in registered("server")}
    return {
        "numpy.copyto": copy_setup(delta),
        "torch + packbits": lambda: lambda: composed_sign(delta, residual),
        "torch.topk": lambda: lambda: composed_topk(delta, residual),
        "torch.topk, signs": lambda: lambda: composed_ternary(delta, residual),
        "torch, 4 bits": lambda: lambda: composed_blocks(delta, residual),
        **{f"encode {spec}": encode_setup(spec, delta, residual) for spec in SPECS},
        **{f"aggregate {spec}": aggregate_setup(spec, delta) for spec in SPECS},
        **steps,
    }


def copy_setup(delta: Tensor) -> Setup:
    source, target = delta.numpy(), np.empty(D, np.float32)
    target[:] = 0
    return lambda: lambda: np.copyto(target, source)


def composed_sign(delta: Tensor, residual: Tensor) -> tuple[Any, Tensor, Tensor]:
    """Encode with scaled sign and error feedback, as you would write it with torch and NumPy."""
    h = delta + residual
    scale = h.abs().mean()
    positive = h >= 0
    bits = np.packbits(positive.numpy(), bitorder="little")
    return bits, scale, h - torch.where(positive, scale, -scale)


def composed_topk(delta: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Encode with top-k and error feedback, as you would write it with torch; positions are not packed."""
    h = delta + residual
    positions = torch.topk(h.abs(), D // RATIO).indices
    return positions, h.gather(0, positions), h.scatter(0, positions, 0.0)


def composed_ternary(delta: Tensor, residual: Tensor) -> tuple[Tensor, Any, Tensor, Tensor]:
    """Signs and mean magnitude of the top 1/16 with error feedback, by torch and NumPy; positions not yet packed."""
    h = delta + residual
    positions = torch.topk(h.abs(), D // 16).indices
    kept = h.gather(0, positions)
    mean = kept.abs().mean()
    signs = np.packbits((kept >= 0).numpy(), bitorder="little")
    return positions, signs, mean, h.scatter(0, positions, kept - mean.copysign(kept))


def composed_blocks(delta: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Encode with four bits per coordinate in blocks of 128 and error feedback, as you would write it with torch."""
    h = torch.nn.functional.pad(delta + residual, (0, -D % 128)).view(-1, 128)
    step = h.abs().amax(1, keepdim=True) / 7
    levels = (h / step).round().clamp(-7, 7)
    offset = (levels + 7).to(torch.uint8).view(-1, 2)
    return offset[:, 0] | offset[:, 1] << 4, step, h - levels * step


def encode_setup(spec: str, delta: Tensor, residual: Tensor) -> Setup:
    """From delta and the stored residual to the payload's bytes and the new residual."""
    layout = Layout.flat(D)
    rows = RowStore.in_memory({"residual": layout})
    rows.commit([0], {"residual": residual[None]}, 1)
    uplink = ErrorFeedback(spec, rows)
    update = torch.empty(1, D)

    def run() -> bytes:
        pending = uplink.prepare_([0], update, 2)
        return pack(uplink.compressor, {name: tensor[0] for name, tensor in pending.code.items()}, layout)

    def prepare() -> Callable[[], bytes]:
        np.copyto(update.numpy()[0], delta.numpy())  # not torch, whose threads would spin on
        return run

    return prepare


def aggregate_setup(spec: str, delta: Tensor) -> Setup:
    """A cohort's payloads checked, decoded into the sum and divided; what is reported is the share of one."""
    layout, payload, total = Layout.flat(D), encode(spec, delta), torch.zeros(D)

    def run() -> None:
        aggregator = Aggregator(layout)
        for client in range(COHORT):
            aggregator.add(client, payload)
        aggregator.mean(out=total)

    return lambda: run


def step_setup(name: str, delta: Tensor) -> Setup:
    optimizer, x = server(name), torch.randn(D)
    state = optimizer.init(x)
    return lambda: lambda: optimizer.step_(state, x, delta)


def table(times: dict[str, float]) -> Table:
    copy = times["numpy.copyto"]
    result = Table(title=f"d = {D:,}, best of several, {torch.get_num_threads()} threads")
    for column in ("what", "ms", "copies", "at most", "faster than library calls", "at least"):
        result.add_column(column, justify="left" if column == "what" else "right")
    for name, elapsed in times.items():
        limits = LIMITS.get(name, Limit(0))
        speedup = f"{times[limits.baseline] / elapsed:.1f}x" if limits.baseline else ""
        wanted = f"{limits.speedup:g}x" if limits.baseline else ""
        limit = f"{limits.copies:g}" if limits.copies else ""
        result.add_row(name, f"{elapsed:.2f}", f"{elapsed / copy:.2f}", limit, speedup, wanted)
    return result


def markdown(record: dict[str, Any]) -> str:
    """Return the table of docs/speed.md, and a caption that says how it was measured."""
    times, sizes, where = record["milliseconds"], record["bytes"], record["environment"]
    copy = times["numpy.copyto"]
    lines = [
        "| uplink | bytes | smaller by | encode with residual | against library calls | aggregate |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for spec in SPECS:
        encoding, adding = times[f"encode {spec}"], times[f"aggregate {spec}"]
        faster = times[LIMITS[f"encode {spec}"].baseline] / encoding
        size = f"{sizes[spec]:,} | {sizes['identity'] / sizes[spec]:.1f}x"
        costs = [f"{cost:.1f} ms ({cost / copy:.1f} copies)" for cost in (encoding, adding)]
        lines.append(f"| `{spec}` | {size} | {costs[0]} | {faster:.0f}x faster | {costs[1]} |")
    return "\n".join([*lines, *CAPTION]).format(**where, copy=copy, runs=record["runs"]) + "\n"


CAPTION = (
    "",
    f"One update with d = {D:,} (a ResNet-18), Gaussian values. *Encode* turns an update and a residual into the",
    "payload's bytes and the new residual. *Library calls* are torch operations with `numpy.packbits`, or `torch.topk`",
    "with gather and scatter, without packing. A *copy* is one `numpy.copyto` of the vector, {copy:.1f} ms. Best of",
    "{runs} alternating runs on {cores} cores ({cpu}), Python {python}, torch {torch}, numba {numba}: `make bench`,",
    "[benchmarks/records/core.json](../benchmarks/records/core.json).",
)


if __name__ == "__main__":
    main()
