"""Pairwise sampling: few combinations of options in which every two options that fit together meet at least once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

Option = tuple[str, str]
"""An axis and one of its values."""
Pair = frozenset[Option]


def pairs_of(axes: Mapping[str, Sequence[str]], fits: Callable[[Option, Option], bool]) -> set[Pair]:
    """Every two options of different axes that fit together."""
    options = [(axis, value) for axis, values in axes.items() for value in values]
    return {frozenset(two) for two in itertools.combinations(options, 2) if two[0][0] != two[1][0] and fits(*two)}


def pairwise(
    axes: Mapping[str, Sequence[str]],
    fits: Callable[[Option, Option], bool],
    kind: Callable[[Option], Option] = lambda option: option,
) -> list[dict[str, str]]:
    """A list of combinations that has every option and all pairs of their kinds, the same every time.

    By default each option is its own kind. Greedy: begin with the pair that brings most that is missing, then give each
    other axis such a value, of several the one that has served least. The last value of an axis must fit everything.
    """
    known = {pair: kinds(pair, kind) for pair in sorted(pairs_of(axes, fits), key=sorted)}
    missing: set[Pair | Option] = {*known.values(), *(option for pair in known for option in pair)}
    served: Counter[Option] = Counter()

    def gain(*pairs: Pair) -> tuple[int, int]:
        options = {option for pair in pairs for option in pair}
        new = 2 * sum(known[pair] in missing for pair in pairs) + len(options & missing)
        return new, -sum(served[option] for option in options)

    found = []
    while missing:
        useful = (pair for pair, its_kinds in known.items() if its_kinds in missing or pair & missing)
        case = dict(sorted(max(useful, key=gain)))
        for axis in axes:
            if axis not in case:
                joined = [[frozenset(((axis, value), option)) for option in case.items()] for value in axes[axis]]
                best = max((pairs for pairs in joined if all(pair in known for pair in pairs)), key=lambda p: gain(*p))
                case |= next(pair - set(case.items()) for pair in best)
        missing -= {*case.items(), *(known[frozenset(two)] for two in itertools.combinations(case.items(), 2))}
        served.update(case.items())
        found.append(case)
    return found


def kinds(pair: Pair, kind: Callable[[Option], Option]) -> Pair:
    return frozenset(kind(option) for option in pair)
