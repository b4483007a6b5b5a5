"""Measure how much memory a piece of code takes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable


def peak_memory(work: Callable[[], object]) -> int:
    """Bytes that Python and NumPy hold at most during the work; the least of three, as the first may compile."""
    peaks = []
    for _ in range(3):
        tracemalloc.start()
        work()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    return min(peaks)
