"""An energy of your own: anything that a network can minimise, example by example."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.inputs import Label
from evcl.nn import outputs
from evcl.targets.likelihood import Estimate, Likelihood, Means

NO_VAE = "only a network that is an evcl.nn.VAE, learned with likelihood='bound', has a density"
Of = Callable[[Tensor, Tensor], Tensor]


class Energy(Likelihood):
    """`-log p(y | outputs)`, or a bound on it, of a network that has no heads: its own outputs explain the targets.

    `of(outputs, y)` gets the network's outputs [M, F] for M examples and their targets y [M, ...], and returns one
    number per example, [M]. Without targets, `learner.learn(x)`, y is x: the network explains its own inputs.

    - Examples do not affect each other: number m depends on row m alone. Otherwise the Fisher, the weights of examples
      and networks that train side by side are wrong.
    - It is in nats, so that one nat of it counts as much as one nat of the KL, and `strength` 1 of the elastic term is
      Laplace's approximation. A sum over an example's parts (pixels, characters), not their mean.
    - It is differentiable in the outputs, made of tensor operations only, and does not wait for the device (`.item()`,
      boolean indexing), since a GPU captures it in a graph. It draws no random numbers: see `evcl.nn.VAE` for a
      network that does.

    Its Fisher is the mean over examples of the squared gradient of `of`, at the true targets: `fisher` exact, sampled
    and empirical are the same, and there is no temperature.
    """

    name, heads, keeps_rows = "energy", False, True
    usual_tempering = 1.0  # Bayes' rule: nothing is known of labels

    def __init__(self, of: Of | None = None) -> None:
        if not callable(of) and (of is not None or type(self).nll is Energy.nll):  # a subclass may define nll instead
            came = "none" if of is None else type(of).__name__
            raise EvclError(f"Energy takes a function of (outputs, y), not {came}")
        self.of = of

    def nll(self, outputs: Tensor, y: Tensor, columns: Tensor | None = None) -> Tensor:
        """[M]: the energy of each example."""
        assert self.of is not None
        energy = self.of(outputs, y)
        if not isinstance(energy, Tensor) or energy.shape != outputs.shape[:1]:
            came = tuple(energy.shape) if isinstance(energy, Tensor) else type(energy).__name__
            raise EvclError(f"an energy must be one number per example, [{len(outputs)}], not {came}")
        return energy

    def predict(self, outputs: Tensor) -> Tensor:
        return outputs

    def score(self, predicted: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        raise EvclError("an energy has no predictions to score: use log_likelihood")

    def read(self, x: Tensor, y: object, verb: str) -> Tensor | list[Label]:
        """An empty list: there are none, and the inputs are explained."""
        if y is None:
            return []
        targets = torch.as_tensor(y)
        if not len(targets.shape) or len(targets) != len(x):
            raise EvclError(f"{verb} takes a target for each of {len(x)} inputs, not {tuple(targets.shape)}")
        return targets.to(x) if targets.is_floating_point() else targets.to(x.device)

    def log_likelihood(self, at: Means, x: Tensor, y: Tensor, samples: int | None = None) -> Tensor:
        """[R, N]: the negative energy of each example."""
        r = len(at.weights)
        flat = outputs(at.network, at.weights, at.network.layout, x, [], task=at.task).flatten(0, 1)
        y = y.repeat(r // len(y), *[1] * (y.dim() - 1)).flatten(0, 1)
        nll: Tensor = self.nll(flat, y).unflatten(0, (r, -1))
        return -nll

    def sample(self, at: Means, count: int) -> Tensor:
        raise EvclError(NO_VAE)

    def fisher_targets(self, outputs: Tensor, y: Tensor, weights: Tensor, how: Estimate) -> list[Tensor]:
        """The energy itself, whatever the kind."""
        nll = self.nll(outputs.flatten(0, 1), y.flatten(0, 1))
        return [(weights.flatten().sqrt() * nll).sum()]

    def skip_labels(self, outputs: Tensor, generators: Sequence[torch.Generator] | None) -> None:
        """It draws none."""
