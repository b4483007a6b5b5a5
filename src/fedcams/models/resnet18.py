"""ResNet-18 for small images: a 3x3 stem and no max-pooling."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedcams.models.base import Model
from fedcams.registry import integer, register


def _conv(inputs: int, outputs: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)  # a batch-norm follows, which shifts


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut, which is a 1x1 convolution if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, outputs, stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = _conv(outputs, outputs, 1)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            projection = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map `[n, inputs, h, w]` to `[n, outputs, h/stride, w/stride]`."""
        out = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


def _stage(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(BasicBlock(inputs, outputs, stride), BasicBlock(outputs, outputs, 1))


class ResNet(nn.Module):
    """Stem, four stages of two blocks, global average, linear; parameters are named as in kuangliu/pytorch-cifar."""

    def __init__(self, channels: int, classes: int, width: int) -> None:
        super().__init__()
        self.conv1 = _conv(channels, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = _stage(width, width, 1)
        self.layer2 = _stage(width, 2 * width, 2)
        self.layer3 = _stage(2 * width, 4 * width, 2)
        self.layer4 = _stage(4 * width, 8 * width, 2)
        self.linear = nn.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[n, channels, h, w]` to `[n, classes]`."""
        x = torch.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        out: Tensor = self.linear(x.mean((-2, -1)))
        return out


@register("resnet18")
@dataclass(frozen=True)
class ResNet18(Model):
    """The CIFAR variant: 3x3 stem, stages of 64, 128, 256, 512 channels; 11,173,962 parameters for 10 classes."""

    width: int = integer(64, low=1, doc="channels of the first stage; each of the next three has twice as many")

    reference = "He, Zhang, Ren, Sun, Deep Residual Learning for Image Recognition, CVPR 2016"
    examples = ("resnet18", "resnet18(width=4)")
    refused = (("resnet18(width=0)", r"allowed: an integer in \[1, inf\)"),)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return ResNet(self.image_channels(shape), classes, self.width)
