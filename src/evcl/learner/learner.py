"""The learner: it learns tasks, predicts, and is saved."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from evcl import metrics
from evcl._core.density import Density, density, room
from evcl._core.errors import EvclError, ForgettingWarning
from evcl._core.forms import widened
from evcl._core.inputs import Label, class_weights, labels, positions, warn_of_scale
from evcl._core.randomness import generator
from evcl._core.ranks import Ranks
from evcl._core.settings import SEED, Setting, resolve
from evcl.benchmarks import Task
from evcl.callbacks import Callback, Epoch
from evcl.learner import card, held_out, resumable
from evcl.learner.export import export
from evcl.learner.held_out import HeldOut
from evcl.learner.plain import plain_networks
from evcl.learner.predictor import INFER, Predictor, normalised_entropy, tasks_of
from evcl.learner.reading import Reader
from evcl.learner.rereading import Rereading
from evcl.learner.saved import FORMAT, write
from evcl.learner.truncation import truncated
from evcl.methods import Method, known_settings
from evcl.methods import get as get_method
from evcl.methods.adapters import check_restarts, one_per_task
from evcl.methods.memory import copies_network
from evcl.nn import MLP, LoRA, Names, Prior, head_names
from evcl.nn.inputs import Call, Output, without_classifier
from evcl.nn.lora import adapter_tensors, base_hash, with_adapters
from evcl.training import Given, History, Run, Session, TaskData, Validation
from evcl.training.adapters import merge

DENSITY = "density."  # in a file, the prefix of the tensors that describe the density of the rows learned from
DOUBTED = 1000  # at most this many rows of a task are predicted to measure its typical entropy
FROZEN = "kept."  # in a file, the prefix of the trunk's tensors outside the posterior: frozen layers, buffers
FIRST = "first."  # in a file, the prefix of the tensors that every new column of a network starts from
SHOWN = 8  # of many classes, this many are named
FUNCTION = "function"  # in a file, in place of an `output` that is a function
GIVEN = "given"  # in a file, in place of a first prior of the user's own
NEW = "new"  # the value of `head` that gives a task its own head
WINDOW = Setting(1000, "examples of a task that are held at a time", low=1, high=1_000_000_000)
ACCUMULATE = Setting(1, "parts in which the gradient of a step is computed", low=1, high=1_000_000)
MOST_HEADS = 10_000  # that a learner or a file may have


class _Options(NamedTuple):
    """The options of `Learner.learn`."""

    epochs: int | None
    callbacks: Iterable[Callback]
    validation: Any = None
    patience: int | None = None
    class_weight: Any = None
    checkpoint: str | os.PathLike[str] | None = None
    reread: bool | int = False


class Learner(Predictor):
    """A network that learns one task after another with one of the methods.

    The network is the trunk: it maps a batch to [batch, features], and each task adds a head on top. The posterior
    starts at the network's weights, except for `evcl.nn.mlp`, whose weights are drawn from `seed`; `init="network"` or
    `init="draw"` chooses explicitly. All randomness derives from `seed`: torch's global generator is never touched.
    `only` and `skip` name the layers that learn and the layers that stay fixed (see `evcl.nn.bayesianize`).
    `prior="network"` centres the first prior on a pretrained network's weights instead of on 0; an
    `evcl.nn.Prior` is a first prior of your own, such as a posterior of laplace-torch (`evcl.integrations.laplace`).
    `adapters=evcl.nn.LoRA(rank=8)` freezes the network, and learns low-rank additions to some of its weights; a PEFT
    model, which has such additions, is used as it is.
    `dtype` is that of weights and inputs: float64 if the network has it, unless another is given, else float32.
    `precision` is that of matrix products and convolutions: on a GPU tf32 or, more exactly, fp32; with bf16, training
    computes in bfloat16 on any device, while weights, losses and predictions keep their dtype.

    A network may take several inputs, by position or by name, and sequences of any length: see `learn`. If it does not
    return [batch, features], `output` chooses: the name of an output, a position in a tuple, or a function. Of an
    output of a Hugging Face model, or a dict, `pooler_output` is used by default; if there is none, the mean of
    `last_hidden_state` over the steps that the mask keeps; if there is none, `logits`. A Hugging Face model for
    classification is used without its last layer, whose place the heads take, unless `output` is given.
    `accumulate=k` computes the gradient of each step in k parts of batch_size / k examples: it needs less memory.

    The learner neither needs nor keeps data of earlier tasks. With `coreset="random"` or `"kcenter"` it keeps
    `coreset_size` examples of each task, also in the saved file. After each task it fine-tunes a copy of the weights on
    them, which is used for prediction.

    Attributes:
        method: the method
        settings: all settings of the method, with their values
        seed: the seed of all its random generators
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
        prior: Literal["zero", "network"] | Prior = "zero",
        output: Output = None,
        accumulate: int = 1,
        adapters: LoRA | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        precision: Literal["tf32", "fp32", "bf16"] = "tf32",
        **settings: Any,
    ) -> None:
        self.method = _with_tasks(get_method(method), adapters)
        self.settings = resolve(self.method.name, known_settings(self.method, settings), settings)
        self.seed = int(SEED.check("seed", seed))
        if init not in ("auto", "draw", "network"):
            raise EvclError(f"init must be 'auto', 'draw' or 'network', not {init!r}")
        if dtype is None:
            dtype = _dtype_of(network)
        if dtype not in (torch.float32, torch.float64):
            raise EvclError(f"dtype must be torch.float32 or torch.float64, not {dtype}")
        if not isinstance(prior, Prior) and prior not in ("zero", "network"):
            raise EvclError(f"prior must be 'zero', 'network' or an evcl.nn.Prior, not {prior!r}")
        self._unsupported, self._only, self._skip, self._adapters = unsupported, only, skip, adapters
        self._accumulate = int(ACCUMULATE.check("accumulate", accumulate))
        call, arguments = Call(output), network
        if isinstance(network, nn.Module):
            network = without_classifier(network, output)
        copies = self.method.trunk is not None or copies_network(self.method.memory)
        if output is not None and copies:
            raise EvclError(f"{self.method.name} copies the network's layers, and takes no output=")
        network = with_adapters(network, adapters)
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
            precision=precision,
            call=call,
            accumulate=self._accumulate,
        )
        self._reader = Reader(arguments, call, dtype, self.method.name if copies else "")
        self._run.network.merges = adapters is not None and adapters.tasks == "merged"
        self._plain = self.method.changed(network, [self.settings])
        self._session = Session(self._run)
        self._busy = False
        self._records: list[card.Record] = []  # one per task
        self._shape: tuple[int, ...] | None = None  # of an example of the last task, as it is computed with
        self._rereading: Rereading | None = None  # the loader of the task that is being learned
        self.history: dict[str, tuple[Epoch, ...]] = {}

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
        label: str | None = None,
        reread: bool | int = False,
    ) -> str:
        """Learn one more task, and return its name (by default its number, as text).

        `data` is a pair of inputs [N, ...] and labels [N], integers or strings, which may also be passed as two
        arguments, learn(x, y); a pandas or polars frame of numbers with a column `label`, or the one that `label=`
        names; a torch Dataset of (x, y), or an iterable of batches (x, y), read once into memory; or a
        benchmark's task, which has its own name and head. `task` is the task's name, which may also take the place of
        `y`: learn((x, y), "january"). `head` names an earlier task whose head to share; that head grows if the data has
        new labels. `classes` are labels that the head should know even if none of the data has them. If learning fails
        or is interrupted, the learner is left unchanged.

        If the network takes several inputs, x is a tuple, in the order of its `forward`, or a dict, by their names
        there. The same holds for the items of a data set and for batches, which may also be (x1, x2, y). A dict, such
        as a row of a data set or a tokenised batch, may include the labels, in the column `label` or `labels`, or in
        the one that `label=` names. Columns that `forward` does not take are left out. Integers stay integers, and
        truth values stay truth values. Sequences of different lengths, [[5, 2, 7], [3, 1]], are padded; if `forward`
        takes an `attention_mask` or a `mask`, it gets one that says which steps are there. Items (x, y, task) of a
        continual learning stream are read as (x, y).

        `callbacks` are told of each epoch and may stop the task (see `evcl.Callback`); `history` records each epoch.
        `validation` is a fraction to hold out, stratified (0.1), or separate data. The validation part is not learned
        from, and is predicted after each epoch. With `patience`, the task stops after that many epochs without a lower
        NLL on the validation part, and restores the weights of the best epoch. `class_weight` is "balanced", or maps
        labels to weights; other labels have weight 1. It weights examples in the NLL and in the Fisher. Only the ratios
        matter: weights are scaled to a mean of 1.

        With `reread=True`, a DataLoader or a torch Dataset is read again in every epoch, instead of once into memory:
        for data that is augmented at random, or larger than memory. It is also read once at the start, to find the
        labels and to draw a random sample. What a method measures on a task's data, such as the Fisher, it measures on
        that sample. The sample has as many examples as fit in 256 MB, and this is also how many are held at a time;
        `reread=1000` chooses another number. What the loader draws from torch's global generator depends on the seed
        alone.

        `checkpoint` is a folder to which the task is saved every minute and on interruption. The same call resumes it,
        also in another process, and ends with the same weights; `history` then has only the epochs since. The folder
        is removed when the task is learned.
        """
        if self.method.jointly:
            raise EvclError(f"{self.method.name} trains on all tasks at once: use learn_jointly(tasks)")
        self._check_idle()
        if hasattr(y, "__len__") and not isinstance(y, str):  # learn(x, y), as people type it
            data = (data, y)
        elif y is not None:
            if task is not None:
                raise EvclError(f"the task has two names, {y!r} and {task!r}: pass labels with the inputs, learn(x, y)")
            task = y
        wanted = [] if classes is None else list(classes)
        known = labels(wanted, len(wanted)) if wanted else []
        options = _Options(epochs, callbacks, validation, patience, class_weight, checkpoint, reread)
        self._check_reread(options)
        with self._reader.reading(label, not self._tasks):
            return self._learn([self._read(data, task, head, self._tasks, known, options.reread)], options)[0]

    def learn_jointly(
        self, tasks: Iterable[Task], epochs: int | None = None, *, callbacks: Iterable[Callback] = ()
    ) -> list[str]:
        """Learn several tasks at once, each with its own head, and return their names."""
        self._check_idle()
        tasks = tasks_of(tasks, "learn_jointly")
        if not tasks:
            raise EvclError("there is no task to learn")
        names = [task.name for task in tasks]
        with self._reader.reading(None, not self._tasks):
            given = [self._read(task, None, "new", [*self._tasks, *names[:k]]) for k, task in enumerate(tasks)]
            return self._learn(given, _Options(epochs, callbacks))

    def _read(
        self,
        data: Any,
        task: str | None,
        head: str | int,
        taken: Iterable[str],
        known: Sequence[Label] = (),
        reread: bool | int = False,
    ) -> Given:
        if isinstance(data, Task):
            task = data.name if task is None else task
            known = known or [c if isinstance(c, str) else int(c) for c in data.classes]
        name = str(len(self._tasks)) if task is None else task
        if not isinstance(name, str) or not name or name in (NEW, INFER):
            raise EvclError(f"a task's name must be text other than {NEW!r} and {INFER!r}, not {name!r}")
        if name in taken:
            raise EvclError(f"{name!r} is already learned: choose another name, with head={name!r} to share its head")
        if head is None:
            raise EvclError("head must be 'new', or the name or number of a task whose head to use, not None")
        if head != "new":
            head = self._head(head)
        elif isinstance(data, Task):
            head = data.head
        elif name in self._heads:
            raise EvclError(f"a head is already called {name!r}: choose another name for the task")
        else:
            head = name
        if head not in self._heads and len(self._heads) >= MOST_HEADS:
            raise EvclError(f"there are {MOST_HEADS:,} heads, which is the maximum: share one of them, head=NAME")
        counts, self._rereading = None, None
        if reread:
            window = None if reread is True else int(WINDOW.check("reread", reread))
            about = (self._reader, data, self.seed, self._run.rounds, self.settings.batch_size, window)
            self._rereading = found = Rereading(*about)
            x, y, counts = self._tested(found.x.to(self._run.network.posterior.mean.device)), found.y, found.counts
            known = [*known, *(label for label in sorted(counts) if label not in known)]
        else:
            x, y = self._examples(data, "learn")
        return Given(name, head, known, x.unsqueeze(0), [y], counts)

    def _learn(self, given: list[Given], options: _Options) -> list[str]:
        names, run = [task.name for task in given], self._run
        epochs = self.settings.epochs
        if options.epochs is not None:
            epochs = int(self.method.known_settings["epochs"].check("epochs", options.epochs))
        report = History(" + ".join(names), options.callbacks)
        held = held_out.requested(options.validation, options.patience, lambda data: self._examples(data, "validation"))
        before, self._busy = (self.history, self._records, self._shape), True
        validation: Validation | None = None
        measured: TaskData | None = None

        def ended() -> None:
            self._busy = False
            self._record(given, epochs, measured, isinstance(held, float))
            self.history = {**self.history, **dict.fromkeys(names, tuple(report.epochs))}
            report.end()

        try:
            with self._session.round(given, ended) as tasks:
                if told := self.forgetting(given[0].name, [repr(label) for label in self._session.lacking]):
                    warnings.warn(told, ForgettingWarning, stacklevel=3)
                tasks, held = self._of_one_length(tasks, held)
                classes = self._session.group_of(given[0], tasks[0])
                tasks = self._reread(tasks, classes)
                if options.validation is not None and len(classes) > 1:  # a single class trains nothing
                    drawn = generator(self.seed, "validation", run.rounds)
                    if not isinstance(held, float):  # those of the classes that are learned together
                        held = held_out.among(held, classes, self._session.heads[given[0].head])
                    tasks[0], measured = held_out.hold_out(tasks[0], held, classes, drawn)
                    weights = self._class_weight(options, given[0], classes)
                    validation = Validation(_weighted(measured, weights, classes), options.patience)
                if options.class_weight is not None:
                    for i, part in enumerate(tasks):
                        own = self._session.group_of(given[0], part)
                        tasks[i] = _weighted(part, self._class_weight(options, given[0], own), own)
                if not run.rounds:
                    self._check_scale(tasks[0].x[0])
                report.begin(epochs * run.method.stages)
                self._fit(tasks, epochs, names, report, validation, options)
                self._session.density = self._with_these(tasks)
            merge(run, self._plain, self._adapters)
            if options.checkpoint is not None:
                resumable.remove(run, Path(options.checkpoint))
        except BaseException:
            self.history, self._records, self._shape = before
            raise
        finally:
            self._busy, self._rereading = False, None
        return names

    def _fit(
        self,
        tasks: list[TaskData],
        epochs: int,
        names: list[str],
        report: History,
        validation: Validation | None,
        options: _Options,
    ) -> None:
        if options.checkpoint is None:
            self._run.learn(tasks, epochs, report, validation)
            return
        about = {"method": self.method.name, "seed": self.seed, **self.settings}
        about |= {"tasks": names, "epochs": epochs, "patience": options.patience}
        resumable.learn(self._run, Path(options.checkpoint), about, tasks, report, validation)

    def _record(self, given: Sequence[Given], epochs: int, data: TaskData | None, part: bool) -> None:
        """Note what was learned for the card. `data`: the validation part, if there is one; `part`: whether it was held
        out of the task's own rows.
        """
        self._shape = tuple(given[-1].x.shape[2:])
        found = [card.record(task, epochs) for task in given]
        if data is not None:
            task, classes = given[0], self._session.group_of(given[0], data)
            y = positions([classes[i] for i in data.y[0].tolist()], self._heads[task.head]).numpy()
            p = self._probabilities(data.x[0], task.name).double().cpu().numpy()
            found[0]["examples"] -= len(y) if part else 0  # these were not trained on
            found[0]["validation"] = {
                "examples": len(y),
                "accuracy": float((p.argmax(1) == y).mean()),
                "nll": metrics.nll(p, y),
                "ece": metrics.expected_calibration_error(p, y),
            }
        self._records = [*self._records, *found]

    @staticmethod
    def _check_reread(options: _Options) -> None:
        if not options.reread:
            return
        if isinstance(options.validation, (int, float, str)):
            raise EvclError("with reread, a fraction cannot be held out: pass validation data of their own")
        if options.class_weight is not None:
            raise EvclError("reread cannot be used with class_weight: let the loader's sampler balance the classes")

    def _reread(self, tasks: list[TaskData], classes: Sequence[Label]) -> list[TaskData]:
        """The task with the loader that its examples are read from in each epoch, if there is one."""
        found = self._rereading
        if found is None:
            return tasks
        if len(tasks) > 1 or not set(found.counts) <= set(classes):
            raise EvclError("with reread, all examples must be of classes that are learned in one softmax")
        return [replace(tasks[0], reread=found.task(classes, tasks[0].x.shape[-1]))]

    def _of_one_length(self, tasks: list[TaskData], held: HeldOut) -> tuple[list[TaskData], HeldOut]:
        """The tasks and validation data with their sequences padded to one length, and the kept examples too."""
        form = self._reader.call.form
        if form is None or not form.step:
            return tasks, held
        every = [task.x for task in (*tasks, *self._run.kept_examples())]
        columns = max(x.shape[-1] for x in every + ([] if isinstance(held, float) else [held[0]]))
        self._run.widen_kept(columns)
        if not isinstance(held, float):
            held = widened(held[0], columns), held[1]
        return [replace(task, x=widened(task.x, columns)) for task in tasks], held

    def keep(self, examples: int) -> Learner:
        """Keep this many examples in all from now on, equally many of each class, and train on them beside each new
        task; returns the learner. It is the setting `memory`, for a learner that exists already: examples of tasks
        learned before this call are not there to be kept.
        """
        self._check_idle()
        given = {**self.settings, "memory": examples}
        settings = resolve(self.method.name, known_settings(self.method, given), given)
        self._run.switch(self.method, settings)
        self.settings = settings
        return self

    @property
    def lacking(self) -> tuple[Label, ...]:
        """The old classes of the last task's head that the task had no rows of, although it trained their softmax."""
        return tuple(self._session.lacking)

    def forgetting(self, task: str, lacking: Sequence[str], keep: str | None = "learner.keep(200)") -> str | None:
        """One line of advice for a task that lacks these classes of its head; None if all is well. `keep` is how to
        keep examples.
        """
        keeps = self._run.kept_examples() or self.settings.get("memory", 0)
        if not lacking or keeps or self.method.generative or self.method.replays:
            return None
        some = ", ".join(lacking[:SHOWN]) + (f" and {len(lacking) - SHOWN} more" if len(lacking) > SHOWN else "")
        try:
            known_settings(self.method, {**self.settings, "memory": 0})
        except EvclError:
            keep = None
        advice = f"{keep} would keep rows of every class" if keep else "give every task rows of every class"
        return f"task {task!r} has no rows of {some}, which its head knows, and may make it forget them: {advice}"

    def _class_weight(self, options: _Options, task: Given, classes: Sequence[Label]) -> Any:
        """The option `class_weight`, for those of the head's classes that are learned together."""
        given = options.class_weight
        if not isinstance(given, Mapping):
            return given
        others = set(self._session.heads[task.head]) - set(classes)
        return {label: weight for label, weight in given.items() if label not in others}

    def _check_scale(self, x: Tensor) -> None:
        """Warn of inputs that are far from 0 or very small, unless the network begins with a norm or takes tokens."""
        first = next((module for module in self._plain.modules() if not list(module.children())), None)
        if isinstance(first, (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d)):
            return
        form = self._reader.call.form
        args, named = ([x], {}) if form is None else form.unpack(x)
        for one in (*args, *named.values()):
            if one.is_floating_point():
                warn_of_scale(one.reshape(len(one), -1))

    def _with_these(self, tasks: Sequence[TaskData]) -> Density | None:
        """The density of all rows learned from, including these. None if the density of earlier rows is unknown, or if
        these rows have none: tokens, whose numbers are only names, and inputs whose shape differs from earlier ones.
        """
        found, run = self._session.density, self._run
        if found is None and self._tasks:
            return None
        weights = sum(math.prod(run.network.layout.shapes[name]) for name in run.network.trunk_names)
        named = any(isinstance(module, (nn.Embedding, nn.EmbeddingBag)) for module in self._plain.modules())
        form = self._reader.call.form
        if named and form is not None and any(one.kind != "float" for one in form.inputs):
            return None
        for task in tasks:
            x = task.x[0]
            columns = x[0].numel()
            if (found is not None and len(found.mean) != columns) or (named and bool((x == x.round()).all())):
                return None
            step = math.ceil(len(x) / DOUBTED)
            some = task.x if step == 1 else task.x[:, ::step]  # what is known of all rows of a frozen trunk is reused
            p = run.predict(some, task.head, task=task.task)[0]
            one = density(x, normalised_entropy(p), room(columns, weights))
            found = one if found is None else found.merged(one, room(columns, weights))
        return found

    # --- other forms -----------------------------------------------------------------------------------------------

    def to(self, device: torch.device | str) -> Learner:
        """Move the learner to a device, and return it."""
        self._check_idle()
        self._run.to(_device(device))
        return self

    def share(self, ranks: Ranks | None) -> Learner:
        """From now on, learn together with the other processes that `evcl.training.joined()` found.

        Every process must construct the same learner and call `learn` with the same data; all end with the same
        weights. All other calls concern this process only: let one process save.
        """
        self._check_idle()
        self._run.ranks = ranks
        return self

    def truncated(self, layer: str, rank: float) -> Learner:
        """A copy of the learner, with a layer of lower rank: see `evcl.nn.truncate`."""
        self._check_idle()
        return truncated(self, layer, rank)

    def mean_network(self, task: str | int | None = None) -> nn.Module:
        """A plain module from inputs to the logits of a task's head, with the mean weights that predictions use."""
        self._check_idle()
        if self.method.generative:
            raise EvclError(f"{self.method.name} trains no network: it predicts by a likelihood per class alone")
        groups = self._session.groups[self._head(task)]
        if len(groups) > 1:
            raise EvclError(
                f"the classes of this head were learned in {len(groups)} groups, and a likelihood per class tells them "
                "apart: no plain network has that. Use predict_proba, or a learner with one_softmax=True"
            )
        number = self._number(task)
        return next(plain_networks(self, [self._run.predictor(number).mean], [groups[0].number], number))

    def export(
        self,
        path: str | os.PathLike[str],
        x: Any = None,
        *,
        task: str | int | None = None,
        what: Literal["predictive", "mean"] = "predictive",
        samples: int | None = None,
    ) -> None:
        """Write a network that predicts a task without evcl: `.onnx`, or `.pt2`, a program of torch.export.

        what="predictive" has the outputs `probabilities`, `entropy`, `aleatoric`, `epistemic` and, if it is known,
        `unfamiliar`: the fields of `predictions`, and the same numbers up to rounding. The weights are drawn now, and
        stored: `samples` draws of every weight that learns, by default `predict_samples` of them; fewer make a smaller
        and faster file. what="mean" is the mean network, with the output `logits`.

        The number of examples is free, and so is the length of sequences if torch can trace that; all other sizes are
        those learned from. `x` is some inputs to trace the network with, in the form that `predict` takes; a network
        whose code needs special values needs it, and so does one in a file of an earlier version of evcl. The labels
        are in the file's metadata: see docs/models.md. What was done to the inputs before `learn` is not in the file.
        """
        export(self, path, x, task=task, what=what, samples=samples)

    def _restore_frozen(self, frozen: dict[str, Tensor]) -> None:
        """Restore saved frozen layers and buffers, in the Bayesian network and in the plain copy beside it."""
        own = self._run.network.trunk.state_dict()
        if (ours := adapter_tensors(self._plain, self._adapters)) is not None:
            own = {name: tensor for name, tensor in own.items() if name in ours}
        if {name: t.shape for name, t in own.items()} != {name: t.shape for name, t in frozen.items()}:
            raise EvclError("the network does not fit the file: its frozen layers or buffers differ")
        for module in (self._run.network.trunk, self._plain):
            module.load_state_dict(frozen, strict=False)

    def card(self) -> dict[str, Any]:
        """What the learner was trained on, when, with which method and settings, and how sure it is: a dictionary that
        JSON can hold. Its "tasks" have, for each task, the number of examples and classes, the date (UTC), the epochs
        and, if a validation part was held out, accuracy, NLL and expected calibration error on it; "now" is the
        accuracy on the rows that are kept of the task, if there are any. `save` writes it into the file.
        """
        about = {**self._about(), "records": self._records, "versions": card.versions()}
        if self._adapters is not None:
            about["base"] = self._base_hash()
        return card.card(about, self.evaluate_kept() if self._tasks else None)

    def _base_hash(self) -> str:
        """The sha256 of the base model that adapters are added to."""
        return base_hash(self._run.network.trunk, self._adapters)

    def save(self, path: str | os.PathLike[str], notes: Mapping[str, str] | None = None) -> None:
        """Write everything needed to continue learning, as safetensors: tensors and JSON, no code.

        `notes` are texts of your own, stored in the file's metadata beside those of evcl.
        """
        write(path, self.described(), notes or {})

    def _about(self) -> dict[str, Any]:
        """The part of the description that a card needs."""
        network = self._run.network
        return {
            "method": self.method.name,
            "settings": dict(self.settings),
            "seed": self.seed,
            "dtype": str(network.posterior.mean.dtype),
            "trunk": [[name, list(network.layout.shapes[name])] for name in network.trunk_names],
            "features": network.layout.shapes[head_names(0)["weight"]][1] if self._heads else 0,
            "heads": [[name, classes] for name, classes in self._heads.items()],
            "tasks": [[name, head] for name, head in self._tasks.items()],
        }

    def described(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The learner's whole state as a JSON-serialisable description and tensors, without a user's own network."""
        self._check_idle()
        run, plain = self._run, self._plain
        mlp = plain.described() if isinstance(plain, MLP) else None
        description: dict[str, Any] = {
            **self._about(),
            "format": FORMAT,
            "rounds": run.rounds,  # with the seed, it determines every generator
            "drawn": run.drawn,  # whether the first weights are random: then the first task may take larger steps
            "prior": GIVEN if isinstance(run.prior, Prior) else run.prior,
            "memory": run.outline(),
            "mlp": mlp,  # None: a network of the user's own
            "unsupported": self._unsupported,
            "precision": self._run.precision,
            "only": self._only,
            "skip": self._skip,
        }
        call = run.network.call
        if call.form is not None:
            description["form"] = call.form.described()
        if call.output is not None:
            description["output"] = [FUNCTION] if callable(call.output) else call.output
        if self._records:
            description |= {"records": self._records, "versions": card.versions()}
        if self._shape is not None:
            description["shape"] = list(self._shape)
        if self._accumulate != 1:
            description["accumulate"] = self._accumulate
        groups, shown = self._session.groups, self._session.shown
        if any(len(some) > 1 for some in groups.values()) or any(shown[k][0] < set(c) for k, c in self._heads.items()):
            parts = {name: [one if one.domain else one[:2] for one in some] for name, some in groups.items()}
            rows = {k: [[c for c in classes if c in some] for some in shown[k]] for k, classes in self._heads.items()}
            each = {name: some if len(some) > 1 else some[0] for name, some in rows.items()}  # one list per domain
            description |= {"groups": parts, "shown": each, "seen": self._session.seen}
        frozen = run.network.trunk.state_dict()
        if (ours := adapter_tensors(plain, self._adapters)) is not None:
            description["mlp"] = None  # the base model is not in the file
            lora = None if self._adapters is None else self._adapters.described()
            description |= {"adapters": lora, "base": self._base_hash()}
            frozen = {name: tensor for name, tensor in frozen.items() if name in ours}
        more = {f"{FROZEN}{name}": tensor for name, tensor in frozen.items()}
        if self.method.trunk is not None and not (run.drawn and mlp):  # those of an mlp are drawn from the seed
            more |= {f"{FIRST}{name}": tensor for name, tensor in plain.state_dict().items()}
        if run.prior != "zero":
            more["centre"] = run.network.centre
        if run.network.width is not None:
            more["width"] = run.network.width
        if self._session.density is not None:
            more |= {f"{DENSITY}{name}": tensor for name, tensor in self._session.density.tensors().items()}
        return description, {name: t.detach().cpu().clone() for name, t in {**run.tensors(), **more}.items()}


def _with_tasks(method: Method, adapters: LoRA | None) -> Method:
    """The method, with adapters that are shared by all tasks, merged after each, or each task's own."""
    if isinstance(adapters, LoRA) and adapters.tasks == "merged":
        check_restarts(method, "merged")
    return one_per_task(method) if isinstance(adapters, LoRA) and adapters.tasks == "each" else method


def _weighted(task: TaskData, class_weight: Any, classes: Sequence[Label]) -> TaskData:
    if class_weight is None:
        return task
    return replace(task, weights=class_weights(class_weight, classes, task.y[0]).to(task.x.dtype).unsqueeze(0))


def _dtype_of(network: nn.Module) -> torch.dtype:
    """float64 if all weights of the network are, else float32."""
    kinds = {p.dtype for p in network.parameters()} if isinstance(network, nn.Module) else set()
    return torch.float64 if kinds == {torch.float64} else torch.float32


def _device(device: torch.device | str) -> torch.device:
    """The device, if it can be used on this machine; raises otherwise."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise EvclError(f"device {str(device)!r} cannot be used here: {str(error).splitlines()[0]}") from None
