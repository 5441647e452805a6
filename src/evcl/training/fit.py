"""One fit of a round: copy the weights it uses into one buffer, train them, and write them into a copy of the state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evcl._core.devices import limited
from evcl._core.errors import EvclError
from evcl._core.randomness import Noise, Purpose, generator
from evcl._core.ranks import check_batch
from evcl._core.settings import Settings
from evcl.methods import Fit, Fitted, Round, TaskData, shuffled
from evcl.methods.memories import narrowed
from evcl.methods.terms import Quadratic
from evcl.nn import BayesianNetwork, Gaussian, Layout
from evcl.nn.chain import LayerNames, find_chain, padded
from evcl.nn.convert import INIT_SHARE
from evcl.nn.norms import BatchNorm
from evcl.nn.sampled import DirectParameters, FreeParameter
from evcl.training import paths
from evcl.training.data import Pool, all_heads
from evcl.training.graphed import GraphedSteps
from evcl.training.observer import Best, Observer, Observers, Progress, Validation
from evcl.training.optimise import EagerSteps, RereadSteps, Steps, optimise, reread_task
from evcl.training.per_task import TaskFit
from evcl.training.step import Execution, Step

if TYPE_CHECKING:
    from evcl.training.run import Run

# On a GPU, widths are multiples of this many bytes, and P of this many weights. Triton compiles separate kernels for
# such sizes, whose results may differ in the last bit; that must not depend on R.
ALIGNED = 16
LOG_SIGMA_FACTOR = 8  # std_rate auto: log sigma comes within a factor exp(-8) of its optimum, even in a short fit
ADAM_STEP_FRACTION = 0.04  # lr auto: Adam's step, as a fraction of the standard deviation of a layer's initial weights
SGD_STEP = 0.1  # lr auto for SGD without momentum; momentum m makes steps 1 / (1 - m) times as long
SHORT, FASTER = 400, 3.0  # a first task of fewer than SHORT steps takes larger steps, by a factor of at most FASTER
FIT_SEED_STRIDE = 1_000_000  # distance between the generator numbers of a round's first, second, third, ... fits


@dataclass(frozen=True)
class FitContext:
    """The network and examples of a fit, and the layout of the weights that it uses."""

    network: BayesianNetwork
    pool: Pool
    path: str  # see paths.py
    chain: LayerNames | None  # if the path uses it
    part: Layout
    start: Gaussian  # over all weights
    task_fit: TaskFit | None = None  # the weights of tasks that it trains
    reread: TaskData | None = None  # the task whose examples are read anew in each epoch

    def gathered(self) -> Gaussian:
        """The initial values of the fit's weights."""
        return self.start.map(lambda t: self.network.layout.gather(t, self.part), self.part)


