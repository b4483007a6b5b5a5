"""Declarations of hyperparameters: the type, range and meaning of each field of a registered dataclass."""

from __future__ import annotations

import dataclasses
import difflib
import unicodedata
from collections.abc import Iterable
from fractions import Fraction
from numbers import Real
from typing import Any, Literal

from fedcams.errors import SpecError
from fedcams.registry.grammar import Word, quote
from fedcams.registry.numbers import Number, exact, format_number

UNPRINTABLE = ("Cc", "Cs")
"""Unicode's categories of control characters, such as line ends, and of surrogates."""
MAX_MAGNITUDE = 10**38  # every real hyperparameter must have a float32
Kind = Literal["number", "integer", "flag", "text", "spec", "specs"]


@dataclasses.dataclass(frozen=True)
class Param:
    """What one field accepts. Bounds are inclusive unless `open_low` or `open_high` is set."""

    kind: Kind
    doc: str = ""
    low: Fraction | None = None
    high: Fraction | None = None
    open_low: bool = False
    open_high: bool = False
    choices: tuple[str, ...] = ()
    spec_kind: str = ""

    @property
    def allowed(self) -> str:
        """The accepted values in words, as errors and the reference show them."""
        if self.kind == "flag":
            return "true or false"
        if self.kind == "spec":
            return f"{'an' if self.spec_kind[0] in 'aeiou' else 'a'} {self.spec_kind} spec"
        if self.kind == "specs":
            return f"{self.spec_kind} specs joined by +, or nothing"
        if self.kind == "text":
            return " or ".join(self.choices) if self.choices else "a string"
        return f"{'an integer' if self.kind == 'integer' else 'a number'}{self._interval()}"

    def _interval(self) -> str:
        if self.low is None and self.high is None:
            return ""
        low = "(-inf" if self.low is None else f"{'(' if self.open_low else '['}{format_number(self.low)}"
        high = "inf)" if self.high is None else f"{format_number(self.high)}{')' if self.open_high else ']'}"
        return f" in {low}, {high}"

    def holds(self, value: Fraction | int) -> bool:
        """Return whether a number lies in the range."""
        above = self.low is None or value > self.low or (value == self.low and not self.open_low)
        below = self.high is None or value < self.high or (value == self.high and not self.open_high)
        return above and below

    def reaches(self, value: Fraction) -> bool:
        """Return whether numbers in the range come arbitrarily close to this one: it is in the range or on its edge."""
        return dataclasses.replace(self, open_low=False, open_high=False).holds(value)


def number(
    default: Any = ..., *, low: Number | None = None, high: Number | None = None, open: str = "", doc: str = ""
) -> Any:
    """Declare a field for a real number, which is stored exactly.

    In a `schedulable` piece it may be a schedule instead, whose values lie in the range.

    Arguments:
        default: the value if none is given; `...` makes the field required.
        low: the lower end of the range.
        high: the upper end of the range.
        open: `"low"`, `"high"` or `"both"` excludes that end.
        doc: describes the field in the reference.

    Returns:
        The default of a dataclass field; the piece refuses other values when it is made.

    Examples:
        >>> from dataclasses import dataclass
        >>> from fedcams.registry import Number, Spec, number
        >>> @dataclass(frozen=True)
        ... class Piece(Spec):
        ...     ratio: Number = number(1/2, low=0, high=1, open="low", doc="the part to keep")
        >>> Piece(ratio="1/64").ratio
        Fraction(1, 64)
    """
    lo, hi = (None if end is None else exact(end) for end in (low, high))
    param = Param("number", doc, lo, hi, open in ("low", "both"), open in ("high", "both"))
    return _field(param, default if default is None or default is ... else exact(default))


def integer(default: Any = ..., *, low: int | None = None, high: int | None = None, doc: str = "") -> Any:
    """Declare a field for a whole number.

    Arguments:
        default: the value if none is given; `...` makes the field required.
        low: the smallest value.
        high: the largest value.
        doc: describes the field in the reference.

    Returns:
        The default of a dataclass field; the piece refuses other values when it is made.

    Examples:
        >>> from dataclasses import dataclass
        >>> from fedcams.registry import Spec, integer
        >>> @dataclass(frozen=True)
        ... class Piece(Spec):
        ...     bits: int = integer(4, low=2, high=8, doc="per coordinate")
        >>> Piece(bits="8").bits
        8
    """
    lo, hi = (None if end is None else Fraction(end) for end in (low, high))
    return _field(Param("integer", doc, lo, hi), default)


def flag(default: Any = ..., *, doc: str = "") -> Any:
    """Declare a boolean field, written `true` or `false`.

    Arguments:
        default: the value if none is given; `...` makes the field required.
        doc: describes the field in the reference.

    Returns:
        The default of a dataclass field; the piece refuses other values when it is made.

    Examples:
        >>> from dataclasses import dataclass
        >>> from fedcams.registry import Spec, flag
        >>> @dataclass(frozen=True)
        ... class Piece(Spec):
        ...     warm: bool = flag(False, doc="start from what clients have")
        >>> Piece().warm
        False
    """
    return _field(Param("flag", doc), default)


