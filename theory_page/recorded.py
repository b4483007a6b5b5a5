"""Does leaving the floor help? The same question as on digits, for recorded runs: Shakespeare's plays and CIFAR-10."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean

from fedcams.experiment.sweep import score
from fedcams.runs import Run
from reproduction.runs import NEAR, Done, Results, ahead, spread, with_common_seeds
from reproduction.tables import missing, named, table
from reproduction.words import MODELS

ADAPTIVE = ("FedAMS", "FedAdam", "FedAMSGrad", "FedYogi")
TWINS = {"FedAMSGrad": "FedAdam"}
"""Methods of the first figure whose twin is that of another; the others have their own."""
HEADS = "ε | rate on the floor, lr/√ε | off the floor at the end | accuracy | averaged"


@dataclass(frozen=True)
class Study:
    """Runs that differ only in rate and ε, and what to say about them."""

    preset: str
    title: str
    text: str
    more: tuple[str, str, str] = ("", "", "")
    """A run of another preset that belongs here: that preset, its label there, and its label here."""


STUDIES = (
    Study(
        "adaptivity-shakespeare",
        "Shakespeare's plays",
        "These runs train the LSTM of [`shakespeare-lstm`](reproduction.md#shakespeares-plays). The columns\n"
        "are as above.\n",
        ("shakespeare-lstm", "FedAMS", "eps=1e-6, rate 10"),
    ),
    Study(
        "adaptivity-resnet18",
        "CIFAR-10, 60 rounds",
        "These runs train ResNet-18 as in the paper's first figure, with bias correction, but for 60 rounds. The\n"
        "table shows FedAvgM and each ε with its best rate, chosen from the same runs.\n",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One setting: its ε (None for FedAvgM), its rate on the floor, and what came out, as means over seeds."""

    eps: float | None
    rate: float
    accuracies: tuple[float, ...]
    """Of the last models of each seed, in percent, over the last fifth of the rounds."""
    averaged: float | None
    off_floor: float
    seeds: tuple[int, ...]

    @property
    def accuracy(self) -> float:
        """The mean over the seeds."""
        return fmean(self.accuracies)

    @property
    def name(self) -> str:
        """What the page calls it."""
        return "FedAvgM" if self.eps is None else f"{self.eps:g}"


def rows(results: Results, study: Study) -> list[Row]:
    """Return the settings of a study that were run; none unless FedAvgM and FedAMS are among them."""
    made = sorted(map(_row, _settings(results, study)), key=lambda row: (-(row.eps or 1), row.rate))
    return made if len({row.eps is None for row in made}) == 2 else []


def _settings(results: Results, study: Study) -> list[Done]:
    found = results.of(study.preset)
    preset, label, here = study.more
    found += [Done(here, done.runs) for done in (results.of(preset) if preset else []) if done.label == label]
    return with_common_seeds(found)


def _row(done: Done) -> Row:
    family, _, rate = done.label.partition(", rate ")
    return Row(
        eps=None if family == "FedAvgM" else float(family.removeprefix("eps=")),
        rate=float(rate),
        accuracies=tuple(100 * _last(run) for run in done.runs),
        averaged=done.averaged,
        off_floor=fmean(run.records[-1].probes.get("off_floor") or 0.0 for run in done.runs),
        seeds=tuple(done.seeds),
    )


def _last(run: Run) -> float:
    found = score([replace(record, averaged_accuracy=None) for record in run.records])
    assert found is not None
    return found


def best_rates(found: list[Row]) -> list[Row]:
    """Return the row with the highest accuracy for every ε, in their order."""
    return [
        max((row for row in found if row.eps == eps), key=lambda row: row.accuracy)
        for eps in dict.fromkeys(row.eps for row in found)
    ]


# -- the page ----------------------------------------------------------------------------------------------------------


