"""R networks trained side by side with one method, each with its own seed and settings: their weights and memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from evcl._core.errors import EvclError
from evcl._core.randomness import Purpose, generator
from evcl._core.ranks import Ranks
from evcl._core.settings import Settings, decided
from evcl.methods import Method, Model, TaskData, for_settings, memories, packing
from evcl.methods.memories import Fresh
from evcl.nn import BayesianNetwork, Gaussian, Layout, Names, Prior, bayesianize, log_stds
from evcl.nn.convert import INIT_SHARE
from evcl.nn.independence import check_examples_independent
from evcl.nn.inputs import Call
from evcl.nn.lora import adapted
from evcl.targets import CATEGORICAL, Likelihood
from evcl.training.state import State, tensors_of
from evcl.training.step import matmul_precision


class Replicas:
    """R networks of one shape and one method, each with its own seed and its own real-valued settings."""

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
        prior: Literal["zero", "network"] | Prior = "zero",
        precision: str = "fp32",
        allow_divergence: bool = False,
        ranks: Ranks | None = None,
        likelihood: Likelihood = CATEGORICAL,
        call: Call | None = None,
        accumulate: int = 1,
    ) -> None:
        """`draw`: draw initial means from each seed; otherwise use the module's own weights.

        `only`, `skip`, `unsupported`: see `bayesianize`. `prior`: the centre of the trunk's first prior, or that prior.
        `allow_divergence`: replicas that diverge are recorded in `diverged`, and the others continue. `ranks`: the
        processes that train this network together; each must make the same run and give it the same tasks. `call`: how
        the network is called. `accumulate`: the number of parts in which the gradient of a step is computed.
        """
        if len(settings) != len(seeds):
            raise ValueError("settings must have one entry per seed")
        self.seeds, self.precision, self.ranks, self.likelihood = tuple(seeds), precision, ranks, likelihood
        self.method = for_settings(method, settings[0])
        network = self.method.changed(network, settings)
        # Adapters start at 0, on top of trained weights: nothing is random but the heads
        self.drawn = draw and next(adapted(network), None) is None
        self.prior: Prior | str = prior
        if isinstance(prior, Prior) and (not self.method.bayesian or self.method.trunk is not None):
            fixed = "has point weights" if not self.method.bayesian else "adds weights for each task"
            raise EvclError(f"{self.method.name} {fixed}, and takes no prior of your own: use evcl or vcl")
        self.accumulate = accumulate
        bayesian = self.method.bayesian
        convert: dict[str, Any] = {"unsupported": unsupported, "device": device, "dtype": dtype}
        convert["call"] = call or Call()
        convert["film"] = bool(settings[0].get("film"))
        convert["init_std"] = self._start(settings) if bayesian else None
        self._convert = convert
        self.network = self._first(network, only, skip)
        self.network.beside_outputs = likelihood.beside
        if precision not in ("fp32", "tf32", "bf16"):
            raise EvclError(f"precision must be fp32, tf32 or bf16, not {precision!r}")
        if precision == "bf16":
            self.network.weights.compute_dtype = torch.bfloat16
        mean = self.network.posterior.mean
        self.settings = stack(settings, mean)
        width = None
        if bayesian:
            width = self.network.first_log_std(self.settings.prior_std, mean).expand_as(mean).clone()
        first = Gaussian(self.network.centre.clone(), width)
        fresh = Fresh(first, self.network.posterior)

        def another(field: str, make: Callable[[nn.Module], nn.Module] | None) -> Model:
            plain = copy.deepcopy(network)
            options = dict(convert)
            if make is None:
                options |= {"only": only, "skip": skip}
            elif only is not None or skip is not None:
                raise EvclError(
                    f"{self.method.name} also trains another network, and every layer of it: leave out only and skip"
                )
            made = bayesianize(
                plain if make is None else make(plain),
                generators=[generator(seed, Purpose.INIT.of(field)) for seed in seeds] if draw else None,
                replicas=len(seeds),
                **options,
            )
            return Model(made, made.posterior, made.statistics(), field)

        self.memory: Any = memories.initial(self.method.memory, fresh, another)
        self.allow_divergence, self.diverged = (
            allow_divergence,
            torch.zeros(len(seeds), dtype=torch.bool, device=mean.device),
        )
        self.rounds = 0  # number of rounds learned; generators are derived from it
        self.seen: tuple[int, ...] = ()  # the head of each task learned
        # the shape of the examples that each network was last checked on; a method may make a network for one round
        self._examined: WeakKeyDictionary[BayesianNetwork, torch.Size] = WeakKeyDictionary()

    def _first(self, network: nn.Module, only: Names, skip: Names) -> BayesianNetwork:
        if self.method.trunk is None:
            return self._converted(network, only, skip)
        if only is not None or skip is not None:
            raise EvclError(f"{self.method.name} trains every layer of its network: leave out only and skip")
        self._plain = copy.deepcopy(network)
        return self._converted(self.plain_trunk(1))

    def plain_trunk(self, rounds: int) -> nn.Module:
        """If the network grows: the plain module that is trained in the last of these rounds."""
        assert self.method.trunk is not None
        return self.method.trunk(copy.deepcopy(self._plain), rounds)

    def _converted(self, trunk: nn.Module, only: Names = None, skip: Names = None) -> BayesianNetwork:
        sources = [generator(seed, Purpose.INIT) for seed in self.seeds] if self.drawn else None
        made = bayesianize(trunk, generators=sources, replicas=len(self.seeds), only=only, skip=skip, **self._convert)
        if self.prior == "network":
            made.centre = made.posterior.mean.clone()
        if isinstance(self.prior, Prior):
            given = self.prior.flat(made.layout, made.centre)
            made.centre, made.width = given.mean.expand_as(made.centre).clone(), given.log_std
        if self.method.trunk is not None and made.trunk.state_dict():
            name = next(iter(made.trunk.state_dict()))
            raise EvclError(f"{self.method.name} trains every layer of its network, but {name!r} is fixed")
        return made

    @staticmethod
    def _start(settings: Sequence[Settings]) -> list[float] | Literal["auto"]:
        """The initial sigma of each replica, or "auto"."""
        each = [s.init_std for s in settings]
        if "auto" in each:
            return "auto"  # if one is auto, all are: `stack` refuses a mixture
        return [float(decided(one)) for one in each]

    @staticmethod
    def _around(network: BayesianNetwork, centre: Tensor, drawn: Tensor, new: Layout, s: Settings) -> Fresh:
        """The first prior, with these means [R, P], and the initial posterior, with these."""
        if network.posterior.log_std is None:
            return Fresh(Gaussian(centre, None), Gaussian(drawn, None))
        prior, start = (
            log_stds(s[setting], network.scales, new, drawn, part).expand_as(drawn)
            for setting, part in (("prior_std", 1.0), ("init_std", INIT_SHARE))
        )
        return Fresh(Gaussian(centre, prior), Gaussian(drawn, start))

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
        if self._examined.get(network) != x.shape[2:]:
            apart = len(self.seeds) > 1 or self.method.apart or self.ranks is not None
            check_examples_independent(network, x[0], apart)
            self._examined[network] = x.shape[2:]

    # --- state -----------------------------------------------------------------------------------------------------

    def _networks(self) -> list[BayesianNetwork]:
        return [self.network, *(model.network for model in memories.models(self.memory))]

    def state(self) -> State:
        layouts = tuple((one, one.layout, len(one.heads), one.form()) for one in self._networks())
        network = self.network
        about = (self.memory, self.rounds, self.seen, self.diverged.clone())
        task_weights = tuple(one.task_weights for one in self._networks())
        return State(layouts, network.posterior, network.statistics(), *about, task_weights)

    def restore(self, state: State) -> None:
        for (network, layout, heads, form), own in zip(state.layouts, state.task_weights, strict=True):
            del network.heads[heads:]
            network.set_form(form)
            network.layout, network.task_weights, network.weights.task = layout, own, None
        self.network.posterior, self.memory = state.posterior, state.memory
        self.network.set_statistics(state.statistics)
        self.rounds, self.seen = state.rounds, state.seen
        self.diverged.copy_(state.diverged)
        self._changed()

    def tensors(self) -> dict[str, Tensor]:
        """Every buffer, by name. With layout, seeds, `rounds`, `seen` and `outline`, this is the whole state."""
        return tensors_of(self.state())

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
        self._changed()

    def _changed(self) -> None:
        """After a change of state, give second networks their new state."""
        for model in memories.models(self.memory):
            model.network.posterior = model.posterior
            model.network.set_statistics(model.statistics)

    def precise(self) -> AbstractContextManager[None]:
        return matmul_precision(self.precision) if self.network.posterior.mean.is_cuda else nullcontext()


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
