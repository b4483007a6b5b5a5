"""Measure the constants of the theorems at one model, from gradients of some clients; this does not affect training."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from fedcams.engines import Problem
from fedcams.errors import FedcamsError, first_line
from fedcams.keys import generator, torch_generator
from fedcams.theory.gradients import ClientLoss, Point, borrowed, norm

if TYPE_CHECKING:
    from torch import Tensor

CLIENTS = 10
"""How many clients are measured at once."""
RESOLUTION = 1e-5
"""A change of the gradient, relative to its length, below which rounding errors may be as large as the change."""


@dataclass(frozen=True)
class Measured:
    """The constants of the theorems at the model that a round started from; None for what could not be measured.

    `clients` of `population` clients were measured, and every number is about these.
    """

    round: int
    clients: int
    population: int
    L_secant: float | None = None
    """The largest change of a client's gradient over the round, divided by the length of the model's step."""
    L_power: float | None = None
    """The largest curvature that power iteration finds for one client."""
    G: float | None = None
    """The length of the longest gradient of a batch."""
    G_inf: float | None = None
    """The largest entry of these gradients."""
    s_l: float | None = None
    """σ_l of the client whose batches vary most."""
    s_l_mean: float | None = None
    """The root of the mean over clients of σ_l²."""
    s_g: float | None = None
    """The root of the mean over clients of ‖∇F_i - ∇f‖²."""
    loss: float | None = None
    """f, the mean over clients of their mean losses."""
    gradient_sq: float | None = None
    """‖∇f‖²."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Why a number is None, by its name; under `clients`, why each client left out could not be measured."""

    @property
    def smoothness(self) -> float | None:
        """L, measured in both ways: the larger of `L_secant` and `L_power`."""
        return max((value for value in (self.L_secant, self.L_power) if value is not None), default=None)

    @property
    def gradient_sq_of_all(self) -> float | None:
        """An unbiased estimate of ‖∇f‖² over the whole population; it may be negative.

        The mean gradient of some clients is longer than that of all, because clients differ.
        """
        if self.gradient_sq is None or self.clients == self.population:
            return self.gradient_sq
        if self.s_g is None or self.clients == 1:
            return None  # nothing is known about how much clients differ
        return self.gradient_sq - (1 - self.clients / self.population) * self.s_g**2 / (self.clients - 1)

    def to_json(self) -> str:
        """Return one line of JSON; equal measurements give equal lines."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Measured:
        """Return what `to_json` wrote, from parsed JSON; names that this version does not know are dropped.

        Refuses values that `to_json` cannot have written, as after a change by hand.
        """
        known = [each.name for each in dataclasses.fields(cls)]
        found = cls(**{name: values[name] for name in known if name in values})
        for name, value in dataclasses.asdict(found).items():
            if not _ALLOWED.get(name, _is_length)(value):
                raise ValueError(f"{name} is {value!r}")
        if found.clients > found.population:
            raise ValueError(f"clients is {found.clients}, but population is {found.population}")
        return found


def _is_count(value: Any, low: int = 1) -> bool:
    return type(value) is int and value >= low


def _is_number(value: Any) -> bool:
    """Return whether a number is as `to_json` writes it: finite, and None where it is missing."""
    return value is None or (type(value) in (int, float) and math.isfinite(value))


def _is_length(value: Any) -> bool:
    return _is_number(value) and (value is None or value >= 0)


_ALLOWED: Mapping[str, Callable[[Any], bool]] = {
    "round": _is_count,
    "clients": functools.partial(_is_count, low=0),
    "population": _is_count,
    "loss": _is_number,
    "missing": lambda value: isinstance(value, dict) and all(isinstance(why, str) for why in value.values()),
}
"""What the fields of `Measured` may be; the others are lengths."""


def measure(problem: Problem, start: Point, after: Tensor | None, done: int) -> Measured:
    """Measure the constants at `start`, the model after `done` rounds; `after [d]` is the model one round later.

    Without `after` there is no secant. Clients and batches do not depend on the run's seed. The problem's model and
    torch's generators are left as they were. Nothing is refused: what cannot be measured is None.
    """
    ids, missing = list(problem.clients), dict[str, str]()
    drawn = sorted(generator(0, "theory", done).choice(len(ids), min(CLIENTS, len(ids)), replace=False).tolist())
    gpu = [problem.device] if problem.device.type == "cuda" else []
    with torch.inference_mode(False), torch_generator(gpu), borrowed(problem) as load_:
        losses = (ClientLoss(problem, load_, ids[place], done) for place in drawn)
        count, numbers = _over_clients(losses, start, after, missing)
    missing |= {name: f"it is {value}" for name, value in numbers.items() if not math.isfinite(value)}
    finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
    return Measured(done + 1, count, len(ids), missing=missing, **finite)


# -- the numbers ---------------------------------------------------------------------------------------------------


class _Found(NamedTuple):
    """What one client gives, besides its gradient."""

    loss: float
    secant: float | None
    variance: float
    longest: float
    largest: float


class _Mean:
    """The mean of rows `[d]`, and the sum of their squared distances from it, without keeping the rows."""

    def __init__(self, zero: Tensor) -> None:
        self.count, self.mean, self.spread = 0, zero, 0.0

    def add_(self, row: Tensor) -> None:
        """Add a row, by Welford's recursion: its rounding errors do not grow with the mean."""
        self.count += 1
        apart = row - self.mean
        self.mean += apart / self.count
        self.spread += norm(apart) ** 2 * (self.count - 1) / self.count


