"""The base class of partitions, which split a training set over clients."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike, NDArray

from fedcams.errors import SpecError
from fedcams.registry import Number, Spec, exact, format_number

Ints = NDArray[np.int64]


class Partition(Spec, ABC):
    """The base class of all partitions. A subclass implements `owners`.

    `owners` names one client for each example, so parts are always disjoint and no example is left out.

    Examples:
        >>> import numpy as np
        >>> from fedcams.partition import partition
        >>> parts = partition("iid").split(np.zeros(7, np.int64), clients=2, rng=np.random.default_rng(0))
        >>> sorted(len(part) for part in parts)
        [3, 4]
    """

    kind = "partition"
    reference: ClassVar[str] = ""
    """The paper that describes the partition."""

    def split(self, labels: Ints, clients: int, rng: Generator, keys: Ints | None = None) -> list[Ints]:
        """Return the examples of each client as positions in `labels [N]`: disjoint, none empty, together all of them.

        `keys [N]` is the natural group of each example, for partitions that need it. Within a client, the order is
        random, so that a prefix (`take_fraction`) is a random sample of the client's examples.
        """
        labels = _labels(labels)
        keys = None if keys is None else _integers("keys", keys)
        self._check(len(labels), clients, keys)
        owners = self.owners(labels, clients, rng, keys)
        sizes = self._sizes(owners, clients, len(labels))
        return np.split(shuffled_by(owners, rng), np.cumsum(sizes)[:-1])

    @abstractmethod
    def owners(self, labels: Ints, clients: int, rng: Generator, keys: Ints | None) -> Ints:
        """Return the client, in [0, clients), of each of the N >= clients examples with these `labels [N]`."""

    def _check(self, examples: int, clients: int, keys: Ints | None) -> None:
        if clients < 1:
            raise SpecError(f"{self.name}: clients={clients}; give at least 1")
        if clients > examples:
            raise SpecError(f"{self.name}: clients={clients} for {examples} examples; give every client at least one")
        if keys is not None and len(keys) != examples:
            raise SpecError(f"{self.name}: {len(keys)} keys for {examples} labels; give one for each example")

    def _sizes(self, owners: Ints, clients: int, examples: int) -> NDArray[np.intp]:
        if owners.shape != (examples,) or owners.min() < 0 or owners.max() >= clients:
            raise SpecError(f"{self.name}: owners must name a client in [0, {clients}) for each of {examples} examples")
        sizes = np.bincount(owners, minlength=clients)
        if sizes.min() == 0:
            raise SpecError(f"{self.name}: client {sizes.argmin()} of {clients} has no example; lower clients")
        return sizes


def partition(spec: str | Partition) -> Partition:
    """Return the partition that a spec string names.

    Arguments:
        spec: such as `dirichlet(alpha=0.1)`; a partition is returned unchanged.

    Returns:
        The partition, a frozen dataclass.

    Raises:
        SpecError: for an unknown name or key, or a value out of range.

    Examples:
        >>> from fedcams.partition import partition
        >>> str(partition("dirichlet(alpha=0.1)"))
        'dirichlet(alpha=0.1)'
    """
    return Partition.parse(spec)


def shuffled_by(values: Ints, rng: Generator) -> Ints:
    """Return the positions `[N]` of `values [N]` in ascending order of value, equal values in random order."""
    order = rng.permutation(len(values))
    return order[np.argsort(values[order], kind="stable")]


def label_histogram(parts: Sequence[Ints], labels: Ints, classes: int | None = None) -> Ints:
    """Count the examples of each class per client.

    Arguments:
        parts: the numbers of each client's examples.
        labels: the label of every example `[N]`, or several of them `[N, ...]`; all are counted.
        classes: the number of classes; by default the largest label + 1.

    Returns:
        The counts `[clients, classes]`.

    Examples:
        >>> import numpy as np
        >>> from fedcams.partition import label_histogram
        >>> label_histogram([np.array([0, 1]), np.array([2, 3])], np.array([0, 0, 1, 1])).tolist()
        [[2, 0], [0, 2]]
    """
    labels = _labels(np.ravel(labels)).reshape(np.shape(labels))
    needed = int(labels.max(initial=-1)) + 1
    classes = needed if classes is None else classes
    if classes < needed:
        raise SpecError(f"classes={classes}, but there is a label {needed - 1}; give at least {needed}")
    rows = [np.bincount(labels[part].ravel(), minlength=classes) for part in parts]
    return np.array(rows, dtype=np.int64).reshape(len(parts), classes)


def take_fraction(parts: Sequence[Ints], fraction: Number) -> list[Ints]:
    """Keep the first floor(fraction·n) of the n examples of each client, at least one.

    Arguments:
        parts: the numbers of each client's examples.
        fraction: the part to keep; 0.8 is exactly 4/5.

    Returns:
        Shorter arrays, in the same order.

    Examples:
        >>> import numpy as np
        >>> from fedcams.partition import take_fraction
        >>> take_fraction([np.arange(5)], 0.8)[0].tolist()
        [0, 1, 2, 3]
    """
    share = exact(fraction)
    if not 0 < share <= 1:
        raise SpecError(f"fraction={format_number(share)}: out of range; allowed: a number in (0, 1]")
    return [part[: max(1, math.floor(share * len(part)))] for part in parts]


def _labels(labels: ArrayLike) -> Ints:
    array = _integers("labels", labels)
    if array.min(initial=0) < 0:
        raise SpecError(f"labels has {array.min()}; number the classes from 0, and drop examples without a label")
    return array


def _integers(field: str, values: ArrayLike) -> Ints:
    array = np.asarray(values)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise SpecError(f"{field} is {array.dtype} {list(array.shape)}; give one integer for each example, int64 [N]")
    return array.astype(np.int64, copy=False)
