"""Convolutional trunks for colour images: the field's two ResNet-18s, and a small network.

| | first layer | channels | output | weights |
|---|---|---|---|---|
| `reduced_resnet18` (Lopez-Paz and Ranzato, 2017; van de Ven, 2025) | 3x3 | 20, 40, 80, 160 | 160 | 1,093,140 |
| `resnet18` (He et al., 2016; Buzzega et al., 2020) | 3x3 | 64, 128, 256, 512 | 512 | 11,168,832 |
| `cnn` (Zenke et al., 2017) | 3x3 | 32, 32, 64, 64 | 512 | 1,245,728 |

Both ResNets are made for small images: stride 1 and no pooling before the first block.

`norm` is `batch`, as published, or `group`. A batch norm measures its statistics while the first task is learned, and
keeps them from then on (see `evcl.nn.norms`). A group norm, of up to 32 groups, has no statistics, so that no task's
images are normalised by those of another.
"""

from __future__ import annotations

import math
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

Norm = Literal["batch", "group"]
NORM_GROUPS = 32  # of a group norm, or fewer if they do not divide the channels


def _norm(kind: Norm, channels: int) -> nn.Module:
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(math.gcd(NORM_GROUPS, channels), channels)


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, ins: int, outs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(ins, outs, 3, stride, 1, bias=False), _norm(norm, outs)
        self.conv2, self.norm2 = nn.Conv2d(outs, outs, 3, 1, 1, bias=False), _norm(norm, outs)
        self.shortcut = nn.Sequential()
        if stride > 1 or ins != outs:
            self.shortcut = nn.Sequential(nn.Conv2d(ins, outs, 1, stride, bias=False), _norm(norm, outs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    """Four stages of two blocks, of `width`, 2, 4 and 8 times `width` channels; the mean over the positions."""

    def __init__(self, width: int, channels: int, norm: Norm) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(channels, width, 3, 1, 1, bias=False), _norm(norm, width), nn.ReLU())
        blocks, ins = [], width
        for stage in range(4):
            outs = width * 2**stage
            blocks += [Block(ins, outs, 1 if stage == 0 else 2, norm), Block(outs, outs, 1, norm)]
            ins = outs
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1).flatten(1)


def reduced_resnet18(channels: int = 3, norm: Norm = "batch") -> ResNet18:
    """ResNet-18 with fewer channels: 20 in the first stage."""
    return ResNet18(20, channels, norm)


def resnet18(channels: int = 3, norm: Norm = "batch") -> ResNet18:
    """ResNet-18 for small images: 64 channels in the first stage."""
    return ResNet18(64, channels, norm)


def cnn(channels: int = 3, side: int = 32, dropout: float = 0.0) -> nn.Sequential:
    """Four convolutions and a linear layer, for images of `side` x `side` pixels, at least 10.

    In training, each unit of the linear layer is dropped with probability `dropout`, and each value after a pooling
    layer with half of it. The published network has 0.5.
    """
    layers: list[nn.Module] = []
    for ins, outs in ((channels, 32), (32, 64)):
        layers += [nn.Conv2d(ins, outs, 3, padding=1), nn.ReLU(), nn.Conv2d(outs, outs, 3), nn.ReLU()]
        layers += [nn.MaxPool2d(2), *([nn.Dropout(dropout / 2)] if dropout else [])]
        side = (side - 2) // 2
    layers += [nn.Flatten(), nn.Linear(64 * side**2, 512), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
    return nn.Sequential(*layers)