def _over_clients(
    losses: Iterable[ClientLoss], start: Point, after: Tensor | None, missing: dict[str, str]
) -> tuple[int, dict[str, float]]:
    """Return how many clients could be measured, and their numbers by the names of `Measured`; notes what could not."""
    found, mean, power = list[_Found](), _Mean(torch.zeros_like(start.x)), dict[str, float]()
    for one in losses:
        with _noting(missing, "clients", f"client {one.client}: "):
            each, gradient = _found(one, start, after)
            found.append(each)
            mean.add_(gradient)
            if len(found) == 1:
                power = _power(one, start, missing)
    if not found:
        return 0, {}
    if after is not None and all(each.secant is None for each in found):
        missing["L_secant"] = "gradients changed too little for float32"
    return len(found), _summary(found, mean) | power


def _power(one: ClientLoss, start: Point, missing: dict[str, str]) -> dict[str, float]:
    """Return the curvature as `L_power`, or note why there is none: some layers have no second derivative."""
    found: dict[str, float] = {}
    with _noting(missing, "L_power"):
        found["L_power"] = one.curvature(start)
    return found


def _found(one: ClientLoss, start: Point, after: Tensor | None) -> tuple[_Found, Tensor]:
    """Return the numbers of a client and its gradient `[d]` at the start."""
    gradient, loss = one.gradient(start)
    secant = None if after is None else _secant(one, start, after, gradient)
    before, lengths, entries, halves = None, [], [], []
    for batch in one.batches(start):
        lengths.append(norm(batch))
        entries.append(float(batch.abs().max()))
        if before is not None:
            halves.append(norm(batch - before) ** 2 / 2)  # its mean is the variance of one batch
        before = batch
    return _Found(loss, secant, float(np.mean(halves)), float(np.max(lengths)), float(np.max(entries))), gradient


def _secant(one: ClientLoss, start: Point, after: Tensor, gradient: Tensor) -> float | None:
    """Return the change of a gradient per length of the model's step; None if it could be a rounding error."""
    change = norm(one.gradient(Point(after, start.buffers))[0] - gradient)
    step = norm(after - start.x)
    return None if step == 0 or change <= RESOLUTION * norm(gradient) else change / step


def _summary(found: Sequence[_Found], mean: _Mean) -> dict[str, float]:
    """Return the numbers over all clients, by the names of `Measured`; NaN anywhere makes its number NaN."""
    secants = [each.secant for each in found if each.secant is not None]
    return {
        **({"L_secant": float(np.max(secants))} if secants else {}),
        "G": float(np.max([each.longest for each in found])),
        "G_inf": float(np.max([each.largest for each in found])),
        "s_l": math.sqrt(np.max([each.variance for each in found])),
        "s_l_mean": math.sqrt(np.mean([each.variance for each in found])),
        "s_g": math.sqrt(mean.spread / mean.count),
        "loss": float(np.mean([each.loss for each in found])),
        "gradient_sq": norm(mean.mean) ** 2,
    }


@contextlib.contextmanager
def _noting(missing: dict[str, str], name: str, prefix: str = "") -> Iterator[None]:
    """Note why something could not be measured: errors of fedcams name the client, those of torch get the prefix."""
    try:
        yield
    except (FedcamsError, RuntimeError) as error:
        why = first_line(error) if isinstance(error, FedcamsError) else f"{prefix}{first_line(error)}"
        missing[name] = "; ".join([*([missing[name]] if name in missing else []), why])
