"""A run: replicas that learn a stream of tasks, one round at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count

from evcl._core.randomness import Noise
from evcl._core.settings import Settings
from evcl.methods import Fitted, Learned, Round, TaskData, packing
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
        self.add_task_weights(max(task.task for task in tasks) + 1)
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

    def _drive(self, round_: Round, fitting: Fitting, epochs: int | None) -> Learned:
        """Run the method's generator: it yields fits, and receives their results."""
        s = self.settings if epochs is None else Settings({**self.settings, "epochs": epochs})
        asked = self.method.learn(self.memory, round_, s)
        answer: Fitted | None = None
        for stage in count():
            try:
                with capturing if self.network.posterior.mean.is_cuda else nullcontext():
                    fit = asked.send(answer)  # type: ignore[arg-type]
            except StopIteration as end:
                learned: Learned = end.value
                return learned
            answer = fitting(fit, stage)
        raise AssertionError

    def _take(self, learned: Learned, tasks: int) -> None:
        """Make the method's result the run's state; `tasks` is the number of tasks learned by then."""
        packing.check_learned(learned.memory, self.memory, self._fits(tasks))
        self.network.posterior, self.memory = learned.posterior, learned.memory
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
