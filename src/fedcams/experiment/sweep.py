"""Sweeps: presets whose runs contain placeholders, and grids of the values to try for them.

[[run]]
label = "FedAMS"
server = "fedams(lr={lr}, eps={eps})"
grid = { lr = [0.01, 0.1, 1], eps = [1e-4, 1e-3] }      # six settings, each with every seed

A key of a grid names a `{placeholder}` in the run's values, or a key of the experiment, as in
`uplink = ["sign", "identity"]`. A grid at the top level applies to runs without their own.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fedcams.durable import os_errors, write_text
from fedcams.errors import FedcamsError, SpecError, UpdateError
from fedcams.escaping import csv_cell, plain
from fedcams.experiment.experiment import Experiment
from fedcams.experiment.preset import KEYS, Table, check_labels, folder_name, folders, read_file, read_settings
from fedcams.recipes import merged
from fedcams.registry.fields import nearest, show
from fedcams.registry.numbers import exact
from fedcams.simulation import RoundRecord

LAST_PART = 0.2
"""Final accuracies are means over this last part of the rounds."""
PLACE = re.compile(r"\{(\w+)\}")
OPEN_KEYS = tuple(key for key in KEYS if key not in ("label", "seed"))
Runner = Callable[[Experiment, Path], Sequence[RoundRecord]]
"""Runs an experiment in a folder, or the rounds that are left, and returns its records."""


@dataclass(frozen=True)
class Trial:
    """One setting of one run, with one experiment per seed."""

    label: str
    setting: str
    experiments: tuple[Experiment, ...]

    def folders(self, below: Path) -> dict[Path, Experiment]:
        """Return its experiments by the folder of each one, below a common one."""
        return {below / folder_name(experiment): experiment for experiment in self.experiments}


@dataclass(frozen=True)
class Result:
    """The result of one trial."""

    label: str
    setting: str
    scores: list[float]
    """The accuracy for each seed whose updates stayed finite."""
    diverged: int = 0
    """The number of seeds whose updates did not stay finite."""

    @property
    def accuracy(self) -> float | None:
        """The mean over the seeds; None if one of them diverged or none was tested."""
        return fmean(self.scores) if self.scores and not self.diverged else None

    @property
    def spread(self) -> float | None:
        """The standard deviation over the seeds; None for fewer than two, or if one diverged."""
        return stdev(self.scores) if len(self.scores) > 1 and not self.diverged else None

    @property
    def verdict(self) -> str:
        """The accuracy in words, or the reason why there is none."""
        if self.accuracy is None:
            return f"diverged (seeds: {self.diverged})" if self.diverged else "not tested"
        return f"{self.accuracy:.4f}" + ("" if self.spread is None else f" ± {self.spread:.4f}")


def load_sweep(path: Path, settings: Mapping[str, str] | None = None, only: Collection[str] = ()) -> list[Trial]:
    """Return every setting of every run in a sweep file; refuses grids that do not match its placeholders.

    `settings` change keys of every run, as `-s` does, and take the place of their values in grids. `only` names the
    labels of the runs to keep; all are kept if it is empty.
    """
    file = read_file(path, also=("grid",))
    check_labels(only, [_label(run) for run in file.runs])
    chosen = [run for run in file.runs if not only or _label(run) in only]
    values, seeds = read_settings(settings or {}, [_label(run) for run in chosen])
    runs = [_override(run, values) for run in chosen]
    seeds = file.seeds if not {"seed", "seeds"} & (settings or {}).keys() else seeds
    trials = [trial for run in runs for trial in _trials(run, seeds)]
    folders([experiment for trial in trials for experiment in trial.experiments], path.name)
    return trials


def sweep(trials: Sequence[Trial], folder: Path, runner: Runner, finished: Collection[Trial] = ()) -> list[Result]:
    """Try every setting of `load_sweep`, keep the leaderboard in `folder` up to date, and return the results.

    `runner` runs each experiment in its own folder below `folder`. A runner that skips finished rounds makes the sweep
    resumable. It gets the `finished` trials first, so that the leaderboard has all of them whenever the sweep stops.
    """
    results: dict[Trial, Result] = {}
    for trial in in_turn(trials, finished):
        results[trial] = _result(trial, folder, runner)
        if len(results) >= len(finished):
            write_leaderboard([results[each] for each in trials if each in results], folder, of=len(trials))
    return [results[trial] for trial in trials]


def in_turn(trials: Sequence[Trial], finished: Collection[Trial]) -> list[Trial]:
    """Return trials in the order in which `sweep` asks for them."""
    return sorted(trials, key=lambda trial: trial not in finished)


def score(records: Sequence[RoundRecord]) -> float | None:
    """Return the `final_accuracy` of averaged models if there are any, otherwise that of the last models."""
    averaged = final_accuracy(records, "averaged_accuracy")
    return final_accuracy(records, "test_accuracy") if averaged is None else averaged


def final_accuracy(records: Sequence[RoundRecord], key: str) -> float | None:
    """Return the mean of an accuracy, such as `test_accuracy`, over the last fifth of the rounds.

    If none of these was evaluated, it is the last accuracy there is; None if no round was evaluated.
    """
    tested = [(record.round, found) for record in records if (found := getattr(record, key)) is not None]
    before = (1 - LAST_PART) * len(records)
    last = [accuracy for number, accuracy in tested if number > before] or [accuracy for _, accuracy in tested[-1:]]
    return fmean(last) if last else None


def has_diverged(records: Sequence[RoundRecord]) -> bool:
    """Return whether every client was refused in the last round with a cohort: their training was not finite."""
    asked = [record for record in records if record.cohort]
    return bool(asked) and len(asked[-1].refused) == len(asked[-1].cohort)


# -- from a file to trials -----------------------------------------------------------------------------------------


def _label(run: Table) -> str:
    return str(run.values.get("label", "run"))


def _override(run: Table, values: Mapping[str, Any]) -> Table:
    grid = run.values.get("grid", {})
    left = {key: tried for key, tried in grid.items() if key not in values} if isinstance(grid, dict) else grid
    return Table(run.where, merged(run.values, values) | ({"grid": left} if "grid" in run.values else {}))


def _trials(run: Table, seeds: list[dict[str, Any]]) -> Iterator[Trial]:
    grid = run.values.get("grid", {})
    fixed = {key: value for key, value in run.values.items() if key != "grid"}
    places = {place for value in fixed.values() if isinstance(value, str) for place in PLACE.findall(value)}
    _check_grid(grid, places, run.where)
    label = _label(run)
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        words = {key: _spell(value) for key, value in chosen.items()}
        setting = ", ".join(f"{key}={word}" for key, word in words.items())
        filled = {key: _fill(value, words) for key, value in fixed.items()}
        filled = merged(filled, {key: value for key, value in chosen.items() if key not in places})
        table = Table(run.where, filled | {"label": f"{label}, {setting}" if setting else label})
        yield Trial(label, setting, tuple(table.experiment(**seed) for seed in seeds))


def _fill(value: Any, words: Mapping[str, str]) -> Any:
    return PLACE.sub(lambda place: words[place[1]], value) if isinstance(value, str) else value


def _check_grid(grid: Any, places: set[str], where: str) -> None:
    if not isinstance(grid, dict) or not all(isinstance(values, list) and values for values in grid.values()):
        raise SpecError(f"{where}: grid={grid!r}; give a list of values for each key, as in grid = {{ lr = [0.1, 1] }}")
    for key in grid:
        if key not in places and key not in OPEN_KEYS:
            if key in KEYS:  # each setting gets its own label, and runs with every seed
                raise SpecError(f"{where}: grid: {key} cannot vary in a grid; for several seeds, give seeds = [1, 2]")
            close = nearest(key, [*places, *OPEN_KEYS])
            raise SpecError(f"{where}: grid: no value contains {{{key}}}, and no key has this name{close}")
    for place in sorted(places - grid.keys()):
        raise SpecError(f"{where}: the grid has no values for {{{place}}}{nearest(place, grid)}; give {place} = [...]")


def _spell(value: Any) -> str:
    """Return a value as it is written in a spec string."""
    if isinstance(value, str):
        return value
    return show(exact(value) if isinstance(value, float) and math.isfinite(value) else value)


# -- the leaderboard -----------------------------------------------------------------------------------------------


def _result(trial: Trial, folder: Path, runner: Runner) -> Result:
    scores, diverged = [], 0
    for path, experiment in trial.folders(folder).items():
        try:
            records = runner(experiment, path)
        except UpdateError:  # a sweep may try steps that are too large
            diverged += 1
            continue
        if has_diverged(records):
            diverged += 1
        else:
            scores.append(score(records))
    return Result(trial.label, trial.setting, [value for value in scores if value is not None], diverged)


def ranking(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Return the results by label, the best setting first; labels keep the order of the file."""
    ranked: dict[str, list[Result]] = {result.label: [] for result in results}
    for result in sorted(results, key=_place):
        ranked[result.label].append(result)
    return ranked


