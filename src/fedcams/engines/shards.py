"""Clients whose examples lie in one data set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Examples = tuple[Tensor, Tensor]
"""Inputs `[n, ...]` and targets `[n, ...]`."""


class Shards(Mapping[int, Examples]):
    """Clients whose examples are parts of one data set, which is held once and never copied as a whole."""

    def __init__(self, x: Tensor, y: Tensor, parts: Sequence[NDArray[np.int64]]) -> None:
        self.x, self.y, self.parts = x, y, list(parts)

    def __getitem__(self, client: int) -> Examples:
        part = torch.from_numpy(self.parts[client]).to(self.x.device)
        return self.x[part], self.y[part]

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.parts)))

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def pool(self) -> Examples:
        """All examples; an engine that holds them on its device takes clients' parts from there."""
        return self.x, self.y

    def part(self, client: int) -> Tensor:
        """int64 `[n]`, where a client's examples stand in the pool."""
        return torch.from_numpy(self.parts[client]).to(self.x.device)

    def sizes(self) -> list[int]:
        """The number of examples of each client."""
        return [len(part) for part in self.parts]
