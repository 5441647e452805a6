"""Random crops and flips of images: the setting `augment`.

Each image is padded with 4 zeros on every side, cropped to its own size at a random place and, with probability 1/2,
flipped from left to right. The draws are those of the step, so that every epoch has new ones, a resumed run has the
same, and nothing waits for the host. Examples are kept as they are, and augmented like new ones when
they are trained on; teachers and the Fisher use the images as they are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.randomness import Noise

PAD = 4  # zeros on every side


def check_images(x: Tensor) -> None:
    """Refuse examples x [U, N, ...] that are not images."""
    if x.dim() != 5:
        raise EvclError(
            "augment=true needs images [channels, height, width], but an example has the shape "
            f"{list(x.shape[2:])}: leave augment out",
            setting="augment",
        )


def augmented(x: Tensor, noise: Noise) -> Tensor:
    """The images x [R, B, c, h, w], each cropped at a place of its own, and half of them flipped."""
    r, b, c, h, w = x.shape
    drawn = noise.uniform_(x.new_empty(r, b, 3)).view(r * b, 3)
    top, left = (drawn[:, :2] * (2 * PAD + 1)).long().clamp_(max=2 * PAD).unsqueeze(2).unbind(1)  # [R*B, 1] each
    across = torch.arange(w, device=x.device).expand(r * b, w)
    across = torch.where(drawn[:, 2:] < 0.5, across, w - 1 - across)
    each = torch.arange(r * b, device=x.device).view(-1, 1, 1, 1)
    channels = torch.arange(c, device=x.device).view(1, -1, 1, 1)
    down = (top + torch.arange(h, device=x.device)).view(-1, 1, h, 1)
    across = (left + across).view(-1, 1, 1, w)
    padded = F.pad(x.flatten(0, 1), (PAD,) * 4)
    return padded[each, channels, down, across].view(x.shape)
