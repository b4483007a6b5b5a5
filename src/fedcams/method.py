"""Method: one value that describes a federated algorithm completely."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Self

import fedcams.aggregates
import fedcams.averages
import fedcams.compress
import fedcams.control
import fedcams.downlink
import fedcams.guards
import fedcams.local
import fedcams.optimizers
import fedcams.privacy
import fedcams.schedules
import fedcams.transforms  # what these modules register is what specs may name
from fedcams.aggregates import Aggregate
from fedcams.averages import Average
from fedcams.compress import Compressor
from fedcams.compress.identity import IDENTITY
from fedcams.control import Control
from fedcams.downlink import MODEL, Downlink
from fedcams.downlink.base import check_contractive
from fedcams.errors import SpecError
from fedcams.guards import Guard
from fedcams.layout import Layout
from fedcams.local import Local
from fedcams.optimizers import ServerOptimizer
from fedcams.privacy import Privacy
from fedcams.recipes import KEY, merged
from fedcams.registry import Spec, flag, format_number, integer, nested, params, several, text
from fedcams.registry.fields import nearest
from fedcams.transforms import Transform

SAFE_SERVER = "fedams(lr=0.03, beta1=0, eps=1e-3)"
"""The server of `simulate` and of the Flower strategy unless another is given.

While v̂ is at its floor, as it is for small updates, a step is 0.03/√0.001, about one, times the mean update, as in
FedAvg. Otherwise it is shorter. The paper's `fedams` has `lr=1` and momentum: steps 32 times as long, too long for some
models.
"""
RESIDUAL, BUFFERS, CONTROL = "residual", fedcams.downlink.BUFFERS, "control"
"""The rows that a client may keep: what the compression of its updates and buffers lost, and its control variate."""


@dataclass(frozen=True)
class Method(Spec):
    """A federated algorithm: what clients do, what travels in both directions, and what the server does with it.

    Every field takes a spec string or the piece itself, and every rate or ratio in it may be a schedule.

    Raises:
        SpecError: for parts that do not fit together; it names both.

    Examples:
        >>> import fedcams
        >>> method = fedcams.Method(server="fedams(lr=cosine(1, 0))", uplink="topk(ratio=1/64)", average="ema(0.97)")
        >>> str(method.uplink)
        'topk(ratio=1/64)'
        >>> method.to_dict()["server"]
        'fedams(lr=cosine(start=1, end=0))'
    """

    server: ServerOptimizer = nested("server", "fedams", doc="what the server does with the mean update")
    local: Local = nested("local", "sgd(epochs=3)", doc="what a client does with the model")
    uplink: Compressor = nested("compressor", "identity", doc="how updates travel to the server")
    feedback: bool = flag(True, doc="clients keep what compression loses and send it later")
    downlink: Downlink = nested("downlink", "none", doc="how the model travels to the clients")
    buffers: Compressor = nested("compressor", "identity", doc="how batch-norm statistics travel")
    control: Control = nested("control", "none", doc="control variates that correct the clients' gradients")
    transforms: tuple[Transform, ...] = several("transform", doc="what changes or refuses updates in transit")
    guard: Guard = nested("guard", "adaptive", doc="what refuses clients whose updates are far too long")
    min_replies: int = integer(1, low=1, doc="a round with fewer accepted updates leaves the model unchanged")
    aggregate: Aggregate = nested("aggregate", "mean", doc="how the server combines the updates of a cohort")
    weighting: str = text(
        "uniform", choices=("uniform", "examples", "sampler"), doc="how clients are weighted in the mean of the cohort"
    )
    privacy: Privacy = nested("privacy", "none", doc="noise that hides each client from those who see the models")
    average: Average = nested("average", "none", doc="an average of the server's models, which is evaluated too")

    kind = "method"
    name = "method"

    if TYPE_CHECKING:  # a field takes the piece or its spec string, which type checkers cannot see in a dataclass

        def __init__(self, **fields: Any) -> None:
            """Make a method from its fields by name."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for path, schedule in self.schedules():
            if path.startswith("local.") and path != "local.lr":  # engines compile and capture the rest once
                raise SpecError(f"{path}={schedule}: in a local rule, only lr may be a schedule; give a number")
        first = self.in_round(1, None)
        for field, codec in {"uplink": first.uplink, "buffers": first.buffers}.items():
            if first.feedback and codec.squared_error_bound(Layout.flat(1)) is None:
                raise SpecError(
                    f"{field}={codec} has no bound on its error, which would grow without limit with feedback=true; "
                    "choose a contractive compressor, or set feedback=false"
                )
        if first.downlink.carries_buffers:
            check_contractive(f"downlink={first.downlink}, buffers={first.buffers}", first.buffers)
        first.control.check(first)
        first.aggregate.check(first)
        first.privacy.check(first)
        for transform in first.transforms:
            transform.check(first)

    # -- rounds ------------------------------------------------------------------------------------------------------

    def in_round(self, round: int, rounds: int | None) -> Self:
        """Return the method with its schedules replaced by their values in a round; itself if it has none.

        `rounds` is the length of the run; None means that the run ends with this round.
        """
        return self._at_round(round, rounds or round) if self._follows_rounds else self

    @functools.cached_property
    def _at_round(self) -> Callable[[int, int], Self]:
        """Return `at` for a round, cached: every client and every message of the round calls it."""
        return functools.lru_cache(maxsize=1)(self.at)

    @functools.cached_property
    def _follows_rounds(self) -> bool:
        return bool(self.schedules())

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields alone: what is remembered of them cannot be pickled."""
        return {key: getattr(self, key) for key in params(type(self))}

    def check_rounds(self, rounds: int | None) -> None:
        """Refuse a run of this many rounds if one of the schedules lasts longer; None means an unknown number."""
        if rounds is None and self.privacy.depends_on_rounds:
            raise SpecError(f"privacy={self.privacy} spreads epsilon over a run of unknown length; give rounds=...")
        for path, schedule in self.schedules():
            if rounds is None and schedule.depends_on_rounds:
                raise SpecError(
                    f"{path}={schedule} depends on the length of the run, which is unknown; give rounds=..."
                )
            if rounds is not None and (length := schedule.length(rounds)) > rounds:
                raise SpecError(
                    f"{path}={schedule} lasts {length} rounds, but the run has rounds={rounds}; "
                    "shorten the schedule, or raise rounds"
                )

    def check_cohort(self, largest: float) -> None:
        """Refuse `min_replies` that not even the largest cohort could send, since every round would be skipped."""
        if self.min_replies > largest:
            raise SpecError(
                f"min_replies={self.min_replies}, but a cohort has at most {largest:.0f} clients, so that every round "
                f"would be skipped; give min_replies={largest:.0f} or less, or larger cohorts"
            )

    @functools.cached_property
    def depends_on_rounds(self) -> bool:
        """Whether what happens in a round depends on the length of the run."""
        scheduled = any(schedule.depends_on_rounds for _, schedule in self.schedules())
        return scheduled or self.privacy.depends_on_rounds

    # -- what clients keep -------------------------------------------------------------------------------------------

    def memory(self, layout: Layout, buffer_layout: Layout | None) -> dict[str, Layout]:
        """Return the layouts of the rows that each client keeps between rounds, by name, for this model."""
        rows: dict[str, Layout] = {}
        if self.feedback and _may_lose(self.uplink, layout):
            rows[RESIDUAL] = layout
        if self.feedback and buffer_layout is not None and _may_lose(self.buffers, buffer_layout):
            rows[BUFFERS] = buffer_layout
        if self.control.active:
            rows[CONTROL] = layout
        return rows

    def delivered(self, layout: Layout, buffer_layout: Layout | None) -> dict[str, Layout]:
        """Return the layouts of what the downlink carries to clients, by name, for this model.

        It carries the model, and its buffers if they are compressed; other buffers travel dense next to the model.
        """
        carried = self.downlink.carries_buffers and self.buffers != IDENTITY
        return {MODEL: layout} | ({BUFFERS: buffer_layout} if carried and buffer_layout is not None else {})

    # -- as TOML values ----------------------------------------------------------------------------------------------

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the method with these fields, or those of a `recipe`; refuses an unknown key, suggesting another."""
        known, settings = (*params(cls), KEY), merged(values)
        for key in settings:
            if key not in known:
                raise SpecError(f"{cls.name} has no key {key!r}{nearest(key, known)}; known: {', '.join(known)}")
        return cls(**settings)

    def to_dict(self) -> dict[str, str | int | bool]:
        """Return every field with its value as TOML and JSON store it: a spec string, number or boolean."""
        return {key: toml_value(getattr(self, key)) for key in params(type(self))}


