"""A run: R networks trained side by side with one method, each with its own seed and settings, one round at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from math import prod
from threading import RLock
from typing import Any, Literal, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from evcl._core.devices import double
from evcl._core.errors import EvclError
from evcl._core.randomness import Noise, Purpose, generator, weights_of
from evcl._core.ranks import Ranks
from evcl._core.settings import Settings, decided
from evcl.methods import Fitted, Learned, Method, Model, Round, TaskData, for_settings, memories, packing
from evcl.methods.memories import Fresh
from evcl.methods.method import Asked, Newcomer
from evcl.nn import (
    BayesianNetwork,
    Gaussian,
    Layout,
    Names,
    Prior,
    Slot,
    bayesianize,
    he_std,
    he_uniform,
    head,
    log_stds,
    outputs,
)
from evcl.nn.chain import find_chain
from evcl.nn.convert import INIT_SHARE
from evcl.nn.independence import check_examples_independent
from evcl.nn.inputs import Call
from evcl.nn.lora import adapted
from evcl.nn.network import CopiedTensors, forked
from evcl.nn.per_task import TaskWeights
from evcl.posterior import Extending
from evcl.posterior.kronecker import KroneckerGaussian
from evcl.targets import CATEGORICAL, Likelihood
from evcl.targets.likelihood import Means
from evcl.training.account import Account
from evcl.training.fit import Fitting
from evcl.training.graphed import capturing
from evcl.training.observer import Observer, Validation
from evcl.training.predict import KEPT_NUMBERS, of_each, weight_draws
from evcl.training.step import matmul_precision


@dataclass(frozen=True)
class Making:
    """How a run is made of a plain network.

    Attributes:
        draw: whether initial means are drawn from each seed; otherwise they are the module's own weights
        device, dtype: of the weights
        unsupported, only, skip: see `bayesianize`
        prior: the centre of the trunk's first prior, or that prior
        precision: of matrix products: see `Learner`
        allow_divergence: replicas that diverge are recorded in `diverged`, and the others continue
        ranks: the processes that train this network together; each must make the same run and give it the same tasks
        likelihood: what the targets are
        call: how the network is called
        accumulate: the number of parts in which the gradient of a step is computed
    """

    draw: bool
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32
    unsupported: Literal["error", "deterministic"] = "error"
    only: Names = None
    skip: Names = None
    prior: str | Prior = "zero"
    precision: str = "fp32"
    allow_divergence: bool = False
    ranks: Ranks | None = None
    likelihood: Likelihood = CATEGORICAL
    call: Call | None = None
    accumulate: int = 1


class Run:
    """R networks of one shape and one method, each with its own seed and its own real-valued settings: they learn, grow
    and predict. A round that fails leaves them unfinished: let a fork learn it (see `forked`).

    The draws of the last prediction are kept until the posterior changes.
    """

    _structured: tuple[Any, KroneckerGaussian | None] | None = None
    _kept: tuple[Gaussian | KroneckerGaussian, Any, list[Tensor]] | None = None

    def __init__(
        self,
        network: nn.Module,
        method: Method,
        settings: Sequence[Settings],
        seeds: Sequence[int],
        **options: Any,
    ) -> None:
        """`options` are the fields of `Making`."""
        self.how = how = Making(**options)
        if len(settings) != len(seeds):
            raise ValueError("settings must have one entry per seed")
        self.chosen: dict[str, Any] = {}  # settings that were auto, and that the network decided
        self.seeds, self.precision, self.ranks, self.likelihood = tuple(seeds), how.precision, how.ranks, how.likelihood
        self.method = for_settings(method, settings[0])
        network = self.method.changed(network, settings)
        # Adapters start at 0, on top of trained weights: nothing is random but the heads
        self.drawn = how.draw and next(adapted(network), None) is None
        self.prior, self.accumulate = how.prior, how.accumulate
        self.film, self.init_std = bool(settings[0].get("film")), None if not self.method.bayesian else _start(settings)
        if isinstance(self.prior, Prior) and (not self.method.bayesian or self.method.trunk is not None):
            fixed = "has point weights" if not self.method.bayesian else "adds weights for each task"
            raise EvclError(f"{self.method.name} {fixed}, and takes no prior of your own: use evcl or vcl")
        if self.method.trunk is not None:
            self._check_whole("trains every layer of its network")
        # The plain network; each new column is made from it
        self.plain = network if self.method.trunk is None else copy.deepcopy(network)
        call = how.call or Call()
        trunk = network if self.method.trunk is None else self.plain_trunk(1)
        self.network = self._converted(trunk, torch.device(how.device), call)
        self.network.beside_outputs = self.likelihood.beside
        if self.precision not in ("fp32", "tf32", "bf16"):
            raise EvclError(f"precision must be fp32, tf32 or bf16, not {self.precision!r}")
        if self.precision == "bf16":
            self.network.weights.compute_dtype = torch.bfloat16
        mean = self.network.posterior.mean
        self.settings = stack([self.settled(one) for one in settings], mean)
        width = None
        if self.method.bayesian:
            width = self.network.first_log_std(self.settings.prior_std, mean).expand_as(mean).clone()

        def another(field: str, make: Callable[[nn.Module], nn.Module] | None) -> Model:
            plain = copy.deepcopy(network)
            if make is not None:
                self._check_whole("also trains another network, and every layer of it")
                plain = make(plain)
            sources = [generator(seed, Purpose.INIT.of(field)) for seed in seeds] if how.draw else None
            made = self._bayesian(plain, sources, mean.device, call)
            return Model(made, made.posterior, made.statistics(), field)

        fresh = Fresh(Gaussian(self.network.centre.clone(), width), self.network.posterior)
        self.memory: Any = memories.initial(self.method.memory, fresh, another)
        self.diverged = torch.zeros(len(seeds), dtype=torch.bool, device=mean.device)
        self.rounds = 0  # number of rounds learned; generators are derived from it
        self.seen: tuple[int, ...] = ()  # the head of each task learned
        # the shape of the examples that each network was last checked on; a method may make a network for one round
        self.examined: WeakKeyDictionary[BayesianNetwork, torch.Size] = WeakKeyDictionary()
        self.lock = RLock()  # one thread at a time computes with the network
        self.account: Account | None = None  # how often rows count; None: it is not kept
        self.resolved: list[dict[str, object]] = [
            {} for _ in seeds
        ]  # what settings that are auto were in the last round

    def settled(self, s: Settings) -> Settings:
        """The settings with those chosen that depend on the network."""
        choose = self.method.settled
        chosen = s if choose is None else choose(s, self.network, self.likelihood)
        self.chosen = {name: value for name, value in chosen.items() if s[name] == "auto" and value != "auto"}
        return chosen

    def _check_whole(self, what: str) -> None:
        if self.how.only is not None or self.how.skip is not None:
            raise EvclError(f"{self.method.name} {what}: leave out only and skip")

    def plain_trunk(self, rounds: int) -> nn.Module:
        """If the network grows: the plain module that is trained in the last of these rounds."""
        assert self.method.trunk is not None
        return self.method.trunk(copy.deepcopy(self.plain), rounds)

    def _bayesian(
        self, plain: nn.Module, sources: list[torch.Generator] | None, device: torch.device, call: Call
    ) -> BayesianNetwork:
        how = self.how
        return bayesianize(
            plain,
            generators=sources,
            replicas=len(self.seeds),
            only=how.only,
            skip=how.skip,
            unsupported=how.unsupported,
            device=device,
            dtype=how.dtype,
            call=call,
            film=self.film,
            init_std=self.init_std,
        )

    def _converted(self, trunk: nn.Module, device: torch.device, call: Call) -> BayesianNetwork:
        """The trunk with Gaussian weights, and its first prior."""
        sources = [generator(seed, Purpose.INIT) for seed in self.seeds] if self.drawn else None
        made = self._bayesian(trunk, sources, device, call)
        if self.prior == "network":
            made.centre = made.posterior.mean.clone()
        if isinstance(self.prior, Prior):
            given = self.prior.flat(made.layout, made.centre)
            made.centre, made.width = given.mean.expand_as(made.centre).clone(), given.log_std
        if self.method.trunk is not None and made.trunk.state_dict():
            name = next(iter(made.trunk.state_dict()))
            raise EvclError(f"{self.method.name} trains every layer of its network, but {name!r} is fixed")
        return made

    # --- the network -----------------------------------------------------------------------------------------------

    def classes(self, k: int) -> int:
        return self.network.classes(k)

    def features(self, x: Tensor) -> int:
        """The width of the trunk's output for an input like x [1, ...]."""
        with torch.no_grad(), self.network.alone():
            width: int = self.network(x.clone()).shape[1]
        return width

    def check_independent(self, network: BayesianNetwork, x: Tensor) -> None:
        """Check how a network treats a batch of examples like x [U, N, ...], if their shape is not that of the last
        check: the number of rows per example in a layer depends on the length of sequences.
        """
        if self.examined.get(network) != x.shape[2:]:
            apart = len(self.seeds) > 1 or self.method.apart or self.ranks is not None
            check_examples_independent(network, x[0], apart)
            self.examined[network] = x.shape[2:]

    # --- state -----------------------------------------------------------------------------------------------------

    def _networks(self) -> list[BayesianNetwork]:
        return [self.network, *(model.network for model in memories.models(self.memory))]

    def __deepcopy__(self, memo: dict[int, object]) -> Run:
        made = memo[id(self)] = copy.copy(self)
        with CopiedTensors():
            vars(made).update(copy.deepcopy({**vars(self), "lock": None}, memo), lock=RLock())
        return made

    def forked(self, call: Call) -> Self:
        """The same replicas with networks of their own, called by `call`, to learn a round while this one predicts."""
        made = copy.copy(self)
        with self.lock:
            forks = {one: forked(one, call) for one in self._networks()}
        made.network, made.diverged, made.lock = forks[self.network], self.diverged.clone(), RLock()
        made.memory = memories.with_models(self.memory, lambda model: replace(model, network=forks[model.network]))
        made.examined = WeakKeyDictionary({forks[one]: x for one, x in self.examined.items() if one in forks})
        made.changed()
        return made

    def tensors(self) -> dict[str, Tensor]:
        """Every buffer, by name. With layout, seeds, `rounds`, `seen` and `outline`, this is the whole state. A round
        replaces them, and changes none in place.
        """
        named = {f"statistics.{name}": tensor for name, tensor in self.network.statistics().items()}
        q, of_tasks = self.network.posterior, [one.task_weights for one in self._networks()]
        named |= {f"posterior.{name}": t for name, t in (("mean", q.mean), ("log_std", q.log_std)) if t is not None}
        named |= {f"film {i}": own.table for i, own in enumerate(of_tasks) if own is not None}
        return named | {f"memory/{name}": tensor for name, tensor in packing.tensors(self.memory).items()}

    def memory_bytes(self) -> int:
        """The size of a replica's weights and of its method's memory. A prior that is the posterior counts once, and so
        does the network, which only computes.
        """
        q = self.network.posterior
        live = [part for part in (q.mean, q.log_std) if part is not None]
        own, kept = [], []
        for name, t in self.tensors().items():
            if not name.startswith("memory/"):
                own.append(t)
            elif not any(t.shape == w.shape and t.equal(w) for w in live):
                kept.append(t)
        return sum(sum(t.numel() * t.element_size() for t in some) // len(self.seeds) for some in (own, kept))

    def kept_examples(self) -> list[TaskData]:
        """The examples of earlier tasks that the memory keeps."""
        return list(memories.kept_examples(self.memory))

    def outline(self) -> Any:
        """The structure of the memory, as JSON."""
        return packing.outline(self.memory)

    def _fits(self, tasks: int) -> packing.Fits:
        """What the memory is checked against after this many tasks."""
        return packing.Fits(
            self.network.posterior.mean, self.method.bayesian, self.classes, tasks, self.likelihood.heads
        )

    def to(self, device: torch.device | str) -> None:
        """Move everything to a device."""
        network = self.network
        statistics = {name: tensor.to(device) for name, tensor in network.statistics().items()}
        for each in self._networks():
            each.trunk.to(device)
            if each.task_weights is not None:
                each.task_weights = replace(each.task_weights, table=each.task_weights.table.to(device))
        network.posterior = network.posterior.map(lambda t: t.to(device))
        network.set_statistics(statistics)
        self.memory = memories.mapped(self.memory, lambda t: t.to(device))
        self.diverged = self.diverged.to(device)
        moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in self.settings.items()}
        self.settings = Settings(moved)
        self.changed()

    def changed(self) -> None:
        """After a change of state, give second networks their new state."""
        for model in memories.models(self.memory):
            model.network.posterior = model.posterior
            model.network.set_statistics(model.statistics)
        self._kept = self._structured = None

    def precise(self) -> AbstractContextManager[None]:
        return matmul_precision(self.precision) if self.network.posterior.mean.is_cuda else nullcontext()

    # --- more weights ------------------------------------------------------------------------------------------------

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
        self.account = None  # its weights have other places now
        weight, bias = network.trunk_names[:2]
        width, inputs = network.layout.shapes[weight]
        remembered = memories.with_inputs(self.memory, count)
        old, new = network.layout, Layout({**network.layout.shapes, weight: (width, inputs + count)})
        network.scales |= dict.fromkeys((weight, bias), he_std(inputs + count))
        none = network.posterior.mean.new_zeros(len(self.seeds), new.size)
        self.memory = remembered
        self._relay(old, new, around(network, none, none, new, self.settings), lambda model: model)

    def grow_trunk(self, rounds: int) -> None:
        """If the network grows, have the trunk of this many rounds; weights that it had before keep their values."""
        network = self.network
        if self.method.trunk is None or rounds <= network.rounds:
            return
        mean, old, statistics = network.posterior.mean, network.layout, network.statistics()
        made = self._converted(self.plain_trunk(rounds), mean.device, network.call)
        heads = {name: shape for name, shape in old.shapes.items() if name not in network.trunk_names}
        new = Layout({**made.layout.shapes, **heads})
        network.take_trunk(made, rounds)
        none = mean.new_zeros(len(mean), new.size - made.layout.size)  # the heads have values already
        centre, drawn = (torch.cat([t, none], 1) for t in (made.centre, made.posterior.mean))
        self._relay(old, new, around(network, centre, drawn, new, self.settings), lambda model: model)
        network.set_statistics({**network.statistics(), **statistics})
        self.examined.pop(network, None)

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
        self.changed()

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
            wide = own.new_zeros(len(own), new.size)
            if old.size + part.size == new.size:  # all are new, and the last
                wide[:, old.size :] = own
            else:
                new.scatter_(wide, part, own)
            return wide

        own = around(network, torch.zeros_like(drawn), drawn, part, self.settings)
        return Fresh(own.prior.map(whole), own.posterior.map(whole))

    def switch(self, method: Method, settings: Settings) -> None:
        """Follow this method, with these settings, from now on: the same as before with a memory of examples added or
        changed, or removed.
        """
        mean = self.network.posterior.mean
        method = for_settings(method, settings)

        def empty() -> object:
            centre, trunk = torch.zeros_like(mean), self.network.centre
            if not trunk.is_meta:  # that of an mlp from a file: it is 0
                centre[:, : trunk.shape[1]] = trunk
            fresh = Fresh(replace(self.network.posterior, mean=centre), self.network.posterior)
            return memories.initial(method.memory, fresh, _no_network)

        self.memory = memories.switched(method.memory, self.memory, empty)
        self.method = method
        self.settings = stack([self.settled(settings)], mean)
        self.changed()

    def load_tensors(self, tensors: dict[str, Tensor], outline: Any, rounds: int, seen: Sequence[int]) -> None:
        """Load the buffers that `tensors()` returned, in the present layout; raise if something does not fit."""
        self.grow_trunk(rounds)
        own = {name: t for name, t in self.tensors().items() if not name.startswith("memory")}
        for name, wanted in own.items():
            tensor = tensors[name]
            if tensor.shape != wanted.shape or tensor.dtype != wanted.dtype or not packing.finite(tensor):
                raise EvclError(f"{name} must be {wanted.dtype} {tuple(wanted.shape)} and finite")
            if name.startswith("posterior."):
                packing.check_size(name, tensor)
        self.memory = packing.from_tensors(
            self.memory,
            outline,
            {name.removeprefix("memory/"): t for name, t in tensors.items() if name.startswith("memory/")},
            self._fits(len(seen)),
        )
        for i, network in enumerate(self._networks()):
            if network.task_weights is not None:
                network.task_weights = replace(network.task_weights, table=tensors[f"film {i}"])
        self.network.posterior = Gaussian(tensors["posterior.mean"], tensors.get("posterior.log_std"))
        self.network.set_statistics({name: tensors[f"statistics.{name}"] for name in self.network.statistics()})
        self.rounds, self.seen = rounds, tuple(seen)
        self.changed()

    # --- learning ----------------------------------------------------------------------------------------------------

    def learn(
        self,
        tasks: Sequence[TaskData],
        epochs: int | None = None,
        observer: Observer | None = None,
        validation: Validation | None = None,
        *,
        noise: Noise | None = None,
        reference: bool = False,
    ) -> None:
        """One round: learn these tasks, one or several jointly, with the method, and update its memory.

        `observer` follows the round, and may save and resume it. `validation` is evaluated during the first fit
        of the run's own network.
        `noise` and `reference` are for tests: they replace the noise source, and differentiate the terms by autograd.
        """
        watching = observer or Observer()
        self.add_task_weights(max(task.task for task in tasks) + 1)
        if self.method.trunk is not None:
            self.grow_trunk(self.rounds + 1)
        self.network.weights.task = tasks[0].task
        network, seen = self.network, self.seen
        round_ = Round(
            self.rounds, list(tasks), network, network.posterior, seen, self.seeds, self.likelihood, self.ranks
        )
        fitting = Fitting(self, round_, epochs, watching, validation, noise, reference)
        with self.precise(), network.keeping():
            if find_chain(network, tasks[0].x) is None:
                self.check_independent(network, tasks[0].x)  # before a method uses the network
            learned = self._drive(round_, fitting, epochs)
            packing.check_learned(learned.memory, self.memory, self._fits(len(seen) + len(tasks)))
            network.posterior, self.memory = learned.posterior, learned.memory
            self.changed()
            if self.likelihood.beside:
                for task in tasks:
                    network.number_head(task.head).count(task.n)
        self.rounds, self.seen = self.rounds + 1, (*seen, *(task.head for task in tasks))

    def reports(self) -> dict[str, Any]:
        """What is known of the last round beside its result, as JSON: for a checkpoint."""
        account = self.account or Account()
        return {"resolved": self.resolved, "counts": dict(account.counts), "elbo": dict(account.elbo)}

    def report(self, saved: Mapping[str, Any]) -> None:
        """The inverse of `reports`."""
        self.resolved = [dict(one) for one in saved["resolved"]]
        counts = {name: [float(c) for c in one] for name, one in saved["counts"].items()}
        elbo = {name: float(one) for name, one in saved["elbo"].items()}
        self.account = None if self.account is None else replace(self.account, counts=counts, elbo=elbo)

    def keep_account(self, tasks: Sequence[TaskData]) -> None:
        """Add the tasks of the round that has just been learned to the account, or give it up where no Fisher is
        known: methods without a penalty on the past, networks that grow or mix examples.
        """
        network, own = self.network, self.method.bayesian or {"strength", "distill"} & self.settings.keys()
        if self.account is None or not own or self.method.trunk is not None:
            self.account = None
            return
        about = (self.rounds - 1, list(tasks), network, network.posterior, self.seen, self.seeds, self.likelihood)
        try:
            with self.precise(), network.keeping():
                if not self.method.apart:
                    check_examples_independent(network, tasks[0].x[0], True)
                self.account = self.account.learned(Round(*about, self.ranks))
        except EvclError:
            self.account = None

    def _drive(self, round_: Round, fitting: Fitting, epochs: int | None) -> Learned:
        """Run the method's generator: it yields fits, and receives their results."""
        s = self.settings if epochs is None else Settings({**self.settings, "epochs": epochs})
        fits = self.method.learn(self.memory, round_, s)
        answer: Fitted | None = None
        for stage in count():
            try:
                with capturing if self.network.posterior.mean.is_cuda else nullcontext():
                    fit = fits.send(answer)  # type: ignore[arg-type]
            except StopIteration as end:
                learned: Learned = end.value
                return learned
            answer = fitting(fit, stage)
        raise AssertionError

    # --- predicting --------------------------------------------------------------------------------------------------

    @contextmanager
    def predicting_from(self, q: Gaussian, task_weights: TaskWeights | None = None) -> Iterator[None]:
        """Inside this context, predict from these weights and, if given, those of tasks."""
        before = self.network.posterior, self.method, self.network.task_weights
        self.network.posterior = q
        if task_weights is not None:
            self.network.task_weights = task_weights
        self.method = replace(self.method, predictor=None, structure=None)
        try:
            yield
        finally:
            (self.network.posterior, self.method, self.network.task_weights), self._kept = before, None

    def predictor(self, task: int | None = None) -> Gaussian | KroneckerGaussian:
        """The weights that predict a task: the posterior, or what the method's `predictor` returns."""
        posterior, make = self.network.posterior, self.method.predictor
        if make is None:
            return self.structured or posterior
        named = replace(posterior, layout=self.network.layout)
        gaussian = make(self.memory, named, task)
        return posterior if gaussian is named else gaussian

    @property
    def structured(self) -> KroneckerGaussian | None:
        """The posterior with its matrices; None: it is diagonal."""
        posterior, make = self.network.posterior, self.method.structure
        if make is not None and (self._structured is None or self._structured[0] is not posterior):
            self._structured = posterior, make(self.memory, self.network, self.settings)
        return None if make is None or self._structured is None else self._structured[1]

    @property
    def predicts_by_task(self) -> bool:
        """Whether each task's predictions use different weights: a method chooses them, or some belong to a task."""
        return self.network.task_weights is not None or self.method.predictor is not None

    @property
    def needs_task(self) -> bool:
        """Whether predictions differ from task to task, also for tasks that share a head."""
        return self.network.task_weights is not None or self.method.needs_task

    @property
    def tells_classes_apart(self) -> bool:
        """Whether new classes of a head may be learned apart from its old ones: see `Method.log_joint`."""
        apart = self.method.log_joint is not None and not self.method.generative
        return apart and self.network.task_weights is None and not self.network.takes_tokens

    @torch.no_grad()
    def log_joint(self, x: Tensor, heads: Sequence[int]) -> list[Tensor] | None:
        """[R, N, C] for each of these heads: log p(x, class) up to a constant, by the method's likelihood per class;
        None if it has none, or knows too little. x [U, N, ...]: see TaskData.
        """
        if self.method.log_joint is None:
            return None
        question = Asked(self.network, x, heads, list(self.seeds))
        return self.method.log_joint(self.memory, self.network.posterior, question)

    @torch.no_grad()
    def domains(self, x: Tensor, heads: Sequence[int], task: Newcomer) -> tuple[list[bool], list[list[float]]] | None:
        """For each replica, whether a task with these inputs is a new domain, and how many of its rows belong to each
        known one; None if the method cannot tell. See `Method.domains`.
        """
        if self.method.domains is None:
            return None
        asked = Asked(self.network, x, heads, list(self.seeds), self.settings)
        answer = self.method.domains(self.memory, self.network.posterior, asked, task)
        if answer is None:
            return None
        both = torch.cat([double(answer[0].unsqueeze(1)), double(answer[1])], 1)
        if self.ranks is not None:
            self.ranks.broadcast_(both)
        return [bool(row[0]) for row in both], both[:, 1:].tolist()

    @torch.no_grad()
    def evidence(self, x: Tensor, heads: Sequence[int]) -> Tensor | None:
        """[R, N, heads]: log p(x, head) up to a constant, or None: see `log_joint`."""
        joint = self.log_joint(x, heads)
        return None if joint is None else torch.stack([scores.logsumexp(2) for scores in joint], 2)

    def predict(
        self,
        x: Tensor,
        head: int,
        draws: Iterable[Tensor] | None = None,
        chunk: int | None = None,
        task: int | None = None,
    ) -> Tensor:
        """Probabilities [R, N, classes] for x [U, N, ...] (see TaskData), averaged over fixed draws of the weights."""
        return self.predict_each(x, [head], draws, task, chunk)[0]

    @torch.no_grad()
    def predict_each(
        self,
        x: Tensor,
        heads: Sequence[int],
        draws: Iterable[Tensor] | None = None,
        task: int | None = None,
        chunk: int | None = None,
    ) -> list[Tensor]:
        """`predict` for each of these heads. The trunk is computed only once."""
        if self.method.generative:
            return [p for k in heads for p in self._generated(x, [k])]
        total, count = torch.tensor(0.0), 0
        for p in self._drawn(x, heads, draws, chunk, task):
            total, count = total + p, count + 1
        return list((total / count).split([self.classes(k) for k in heads], 2)) if len(heads) > 1 else [total / count]

    @torch.no_grad()
    def predict_with_entropy(
        self, x: Tensor, heads: Sequence[int], task: int | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """For each of these heads: `predict`, and the mean over the weight draws of the entropy of each draw's own
        prediction, [R, N], in nats. The trunk is computed only once.
        """
        if self.method.generative:
            return [(p, torch.special.entr(p).sum(2)) for p in self._generated(x, heads)]
        sizes = [self.classes(k) for k in heads]
        total, entropy, count = torch.tensor(0.0), torch.tensor(0.0), 0  # [R, N, heads]: the entropy
        for p in self._drawn(x, heads, task=task):
            own = of_each(torch.special.entr(p), sizes, lambda part: part.sum(-1, keepdim=True))
            total, entropy, count = total + p, entropy + own, count + 1
        each = (total / count).split(sizes, 2)
        return list(zip(each, (entropy / count).unbind(2), strict=True))

    @torch.no_grad()
    def log_likelihood(self, data: TaskData, samples: int | None = None) -> Tensor:
        """[R, N]: log p of each example at the means of the weights: see `Likelihood.log_likelihood`."""
        with self.precise():
            return self.likelihood.log_likelihood(self._means(data.task), data.x, data.y, samples)

    @torch.no_grad()
    def sample(self, task: int, count: int) -> Tensor:
        """[R, count, D]: inputs that a task's model generates at the means of the weights: see `Likelihood.sample`."""
        with self.precise():
            return self.likelihood.sample(self._means(task), count)

    def _means(self, task: int) -> Means:
        return Means(self.network, self.predictor(task).mean, self.seeds, task)

    def _generated(self, x: Tensor, heads: Sequence[int]) -> list[Tensor]:
        """The predictions of a method that predicts without the network."""
        joint = self.log_joint(x, heads)
        if joint is None:
            raise EvclError(f"{self.method.name} cannot predict inputs of another shape than it has learned from")
        return [scores.softmax(2) for scores in joint]

    def _drawn(
        self,
        x: Tensor,
        heads: Sequence[int],
        draws: Iterable[Tensor] | None = None,
        chunk: int | None = None,
        task: int | None = None,
    ) -> Iterator[Tensor]:
        """Predictions [R, N, ...] for each draw of the weights; those of several heads are concatenated."""
        network = self.network
        if len(self.seeds) > 1:
            self.check_independent(network, x)
        sizes = [network.classes(k) for k in heads]
        predict = self.likelihood.predict
        if len(heads) > 1 and not self.likelihood.softmax:
            raise EvclError("numbers are predicted through one head at a time: choose a task")

        def each_head(found: Tensor) -> Tensor:
            return predict(found) if len(sizes) <= 1 else of_each(found, sizes, predict)

        with self.precise(), network.keeping():
            for weights in self.draws(heads, task) if draws is None else draws:
                yield outputs(network, weights, network.layout, x, heads, chunk, each_head, task)

    def draws(
        self, heads: Iterable[int], task: int | None = None, keep: bool = False, samples: int | None = None
    ) -> Sequence[Tensor] | Iterator[Tensor]:
        """The weight draws [R, P] for predictions: `samples` of them, by default `predict_samples`. If they are not too
        large, or with `keep`, they are kept until the posterior changes.
        """
        posterior, wanted = self.predictor(task), tuple(heads)
        samples = samples or int(self.settings.get("predict_samples", 1))
        if posterior.mean.numel() * samples > KEPT_NUMBERS and not keep:
            return weight_draws(self.network, posterior, self.seeds, samples, wanted)
        own = [posterior.mean, posterior.log_std if isinstance(posterior, Gaussian) else None]
        versions = [t._version for t in own if t is not None]
        if self._kept is None or self._kept[0] is not posterior or self._kept[1] != (wanted, versions, samples):
            draws = list(weight_draws(self.network, posterior, self.seeds, samples, wanted))
            self._kept = (posterior, (wanted, versions, samples), draws)
        return self._kept[2]


def _no_network(field: str, make: object) -> Model:
    raise EvclError(f"a second network ({field}) cannot be added to a learner that has learned tasks")


def _extended(q: Gaussian, extended: Extending, start: Gaussian) -> Gaussian:
    log_std = None
    if q.log_std is not None and start.log_std is not None:
        log_std = extended(q.log_std, start.log_std)
    return Gaussian(extended(q.mean, start.mean), log_std)


def _start(settings: Sequence[Settings]) -> list[float] | Literal["auto"]:
    """The initial sigma of each replica, or "auto"."""
    each = [s.init_std for s in settings]
    if "auto" in each:
        return "auto"  # if one is auto, all are: `stack` refuses a mixture
    return [float(decided(one)) for one in each]


def around(network: BayesianNetwork, centre: Tensor, drawn: Tensor, new: Layout, s: Settings) -> Fresh:
    """The first prior, with these means [R, P], and the initial posterior, with these."""
    if network.posterior.log_std is None:
        return Fresh(Gaussian(centre, None), Gaussian(drawn, None))
    prior, start = (
        log_stds(s[setting], network.scales, new, drawn, part).expand_as(drawn)
        for setting, part in (("prior_std", 1.0), ("init_std", INIT_SHARE))
    )
    return Fresh(Gaussian(centre, prior), Gaussian(drawn, start))


def stack(settings: Sequence[Settings], like: Tensor) -> Settings:
    """Combine the settings of R replicas: real numbers that differ become [R, 1] tensors; all others must agree."""
    stacked: dict[str, object] = {}
    for name, value in settings[0].items():
        values = [s[name] for s in settings]
        if all(v == value for v in values):
            stacked[name] = value
        elif all(isinstance(v, float) for v in values):
            stacked[name] = like.new_tensor(values).unsqueeze(1)
        else:
            raise EvclError(
                f"replicas that share a program must have the same {name}, but these have {values}", setting=name
            )
    return Settings(stacked)
