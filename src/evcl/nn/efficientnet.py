"""EfficientNet-Lite0 (Tan and Le, 2019), pretrained on ImageNet: a network for images in colour, of any size from 32
pixels a side; 224 is the size that it was trained on.

The names of its weights are those of the published file. Pixels are expected from -1 to 1. Its features are the 1,280
means over the positions; with `classes`, the outputs are the logits of the 1,000 classes of ImageNet.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evcl.data import load_arrays
from evcl.data.weights import read_torch

STAGES = (  # blocks, kernel, stride, expansion, channels
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
STEM_CHANNELS, TOP_CHANNELS, CLASSES = 32, 1280, 1000


class _Padded(nn.Module):
    """Padding by itself, before a plain convolution, which has a Bayesian form. As TensorFlow does, it pads by as much
    as the size of the image needs, and more at the end.
    """

    def __init__(self, kernel: int, stride: int) -> None:
        super().__init__()
        self.kernel, self.stride = kernel, stride

    def forward(self, x: Tensor) -> Tensor:
        sides = []
        for size in (x.shape[-1], x.shape[-2]):
            whole = max((-(-size // self.stride) - 1) * self.stride + self.kernel - size, 0)
            sides += [whole // 2, whole - whole // 2]
        return F.pad(x, sides) if any(sides) else x


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)


class _Block(nn.Module):
    """An expansion by 1x1, a convolution per channel, and a projection by 1x1, beside a shortcut."""

    def __init__(self, ins: int, outs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = ins * expansion
        self.expands, self.shortcut = expansion > 1, stride == 1 and ins == outs
        if self.expands:
            self._expand_conv, self._bn0 = nn.Conv2d(ins, inner, 1, bias=False), _norm(inner)
        self.pad = _Padded(kernel, stride)
        self._depthwise_conv = nn.Conv2d(inner, inner, kernel, stride, groups=inner, bias=False)
        self._bn1 = _norm(inner)
        self._project_conv, self._bn2 = nn.Conv2d(inner, outs, 1, bias=False), _norm(outs)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu6(self._bn0(self._expand_conv(x))) if self.expands else x
        h = F.relu6(self._bn1(self._depthwise_conv(self.pad(h))))
        h = self._bn2(self._project_conv(h))
        assert isinstance(h, Tensor)
        return h + x if self.shortcut else h


class EfficientNetLite0(nn.Module):
    """From images [N, 3, height, width] to features [N, 1280]; with `classes`, to logits [N, 1000]."""

    def __init__(self, classes: bool = False) -> None:
        super().__init__()
        self.pad = _Padded(3, 2)
        self._conv_stem, self._bn0 = nn.Conv2d(3, STEM_CHANNELS, 3, 2, bias=False), _norm(STEM_CHANNELS)
        blocks, ins = [], STEM_CHANNELS
        for count, kernel, stride, expansion, outs in STAGES:
            for i in range(count):
                blocks.append(_Block(ins, outs, kernel, 1 if i else stride, expansion))
                ins = outs
        self._blocks = nn.ModuleList(blocks)
        self._conv_head, self._bn1 = nn.Conv2d(ins, TOP_CHANNELS, 1, bias=False), _norm(TOP_CHANNELS)
        if classes:
            self._fc = nn.Linear(TOP_CHANNELS, CLASSES)
        self.classes = classes

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu6(self._bn0(self._conv_stem(self.pad(x))))
        for block in self._blocks:
            h = block(h)
        features = F.relu6(self._bn1(self._conv_head(h))).mean((2, 3))
        return self._fc(features) if self.classes else features


def efficientnet_lite0(data_dir: Path | None = None, classes: bool = False) -> EfficientNetLite0:
    """EfficientNet-Lite0 with its pretrained weights, which are fetched if the cache does not have them."""
    tensors = read_torch(load_arrays("efficientnet-lite0", data_dir)["model"])
    with torch.device("meta"):
        made = EfficientNetLite0(classes)
    wanted = {name: t for name, t in tensors.items() if classes or not name.startswith("_fc.")}
    made.load_state_dict(wanted, assign=True)
    return made.eval()
