"""An agent: the policy of R replicas, their value functions, and what the method keeps of earlier tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from evcl._core.errors import Diverged, EvclError
from evcl._core.randomness import GeneratorNoise, HostNoise, Noise, Purpose, generator, weights_of
from evcl._core.settings import Settings, decided
from evcl.curvature import Sample, fisher
from evcl.methods import KL, Elastic, Method, Term, collapse
from evcl.methods.memory import narrowed
from evcl.nn import BayesianNetwork, Gaussian, Layout, bayesianize, he_std, he_uniform, head, log_stds
from evcl.nn.convert import INIT_SHARE
from evcl.rl.methods import configured
from evcl.rl.policies import DISCRETE, NORMAL, VALUES, Policy
from evcl.rl.streams import Stream
from evcl.training.rules import Update
from evcl.training.step import Bound

QUIET = 0.01  # first weights of a policy's head, as a fraction of the usual ones: every action is tried at first
ARRIVES = 8  # log sigma comes within a factor exp(-8) of its optimum, even in a short task


class Trainable:
    """The weights of a part of a network, their gradient, and the rule that updates them.

    The loss of the data is differentiated by autograd; the springs of the terms are added by the update.
    """

    def __init__(
        self, network: BayesianNetwork, part: Layout, q: Gaussian, terms: Sequence[Term], s: Settings, steps: int
    ) -> None:
        """`steps`: the number of steps that there will be."""
        variance = q.variance()
        self.values = torch.stack([q.mean] if variance is None else [q.mean, variance])
        self.grads = torch.zeros_like(self.values)
        self.q, self.layout = Gaussian(self.values[0], q.log_std, part), part
        self.bound = Bound(network, part, self.values, self.grads)
        pull, _ = collapse(terms)
        rates = {
            "optimizer": "adam",
            "momentum": 0.0,
            "std_lr_scale": 1.0,
            "std_update": "natural",
            "std_rate": min(0.5, max(0.01, ARRIVES / steps)),
        }
        own = None if variance is None else self.values[1]
        self.update = Update(self.q, own, self.grads, pull, Settings({**rates, "lr": s.lr}))

    def step(self, noise: Noise, loss: Callable[[BayesianNetwork], Tensor], longest: float = math.inf) -> Tensor:
        """One step; `loss(network)` is [R]. The loss's gradient by each replica's means is at most `longest`."""
        self.grads.zero_()
        (found,) = self.bound.backward(noise, lambda network: [loss(network)])
        if longest < math.inf:
            self.grads[0] *= (longest / (self.grads[0].norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1.0)
        self.update()
        return found

    def tensors(self, prefix: str, steps: int) -> dict[str, Tensor]:
        """Everything that `load` needs; `steps` have been taken."""
        found = {f"{prefix} {i}": tensor for i, tensor in enumerate(self.update.buffers())}
        return {**found, f"{prefix} steps": torch.tensor(steps)}

    def load(self, prefix: str, tensors: dict[str, Tensor]) -> int:
        """The number of steps that had been taken."""
        for i, tensor in enumerate(self.update.buffers()):
            tensor.copy_(tensors[f"{prefix} {i}"])
        steps = int(tensors[f"{prefix} steps"])
        self.update.resume(steps)
        return steps


class Agent:
    """R agents that learn a stream side by side, one per seed.

    `network.posterior` holds the policies' weights, [R, P]; the trunk's are followed by those of one head or, if the
    tasks have no context, of a head per task. `prior` is the posterior at the end of the last task, and `importance`
    [R, P] the Fisher summed over the tasks before. `values` computes the value functions; `critics` holds their
    weights, one set per task, if the method needs them later.
    """

    def __init__(
        self,
        stream: Stream,
        method: str | Method,
        settings: Mapping[str, Any],
        seeds: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> None:
        """`method`: its name, or the method itself. `settings` that are not given have their defaults."""
        if not len(seeds):
            raise EvclError("agents need at least one seed, such as seeds=[0]", setting="seeds")
        method, s = configured(method, settings, stream.name)
        self.stream, self.method, self.s, self.seeds = stream, method, s, list(seeds)
        self.device = torch.device(device)
        if s.algorithm == "dqn" and (stream.continuous or "clone" in s):
            what = "actions that are numbers" if stream.continuous else f"{method.name}, which replays policies"
            raise EvclError(f"a Q network cannot learn {what}: leave out algorithm=dqn", setting="algorithm")
        self.policy: Policy = VALUES if s.algorithm == "dqn" else NORMAL if stream.continuous else DISCRETE
        self.contexts = torch.tensor([task.context for task in stream.tasks], device=self.device)  # [T, C]
        self.shared = self.contexts.shape[1] > 0  # whether all tasks use one head
        heads = 1 if self.shared else len(stream)
        self.network = self._made("policy", self.policy.outputs(stream.actions), heads, method.bayesian)
        self.values = self._made("values", 1, 1, bayesian=False)
        mean = self.network.posterior.mean
        centre = torch.zeros_like(mean)
        centre[:, : self.network.centre.shape[1]] = self.network.centre
        wide = self.network.first_log_std(s.prior_std, mean).expand_as(mean).clone() if method.bayesian else None
        self.prior = Gaussian(centre, wide)
        self.importance = torch.zeros_like(mean)
        self.critics: dict[int, Tensor] = {}
        self.kept: dict[str, Tensor] = {}  # what a method with a replay memory keeps

    def _made(self, of: str, outputs: int, heads: int, bayesian: bool) -> BayesianNetwork:
        """A network with these heads, its means drawn from the seeds."""
        s, seeds, device = self.s, self.seeds, self.device
        sources = [generator(seed, Purpose(f"{of} weights")) for seed in seeds]
        init_std: Any = s.init_std if bayesian else None
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # a network of the user's own may draw from it
            network = bayesianize(self.stream.network(), init_std=init_std, generators=sources, device=device)
        network.bind(network.posterior.mean, None, network.layout)
        with torch.no_grad():
            features = network(torch.zeros(len(seeds), *self.stream.seen, device=device)).shape[1]
        slots = [head(network.add_head(outputs), outputs, features) for _ in range(heads)]
        old, new = network.layout, network.with_slots(slots)
        mean = torch.zeros(len(seeds), new.size, device=device)
        mean[:, : old.size] = network.posterior.mean
        for slot in slots:
            for name, shape in slot.named.items():
                network.scales[name] = he_std(features)
                drawn = [he_uniform(shape, features, generator(seed, weights_of(name, of))) for seed in seeds]
                new.view(mean, name).copy_(torch.stack(drawn) * (QUIET if of == "policy" else 1.0))
        log_std = None
        if bayesian:
            log_std = log_stds(s.init_std, network.scales, new, mean, INIT_SHARE).expand_as(mean).clone()
        network.layout, network.posterior = new, Gaussian(mean, log_std)
        return network

    # --- one task ----------------------------------------------------------------------------------------------------

    def part(self, task: int) -> Layout:
        """The weights that a task trains: the trunk's, and those of the heads so far."""
        return self.network.layout.part(self.network.names_of([0] if self.shared else range(task + 1)))

    def actor(self, task: int, steps: int, samples: int) -> Trainable:
        """The policy's weights in training, with the method's terms. `samples`: the task's environment steps, N."""
        network, part = self.network, self.part(task)
        q = network.posterior.map(lambda t: network.layout.gather(t, part), part)
        terms = [narrowed(term, network.layout, part) for term in self.terms(samples)]
        return Trainable(network, part, q, terms, self.s, steps)

    def terms(self, samples: int) -> list[Term]:
        """beta/N KL(q || q_{t-1}), and lambda/2 sum_i F_i [(mu_i - mu*_i)^2 + (s2_i - s2*_i)^2].

        F is the sum over the tasks before. Laplace's approximation weighs each with N_k / N, which is 1.
        """
        s, found = self.s, list[Term]()
        if self.method.bayesian:
            found.append(KL(self.prior, decided(s.tempering) / samples))
        if "strength" in s:
            found.append(Elastic(self.prior, s.strength * self.importance))
        return found

    def critic(self, steps: int) -> Trainable:
        """A new value function in training."""
        network = self.values
        q = network.posterior.map(lambda t: network.layout.gather(t, network.layout), network.layout)
        return Trainable(network, network.layout, q, [], self.s, steps)

    def finish(self, task: int, actor: Trainable, states: Tensor, critic: Tensor | None = None) -> None:
        """End a task: keep its posterior and, for `states` [R, n, ...] that it visited, its Fisher."""
        network, s, part = self.network, self.s, actor.layout
        q = actor.q.snapshot()
        sound = (q.mean if q.log_std is None else q.mean + q.log_std).isfinite().all(1)
        if not bool(sound.all()):
            bad = ", ".join(str(seed) for seed, ok in zip(self.seeds, sound.tolist(), strict=True) if not ok)
            raise Diverged(f"task {task + 1}: the weights of seed {bad} became NaN or infinite: use a smaller lr")
        network.layout.scatter_(network.posterior.mean, part, q.mean)
        if network.posterior.log_std is not None and q.log_std is not None:
            network.layout.scatter_(network.posterior.log_std, part, q.log_std)
        whole = network.posterior.snapshot()
        first = Gaussian(self.prior.mean.clone(), None if self.prior.log_std is None else self.prior.log_std.clone())
        self.prior = _only(network.layout, part, whole, first)  # heads of later tasks keep their first prior
        if "strength" in s:
            x = self.seen(states, torch.full(states.shape[:2], task, device=self.device))
            sample = Sample(network, q.mean, part, [0 if self.shared else task], x)
            found = fisher(sample, "exact", None, s.fisher_temperature, s.fisher_spread, self.policy)  # type: ignore[arg-type]
            here = torch.zeros_like(self.importance)
            network.layout.scatter_(here, part, found * s.fisher_temperature**2)
            self.importance = s.fisher_decay * self.importance + here
        if critic is not None:
            self.critics[task] = critic

    def memory_bytes(self) -> int:
        """The size, for one replica, of the weights and of what the method keeps of earlier tasks. The prior is the
        last posterior, and counts once; a method with an agent per task keeps all of them.
        """
        found, network = self.tensors(), self.network
        if self.method.needs_task:
            sizes = [
                network.layout.part(network.names_of([0 if self.shared else k])).size for k in range(len(self.stream))
            ]
            return sum(sizes) * network.posterior.mean.element_size()
        unused = {"prior mean", "prior log_std", *(() if "strength" in self.s else ("importance",))}
        total = sum(t.numel() * t.element_size() for name, t in found.items() if name not in unused and t.dim())
        return total // len(self.seeds)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that the tasks so far have left behind."""
        found = {"posterior mean": self.network.posterior.mean, "prior mean": self.prior.mean}
        found |= {"importance": self.importance}
        for name, q in (("posterior", self.network.posterior), ("prior", self.prior)):
            if q.log_std is not None:
                found[f"{name} log_std"] = q.log_std
        found |= {f"critic {k}": weights for k, weights in self.critics.items()}
        return found | {f"kept {name}": tensor for name, tensor in self.kept.items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        def own(name: str) -> Tensor | None:
            return tensors[name].to(self.device) if name in tensors else None

        mean, prior, importance = own("posterior mean"), own("prior mean"), own("importance")
        assert mean is not None
        assert prior is not None
        assert importance is not None
        self.network.posterior = Gaussian(mean, own("posterior log_std"))
        self.prior, self.importance = Gaussian(prior, own("prior log_std")), importance
        named = {name: t.to(self.device) for name, t in tensors.items()}
        self.critics = {int(n.removeprefix("critic ")): t for n, t in named.items() if n.startswith("critic ")}
        self.kept = {n.removeprefix("kept "): t for n, t in named.items() if n.startswith("kept ")}

    # --- outputs -----------------------------------------------------------------------------------------------------

    def seen(self, x: Tensor, tasks: Tensor) -> Tensor:
        """What the networks see: observations x [..., *inputs] of these tasks [...], with the tasks' contexts."""
        return torch.cat([x, self.contexts[tasks]], -1) if self.shared else x

    def forward(self, x: Tensor, tasks: Sequence[int]) -> Tensor:
        """[n, tasks, o]: the outputs for each of the tasks, with the weights that are bound. x [n, ...] are the
        observations of all replicas, in order.
        """
        if not self.shared:
            return self.network.logits(x, tasks).view(len(x), len(tasks), -1)
        each = torch.tensor(tasks, device=x.device).expand(len(x), -1)
        seen = self.seen(x.unsqueeze(1).expand(-1, len(tasks), -1), each)
        return self.network.logits(seen.flatten(0, 1), [0]).view(len(x), len(tasks), -1)

    def forward_each(self, x: Tensor, tasks: Tensor) -> Tensor:
        """[n, o]: as `forward`, with a task [n] for each observation."""
        if self.shared:
            return self.network.logits(self.seen(x, tasks), [0])
        heads = range(int(tasks.max()) + 1)
        return self.forward(x, heads)[torch.arange(len(x), device=x.device), tasks]

    @torch.no_grad()
    def outputs(self, weights: Tensor, layout: Layout, x: Tensor, tasks: Sequence[int]) -> Tensor:
        """[n, tasks, o] for observations x [n, ...]: each of the weights [W, P] for n / W of them, in order."""
        self.bind(weights, layout)
        return self.forward(x, tasks)

    def bind(self, weights: Tensor, layout: Layout) -> None:
        """Compute with these weights [W, P], without draws."""
        self.network.bind(weights, None, layout)
        self.network.weights.noise = None

    @torch.no_grad()
    def value(self, weights: Tensor, x: Tensor) -> Tensor:
        """[R, n]: the values of x [R, n, ...], as the networks see it, by critics [R, P]."""
        self.values.bind(weights, None, self.values.layout)
        self.values.weights.noise = None
        return self.values.logits(x.flatten(0, 1), [0]).view(x.shape[:2])

    def noise(self, purpose: str, *indices: int) -> Noise:
        """The source of the weights' noise in a step of training, the same on every device."""
        found = GeneratorNoise([generator(seed, purpose, *indices) for seed in self.seeds])
        return found if self.device.type == "cpu" else HostNoise(found)

    def drawn(self, make: Callable[[torch.Generator], Tensor], purpose: str, *indices: int) -> Tensor:
        """[R, ...]: what `make(generator)` draws for each replica."""
        return torch.stack([make(generator(seed, purpose, *indices)) for seed in self.seeds]).to(self.device)


def _only(layout: Layout, part: Layout, whole: Gaussian, rest: Gaussian) -> Gaussian:
    """`rest` with the weights of `part` from `whole`."""
    for to, of in ((rest.mean, whole.mean), (rest.log_std, whole.log_std)):
        if to is not None and of is not None:
            layout.scatter_(to, part, layout.gather(of, part))
    return rest
