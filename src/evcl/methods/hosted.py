"""A method in a training loop that is not the engine's.

    hosted = Hosted(method, settings, fresh, Host("a penalty", "use evcl.Learner"))
    fit = hosted.begin(round_)              # the loop adds the fit's terms to its own loss, and trains
    posterior = hosted.end(network, q)      # the method measures the task at the weights q, and remembers it

The method is the one that `Learner` uses: its `learn` yields the fit, and is sent the weights at which the loop ended.
No equation is written a second time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.settings import Settings
from evcl.methods import memories, packing
from evcl.methods.memories import Fresh
from evcl.methods.memory import Model, Nothing
from evcl.methods.method import Fit, Fitted, Learned, Learning, Method, Round
from evcl.methods.terms import Term
from evcl.nn import BayesianNetwork, Gaussian, Layout


class Host(NamedTuple):
    """What the loop is called in messages, what to use in its place, and whether it calls trackers at every step."""

    name: str
    advice: str
    trackers: bool = False

    def refusal(self, method: Method, reason: str) -> EvclError:
        return EvclError(f"{method.name} {reason}, which {self.name} cannot: {self.advice}")

    def check(self, method: Method, s: Settings) -> None:
        """Refuse a method that needs more than terms on the weights, as far as it says so itself."""
        reasons = {
            "learns all tasks at once": method.jointly,
            "predicts with other weights than it trains": method.predictor is not None,
            "changes the network": method.adapt is not None or method.trunk is not None,
            "trains no network": method.generative,
            "trains another network too": memories.has_models(method.memory),
            "needs several fits for a task": method.stages > 1,
            "has scales and shifts for each task": bool(s.get("film")),
            "adds a loss on the outputs": "distill.temperature" in method.known_settings and method.memory is Nothing,
            "trains on kept examples": memories.keeps_examples(method.memory),
        }
        self._raise(method, reasons)

    def check_fit(self, method: Method, fit: Fit, round_: Round) -> None:
        """Refuse a fit that is more than the task's own examples and terms."""
        reasons = {
            "adds a loss on the outputs": bool(fit.losses) or fit.project,
            "follows every step of the training": bool(fit.trackers)
            and (not self.trackers or any(one.perturbs for one in fit.trackers)),
            "trains on other examples than the task's": len(fit.data) != 1 or fit.data[0].x is not round_.tasks[0].x,
            "has its own update rule": fit.rule is not None,
            "changes weights itself": fit.start is not None or fit.moves is not None or fit.model is not None,
        }
        self._raise(method, reasons)

    def _raise(self, method: Method, reasons: Mapping[str, bool]) -> None:
        for reason, holds in reasons.items():
            if holds:
                raise self.refusal(method, reason)


class Hosted:
    """The rounds of a method, whose fits a host makes. `memory` is what it remembers of the `tasks` so far."""

    def __init__(self, method: Method, settings: Settings, fresh: Fresh, host: Host) -> None:
        host.check(method, settings)
        self.method, self.settings, self.host = method, settings, host
        self.memory = self._initial(fresh)
        self.tasks = 0
        self.round: Round | None = None  # in progress
        self.terms: Sequence[Term] = ()  # of its fit
        self._learning: Learning | None = None

    def begin(self, round_: Round) -> Fit:
        """The fit of a round."""
        learning = self.method.learn(self.memory, round_, self.settings)
        try:
            fit = next(learning)
        except StopIteration:
            raise self.host.refusal(self.method, "trains no network") from None
        self.host.check_fit(self.method, fit, round_)
        self._learning, self.round, self.terms = learning, round_, fit.terms
        return fit

    def end(self, network: BayesianNetwork, q: Gaussian, tracked: Sequence[Tensor | None] = ()) -> Gaussian:
        """End the round at the weights `q` of the whole network, and return those that the method leaves."""
        assert self._learning is not None
        try:
            used = q.mean.new_ones(network.layout.size)
            self._learning.send(Fitted(network, q, q, network.layout, used, tracked))
        except StopIteration as ended:
            learned: Learned = ended.value
        else:
            raise self.host.refusal(self.method, "needs several fits for a task")
        self.memory, self.tasks = learned.memory, self.tasks + 1
        self.cancel()
        return learned.posterior

    def cancel(self) -> None:
        """Forget the round in progress."""
        self._learning = self.round = None
        self.terms = ()

    def grow(self, old: Layout, new: Layout, fresh: Fresh) -> None:
        """Extend the memory to a layout with more weights."""
        self.memory = memories.relaid(self.memory, old.extending(new), fresh, lambda model: model)

    # --- files -------------------------------------------------------------------------------------------------------

    def outline(self) -> object:
        """The structure of the memory, as JSON."""
        return packing.outline(self.memory)

    def tensors(self) -> dict[str, Tensor]:
        """The memory's tensors, by name."""
        return packing.tensors(self.memory)

    def load(self, outline: object, tensors: Mapping[str, Tensor], tasks: int, fresh: Fresh) -> None:
        """Restore a memory after so many tasks. The contents of files are checked."""
        like = fresh.posterior.mean
        fits = packing.Fits(like, self.method.bayesian, lambda head: 1 << 62, tasks)
        given = {name: tensor.to(like.device) for name, tensor in tensors.items()}
        self.memory, self.tasks = packing.from_tensors(self._initial(fresh), outline, given, fits), tasks
        self.cancel()

    def _initial(self, fresh: Fresh) -> Any:
        def no_network(field: str, make: object) -> Model:
            raise self.host.refusal(self.method, f"trains another network too ({field})")

        return memories.initial(self.method.memory, fresh, no_network)
