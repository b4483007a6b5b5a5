"""Encoding with residuals on a CUDA device: a cohort's rows of a ResNet-18, against copying them.

`python benchmarks/encode_cuda.py` prints the milliseconds of each compressor, and whether the codes of ternary are the
CPU's; `--save` writes `benchmarks/records/encode-cuda.json`. Codes stay on the device: positions are not yet packed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from recording import environment, save

from fedcams import Layout, compressor
from fedcams.bits.select_torch import top_positions_torch
from fedcams.feedback import encode_with_feedback_
from fedcams.models import model

ROWS = 10
RUNS = 30
SPECS = (
    "sign",
    "sign(scope=tensor)",
    "blockq",
    "topk(ratio=1/64)",
    "topk(ratio=1/16)",
    "ternary(ratio=1/16)",
    "ternary(ratio=1/2)",
)
LIMITS_MS = {"ternary(ratio=1/16)": 6.0}
RECORD = Path(__file__).parent / "records" / "encode-cuda.json"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--device", default="cuda", help="cpu tries it out; its times mean nothing")
    options.add_argument("--runs", type=int, default=RUNS)
    options.add_argument("--save", action="store_true", help=f"write {RECORD.name}")
    chosen = options.parse_args()
    layout = Layout.of(model("resnet18").build((3, 32, 32), 10))
    rows = torch.randn(ROWS, layout.d, generator=torch.Generator().manual_seed(0)).to(chosen.device)
    times = measured(rows, layout, chosen.runs)
    for name, elapsed in times.items():
        limit = f"   limit: {LIMITS_MS[name]:g} ms" if name in LIMITS_MS else ""
        print(f"{name:26} {elapsed:8.3f} ms {elapsed / times['copy']:7.1f} copies{limit}")
    equal = codes_are_equal("ternary(ratio=1/16)", rows, layout)
    print(f"the codes and residuals of ternary(ratio=1/16) are those of the CPU, bit for bit: {equal}")
    if chosen.save:
        where = {"device": torch.cuda.get_device_name(), **environment()}
        record = {"d": layout.d, "rows": ROWS, "median of runs": chosen.runs, "environment": where}
        save(RECORD, {**record, "milliseconds": times, "equal to the CPU": equal})


def measured(rows: torch.Tensor, layout: Layout, runs: int) -> dict[str, float]:
    target = rows.clone()
    times = {"copy": milliseconds(lambda: None, lambda: target.copy_(rows), runs)}
    k = layout.d // 16
    times["select 1/16"] = milliseconds(lambda: None, lambda: top_positions_torch(rows, k), runs)
    for spec in SPECS:
        codec = compressor(spec)
        work = lambda codec=codec: encode_with_feedback_(codec, layout, target, 0, keep=True)  # noqa: E731
        times[spec] = milliseconds(lambda: target.copy_(rows), work, runs)
    return times


def milliseconds(prepare: Callable[[], Any], work: Callable[[], Any], runs: int) -> float:
    """Median over the runs after three to warm up; `prepare` is not timed."""
    return sorted(timed(prepare, work) for _ in range(runs + 3))[(runs + 3) // 2]


def timed(prepare: Callable[[], Any], work: Callable[[], Any]) -> float:
    prepare()
    if not torch.cuda.is_available():
        work()
        return float("nan")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def codes_are_equal(spec: str, rows: torch.Tensor, layout: Layout) -> bool:
    """Whether two rows have the same codes and residuals here and there."""
    codec, few = compressor(spec), rows[:2]
    there, left, _ = encode_with_feedback_(codec, layout, few.clone(), 0, keep=True)
    here, kept, _ = encode_with_feedback_(codec, layout, few.cpu().clone(), 0, keep=True)
    assert left is not None
    assert kept is not None
    same = [torch.equal(there[name].cpu().view(torch.uint8), here[name].view(torch.uint8)) for name in here]
    return all(same) and torch.equal(left.cpu(), kept)


if __name__ == "__main__":
    main()
