"""Exact numbers: text <-> Fraction, so that `1/64` stays 1/64 on every machine and in every label."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from numbers import Rational, Real

from fedcams.errors import SpecError

Number = Fraction | float
"""What a caller may pass for a real hyperparameter; what is stored is always a `Fraction`."""

PATTERN = re.compile(r"[+-]?(?:\d+/\d+|(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d{1,3})?)")
MAX_EXPONENT = 400  # beyond float64; keeps 1e999 from becoming a thousand-digit integer


def parse_number(text: str) -> Fraction:
    """The exact value of `3`, `-0.5`, `1e-3` or `1/64`."""
    if not PATTERN.fullmatch(text):
        raise SpecError(f"{text!r} is not a number; write 3, 0.5, 1e-3 or 1/64")
    exponent = re.search(r"[eE]([+-]?\d+)", text)
    if exponent and abs(int(exponent[1])) > MAX_EXPONENT:
        raise SpecError(f"the exponent of {text!r} is out of range; allowed: -{MAX_EXPONENT} to {MAX_EXPONENT}")
    try:
        return Fraction(text)
    except ZeroDivisionError:
        raise SpecError(f"{text!r} divides by zero; write a denominator of at least 1") from None


def exact(value: Number | Real | str) -> Fraction:
    """A Fraction from anything a caller may write; a float means what its shortest decimal says (0.1 is 1/10).

    NumPy's numbers are as good as Python's.
    """
    if isinstance(value, str):
        return parse_number(value.strip())
    if isinstance(value, Rational):
        return Fraction(int(value.numerator), int(value.denominator))
    if not math.isfinite(value):
        raise SpecError(f"{value} is not a finite number")
    return Fraction(str(value))


def format_number(value: Fraction) -> str:
    """The shortest exact spelling; between equals decimal, then exponent, then fraction."""
    if value.denominator == 1 and abs(value.numerator) < 10**6:
        return str(value.numerator)
    spellings = [*_decimals(value), f"{value.numerator}/{value.denominator}"]
    if value.denominator == 1:
        spellings[-1] = str(value.numerator)
    return min(spellings, key=len)


def _decimals(value: Fraction) -> list[str]:
    """The plain and the exponent spelling, if the decimal expansion ends."""
    places = _decimal_places(value.denominator)
    if places is None:
        return []
    sign = "-" if value < 0 else ""
    digits = str(abs(value.numerator) * 10**places // value.denominator)
    whole, part = digits[:-places] or "0", digits[-places:].rjust(places, "0")
    plain = f"{sign}{whole}.{part}" if places else sign + digits
    mantissa = digits.rstrip("0")
    power = len(digits) - len(mantissa) - places
    return [plain, f"{sign}{mantissa}e{power}"] if abs(power) <= MAX_EXPONENT else [plain]


def _decimal_places(denominator: int) -> int | None:
    """Digits after the point of 1/denominator, None when they never end."""
    twos = (denominator & -denominator).bit_length() - 1
    rest, fives = denominator >> twos, 0
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    return max(twos, fives) if rest == 1 else None
