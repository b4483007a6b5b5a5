"""Experiment: everything that defines a run, as spec strings; equal to one TOML file."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import fedcams.aggregates
import fedcams.averages
import fedcams.compress
import fedcams.control
import fedcams.downlink
import fedcams.engines
import fedcams.models
import fedcams.optimizers
import fedcams.partition
import fedcams.probes
import fedcams.sampler
import fedcams.schedules
import fedcams.tasks
import fedcams.transforms  # noqa: F401  (what they register is what specs may name)
from fedcams.compress import Compressor
from fedcams.downlink import Downlink
from fedcams.errors import SpecError
from fedcams.local import SGD
from fedcams.models import Model
from fedcams.optimizers import ServerOptimizer
from fedcams.partition import Partition
from fedcams.registry import Number, Spec, flag, format_number, integer, nested, number, params, resolve, text
from fedcams.registry.params import nearest
from fedcams.sampler import Sampler
from fedcams.tasks import Task


@dataclass(frozen=True)
class Experiment(Spec):
    """One run: what is learnt, by whom, and how."""

    label: str = text("run", doc="its name in reports and its folder")
    task: Task = nested("task", "digits", doc="the data, the loss and the metric")
    model: Model = nested("model", "mlp", doc="the network")
    partition: Partition = nested("partition", "iid", doc="how the training set is split over clients")
    clients: int = integer(100, low=1, doc="how many clients there are")
    train_fraction: Number = number(1, low=0, high=1, open="low", doc="the part of its examples a client trains on")
    sampler: Sampler = nested("sampler", "uniform", doc="which clients take part in a round")
    local: SGD = nested("local", "sgd(epochs=3)", doc="what a client does with the model")
    server: ServerOptimizer = nested("server", "fedams", doc="what the server does with the mean update")
    uplink: Compressor = nested("compressor", "identity", doc="how updates travel to the server")
    feedback: bool = flag(True, doc="whether clients keep what compression loses and send it later")
    downlink: Downlink = nested("downlink", "none", doc="how the model travels to the clients")
    weighting: str = text("uniform", choices=("uniform", "examples"), doc="what counts in the mean over the cohort")
    rounds: int = integer(100, low=1, doc="how many rounds")
    seed: int = integer(1, low=0, high=2**63 - 1, doc="the source of all randomness")
    engine: str = text("auto", doc="how local training is carried out: auto, or an engine's spec")
    evaluate_every: int = integer(1, low=1, doc="rounds from one evaluation to the next")
    measure_gamma: bool = flag(False, doc="whether to record the dissimilarity of every round")

    kind = "experiment"
    name = "experiment"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine != "auto":
            object.__setattr__(self, "engine", str(resolve("engine", self.engine)))
        self.sampler.expected(self.clients)  # refuses a cohort larger than the population

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Experiment:
        """The experiment that these keys describe; an unknown one is refused with the nearest."""
        known = params(cls)
        for key in values:
            if key not in known:
                raise SpecError(f"experiment has no key {key!r}{nearest(key, known)}; known: {', '.join(known)}")
        return cls(**values)

    @classmethod
    def read(cls, path: Path) -> Experiment:
        """From a file that `to_toml` wrote."""
        values = read_toml(path)
        try:
            return cls.from_dict(values)
        except SpecError as error:
            raise error.within(str(path)) from None

    def to_dict(self) -> dict[str, str | int | bool]:
        """Every key with its value as TOML has it: spec strings, numbers, booleans."""
        return {key: _plain(getattr(self, key)) for key in params(type(self))}

    def to_toml(self) -> str:
        """All keys, defaults included, so that the file stays true when a default changes."""
        return "".join(f"{key} = {_toml(value)}\n" for key, value in self.to_dict().items())


def read_toml(path: Path) -> dict[str, Any]:
    """The keys of a file, also of one that begins with the mark that some editors write."""
    try:
        return tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: not a TOML file ({error}); save it as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{path}: not a TOML file ({error})") from None


def _plain(value: Any) -> str | int | bool:
    if isinstance(value, Fraction):
        return format_number(value)
    return value if isinstance(value, bool | int) else str(value)


def _toml(value: str | int | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int) else json.dumps(value, ensure_ascii=False)
