"""Clients whose examples lie in one data set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcams.errors import UpdateError

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

    def places(self, client: int) -> NDArray[np.int64]:
        """Where a client's examples stand in the data set; refuses an empty client."""
        if len(self.parts[client]) == 0:
            raise UpdateError(f"client {client} has 0 inputs and 0 targets; give one target each, one or more")
        return self.parts[client]

    def sizes(self) -> list[int]:
        """The number of examples of each client."""
        return [len(part) for part in self.parts]
