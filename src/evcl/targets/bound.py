"""The evidence lower bound of a variational auto-encoder (Kingma and Welling, 2014):

    -log p(x) <= -log p(x | z) + KL(q(z | x) || N(0, I)),    z = mu(x) + sigma(x) eps

The outputs of the network (`evcl.nn.VAE`) are those of the decoder, followed by mu and log sigma^2. p(x | z) is a
Bernoulli for each input, whose logits the decoder gives; its inputs are within 0 to 1, as pixels are. With `gaussian`
it is N(x; m, v), and the decoder gives the means m, then the log variances.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.inputs import Label
from evcl._core.randomness import Purpose, generator
from evcl.nn import VAE, BayesianNetwork
from evcl.nn.passes import bound_to
from evcl.targets.energy import NO_VAE, Energy
from evcl.targets.likelihood import Means

MOST_NUMBERS = 5_000_000  # of a replica's outputs that are held at once; it must not depend on the replicas beside it
LEAST_LOG_VARIANCE = -8.0  # without a limit, the density of a constant input is infinite


class Bound(Energy):
    """The negative evidence lower bound of the inputs. `samples`: the latent draws that estimate `log_likelihood`."""

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
        decoded, code = outputs.tensor_split([self.width(y)], 1)
        mu, log_variance = code.chunk(2, 1)
        kl: Tensor = 0.5 * (mu.square() + log_variance.exp() - 1 - log_variance).sum(1)
        return kl + self.distortion(decoded, y)

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

    def read(self, x: Tensor, y: object, verb: str) -> Tensor | list[Label]:
        low, high = float(x.min()), float(x.max())
        if not self.gaussian and not 0 <= low <= high <= 1:
            raise EvclError(f"{verb}: a bound takes inputs within 0 to 1, not {low:g} to {high:g}: scale them first")
        if y is not None:
            raise EvclError(f"a bound explains its inputs: call {verb}(x)")
        return []

    def check(self, network: BayesianNetwork, x: Tensor) -> None:
        vae = _vae(network)
        decoded, code = self.width(x.flatten(1)), 2 * vae.latents
        with torch.no_grad(), network.alone():
            encoded = vae.encoder(x.clone()).flatten(1).shape[1]
        came = network.whole - encoded
        if (came, encoded) != (decoded, code):
            raise EvclError(
                f"for {self.name} of {x.numel()} inputs with {vae.latents} latents, the encoder must give {code} "
                f"numbers and the decoder {decoded}, not {encoded} and {came}"
            )

    def log_likelihood(self, at: Means, x: Tensor, y: Tensor, samples: int | None = None) -> Tensor:
        """log 1/S sum_s p(x, z_s) / q(z_s | x), z_s drawn from q(z | x): at most log p(x), its limit for large S."""
        network, mean, r = at.network, at.weights, len(at.weights)
        vae, samples = _vae(network), samples or self.samples
        sources = [generator(seed, Purpose.IMPORTANCE, at.task, device=mean.device) for seed in at.seeds]
        rows = max(1, MOST_NUMBERS // network.whole)
        step, log_p = min(samples, rows), []
        for xs in x.split(max(1, rows // samples), 1):
            wide = xs.repeat(r // len(xs), *[1] * (xs.dim() - 1)).flatten(0, 1)
            n, pieces = xs.shape[1], []
            with bound_to(network, mean, at.task, len(wide)):
                code = vae.encoder(wide).unflatten(0, (r, n))
            mu, log_variance = code.chunk(2, 2)
            for start in range(0, samples, step):
                s = min(step, samples - start)
                eps = torch.stack(
                    [torch.randn(n, s, mu.shape[2], generator=g, device=mu.device, dtype=mu.dtype) for g in sources]
                )
                z = mu.unsqueeze(2) + (0.5 * log_variance).exp().unsqueeze(2) * eps
                with bound_to(network, mean, at.task, r * n * s):
                    decoded = vae.decoder(z.flatten(0, 2)).flatten(1)
                each = [t.unsqueeze(2).expand(-1, -1, s, -1).flatten(0, 2) for t in (code, wide.view(r, n, -1))]
                pieces.append(self.log_weight(decoded, each[0], eps.flatten(0, 2), each[1]).view(r, n, s).logsumexp(2))
            log_p.append(torch.stack(pieces).logsumexp(0))
        return torch.cat(log_p, 1) - float(torch.tensor(float(samples)).log())

    def sample(self, at: Means, count: int) -> Tensor:
        """The mean of p(x | z) for z from N(0, I)."""
        vae, mean = _vae(at.network), at.weights
        sources = [generator(seed, Purpose.SAMPLE, at.task) for seed in at.seeds]
        z = torch.stack([torch.randn(count, vae.latents, generator=source) for source in sources])
        with bound_to(at.network, mean, at.task, len(mean) * count):
            flat = self.shown(vae.decoder(z.to(mean).flatten(0, 1)).flatten(1))
        means: Tensor = flat.unflatten(0, (len(mean), count))
        return means

    def shown(self, outputs: Tensor) -> Tensor:
        """[M, D]: the mean of p(x | z), from the decoder's outputs."""
        return outputs.chunk(2, 1)[0] if self.gaussian else outputs.sigmoid()


def _vae(network: BayesianNetwork) -> VAE:
    if not isinstance(network.trunk, VAE):
        raise EvclError(NO_VAE)
    return network.trunk
