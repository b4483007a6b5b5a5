"""Entries: what a method sent and reached, as a TOML file that people can read, made from finished runs."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from fedcams.errors import SpecError
from fedcams.experiment import Experiment
from fedcams.experiment.experiment import read_toml
from fedcams.method import Method
from fedcams.partition import Partition
from fedcams.registry import params
from fedcams.report import Method as Runs
from fedcams.report import collect
from fedcams.report.series import AVERAGED, values
from fedcams.report.summary import final_score
from fedcams.runs import Run
from fedcams.sampler import Sampler

ROOT = Path(__file__).resolve().parents[1]
ENTRIES = ROOT / "leaderboard" / "entries"
SETTING = ("task", "model", "partition", "clients", "train_fraction", "sampler", "local", "rounds")
"""What entries that are compared have in common."""
REWRITE = "write it with `python -m leaderboard add`"


def _is_percent(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value <= 100


SOUND: dict[str, Callable[[Any], bool]] = {
    "label": lambda value: isinstance(value, str),
    "setting": lambda value: isinstance(value, dict),
    "method": lambda value: isinstance(value, dict),
    "bytes_up": lambda value: isinstance(value, int) and value > 0,
    "bytes_down": lambda value: isinstance(value, int) and value > 0,
    "accuracy": _is_percent,
    "averaged": lambda value: value is None or _is_percent(value),
    "seeds": lambda value: isinstance(value, list) and bool(value),
    "source": lambda value: isinstance(value, str),
    "device": lambda value: isinstance(value, str),
    "versions": lambda value: isinstance(value, str),
}
"""Key of an entry -> whether the page can show its value."""


@dataclass(frozen=True)
class Entry:
    """One method in one setting; numbers are means over its seeds."""

    label: str
    setting: dict[str, str | int]
    """The task, the model and so on, by the keys of an experiment."""
    method: dict[str, str | int | bool]
    """The fields of the method that are not defaults."""
    bytes_up: int
    """Of all clients in all rounds, headers and buffers included."""
    bytes_down: int
    accuracy: float
    """Test accuracy in percent, mean over the last fifth of the rounds."""
    averaged: float | None
    """That of the averaged model at the end; None if the method keeps no average."""
    seeds: list[int]
    source: str
    """Where the runs are."""
    device: str
    versions: str

    @property
    def total(self) -> int:
        """Bytes up and down."""
        return self.bytes_up + self.bytes_down

    @property
    def dense(self) -> bool:
        """Whether nothing is compressed."""
        return not self.method.keys() & {"uplink", "downlink", "buffers"}

    @classmethod
    def of(cls, method: Runs, label: str | None, source: str | None) -> Self:
        """Return the entry of runs that differ only in the seed.

        Refuses runs without all their rounds, without accuracy, and several with one seed.
        """
        if short := [run.path for run in method.runs if len(run.records) != run.experiment.rounds]:
            raise SpecError(f"{method.label}: {short[0]} is not finished; run it to its end, then add it")
        seeds = [run.experiment.seed for run in method.runs]
        if twice := [seed for seed in seeds if seeds.count(seed) > 1]:
            raise SpecError(f"{method.label}: several runs have seed {twice[0]}; name only one of them")
        accuracies = [_percent(final_score(run), run) for run in method.runs]
        averaged = [last for run in method.runs if (last := _last_averaged(run)) is not None]
        return cls(
            label or method.label,
            {key: _spelled(getattr(method.experiment, key)) for key in SETTING},
            _not_default(method.experiment),
            round(fmean(_sum(run, "wire_up") for run in method.runs)),
            round(fmean(_sum(run, "wire_down") for run in method.runs)),
            _hundredths(accuracies),
            _hundredths(averaged) if len(averaged) == len(method.runs) else None,
            seeds,
            source or _place(method.runs[0].path.parent),
            _each(str(run.environment.get("device", "not recorded")) for run in method.runs),
            _each(_versions(run.environment) for run in method.runs),
        )

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the entry in a file; refuses missing and unknown keys, and values that cannot be compared."""
        found = {"averaged": None, **read_toml(path)}
        setting = found.get("setting")
        odd = found.keys() ^ {field.name for field in fields(cls)}
        odd |= {f"setting.{key}" for key in setting.keys() ^ set(SETTING)} if isinstance(setting, dict) else set()
        if odd:
            raise SpecError(f"{path}: missing or unknown: {', '.join(sorted(odd))}; {REWRITE}")
        for key, sound in SOUND.items():
            if not sound(found[key]):
                raise SpecError(f"{path}: {key} = {found[key]!r}; {REWRITE}")
        return cls(**found)

    def to_toml(self) -> str:
        """Return the entry as TOML: numbers first, then the setting and the method."""
        tables = {"setting": self.setting, "method": self.method}
        plain = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in tables}
        lines = [_line(key, value) for key, value in plain.items() if value is not None]
        for name, table in tables.items():
            lines += ["", f"[{name}]", *(_line(key, value) for key, value in table.items())]
        return "\n".join(lines) + "\n"

    @property
    def group(self) -> str:
        """The setting in short, as part of a file's name; settings that differ in other numbers share it."""
        shared = [self.setting["task"], self.setting["model"], str(self.setting["partition"]).partition("(")[0]]
        return slug(" ".join(map(str, shared)))


