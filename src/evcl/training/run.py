"""A run: replicas that learn a stream of tasks, one round at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count

from evcl._core.errors import EvclError
from evcl._core.randomness import Noise
from evcl._core.settings import Settings
from evcl.methods import Fit, Fitted, Learned, Round, TaskData, packing
from evcl.methods.together import fitted_of, merged, round_of
from evcl.nn.chain import find_chain
from evcl.training.early import Validation
from evcl.training.fit import Fitting
from evcl.training.graphed import capturing
from evcl.training.observer import Observer
from evcl.training.predict import Predicting


class Run(Predicting):
    """Replicas that learn. A round either succeeds or leaves the run unchanged."""

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
        state = self.state()
        self.add_film(max(task.task for task in tasks) + 1)
        self.grow_trunk(self.rounds + 1)
        self.network.weights.task = tasks[0].task
        network, seen = self.network, self.seen
        round_ = Round(
            self.rounds, list(tasks), network, network.posterior, seen, self.seeds, self.likelihood, self.ranks
        )
        fitting = Fitting(self, round_, epochs, watching, validation, noise, reference)
        try:
            with self.precise(), self._measuring(), network.keeping():
                if find_chain(network, tasks[0].x) is None:
                    self.check_independent(network, tasks[0].x)  # before a method uses the network
                learned = self._drive(round_, fitting, epochs)
                self._take(learned, len(seen) + len(tasks))
                if self.likelihood.beside:
                    for task in tasks:
                        network.number_head(task.head).count(task.n)
            self.rounds, self.seen = self.rounds + 1, (*seen, *(task.head for task in tasks))
        except BaseException:
            self.restore(state)
            raise

    def _drive(self, round_: Round, fitting: Fitting, epochs: int | None) -> list[Learned]:
        """Run the methods' generators in step: each yields a fit, and receives its result."""
        alone = len(self.groups) == 1
        asked = []
        for group, memory in zip(self.groups, self.memories, strict=True):
            s = group.settings if epochs is None else Settings({**group.settings, "epochs": epochs})
            asked.append(group.method.learn(memory, round_ if alone else round_of(round_, group.replicas), s))
        answers: list[Fitted | None] = [None] * len(asked)
        for stage in count():
            fits: list[Fit] = []
            ended: list[Learned] = []
            with capturing if self.network.posterior.mean.is_cuda else nullcontext():
                for one, answer, group in zip(asked, answers, self.groups, strict=True):
                    try:
                        with nullcontext() if alone else self.network.only(group.replicas):
                            fits.append(one.send(answer))  # type: ignore[arg-type]
                    except StopIteration as end:
                        ended.append(end.value)
            if ended and not fits:
                return ended
            if ended:
                names = " and ".join(dict.fromkeys(group.method.name for group in self.groups))
                raise EvclError(f"{names} cannot share a program: their rounds have different numbers of fits")
            fitted = fitting(fits[0] if alone else merged(fits, self.groups, round_), stage)
            answers, first = [], 0
            for fit, group in zip(fits, self.groups, strict=True):
                last = first + len(fit.trackers)
                answers.append(fitted if alone else fitted_of(fitted, fit, group.replicas, fitted.tracked[first:last]))
                first = last
        raise AssertionError

    def _take(self, learned: Sequence[Learned], tasks: int) -> None:
        """Make the methods' results the run's state; `tasks` is the number of tasks learned by then."""
        for one, before, group in zip(learned, self.memories, self.groups, strict=True):
            packing.check_learned(one.memory, before, self._fits(group, tasks))
        found = [one.posterior for one in learned]
        self.network.posterior = found[0] if len(found) == 1 else self._joined(found)
        self.memories = tuple(one.memory for one in learned)
        self._changed()

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        """Restore the layers' statistics if the body of this context fails."""
        before = self.network.statistics()
        try:
            yield
        except BaseException:
            self.network.set_statistics(before)
            raise
