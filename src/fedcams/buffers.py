"""Changes of buffers, in units in which a few bits are enough: what travels if a method compresses them.

Normalisation divides by the root of a variance. So what matters is the error of a variance relative to the variance,
and the error of a mean relative to the root of its variance. Channels of one layer differ by orders of magnitude: an
error that is small for most of them would turn a small variance into zero and make its outputs hundreds of times too
large.

    variance   the change of log2(v + EPS), as the bits of a float have it: exponent and fraction as one integer,
               which is linear between powers of two
    mean       the change divided by √(v + EPS)
    others     the change itself

Only operations that IEEE 754 defines to the last bit are used, so that server and clients agree on every machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from fedcams.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor

MEAN, VARIANCE = "running_mean", "running_var"
"""What batch-norm layers call their buffers, as the last part of a name."""
EPS = 1e-5
"""What batch-norm layers add to a variance before they divide by its root."""
OCTAVE = 2**23
"""Floats between a power of two and the next."""
LARGEST = 0x7F7FFFFF
"""The bits of the largest finite float32."""
WIDEST = 512.0
"""More octaves than between any two variances; beyond it, integers could overflow, each processor in its own way."""


def change_between(before: Tensor, after: Tensor, layout: Layout) -> Tensor:
    """Return the change from `before [..., b]` to `after [..., b]`, in units of `before`; `add_change` applies it."""
    change = after - before
    for variance, mean in _statistics(layout):
        old = before[..., variance]
        change[..., variance] = (_bits(after[..., variance]) - _bits(old)).double().div(OCTAVE).float()
        if mean is not None:
            change[..., mean] /= _root(old)
    return change


def add_change(before: Tensor, change: Tensor, layout: Layout) -> Tensor:
    """Return `before [..., b]` moved by a change in its units, in new memory; variances are never below zero."""
    after = before + change
    for variance, mean in _statistics(layout):
        old, by = before[..., variance], _octaves(change[..., variance])
        moved = (_bits(old) + by).clamp(0, LARGEST).int().view(torch.float32) - EPS
        after[..., variance] = torch.where((by == 0) & (old >= 0), old, moved.masked_fill(moved <= 0, 0.0))
        if mean is not None:
            after[..., mean] = before[..., mean] + change[..., mean] * _root(old)
    return after


def below_zero(rows: Tensor, layout: Layout) -> dict[int, str]:
    """Return row -> the name of a variance in `rows [C, b]` that is below zero, for the rows that have one."""
    found: dict[int, str] = {}
    for name, (start, stop) in zip(layout.names, itertools.pairwise(layout.offsets), strict=True):
        if name.rpartition(".")[2] == VARIANCE:
            bad = (rows[:, start:stop] < 0).any(dim=-1).nonzero().flatten().tolist()
            found = {**dict.fromkeys(bad, name), **found}
    return found


def without_negative_variances_(row: Tensor, layout: Layout) -> None:
    """Set variances in `row [b]` that are below zero, as rounding may leave them, to zero, in place."""
    for variance, _ in _statistics(layout):
        row[variance].clamp_(min=0)


def _bits(variance: Tensor) -> Tensor:
    """Return the bits of v + EPS as an integer, which grows with v; what is below zero counts as zero."""
    return (variance.clamp(min=0) + EPS).view(torch.int32).long()


def _octaves(change: Tensor) -> Tensor:
    """Return a change of a variance as a number of floats."""
    return change.clamp(-WIDEST, WIDEST).double().mul(OCTAVE).round().long()


def _root(variance: Tensor) -> Tensor:
    return (variance.clamp(min=0) + EPS).sqrt()


def _statistics(layout: Layout) -> Iterator[tuple[slice, slice | None]]:
    """Return where each variance of a layout is, and where the mean of the same layer is, if it has one."""
    places = dict(zip(layout.names, itertools.starmap(slice, itertools.pairwise(layout.offsets)), strict=True))
    sizes = dict(zip(layout.names, layout.sizes, strict=True))
    for name, place in places.items():
        if name.rpartition(".")[2] == VARIANCE:
            mean = name.removesuffix(VARIANCE) + MEAN
            yield place, places[mean] if sizes.get(mean) == sizes[name] else None
