"""One call of `Learner.learn`: its tasks are read, learned in one round, and recorded."""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from evcl._core.bounds import LONGEST_TASK, MOST_HEADS
from evcl._core.density import Density, density, room
from evcl._core.devices import double
from evcl._core.errors import EvclError, ForgettingWarning
from evcl._core.forms import widened
from evcl._core.inputs import Label
from evcl._core.randomness import Purpose, generator
from evcl._core.settings import Setting
from evcl._core.tasks import Task
from evcl.callbacks import Callback, Epoch
from evcl.learner import resumable
from evcl.learner.persist import record
from evcl.learner.reading import INFER
from evcl.learner.rereading import Rereading
from evcl.learner.rows import HeldOut, among, check_order, hold_out, requested, weighted, with_weights
from evcl.methods.memories import with_examples
from evcl.targets.scale import far_outside, limited
from evcl.training import Given, History, TaskData, Validation

if TYPE_CHECKING:
    from evcl.learner.learner import Learner
    from evcl.learner.state import State

MAX_MEAN_DEVIATIONS = 30.0  # in deviations, the mean of a column that networks still learn from
MIN_INPUT_SIZE = 0.01  # the smallest size of inputs that networks learn from at the usual rates
SCALE_ROWS = 10_000  # rows that tell the scale of inputs
ENTROPY_ROWS = 1000  # at most this many rows of a task are predicted to measure its typical entropy
NEW = "new"  # the value of `head` that gives a task its own head
WINDOW = Setting(1000, "examples of a task that are held at a time", low=1, high=1_000_000_000)
MIN_TRIAL_ROWS, MAX_ROWS_ALL_TRIED, MAX_TRIAL_ROWS, FOLDS = 10, 500, 5000, 5  # rows of a first task: see `_trials`


def copied(learner: Learner, state: State) -> Learner:
    """A copy with this state that learns on its own, for trials."""
    trial = copy.copy(learner)
    trial.state = replace(state, trial=True)
    return trial


Past = Mapping[str, tuple[Epoch, ...]]  # for each task, its epochs
Become = Callable[["State", Past], None]  # lets a learner be this from now on, with the epochs of new tasks


class Options(NamedTuple):
    """The options of `Learner.learn`."""

    epochs: int | None
    callbacks: Iterable[Callback]
    validation: object = None
    patience: int | None = None
    class_weight: object = None
    sample_weight: object = None
    checkpoint: str | os.PathLike[str] | None = None
    reread: bool | int = False

    def check(self) -> None:
        """Raise if these options cannot be used together."""
        if not self.reread:
            return
        if isinstance(self.validation, (int, float, str)):
            raise EvclError("with reread, a fraction cannot be held out: pass validation data of their own")
        if self.class_weight is not None:
            raise EvclError("reread cannot be used with class_weight: let the loader's sampler balance the classes")
        if self.sample_weight is not None:
            raise EvclError("reread cannot be used with sample_weight: let the loader's sampler draw by weight")


