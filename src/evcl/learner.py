"""The object a user holds: learn, predict, save, load."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from evcl import metrics
from evcl.benchmarks import Benchmark, Examples, Task
from evcl.benchmarks.benchmark import stratified
from evcl.callbacks import Callback, Epoch
from evcl.density import Density, density, room
from evcl.errors import BadExample, Diverged, EvclError, unknown
from evcl.files import parsed, save_tensors
from evcl.inputs import Label, class_weights, inputs, labels, pair, positions
from evcl.interrupts import deferred
from evcl.methods import Method
from evcl.methods import get as get_method
from evcl.nn import MLP, Layout, Names, head_names
from evcl.randomness import generator
from evcl.ranks import Ranks
from evcl.saved import FORMAT, upgraded
from evcl.settings import SEED, VALIDATION, Setting, resolve
from evcl.training import Checkpointer, Checkpoints, Given, History, Observers, Run, Session, TaskData, Validation
from evcl.training.checkpointer import AnotherOwner

DENSITY = "density."  # in a file, the prefix of what it says of the rows learned from
DOUBTED = 1000  # rows of a task whose predictions are looked at when it is learned
KEPT = "kept."  # in it, the prefix of what the trunk has beside the posterior: frozen layers, buffers
NEW = "new"  # as a head: one of its own
INFER = "infer"  # as a task: the one whose head is least uncertain of an example
MOST_HEADS = 10_000  # of a file
PATIENCE = Setting(10, "epochs without a smaller NLL on the validation part", low=1, high=1_000_000)


class Predictions(NamedTuple):
    """What is predicted of N inputs, and how surely; entropies in nats, and entropy = aleatoric + epistemic.

    Attributes:
        labels: [N], the most probable label
        probabilities: [N, classes], averaged over draws of the posterior
        entropy: [N], of these probabilities
        aleatoric: [N], the mean entropy of what each draw predicts: doubt that more data of this kind would not settle
        epistemic: [N], the rest, the mutual information of label and weights: how far the draws disagree
        tasks: [N], the first task of the head that predicted: of interest with task="infer"
        unfamiliar: [N], how far the input lies from all that was learned from: a typical one of those has about 1,
            whatever their number of columns. None where that is not known: for a model that an earlier release saved,
            and for inputs that are tokens or of several shapes
    """

    labels: Any
    probabilities: Any
    entropy: Any
    aleatoric: Any
    epistemic: Any
    tasks: Any
    unfamiliar: Any = None


class Measures(NamedTuple):
    """How good predictions are.

    Attributes:
        accuracy: the fraction that is right
        nll: the mean negative log-likelihood, in nats
        ece: the expected calibration error
    """

    accuracy: float
    nll: float
    ece: float


class _Options(NamedTuple):
    """How a task is learned: see `Learner.learn`."""

    epochs: int | None
    callbacks: Iterable[Callback]
    validation: Any = None
    patience: int | None = None
    class_weight: Any = None
    checkpoint: str | os.PathLike[str] | None = None


class Learner:
    """A network that learns one task after another by one of the methods.

    The network is the trunk: it turns a batch into [batch, features], and a head is added on that for each task. Its
    weights are where the posterior starts, except for `evcl.nn.mlp`, which is drawn from `seed`; `init="draw"` and
    `init="network"` choose. Everything random derives from `seed`: torch's global generator is never touched.
    `only` and `skip` name the layers that learn and those that stay as they are (see `evcl.nn.bayesianize`);
    `prior="network"` centres the first prior on a pretrained network's weights, and not on 0.

    It needs no data of earlier tasks, and keeps none. `coreset="random"` or `"kcenter"` keeps `coreset_size` examples
    of each task, in the saved file too, and tunes what predicts on them after each task.

    Attributes:
        method: the method it learns by
        settings: all settings of the method, with their values
        seed: what everything random derives from
        history: for each task learned, its `Epoch`s; not saved with the learner
    """

    def __init__(
        self,
        network: nn.Module,
        method: str | Method = "evcl",
        *,
        seed: int = 0,
        init: Literal["auto", "draw", "network"] = "auto",
        unsupported: Literal["error", "deterministic"] = "error",
        only: Names = None,
        skip: Names = None,
        prior: Literal["zero", "network"] = "zero",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        **settings: Any,
    ) -> None:
        self.method = get_method(method)
        self.settings = resolve(self.method.name, self.method.known_settings, settings)
        self.seed = int(SEED.check("seed", seed))
        if init not in ("auto", "draw", "network"):
            raise EvclError(f"init must be 'auto', 'draw' or 'network', not {init!r}")
        if dtype not in (torch.float32, torch.float64):
            raise EvclError(f"dtype must be torch.float32 or torch.float64, not {dtype}")
        if prior not in ("zero", "network"):
            raise EvclError(f"prior must be 'zero' or 'network', not {prior!r}")
        self._unsupported, self._only, self._skip = unsupported, only, skip
        self._run = Run(
            network,
            self.method,
            [self.settings],
            [self.seed],
            draw=isinstance(network, MLP) if init == "auto" else init == "draw",
            device=_device(device),
            dtype=dtype,
            unsupported=unsupported,
            only=only,
            skip=skip,
            prior=prior,
        )
        self._plain = copy.deepcopy(network)
        self._session = Session(self._run)
        self._busy = False
        self.history: dict[str, tuple[Epoch, ...]] = {}

    # --- what it knows ---------------------------------------------------------------------------------------------

    @property
    def _heads(self) -> dict[str, list[Label]]:
        """Head -> its classes, in the order of its outputs."""
        return self._session.heads

    @property
    def _tasks(self) -> dict[str, str]:
        """Task -> its head."""
        return self._session.tasks

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of the tasks learned, in their order."""
        return tuple(self._tasks)

    @property
    def heads(self) -> tuple[str, ...]:
        """The names of the heads, in their order: each is that of the task it was made for."""
        return tuple(self._heads)

    def classes(self, task: str | int | None = None) -> tuple[Label, ...]:
        """The labels a task's head knows: the columns of `predict_proba`. With task="infer", those of all heads."""
        if task != INFER or not self._tasks:
            return tuple(self._heads[self._head(task)])
        found = tuple(dict.fromkeys(label for classes in self._heads.values() for label in classes))
        if len({type(label) for label in found}) != 1:
            raise EvclError("to infer the task, the labels of all heads must be of one kind: all text, or all numbers")
        return found

    @property
    def knows_unfamiliar(self) -> bool:
        """Whether predictions can say how unfamiliar an input is (see `Predictions`)."""
        return self._session.density is not None

    def __repr__(self) -> str:
        learned = f"{len(self._tasks)} task{'' if len(self._tasks) == 1 else 's'} learned"
        return f"{type(self).__name__}({self.method.name!r}, seed={self.seed}, {learned})"

    # --- learning --------------------------------------------------------------------------------------------------

    def learn(
        self,
        data: Any,
        y: Any = None,
        head: str | int = "new",
        epochs: int | None = None,
        *,
        task: str | None = None,
        classes: Iterable[Label] | None = None,
        callbacks: Iterable[Callback] = (),
        validation: Any = None,
        patience: int | None = None,
        class_weight: Literal["balanced"] | Mapping[Any, float] | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> str:
        """Learn one more task, and return its name (by default its number, as text).

        `data` is a pair of inputs [N, ...] and labels [N], integers or strings, which may also be given one after the
        other: learn(x, y); a torch Dataset of (x, y), or an iterable of batches (x, y), read once into memory; or a
        benchmark's task, which brings its own name and head. `task` is the name, which may also stand in the place of
        `y`: learn((x, y), "january"). `head` names an earlier task to share that task's head, which grows if new labels
        come. `classes` are labels that the head should know even if none of the data has them. If anything fails, or is
        interrupted, the learner is as it was before.

        `callbacks` look on and may stop the task (see `evcl.Callback`); `history` has what they are told.
        `validation` is a part to hold out, stratified (0.1), or data of its own: not learned from, and predicted after
        each epoch. With `patience` the task ends after that many epochs without a smaller NLL on it, and with the
        weights of the best epoch. `class_weight` is "balanced", or a weight for some labels, 1 for the others: how much
        an example counts, in the NLL and in the Fisher. Only their ratios matter: they are scaled to 1 on average.

        `checkpoint` is a folder in which the task saves itself every minute and when it is interrupted. The same call,
        in another process too, resumes it there, to the same weights; `history` then has the epochs since. The folder
        is removed when the task is learned.
        """
        if self.method.jointly:
            raise EvclError(f"{self.method.name} trains on all tasks at once: use learn_jointly(tasks)")
        self._check_idle()
        if hasattr(y, "__len__") and not isinstance(y, str):  # learn(x, y), as people type it
            data = (data, y)
        elif y is not None:
            if task is not None:
                raise EvclError(f"the task has two names, {y!r} and {task!r}: labels go beside the inputs, learn(x, y)")
            task = y
        wanted = [] if classes is None else list(classes)
        known = labels(wanted, len(wanted)) if wanted else []
        options = _Options(epochs, callbacks, validation, patience, class_weight, checkpoint)
        return self._learn([self._read(data, task, head, self._tasks, known)], options)[0]

    def learn_jointly(
        self, tasks: Iterable[Task], epochs: int | None = None, *, callbacks: Iterable[Callback] = ()
    ) -> list[str]:
        """Learn several tasks as one, each through its own head, and return their names."""
        self._check_idle()
        tasks = _tasks(tasks, "learn_jointly")
        if not tasks:
            raise EvclError("there is no task to learn")
        names = [task.name for task in tasks]
        given = [self._read(task, None, "new", [*self._tasks, *names[:k]]) for k, task in enumerate(tasks)]
        return self._learn(given, _Options(epochs, callbacks))

    def _check_idle(self) -> None:
        if self._busy:
            raise EvclError("a task is being learned: the learner can be used when that has ended, or in end_task")

    def _read(
        self,
        data: Any,
        task: str | None,
        head: str | int,
        taken: Iterable[str],
        known: Sequence[Label] = (),
    ) -> Given:
        if isinstance(data, Task):
            task = data.name if task is None else task
            known = known or [c if isinstance(c, str) else int(c) for c in data.classes]
        name = str(len(self._tasks)) if task is None else task
        if not isinstance(name, str) or not name or name in (NEW, INFER):
            raise EvclError(f"a task's name is some text other than {NEW!r} and {INFER!r}, not {name!r}")
        if name in taken:
            raise EvclError(f"{name!r} is learned already: choose another name, with head={name!r} to share its head")
        if head != "new":
            head = self._head(head)
        elif isinstance(data, Task):
            head = data.head
        elif name in self._heads:
            raise EvclError(f"a head is called {name!r} already: choose another name for the task")
        else:
            head = name
        if head not in self._heads and len(self._heads) >= MOST_HEADS:
            raise EvclError(f"there are {MOST_HEADS:,} heads, the most there may be: share one of them, head=NAME")
        x, y = self._examples(data, "learn")
        return Given(name, head, known, x.unsqueeze(0), [y])

    def _examples(self, data: Any, verb: str) -> tuple[Tensor, list[Label]]:
        if isinstance(data, (Task, Examples)):
            data = tuple(data.train if isinstance(data, Task) else data)
        x, y = pair(data, self._run.network.posterior.mean.dtype, verb)
        x = self._inputs(x)
        return x, labels(y, len(x))

    def _learn(self, given: list[Given], options: _Options) -> list[str]:
        names, run = [task.name for task in given], self._run
        epochs = self.settings.epochs
        if options.epochs is not None:
            epochs = int(self.method.known_settings["epochs"].check("epochs", options.epochs))
        report = History(" + ".join(names), options.callbacks)
        held = self._held_out(options)
        before, self._busy = self.history, True

        def ended() -> None:
            self._busy = False
            self.history = {**self.history, **dict.fromkeys(names, tuple(report.epochs))}
            report.end()

        try:
            with self._session.round(given, ended) as tasks:
                classes = self._session.classes_of(given[0])
                validation = None
                if options.validation is not None:
                    tasks[0], data = self._split(tasks[0], held, classes)
                    validation = Validation(_weighted(data, options.class_weight, classes), options.patience)
                if options.class_weight is not None:
                    tasks[0] = _weighted(tasks[0], options.class_weight, classes)
                report.begin(epochs * run.method.stages)
                if options.checkpoint is None:
                    run.learn(tasks, epochs, report, validation)
                else:
                    about = {"tasks": names, "epochs": epochs, "patience": options.patience}
                    self._learn_saving(Path(options.checkpoint), about, tasks, report, validation)
                self._session.density = self._with_these(tasks)
            if options.checkpoint is not None:
                if run.ranks is None or run.ranks.rank == 0:
                    Checkpoints(Path(options.checkpoint)).remove_own()
                if run.ranks is not None:  # no process goes on before it is gone
                    run.ranks.first(True, run.network.posterior.mean.device)
        except BaseException:
            self.history = before
            raise
        finally:
            self._busy = False
        return names

    def _learn_saving(
        self,
        folder: Path,
        about: Mapping[str, Any],
        tasks: list[TaskData],
        report: History,
        validation: Validation | None,
    ) -> None:
        """Learn tasks that save themselves on their way, from where they were saved on. The checkpoints are left."""
        run, mean = self._run, self._run.network.posterior.mean
        digest = hashlib.blake2b(digest_size=16)
        shown = tasks if validation is None else [*tasks, validation.data]
        for tensor in (mean, *(t for data in shown for t in (data.x, data.y, data.weights))):
            if tensor is not None:
                digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        owner = {"method": self.method.name, "seed": self.seed, **self.settings, **about, "data": digest.hexdigest()}
        environment = {"torch": torch.__version__, "device": str(mean.device)}
        with deferred() as asked:
            checkpoints = Checkpoints(folder, resume=True, stop=asked)
            try:
                checkpointer = Checkpointer(checkpoints, [owner], environment, warnings.warn, run.ranks)
            except AnotherOwner as error:
                what = f"{folder} holds the checkpoint of another task ({error.difference})"
                raise EvclError(f"{what}: finish that one, or remove the folder") from None
            try:
                if not checkpointer.enter(run.rounds, run, run.seen, [task.head for task in tasks]):
                    run.learn(tasks, about["epochs"], Observers(report, checkpointer), validation)
            except Diverged:
                checkpoints.remove_own()  # resumed, it would diverge again
                raise
            if checkpointer.stopping():  # after the last step
                checkpointer.learned()

    def _with_these(self, tasks: Sequence[TaskData]) -> Density | None:
        """The density of all rows learned from, now that these are; None where it is not known of earlier ones, or
        cannot be: of tokens, whose numbers are names, and of inputs of another shape.
        """
        found, run = self._session.density, self._run
        if found is None and self._tasks:
            return None
        weights = sum(math.prod(run.network.layout.shapes[name]) for name in run.network.trunk_names)
        named = any(isinstance(module, (nn.Embedding, nn.EmbeddingBag)) for module in self._plain.modules())
        for task in tasks:
            x = task.x[0]
            columns = x[0].numel()
            if (found is not None and len(found.mean) != columns) or (named and bool((x == x.round()).all())):
                return None
            p = run.predict(task.x[:, :: math.ceil(len(x) / DOUBTED)], task.head, task=task.task)[0]
            one = density(x, _doubt(p), room(columns, weights))
            found = one if found is None else found.merged(one, room(columns, weights))
        return found

    def _held_out(self, options: _Options) -> float | tuple[Tensor, list[Label]]:
        """The part to hold out, or the examples given; whatever cannot be done is refused before any work."""
        validation, patience = options.validation, options.patience
        if patience is not None:
            PATIENCE.check("patience", patience)
            if validation is None:
                raise EvclError("patience needs a validation part: validation=0.1, or a pair (x, y)")
        if validation is None:
            return 0.0
        if isinstance(validation, (int, float, str)):
            return float(replace(VALIDATION, default=0.1, open_low=True).check("validation", validation))
        try:
            return self._examples(validation, "validation")
        except EvclError as error:
            raise EvclError(f"validation: {error}") from None

    def _split(
        self, task: TaskData, held: float | tuple[Tensor, list[Label]], classes: Sequence[Label]
    ) -> tuple[TaskData, TaskData]:
        """What is learned from, and what is measured on."""
        if not isinstance(held, float):
            x, y = held
            if x.shape[1:] != task.x.shape[2:]:
                shapes = tuple(x.shape[1:]), tuple(task.x.shape[2:])
                raise EvclError(f"validation: its inputs are {shapes[0]}, and the task's {shapes[1]}")
            try:
                places = positions(y, classes).to(x.device)
            except EvclError as error:
                raise EvclError(f"validation: {error}") from None
            return task, TaskData(x.unsqueeze(0), places.unsqueeze(0), task.head)
        count = max(1, round(held * task.y.shape[1]))
        rows = stratified(task.y[0].cpu(), count, generator(self.seed, "validation", self._run.rounds))
        kept, measured = (part.to(task.y.device) for part in rows)
        learned, held_out = (replace(task, x=task.x[:, part], y=task.y[:, part]) for part in (kept, measured))
        return learned, held_out

    # --- prediction ------------------------------------------------------------------------------------------------

    def predict_proba(self, x: Any, task: str | int | None = None) -> Any:
        """Probabilities [N, classes], averaged over draws of the posterior: an array, or a tensor for a tensor.

        The draws are fixed by the seed, so that the same input gives the same answer. `task` is a name or a number,
        and may be left out where there is one head. With task="infer" each example goes through the head that is least
        uncertain of it (see `predictions`).
        """
        if task == INFER:
            return self.predictions(x, task).probabilities
        return _like(x, self._probabilities(self._inputs(x), task))

    def predict(self, x: Any, task: str | int | None = None) -> Any:
        """The most probable label [N] of each input, as it was given to `learn`."""
        if task == INFER:
            return self.predictions(x, task).labels
        return self._labels(x, self._probabilities(self._inputs(x), task), self.classes(task))

    def predictions(self, x: Any, task: str | int | None = None) -> Predictions:
        """Labels and probabilities, how uncertain they are, and why.

        With task="infer" each example is predicted by the head that is least uncertain of it: whose entropy is the
        smallest part of the largest it could be, log(classes). The columns are then the classes of all heads, as
        `classes("infer")` has them; those that the example's head does not know have probability 0.
        """
        self._check_idle()
        checked, classes = self._inputs(x), self.classes(task)
        self._check_idle()
        heads = list(self._heads) if task == INFER else [self._head(task)]
        parts = []
        for head, (p, aleatoric) in zip(heads, self._with_entropy(checked, heads, task), strict=True):
            entropy = torch.special.entr(p).sum(1)
            columns = [classes.index(label) for label in self._heads[head]]
            wide = p if len(heads) == 1 else p.new_zeros(len(p), len(classes)).index_copy(1, _index(p, columns), p)
            parts.append((wide, entropy, torch.minimum(aleatoric, entropy), _doubt(p)))
        best = torch.stack([relative for *_, relative in parts]).argmin(0)
        rows = torch.arange(len(best), device=best.device)
        chosen = [torch.stack([part[i] for part in parts])[best, rows] for i in range(4)]
        first = {head: name for name, head in reversed(self._tasks.items())}
        tasks = np.array([first[head] for head in heads])[best.cpu().numpy()]
        p, entropy, aleatoric = (_like(x, tensor) for tensor in chosen[:3])
        seen, unfamiliar = self._session.density, None
        if seen is not None and len(seen.mean) == checked[0].numel():
            unfamiliar = _like(x, seen.unfamiliar(checked, chosen[3]))
        found = self._labels(x, chosen[0], classes)
        return Predictions(found, p, entropy, aleatoric, entropy - aleatoric, tasks, unfamiliar)

    def evaluate(self, tasks: Benchmark | Task | Iterable[Task]) -> dict[str, float]:
        """The accuracy on the test set of each of these tasks, all of them learned before."""
        tasks = _tasks(tasks, "evaluate")
        for task in tasks:
            if task.name not in self._tasks:
                learned = ", ".join(self.tasks) or "none"
                raise EvclError(f"task {task.name!r} has not been learned, only {learned} so far")
        found = {}
        for task in tasks:
            x, y = task.test
            found[task.name] = float((self.predict(x, task.name) == y).double().mean())
        return found

    def measure(self, data: Any, task: str | int | None = None) -> Measures:
        """Accuracy, NLL and expected calibration error on any data: a pair (x, y), a Dataset, batches, or a task.

        A benchmark's task is measured on its test set, through its own head. A label that the head does not know counts
        as wrong, with the smallest probability there is.
        """
        if isinstance(data, Task):
            task = data.name if task is None else task
            data = data.test
        x, y = self._examples(data, "measure")
        p = self._probabilities(x, task)
        place = {label: k for k, label in enumerate(self.classes(task))}
        columns = np.array([place.get(label, len(place)) for label in y])
        known = np.concatenate([p.double().cpu().numpy(), np.zeros((len(p), 1))], 1)
        right = known.argmax(1) == columns
        ece = metrics.expected_calibration_error(known, columns)
        return Measures(float(right.mean()), metrics.nll(known, columns), ece)

    def _probabilities(self, x: Tensor, task: str | int | None) -> Tensor:
        self._check_idle()
        head = list(self._heads).index(self._head(task))
        (p,) = self._tried(x, lambda x: [self._run.predict(x, head, task=self._number(task))])
        return p

    def _with_entropy(self, x: Tensor, heads: Sequence[str], task: str | int | None) -> list[tuple[Tensor, Tensor]]:
        """Of each head: probabilities, and the mean entropy of what each draw of the weights predicts."""
        numbers = [list(self._heads).index(head) for head in heads]
        calls = [(numbers, None if task == INFER else self._number(task))]
        if task == INFER and self._run.predicts_by_task:  # each head by the weights of its first task
            first = list(self._tasks.values())
            calls = [([k], first.index(head)) for k, head in zip(numbers, heads, strict=True)]

        def predict(x: Tensor) -> list[Tensor]:
            pairs = [pair for some, number in calls for pair in self._run.predict_with_entropy(x, some, number)]
            return [tensor for pair in pairs for tensor in pair]

        found = self._tried(x, predict)
        return list(zip(found[::2], found[1::2], strict=True))

    def _tried(self, x: Tensor, predict: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
        """What `predict` finds, without the axis of replicas; a prediction that is no number is refused."""
        try:
            found = [tensor[0] for tensor in predict(x.unsqueeze(0))]
        except RuntimeError as error:
            raise self._refused(x, error) from error
        for tensor in found:
            if not bool(tensor.isfinite().all()):
                row = int((~tensor.isfinite()).reshape(len(tensor), -1).any(1).nonzero()[0])
                raise BadExample("its probabilities are not finite: its inputs are too large for the network", row)
        return found

    def _number(self, task: str | int | None) -> int | None:
        """The number of the task that is meant; None where none is."""
        if task is None or isinstance(task, Integral):
            return None if task is None else int(task)
        return list(self._tasks).index(str(task))

    @staticmethod
    def _labels(x: Any, p: Tensor, classes: Sequence[Label]) -> Any:
        found = np.array(classes)[p.argmax(1).cpu().numpy()]
        return torch.from_numpy(found).to(x.device) if isinstance(x, Tensor) and found.dtype.kind in "ib" else found

    def _head(self, task: str | int | None) -> str:
        """The head of the task named or numbered; the only one where none is."""
        if not self._tasks:
            raise EvclError("nothing has been learned yet: call learn first")
        if task is None:
            if len(self._heads) > 1:
                raise EvclError(f"there are {len(self._heads)} heads: say which task, one of {', '.join(self._tasks)}")
            return next(iter(self._heads))
        if isinstance(task, Integral) and not isinstance(task, bool):
            if not 0 <= task < len(self._tasks):
                raise EvclError(f"there is no task {task}: {len(self._tasks)} learned, numbered from 0")
            return list(self._tasks.values())[int(task)]
        if not isinstance(task, str):
            raise EvclError(f"a task is named or numbered, not {task!r}")
        if task not in self._tasks:
            raise unknown("task", task, self._tasks)
        return self._tasks[task]

    def _inputs(self, x: Any) -> Tensor:
        """Inputs that the network accepts: tried on one example, so that a mistake is found before any work."""
        mean = self._run.network.posterior.mean
        checked = inputs(x, mean.dtype, mean.device)
        try:
            self._run.features(checked[:1])
        except RuntimeError as error:
            raise self._refused(checked, error) from error
        return checked

    @staticmethod
    def _refused(x: Tensor, error: RuntimeError) -> EvclError:
        return EvclError(f"the network does not take inputs of shape {tuple(x.shape)}: {str(error).splitlines()[0]}")

    # --- other forms -----------------------------------------------------------------------------------------------

    def to(self, device: torch.device | str) -> Learner:
        """Move the learner to a device, and return it."""
        self._check_idle()
        self._run.to(_device(device))
        return self

    def share(self, ranks: Ranks | None) -> Learner:
        """From now on, learn together with the other processes that `evcl.ranks.joined()` found; returns the learner.

        Each of them has a learner made alike and calls `learn` with the same data; all end with the same weights.
        Whatever else is called is this process's own affair: let one of them save.
        """
        self._check_idle()
        self._run.ranks = ranks
        return self

    def mean_network(self, task: str | int | None = None) -> nn.Module:
        """A plain module of the means that predictions are made from: from inputs to the logits of a task's head."""
        self._check_idle()
        names = head_names(list(self._heads).index(self._head(task)))
        network, mean = self._run.network, self._run.predictor(self._number(task)).mean
        views = network.layout.views(mean)
        weight, bias = views[names["weight"]][0], views[names["bias"]][0]
        trunk = copy.deepcopy(self._plain).to(mean)
        head = torch.nn.utils.skip_init(nn.Linear, weight.shape[1], weight.shape[0]).to(weight)
        with torch.no_grad():
            for name, parameter in trunk.named_parameters():
                if name in network.trunk_names:
                    parameter.copy_(views[name][0])
            statistics = network.statistics()
            for name, buffer in trunk.named_buffers():
                if name in statistics:
                    buffer.copy_(statistics[name][0])
            head.weight.copy_(weight)
            head.bias.copy_(bias)
        return nn.Sequential(trunk, head).eval()

    def _restore_kept(self, kept: dict[str, Tensor]) -> None:
        """Frozen layers and buffers, as they were saved: in the network, and in the plain one beside it."""
        own = self._run.network.trunk.state_dict()
        if {name: t.shape for name, t in own.items()} != {name: t.shape for name, t in kept.items()}:
            raise EvclError("the network does not fit the file: its frozen layers or buffers are others")
        for module in (self._run.network.trunk, self._plain):
            module.load_state_dict(kept, strict=False)

    def save(self, path: str | os.PathLike[str], notes: Mapping[str, str] | None = None) -> None:
        """Write everything it needs to go on learning, as safetensors: tensors and JSON, no code.

        `notes` are texts of your own, kept in the file's metadata beside ours.
        """
        description, tensors = self.described()
        save_tensors(path, tensors, {**(notes or {}), "evcl": json.dumps(description)})

    def described(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """All there is to it except a network of the user's own: what JSON can say, and tensors."""
        self._check_idle()
        run, plain = self._run, self._plain
        mlp = {"inputs": plain.inputs, "hidden": list(plain.hidden)} if isinstance(plain, MLP) else None
        description = {
            "format": FORMAT,
            "method": self.method.name,
            "settings": dict(self.settings),
            "seed": self.seed,
            "rounds": run.rounds,  # with the seed, the state of every generator
            "memory": run.outline(),
            "mlp": mlp,  # None: a network of the user's own
            "unsupported": self._unsupported,
            "only": self._only,
            "skip": self._skip,
            "dtype": str(run.network.posterior.mean.dtype),
            "trunk": [[name, list(run.network.layout.shapes[name])] for name in run.network.trunk_names],
            "features": run.network.layout.shapes[head_names(0)["weight"]][1] if self._heads else 0,
            "heads": [[name, classes] for name, classes in self._heads.items()],
            "tasks": [[name, head] for name, head in self._tasks.items()],
        }
        kept = {f"{KEPT}{name}": tensor for name, tensor in run.network.trunk.state_dict().items()}
        if self._session.density is not None:
            kept |= {f"{DENSITY}{name}": tensor for name, tensor in self._session.density.tensors().items()}
        return description, {name: t.detach().cpu().clone() for name, t in {**run.tensors(), **kept}.items()}


def _weighted(task: TaskData, class_weight: Any, classes: Sequence[Label]) -> TaskData:
    if class_weight is None:
        return task
    return replace(task, weights=class_weights(class_weight, classes, task.y[0]).to(task.x.dtype).unsqueeze(0))


def _like(x: Any, tensor: Tensor) -> Any:
    """A tensor for a tensor, else an array."""
    return tensor.to(x.device) if isinstance(x, Tensor) else tensor.cpu().numpy()


def _doubt(p: Tensor) -> Tensor:
    """[N]: the entropy of these probabilities [N, classes] as a part of the largest it could be."""
    entropy: Tensor = torch.special.entr(p).sum(1)
    return entropy / math.log(p.shape[1])


def _index(like: Tensor, values: list[int]) -> Tensor:
    return torch.tensor(values, device=like.device)


def _tasks(tasks: Any, verb: str) -> list[Task]:
    """Tasks from a benchmark, a task or several."""
    found = [tasks] if isinstance(tasks, Task) else list(tasks) if isinstance(tasks, Iterable) else [tasks]
    for task in found:
        if not isinstance(task, Task):
            raise EvclError(f"{verb} takes a benchmark or its tasks, not {type(task).__name__}")
    return found


def _device(device: torch.device | str) -> torch.device:
    """A device that works here."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise EvclError(f"device {str(device)!r} cannot be used here: {str(error).splitlines()[0]}") from None


class EVCL(Learner):
    """Elastic variational continual learning: VCL plus a Fisher-weighted penalty on means and variances."""

    def __init__(self, network: nn.Module, **options: Any) -> None:
        super().__init__(network, "evcl", **options)


class VCL(Learner):
    """Variational continual learning: a Gaussian over each weight, carried on as the next prior."""

    def __init__(self, network: nn.Module, **options: Any) -> None:
        super().__init__(network, "vcl", **options)


class EWC(Learner):
    """Elastic weight consolidation: plain weights, held where earlier tasks need them."""

    def __init__(self, network: nn.Module, **options: Any) -> None:
        super().__init__(network, "ewc", **options)


class Naive(Learner):
    """Plain training, task after task: what forgetting looks like."""

    def __init__(self, network: nn.Module, **options: Any) -> None:
        super().__init__(network, "naive", **options)


def load(path: str | os.PathLike[str], network: nn.Module | None = None) -> Learner:
    """A saved learner, ready to predict and to go on learning. No code in the file is run.

    A network that is not `evcl.nn.mlp` is handed in; its names and shapes are checked against the file.
    """
    try:
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError
    except (OSError, TypeError, ValueError):
        raise EvclError(f"there is no file {path}") from None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if "evcl" not in metadata:
                raise EvclError("it was not saved by evcl")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no dict)
        return rebuilt(parsed(metadata["evcl"]), tensors, network)
    except SafetensorError as error:
        raise EvclError(f"cannot load {path}: it is cut short or not a safetensors file ({error})") from error
    except OSError as error:
        raise EvclError(f"cannot read {path}: {error.strerror or error}") from error
    except EvclError as error:
        raise EvclError(f"cannot load {path}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise EvclError(f"cannot load {path}: it is damaged ({type(error).__name__} {error})") from error


def rebuilt(saved: dict[str, Any], tensors: dict[str, Tensor], network: nn.Module | None = None) -> Learner:
    """The learner that `described` this, on the CPU; a file of an earlier release is upgraded first."""
    saved, tensors = upgraded(saved, tensors)
    trunk = Layout({name: tuple(shape) for name, shape in saved["trunk"]})
    heads = {name: list(classes) for name, classes in saved["heads"]}
    tasks = dict(saved["tasks"])
    weights = trunk.size + sum((saved["features"] + 1) * len(classes) for classes in heads.values())
    if len(heads) > MOST_HEADS:
        raise EvclError(f"it has {len(heads):,} heads, and the most is {MOST_HEADS:,}")
    if tensors["posterior.mean"].shape != (1, weights) or not set(tasks.values()) <= set(heads):
        raise EvclError("its heads do not fit its weights")
    for classes in heads.values():
        if len(set(classes)) != len(classes) or {type(c) for c in classes} not in ({int}, {str}, {bool}):
            raise EvclError("a head's classes must be different, and all of one kind")
    if not isinstance(saved["rounds"], int) or saved["rounds"] < 0:
        raise EvclError("rounds must be a whole number")
    method = get_method(saved["method"])
    settings = resolve(method.name, method.known_settings, saved["settings"])
    # An mlp keeps nothing but what the file replaces: until then its buffers have shapes, and no memory.
    device = "cpu" if network is not None else "meta"
    if network is None:
        network = _mlp(saved["mlp"], trunk)
    dtypes = {str(t): t for t in (torch.float32, torch.float64)}
    learner = Learner(
        network,
        method,
        seed=saved["seed"],
        init="network",
        unsupported=saved["unsupported"],
        only=saved.get("only"),
        skip=saved.get("skip"),
        dtype=dtypes[saved["dtype"]],
        device=device,
        **settings,
    )
    del network
    run = learner._run
    learner._restore_kept({name.removeprefix(KEPT): t for name, t in tensors.items() if name.startswith(KEPT)})
    if run.network.layout != trunk:
        ours, theirs = run.network.layout.shapes.items(), trunk.shapes.items()
        other = sorted(ours ^ theirs)[:1] or [("the order of the weights", ())]
        raise EvclError(f"the network does not fit the file: {other[0][0]} {other[0][1]} is in one of them only")
    run.add_heads(saved["features"], [len(classes) for classes in heads.values()])
    learner._session.heads, learner._session.tasks = heads, tasks
    if seen := {name.removeprefix(DENSITY): t for name, t in tensors.items() if name.startswith(DENSITY)}:
        learner._session.density = Density.from_tensors(seen)
    run.load_tensors(tensors, saved["memory"], saved["rounds"], learner._session.seen())
    run.lost = torch.zeros(1, dtype=torch.bool)
    for kept in run.kept_examples():
        if kept.x.shape[2:] != run.kept_examples()[0].x.shape[2:]:
            raise EvclError("the inputs of the examples that it keeps should be of one shape")
        if kept.y.numel():
            learner._inputs(kept.x[0])  # the network takes them
    return learner


def _mlp(saved: dict[str, Any] | None, trunk: Layout) -> MLP:
    """The network of the file, built only once its size is known to be that of the weights."""
    if saved is None:
        raise EvclError("the file holds a network of your own: pass it as load(path, network=...)")
    widths = [saved["inputs"], *saved["hidden"]]
    if trunk.size != sum((a + 1) * b for a, b in pairwise(widths)):
        raise EvclError("its network does not fit its weights")
    return MLP(saved["inputs"], saved["hidden"])
