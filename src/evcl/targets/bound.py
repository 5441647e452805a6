"""The evidence lower bound of a variational auto-encoder (Kingma and Welling, 2014):

    -log p(x) <= -log p(x | z) + KL(q(z | x) || N(0, I)),    z = mu(x) + sigma(x) eps

The outputs of the network (`evcl.nn.VAE`) are those of the decoder, followed by mu and log sigma^2. p(x | z) is a
Bernoulli for each input, whose logits the decoder gives; its inputs are within 0 to 1, as pixels are. With `gaussian`
it is N(x; m, v), and the decoder gives the means m, then the log variances.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

from evcl.targets.energy import Energy

LEAST_LOG_VARIANCE = -8.0  # without a limit, the density of a constant input is infinite


class Bound(Energy):
    """The negative evidence lower bound of the inputs. `samples`: the latent draws of an importance-sampled
    `log_likelihood`.
    """

    draws = True

    def __init__(self, gaussian: bool = False, samples: int = 1000) -> None:
        super().__init__()
        self.gaussian, self.samples = gaussian, samples
        self.name = "gaussian-bound" if gaussian else "bound"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bound) and (self.gaussian, self.samples) == (other.gaussian, other.samples)

    def __hash__(self) -> int:
        return hash((self.gaussian, self.samples))

    def nll(self, outputs: Tensor, y: Tensor, columns: Tensor | None = None) -> Tensor:
        """[M]: -log p(y | z) + KL(q(z | y) || N(0, I))."""
        y = y.flatten(1)
        shown, code = outputs.tensor_split([self.width(y)], 1)
        mu, log_variance = code.chunk(2, 1)
        kl: Tensor = 0.5 * (mu.square() + log_variance.exp() - 1 - log_variance).sum(1)
        return kl + self.distortion(shown, y)

    def width(self, y: Tensor) -> int:
        """The number of outputs of the decoder for inputs y [M, D]."""
        return y.shape[1] * (2 if self.gaussian else 1)

    def distortion(self, shown: Tensor, y: Tensor) -> Tensor:
        """[M]: -log p(y | z), from the decoder's outputs for z."""
        if not self.gaussian:
            return F.binary_cross_entropy_with_logits(shown, y, reduction="none").sum(1)
        mean, spread = shown.chunk(2, 1)
        spread = spread.clamp_min(LEAST_LOG_VARIANCE)
        return 0.5 * ((y - mean).square() * (-spread).exp() + spread + math.log(2 * math.pi)).sum(1)

    def log_weight(self, shown: Tensor, code: Tensor, eps: Tensor, y: Tensor) -> Tensor:
        """[M]: log p(y, z) / q(z | y) for z = mu + sigma eps, with the decoder's outputs for this z."""
        mu, log_variance = code.chunk(2, 1)
        z = mu + (0.5 * log_variance).exp() * eps
        return 0.5 * (eps.square() + log_variance - z.square()).sum(1) - self.distortion(shown, y)

    def shown(self, outputs: Tensor) -> Tensor:
        """[M, D]: the mean of p(x | z), from the decoder's outputs."""
        return outputs.chunk(2, 1)[0] if self.gaussian else outputs.sigmoid()
