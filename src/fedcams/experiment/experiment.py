"""Experiment: everything that defines a run, as spec strings; one TOML file holds exactly one."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import fedcams.engines
import fedcams.experiment.placeholders
import fedcams.models
import fedcams.partition
import fedcams.probes
import fedcams.sampler
import fedcams.tasks  # noqa: F401  (what they register is what specs may name)
from fedcams.errors import SpecError
from fedcams.method import Method
from fedcams.models import Model
from fedcams.partition import Partition
from fedcams.probes import DEFAULT, Probe
from fedcams.registry import Number, integer, nested, number, params, resolve, several, text
from fedcams.sampler import Sampler
from fedcams.tasks import Task

FIRST = ("label", "task", "model", "partition", "clients", "train_fraction", "sampler")
"""The first keys of a TOML file; those of the method follow, and then the rest."""
RETIRED = ("measure_gamma",)
"""Keys that files of version 0.1 have, and that are still read."""


@dataclass(frozen=True)
class Experiment(Method):
    """One run: a method, its data, model and clients, and the number of rounds.

    Every field takes a value or a spec string. Refused: cohorts larger than the population, schedules longer than the
    run, and everything that `Method` refuses.

    Examples:
        >>> from fedcams.experiment import Experiment
        >>> experiment = Experiment(label="mine", uplink="sign", sampler="uniform(n=5)", clients=50, rounds=20)
        >>> str(experiment.method.uplink), Experiment.from_dict(experiment.to_dict()) == experiment
        ('sign', True)
    """

    label: str = text("run", doc="the run's name in reports, and part of its folder's name")
    task: Task = nested("task", "digits", doc="the data, the loss and the metric")
    model: Model = nested("model", "mlp", doc="the network")
    partition: Partition = nested("partition", "iid", doc="how the training set is split over clients")
    clients: int = integer(100, low=1, doc="how many clients there are")
    train_fraction: Number = number(1, low=0, high=1, open="low", doc="the fraction of its examples a client trains on")
    sampler: Sampler = nested("sampler", "uniform", doc="which clients take part in a round")
    rounds: int = integer(100, low=1, doc="how many rounds")
    seed: int = integer(1, low=0, high=2**63 - 1, doc="the source of all randomness")
    engine: str = text("auto", doc="how local training is computed: auto, or an engine's spec")
    evaluate_every: int = integer(1, low=1, doc="rounds between evaluations; the last round is always evaluated")
    probes: tuple[Probe, ...] = several("probe", DEFAULT, doc="what to measure in every round")
    theory_every: int = integer(
        0, low=0, doc="rounds between measurements of the theorems' constants, also in the first and last; 0: none"
    )

    kind = "experiment"
    name = "experiment"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine != "auto":
            object.__setattr__(self, "engine", str(resolve("engine", self.engine)))
        self.check_cohort(self.sampler.largest(self.clients))
        self.check_rounds(self.rounds)
        if self.privacy.active:
            self.privacy.multiplier(self.privacy.participation(self.sampler, self.clients, self.rounds))

    @classmethod
    def from_python(cls, method: Method, **values: Any) -> Self:
        """Return the experiment of a method on a model and data that only the calling program has."""
        fields = {key: getattr(method, key) for key in params(Method)}
        fields |= {"task": "python", "model": "python", "partition": "natural"}  # see `placeholders`
        return cls(**fields, **values)

    @property
    def method(self) -> Method:
        """The method of this experiment, without data, model and clients."""
        return Method(**{key: getattr(self, key) for key in params(Method)})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the experiment with these keys and values, which may be those of version 0.1.

        Refuses an unknown key, suggesting the nearest one.
        """
        values = dict(values)
        retired = "measure_gamma" in values  # a probe since 0.2; files of 0.1 say it, and measured q
        gamma = values.pop("measure_gamma", False)
        if not isinstance(gamma, bool):
            raise SpecError(f"{cls.name}: measure_gamma={gamma!r}; allowed: true or false, or probes = 'q + gamma'")
        if retired:
            before = str(values.get("probes", "q")).split(" + ")
            values["probes"] = " + ".join(dict.fromkeys([*before, "gamma"] if gamma else before))
        return super().from_dict(values)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the experiment in a TOML file, such as `to_toml` writes; errors name the file."""
        values = read_toml(path)
        try:
            return cls.from_dict(values)
        except SpecError as error:
            raise error.within(str(path)) from None

    def to_dict(self) -> dict[str, str | int | bool]:
        """Return every key with its value as TOML stores it: a spec string, number or boolean."""
        values = super().to_dict()
        return {key: values[key] for key in (*FIRST, *(key for key in values if key not in FIRST))}

    def to_toml(self) -> str:
        """Return the experiment as TOML, with every key, so that the file stays valid when a default changes."""
        return "".join(f"{key} = {_toml(value)}\n" for key, value in self.to_dict().items())


def read_toml(path: Path) -> dict[str, Any]:
    """Return the keys and values of a TOML file, with or without a byte order mark; refuses a file that is not TOML."""
    try:
        return tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror}); check the path, and who may read it") from None
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: not a TOML file ({error}); save it as UTF-8") from None
    except (ValueError, RecursionError) as error:  # tomllib limits neither digits nor depth
        raise SpecError(f"{path}: not a TOML file ({error})") from None


def _toml(value: str | int | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int) else json.dumps(value, ensure_ascii=False)
