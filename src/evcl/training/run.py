"""R networks that learn one stream of tasks side by side, and what they remember of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from evcl.errors import EvclError
from evcl.methods import FinishedTask, Memory, Method
from evcl.nn import Gaussian, Layout, Linear, bayesianize, he_uniform, head_names
from evcl.nn.chain import find_chain, padded
from evcl.randomness import Noise, generator
from evcl.settings import ELASTIC, Settings, stack
from evcl.training.task import OnEpoch, Pool, Step, TaskData, capturing, matmul_precision, optimise

ALIGNED = 4  # widths on a GPU are multiples of this: 16 bytes
KEPT_NUMBERS = 20_000_000  # of weight draws: 80 MB in float32


@dataclass(frozen=True)
class State:
    """A run's state, to go back to: the buffers are replaced as a run goes on, never changed."""

    layout: Layout
    heads: int
    rounds: int
    tensors: dict[str, Tensor]


class Run:
    """One method on R replicas, each with its own seed and its own real-valued settings.

    A round of training either ends well or leaves the run as it was.
    """

    def __init__(
        self,
        network: nn.Module,
        method: Method,
        settings: Sequence[Settings],
        seeds: Sequence[int],
        *,
        draw: bool,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        unsupported: Literal["error", "deterministic"] = "error",
        precision: str = "fp32",
    ) -> None:
        """`draw`: initial means are drawn from each seed; otherwise they are the module's own weights."""
        if len(settings) != len(seeds):
            raise ValueError("one Settings a seed")
        self.method, self.seeds, self.precision = method, tuple(seeds), precision
        self.network = bayesianize(
            network,
            init_std=[s.init_std for s in settings] if method.bayesian else None,
            generators=[generator(seed, "init") for seed in seeds] if draw else None,
            replicas=len(seeds),
            unsupported=unsupported,
            device=device,
            dtype=dtype,
        )
        if precision not in ("fp32", "tf32", "bf16"):
            raise EvclError(f"precision must be fp32, tf32 or bf16, not {precision!r}")
        if precision == "bf16":
            self.network.weights.low = torch.bfloat16
            others = [la for la in self.network.bayesian_layers() if la.names and not isinstance(la, Linear)]
            if others:
                raise EvclError(
                    f"bf16 products are there for linear layers only, and not for {type(others[0]).__name__}"
                )
        mean = self.network.posterior.mean
        self.settings = stack(settings, mean)
        log_std = self._log("prior_std").to(mean).expand_as(mean).clone() if method.bayesian else None
        self.prior = Gaussian(torch.zeros_like(mean), log_std)
        self.importance = torch.zeros_like(mean)
        self.used = mean.new_zeros(mean.shape[1])
        self.rounds = 0  # trained so far; it numbers the generators
        self._kept: tuple[Gaussian, Any, list[Tensor]] | None = None  # the draws of the last prediction

    # --- heads -----------------------------------------------------------------------------------------------------

    def add_head(self, features: int, classes: int) -> int:
        """A new head: He-uniform means, the first prior. Returns its number."""
        k = self.network.add_head()
        self._lay_out(self.network.with_head(k, classes, features), features)
        return k

    def grow_head(self, k: int, classes: int) -> None:
        """Make room for new classes in head k; what it knew stays."""
        features = self.network.layout.shapes[head_names(k)["weight"]][1]
        self._lay_out(self.network.with_head(k, classes, features), features)

    def classes(self, k: int) -> int:
        return self.network.layout.shapes[head_names(k)["bias"]][0]

    def features(self, x: Tensor) -> int:
        """The width of the trunk's output for an input like x [1, ...]."""
        self.network.bind(self.network.posterior.mean, None, self.network.layout)
        self.network.weights.noise = None
        with torch.no_grad():
            width: int = self.network(x.repeat(len(self.seeds), *[1] * (x.dim() - 1))).shape[1]
        return width

    def _lay_out(self, new: Layout, fan_in: int) -> None:
        """Lay every buffer out anew; weights that were not there start as the first weights did."""
        old = self.network.layout

        def missing(name: str, part: Tensor) -> int:
            return prod(new.shapes[name]) - part.shape[-1]

        def drawn(name: str, part: Tensor) -> Tensor:
            sources = [generator(seed, name, part.shape[1]) for seed in self.seeds]
            rows = [he_uniform((missing(name, part),), fan_in, source) for source in sources]
            return torch.cat([part, torch.stack(rows).to(part)], 1)

        def filled(flat: Tensor, value: Tensor) -> Tensor:
            def fill(name: str, part: Tensor) -> Tensor:
                more = value.to(part).expand(*part.shape[:-1], missing(name, part))
                return torch.cat([part, more], -1)

            return old.relaid(flat, new, fill)

        zero, posterior, prior = torch.zeros(()), self.network.posterior, self.prior
        self.network.posterior = Gaussian(
            old.relaid(posterior.mean, new, drawn),
            None if posterior.log_std is None else filled(posterior.log_std, self._log("init_std")),
        )
        self.prior = Gaussian(
            filled(prior.mean, zero),
            None if prior.log_std is None else filled(prior.log_std, self._log("prior_std")),
        )
        self.importance, self.used = filled(self.importance, zero), filled(self.used, zero)
        self.network.layout = new

    def _log(self, setting: str) -> Tensor:
        return torch.as_tensor(self.settings[setting], dtype=torch.float64).log()

    # --- training --------------------------------------------------------------------------------------------------

    def train(
        self,
        tasks: Sequence[TaskData],
        settings: Settings | None = None,
        *,
        noise: Noise | None = None,
        on_epoch: OnEpoch | None = None,
        reference: bool = False,
    ) -> None:
        """One round: learn these tasks (one, or several jointly), measure what they need, and remember it."""
        s = settings or self.settings
        layout = self.network.layout
        pool = Pool(tasks, self.classes)
        on_gpu = self.network.posterior.mean.is_cuda
        chain = None if reference or (on_gpu and noise is not None) else find_chain(self.network, pool.x)
        names = self.network.names_of(pool.heads)
        part = layout.part(names)
        if on_gpu and chain is not None:
            part = layout.part(names, padded(chain, layout, pool.heads, ALIGNED), ALIGNED)
        q = self._gathered(self.network.posterior, part)
        memory = Memory(
            self._gathered(self.prior, part),
            layout.gather(self.importance, part),
            layout.gather(self.used, part),
        )
        terms = self.method.terms(memory, s, len(pool))
        self._kept = None
        with matmul_precision(self.precision) if on_gpu else nullcontext():
            step = Step(self.network, part, q, terms, s, pool, chain, reference)
            optimise(step, pool, s, self.seeds, self.rounds, noise, on_epoch)
            self._remember(part, step.q, memory, tasks, s)

    def _gathered(self, gaussian: Gaussian, part: Layout) -> Gaussian:
        layout, log_std = self.network.layout, gaussian.log_std
        return Gaussian(layout.gather(gaussian.mean, part), None if log_std is None else layout.gather(log_std, part))

    def _remember(self, part: Layout, q: Gaussian, memory: Memory, tasks: Sequence[TaskData], s: Settings) -> None:
        """The posterior becomes the next prior; the importance grows by this round's."""
        importance = memory.importance
        if self.method.importance is not None:
            importance = s.get("fisher_decay", 1.0) * importance
            for i, task in enumerate(tasks):
                finished = self._finished(task, i, q, part, s)
                with capturing if q.mean.is_cuda else nullcontext():
                    importance = importance + self.method.importance(finished)
            if not bool(importance.isfinite().all()):
                raise EvclError("the importance of some weights is not finite: the run is left as it was")
        layout = self.network.layout

        def written(flat: Tensor, values: Tensor) -> Tensor:
            flat = flat.clone()
            layout.scatter_(flat, part, values)
            return flat

        def moved(to: Gaussian) -> Gaussian:
            log_std = None
            if to.log_std is not None and q.log_std is not None:
                log_std = written(to.log_std, q.log_std)
            return Gaussian(written(to.mean, q.mean), log_std)

        self.network.posterior, self.prior = moved(self.network.posterior), moved(self.prior)
        self.importance = written(self.importance, importance)
        self.used = written(self.used, torch.ones_like(memory.used))
        self.rounds += 1

    def _finished(self, task: TaskData, i: int, q: Gaussian, part: Layout, s: Settings) -> FinishedTask:
        generators = [generator(seed, "fisher", self.rounds, i) for seed in self.seeds]
        n, examples = task.y.shape[1], s.get("fisher_examples", ELASTIC["fisher_examples"].default)
        rows = torch.stack([torch.randperm(n, generator=g)[:examples] for g in generators])
        x, y = task.take(rows.to(task.y.device))
        return FinishedTask(self.network, q.mean, part, x, y, [task.head], s, generators)

    # --- prediction ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def predict(self, x: Tensor, head: int, draws: Iterable[Tensor] | None = None, chunk: int = 4096) -> Tensor:
        """Probabilities [R, N, classes] for x [U, N, ...] (see TaskData), averaged over fixed draws of the weights."""
        network, r = self.network, len(self.seeds)
        network.weights.noise = None
        total: Tensor | float = 0.0
        count = 0
        for weights in self.draws([head]) if draws is None else draws:
            network.bind(weights, None, network.layout)
            pieces = []
            for xs in x.split(max(1, chunk // r), 1):
                copies = xs.repeat(r // len(xs), *[1] * (x.dim() - 1))  # not a view: a forward may write to its input
                logits = network.logits(copies.flatten(0, 1), [head])
                pieces.append(logits.softmax(1).unflatten(0, (r, -1)))
            total = total + torch.cat(pieces, 1)
            count += 1
        return torch.as_tensor(total) / count

    def draws(self, heads: Iterable[int]) -> Sequence[Tensor] | Iterator[Tensor]:
        """The weight draws [R, P] of every prediction, kept until the posterior changes if they are not too large."""
        posterior, wanted = self.network.posterior, tuple(heads)
        if posterior.mean.numel() * self.settings.get("predict_samples", 1) > KEPT_NUMBERS:
            return self._draws(wanted)
        versions = (posterior.mean._version, posterior.log_std._version if posterior.log_std is not None else 0)
        if self._kept is None or self._kept[0] is not posterior or self._kept[1] != (wanted, versions):
            self._kept = (posterior, (wanted, versions), list(self._draws(wanted)))
        return self._kept[2]

    def _draws(self, heads: Iterable[int]) -> Iterator[Tensor]:
        """Each a function of the seed, whatever the heads asked for."""
        mean, log_std = self.network.posterior.mean, self.network.posterior.log_std
        if log_std is None:
            yield mean
            return
        spans = self.network.layout.spans
        trunk = max((spans[name].stop for name in self.network.trunk_names), default=0)
        parts = {-1: slice(0, trunk)}
        for k in heads:
            names = head_names(k)
            parts[k] = slice(spans[names["weight"]].start, spans[names["bias"]].stop)
        for draw in range(self.settings.predict_samples):
            weights = mean.clone()
            for k, span in parts.items():
                for r, seed in enumerate(self.seeds):
                    noise = torch.empty(span.stop - span.start, dtype=mean.dtype)
                    noise.normal_(generator=generator(seed, "predict", draw, k))
                    weights[r, span] += log_std[r, span].exp() * noise.to(mean.device)
            yield weights

    # --- state -----------------------------------------------------------------------------------------------------

    def state(self) -> State:
        return State(self.network.layout, len(self.network.heads), self.rounds, self.tensors())

    def restore(self, state: State) -> None:
        del self.network.heads[state.heads :]
        self.network.layout, self.rounds = state.layout, state.rounds
        self._take(state.tensors)

    def tensors(self) -> dict[str, Tensor]:
        """Every buffer, by name: with the layout, the seeds and `rounds`, all there is to save."""
        posterior = self.network.posterior
        named = {
            "posterior.mean": posterior.mean,
            "posterior.log_std": posterior.log_std,
            "prior.mean": self.prior.mean,
            "prior.log_std": self.prior.log_std,
            "importance": self.importance,
            "used": self.used,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def load_tensors(self, tensors: dict[str, Tensor], rounds: int) -> None:
        """Take up the buffers of `tensors()`, in the present layout."""
        for name, own in self.tensors().items():
            found = tensors[name]
            if found.shape != own.shape or found.dtype != own.dtype or not bool(found.isfinite().all()):
                raise EvclError(f"{name} should be {own.dtype} {tuple(own.shape)}, all of it finite")
        if bool((tensors["importance"] < 0).any() | ((tensors["used"] != 0) & (tensors["used"] != 1)).any()):
            raise EvclError("importance should be at least 0, and used 0 or 1")
        self._take(tensors)
        self.rounds = rounds

    def to(self, device: torch.device | str) -> None:
        """Move everything to a device."""
        self.network.trunk.to(device)
        self._take({name: tensor.to(device) for name, tensor in self.tensors().items()})
        settings = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in self.settings.items()}
        self.settings = Settings(settings)

    def _take(self, tensors: dict[str, Tensor]) -> None:
        self._kept = None
        self.network.posterior = Gaussian(tensors["posterior.mean"], tensors.get("posterior.log_std"))
        self.prior = Gaussian(tensors["prior.mean"], tensors.get("prior.log_std"))
        self.importance, self.used = tensors["importance"], tensors["used"]
