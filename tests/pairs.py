"""Pairwise sampling: few combinations of options in which every two options that fit together meet at least once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

Option = tuple[str, str]
"""An axis and one of its values."""


def pairs_of(axes: Mapping[str, Sequence[str]], fits: Callable[[Option, Option], bool]) -> set[frozenset[Option]]:
    """Every two options of different axes that fit together."""
    options = [(axis, value) for axis, values in axes.items() for value in values]
    return {frozenset(two) for two in itertools.combinations(options, 2) if two[0][0] != two[1][0] and fits(*two)}


def pairwise(axes: Mapping[str, Sequence[str]], fits: Callable[[Option, Option], bool]) -> list[dict[str, str]]:
    """A list of combinations that has all pairs, the same every time.

    Greedy: begin with a pair that is missing, then give each other axis the value that brings most missing pairs. The
    last value of an axis must fit everything.
    """
    known = pairs_of(axes, fits)
    missing = dict.fromkeys(sorted(known, key=sorted))  # a set with an order
    found = []
    while missing:
        case = dict(sorted(next(iter(missing))))
        for axis in axes:
            if axis not in case:
                fit = [v for v in axes[axis] if all(frozenset(((axis, v), o)) in known for o in case.items())]
                case[axis] = max(fit, key=lambda v: sum(frozenset(((axis, v), o)) in missing for o in case.items()))
        for two in itertools.combinations(case.items(), 2):
            missing.pop(frozenset(two), None)
        found.append(case)
    return found
