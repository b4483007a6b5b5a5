"""Writes docs/reproduction.md and its pictures from the runs in results/. Run by `make reproduction`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median

from fedcams.experiment import Experiment
from fedcams.experiment.preset import load_preset
from fedcams.runs import Run, read_run

ROOT = Path(__file__).resolve().parents[1]
PATH, PICTURES, RESULTS = ROOT / "docs" / "reproduction.md", ROOT / "docs" / "reproduction", ROOT / "results"
LAST = 100
"""Rounds at the end over which accuracies are averaged: single rounds scatter by a point."""
PUBLISHED = {("fig1-resnet18", "FedAMS"): "90.94", ("compression-resnet18", "FedAMS"): "90.94"}
"""Final test accuracies that the paper gives in numbers (FedAMS, ε = 0.001); the rest it shows as curves."""
SECTIONS = {
    "fig1-resnet18": "Server optimizers, ResNet-18",
    "compression-resnet18": "Compressors, ResNet-18",
    "fig1-convmixer": "Server optimizers, ConvMixer-256-8",
    "compression-convmixer": "Compressors, ConvMixer-256-8",
}
CHARTS = {
    "test_accuracy-rounds": "Test accuracy against rounds",
    "test_accuracy-bytes_up": "Test accuracy against bytes sent up",
    "gamma-rounds": "Dissimilarity γ of every round",
}
INTRO = """\
# Reproduction

The paper's experiments on CIFAR-10, run at full length: 500 rounds, 10 of 100 clients a round, 3 local epochs, batches
of 20, local SGD with learning rate 0.01; crops and flips. Where the paper and its published code differ or are silent:

- **bias correction** is on, as in the published code; the algorithms in the paper have none;
- **80 % rule**: every client trains on the first 80 % of its shard, 400 of 500 images, as in the published code: 60
  local steps a round;
- **precision**: bfloat16 activations and matrix products with float32 master weights, by the engine `graphs`, which
  takes sums in a fixed order: a round that is repeated gives the same bits;
- **one seed**, 1, fixed before anything was run.

*Accuracy* is the mean over the last 100 rounds, with the last round's and the best one's beside it. *Up* is what all
clients sent in all rounds, batch-norm buffers included, *smaller* how many times less than dense. Every row is made by
`fedcams run PRESET --only LABEL --data DIR --device cuda`, and all of a section's by `fedcams run PRESET`; this page by
`make reproduction` from [results/](../results).
"""


def reproduction() -> str:
    """The whole page."""
    return "\n".join([INTRO, *(line for preset in SECTIONS for line in _section(preset))]).rstrip() + "\n"


def _section(preset: str) -> Iterator[str]:
    done = _runs(preset)
    yield from (f"## {SECTIONS[preset]}", "")
    yield from (f"`fedcams run {preset}`", "")
    if done:
        yield from _table(preset, done)
        yield from (f"![{text}](reproduction/{name})\n" for name, text in _pictures(preset, done))
        yield _where(done[0])
    missing = [e.label for e in load_preset(preset).experiments if e.label not in {r.experiment.label for r in done}]
    if missing:
        yield from (f"Not run yet: {', '.join(missing)}.", "")


def _table(preset: str, done: list[Run]) -> Iterator[str]:
    yield "| run | accuracy | last | best | paper | up | smaller | seconds a round | minutes |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    for run in done:
        scores = [record.test_accuracy or 0.0 for record in run.records]
        up, dense = (sum(getattr(r, key) for r in run.records) for key in ("wire_up", "wire_down"))
        seconds = [timing["seconds"] for timing in run.timings]
        accuracies = (f"{100 * value:.2f}" for value in (fmean(scores[-LAST:]), scores[-1], max(scores)))
        published = PUBLISHED.get((preset, run.experiment.label), "")
        sizes = (f"{up / 1e9:.1f} GB", f"{dense / up:.1f}x")
        times = (f"{median(seconds):.3f}", f"{sum(seconds) / 60:.1f}")
        yield "| " + " | ".join([run.experiment.label, *accuracies, published, *sizes, *times]) + " |"
    yield ""


def _runs(preset: str) -> list[Run]:
    """The finished runs of a preset in its order; one that another preset shares is taken from there."""
    known = {_key(run.experiment): run for run in _finished()}
    return [known[key] for experiment in load_preset(preset).experiments if (key := _key(experiment)) in known]


def _finished() -> Iterator[Run]:
    for path in sorted(RESULTS.glob("*/*/rounds.jsonl")):
        run = read_run(path.parent)
        if run.finished:
            yield run


def _key(experiment: Experiment) -> tuple[object, ...]:
    values = experiment.to_dict()
    return tuple(values[key] for key in sorted(values) if key not in ("label", "measure_gamma", "engine"))


def _pictures(preset: str, done: list[Run]) -> Iterator[tuple[str, str]]:
    measured = any(record.gamma is not None for run in done for record in run.records[:1])
    for name, text in CHARTS.items():
        if name != "gamma-rounds" or measured:
            yield f"{preset}-{name}.png", text


def _where(run: Run) -> str:
    about = run.environment
    return f"{about['device']}, torch {about['torch']}, Python {about['python']}; one run of each.\n"


def draw() -> None:
    """The pictures, by `fedcams report`."""
    from fedcams.report import report

    PICTURES.mkdir(exist_ok=True)
    for preset in SECTIONS:
        done = _runs(preset)
        if done:
            with tempfile.TemporaryDirectory() as folder:
                report([run.path for run in done], Path(folder))
                for name, _ in _pictures(preset, done):
                    shutil.copy(Path(folder) / "figures" / name.removeprefix(f"{preset}-"), PICTURES / name)


if __name__ == "__main__":
    draw()
    PATH.write_text(reproduction(), "utf-8")
    print(f"{PATH.name} written")