class Learning:
    """One call of `learn` or `learn_jointly`: first `read` each task, then `learn` them."""

    def __init__(self, learner: Learner, options: Options, become: Become, label: str | None = None) -> None:
        """`become` lets the learner be what it has learned. `label` names the column of labels."""
        options.check()
        self.learner, self.options, self.become = learner, options, become
        self.state = learner.state.forked(label)  # what the learner becomes when the round is learned
        self.run, self.session = self.state.run, self.state.session
        self.rereading: Rereading | None = None  # the loader of the task

    # --- the tasks -------------------------------------------------------------------------------------------------

    def read(
        self, data: Any, task: str | None, head: str | int, taken: Iterable[str], known: Sequence[Label] = ()
    ) -> Given:
        """A task, with its name and head. `taken`: the names of other tasks; `known`: classes that the head should
        know.
        """
        learner = self.learner
        likelihood = self.run.likelihood
        classes, energy = likelihood.softmax, not likelihood.heads
        if energy and (self.options.validation is not None or self.options.sample_weight is not None):
            raise EvclError("validation and sample_weight are for targets: leave them out for a model without labels")
        if not classes and (known or self.options.class_weight is not None or self.options.reread):
            what = "classes" if known else "class_weight" if self.options.class_weight is not None else "reread"
            raise EvclError(f"{what} is for targets that are classes, not for {likelihood.name} targets")
        if isinstance(data, Task):
            task = data.name if task is None else task
            known = known or ([c if isinstance(c, str) else int(c) for c in data.classes] if classes else [])
        name = str(len(learner.tasks)) if task is None else task
        if not isinstance(name, str) or not name or name in (NEW, INFER):
            raise EvclError(f"a task's name must be text other than {NEW!r} and {INFER!r}, not {name!r}")
        if len(name) > LONGEST_TASK:
            raise EvclError(f"the name of a task may have at most {LONGEST_TASK} characters, not {len(name):,}")
        if name in taken:
            raise EvclError(f"{name!r} is already learned: choose another name, with head={name!r} to share its head")
        head = self._head(data, name, head)
        counts = None
        if reread := self.options.reread:
            window = None if reread is True else int(WINDOW.check("reread", reread))
            about = (self.state.reader, data, learner.seed, self.run.rounds, learner.settings.batch_size, window)
            self.rereading = rereading = Rereading(*about)
            x, y, counts = (
                self.state.tested(rereading.x.to(self.run.network.posterior.mean.device)),
                rereading.y,
                rereading.counts,
            )
            known = [*known, *(label for label in sorted(counts) if label not in known)]
        else:
            if self.options.sample_weight is not None:
                check_order(data)
            x, y = self.state.examples(data, "learn")
        each = y.unsqueeze(0) if isinstance(y, Tensor) else [y]
        if isinstance(each, Tensor) and not classes and not energy:
            each = self._limited(each)
        given = Given(name, head, known, x.unsqueeze(0), each, counts, reread=counts is not None)
        weights = self.options.sample_weight
        return given if weights is None else with_weights(given, weights)

    def _limited(self, y: Tensor) -> Tensor:
        """The targets y [1, N, D], with a warning if some are far outside the others: see `limited`."""
        rows = far_outside(y[0]).any(1).nonzero().flatten().tolist()
        if not rows:
            return y
        value = y[0, rows[0]][far_outside(y[0])[rows[0]]][0]
        warnings.warn(
            f"targets far outside the others are learned as the largest or smallest of these: {len(rows)}, the first "
            f"in row {rows[0]}, {value:g}",
            stacklevel=4,
        )
        return limited(y[0]).unsqueeze(0)

    def _head(self, data: Any, name: str, head: str | int | None) -> str:
        """The name of the head that a task uses: an earlier one, or a new one."""
        heads = self.session.heads
        if head is None:
            raise EvclError("head must be 'new', or the name or number of a task whose head to use, not None")
        if head != NEW:
            chosen = self.state.head(head)
        elif isinstance(data, Task):
            chosen = data.head
        elif name in heads:
            raise EvclError(f"a head is already called {name!r}: choose another name for the task")
        else:
            chosen = name
        if chosen not in heads and len(heads) >= MOST_HEADS:
            raise EvclError(f"there are {MOST_HEADS:,} heads, which is the maximum: share one of them, head=NAME")
        return chosen

    # --- learning --------------------------------------------------------------------------------------------------

    def learn(self, given: list[Given]) -> list[str]:
        """Learn these tasks in one round, and return their names. If it fails, the learner is left unchanged."""
        learner, options, run, session = self.learner, self.options, self.run, self.session
        names = [task.name for task in given]
        epochs = learner.settings.epochs
        if options.epochs is not None:
            epochs = int(learner.method.known_settings["epochs"].check("epochs", options.epochs))
        report = History(" + ".join(names), options.callbacks)
        held = requested(options.validation, options.patience, lambda data: self.state.examples(data, "validation"))
        errors, known = self._new_errors(given) if run.likelihood.beside else {}, set(session.heads)
        validation: Validation | None = None
        measured: TaskData | None = None

        def ended() -> None:
            learned = self._recorded(given, epochs, measured, isinstance(held, float))
            self.become(learned, dict.fromkeys(names, tuple(report.epochs)))
            report.end()

        with session.round(given, ended) as tasks:
            if errors:
                session.add_errors(errors, known)
            if warning := learner.forgetting(given[0].name, [repr(label) for label in session.lacking]):
                warnings.warn(warning, ForgettingWarning, stacklevel=3)
            form = self.state.reader.call.form
            if form is not None and form.step:
                tasks, held = self._of_one_length(tasks, held)
            classes = session.group_of(given[0], tasks[0])
            if self.rereading is not None:
                tasks = self._reread(self.rereading, tasks, classes)
            classified = run.likelihood.softmax
            if options.validation is not None and (len(classes) > 1 or not classified):  # one class trains nothing
                drawn = generator(learner.seed, Purpose.VALIDATION, run.rounds)
                if not isinstance(held, float) and not classified:
                    held = held[0], session.scales[given[0].head].standardised(held[1])
                elif not isinstance(held, float):  # those of the classes that are learned together
                    held = among(held, classes, session.heads[given[0].head])
                tasks[0], measured = hold_out(tasks[0], held, classes, drawn)
                validation = Validation(self._weighted(measured, given[0], classes), options.patience)
            if options.class_weight is not None or given[0].weights is not None:
                tasks = [self._weighted(part, given[0], session.group_of(given[0], part)) for part in tasks]
            if not run.rounds:
                self._check_scale(tasks[0].x[0])
            report.begin(epochs * run.method.stages)
            self._fit(tasks, epochs, names, report, validation)
            run.keep_account(tasks)
            session.density = self._density(tasks)
        if options.checkpoint is not None:
            resumable.remove(run, Path(options.checkpoint))
        return names

    def _new_errors(self, given: Sequence[Given]) -> dict[str, Tensor]:
        """For heads of numbers or counts, the errors [n, D] on rows that were not learned from: those of the task if
        its head was used before, else those of parts of the task that copies of the learner learn without.
        """
        errors: dict[str, Tensor] = {}
        for task in given:
            assert isinstance(task.y, Tensor)
            known = self.session.heads.get(task.head)
            if known is None and not self.state.trial and len(given) == 1:
                errors |= self._trials(task)
            elif known is not None and task.y.shape[2] == len(known):
                errors[task.head] = self.state.new_errors(task.x[0], task.y[0], _weights(task), task.head)
        return errors

    def _trials(self, task: Given) -> dict[str, Tensor]:
        """The errors on parts of a first task, each predicted by a copy of the learner that learns the other rows."""
        n, errors = task.x.shape[1], []
        if not MIN_TRIAL_ROWS <= n <= MAX_TRIAL_ROWS or self.options.validation is not None:
            return {}
        order = torch.randperm(n, generator=generator(self.learner.seed, Purpose.TRIAL, self.run.rounds))
        folds = order.chunk(FOLDS)
        for fold in folds if n <= MAX_ROWS_ALL_TRIED else folds[:1]:
            rest = order[~torch.isin(order, fold)].sort().values
            other = copied(self.learner, self.state.forked())
            weights = None if task.weights is None else task.weights[:, rest]
            part = task._replace(x=task.x[:, rest.to(task.x.device)], y=task.y[:, rest], weights=weights)  # type: ignore[call-overload]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the task itself warns
                with_part = Learning(other, Options(self.options.epochs, ()), lambda learned, history: None)
                with_part.learn([part])
            rows, counted = fold.to(task.x.device), _weights(task)
            counted = None if counted is None else counted[fold]
            errors.append(with_part.state.new_errors(task.x[0, rows], task.y[0, fold], counted, task.head))  # type: ignore[call-overload]
        return {task.head: torch.cat(errors)}

    def _fit(
        self, tasks: list[TaskData], epochs: int, names: list[str], report: History, validation: Validation | None
    ) -> None:
        learner, options = self.learner, self.options
        run, known = self.run, None if self.state.trial else self.run.account
        run.resolved, run.account = [{}], None if known is None else replace(known, counts={}, elbo={})
        if options.checkpoint is None:
            self.run.learn(tasks, epochs, report, validation)
            return
        about = {"method": learner.method.name, "seed": learner.seed, **learner.settings}
        about |= {"tasks": names, "epochs": epochs, "patience": options.patience}
        resumable.learn(self.run, Path(options.checkpoint), about, tasks, report, validation)

    def _recorded(self, given: Sequence[Given], epochs: int, data: TaskData | None, part: bool) -> State:
        """What the learner becomes, with records of these tasks for the card. `data`: the validation part, if there is
        one; `part`: whether it was held out of the task's own rows.
        """
        records = [record(task, epochs, self.run, list(self.session.tasks), len(given)) for task in given]
        if data is not None:
            x, y = self.session.rows([data])
            records[0]["examples"] -= len(x) if part else 0  # these were not trained on
            records[0]["validation"] = {"examples": len(x), **self.state.measured(x, y, given[0].name)._asdict()}
        learned = replace(self.state, records=(*self.state.records, *records), shape=tuple(given[-1].x.shape[2:]))
        if learned.adapters is not None and learned.adapters.tasks == "merged":
            from evcl.training.adapters import merge

            merge(self.run, learned.adapters)
        return learned

    # --- the data of a round ---------------------------------------------------------------------------------------

    @staticmethod
    def _reread(found: Rereading, tasks: list[TaskData], classes: Sequence[Label]) -> list[TaskData]:
        """The task with the loader that its examples are read from in each epoch."""
        if len(tasks) > 1 or not set(found.counts) <= set(classes):
            raise EvclError("with reread, all examples must be of classes that are learned in one softmax")
        return [replace(tasks[0], reread=found.task(classes, tasks[0].x.shape[-1]))]

    def _of_one_length(self, tasks: list[TaskData], held: HeldOut) -> tuple[list[TaskData], HeldOut]:
        """The tasks and validation data with their sequences padded to one length, and the kept examples too."""
        every = [task.x for task in (*tasks, *self.run.kept_examples())]
        columns = max(x.shape[-1] for x in every + ([] if isinstance(held, float) else [held[0]]))
        kept = self.run.memory
        self.run.memory = with_examples(kept, lambda task: replace(task, x=widened(task.x, columns)))
        if not isinstance(held, float):
            held = widened(held[0], columns), held[1]
        return [replace(task, x=widened(task.x, columns)) for task in tasks], held

    def _weighted(self, data: TaskData, task: Given, classes: Sequence[Label]) -> TaskData:
        """A part of a task's data with the weights of its examples and the option `class_weight`, for those of the
        head's classes that are learned together.
        """
        given = self.options.class_weight
        if isinstance(given, Mapping):
            others = set(self.session.heads[task.head]) - set(classes)
            given = {label: weight for label, weight in given.items() if label not in others}
        return weighted(data, given, classes)

    def _check_scale(self, x: Tensor) -> None:
        """Warn of inputs that are far from 0 or very small, unless the network begins with a norm or takes tokens."""
        first = next((module for module in self.state.plain.modules() if not list(module.children())), None)
        if isinstance(first, (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d)):
            return
        form = self.state.reader.call.form
        args, named = ([x], {}) if form is None else form.unpack(x)
        for one in (*args, *named.values()):
            if one.is_floating_point():
                _warn_of_scale(one.reshape(len(one), -1))

    def _density(self, tasks: Sequence[TaskData]) -> Density | None:
        """The density of all rows learned from, including these. None if the density of earlier rows is unknown, or if
        these rows have none: tokens, whose numbers are only names, and inputs whose shape differs from earlier ones.
        """
        known, network = self.session.density, self.run.network
        if (known is None and self.session.tasks) or not self.run.likelihood.heads:
            return None
        weights = sum(math.prod(network.layout.shapes[name]) for name in network.trunk_names)
        named = any(isinstance(module, (nn.Embedding, nn.EmbeddingBag)) for module in self.state.plain.modules())
        form = self.state.reader.call.form
        if named and form is not None and any(one.kind != "float" for one in form.inputs):
            return None
        for task in tasks:
            x = task.x[0]
            columns = x[0].numel()
            if (known is not None and len(known.mean) != columns) or (named and bool((x == x.round()).all())):
                return None
            step = math.ceil(len(x) / ENTROPY_ROWS)
            some = task.x if step == 1 else task.x[:, ::step]  # what is known of all rows of a frozen trunk is reused
            p = self.run.predict(some, task.head, task=task.task)[0]
            name = next(name for name, some in self.session.groups.items() if task.head in {one.number for one in some})
            doubt = self.run.likelihood.doubt(p, self.session.scales.get(name), self.state.draws)
            one = density(x, doubt, room(columns, weights))
            known = one if known is None else known.merged(one, room(columns, weights))
        return known


def _weights(task: Given) -> Tensor | None:
    """[N]: the weights of a task's examples, scaled to a mean of 1."""
    return None if task.weights is None else task.weights[0] / task.weights[0].mean()


def _warn_of_scale(x: Tensor) -> None:
    """Warn if a network can hardly learn from inputs [N, ...] on this scale. Of many rows, some are looked at."""
    flat = double(x[:: -(-len(x) // SCALE_ROWS)].flatten(1))
    mean, std = flat.mean(0), flat.std(0, correction=0)
    shifted = (mean.abs() > MAX_MEAN_DEVIATIONS * std) & (std > 1e-6 * mean.abs())
    if bool(shifted.any()):
        column = int((mean.abs() / std).where(shifted, 0).argmax())
        fault = f"column {column} is {float(mean[column]):.4g} on average with a deviation of {float(std[column]):.2g}"
    elif 0 < float(flat.square().mean().sqrt()) < MIN_INPUT_SIZE:
        fault = f"their mean size is {float(flat.square().mean().sqrt()):.2g}"
    else:
        return
    warnings.warn(
        f"the inputs are not scaled ({fault}), so the network may not learn: scale each column to mean 0 and "
        "deviation 1, or all to the range 0 to 1",
        stacklevel=4,
    )
