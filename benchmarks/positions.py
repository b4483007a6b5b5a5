"""Codes of kept positions and of their signs, on updates that you saved: bytes, and time against a copy.

    python benchmarks/positions.py resnet18=messages/r100_c0.npz convmixer=messages/r20_c3.npz

Each argument names a registered model, for images 3x32x32 and ten classes, and a file with the message h = Δ + e of one
client. It holds either all of it, `np.save("h.npy", h)`, or its largest eighth:

    kept = np.abs(h) >= np.sort(np.abs(h))[-len(h) // 8]
    np.savez("h.npz", mask=np.packbits(kept), val=h[kept].astype(np.float16))

A transform sees h in every round: `def message_(self, rows, facts, layout)`, rows `[C, d]` of the clients `facts.ids`.
Times are processor time of one thread, the best of several, for the last update of each model. `--save` writes
`records/positions.json` and the table, `positions.md`.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from position_coders import decode_bits, decode_gaps, encode_bits, encode_gaps, tensor_rice
from recording import environment, save

from fedcams.bench.timing import Grid
from fedcams.bits.cells import signs_decode, signs_encode
from fedcams.bits.rice import rice_decode, rice_encode
from fedcams.layout import Layout
from fedcams.models import build

Case = dict[str, Any]
RATIOS = (16, 32, 64)
TIMED = 16
RECORD = Path(__file__).parent / "records" / "positions.json"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("updates", nargs="+", metavar="MODEL=FILE", help="a model's spec and a saved message")
    options.add_argument("--save", action="store_true", help=f"write {RECORD.name} and {RECORD.stem}.md")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    updates = [(model, Path(file)) for model, _, file in (update.partition("=") for update in chosen.updates)]
    layouts = {model: Layout.of(build(model, (3, 32, 32), 10, 0)) for model, _ in updates}
    cases = [measure(model, file, layouts[model], ratio) for model, file in updates for ratio in RATIOS]
    last = dict(updates)  # of each model
    times = {model: timings(*largest(last[model], layouts[model], TIMED), layouts[model]) for model in last}
    print(markdown(cases, times))
    if chosen.save:
        save(RECORD, {"environment": environment(), "ratio_timed": TIMED, "cases": cases, "copies": times})
        RECORD.with_suffix(".md").write_text(markdown(cases, times))


# -- updates ---------------------------------------------------------------------------------------------------------


def largest(file: Path, layout: Layout, ratio: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the ascending positions of the d / ratio largest |h|, and whether each is positive."""
    positions, values = read(file, layout.d)
    chosen = np.sort(np.argsort(-np.abs(values), kind="stable")[: layout.d // ratio])
    return positions[chosen], values[chosen] >= 0


def read(file: Path, d: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    if file.suffix == ".npy":
        return np.arange(d), np.load(file)
    saved = np.load(file)
    return np.flatnonzero(np.unpackbits(saved["mask"], count=d)), saved["val"].astype(np.float32)


# -- bytes -----------------------------------------------------------------------------------------------------------


def measure(model: str, file: Path, layout: Layout, ratio: int) -> Case:
    """Return the bytes of every code for one update; what is written is read again and compared."""
    positions, positive = largest(file, layout, ratio)
    kept = np.zeros(layout.d, np.uint8)
    kept[positions] = 1
    signs = np.packbits(positive, bitorder="little")
    gaps, bits, by_cell = (
        encode_gaps(positions),
        encode_bits(kept, layout),
        signs_encode(signs, positions, layout.cells),
    )
    assert np.array_equal(decode_gaps(gaps, positions.size), positions)
    assert np.array_equal(decode_bits(bits, layout), kept)
    assert np.array_equal(signs_decode(by_cell, positions, layout.cells)[0], signs)
    counts = np.diff(np.searchsorted(positions, layout.offsets))
    return {
        "model": model,
        "update": file.stem,
        "ratio": f"1/{ratio}",
        "kept": positions.size,
        "log2_choices": round(log2_choices(layout.d, positions.size) / 8),
        "log2_choices_by_tensor": round(sum(map(log2_choices, layout.sizes, counts.tolist())) / 8),
        "rice": rice_encode(positions, layout.d).size,
        "rice_by_tensor": tensor_rice(positions, layout),
        "arithmetic_gaps": gaps.size,
        "arithmetic_bits": bits.size,
        "signs": signs.size,
        "signs_by_cell": by_cell.size,
    }


def log2_choices(d: int, k: int) -> float:
    """Return log2 of the number of ways to choose k of d."""
    return (math.lgamma(d + 1) - math.lgamma(k + 1) - math.lgamma(d - k + 1)) / math.log(2)


# -- time ------------------------------------------------------------------------------------------------------------


def timings(positions: NDArray[np.int64], positive: NDArray[np.bool_], layout: Layout) -> dict[str, float]:
    """Return what each code takes for one update, in copies of the vector, and the milliseconds of a copy."""
    kept, source, target = np.zeros(layout.d, np.uint8), np.ones(layout.d, np.float32), np.zeros(layout.d, np.float32)
    kept[positions] = 1
    d, k, signs, cells = layout.d, positions.size, np.packbits(positive, bitorder="little"), layout.cells
    written = rice_encode(positions, d), encode_gaps(positions), encode_bits(kept, layout)
    by_cell = signs_encode(signs, positions, cells)
    found = {
        "copy": best(lambda: np.copyto(target, source)),
        "rice, write": best(lambda: rice_encode(positions, d)),
        "rice, read": best(lambda: rice_decode(written[0], k, d)),
        "arithmetic_gaps, write": best(lambda: encode_gaps(positions)),
        "arithmetic_gaps, read": best(lambda: decode_gaps(written[1], k)),
        "arithmetic_bits, write": best(lambda: encode_bits(kept, layout)),
        "arithmetic_bits, read": best(lambda: decode_bits(written[2], layout)),
        "signs_by_cell, write": best(lambda: signs_encode(signs, positions, cells)),
        "signs_by_cell, read": best(lambda: signs_decode(by_cell, positions, cells)),
    }
    copies = {name: round(seconds / found["copy"], 2) for name, seconds in found.items()}
    return {"copy_ms": round(1000 * found["copy"], 2), **copies}


def best(work: Callable[[], Any], runs: int = 9) -> float:
    """Return the seconds of processor time that the fastest of several runs takes."""
    seconds = []
    for _ in range(runs):
        started = time.thread_time()
        work()
        seconds.append(time.thread_time() - started)
    return min(seconds)


# -- what is shown -----------------------------------------------------------------------------------------------------

HEADING = (
    "model",
    "update",
    "ratio",
    "positions",
    "log2 C(d, k)",
    "by tensor",
    "gaps restarted by tensor",
    "arithmetic, gaps",
    "arithmetic, bits",
    "signs",
    "by cell",
    "of both",
)


def markdown(cases: list[Case], times: dict[str, dict[str, float]]) -> str:
    rows = [_row(case) for case in cases]
    costs = [
        f"`{model}`, copies of the vector, of {found['copy_ms']} ms each here, one thread, ratio 1/{TIMED}: "
        + ", ".join(f"{name} {copies:g}" for name, copies in found.items() if not name.startswith("copy"))
        for model, found in times.items()
    ]
    caption = "Bytes; percentages are against `positions`, `signs`, and the two together."
    return "\n\n".join([Grid("", HEADING, rows).to_markdown(), caption, *costs]) + "\n"


def _row(case: Case) -> tuple[str, ...]:
    rice, signs = case["rice"], case["signs"]
    codes = ("log2_choices", "log2_choices_by_tensor", "rice_by_tensor", "arithmetic_gaps", "arithmetic_bits")
    changes = [f"{case[name] / rice - 1:+.1%}" for name in codes]
    both = f"{(case['signs_by_cell'] - signs) / (rice + signs):+.1%}"
    by_cell = f"{case['signs_by_cell'] / signs - 1:+.1%}"
    return (case["model"], case["update"], case["ratio"], f"{rice:,}", *changes, f"{signs:,}", by_cell, both)


if __name__ == "__main__":
    main()
