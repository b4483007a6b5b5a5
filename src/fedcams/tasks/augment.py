"""Augmentation: numbers are drawn on the host, images are changed wherever they lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from fedcams.errors import SpecError


class Augmentation(Protocol):
    """A random change of images, apart from its randomness: whoever holds the same draws gets the same images."""

    def draw(self, rng: np.random.Generator, n: int) -> Tensor:
        """One row of integers for each of n examples."""

    def apply(self, x: Tensor, draws: Tensor) -> Tensor:
        """The examples `[n, ...]` changed as their rows say."""


@dataclass(frozen=True)
class CropFlip:
    """A crop of the original size out of the image with a black border, then a mirror image half of the time."""

    padding: int = 4

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise SpecError(f"padding={self.padding}; give 0 or more pixels")

    def draw(self, rng: np.random.Generator, n: int) -> Tensor:
        """int64 `[n, 3]`: the first row and the first column of the crop, from 0 to 2·padding, and 1 for a flip."""
        side = 2 * self.padding + 1
        return torch.from_numpy(rng.integers(0, (side, side, 2), size=(n, 3)))

    def apply(self, x: Tensor, draws: Tensor) -> Tensor:
        """`x [..., n, c, h, w]` of any type, `draws [..., n, 3]` on its device -> as x; for images before `prepare`."""
        top, left, flip = draws.unsqueeze(-2).unbind(-1)  # each [..., n, 1]
        height, width = x.shape[-2:]
        across = torch.arange(width, device=x.device)
        rows = top + torch.arange(height, device=x.device)
        columns = left + torch.where(flip == 1, width - 1 - across, across)
        # One gather over the pixels of the padded planes, [..., n, c, (h+2p)·(w+2p)].
        places = rows.unsqueeze(-1) * (width + 2 * self.padding) + columns.unsqueeze(-2)
        planes = pad(x, [self.padding] * 4).flatten(-2)
        index = places.flatten(-2).unsqueeze(-2).expand(*x.shape[:-2], -1)
        return planes.gather(-1, index).view(x.shape)
