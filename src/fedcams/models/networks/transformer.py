"""The network of the model `transformer`."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class CausalAttention(nn.Module):
    """Attention of each place to itself and those before it: `[n, length, dim] -> [n, length, dim]`."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return a weighted mean of the values of all places up to each place, one per head."""
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for part in self._parts(x))
        scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5  # [n, heads, length, length]
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(later, -torch.inf).softmax(-1) @ value
        outputs: Tensor = self.out(mixed.transpose(-3, -2).flatten(-2))
        return outputs

    def _parts(self, x: Tensor) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = self.project(x).chunk(3, -1)
        return parts


class Block(nn.Module):
    """Attention, then a perceptron, each of normalised inputs and added to them."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(dim), CausalAttention(dim, heads))
        self.perceptron = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        """Return `[n, length, dim]` from the same shape."""
        x = x + self.attention(x)
        outputs: Tensor = x + self.perceptron(x)
        return outputs


class CharacterTransformer(nn.Module):
    """Predictions of the next token at each place of a sequence: `[n, length] -> [n, length, classes]`."""

    def __init__(self, length: int, classes: int, dim: int, depth: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, dim)
        self.position = nn.Parameter(0.02 * torch.randn(length, dim))
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, classes))
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs for `x [n, length]`."""
        outputs: Tensor = self.head(self.blocks(self.embedding(x) + self.position))
        return outputs
