"""Numbers for readers: bytes, seconds and scores with a sensible number of digits."""

from __future__ import annotations

NONE = "–"
"""Shown in place of a missing number."""


def human_bytes(count: float | None) -> str:
    """Return bytes as `532 B`, `1.25 kB`, `38.5 MB`: powers of 1000, three digits; a dash for None."""
    if count is None:
        return NONE
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 999.5:
            return f"{count:.0f} B" if unit == "B" else f"{_three(count)} {unit}"
        count /= 1000
    return f"{_three(count)} PB"


def human_seconds(seconds: float | None) -> str:
    """Return seconds as `4.2 ms`, `1.25 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`; a dash for None."""
    if seconds is None:
        return NONE
    if seconds < 0.9995:
        return f"{_three(seconds * 1e3)} ms"
    if seconds < 59.95:
        return f"{_three(seconds)} s"
    size, part, big, small = next(step for step in CLOCK if round(seconds / step[2]) * step[2] < step[0])[1:]
    whole, rest = divmod(round(seconds / part), size // part)
    return f"{whole} {big} {rest} {small}" if rest else f"{whole} {big}"


CLOCK = ((3600, 60, 1, "min", "s"), (86400, 3600, 60, "h", "min"), (float("inf"), 86400, 3600, "d", "h"))


def score(value: float | None, percent: bool) -> str:
    """Return an accuracy as `93.42%`, another metric with four digits; a dash for None."""
    if value is None:
        return NONE
    return f"{100 * value:.2f}%" if percent else f"{value:.4g}"


def _three(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"
