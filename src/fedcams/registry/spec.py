"""Registered pieces: frozen dataclasses with a kind, a name and a spec string that describes them exactly."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, ClassVar, Self

from fedcams.errors import SpecError
from fedcams.registry.building import build
from fedcams.registry.fields import MAX_MAGNITUDE, Param, coerce, show, spell
from fedcams.registry.grammar import WORD, parse_call, parse_several
from fedcams.registry.numbers import exact
from fedcams.registry.table import params, registered


class Spec:
    """The base class of everything registered: frozen dataclasses whose fields `number`, `text` and others declare."""

    kind: ClassVar[str] = ""
    name: ClassVar[str] = ""
    examples: ClassVar[tuple[str, ...]] = ()
    """Spec strings that show its use; the contract tests run them and the reference prints them."""
    refused: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Invalid specs, each with a pattern that its error message must match."""
    internal: ClassVar[bool] = False
    """Whether only the files of runs name it; lists and the reference leave it out."""
    schedulable: ClassVar[bool] = False
    """Whether its number fields may be schedules."""

    def __post_init__(self) -> None:
        """Check and normalise every field; extend it to check fields against each other."""
        for key, (param, default) in params(type(self)).items():
            value = getattr(self, key)
            if value is None and default is None:
                continue
            object.__setattr__(self, key, self._accept(key, param, value))

    def _accept(self, key: str, param: Param, value: Any) -> Any:
        where = f"{self.name}: {key}"
        value = _spelled_schedule(param, value, where)
        if isinstance(value, Schedule) and param.kind in ("number", "integer", "flag", "text"):
            return self._accept_schedule(param, value, where)
        if param.kind not in ("spec", "specs"):
            return coerce(param, value, where)
        try:
            if param.kind == "specs" and isinstance(value, str | Spec | tuple | list):
                return resolve_several(param.spec_kind, value)
            if isinstance(value, str | Spec):
                return resolve(param.spec_kind, value)
        except SpecError as error:
            raise error.within(where) from None
        known = ", ".join(map(repr, registered(param.spec_kind)))
        raise SpecError(f"{where}={show(value)}: not a spec; allowed: {param.allowed}, from {known}")

    def _accept_schedule(self, param: Param, schedule: Schedule, where: str) -> Schedule:
        if not self.schedulable or param.kind != "number":
            raise SpecError(f"{where}={schedule}: a schedule is not accepted here; allowed: {param.allowed}")
        for end in schedule.bounds():
            fits = param.holds(end) or (end == schedule.limit() and param.reaches(end))
            if not fits or abs(end) > MAX_MAGNITUDE:
                raise SpecError(f"{where}={schedule}: reaches {show(end)}, out of range; allowed: {param.allowed}")
        return schedule

    @classmethod
    def parse(cls, spec: str | Spec) -> Self:
        """Return the piece of this kind that a spec string describes; a piece is returned unchanged.

        Call it on the base class of a kind: `Compressor.parse("topk(ratio=1/64)")`. Refuses invalid specs, and pieces
        of other classes.
        """
        found = resolve(cls.kind, spec)
        if not isinstance(found, cls):
            raise SpecError(f"{found} is a {type(found).__name__}, not a {cls.__name__}")
        return found

    @classmethod
    def parse_several(cls, specs: str | Spec | Sequence[str | Spec]) -> tuple[Self, ...]:
        """Return the pieces of this kind that a string such as `q + gamma`, or a list of specs, describes."""
        return tuple(cls.parse(spec) for spec in resolve_several(cls.kind, specs))

    def at(self, round: int, rounds: int) -> Self:
        """Return the piece with its schedules, nested ones too, replaced by their values in round 1, 2, … of `rounds`.

        Values are exact numbers of at most six significant digits, more only where these would leave the field's
        range. A piece without schedules returns itself. Refuses numbers below 1.
        """
        if min(round, rounds) < 1:
            raise SpecError(f"round={round} of rounds={rounds}; allowed: both count from 1")
        fields = params(type(self))
        new = {key: _at(param, getattr(self, key), round, rounds) for key, (param, _) in fields.items()}
        return self if all(value is getattr(self, key) for key, value in new.items()) else type(self)(**new)

    def schedules(self) -> list[tuple[str, Schedule]]:
        """Return every schedule in this piece with its place, such as `lr` or `codec.ratio`, in declared order."""
        return list(_schedules(self))

    def __str__(self) -> str:
        """Return the canonical spec: in declared order, without defaults, and a leading nested spec without its key."""
        shown = []
        for position, (key, (param, default)) in enumerate(params(type(self)).items()):
            value = getattr(self, key)
            text = spell(value) if param.kind == "specs" else str(value)
            if value != default and not (param.kind in ("spec", "specs") and text == default):
                positional = param.kind == "spec" and position == 0
                shown.append(show(value) if positional else f"{key}={show(value)}")
        return f"{self.name}({', '.join(shown)})" if shown else self.name

    def spelled_out(self) -> str:
        """Return the spec with every field, defaults included, for readers who do not know the defaults."""
        values = {key: getattr(self, key) for key in params(type(self))}
        shown = [f"{key}={'none' if value is None else show(value)}" for key, value in values.items()]
        return f"{self.name}({', '.join(shown)})" if shown else self.name


