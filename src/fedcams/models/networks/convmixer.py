"""ConvMixer and the layers of it that torch does not have."""

from __future__ import annotations

from torch import Tensor, nn


class Residual(nn.Module):
    """Add the input to the output of a module: `f(x) + x`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Map `[n, c, h, w]` to `[n, c, h, w]`."""
        out: Tensor = self.inner(x) + x
        return out


class GlobalAverage(nn.Module):
    """Mean over height and width."""

    def forward(self, x: Tensor) -> Tensor:
        """Map `[n, c, h, w]` to `[n, c]`."""
        return x.mean((-2, -1))


def convmixer(channels: int, classes: int, dim: int, depth: int, kernel: int, patch: int) -> nn.Sequential:
    """Return the network for images `[n, channels, h, w]`: patches, `depth` blocks, global average, linear."""
    patches = nn.Conv2d(channels, dim, patch, stride=patch)
    head = nn.Linear(dim, classes)  # before the blocks: what a seed draws depends on the order
    blocks = (_block(dim, kernel) for _ in range(depth))
    return nn.Sequential(_activated(patches), *blocks, GlobalAverage(), head)


def _block(dim: int, kernel: int) -> nn.Sequential:
    across = nn.Conv2d(dim, dim, kernel, groups=dim, padding="same")
    pointwise = nn.Conv2d(dim, dim, 1)
    return nn.Sequential(Residual(_activated(across)), _activated(pointwise))


def _activated(convolution: nn.Conv2d) -> nn.Sequential:
    return nn.Sequential(convolution, nn.GELU(), nn.BatchNorm2d(convolution.out_channels))
