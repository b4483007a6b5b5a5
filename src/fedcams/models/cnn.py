"""A small convolutional network without batch-norm, for digits and quick experiments on CIFAR."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedcams.models.base import Model
from fedcams.registry import integer, register


def _halving(inputs: int, outputs: int) -> tuple[torch.nn.Module, ...]:
    """`[n, inputs, h, w] -> [n, outputs, h/2, w/2]`, halves rounded up."""
    return torch.nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), torch.nn.ReLU()


@register("cnn")
@dataclass(frozen=True)
class CNN(Model):
    """Two 3x3 convolutions of stride 2 with ReLU, then linear; the second one has twice the channels."""

    channels: int = integer(8, low=1, doc="channels of the first convolution")

    reference = "Springenberg, Dosovitskiy, Brox, Riedmiller, Striving for Simplicity: The All Convolutional Net, 2015"
    examples = ("cnn", "cnn(channels=32)")
    refused = (("cnn(channels=0)", r"allowed: an integer in \[1, inf\)"),)

    def build(self, shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        narrow, wide = self.channels, 2 * self.channels
        body = (*_halving(self.image_channels(shape, smallest=4), narrow), *_halving(narrow, wide))
        features = wide * -(-shape[1] // 4) * -(-shape[2] // 4)
        return torch.nn.Sequential(*body, torch.nn.Flatten(), torch.nn.Linear(features, classes))