def sections(results: Results) -> Iterator[str]:
    """Yield a section for every study that has runs, and one for the twins of the paper's first figure."""
    for study in STUDIES:
        if found := rows(results, study):
            yield f"#### {study.title}\n"
            yield study.text
            shown = found if study.more[0] else best_rates(found)
            yield from table(HEADS, "rrrrr", list(map(_cells, shown)))
            yield _verdict(found)
            yield _places(_settings(results, study))
            yield from missing(results, study.preset)
    yield from twins(results)


def _cells(row: Row) -> list[str]:
    off = "" if row.eps is None else f"{100 * row.off_floor:.3g}%"
    averaged = "" if row.averaged is None else f"{row.averaged:.2f}"
    return [row.name, f"{row.rate:g}", off, spread(list(row.accuracies)), averaged]


def _verdict(found: list[Row]) -> str:
    fedavgm, fedams = ([row for row in found if (row.eps is None) == plain] for plain in (True, False))
    plain, best = (max(rows, key=lambda row: row.accuracy) for rows in (fedavgm, fedams))
    gain = best.accuracy - plain.accuracy
    equal = ", which counts as equal" if abs(gain) <= NEAR else ""
    seeds = named(list(best.seeds))
    return (
        f"The best FedAMS has ε = {best.name}, with {100 * best.off_floor:.3g}% of coordinates off the floor at the\n"
        f"end. The difference from FedAvgM is {gain:+.2f} points{equal} (seed{'s' * (len(best.seeds) > 1)} {seeds}).\n"
        f"{_luck(len(fedams), len(fedavgm))}"
    )


def _luck(fedams: int, fedavgm: int) -> str:
    """Say so if FedAMS had more settings to choose from: the best of more is higher by chance."""
    if fedams <= fedavgm:
        return ""
    return (
        f"The best FedAMS is chosen from {fedams} settings and the best FedAvgM from {fedavgm}, which favours FedAMS.\n"
    )


def _places(settings: list[Done]) -> str:
    """Return the devices and versions; if they differ, the settings that did not run where most did."""
    places = ["; ".join(done.environments) for done in settings]
    usual = max(places, key=places.count)
    others = [
        f"; {' and '.join(done.label for done, place in zip(settings, places, strict=True) if place == other)}: {other}"
        for other in dict.fromkeys(places)
        if other != usual
    ]
    return f"{usual}{''.join(others)}.\n"


def twins(results: Results) -> Iterator[str]:
    """Yield the methods of the paper's first figure, each next to its FedAvgM twin."""
    pairs = [(name, *pair) for model, name in MODELS.items() for pair in _pairs(results, f"fig1-{model}")]
    if not pairs:
        return
    yield "#### CIFAR-10, the twins of the paper's first figure\n"
    yield (
        "The twin of FedAMS is the FedAvgM that it equals while v̂ is on its floor. The others add ε to the root, and\n"
        "come close to their twins as long as √v̂ is small compared with ε.\n"
    )
    cells = [
        [
            model,
            own.label,
            f"{own.accuracy:.2f}",
            f"{twin.accuracy:.2f}",
            spread(ahead(own, twin), "+"),
            named(own.seeds),
        ]
        for model, own, twin in pairs
    ]
    yield from table("model | method | accuracy | its FedAvgM twin | difference | seeds", "llrrrr", cells)
    near = sum(abs(own.accuracy - twin.accuracy) <= NEAR for _, own, twin in pairs)
    yield (
        f"Accuracies are means over the last 100 of 500 rounds. In {near} of {len(pairs)} pairs the difference is at "
        f"most\n{NEAR} points, which counts as equal.\n"
    )


def _pairs(results: Results, preset: str) -> Iterator[tuple[Done, Done]]:
    known = {done.label: done for done in results.of(preset)}
    for label in ADAPTIVE:
        twin = known.get(f"FedAvgM, twin of {TWINS.get(label, label)}")
        if (own := known.get(label)) and twin:
            first, second = with_common_seeds([own, twin])
            yield first, second
