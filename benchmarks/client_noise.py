"""Accuracy with noise at the client: the table of docs/privacy.md, in the setting of the preset `private-digits`.

Keys of noise come from the operating system, so numbers differ a little each time.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from recording import environment, save

from fedcams.compress import compressor
from fedcams.experiment import Experiment, build
from fedcams.experiment.preset import load_preset
from fedcams.privacy import Privacy

RECORD = Path(__file__).parent / "records" / "client-noise.json"
SEEDS = (1, 2, 3)
CLIP = 0.3
UPLINKS = ("identity", "ternary(ratio=1/8)")
HEADS = "| noise | uplink | `local_epsilon` | `epsilon` | accuracy |\n|--:|---|--:|--:|--:|\n"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--save", action="store_true", help=f"write {RECORD.name} and {RECORD.stem}.md")
    torch.set_num_threads(1)
    wanted = options.parse_args().save
    rows = [row(noise, uplink) for noise, uplink in itertools.product((0.5, 1, 2), UPLINKS)] + [row(0, "identity")]
    text = HEADS + "".join(map(line, rows))
    print(text)
    if wanted:
        save(RECORD, {"clip": CLIP, "seeds": SEEDS, "environment": environment(), "rows": rows})
        RECORD.with_suffix(".md").write_text(text, "utf-8")


def row(noise: float, uplink: str) -> dict[str, Any]:
    """Return what came out of a setting, by seed."""
    found = [dict(outcome(experiment(noise, uplink, seed))) for seed in SEEDS]
    return {"noise": noise, "uplink": uplink} | {key: [each.get(key) for each in found] for key in found[0]}


def experiment(noise: float, uplink: str, seed: int) -> Experiment:
    """Return the preset's run without privacy, with this noise at the client."""
    plain = next(each for each in load_preset("private-digits").experiments if each.label == "FedAvg")
    privacy = Privacy.parse(f"client(clip={CLIP}, noise={noise:g})" if noise else "none")
    return dataclasses.replace(plain, privacy=privacy, uplink=compressor(uplink), seed=seed)


def outcome(chosen: Experiment) -> Iterator[tuple[str, float | None]]:
    """Run an experiment; yield the accuracy of its averaged model and what it has spent."""
    built = build(chosen)
    state = built.state
    for _ in range(chosen.rounds):
        state, record = built.simulation.advance_(state)
    yield "accuracy", record.averaged_accuracy
    yield from ((key, record.probes.get(key)) for key in ("local_epsilon", "epsilon"))


def line(found: dict[str, Any]) -> str:
    """Return a row of the table; ε by the lowest and the highest seed."""
    spent = [between(found[key]) for key in ("local_epsilon", "epsilon")]
    accuracy = 100 * fmean(found["accuracy"])
    return f"| {found['noise']:g} | `{found['uplink']}` | {' | '.join(spent)} | {accuracy:.1f} |\n"


def between(values: list[float | None]) -> str:
    """Return the range of values in words; without any, ε is infinite."""
    known = [value for value in values if value is not None]
    ends = dict.fromkeys(f"{value:.2g}" for value in (min(known, default=0), max(known, default=0)))
    return " to ".join(ends) if known else "∞"


if __name__ == "__main__":
    main()