def write_leaderboard(results: Sequence[Result], folder: Path, of: int = 0) -> None:
    """Write `leaderboard.md` and `leaderboard.csv` of the results so far, `of` how many, into `folder`."""
    ranked = ranking(results)
    with os_errors(FedcamsError, "write to", folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "leaderboard.md", _markdown(ranked, f"{len(results)} of {of}" if len(results) < of else ""))
        write_text(folder / "leaderboard.csv", _csv(ranked))


def _place(result: Result) -> float:
    return float("inf") if result.accuracy is None else -result.accuracy


def _markdown(ranked: Mapping[str, Sequence[Result]], partly: str) -> str:
    best = sorted((results[0] for results in ranked.values()), key=_place)
    about = (
        "Test accuracy, mean over the last fifth of the rounds and over seeds, of averaged models where there are any."
    )
    lines = ["# Leaderboard", "", about, *([f"Only {partly} settings are finished so far."] if partly else [])]
    lines += ["", "## Best setting of each run", "", "| run | setting | accuracy |", "|---|---|---|"]
    lines += [f"| {plain(result.label)} | {plain(result.setting)} | {result.verdict} |" for result in best]
    for label, results in ranked.items():
        lines += ["", f"## {plain(label)}", "", "| setting | accuracy |", "|---|---|"]
        lines += [f"| {plain(result.setting)} | {result.verdict} |" for result in results]
    return "\n".join(lines) + "\n"


def _csv(ranked: Mapping[str, Sequence[Result]]) -> str:
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(["label", "setting", "accuracy", "std", "seeds", "diverged"])
    for result in itertools.chain.from_iterable(ranked.values()):
        seeds = len(result.scores) + result.diverged
        label, setting = csv_cell(result.label), csv_cell(result.setting)
        rows.writerow([label, setting, result.accuracy, result.spread, seeds, result.diverged])
    return out.getvalue()