class Schedule(Spec, ABC):
    """The base class of all schedules: a number that depends on the round.

    A subclass writes `value` and `bounds`. It overrides `length` if it ends, `limit` if it approaches a bound without
    reaching it, and `depends_on_rounds` if it depends on the length of the run.

    Examples:
        >>> import fedcams.schedules
        >>> from fedcams.registry import resolve
        >>> [resolve("schedule", "linear(1, 0)").value(round, rounds=4) for round in (1, 2, 3)]
        [1.0, 0.75, 0.5]
    """

    kind = "schedule"

    @abstractmethod
    def value(self, round: int, rounds: int) -> float:
        """Return the number in round 1, 2, … of a run of `rounds` rounds."""

    @abstractmethod
    def bounds(self) -> tuple[Fraction, Fraction]:
        """Return the lowest and the highest number in any run."""

    def limit(self) -> Fraction | None:
        """Return the bound that it approaches but never reaches; None if it reaches both."""
        return None

    def length(self, rounds: int) -> int:
        """Return after how many rounds of a run of `rounds` it stays constant; 0 if it always or never does."""
        return 0

    @property
    def depends_on_rounds(self) -> bool:
        """Whether its numbers depend on the length of the run."""
        return False

    def __float__(self) -> float:
        """Refuse: a schedule has a number only in a given round."""
        raise SpecError(f"{self} is a schedule; take the piece that holds it at a round: piece.at(round, rounds)")


def resolve(kind: str, spec: str | Spec) -> Spec:
    """Return the registered piece of a kind that a spec string describes.

    Arguments:
        kind: such as `compressor`.
        spec: the spec string; a piece of the kind is returned unchanged.

    Returns:
        The piece.

    Raises:
        SpecError: for an unknown name or key, a value out of range, and a piece of another kind.

    Examples:
        >>> import fedcams.compress
        >>> from fedcams.registry import resolve
        >>> str(resolve("compressor", "topk(values=f32, ratio=2/128)"))
        'topk(ratio=1/64)'
    """
    if isinstance(spec, str):
        return build(kind, parse_call(spec))
    if not isinstance(spec, Spec):
        raise SpecError(f"{kind}={spec!r} is a {type(spec).__name__}; give a spec string, such as {_example(kind)!r}")
    if spec.kind != kind:
        raise SpecError(f"{spec} is a {spec.kind}, not a {kind}; write one of: {', '.join(registered(kind))}")
    return spec


def resolve_several(kind: str, specs: str | Spec | Sequence[str | Spec]) -> tuple[Spec, ...]:
    """Return the registered pieces of a kind that a string or a list of specs describes.

    Arguments:
        kind: such as `transform`.
        specs: such as `clip(norm=1) + fednova`; an empty string means none.

    Returns:
        The pieces, in order.

    Raises:
        SpecError: for an unknown name or key, a value out of range, and a piece of another kind.

    Examples:
        >>> import fedcams.transforms
        >>> from fedcams.registry import resolve_several
        >>> [str(piece) for piece in resolve_several("transform", "clip(norm=1) + fednova")]
        ['clip(norm=1)', 'fednova']
    """
    if isinstance(specs, str):
        return tuple(build(kind, call) for call in parse_several(specs))
    if not isinstance(specs, Spec | Sequence):
        raise SpecError(f"{kind}s={specs!r} is a {type(specs).__name__}; give specs joined by +, or a list of them")
    return tuple(resolve(kind, spec) for spec in ([specs] if isinstance(specs, Spec) else specs))


def _example(kind: str) -> str:
    return next((spec for cls in registered(kind).values() for spec in reversed(cls.examples)), kind)


# -- schedules ---------------------------------------------------------------------------------------------------------


def _spelled_schedule(param: Param, value: Any, where: str) -> Any:
    """Return the schedule that a string describes if the field is a number; any other value unchanged."""
    name = WORD.match(value.strip()) if isinstance(value, str) and param.kind in ("number", "integer") else None
    if name is None or name.group() not in registered("schedule"):
        return value
    try:
        return resolve("schedule", value)
    except SpecError as error:
        raise error.within(where) from None


def _at(param: Param, value: Any, round: int, rounds: int) -> Any:
    """Return a field's value in a round; the same object if nothing changes."""
    if isinstance(value, Schedule):
        return _short(param, value, round, rounds)
    if isinstance(value, Spec):
        return value.at(round, rounds)
    if isinstance(value, tuple):
        new = tuple(_at(param, piece, round, rounds) for piece in value)
        return value if all(a is b for a, b in zip(new, value, strict=True)) else new
    return value


def _short(param: Param, schedule: Schedule, round: int, rounds: int) -> Fraction:
    """Return its number in a round within its bounds, with six significant digits at most if the field accepts that."""
    low, high = schedule.bounds()
    value = schedule.value(round, rounds)
    short = min(max(Fraction(f"{value:.6g}"), low), high)
    return short if param.holds(short) else exact(value)  # near a limit that is excluded, six digits may round to it


def _schedules(piece: Spec, prefix: str = "") -> Iterator[tuple[str, Schedule]]:
    for key in params(type(piece)):
        value = getattr(piece, key)
        for inner in value if isinstance(value, tuple) else (value,):
            place = f"{prefix}{key}.{inner.name}" if isinstance(value, tuple) else f"{prefix}{key}"
            if isinstance(inner, Spec):  # checked first: most fields are neither, and abstract classes check slowly
                yield from [(place, inner)] if isinstance(inner, Schedule) else _schedules(inner, f"{place}.")
