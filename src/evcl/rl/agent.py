"""An agent: the policy of R replicas, their value functions, and what the method keeps of earlier tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from evcl._core.errors import Diverged, EvclError
from evcl._core.randomness import GeneratorNoise, HostNoise, Noise, Purpose, generator, weights_of
from evcl._core.settings import Settings
from evcl.methods import Fit, Gradients, Method, Reread, Round, TaskData, collapse
from evcl.methods.applied import add_gradients, begin_tracker
from evcl.methods.hosted import Hosted
from evcl.methods.memories import Fresh
from evcl.nn import BayesianNetwork, Gaussian, Part, bayesianize, he_std, he_uniform, head, log_stds
from evcl.nn.convert import INIT_SHARE
from evcl.rl.methods import HOST, configured, of_terms
from evcl.rl.policies import DISCRETE, NORMAL, VALUES, Policy
from evcl.rl.streams import Stream
from evcl.training.rules import Update
from evcl.training.step import Bound

HEAD_INIT_FACTOR = 0.01  # first weights of a policy's head, relative to the usual ones: every action is tried at first
ARRIVES = 8  # log sigma comes within a factor exp(-8) of its optimum, even in a short task


class Trainable:
    """The weights of a network in training, their gradient, and the rule that updates them.

    The loss of the data is differentiated by autograd; the terms of the fit are added to its gradient. A tracker of the
    fit sees the former alone, as in the engine.
    """

    def __init__(self, network: BayesianNetwork, fit: Fit, s: Settings, steps: int) -> None:
        """`steps`: the number of steps that there will be."""
        q, layout = network.posterior.snapshot(), network.layout
        variance = q.variance()
        self.values = torch.stack([q.mean] if variance is None else [q.mean, variance])
        self.grads = torch.zeros_like(self.values)
        self.q, self.layout, self.trackers = Gaussian(self.values[0], q.log_std, layout), layout, list(fit.trackers)
        self.variance = None if variance is None else self.values[1]
        self.gradients = Gradients(self.grads[0], None if variance is None else self.grads[1], layout)
        self.bound = Bound(network, layout, self.values, self.grads)
        pull, self.rest = collapse(fit.terms)
        rates = {
            "optimizer": "adam",
            "momentum": 0.0,
            "std_lr_scale": 1.0,
            "std_update": "natural",
            "std_rate": min(0.5, max(0.01, ARRIVES / steps)),
        }
        self.update = Update(self.q, self.variance, self.grads, pull, Settings({**rates, "lr": s.lr}))
        self.taken = 0
        for tracker in self.trackers:
            begin_tracker(tracker, self.q, Part(layout, layout))

    def step(self, noise: Noise, loss: Callable[[BayesianNetwork], Tensor], longest: float = math.inf) -> Tensor:
        """One step; `loss(network)` is [R]. The loss's gradient by each replica's means is at most `longest`."""
        self.grads.zero_()
        (losses,) = self.bound.backward(noise, lambda network: [loss(network)])
        if longest < math.inf:
            self.grads[0] *= (longest / (self.grads[0].norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1.0)
        for tracker in self.trackers:
            tracker.before(self.q, self.gradients)
        add_gradients(self.rest, self.q, self.gradients, self.variance)
        self.update()
        for tracker in self.trackers:
            tracker.after(self.q)
        self.taken += 1
        return losses

    def _buffers(self) -> list[Tensor]:
        return [*self.update.buffers(), *(buffer for tracker in self.trackers for buffer in tracker.buffers())]

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Everything that `load` needs."""
        state = {f"{prefix} {i}": tensor for i, tensor in enumerate(self._buffers())}
        return {**state, f"{prefix} steps": torch.tensor(self.taken)}

    def load(self, prefix: str, tensors: Mapping[str, Tensor]) -> None:
        for i, tensor in enumerate(self._buffers()):
            tensor.copy_(tensors[f"{prefix} {i}"])
        self.taken = int(tensors[f"{prefix} steps"])
        self.update.resume(self.taken)