def text(default: Any = ..., *, choices: Iterable[str] = (), doc: str = "") -> Any:
    """Declare a field for a string.

    Arguments:
        default: the value if none is given; `...` makes the field required.
        choices: the values that are allowed; any text if there are none.
        doc: describes the field in the reference.

    Returns:
        The default of a dataclass field; the piece refuses other values when it is made.

    Examples:
        >>> from dataclasses import dataclass
        >>> from fedcams.registry import Spec, text
        >>> @dataclass(frozen=True)
        ... class Piece(Spec):
        ...     scope: str = text("global", choices=("global", "tensor"), doc="what one scale covers")
        >>> Piece(scope="tensor").scope
        'tensor'
    """
    return _field(Param("text", doc, choices=tuple(choices)), default)


def nested(spec_kind: str, default: Any = ..., *, doc: str = "") -> Any:
    """Declare a field for another registered piece.

    Arguments:
        spec_kind: the kind of the piece, such as `compressor`.
        default: the value if none is given; `...` makes the field required.
        doc: describes the field in the reference.

    Returns:
        The default of a dataclass field; the piece refuses other values when it is made.

    Examples:
        >>> from dataclasses import dataclass
        >>> import fedcams
        >>> from fedcams.registry import Spec, nested
        >>> @dataclass(frozen=True)
        ... class Piece(Spec):
        ...     codec: fedcams.compress.Compressor = nested("compressor", "sign", doc="how rows travel")
        >>> str(Piece(codec="topk(ratio=1/64)").codec)
        'topk(ratio=1/64)'
    """
    return _field(Param("spec", doc, spec_kind=spec_kind), default)


def several(spec_kind: str, default: str = "", *, doc: str = "") -> Any:
    """Declare a field for a tuple of registered pieces, written `a + b(...)`; an empty string means none.

    Arguments:
        spec_kind: the kind of the pieces, such as `transform`.
        default: the value if none is given.
        doc: describes the field in the reference.

    Returns:
        The default of a dataclass field; the piece refuses other values when it is made.

    Examples:
        >>> from dataclasses import dataclass
        >>> import fedcams.transforms
        >>> from fedcams.registry import Spec, several
        >>> @dataclass(frozen=True)
        ... class Piece(Spec):
        ...     steps: tuple[fedcams.transforms.Transform, ...] = several("transform", doc="in this order")
        >>> [str(step) for step in Piece(steps="clip(norm=1) + fednova").steps]
        ['clip(norm=1)', 'fednova']
    """
    return _field(Param("specs", doc, spec_kind=spec_kind), default)


def _field(param: Param, default: Any) -> Any:
    default = dataclasses.MISSING if default is ... else default
    return dataclasses.field(default=default, metadata={"param": param})


def coerce(param: Param, value: Any, where: str) -> Any:
    """Return the value as the field `where` stores it; a SpecError names the field, the value and what is allowed."""
    try:
        if param.kind in ("number", "integer"):
            return _numeric(param, value)
        if param.kind == "flag":
            return _boolean(value)
        if param.kind == "text":
            return _textual(param, value)
    except SpecError as error:
        raise SpecError(f"{where}={show(value)}: {error}; allowed: {param.allowed}") from None
    raise AssertionError(param.kind)


def _numeric(param: Param, value: Any) -> Fraction | int:
    if isinstance(value, bool) or not isinstance(value, Real | str):
        raise SpecError("not a number")
    result = exact(value)
    if param.kind == "integer" and result.denominator != 1:
        raise SpecError("not a whole number")
    if not param.holds(result):
        raise SpecError("out of range")
    if param.kind == "number" and abs(result) > MAX_MAGNITUDE:
        raise SpecError("beyond what a float32 can hold")
    return int(result) if param.kind == "integer" else result


def _boolean(value: Any) -> bool:
    if isinstance(value, Word):
        value = {"true": True, "false": False}.get(value.text)
    if not isinstance(value, bool):
        raise SpecError("not a boolean")
    return value


def _textual(param: Param, value: Any) -> str:
    value = value.text if isinstance(value, Word) else value
    if not isinstance(value, str):
        raise SpecError("not a string")
    if any(unicodedata.category(character) in UNPRINTABLE for character in value):
        raise SpecError("it has a control character or half of a surrogate pair, which no file or label can hold")
    if param.choices and value not in param.choices:
        raise SpecError("unknown" + nearest(value, param.choices))
    return value


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the known name closest to `name`; an empty string if none is close."""
    spelled = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), spelled, n=1, cutoff=0.5)
    return f" (did you mean {spelled[close[0]]!r}?)" if close else ""


def show(value: Any) -> str:
    """Return a value as it is written in a spec string."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Word):
        return value.text
    if isinstance(value, Fraction | int):
        return format_number(Fraction(value))
    if isinstance(value, tuple):
        return spell(value) or quote("")
    return quote(value) if isinstance(value, str) else str(value)


def spell(pieces: tuple[Any, ...]) -> str:
    """Return several pieces as one string, joined by `+`."""
    return " + ".join(map(str, pieces))