class Fitting:
    """Runs the fits that the methods of a run request in one round."""

    def __init__(
        self,
        run: Run,
        round_: Round,
        epochs: int | None,
        observer: Observer,
        validation: Validation | None = None,
        noise: Noise | None = None,
        reference: bool = False,
    ) -> None:
        self.run, self.round, self.observer, self.validation = run, round_, observer, validation
        self.how = Execution(run.ranks, run.accumulate, noise, reference)
        self.validated: int | None = None  # the stage of the first fit of the run's own network
        self.settings = run.settings if epochs is None else Settings({**run.settings, "epochs": epochs})

    def __call__(self, fit: Fit, stage: int) -> Fitted:
        run = self.run
        first = fit.model is None and self.validated is None
        if first:
            self.validated = stage
            if run.account is not None:
                wide = (
                    run.network.first_log_std(run.settings.prior_std, run.network.posterior.mean)
                    if run.method.bayesian
                    else None
                )
                run.account = run.account.begun(fit, self.round, None if wide is None else (-2 * wide).exp())
        context = self._context(fit, stage)
        length = self._length(fit, context)
        s = Settings({**self.settings, **fit.rates, "batch_size": fit.batch or self.settings.batch_size})
        fresh = self._fresh(fit, stage, context.network)
        s = self._decided(s, fresh, context, s.epochs * -(-length // s.batch_size))
        if first:
            run.resolved = self._resolved(s, fit, context)
        before = context.network.statistics()
        if fit.model is not None:
            context.network.set_statistics(dict(fit.model.statistics))
        tensors = self.observer.finished(stage, _ended(context.gathered(), context))
        if tensors is None:
            tensors = self._trained(fit, stage, context, s, length)
            self.observer.end_fit(stage, tensors)
        else:
            context.network.set_statistics({name: tensors[f"statistics.{name}"] for name in before})
        fitted = self._fitted(fit, context, tensors)
        if first and run.account is not None:
            run.account = run.account.ended(fit, fitted, self.round)
        return fitted

    def _context(self, fit: Fit, stage: int) -> FitContext:
        run, model = self.run, fit.model
        network = run.network if model is None else model.network
        whole = fit.start or (run.network.posterior if model is None else model.posterior)
        layout, on_gpu, network.beside = network.layout, whole.mean.is_cuda, whole
        likelihood = fit.likelihood or run.likelihood
        augment = (
            bool(self.settings.get("augment")) and fit.likelihood is None
        )  # a generator learns the images as they are
        pool = Pool(fit.data, network.classes, len(whole.mean), likelihood, augment)
        again = any(task.reread is not None for task in self.round.tasks)
        reread = reread_task(fit, self.round, stage) if again else None
        chain = find_chain(network, pool.x)
        path = paths.chosen(paths.Request(network, whole, fit, pool, self.how, chain, reread is not None))
        chain = chain if path in paths.BY_HAND else None
        if chain is None:
            run.check_independent(network, pool.x)
            if not augment and reread is None:
                pool.keep_below(fit.data, network)
        heads = all_heads(pool, fit.losses)
        names = network.names_of(heads)
        part = layout.part(names)
        if on_gpu and chain is not None:
            align = ALIGNED // (network.weights.compute_dtype or whole.mean.dtype).itemsize
            part = layout.part(names, padded(chain, layout, heads, align), ALIGNED)
        task_fit = None
        if network.task_weights is not None:
            network.add_task_weights(max(pool.tasks) + 1)
            own = [task for task in pool.tasks if task in {one.task for one in self.round.tasks}]
            network.weights.task = (own or pool.tasks)[0]
            trained = own if fit.film else []
            task_fit = TaskFit(network, trained, _narrowest(network, part)) if trained else None
        return FitContext(network, pool, path, chain, part, whole, task_fit, reread)

    def _trained(self, fit: Fit, stage: int, context: FitContext, s: Settings, length: int) -> dict[str, Tensor]:
        """Train, and return the result of the fit as tensors, which a checkpoint can store."""
        run, network, part = self.run, context.network, context.part
        layout, statistics = network.layout, network.statistics()
        q = context.gathered()
        network.begin()
        self._meet(network, q, context.task_fit)
        moves = fit.moves
        if moves is not None:
            moves = layout.gather(moves.expand(len(q.mean), layout.size).to(torch.uint8), part).bool()
        own = replace(fit, terms=[narrowed(term, layout, part) for term in fit.terms], moves=moves)
        step = Step(network, q, own, s, context.pool, context.chain, context.task_fit, self.how)
        start = step.q.snapshot() if run.how.allow_divergence else None
        task_fit = context.task_fit
        first = None if task_fit is None else task_fit.values.clone()
        watching = _Stage(self, fit, stage, context, step)
        steps = self._steps(fit, stage, context, step, watching, length)
        try:
            optimise(
                step, steps, length, s, run.seeds, stage, watching, run.diverged if run.how.allow_divergence else None
            )
        finally:
            if isinstance(steps, GraphedSteps):
                steps.release()
        if watching.best is not None:
            watching.best.restore()
        EagerSteps(step, context.pool, run.seeds, steps.number, watching, fit.sampler).settle(s)
        if step.estimating is not None:
            step.estimating.end()
        if run.ranks is not None:
            for measured in step.statistics:
                run.ranks.broadcast_(measured)
        if start is not None:  # a diverged replica keeps its old weights and is no longer evaluated
            step.q.mean[run.diverged] = start.mean[run.diverged]
            if step.q.log_std is not None and start.log_std is not None:
                step.q.log_std[run.diverged] = start.log_std[run.diverged]
            for name, measured in network.statistics().items():
                measured[run.diverged] = statistics[name][run.diverged]
            if task_fit is not None and first is not None:
                task_fit.values[run.diverged] = first[run.diverged]
        results = [tracker.result() for tracker in fit.trackers]
        tracked = {f"tracked {i}": result for i, result in enumerate(results) if result is not None}
        if start is not None:  # what was tracked of a diverged replica must not stop the others
            tracked = {name: result.nan_to_num(0.0, 0.0, 0.0) for name, result in tracked.items()}
        return _ended(step.q, context) | tracked

    def _fresh(self, fit: Fit, stage: int, network: BayesianNetwork) -> bool:
        """Whether all weights of a fit are random and have learned nothing. Those of heads are always drawn."""
        if network.trunk_names:
            return self.run.drawn and (fit.fresh or self.round.number == stage == 0)
        return fit.fresh or (stage == 0 and not {*self.round.seen} & {task.head for task in self.round.tasks})

    def _decided(self, s: Settings, fresh: bool, context: FitContext, steps: int) -> Settings:
        """Replace rates that are "auto" by numbers, for a fit of this many steps.

        Adam moves every weight by about `lr` per step, so the layers with the most inputs, whose weights are small,
        limit the rate. Free parameters, such as position embeddings, have no inputs and are not counted. Random initial
        weights that have learned nothing yet have far to go, and may take larger steps.
        """
        rates: dict[str, Tensor | float] = {}
        if s.get("lr") == "auto" and s.get("optimizer") == "sgd":
            rates["lr"] = SGD_STEP * (1 - s.momentum)
        elif s.get("lr") == "auto":
            narrowest = _narrowest(context.network, context.part)
            rates["lr"] = ADAM_STEP_FRACTION * narrowest * (min(FASTER, max(1.0, SHORT / steps)) if fresh else 1.0)
        if s.get("std_rate") == "auto":
            rates["std_rate"] = min(1.0, LOG_SIGMA_FACTOR / steps)
        return Settings({**s, **rates})

    def _resolved(self, s: Settings, fit: Fit, context: FitContext) -> list[dict[str, object]]:
        """For each replica, what the settings that are "auto" are in this fit, in four digits: a number, or one for
        each name of weights.
        """
        auto = {name for name, value in self.run.settings.items() if isinstance(value, str) and value == "auto"}
        found: dict[str, object] = {name: s[name] for name in auto if not isinstance(s[name], str)}
        found |= self.run.chosen
        springs = [term.springs() for term in fit.terms if isinstance(term, Quadratic)]
        linear = next((one.linear for one in springs if one.linear is not None), None)
        if "tempering" in auto and linear is not None:
            found["tempering"] = self.round.n * (linear.w * linear.c)[:, :1]
        network, heads = context.network, [task.head for task in self.round.tasks]
        stds = {
            name: network.scales[name]
            for name in network.names_of(heads)
            if name in network.scales and not name.endswith("bias")
        }  # as their weights
        for name, share in (("prior_std", 1.0), ("init_std", INIT_SHARE)):
            if name in auto:
                found[name] = {weight: share * std for weight, std in stds.items()}

        def short(value: object, r: int) -> object:
            if isinstance(value, str):
                return value
            if isinstance(value, dict):
                return {name: short(one, r) for name, one in value.items()}
            return float(f"{float(value[r % len(value)] if isinstance(value, Tensor) else value):.4g}")  # type: ignore[arg-type]

        return [{name: short(found[name], r) for name in sorted(found)} for r in range(len(self.run.seeds))]

    def _length(self, fit: Fit, context: FitContext) -> int:
        """The number of examples per epoch."""
        first, *rest = context.pool.sizes
        batch = fit.batch or self.settings.batch_size

        def length(examples: int) -> int:
            if fit.sampler is shuffled:
                return examples + sum(rest)
            return fit.sampler([examples, *rest], batch, generator(0, Purpose.LENGTH)).numel()

        if context.reread is None:
            return length(first)
        full, left = divmod(context.reread.n, first)
        return full * length(first) + (length(left) if left else 0)

    def _steps(self, fit: Fit, stage: int, context: FitContext, step: Step, watching: Observer, length: int) -> Steps:
        """Choose how the steps are run: eagerly, or as CUDA graphs."""
        run, pool = self.run, context.pool
        number = fit.number
        if number is None:
            number = self.round.number if stage == 0 else -1 - self.round.number - FIT_SEED_STRIDE * (stage - 1)
        if context.reread is not None and context.reread.reread is not None:
            about = step, pool, run.seeds, number, watching, fit.sampler, self.how.noise, fit.losses, length
            return RereadSteps(*about, read=context.reread.reread.read)
        if context.path in ("kernels", "graph"):
            return GraphedSteps(step, pool, run.seeds, number, watching, fit.sampler, length)
        return EagerSteps(step, pool, run.seeds, number, watching, fit.sampler, self.how.noise)

    def _meet(self, network: BayesianNetwork, q: Gaussian, task_fit: TaskFit | None) -> None:
        """Before a fit, make all processes start from the same weights, and refuse layers that need the whole batch."""
        ranks = self.run.ranks
        if ranks is None:
            return
        if limited(q.mean.device):
            raise EvclError(f"several processes cannot train on {q.mean.device.type} together: use device='cpu'")
        check_batch(self.settings.batch_size, ranks.size)
        if any(isinstance(layer, BatchNorm) and layer.open for layer in network.trunk_layers()):
            raise EvclError(
                "a BatchNorm measures statistics of whole batches, but each process sees only a part: "
                "use another norm, or one whose statistics have been measured before"
            )
        for tensor in (q.mean, q.log_std, None if task_fit is None else task_fit.values):
            if tensor is not None:
                ranks.broadcast_(tensor)

    def _fitted(self, fit: Fit, context: FitContext, found: dict[str, Tensor]) -> Fitted:
        network, part = context.network, context.part
        own = Gaussian(found["mean"], found.get("log_std"), part)
        q = written(network.layout, context.start, part, own)
        used = own.mean.new_zeros(network.layout.size)
        network.layout.scatter_(used, part, torch.ones(part.size, dtype=used.dtype, device=used.device))
        tracked = []
        for i in range(len(fit.trackers)):
            result = found.get(f"tracked {i}")
            whole = None if result is None else result.new_zeros(len(result), network.layout.size)
            if whole is not None and result is not None:
                network.layout.scatter_(whole, part, result)
            tracked.append(whole)
        if context.task_fit is not None:
            network.task_weights = context.task_fit.weights_with(found["film"])
        model = None if fit.model is None else replace(fit.model, posterior=q, statistics=network.statistics())
        return Fitted(network, q, own, part, used, tracked, model)

    def measured(self, context: FitContext, q: Gaussian) -> tuple[Tensor, Tensor]:
        """NLL and accuracy on the validation examples if the round ended with q."""
        run, validation = self.run, self.validation
        assert validation is not None
        data, fit = validation.data, context.task_fit
        own = None if fit is None else fit.weights_with(fit.values)
        with run.predicting_from(written(context.network.layout, context.start, context.part, q), own):
            return validation.measure(run.predict(data.x, data.head, task=data.task), run.likelihood)


def _narrowest(network: BayesianNetwork, part: Layout) -> float:
    """The smallest scale of the weights of `part`: that of the layer with the most inputs."""
    outside = FreeParameter, DirectParameters
    bare = {name for la in network.trunk_layers() if isinstance(la, outside) for name in la.names.values()}
    return min((network.scales[name] for name in part.shapes.keys() - bare), default=1.0)


def _ended(q: Gaussian, context: FitContext) -> dict[str, Tensor]:
    """The result of a fit as named tensors: its weights, those of its tasks, and the layers' statistics."""
    tensors = {"mean": q.mean} if q.log_std is None else {"mean": q.mean, "log_std": q.log_std}
    if context.task_fit is not None:
        tensors["film"] = context.task_fit.values
    return tensors | {f"statistics.{name}": tensor for name, tensor in context.network.statistics().items()}


def written(layout: Layout, to: Gaussian, part: Layout, q: Gaussian) -> Gaussian:
    """A copy of `to` in which the weights of `part` are replaced by q's."""

    def scattered(flat: Tensor, values: Tensor) -> Tensor:
        flat = flat.clone()
        layout.scatter_(flat, part, values)
        return flat

    log_std = None
    if to.log_std is not None and q.log_std is not None:
        log_std = scattered(to.log_std, q.log_std)
    return Gaussian(scattered(to.mean, q.mean), log_std)


class _Stage(Observers):
    """Reports one fit to the round's observer, counting epochs over the whole round, and evaluates validation data."""

    def __init__(self, fitting: Fitting, fit: Fit, stage: int, context: FitContext, step: Step) -> None:
        super().__init__(fitting.observer)
        self.fitting, self.fit, self.stage, self.context, self.step = fitting, fit, stage, context, step
        self.stages = max(stage + 1, fitting.run.method.stages)
        validation = fitting.validation if stage == fitting.validated else None
        self.looks = validation is not None
        patience = None if validation is None else validation.patience
        self.best = None if patience is None else Best(step, patience)
        if self.best is not None:
            step.beside += self.best.buffers()

    def begin_epoch(self, epoch: int) -> None:
        super().begin_epoch(self.stage * self.fitting.settings.epochs + epoch)

    def end_epoch(self, progress: Progress) -> bool:
        done, epochs = self.stage * progress.epochs, self.stages * progress.epochs
        stage, path = self.fit.stage, self.context.path
        progress = replace(progress, epoch=done + progress.epoch, epochs=epochs, stage=stage, path=path)
        if self.looks:
            progress = replace(progress, validation=self.fitting.measured(self.context, self.step.q))
        stop = super().end_epoch(progress)
        if self.best is None or progress.validation is None:
            return stop
        return self.best.enough(float(progress.validation[0])) or stop