class Agent:
    """R agents that learn a stream side by side, one per seed.

    `network.posterior` holds the policies' weights, [R, P]: the trunk's are followed by those of one head or, if the
    tasks have no context, of a head for each task so far. `hosted` is the method, with its memory. `values` computes
    the value functions; `critics` holds their weights, one set per task, if replay needs them later.
    """

    def __init__(
        self,
        stream: Stream,
        method: str | Method,
        settings: Mapping[str, object],
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
        self.network, self.values = self._trunk("policy", method.bayesian), self._trunk("values", bayesian=False)
        self._add_head(self.values, "values", 1)
        self._add_head(self.network, "policy", self.policy.width(stream.actions))
        self.hosted = Hosted(method, of_terms(s), self._fresh(), HOST)
        self.critics: dict[int, Tensor] = {}
        self.kept: dict[str, Tensor] = {}  # what replay keeps
        self._try()

    def _trunk(self, of: str, bayesian: bool) -> BayesianNetwork:
        """The stream's network, its means drawn from the seeds."""
        sources = [generator(seed, Purpose(f"{of} weights")) for seed in self.seeds]
        init_std: Any = self.s.init_std if bayesian else None
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # a network of the user's own may draw from it
            return bayesianize(self.stream.network(), init_std=init_std, generators=sources, device=self.device)

    def _add_head(self, network: BayesianNetwork, of: str, outputs: int) -> None:
        """Add a head, its means drawn from the seeds."""
        mean, old = network.posterior.mean, network.layout
        network.bind(mean, None, old)
        with torch.no_grad():
            features = network(torch.zeros(len(mean), *self.stream.seen, device=self.device)).shape[1]
        slot = head(network.add_head(outputs), outputs, features)
        new = network.with_slots([slot])
        drawn = mean.new_zeros(len(mean), new.size)
        for name, shape in slot.named.items():
            network.scales[name] = he_std(features)
            rows = [he_uniform(shape, features, generator(seed, weights_of(name, of))) for seed in self.seeds]
            new.view(drawn, name).copy_(torch.stack(rows) * (HEAD_INIT_FACTOR if of == "policy" else 1.0))
        extended, log_std = old.extending(new), network.posterior.log_std
        if log_std is not None:
            first = log_stds(self.s.init_std, network.scales, new, drawn, INIT_SHARE)
            log_std = extended(log_std, first.expand_as(drawn))
        network.layout, network.posterior = new, Gaussian(extended(mean, drawn), log_std)

    def _fresh(self) -> Fresh:
        """The first prior and posterior of the policies' weights."""
        network, mean = self.network, self.network.posterior.mean
        centre = torch.zeros_like(mean)
        centre[:, : network.centre.shape[1]] = network.centre
        wide = network.first_log_std(self.s.prior_std, mean).expand_as(mean).clone() if self.method.bayesian else None
        return Fresh(Gaussian(centre, wide), network.posterior)

    def _try(self) -> None:
        """Refuse a method whose fits an agent cannot make: two rounds on nothing, of which nothing remains."""
        trial, network = Hosted(self.method, of_terms(self.s), self._fresh(), HOST), self.network
        states = torch.zeros(len(self.seeds), 2, *self.stream.seen, device=self.device)
        for _ in range(2):
            fit = trial.begin(self._round(trial, 0, states, self.no_actions(2), 2))
            none = torch.zeros_like(network.posterior.mean)
            trial.end(network, network.posterior.snapshot(), [none] * len(fit.trackers))

    # --- one task ----------------------------------------------------------------------------------------------------

    def no_actions(self, count: int) -> Tensor:
        """[R, count], or [R, count, D] if they are numbers: room for actions."""
        shape = (len(self.seeds), count, *([self.stream.actions] if self.stream.continuous else []))
        dtype = torch.float32 if self.stream.continuous else torch.long
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def head_of(self, task: int) -> int:
        return 0 if self.shared else task

    def has_head(self, task: int) -> bool:
        """Whether the policy can act in a task: it has a head for it."""
        return self.head_of(task) < len(self.network.heads)

    def begin(self, task: int, states: Tensor, actions: Tensor, samples: int, steps: int) -> Trainable:
        """The policy's weights in training, with the method's terms, for this many steps of training.

        `samples`: the task's environment steps, N. When the task ends, `states` [R, n, ...], as the network sees them,
        and `actions` [R, n] hold its last ones, on which the method measures it.
        """
        while not self.has_head(task):
            old = self.network.layout
            self._add_head(self.network, "policy", self.policy.width(self.stream.actions))
            self.hosted.grow(old, self.network.layout, self._fresh())
        fit = self.hosted.begin(self._round(self.hosted, task, states, actions, samples))
        return Trainable(self.network, fit, self.s, steps)

    def _round(self, hosted: Hosted, task: int, states: Tensor, actions: Tensor, samples: int) -> Round:
        data = TaskData(states, actions, self.head_of(task), task=task, reread=Reread(samples, _no_more))
        seen = [self.head_of(k) for k in range(hosted.tasks)]
        return Round(hosted.tasks, [data], self.network, self.network.posterior, seen, self.seeds, self.policy)

    def critic(self, steps: int) -> Trainable:
        """A new value function in training."""
        return Trainable(self.values, Fit([]), self.s, steps)

    def finish(self, task: int, actor: Trainable) -> None:
        """End a task: the method measures it, and leaves the posterior."""
        q = actor.q.snapshot()
        sound = (q.mean if q.log_std is None else q.mean + q.log_std).isfinite().all(1)
        if not bool(sound.all()):
            bad = ", ".join(str(seed) for seed, ok in zip(self.seeds, sound.tolist(), strict=True) if not ok)
            raise Diverged(f"task {task + 1}: the weights of seed {bad} became NaN or infinite: use a smaller lr")
        results = [tracker.result() for tracker in actor.trackers]
        self.network.posterior = self.hosted.end(self.network, q, results)

    def memory_bytes(self) -> int:
        """The size, for one replica, of the weights and of what is kept of earlier tasks. A prior that is the posterior
        counts once; a method with an agent per task keeps all of them.
        """
        q, times = self.network.posterior, len(self.stream) if self.method.needs_task else 1
        live = [t for t in (q.mean, q.log_std) if t is not None]
        memory = [t for t in self.hosted.tensors().values() if not any(t.shape == w.shape and t.equal(w) for w in live)]
        stored = [t for t in (*self.critics.values(), *self.kept.values()) if t.dim()]
        return times * sum(t.numel() * t.element_size() for t in (*live, *memory, *stored)) // len(self.seeds)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def outline(self) -> dict[str, Any]:
        """With `tensors`, everything that the tasks so far have left behind."""
        return {"tasks": self.hosted.tasks, "heads": len(self.network.heads), "memory": self.hosted.outline()}

    def tensors(self) -> dict[str, Tensor]:
        q = self.network.posterior
        state = {"posterior mean": q.mean} if q.log_std is None else {"posterior mean": q.mean, "log_std": q.log_std}
        state |= {f"memory {name}": tensor for name, tensor in self.hosted.tensors().items()}
        state |= {f"critic {k}": weights for k, weights in self.critics.items()}
        return state | {f"kept {name}": tensor for name, tensor in self.kept.items()}

    def load(self, outline: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on after the tasks of another agent like this one."""
        named = {name: tensor.to(self.device) for name, tensor in tensors.items()}
        while len(self.network.heads) < outline["heads"]:
            self._add_head(self.network, "policy", self.policy.width(self.stream.actions))
        mean, log_std = self.network.posterior.mean, self.network.posterior.log_std
        if (log_std is None) != ("log_std" not in named) or named["posterior mean"].shape != mean.shape:
            raise ValueError("its weights have another shape")
        self.network.posterior = Gaussian(named["posterior mean"], named.get("log_std"))
        self.hosted.load(outline["memory"], under("memory ", named), outline["tasks"], self._fresh())
        self.critics = {int(k): t for k, t in under("critic ", named).items()}
        self.kept = under("kept ", named)

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
    def outputs(self, weights: Tensor, x: Tensor, tasks: Sequence[int]) -> Tensor:
        """[n, tasks, o] for observations x [n, ...]: each of the weights [W, P] for n / W of them, in order."""
        self.bind(weights)
        return self.forward(x, tasks)

    def bind(self, weights: Tensor) -> None:
        """Compute with these weights [W, P], without draws."""
        self.network.bind(weights, None, self.network.layout)
        self.network.weights.noise = None

    @torch.no_grad()
    def value(self, weights: Tensor, x: Tensor) -> Tensor:
        """[R, n]: the values of x [R, n, ...], as the networks see it, by critics [R, P]."""
        self.values.bind(weights, None, self.values.layout)
        self.values.weights.noise = None
        return self.values.logits(x.flatten(0, 1), [0]).view(x.shape[:2])

    def noise(self, purpose: str, *indices: int) -> Noise:
        """The source of the weights' noise in a step of training, the same on every device."""
        noise = GeneratorNoise([generator(seed, purpose, *indices) for seed in self.seeds])
        return noise if self.device.type == "cpu" else HostNoise(noise)

    def drawn(self, make: Callable[[torch.Generator], Tensor], purpose: str, *indices: int) -> Tensor:
        """[R, ...]: what `make(generator)` draws for each replica."""
        return torch.stack([make(generator(seed, purpose, *indices)) for seed in self.seeds]).to(self.device)


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names have this prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _no_more(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    raise AssertionError("the steps of an environment are not read again")
