"""Magnitudes as a few classes: what is kept is split at its mean, each half at its own mean, and so on.

A class travels as a number of a few bits, and its mean as a float32. Means are those of `fedcams.bits.kept`: the same,
bit for bit, on every device. Numbers are in groups, which lie together and are split each by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedcams.bits.kept import group_means, group_of_each, sums_between


def split_at_means(values: Tensor, bounds: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Split |values| `[C, k]` into 2^depth classes; return the class of each, int64 `[C, k]`, and the means.

    A higher class has larger magnitudes. `bounds [C, S + 1]` says where each of S groups starts and ends; the means are
    float32 `[C, S, 2^depth]`, +0.0 where a class is empty, and infinite where it has infinity or NaN.
    """
    classes = torch.zeros_like(values, dtype=torch.int64)
    for level in range(depth):
        means = _class_means(values, classes, bounds, 1 << level)
        classes = 2 * classes + (values.abs() >= take_means(means, classes, bounds))
    return classes, _class_means(values, classes, bounds, 1 << depth)


def _class_means(values: Tensor, classes: Tensor, bounds: Tensor, count: int) -> Tensor:
    """`[C, S, count]`, one class after the other, as there are eight at most."""
    sizes = class_sizes(classes, bounds, count)
    members = [torch.where(classes == number, values, 0.0) for number in range(count)]
    return torch.stack([group_means(part, bounds, sizes[..., number]) for number, part in enumerate(members)], dim=-1)


def class_sizes(classes: Tensor, bounds: Tensor, count: int) -> Tensor:
    """Return how many of each group are in each class: int64 `[C, S, count]`."""
    return torch.stack([sums_between((classes == number).long(), bounds) for number in range(count)], dim=-1)


def take_means(means: Tensor, classes: Tensor, bounds: Tensor) -> Tensor:
    """Return the mean of the class of each: `[C, S, count]`, `[C, k]` -> float32 `[C, k]`."""
    groups = group_of_each(bounds, classes.shape[-1])
    return means.flatten(1).gather(-1, groups * means.shape[-1] + classes)
