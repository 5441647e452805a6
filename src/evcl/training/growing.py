"""Replicas whose weights grow in number: new heads, classes, columns and FiLM rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.randomness import Purpose, generator, weights_of
from evcl._core.settings import Settings
from evcl.methods import Method, Model, for_settings, memories, packing
from evcl.methods.memories import Fresh, hows
from evcl.nn import BayesianNetwork, Gaussian, Layout, Slot, he_std, he_uniform, head
from evcl.posterior import Extending
from evcl.training.replicas import Replicas, stack
from evcl.training.state import under


class Growing(Replicas):
    """Replicas to which heads, classes, columns and memories are added."""

    def add_head(self, features: int, classes: int) -> int:
        """Add a head, with He-uniform means and the first prior, and return its number."""
        return self.add_heads(features, [classes])[0]

    def add_heads(self, features: int, classes: Sequence[int]) -> list[int]:
        """Add a head for each number of classes; the layout is extended only once."""
        others = [model.network for model in memories.models(self.memory)]
        numbers = [self.network.add_head(count) for count in classes]
        for other in others:
            for _ in classes:
                other.add_head()
        self._grow([head(k, c, features) for k, c in zip(numbers, classes, strict=True)])
        return numbers

    def grow_head(self, k: int, classes: int) -> None:
        """Extend head k to this many classes; the weights of existing classes stay."""
        features = self.network.layout.shapes[f"head {k}.weight"][1]
        self._grow([head(k, classes, features)])

    def grow_inputs(self, count: int) -> None:
        """Give the first layer of the trunk, an mlp, this many more inputs. Their weights have the first prior, and
        start at its mean, 0. The module itself stays as it is.
        """
        network = self.network
        weight, bias = network.trunk_names[:2]
        width, inputs = network.layout.shapes[weight]
        remembered = memories.with_inputs(self.memory, count)
        old, new = network.layout, Layout({**network.layout.shapes, weight: (width, inputs + count)})
        network.scales |= dict.fromkeys((weight, bias), he_std(inputs + count))
        none = network.posterior.mean.new_zeros(len(self.seeds), new.size)
        self.memory = remembered
        self._relay(old, new, self._around(network, none, none, new, self.settings), lambda model: model)

    def grow_trunk(self, rounds: int) -> None:
        """If the network grows, have the trunk of this many rounds; weights that it had before keep their values."""
        network = self.network
        if self.method.trunk is None or rounds <= network.rounds:
            return
        mean, old, statistics = network.posterior.mean, network.layout, network.statistics()
        self._convert["device"] = mean.device
        made = self._converted(self.plain_trunk(rounds))
        heads = {name: shape for name, shape in old.shapes.items() if name not in network.trunk_names}
        new = Layout({**made.layout.shapes, **heads})
        network.take_trunk(made, rounds)
        none = mean.new_zeros(len(mean), new.size - made.layout.size)  # the heads have values already
        centre, drawn = (torch.cat([t, none], 1) for t in (made.centre, made.posterior.mean))
        self._relay(old, new, self._around(network, centre, drawn, new, self.settings), lambda model: model)
        network.set_statistics({**network.statistics(), **statistics})
        self._examined.pop(network, None)

    def add_task_weights(self, tasks: int) -> None:
        """If the networks have weights that belong to a task, have them for at least this many."""
        for network in self._networks():
            own = network is self.network and self.drawn
            network.add_task_weights(tasks, self._private_sources if own else None)

    def _private_sources(self, task: int) -> list[torch.Generator]:
        """What the first weights of a task's private layers are drawn from, for each replica."""
        return [generator(seed, Purpose.INIT_PRIVATE, task) for seed in self.seeds]

    def _grow(self, slots: Sequence[Slot]) -> None:
        """Move every buffer to a layout with these slots; new weights are initialised as the first weights were."""
        network = self.network
        new = network.with_slots(slots)
        fresh = self._fresh(network, new, slots, "")
        self._relay(network.layout, new, fresh, partial(self._grown, slots))

    def _relay(self, old: Layout, new: Layout, fresh: Fresh, grown: Callable[[Model], Model]) -> None:
        """Move every buffer from one layout to another. `grown` extends second networks."""
        network = self.network
        extended = old.extending(new)
        network.posterior = _extended(network.posterior, extended, fresh.posterior)
        network.layout = new
        self.memory = memories.relaid(self.memory, extended, fresh, grown)
        self._changed()

    def _grown(self, slots: Sequence[Slot], model: Model) -> Model:
        """Extend a second network by the same heads."""
        network = model.network
        old, new = network.layout, network.with_slots(slots)
        fresh = self._fresh(network, new, slots, model.name).posterior
        network.layout = new
        network.posterior = _extended(model.posterior, old.extending(new), fresh)
        return replace(model, posterior=network.posterior)

    def _fresh(self, network: BayesianNetwork, new: Layout, slots: Sequence[Slot], of: str) -> Fresh:
        """Initial values of the weights of these slots, over the whole new layout; 0 for all other weights."""
        mean, old = network.posterior.mean, network.layout
        part = new.part([name for slot in slots for name in slot.named])
        drawn = mean.new_zeros(len(mean), part.size)
        for slot in slots:
            for name, shape in slot.named.items():
                network.scales[name] = he_std(slot.fan_in)
                have = prod(old.shapes[name]) if name in old.shapes else 0
                sources = [generator(seed, weights_of(name, of), have) for seed in self.seeds]
                rows = [he_uniform((prod(shape) - have,), slot.fan_in, source) for source in sources]
                drawn[:, part.spans[name]][:, have:] = torch.stack(rows).to(mean)

        def whole(own: Tensor) -> Tensor:
            found = own.new_zeros(len(own), new.size)
            if old.size + part.size == new.size:  # all are new, and the last
                found[:, old.size :] = own
            else:
                new.scatter_(found, part, own)
            return found

        own = self._around(network, torch.zeros_like(drawn), drawn, part, self.settings)
        return Fresh(own.prior.map(whole), own.posterior.map(whole))

    def switch(self, method: Method, settings: Settings) -> None:
        """Follow this method, with these settings, from now on: the same as before with a memory of examples added or
        changed, or removed. A memory that is added wraps the present one, and starts empty.
        """
        memory, mean = self.memory, self.network.posterior.mean
        method = for_settings(method, settings)
        now, before = (hows(one).keys() for one in (method.memory, memory))
        if now != before and "inner" in before and "inner" not in now:
            memory = memory.inner
        elif now != before:
            centre, trunk = torch.zeros_like(mean), self.network.centre
            if not trunk.is_meta:  # that of an mlp from a file: it is 0
                centre[:, : trunk.shape[1]] = trunk
            fresh = Fresh(replace(self.network.posterior, mean=centre), self.network.posterior)
            memory = replace(memories.initial(method.memory, fresh, _no_network), inner=memory)
        self.memory, self.method, self.settings = memory, method, stack([settings], mean)
        self._changed()

    def load_tensors(self, tensors: dict[str, Tensor], outline: Any, rounds: int, seen: Sequence[int]) -> None:
        """Load the buffers that `tensors()` returned, in the present layout; raise if something does not fit."""
        self.grow_trunk(rounds)
        own = {name: t for name, t in self.tensors().items() if not name.startswith("memory")}
        for name, wanted in own.items():
            found = tensors[name]
            if found.shape != wanted.shape or found.dtype != wanted.dtype or not packing.finite(found):
                raise EvclError(f"{name} must be {wanted.dtype} {tuple(wanted.shape)} and finite")
            if name.startswith("posterior."):
                packing.check_size(name, found)
        self.memory = packing.from_tensors(self.memory, outline, under("memory/", tensors), self._fits(len(seen)))
        for i, network in enumerate(self._networks()):
            if network.task_weights is not None:
                network.task_weights = replace(network.task_weights, table=tensors[f"film {i}"])
        self.network.posterior = Gaussian(tensors["posterior.mean"], tensors.get("posterior.log_std"))
        self.network.set_statistics({name: tensors[f"statistics.{name}"] for name in self.network.statistics()})
        self.rounds, self.seen = rounds, tuple(seen)
        self._changed()


def _no_network(field: str, make: Any) -> Model:
    raise EvclError(f"a second network ({field}) cannot be added to a learner that has learned tasks")


def _extended(q: Gaussian, extended: Extending, start: Gaussian) -> Gaussian:
    log_std = None
    if q.log_std is not None and start.log_std is not None:
        log_std = extended(q.log_std, start.log_std)
    return Gaussian(extended(q.mean, start.mean), log_std)
