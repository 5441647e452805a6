"""R networks that learn one stream of tasks side by side, and what they remember of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from evcl.coresets import choose, others
from evcl.errors import EvclError
from evcl.methods import FinishedTask, Memory, Method
from evcl.nn import Gaussian, Layout, Linear, Names, bayesianize, he_uniform, head_names
from evcl.nn.chain import find_chain, padded
from evcl.nn.examine import examine
from evcl.nn.norms import BatchNorm
from evcl.randomness import Noise, generator
from evcl.ranks import Ranks, check_batch
from evcl.settings import ELASTIC, Settings, stack
from evcl.training.early import Best, Validation
from evcl.training.task import (
    OnBegin,
    OnEpoch,
    Pool,
    Progress,
    Step,
    TaskData,
    capturing,
    matmul_precision,
    optimise,
)
from evcl.training.watch import Watch

# On a GPU widths are multiples of so many bytes, and P of so many weights: Triton has kernels of its own for sizes that
# are, and their last bit may differ, which must not depend on R.
ALIGNED = 16
KEPT_NUMBERS = 20_000_000  # of weight draws: 80 MB in float32
MOST = {"mean": 1e18, "log_std": 50.0}  # of a weight that is loaded: beyond it predictions may not be finite


@dataclass(frozen=True)
class State:
    """A run's state, to go back to: the buffers are replaced as a run goes on, never changed."""

    layout: Layout
    heads: int
    rounds: int
    tensors: dict[str, Tensor]
    coreset_heads: tuple[int, ...]


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
        only: Names = None,
        skip: Names = None,
        prior: Literal["zero", "network"] = "zero",
        precision: str = "fp32",
        tolerant: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        """`draw`: initial means are drawn from each seed; otherwise they are the module's own weights.

        `only`, `skip`, `unsupported`: see `bayesianize`. `prior`: what the first prior of the trunk is centred on.
        `tolerant`: replicas whose loss is lost are noted in `lost`, and the others go on. `ranks`: the processes that
        train this network together, each of which makes the same run and gives it the same tasks.
        """
        if len(settings) != len(seeds):
            raise ValueError("one Settings a seed")
        self.method, self.seeds, self.precision, self.ranks = method, tuple(seeds), precision, ranks
        self.network = bayesianize(
            network,
            init_std=[s.init_std for s in settings] if method.bayesian else None,
            generators=[generator(seed, "init") for seed in seeds] if draw else None,
            replicas=len(seeds),
            unsupported=unsupported,
            only=only,
            skip=skip,
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
        self.prior = Gaussian((mean if prior == "network" else self.network.centre).clone(), log_std)
        self.importance = torch.zeros_like(mean)
        self.used = mean.new_zeros(mean.shape[1])
        self.tolerant, self.lost = tolerant, torch.zeros(len(seeds), dtype=torch.bool, device=mean.device)
        self.rounds = 0  # trained so far; it numbers the generators
        self.coresets: list[TaskData] = []  # the examples kept of each task, [R, m, ...]
        self.tuned: Gaussian | None = None  # the copy of the posterior that has learned from them
        self._kept: tuple[Gaussian, Any, list[Tensor]] | None = None  # the draws of the last prediction
        self._examined = False

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
        with torch.no_grad(), self.network.alone():
            width: int = self.network(x.clone()).shape[1]
        return width

    def _examine(self, x: Tensor) -> None:
        """Once: how the network treats a batch of examples like x [U, N, ...]."""
        if not self._examined:
            apart = len(self.seeds) > 1 or self.method.importance is not None or self.ranks is not None
            examine(self.network, x[0], apart)
            self._examined = True

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
        self.network.layout, self.tuned = new, None

    def _log(self, setting: str) -> Tensor:
        return torch.as_tensor(self.settings[setting], dtype=torch.float64).log()

    # --- training --------------------------------------------------------------------------------------------------

    def learn(
        self,
        tasks: Sequence[TaskData],
        settings: Settings | None = None,
        on_epoch: OnEpoch | None = None,
        on_begin: OnBegin | None = None,
        validation: Validation | None = None,
        watch: Watch | None = None,
    ) -> None:
        """One round as the setting `coreset` wants it: `train` on what is outside the coresets, then `tune`.

        The epochs of both are reported as those of one round. `validation` is looked at while it trains. `watch` may
        save both on the way, or know where to go on.
        """
        s = settings or self.settings
        if s.get("coreset", "none") == "none":
            self.train(tasks, s, on_epoch=on_epoch, on_begin=on_begin, validation=validation, watch=watch)
            return
        stages = 1 if self.method.coreset_only else 2

        def begin(stage: int, epoch: int) -> None:
            if on_begin is not None:
                on_begin(stage * s.epochs + epoch)

        def report(stage: int, p: Progress) -> bool | None:
            if on_epoch is None:
                return None
            tuning = stage == stages - 1
            return on_epoch(replace(p, epoch=stage * p.epochs + p.epoch, epochs=stages * p.epochs, tuning=tuning))

        state = self.state()
        try:
            if watch is None or not watch.tuning:
                rows = [self._coreset(task, i, s) for i, task in enumerate(tasks)]
                if self.method.coreset_only:
                    self.rounds += 1
                else:
                    rest = [_part(task, others(r, task.y.shape[1])) for task, r in zip(tasks, rows, strict=True)]
                    heard = partial(report, 0), partial(begin, 0)
                    self.train(rest, s, on_epoch=heard[0], on_begin=heard[1], validation=validation, watch=watch)
                kept = [_part(task, r) for task, r in zip(tasks, rows, strict=True)]
                self.coresets = [*self.coresets, *kept]
            self.tune(s, on_epoch=partial(report, stages - 1), on_begin=partial(begin, stages - 1), watch=watch)
        except BaseException:
            self.restore(state)
            raise

    def _coreset(self, task: TaskData, i: int, s: Settings) -> Tensor:
        """The rows [R, m] of the coreset of the round's task i."""
        shapes = [tuple(one.x.shape[2:]) for one in (*self.coresets[:1], task)]
        if shapes[0] != shapes[-1]:
            raise EvclError(f"coresets need inputs of one shape, and {shapes[-1]} came after {shapes[0]}")
        count = len(self.seeds)
        kinds = (s.coreset,) * count if isinstance(s.coreset, str) else s.coreset
        size = min(s.coreset_size, task.y.shape[1] // 2)
        rows = torch.empty(count, size, dtype=torch.long, device=task.y.device)
        for kind in sorted(set(kinds)):
            own = [r for r in range(count) if kinds[r] == kind]
            generators = [generator(self.seeds[r], "coreset", self.rounds, i) for r in own]
            data = sorted({r % len(task.x) for r in own})  # replicas of one seed may share it
            found = choose(kind, task.x[data] if len(data) < len(task.x) else task.x, size, generators)
            rows[own] = found if kind == "random" else found[[data.index(r % len(task.x)) for r in own]]
        return rows if self.ranks is None else self.ranks.same_(rows)

    def train(
        self,
        tasks: Sequence[TaskData],
        settings: Settings | None = None,
        *,
        noise: Noise | None = None,
        on_epoch: OnEpoch | None = None,
        on_begin: OnBegin | None = None,
        validation: Validation | None = None,
        reference: bool = False,
        watch: Watch | None = None,
    ) -> None:
        """One round: learn these tasks (one, or several jointly), measure what they need, and remember it."""
        s = settings or self.settings
        with self._precision(), self._measuring():
            if watch is not None:
                watch.stage(self.state(), tuning=False)
            part, memory, q = self._fit(tasks, s, self.rounds, noise, on_epoch, on_begin, validation, reference, watch)
            self._remember(part, q, memory, tasks, s)

    def tune(
        self,
        settings: Settings | None = None,
        *,
        on_epoch: OnEpoch | None = None,
        on_begin: OnBegin | None = None,
        watch: Watch | None = None,
    ) -> None:
        """For prediction: a copy of the posterior learns from the coresets of all tasks, each through its own head.

        It is trained like one task more, of N = the coresets' size: the prior, and the anchor, is the posterior (before
        any training, the first prior). What the run remembers stays as it is.
        """
        if not any(task.y.numel() for task in self.coresets):  # tasks of one example each
            self.tuned = self.network.posterior
            return
        s = settings or self.settings
        with self._precision(), self._measuring():
            if watch is not None:
                watch.stage(self.state(), tuning=True)
            part, _, q = self._fit(self.coresets, s, -self.rounds, None, on_epoch, on_begin, watch=watch)
        self.tuned = self._written(self.network.posterior, part, q)

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        """What layers measure beside the weights is kept if this ends well."""
        before = self.network.statistics()
        try:
            yield
        except BaseException:
            self.network.set_statistics(before)
            raise

    def _precision(self) -> AbstractContextManager[None]:
        return matmul_precision(self.precision) if self.network.posterior.mean.is_cuda else nullcontext()

    def _fit(
        self,
        tasks: Sequence[TaskData],
        s: Settings,
        round_: int,
        noise: Noise | None,
        on_epoch: OnEpoch | None,
        on_begin: OnBegin | None,
        validation: Validation | None = None,
        reference: bool = False,
        watch: Watch | None = None,
    ) -> tuple[Layout, Memory, Gaussian]:
        """The weights that these tasks use, what is remembered of those, and the posterior they are given."""
        layout = self.network.layout
        pool = Pool(tasks, self.classes)
        on_gpu = self.network.posterior.mean.is_cuda
        eager = noise is not None or self.ranks is not None  # the kernels draw for themselves, and for whole batches
        chain = None if reference or (on_gpu and eager) else find_chain(self.network, pool.x)
        if chain is None:
            self._examine(pool.x)
        self._examined = True  # a chain's examples never touch
        names = self.network.names_of(pool.heads)
        part = layout.part(names)
        if on_gpu and chain is not None:
            align = ALIGNED // (self.network.weights.low or self.network.posterior.mean.dtype).itemsize
            part = layout.part(names, padded(chain, layout, pool.heads, align), ALIGNED)
        q = self._gathered(self.network.posterior, part)
        memory = Memory(
            self._gathered(self.prior, part),
            layout.gather(self.importance, part),
            layout.gather(self.used, part),
        )
        terms = self.method.terms(memory, s, len(pool))
        self._kept = None
        statistics = self.network.statistics()
        self.network.begin()
        if self.ranks is not None:
            self._meet(self.ranks, q, s)
        step = Step(self.network, part, q, terms, s, pool, chain, reference, self.ranks)
        start = q.snapshot() if self.tolerant else None
        best = Best(step, validation.patience) if validation is not None and validation.patience is not None else None

        def look(p: Progress) -> bool:
            """At the validation part, before the epoch is reported."""
            if validation is not None:
                p = replace(p, validation=self._measured(validation, part, step.q))
            stop = on_epoch is not None and on_epoch(p) is True
            return (best is not None and p.validation is not None and best.enough(float(p.validation[0]))) or stop

        after = on_epoch if validation is None else look
        lost = self.lost if self.tolerant else None
        optimise(step, pool, s, self.seeds, round_, noise, after, lost, on_begin, watch)
        if best is not None:
            best.restore()
        if self.ranks is not None:
            for measured in step.statistics:
                self.ranks.same_(measured)
        if start is not None:  # one that is lost stays where it was, and is measured no more
            step.q.mean[self.lost] = start.mean[self.lost]
            if step.q.log_std is not None and start.log_std is not None:
                step.q.log_std[self.lost] = start.log_std[self.lost]
            for name, measured in self.network.statistics().items():
                measured[self.lost] = statistics[name][self.lost]
        return part, memory, step.q

    def _meet(self, ranks: Ranks, q: Gaussian, s: Settings) -> None:
        """Before a round: all processes start from the same weights, and no layer needs the whole batch."""
        check_batch(s.batch_size, ranks.size)
        if any(isinstance(layer, BatchNorm) and layer.open for layer in self.network.bayesian_layers()):
            raise EvclError(
                "a BatchNorm measures whole batches, and several processes have a part each: "
                "use another norm, or statistics that were measured before"
            )
        for tensor in (q.mean, q.log_std):
            if tensor is not None:
                ranks.same_(tensor)

    def _measured(self, validation: Validation, part: Layout, q: Gaussian) -> tuple[Tensor, Tensor]:
        """What a prediction of the validation part would be worth if the round ended with q."""
        before = self.network.posterior, self.tuned
        self.network.posterior, self.tuned = self._written(before[0], part, q), None
        try:
            return validation.measure(self.predict(validation.data.x, validation.data.head))
        finally:
            (self.network.posterior, self.tuned), self._kept = before, None

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
        self.network.posterior = self._written(self.network.posterior, part, q)
        self.prior, self.tuned = self._written(self.prior, part, q), None
        self.importance = self._scattered(self.importance, part, importance)
        self.used = self._scattered(self.used, part, torch.ones_like(memory.used))
        self.rounds += 1

    def _scattered(self, flat: Tensor, part: Layout, values: Tensor) -> Tensor:
        flat = flat.clone()
        self.network.layout.scatter_(flat, part, values)
        return flat

    def _written(self, to: Gaussian, part: Layout, q: Gaussian) -> Gaussian:
        """A copy of `to` in which the weights of `part` are q's."""
        log_std = None
        if to.log_std is not None and q.log_std is not None:
            log_std = self._scattered(to.log_std, part, q.log_std)
        return Gaussian(self._scattered(to.mean, part, q.mean), log_std)

    def _finished(self, task: TaskData, i: int, q: Gaussian, part: Layout, s: Settings) -> FinishedTask:
        generators = [generator(seed, "fisher", self.rounds, i) for seed in self.seeds]
        n, examples = task.y.shape[1], s.get("fisher_examples", ELASTIC["fisher_examples"].default)
        rows = torch.stack([torch.randperm(n, generator=g)[:examples] for g in generators])
        rows = rows.to(task.y.device)
        x, y = task.take(rows)
        weights = task.take_weights(rows)
        return FinishedTask(self.network, q, part, x, y, [task.head], s, generators, weights, self.ranks)

    # --- prediction ------------------------------------------------------------------------------------------------

    @property
    def predictor(self) -> Gaussian:
        """What predictions are made from: the posterior, or the copy of it that was tuned on the coresets."""
        return self.network.posterior if self.tuned is None else self.tuned

    @torch.no_grad()
    def predict(self, x: Tensor, head: int, draws: Iterable[Tensor] | None = None, chunk: int | None = None) -> Tensor:
        """Probabilities [R, N, classes] for x [U, N, ...] (see TaskData), averaged over fixed draws of the weights."""
        total: Tensor | float = 0.0
        count = 0
        for p in self._drawn(x, head, draws, chunk):
            total, count = total + p, count + 1
        return torch.as_tensor(total) / count

    @torch.no_grad()
    def predict_with_entropy(self, x: Tensor, head: int) -> tuple[Tensor, Tensor]:
        """`predict`, and the mean entropy [R, N], in nats, of what each draw of the weights predicts by itself."""
        total: Tensor | float = 0.0
        entropy: Tensor | float = 0.0
        count = 0
        for p in self._drawn(x, head):
            total, entropy, count = total + p, entropy + torch.special.entr(p).sum(-1), count + 1
        return torch.as_tensor(total) / count, torch.as_tensor(entropy) / count

    def _drawn(
        self, x: Tensor, head: int, draws: Iterable[Tensor] | None = None, chunk: int | None = None
    ) -> Iterator[Tensor]:
        """Probabilities [R, N, classes] by each draw of the weights."""
        network, r = self.network, len(self.seeds)
        if r > 1:
            self._examine(x)
        network.weights.noise = None
        if chunk is None:  # rows at once, of all replicas
            chunk = 500_000 if x.is_cuda else 4096
        with self._precision():
            for weights in self.draws([head]) if draws is None else draws:
                network.bind(weights, None, network.layout)
                pieces = []
                for xs in x.split(max(1, chunk // r), 1):
                    copies = xs.repeat(r // len(xs), *[1] * (x.dim() - 1))  # not a view: a forward may write to it
                    logits = network.logits(copies.flatten(0, 1), [head])
                    pieces.append(logits.softmax(1).unflatten(0, (r, -1)))
                yield torch.cat(pieces, 1)

    def draws(self, heads: Iterable[int]) -> Sequence[Tensor] | Iterator[Tensor]:
        """The weight draws [R, P] of every prediction, kept until the posterior changes if they are not too large."""
        posterior, wanted = self.predictor, tuple(heads)
        if posterior.mean.numel() * self.settings.get("predict_samples", 1) > KEPT_NUMBERS:
            return self._draws(wanted)
        versions = (posterior.mean._version, posterior.log_std._version if posterior.log_std is not None else 0)
        if self._kept is None or self._kept[0] is not posterior or self._kept[1] != (wanted, versions):
            self._kept = (posterior, (wanted, versions), list(self._draws(wanted)))
        return self._kept[2]

    def _draws(self, heads: Iterable[int]) -> Iterator[Tensor]:
        """Each a function of the seed, whatever the heads asked for."""
        mean, log_std = self.predictor.mean, self.predictor.log_std
        if log_std is None:
            yield mean
            return
        spans = self.network.layout.spans
        trunk = max((spans[name].stop for name in self.network.trunk_names), default=0)
        parts = {-1: slice(0, trunk)}
        for k in heads:
            names = head_names(k)
            parts[k] = slice(spans[names["weight"]].start, spans[names["bias"]].stop)
        seeds = sorted(set(self.seeds))
        own = torch.tensor([seeds.index(seed) for seed in self.seeds], device=mean.device)
        for draw in range(self.settings.predict_samples):
            weights = mean.clone()
            for k, span in parts.items():
                noise = torch.empty(len(seeds), span.stop - span.start, dtype=mean.dtype)
                for row, seed in zip(noise, seeds, strict=True):  # on the CPU, so that every device predicts the same
                    row.normal_(generator=generator(seed, "predict", draw, k))
                weights[:, span] += log_std[:, span].exp() * noise.to(mean.device)[own]
            yield weights

    # --- state -----------------------------------------------------------------------------------------------------

    def state(self) -> State:
        return State(self.network.layout, len(self.network.heads), self.rounds, self.tensors(), self._coreset_heads())

    def restore(self, state: State) -> None:
        del self.network.heads[state.heads :]
        self.network.layout, self.rounds = state.layout, state.rounds
        self._take(state.tensors, state.coreset_heads)

    def tensors(self) -> dict[str, Tensor]:
        """Every buffer, by name: with the layout, the seeds, `rounds` and the coresets' heads, all there is to save."""
        named = {"importance": self.importance, "used": self.used}
        named |= {f"statistics.{name}": tensor for name, tensor in self.network.statistics().items()}
        gaussians = {"posterior": self.network.posterior, "prior": self.prior, "tuned": self.tuned}
        for name, gaussian in gaussians.items():
            if gaussian is not None:
                named[f"{name}.mean"] = gaussian.mean
                if gaussian.log_std is not None:
                    named[f"{name}.log_std"] = gaussian.log_std
        for i, task in enumerate(self.coresets):
            named |= {f"coreset {i}.x": task.x, f"coreset {i}.y": task.y}
        return named

    def load_tensors(
        self, tensors: dict[str, Tensor], rounds: int, coreset_heads: Sequence[int] = (), tuned: bool | None = None
    ) -> None:
        """Take up the buffers of `tensors()`, in the present layout; by default there is a tuned copy with coresets."""
        own = self.tensors()
        if bool(coreset_heads) if tuned is None else tuned:
            own |= {name.replace("posterior", "tuned"): t for name, t in own.items() if name.startswith("posterior")}
        for name, wanted in own.items():
            found, kind = tensors[name], name.rpartition(".")[2]
            most = math.inf if name.startswith("statistics.") else MOST.get(kind, math.inf)
            if found.shape != wanted.shape or found.dtype != wanted.dtype or not _finite(found, most):
                size = "finite" if most == math.inf else f"below {most:g} in size"
                raise EvclError(f"{name} should be {wanted.dtype} {tuple(wanted.shape)}, all of it {size}")
        if bool((tensors["importance"] < 0).any() | ((tensors["used"] != 0) & (tensors["used"] != 1)).any()):
            raise EvclError("importance should be at least 0, and used 0 or 1")
        checked = {name: tensors[name] for name in own}
        for i, head in enumerate(coreset_heads):
            x, y = f"coreset {i}.x", f"coreset {i}.y"
            self._check_coreset(i, tensors[x], tensors[y], head)
            checked |= {x: tensors[x], y: tensors[y]}
        self._take(checked, coreset_heads)
        self.rounds = rounds

    def _check_coreset(self, i: int, x: Tensor, y: Tensor, head: int) -> None:
        wanted = self.network.posterior.mean.dtype
        if x.dtype != wanted or not bool(x.isfinite().all()):
            raise EvclError(f"the inputs of coreset {i} should be {wanted}, all of it finite")
        fits = y.dtype == torch.long and y.shape == x.shape[:2] and len(y) == len(self.seeds)
        if not fits or not bool(((y >= 0) & (y < self.classes(head))).all()):
            raise EvclError(f"the labels of coreset {i} do not fit its inputs or its head")

    def to(self, device: torch.device | str) -> None:
        """Move everything to a device."""
        self.network.trunk.to(device)
        self._take({name: tensor.to(device) for name, tensor in self.tensors().items()}, self._coreset_heads())
        settings = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in self.settings.items()}
        self.settings = Settings(settings)

    def _coreset_heads(self) -> tuple[int, ...]:
        return tuple(task.head for task in self.coresets)

    def _take(self, tensors: dict[str, Tensor], coreset_heads: Sequence[int]) -> None:
        self._kept = None

        def gaussian(name: str) -> Gaussian:
            return Gaussian(tensors[f"{name}.mean"], tensors.get(f"{name}.log_std"))

        self.network.posterior, self.prior = gaussian("posterior"), gaussian("prior")
        self.tuned = gaussian("tuned") if "tuned.mean" in tensors else None
        self.importance, self.used = tensors["importance"], tensors["used"]
        self.network.set_statistics(_under("statistics.", tensors))
        self.coresets = [
            TaskData(tensors[f"coreset {i}.x"], tensors[f"coreset {i}.y"], head) for i, head in enumerate(coreset_heads)
        ]


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _finite(tensor: Tensor, most: float = math.inf) -> bool:
    """Whether all of it is, and below `most`; without the copies that `isfinite` makes, which may be as large as the
    file.
    """
    return tensor.numel() == 0 or all(abs(float(end)) < most for end in tensor.aminmax())


def _part(task: TaskData, rows: Tensor) -> TaskData:
    """A copy of a task's examples `rows` [R, n]."""
    return TaskData(*task.take(rows), task.head, task.take_weights(rows))
