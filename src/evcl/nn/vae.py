"""A variational auto-encoder from any encoder and decoder."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise

import torch
from torch import Tensor, nn

from evcl.nn.convert import register
from evcl.nn.initial import he_layer
from evcl.nn.layer import BayesianLayer
from evcl.nn.private import PerTask


class Draw(nn.Module):
    """z = mu + sigma eps from [mu, log sigma^2]; in predictions, z = mu."""

    def forward(self, x: Tensor) -> Tensor:
        return x.chunk(2, 1)[0]


class NoisyDraw(BayesianLayer):
    """The form of `Draw` that takes eps from the step's noise."""

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = x.chunk(2, 1)
        noise, r = self.weights.noise, self.weights.replicas
        if noise is None:
            return mean
        eps = noise.normal_(mean.new_empty(r, len(mean) // r, mean.shape[1])).view(mean.shape)
        return mean + (0.5 * log_variance).exp() * eps


register(Draw, NoisyDraw)


class VAE(nn.Module):
    """The network of `likelihood="bound"`: [M, ...] -> [M, outputs of the decoder, 2 latents].

    `encoder` maps a batch to [M, 2 latents], mu and log sigma^2 of q(z | x). `decoder` maps z [M, latents] to what
    p(x | z) needs: [M, D], or [M, ...] with D numbers in all, logits of D pixels, or for `gaussian-bound` [M, 2 D].
    Wrap a part in `evcl.nn.PerTask` to give every task its own.
    """

    def __init__(self, encoder: nn.Module, decoder: nn.Module, latents: int) -> None:
        super().__init__()
        self.encoder, self.draw, self.decoder, self.latents = encoder, Draw(), decoder, latents

    def forward(self, x: Tensor) -> Tensor:
        code = self.encoder(x)
        return torch.cat([self.decoder(self.draw(code)).flatten(1), code], 1)


def task_vae(inputs: int, width: int = 500, latents: int = 50, encoder_layers: int = 3, seed: int = 0) -> VAE:
    """The model of the VCL paper (Nguyen et al., 2018): every task has its own encoder, of `encoder_layers` hidden
    layers, and its own first two layers of the decoder. All tasks share the last two layers of the decoder.
    """
    source = torch.Generator().manual_seed(seed)
    encoder = [nn.Flatten(), *layers([inputs, *[width] * encoder_layers, 2 * latents], source)]
    head = [*layers([latents, width, width], source), nn.ReLU()]
    shared = layers([width, width, inputs], source)
    return VAE(PerTask(nn.Sequential(*encoder)), nn.Sequential(PerTask(nn.Sequential(*head)), *shared), latents)


def layers(widths: Sequence[int], source: torch.Generator) -> list[nn.Module]:
    """Linear layers of these widths, with ReLUs between them."""
    pairs = [(he_layer(source, nn.Linear, ins, outs), nn.ReLU()) for ins, outs in pairwise(widths)]
    return list(chain.from_iterable(pairs))[:-1]