def add(runs: Sequence[Path], folder: Path, label: str | None = None, source: str | None = None) -> list[Path]:
    """Write an entry for each method among the runs into `folder`, over older ones of its name; return the files.

    Runs that differ only in the seed are one entry. Each setting has its own folder. Refuses a label for several
    entries, and one that makes the file name of another entry.
    """
    methods = collect(runs).methods
    if label is not None and len(methods) > 1:
        names = ", ".join(method.label for method in methods)
        raise SpecError(f"--label {label}: these runs are {len(methods)} methods ({names}); add them one by one")
    entries = [Entry.of(method, label, source) for method in methods]
    return [_write(entry, folder) for entry in entries]


def _write(entry: Entry, folder: Path) -> Path:
    path = _home(entry, folder) / f"{slug(entry.label)}.toml"
    if not slug(entry.label):
        raise SpecError(f"label {entry.label!r}: its file needs a name; give --label with letters a-z or digits")
    if path.exists() and (old := Entry.read(path).label) != entry.label:
        raise SpecError(f"label {entry.label!r}: {path.name} is the file of {old!r}; give another one with --label")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(entry.to_toml(), "utf-8")
    return path


def _home(entry: Entry, folder: Path) -> Path:
    """Return the first folder of the entry's group, `group`, `group-2` and so on, without entries of other settings."""
    names = itertools.chain([entry.group], (f"{entry.group}-{number}" for number in itertools.count(2)))
    places = (folder / name for name in names)
    return next(at for at in places if all(Entry.read(path).setting == entry.setting for path in at.glob("*.toml")))


def read_entries(folder: Path) -> list[Entry]:
    """Return all entries below a folder, by the names of their files."""
    return [Entry.read(path) for path in sorted(folder.rglob("*.toml"))]


def slug(text: str) -> str:
    """Return a text as part of a file's name: lower case, letters, digits and dots joined by `-`."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")


def _line(key: str, value: Any) -> str:
    """Return a line of TOML; characters are written as they are, since it lacks JSON's pairs of escapes."""
    return f"{key} = {json.dumps(value, ensure_ascii=False)}"


def _each(texts: Iterable[str]) -> str:
    """Return the distinct texts in their order, as `a; b`."""
    return "; ".join(dict.fromkeys(texts))


def _versions(environment: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {environment[name]}" for name in ("fedcams", "torch", "python") if name in environment)


def _not_default(experiment: Experiment) -> dict[str, Any]:
    given, default = experiment.method.to_dict(), Method().to_dict()
    return {key: given[key] for key in params(Method) if key not in SETTING and given[key] != default[key]}


def _spelled(value: Any) -> str | int:
    """Partitions and samplers with every parameter, since they say how hard a setting is."""
    if isinstance(value, int):
        return value
    return value.spelled_out() if isinstance(value, Partition | Sampler) else str(value)


def _percent(score: float | None, run: Run) -> float:
    if score is None:
        raise SpecError(f"{run.path}: nothing was evaluated, so there is no accuracy to compare")
    return 100 * score


def _hundredths(percents: Sequence[float]) -> float:
    """Return the mean with two digits; 90.125 is 90.12 as on other pages, even if rounding left 90.12500000000001."""
    return round(round(fmean(percents), 9), 2)


def _last_averaged(run: Run) -> float | None:
    known = [value for value in values(run, AVERAGED).tolist() if value == value]
    return 100 * known[-1] if known else None


def _sum(run: Run, key: str) -> int:
    return sum(getattr(record, key) for record in run.records)


def _place(folder: Path) -> str:
    """The folder as others find it, if it is part of the repository."""
    whole = folder.resolve()
    return whole.relative_to(ROOT).as_posix() if whole.is_relative_to(ROOT) else "not published"
