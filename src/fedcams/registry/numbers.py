"""Exact numbers: strings to Fractions and back, so that `1/64` stays 1/64 on every machine and in every label."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from numbers import Rational, Real

from fedcams.errors import SpecError

Number = Fraction | float
"""What a caller may pass for a real hyperparameter; it is always stored as a `Fraction`."""

PATTERN = re.compile(r"[+-]?(?:\d+/\d+|(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d{1,3})?)")
MAX_EXPONENT = 400  # beyond float64; keeps 1e999 from becoming a thousand-digit integer


def parse_number(text: str) -> Fraction:
    """Return the exact value of a string such as `3`, `-0.5`, `1e-3` or `1/64`; refuses anything else."""
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
    """Return the exact value of a number or string.

    Arguments:
        value: any real number, NumPy's included, or text such as `1/64`; a float counts as its shortest decimal.

    Returns:
        The value as a fraction.

    Raises:
        SpecError: for NaN, infinity, and text that is not a number.

    Examples:
        >>> from fedcams.registry import exact
        >>> exact(0.1)
        Fraction(1, 10)
    """
    if isinstance(value, str):
        return parse_number(value.strip())
    if isinstance(value, Rational):
        return Fraction(int(value.numerator), int(value.denominator))
    if not math.isfinite(value):
        raise SpecError(f"{value} is not a finite number")
    return Fraction(str(value))


def format_number(value: Fraction) -> str:
    """Return the shortest exact spelling of a number.

    Arguments:
        value: the number.

    Returns:
        The text; among equally short ones, decimals beat exponents, which beat fractions.

    Examples:
        >>> from fedcams.registry import exact, format_number
        >>> [format_number(exact(text)) for text in ("0.10", "0.00001", "2/6")]
        ['0.1', '1e-5', '1/3']
    """
    if value.denominator == 1 and abs(value) < 10**6:
        return str(value)
    return min([*_decimals(value), str(value)], key=len)


def _decimals(value: Fraction) -> list[str]:
    """Return the decimal and the exponent spelling; none if the decimal expansion does not end."""
    places = _decimal_places(value.denominator)
    if places is None:
        return []
    sign = "-" if value < 0 else ""
    digits = str(abs(value.numerator) * 10**places // value.denominator)
    whole, part = digits[:-places] or "0", digits[-places:].rjust(places, "0")
    decimal = f"{sign}{whole}.{part}" if places else sign + digits
    mantissa = digits.rstrip("0")
    power = len(digits) - len(mantissa) - places
    return [decimal, f"{sign}{mantissa}e{power}"] if abs(power) <= MAX_EXPONENT else [decimal]


def _decimal_places(denominator: int) -> int | None:
    """Return the number of digits after the point in 1/denominator; None if they never end."""
    twos = (denominator & -denominator).bit_length() - 1
    rest, fives = denominator >> twos, 0
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    return max(twos, fives) if rest == 1 else None
