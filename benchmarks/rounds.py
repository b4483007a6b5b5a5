"""Rounds of a federation against the same rounds written by hand. Run by `make bench`.

The same as `fedcams bench`; `--save` writes `benchmarks/records/rounds.json` and `rounds.md`.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from recording import environment, save
from rich.console import Console

from fedcams.bench.rounds import LARGE, MODELS, PARTITIONS, UPLINKS, measure, share, shares, speed
from fedcams.bench.timing import REPEATS

RECORD = Path(__file__).parent / "records" / "rounds.json"
CAPTION = """
*By hand* is the same round written in plain PyTorch: a loop over clients with `torch.optim`, scaled sign with error
feedback, and an AMSGrad step. *FedAvg's accuracy* is the mean over the last ten of 60 rounds. *Compression, counting,
records* is their share of a round of `{large}`. Best of {runs} alternating timings on {cores} cores ({cpu}), Python
{python}, torch {torch}, numba {numba}: `make bench`, [record](../benchmarks/records/rounds.json).
"""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--turns", type=int, default=10, help=f"turns of {REPEATS} timings each; the best counts")
    options.add_argument("--save", action="store_true", help=f"write {RECORD.name} and {RECORD.stem}.md")
    chosen = options.parse_args()
    cases = [measure(model, partition, chosen.turns) for model in MODELS for partition in PARTITIONS]
    found = [share(uplink, chosen.turns) for uplink in UPLINKS]
    tables = speed(cases), shares(found)
    Console().print(*(table.to_rich() for table in tables))
    if chosen.save:
        where, runs = environment(), REPEATS * chosen.turns
        measured = {
            "cases": [dataclasses.asdict(case) for case in cases],
            "shares": [dataclasses.asdict(one) for one in found],
        }
        save(RECORD, {"runs": runs, "environment": where, **measured})
        caption = CAPTION.format(**where, runs=runs, large=LARGE)
        RECORD.with_suffix(".md").write_text("\n\n".join(table.to_markdown() for table in tables) + "\n" + caption)


if __name__ == "__main__":
    main()
