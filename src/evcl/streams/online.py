"""Plain online training: the network that a stream makes for itself, one step of Adam per batch, and nothing Bayesian.

It is what `evcl.Stream` is measured against in `evcl run STREAM --method naive`: the same network, inputs and batches.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from evcl._core.errors import EvclError
from evcl._core.files import open_tensors, parsed, save_tensors
from evcl.learner.saved import reading
from evcl.streams.building import UNITS
from evcl.streams.jacobian import default
from evcl.streams.scaling import Scaling, squashed

NOTE = "evcl_online"  # the name of the description in the metadata


class Online:
    """Classes 0 to `classes` - 1, learned by Adam from rows in order; a class's output is relative to class 0's."""

    likelihood = "categorical"

    def __init__(self, inputs: int, classes: int, seed: int, lr: float) -> None:
        self.classes: Sequence[int] = range(classes)
        self.alarms: list[Any] = []  # it raises none
        self.rows, self.settings = 0, {"inputs": inputs, "classes": classes, "seed": seed, "lr": lr}
        network = default(inputs, UNITS, seed)
        self.hidden = torch.from_numpy(network.start).view(UNITS, inputs + 1).clone().requires_grad_()
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
        found = {"hidden": self.hidden.detach(), "out": self.out.detach()}
        found |= {name: torch.from_numpy(array) for name, array in self.scaling.arrays().items()}
        for name, parameter in (("hidden", self.hidden), ("out", self.out)):
            state = self.optimizer.state[parameter] or {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
            found |= {f"{name} {key}": value for key, value in state.items()}
        return found

    def save(
        self, path: str | os.PathLike[str], notes: Mapping[str, str] = {}, beside: Mapping[str, Tensor] = {}
    ) -> None:
        """Write everything to a file from which `load` goes on bit for bit; see `evcl.streams.saved.save`."""
        tensors = {name: tensor.detach().contiguous() for name, tensor in self.tensors().items()}
        described = json.dumps({**self.settings, "rows": self.rows})
        save_tensors(path, {**tensors, **beside}, {**notes, NOTE: described})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Online:
        with reading(path) as found, open_tensors(found) as file:
            described = parsed((file.metadata() or {})[NOTE])
            rows = int(described.pop("rows"))
            learner = cls(**described)
            own = learner.tensors()
            if any(file.get_tensor(name).shape != tensor.shape for name, tensor in own.items()):
                raise EvclError("its tensors do not fit")
            with torch.no_grad():
                learner.hidden.copy_(file.get_tensor("hidden"))
                learner.out.copy_(file.get_tensor("out"))
            for name, parameter in (("hidden", learner.hidden), ("out", learner.out)):
                keys = ("step", "exp_avg", "exp_avg_sq")
                learner.optimizer.state[parameter] = {key: file.get_tensor(f"{name} {key}") for key in keys}
            learner.scaling.restore({name: file.get_tensor(name).numpy() for name in learner.scaling.arrays()})
            learner.rows = rows
        return learner
