"""Timing side by side: all contenders in turn, several times over, the best of each counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

Setup = Callable[[], Callable[[], Any]]
"""Run before every timing; returns what is timed."""
SETTLE = 0.02
"""Seconds before each turn: OpenMP threads of what ran before spin for some milliseconds and take a core."""
REPEATS = 3
"""Timings a turn, so that the processor is awake and the caches hold of the data what fits."""


def best_of(turns: int, contenders: Mapping[str, Setup]) -> dict[str, float]:
    """Milliseconds of each contender."""
    best = dict.fromkeys(contenders, float("inf"))
    for turn in range(turns + 1):  # the first compiles and warms up
        for name, prepare in contenders.items():
            time.sleep(SETTLE)
            elapsed = min(_time(prepare()) for _ in range(REPEATS))
            best[name] = min(best[name], elapsed if turn else float("inf"))
    return best


def _time(timed: Callable[[], Any]) -> float:
    started = time.perf_counter()
    timed()
    return 1000 * (time.perf_counter() - started)
