"""Plain online training: the network that a stream makes for itself, one step of Adam per batch, and nothing Bayesian.

It is what `evcl.Stream` is measured against in `evcl run STREAM --method naive`: the same network, inputs and batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from evcl._core.errors import EvclError
from evcl.streams.arrays import Json
from evcl.streams.building import HIDDEN_UNITS
from evcl.streams.jacobian import default
from evcl.streams.scaling import Scaling, squashed

ADAM = ("step", "exp_avg", "exp_avg_sq")  # what the optimizer knows of a tensor


class Online:
    """Classes 0 to `classes` - 1, learned by Adam from rows in order; a class's output is relative to class 0's."""

    likelihood = "categorical"

    def __init__(self, inputs: int, classes: int, seed: int, lr: float) -> None:
        self.classes: Sequence[int] = range(classes)
        self.alarms: list[Any] = []  # it raises none
        self.rows, self.settings = 0, {"inputs": inputs, "classes": classes, "seed": seed, "lr": lr}
        network = default(inputs, HIDDEN_UNITS, seed)
        self.hidden = torch.from_numpy(network.start).view(HIDDEN_UNITS, inputs + 1).clone().requires_grad_()
        self.out = torch.zeros(classes - 1, len(network.row), dtype=torch.float64, requires_grad=True)
        self.optimizer = torch.optim.Adam([self.hidden, self.out], lr)
        self.scaling = Scaling(inputs)

    def _logits(self, z: Tensor) -> Tensor:
        z = torch.cat([z, z.new_ones(len(z), 1)], 1)
        f = torch.cat([(z @ self.hidden.T).tanh(), z], 1) @ self.out.T
        return torch.cat([f.new_zeros(len(f), 1), f], 1)

    def step(self, x: Tensor, y: Tensor) -> tuple[Tensor, None]:
        """Predict, then learn: the probabilities [n, classes] before the rows are learned."""
        x = x.double()
        logits = self._logits(torch.from_numpy(squashed(self.scaling.scaled(x.numpy()))))
        self.optimizer.zero_grad()
        cross_entropy(logits, y).backward()
        self.optimizer.step()
        self.scaling.add(x.numpy())
        self.rows += len(x)
        return logits.detach().softmax(1), None

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that rows change, by name."""
        tensors = {name: torch.from_numpy(array) for name, array in self.scaling.arrays().items()}
        for name, parameter in (("hidden", self.hidden), ("out", self.out)):
            state = self.optimizer.state[parameter]
            if not state:
                state |= {"step": torch.zeros(()), **{key: torch.zeros_like(parameter) for key in ADAM[1:]}}
            tensors |= {name: parameter.detach(), **{f"{name} {key}": state[key] for key in ADAM}}
        return tensors

    def parts(self) -> tuple[Json, dict[str, Tensor]]:
        """It as what JSON can hold, and its tensors: `restored` goes on bit for bit."""
        return {**self.settings, "rows": self.rows}, self.tensors()

    @classmethod
    def restored(cls, about: Json, tensors: Mapping[str, Tensor]) -> Online:
        learner = cls(**{name: value for name, value in about.items() if name != "rows"})
        own = learner.tensors()
        if any(tensors[name].shape != tensor.shape for name, tensor in own.items()):
            raise EvclError("its tensors do not fit")
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
        learner.scaling.restore({name: tensors[name].numpy() for name in learner.scaling.arrays()})
        learner.rows = int(about["rows"])
        return learner
