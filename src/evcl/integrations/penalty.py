"""A method's penalty for a training loop that is not evcl's.

    L = the loop's own loss + sum of the method's terms

The method is the one that `Learner` uses. Its `learn` yields a fit, of which this file takes the terms; the other loop
trains; and the fit's result, the weights of the live module, is sent back, so that the method measures the task (for
example its Fisher) and returns its memory. No equation is written a second time.

A Bayesian method needs Gaussian weights, which no ordinary loop has. `Penalty` gives them to the module, in place:
each weight is drawn as mu + sigma epsilon whenever the module uses it in training mode, and is mu in evaluation mode.
mu and log sigma are ordinary parameters, which the loop's optimizer trains.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.data import Subset

from evcl._core.errors import EvclError
from evcl._core.inputs import labels
from evcl._core.randomness import Purpose, generator
from evcl._core.settings import CORESET, SEED, TRAINING, Settings, resolve
from evcl.learner.reading import Reader, is_dataset
from evcl.methods import Method, Reread, Round, TaskData
from evcl.methods import get as get_method
from evcl.methods.hosted import Host, Hosted
from evcl.methods.memories import Fresh
from evcl.methods.registry import for_settings
from evcl.nn import BayesianNetwork, Gaussian, Layout, Names, bayesianize, copied, log_stds
from evcl.nn.independence import check_examples_independent
from evcl.nn.inputs import Call, Output
from evcl.targets import CATEGORICAL

MIN_EXAMPLES_READ = 1000  # at least this many examples of a task are read, if it has as many
# settings of evcl's own loop
LOOPS = (*TRAINING, *CORESET, "std_lr_scale", "std_update", "std_rate", "predict_samples")
HEAD = 0  # the module's own outputs
HOST = Host("a penalty", "use evcl.Learner, or ewc, mas, vcl or evcl")


class Drawn(nn.Module):
    """A weight with a standard deviation: drawn in training mode, its mean in evaluation mode."""

    def __init__(self, log_std: Tensor) -> None:
        super().__init__()
        self.log_std = nn.Parameter(log_std)

    def forward(self, mean: Tensor) -> Tensor:
        return mean + self.log_std.exp() * torch.randn_like(mean) if self.training else mean


class Penalty:
    """The penalty of a method such as `ewc`, `mas`, `vcl` or `evcl`, for any loop that trains `module`.

        penalty = Penalty(module, "ewc", strength=10)
        for data in tasks:
            with penalty.task(data):
                for x, y in batches:
                    loss = F.cross_entropy(module(x), y) + penalty()
                    ...

    `module` maps a batch to the logits of all classes, [batch, classes]; labels are column numbers. The loss must be
    the mean over a batch, as it is in evcl. If the module does not return a tensor, `output` chooses one of its
    outputs, as in `Learner`.

    With a Bayesian method, the module's weights become Gaussian: create the optimizer after the penalty, without weight
    decay. `plain()` returns a copy with ordinary weights, the means.

    `only` and `skip` name the layers to protect or to leave alone, and `prior="network"` centres a Bayesian method's
    first prior on the module's weights, as in `Learner`. `settings` are the method's; those of training, such as `lr`,
    belong to the loop. `distill` is 0: only terms on the weights are added, and a method that needs more is refused.
    """

    def __init__(
        self,
        module: nn.Module,
        method: str | Method = "ewc",
        *,
        output: Output = None,
        seed: int = 0,
        only: Names = None,
        skip: Names = None,
        prior: Literal["zero", "network"] = "zero",
        **settings: Any,
    ) -> None:
        chosen = get_method(method)
        for name in settings:
            if name in LOOPS and name in chosen.known_settings:
                raise EvclError(f"{name} is decided by the loop that trains the module: leave it out of the penalty")
        known = chosen.known_settings
        usual = {name: value for name, value in (("distill", 0.0), ("one_softmax", True)) if name in known}
        if settings.get("distill"):
            raise EvclError("distill is a loss on the outputs, and a penalty is on the weights only: leave it out")
        if prior not in ("zero", "network"):
            raise EvclError(f"prior must be 'zero' or 'network', not {prior!r}")
        self.settings = resolve(chosen.name, known, {**usual, **settings})
        self.method = for_settings(chosen, self.settings)
        self.module, self.seed = module, int(SEED.check("seed", seed))
        call = Call(output)
        self._chosen: dict[str, Any] = {"only": only, "skip": skip, "call": call}
        if not isinstance(module, nn.Module):
            raise EvclError(f"module must be a torch.nn.Module, not {type(module).__name__}")
        dtype = next((p.dtype for p in module.parameters()), torch.float32)
        self._dtype = dtype if dtype == torch.float64 else torch.float32
        self._reader = Reader(module, call, self._dtype)
        network = self._network()
        if prior == "network":
            network.centre = network.posterior.mean.clone()
        self._layout = network.layout
        if self.method.settled is not None:
            self.settings = self.method.settled(self.settings, network, CATEGORICAL)
        self._hosted = Hosted(self.method, self.settings, self._fresh(network), HOST)
        if self.method.bayesian:
            self._draw_weights(network)

    @property
    def tasks(self) -> int:
        """The number of tasks learned so far."""
        return self._hosted.tasks

    @property
    def memory(self) -> Any:
        """What the method remembers of them."""
        return self._hosted.memory

    def __repr__(self) -> str:
        return f"Penalty({self.method.name!r}, {self.tasks} task{'' if self.tasks == 1 else 's'} learned)"

    # --- a task ----------------------------------------------------------------------------------------------------

    @contextmanager
    def task(self, data: object, n: int | None = None) -> Iterator[Penalty]:
        """Train the module on this task inside this context: `begin` and, if nothing fails, `end`."""
        self.begin(data, n)
        try:
            yield self
        except BaseException:
            self.cancel()
            raise
        self.end()

    def begin(self, data: object, n: int | None = None) -> None:
        """Begin a task. `data` are its training examples, in any form that `Learner.learn` takes; a method measures
        them at the end. Of a data set only a random sample is read, as many examples as the method measures. `n` is
        the number of examples, if `data` are not all of them.
        """
        if self._hosted.round is not None:
            raise EvclError("a task has begun already: call end() first, or cancel() to forget it")
        network = self._network()
        self._take_layout(network)
        x, y, total = self._examples(data)
        network.whole = self._outputs(network, x, y)
        task = TaskData(x.unsqueeze(0), y.unsqueeze(0), HEAD, task=self.tasks, reread=_counted(n or total, len(y)))
        seen = [HEAD] * self.tasks
        round_ = Round(self.tasks, [task], network, self._live().snapshot(), seen, [self.seed], CATEGORICAL)
        self._hosted.begin(round_)

    def __call__(self) -> Tensor:
        """The sum of the method's terms at the module's weights, a number to add to the loss. 0 outside a task."""
        q = self._live()
        total = q.mean.new_zeros(())
        for term in self._hosted.terms:
            total = total + term.loss(q).sum()
        return total

    def add_gradient(self) -> Tensor:
        """Add the gradient of the terms to the `.grad` of the module's parameters. Called once per step of the
        optimizer, after the backward pass of the loss, it gives the same step as the terms in the loss: for loops whose
        loss cannot be changed. Returns the sum of the terms.
        """
        with torch.enable_grad():
            total = self()
        if total.requires_grad:
            weights = [w for name in self._layout.shapes for w in self._pair(name) if w is not None]
            for weight, grad in zip(weights, torch.autograd.grad(total, weights, allow_unused=True), strict=True):
                if grad is not None:
                    weight.grad = grad if weight.grad is None else weight.grad.add_(grad)
        return total.detach()

    def end(self) -> None:
        """End the task: the method measures it at the module's weights, and remembers it."""
        round_ = self._hosted.round
        if round_ is None:
            raise EvclError("no task has begun: call begin(data) before the task is trained")
        network, q = self._network(), self._live().snapshot()
        network.whole = round_.network.whole
        if network.layout != round_.network.layout:
            raise EvclError("the module's weights have other shapes than when the task began")
        if not bool(q.mean.isfinite().all()):
            raise EvclError("the module has a weight that is not finite: the loop diverged")
        if self.method.apart:
            check_examples_independent(network, round_.tasks[0].x[0], True)
        self._write(self._hosted.end(network, q))

    def cancel(self) -> None:
        """Forget the task that has begun."""
        self._hosted.cancel()

    # --- the module's weights --------------------------------------------------------------------------------------

    def plain(self) -> nn.Module:
        """A copy of the module with ordinary weights; those of a Bayesian method are the means."""
        plain = copied(self.module)
        if self.method.bayesian:
            for part in [part for part in plain.modules() if parametrize.is_parametrized(part)]:
                weights: Any = part.parametrizations
                means = {name: both.original for name, both in weights.items()}
                del part.parametrizations
                part.__class__ = type(part).__bases__[0]  # torch's own way back would also change the original's class
                for name, mean in means.items():
                    part.register_parameter(name, mean)
        return plain

    def _network(self) -> BayesianNetwork:
        """The module as it is now, in the form in which methods measure it."""
        device = next((p.device for p in self.module.parameters()), torch.device("cpu"))
        init_std: Any = self.settings.init_std if self.method.bayesian else None
        plain = self.plain()
        for part in plain.modules():
            if not type(part).__module__.startswith("torch.") and not part._parameters:
                nothing = nn.Parameter(torch.empty(0, device=device), requires_grad=False)
                part.register_parameter("_of_penalty", nothing)  # for code such as next(self.parameters()).device
        return bayesianize(plain, init_std=init_std, device=device, dtype=self._dtype, **self._chosen)

    def _live(self) -> Gaussian:
        """The module's weights as one Gaussian [1, P], of which autograd knows where it comes from."""
        pairs = [self._pair(name) for name in self._layout.shapes]

        def flat(parts: list[Tensor]) -> Tensor:
            return torch.cat([part.reshape(-1).to(self._dtype) for part in parts]).unsqueeze(0)

        stds = [log_std for _, log_std in pairs if log_std is not None]
        return Gaussian(flat([mean for mean, _ in pairs]), flat(stds) if stds else None, self._layout)

    def _pair(self, name: str) -> tuple[Tensor, Tensor | None]:
        """The parameters of a weight: its mean and, with a Bayesian method, its log standard deviation."""
        path, _, key = name.rpartition(".")
        owner = self.module.get_submodule(path)
        if parametrize.is_parametrized(owner, key):
            both: Any = owner.parametrizations[key]  # type: ignore[index]
            if isinstance(both[0], Drawn):
                return both.original, both[0].log_std
        return self.module.get_parameter(name), None

    def _draw_weights(self, network: BayesianNetwork) -> None:
        """Make the weights of the module Gaussian, in place."""
        for path, part in self.module.named_modules():
            if isinstance(part, (nn.RNNBase, nn.RNNCellBase)) or parametrize.is_parametrized(part):
                kind = type(part).__name__
                raise EvclError(f"{path!r} ({kind}) cannot have Gaussian weights in another loop: use ewc")
        log_std = network.posterior.log_std
        assert log_std is not None
        for name, one in network.layout.views(log_std).items():
            path, _, key = name.rpartition(".")
            mean = self.module.get_parameter(name)
            parametrize.register_parametrization(self.module.get_submodule(path), key, Drawn(one[0].clone().to(mean)))

    @torch.no_grad()
    def _write(self, q: Gaussian) -> None:
        """Give the module these weights: most methods return those that it has."""
        for name in self._layout.shapes:
            for parameter, flat in zip(self._pair(name), (q.mean, q.log_std), strict=True):
                if parameter is not None and flat is not None:
                    new = self._layout.view(flat, name)[0].to(parameter)
                    if not torch.equal(parameter, new):
                        parameter.copy_(new)

    # --- the method ------------------------------------------------------------------------------------------------

    def _fresh(self, network: BayesianNetwork) -> Fresh:
        """The first prior and posterior of the weights."""
        centre, width = network.centre, None
        if self.method.bayesian:
            width = log_stds(self.settings.prior_std, network.scales, network.layout, centre).expand_as(centre).clone()
        return Fresh(Gaussian(centre.clone(), width), network.posterior)

    def _take_layout(self, network: BayesianNetwork) -> None:
        """Extend the memory if the module has grown."""
        old, new = self._layout, network.layout
        if old == new:
            return
        if self.method.bayesian:
            raise EvclError(
                f"the module's weights have changed their shapes, and {self.method.name} cannot follow: "
                "give the module all its outputs at the start, or use ewc"
            )
        for name, shape in old.shapes.items():
            now = new.shapes.get(name, ())
            if now[1:] != shape[1:] or math.prod(now) < math.prod(shape):
                raise EvclError(f"{name!r} was {shape} and is now {now or 'gone'}: weights may only be added")
        self._hosted.grow(old, new, self._fresh(network))
        self._layout = new

    # --- examples --------------------------------------------------------------------------------------------------

    def _examples(self, data: object) -> tuple[Tensor, Tensor, int]:
        """Inputs, labels, and how many examples the task has."""
        data, total = self._sample(data)
        device = next((p.device for p in self.module.parameters()), torch.device("cpu"))
        reader = self._reader.forked(first=not self.tasks)
        with torch.random.fork_rng():
            x, targets = reader.examples(data, "begin", device)
        self._reader.call.form = reader.call.form
        y = labels(targets, len(x))
        if any(isinstance(one, str) for one in y):
            raise EvclError("the labels must be the numbers of the module's outputs, but these are text")
        return x, torch.tensor([int(one) for one in y], device=device), total or len(y)

    def _sample(self, data: Any) -> tuple[object, int]:
        """A random sample of a data set, and its size; other data as they are, and 0."""
        if not is_dataset(data):
            return data, 0
        total = len(data)
        wanted = max(MIN_EXAMPLES_READ, int(self.settings.get("fisher_examples", 0)))
        if total <= wanted:
            return data, total
        drawn = torch.randperm(total, generator=generator(self.seed, Purpose.SAMPLE, self.tasks))[:wanted]
        return Subset(data, drawn.sort().values.tolist()), total

    @staticmethod
    def _outputs(network: BayesianNetwork, x: Tensor, y: Tensor) -> int:
        try:
            with torch.no_grad(), network.alone():
                outputs: int = network(x[:1].clone()).shape[1]
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise EvclError(f"the module does not take inputs of shape {tuple(x.shape)}: {reason}") from error
        if int(y.min()) < 0 or int(y.max()) >= outputs:
            raise EvclError(
                f"the labels must be the numbers of the module's {outputs} outputs, from 0, but they are "
                f"{int(y.min())} to {int(y.max())}"
            )
        return outputs

    # --- files -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What the penalty remembers, as tensors, numbers and text, for `torch.save` or a checkpoint. The module's
        weights are not part of it. A task that has begun is not either: begin it again.
        """
        return {
            "method": self.method.name,
            "settings": dict(self.settings),
            "tasks": self.tasks,
            "layout": {name: list(shape) for name, shape in self._layout.shapes.items()},
            "outline": self._hosted.outline(),
            "memory": {name: t.detach().clone() for name, t in self._hosted.tensors().items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, in a penalty of the same method for a module of the same shapes."""
        wanted = {"method", "settings", "tasks", "layout", "outline", "memory"}
        if not isinstance(state, Mapping) or not wanted <= state.keys() or type(state["tasks"]) is not int:
            raise EvclError("the state is damaged, or not one that state_dict() of a Penalty returned")
        if state["method"] != self.method.name:
            raise EvclError(f"the state is that of {state['method']}, not of {self.method.name}")
        network = self._network()
        if Layout({name: tuple(shape) for name, shape in state["layout"].items()}) != network.layout:
            raise EvclError("the state is that of another module: the names or shapes of its weights differ")
        self._hosted.load(state["outline"], state["memory"], state["tasks"], self._fresh(network))
        self._layout = network.layout
        self.settings = self._hosted.settings = Settings({**self.settings, **state["settings"]})


def _counted(total: int, read: int) -> Reread | None:
    """Tells a method that the task has more examples than were read."""
    if total < read:
        raise EvclError(f"n is the number of the task's examples, and cannot be {total}: there are {read}")

    def no_more(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        raise AssertionError

    return None if total == read else Reread(total, no_more)
