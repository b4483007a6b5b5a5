"""A small convolutional network without batch-norm, for digits and quick looks at CIFAR."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fedcams.models.base import Model
from fedcams.registry import integer, register


def _halving(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    """`[n, inputs, h, w] -> [n, outputs, h/2, w/2]`."""
    return nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)


@register("cnn")
@dataclass(frozen=True)
class CNN(Model):
    """Twice (3x3 convolution, ReLU, 2x2 max-pooling), then linear; the second convolution has twice the channels."""

    channels: int = integer(32, low=1, doc="channels of the first convolution")

    reference = "LeCun, Bottou, Bengio, Haffner, Gradient-Based Learning Applied to Document Recognition, 1998"
    examples = ("cnn", "cnn(channels=8)")
    refused = (("cnn(channels=0)", r"allowed: an integer in \[1, inf\)"),)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        narrow, wide = self.channels, 2 * self.channels
        body = (*_halving(self.image_channels(shape, smallest=4), narrow), *_halving(narrow, wide))
        features = wide * (shape[1] // 4) * (shape[2] // 4)
        return nn.Sequential(*body, nn.Flatten(), nn.Linear(features, classes))