def _may_lose(codec: Compressor, layout: Layout) -> bool:
    """Return whether the codec may be lossy in some round; with a schedule, it may become so later."""
    return bool(codec.schedules()) or codec.squared_error_bound(layout) != 0.0


def toml_value(value: Any) -> str | int | bool:
    """Return a field's value as TOML stores it.

    Arguments:
        value: the value of a field of a method or an experiment.

    Returns:
        A spec string, number or boolean.

    Examples:
        >>> import fedcams
        >>> from fedcams.method import toml_value
        >>> toml_value(fedcams.compressor("topk(ratio=1/64)"))
        'topk(ratio=1/64)'
    """
    if isinstance(value, Fraction):
        return format_number(value)
    if isinstance(value, tuple):
        return " + ".join(map(str, value))
    return value if isinstance(value, bool | int) else str(value)


def method_of(method: Method | None, settings: Mapping[str, Any]) -> Method:
    """Return `method`, or the default one, with the fields in `settings` changed.

    `simulate` and the Flower strategy use it to accept a method, its fields by name, or both.

    Arguments:
        method: the method to start from; None is the default one, with the server `SAFE_SERVER`.
        settings: fields of a method, or `recipe`, which sets several of them.

    Returns:
        The method.

    Raises:
        SpecError: for an unknown field or recipe, or a value that is refused.

    Examples:
        >>> from fedcams.method import method_of
        >>> str(method_of(None, {"uplink": "sign"}).uplink)
        'sign'
    """
    if method is not None and not isinstance(method, Method):
        raise SpecError(
            f"method={method!r} is a {type(method).__name__}; give a fedcams.Method, or its fields as keyword arguments"
        )
    base = {"server": SAFE_SERVER} if method is None else {key: getattr(method, key) for key in params(Method)}
    return Method.from_dict(merged(base, settings))
