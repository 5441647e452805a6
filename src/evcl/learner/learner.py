"""The learner: it learns tasks, predicts, and is saved."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from evcl._core.devices import limited
from evcl._core.errors import EvclError
from evcl._core.inputs import Label, labels
from evcl._core.ranks import Ranks
from evcl._core.settings import SEED, Setting, Settings, resolve
from evcl._core.tasks import Task
from evcl.callbacks import Callback, Epoch
from evcl.learner.learning import NEW, Become, Learning, Options, Past
from evcl.learner.persist import Described, card_of, described, unpickled, write
from evcl.learner.reading import Reader
from evcl.learner.state import State, tasks_of
from evcl.methods import METHODS, Method, check_targets, known_settings
from evcl.methods import get as get_method
from evcl.methods.memories import copies_network
from evcl.nn import MLP, VAE, LoRA, Names, Prior
from evcl.nn.inputs import Call, Output, without_classifier
from evcl.nn.lora import with_adapters
from evcl.targets import ENERGIES, LIKELIHOODS, Energy
from evcl.targets import get as get_likelihood
from evcl.training import Run, Session
from evcl.training.account import Account, Counts

if TYPE_CHECKING:
    from evcl.posterior import NamedPosterior

NAMED = 8  # of many classes, this many are named
ADDED_INPUTS = Setting(1, "inputs to add to a network", low=1, high=1_000_000)
ATTRIBUTES = {"state", "history", "settings", "method", "seed", "_learning"}  # of a learner, beside those of a subclass
ACCUMULATE = Setting(1, "parts in which the gradient of a step is computed", low=1, high=1_000_000)


class Learner:
    """A network that learns one task after another with one of the methods.

    The network is the trunk: it maps a batch to [batch, features], and each task adds a head on top. The posterior
    starts at the network's weights, except for `evcl.nn.mlp` and `VAE`, whose weights are drawn from `seed`;
    `init="network"` or `init="draw"` chooses explicitly. All randomness derives from `seed`: torch's global generator
    is never touched. `only` and `skip` name the layers that learn and the layers that stay fixed (see
    `evcl.nn.bayesianize`).
    `prior="network"` centres the first prior on a pretrained network's weights instead of on 0; an
    `evcl.nn.Prior` is a first prior of your own, such as a posterior of laplace-torch (`evcl.integrations.laplace`).
    `adapters=evcl.nn.LoRA(rank=8)` freezes the network, and learns low-rank additions to some of its weights; a PEFT
    model, which has such additions, is used as it is.
    `dtype` is that of weights and inputs: float64 if the network has it, unless another is given, else float32.
    `device` is "cpu", "cuda" or "mps", an Apple GPU, where everything is float32.
    `precision` is that of matrix products and convolutions: on a GPU tf32 or, more exactly, fp32; with bf16, training
    computes in bfloat16 on any device, while weights, losses and predictions keep their dtype.

    A network may take several inputs, by position or by name, and sequences of any length: see `learn`. If it does not
    return [batch, features], `output` chooses: the name of an output, a position in a tuple, or a function. Of an
    output of a Hugging Face model, or a dict, `pooler_output` is used by default; if there is none, the mean of
    `last_hidden_state` over the steps that the mask keeps; if there is none, `logits`. A Hugging Face model for
    classification is used without its last layer, whose place the heads take, unless `output` is given.
    `likelihood` says what the targets are: "categorical", one of several classes; "gaussian", numbers, with a noise
    that is learned (see `evcl.targets`); "bernoulli", any number of yes-or-no labels at once; "poisson", counts.
    Targets other than classes are [N], or [N, D] for D of them. Without labels, "bound" learns a generative model, an
    `evcl.nn.VAE`, and an `evcl.targets.Energy` anything else that the network's own outputs can be judged by:
    `learn(x)`, then `log_likelihood` and `sample`.
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
        likelihood: Literal["categorical", "gaussian", "bernoulli", "poisson", "bound", "gaussian-bound", "next-token"]
        | Energy = "categorical",
        accumulate: int = 1,
        adapters: LoRA | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        precision: Literal["tf32", "fp32", "bf16"] = "tf32",
        **settings: Any,
    ) -> None:
        found_method = get_method(method)
        self.settings = resolve(found_method.name, known_settings(found_method, settings), settings)
        self.method = _with_tasks(found_method, self.settings, adapters)
        self.seed = int(SEED.check("seed", seed))
        if init not in ("auto", "draw", "network"):
            raise EvclError(f"init must be 'auto', 'draw' or 'network', not {init!r}")
        if dtype is None:
            dtype = _dtype_of(network)
        if dtype not in (torch.float32, torch.float64):
            raise EvclError(f"dtype must be torch.float32 or torch.float64, not {dtype}")
        if not isinstance(prior, Prior) and prior not in ("zero", "network"):
            raise EvclError(f"prior must be 'zero', 'network' or an evcl.nn.Prior, not {prior!r}")
        chosen = get_likelihood(likelihood)
        check_targets(self.method, self.settings, chosen)
        accumulate = int(ACCUMULATE.check("accumulate", accumulate))
        call, arguments = Call(output), network
        if isinstance(network, nn.Module):
            network = without_classifier(network, output)
        copies = self.method.trunk is not None or copies_network(self.method.memory)
        if output is not None and copies:
            raise EvclError(f"{self.method.name} copies the network's layers, and takes no output=")
        network = with_adapters(network, adapters)
        run = Run(
            network,
            self.method,
            [self.settings],
            [self.seed],
            draw=isinstance(network, (MLP, VAE)) if init == "auto" else init == "draw",
            device=usable(device, dtype, precision),
            dtype=dtype,
            unsupported=unsupported,
            only=only,
            skip=skip,
            prior=prior,
            precision=precision,
            likelihood=chosen,
            call=call,
            accumulate=accumulate,
        )
        run.account = Account()
        run.network.merges = adapters is not None and adapters.tasks == "merged"
        reader = Reader(arguments, call, dtype, self.method.name if copies else "", chosen)
        self.state = State(run, Session(run), reader, adapters)
        self.history: dict[str, tuple[Epoch, ...]] = {}
        self._learning = False

    def __repr__(self) -> str:
        learned = f"{len(self.tasks)} task{'' if len(self.tasks) == 1 else 's'} learned"
        return f"{type(self).__name__}({self.state.run.method.name!r}, seed={self.seed}, {learned})"

    # --- what it knows ---------------------------------------------------------------------------------------------

    @property
    def likelihood(self) -> str:
        """What the targets are: categorical, gaussian, bernoulli or poisson; without labels, the name of the energy."""
        return self.state.run.likelihood.name

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of the learned tasks, in order."""
        return tuple(self.state.session.tasks)

    @property
    def heads(self) -> tuple[str, ...]:
        """The names of the heads, in order. A head is named after the task it was made for."""
        return tuple(self.state.session.heads)

    def classes(self, task: str | int | None = None) -> tuple[Label, ...]:
        """The labels of a task's head: the columns of `predict_proba`. With task="infer", the labels of all heads."""
        return self.state.classes(task)

    def predicted_as(self, task: str) -> str:
        """The first task whose predictions are the same as those of this one, for any input: tasks that share a head
        have the same, unless each has weights of its own.
        """
        return self.state.predicted_as(task)

    @property
    def knows_unfamiliar(self) -> bool:
        """Whether predictions can say how unfamiliar an input is (see `Predictions`)."""
        return self.state.session.density is not None

    @property
    def kept(self) -> int:
        """The number of examples of earlier tasks that the learner keeps."""
        return sum(task.y.shape[1] for task in self.state.run.kept_examples())

    # --- what it is, between tasks ---------------------------------------------------------------------------------

    @contextmanager
    def _changing(self) -> Iterator[Become]:
        """Inside this context, one change is made, by calling what it yields. If it fails, the learner is what it was;
        predictions go on as long as it takes.
        """
        if self._learning:
            raise EvclError("a task is being learned: the learner can be changed after it has ended, or in end_task")
        before, self._learning = (self.state, self.history, self.settings), True

        def become(state: State, history: Past) -> None:
            self.state, self.history, self._learning = state, {**self.history, **history}, False

        try:
            yield become
        except BaseException:
            self.state, self.history, self.settings = before
            raise
        finally:
            self._learning = False

    @contextmanager
    def _alone(self) -> Iterator[State]:
        """Its state, for one thread at a time: predictions share the buffers of one network."""
        state = self.state
        with state.run.lock:
            yield state

    def __copy__(self) -> Learner:
        made = object.__new__(type(self))
        vars(made).update(vars(self))
        return made

    def __deepcopy__(self, memo: dict[int, object]) -> Learner:
        made = memo[id(self)] = object.__new__(type(self))
        with self._alone():
            own = copy.deepcopy(vars(self), {**memo, id(self.method): self.method})
        vars(made).update(own, _learning=False)
        return made

    def __reduce__(self) -> tuple[object, ...]:
        """A learner is pickled as its description and tensors, as in its file, with what is the user's own: a network,
        a method, attributes.
        """
        with self._alone() as state:
            run, (description, tensors) = state.run, self.described()
            network = None if description["mlp"] is not None else state.plain
            likelihood = run.likelihood if run.likelihood.name not in {*LIKELIHOODS, *ENERGIES} else None
            own = network, run.network.call.output, likelihood, run.network.posterior.mean.device
        registered = self.method.name in METHODS and (state.adapters or METHODS[self.method.name] is self.method)
        given = own, None if registered else self.method
        attributes = {name: value for name, value in vars(self).items() if name not in ATTRIBUTES}
        return unpickled, (type(self), description, tensors, *given), {**attributes, "history": self.history}

    # --- learning --------------------------------------------------------------------------------------------------

    def learn(
        self,
        data: object,
        y: Any = None,
        head: str | int = "new",
        epochs: int | None = None,
        *,
        task: str | None = None,
        classes: Iterable[Label] | None = None,
        callbacks: Iterable[Callback] = (),
        validation: object = None,
        patience: int | None = None,
        class_weight: Literal["balanced"] | Mapping[Any, float] | None = None,
        sample_weight: object = None,
        checkpoint: str | os.PathLike[str] | None = None,
        label: str | None = None,
        reread: bool | int = False,
    ) -> str:
        """Learn one more task, and return its name (by default its number, as text).

        `data` is a pair of inputs [N, ...] and labels [N], integers or strings, which may also be passed as two
        arguments, learn(x, y); other targets, [N] or [N, D], are what the learner's `likelihood` says. It may also be
        a pandas or polars frame of numbers with a column `label`, or the one that `label=`
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
        labels to weights; other labels have weight 1. `sample_weight` [N] has a number of at least 0 for each example;
        an example of weight 0 is left out. With both, the weights are multiplied, and "balanced" counts each example
        once. Weights apply to the NLL and to the Fisher. Only their ratios matter: they are scaled to a mean of 1.

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
        if hasattr(y, "__len__") and not isinstance(y, str):  # learn(x, y), as people type it
            data = (data, y)
        elif y is not None:
            if task is not None:
                raise EvclError(f"the task has two names, {y!r} and {task!r}: pass labels with the inputs, learn(x, y)")
            task = y
        wanted = [] if classes is None else list(classes)
        known = labels(wanted, len(wanted)) if wanted else []
        options = Options(epochs, callbacks, validation, patience, class_weight, sample_weight, checkpoint, reread)
        with self._changing() as become:
            learning = Learning(self, options, become, label)
            return learning.learn([learning.read(data, task, head, self.tasks, known)])[0]

    def learn_jointly(
        self, tasks: Iterable[Task], epochs: int | None = None, *, callbacks: Iterable[Callback] = ()
    ) -> list[str]:
        """Learn several tasks at once, each with its own head, and return their names."""
        tasks = tasks_of(tasks, "learn_jointly")
        if not tasks:
            raise EvclError("there is no task to learn")
        names = [task.name for task in tasks]
        with self._changing() as become:
            learning = Learning(self, Options(epochs, callbacks), become)
            given = [learning.read(task, None, NEW, [*self.tasks, *names[:k]]) for k, task in enumerate(tasks)]
            return learning.learn(given)

    def keep(self, examples: int) -> Learner:
        """Keep this many examples in all from now on, equally many of each class, and train on them beside each new
        task; returns the learner. It is the setting `memory`, for a learner that exists already: examples of tasks
        learned before this call are not there to be kept.
        """
        given = {**self.settings, "memory": examples}
        settings = resolve(self.method.name, known_settings(self.method, given), given)
        check_targets(self.method, settings, self.state.run.likelihood)
        with self._changing() as become:
            made = self.state.forked()
            made.run.switch(self.method, settings)
            become(made, {})
            self.settings = settings
        return self

    @property
    def can_keep(self) -> bool:
        """Whether its method can keep examples: see `keep`."""
        try:
            known_settings(self.method, {**self.settings, "memory": 0})
        except EvclError:
            return False
        return True

    @property
    def lacking(self) -> tuple[Label, ...]:
        """The old classes of the last task's head that the task had no rows of, although it trained their softmax."""
        return tuple(self.state.session.lacking)

    def forgetting(self, task: str, lacking: Sequence[str], keep: str | None = "learner.keep(200)") -> str | None:
        """One line of advice for a task that lacks these classes of its head; None if all is well. `keep` is how to
        keep examples.
        """
        keeps = self.state.run.kept_examples() or self.settings.get("memory", 0)
        if not lacking or keeps or self.method.generative or self.method.replays:
            return None
        some = ", ".join(lacking[:NAMED]) + (f" and {len(lacking) - NAMED} more" if len(lacking) > NAMED else "")
        keeps_some = keep if self.can_keep else None
        advice = f"{keeps_some} would keep rows of every class" if keeps_some else "give every task rows of every class"
        return f"task {task!r} has no rows of {some}, which its head knows, and may make it forget them: {advice}"

    def account(self, task: str | int | None = None) -> Counts:
        """How often the rows of each earlier task counted in the objective when this task was learned, by default the
        last one, by part of the objective: `account()["march"]["kl"]`, and "sum". Printed, it is a table. 1 is Bayes'
        rule; it is empty for a first task, and where it is not known.
        """
        return Counts(self.state.record(task).get("account", {}))

    def elbo(self, task: str | int | None = None) -> dict[str, float]:
        """The evidence lower bound at the end of a task, by default the last one, in nats: `elbo` = -`nll` - `kl`, the
        expected NLL of the task's rows under the posterior, and the KL divergence from the posterior before the task.
        Empty for point weights, and where it is not known.
        """
        return dict(self.state.record(task).get("elbo", {}))

    @property
    def posterior(self) -> NamedPosterior:
        """The posterior over the weights as it is now, by their names: `learner.posterior["layers.0.weight"].mean`,
        `.std`, `.precision`, `.draw(8)`, and `.kl()`, the divergence from the first prior. Point weights have a mean
        alone.
        """
        from evcl.posterior import NamedPosterior

        network = self.state.run.network
        own = network.posterior.map(torch.clone, network.layout)
        if own.log_std is None:
            return NamedPosterior(own, own)
        matrix = self.state.run.structured
        own = own if matrix is None else matrix.marginals()
        return NamedPosterior(own, network.first_prior(self.settings.prior_std, own.mean), matrix)

    # --- prediction ------------------------------------------------------------------------------------------------

    def predict_proba(self, x: object, task: str | int | None = None) -> Any:
        """Probabilities [N, classes], averaged over draws from the posterior: a tensor if `x` is one, else an array.

        `x` is one array [N, ...], or several inputs in the form that they were learned in: a tuple, or a dict, whose
        labels, if it has any, are ignored.

        The seed fixes the draws, so the same input always gives the same output. `task` is a name or a number, and may
        be omitted if there is only one head. With task="infer", the head that predicts an example is inferred (see
        `predictions`).
        """
        with self._alone() as state:
            return state.predict_proba(x, task)

    def predict(self, x: object, task: str | int | None = None) -> Any:
        """The most probable label of each input, [N], in the form in which labels were given to `learn`.

        Of targets other than classes, the expected numbers or counts, or labels 0 and 1; [N, D] if there are several.
        """
        with self._alone() as state:
            return state.predict(x, task)

    def predictions(self, x: object, task: str | int | None = None, *, draws: int | None = None) -> Any:
        """`Predictions`: labels and probabilities, how uncertain they are, and why. Of numbers and counts, `Numbers`.

        With task="infer", each example is predicted by one of the heads: the one with the largest likelihood of the
        example, if the method has a likelihood per class; otherwise the least uncertain one, with the smallest entropy
        relative to its maximum, log(classes). The columns are then the classes of all heads, in the order of
        `classes("infer")`; classes that the example's head does not know have probability 0.

        With `draws`, the result also has `draws` [draws, N, ...]: what each of this many draws of the weights predicts
        for all inputs, the probabilities of classes and labels, and the expected numbers and counts. The seed fixes
        them. With an energy of one's own, whose network predicts nothing that is known here, the result is `Outputs`.
        """
        with self._alone() as state:
            return state.predictions(x, task, draws)

    def log_likelihood(self, x: object, task: str | int | None = None, *, draws: int | None = None) -> Any:
        """log p(x) of each example, [N], in nats, under a task's model: a tensor if `x` is one, else an array.

        For a learner with `likelihood="bound"`, it is estimated by importance sampling with this many latent `draws`
        per example, 1,000 by default, at the posterior's means. For any other energy, it is the negative energy of x,
        or of the pair (x, y). The task may be left out if all tasks share the whole network, as in a language model.
        """
        with self._alone() as state:
            return state.log_likelihood(x, task, draws=draws)

    def sample(self, task: str | int | None = None, n: int = 1) -> Tensor:
        """n inputs that a task's model generates, [n, ...], in the shape that was learned: the mean of p(x | z), for z
        from N(0, I), at the posterior's means. The seed fixes them.
        """
        with self._alone() as state:
            return state.sample(task, n)

    def evaluate(self, tasks: Task | Iterable[Task] | None = None) -> dict[str, float]:
        """The accuracy on the test set of each of these tasks. All of them must have been learned. Of numbers and
        counts, the root of the mean squared error; without labels, the mean log-likelihood.

        Without tasks, the accuracy on the rows that the learner keeps of each earlier task: how much of it is left now.
        It has trained on these rows, so the accuracy on new ones may be lower.
        """
        with self._alone() as state:
            return state.evaluate(tasks)

    def evaluate_kept(self, least: int = 1) -> dict[str, float]:
        """The accuracy on the rows that are kept of each task, if there are at least `least`; empty if none are."""
        with self._alone() as state:
            return state.evaluate_kept(least)

    def measure(self, data: object, task: str | int | None = None, *, label: str | None = None) -> Any:
        """`Measures`: accuracy, NLL and expected calibration error on any data: a pair (x, y), a Dataset, batches, or a
        task. Of numbers and counts, `NumberMeasures`.

        A benchmark's task is measured on its test set, with its own head. A label that the head does not know counts as
        wrong, with the smallest possible probability. `label` names the column of labels in a dict, as in `learn`.
        """
        with self._alone() as state:
            return state.measure(data, task, label=label)

    # --- other forms -----------------------------------------------------------------------------------------------

    def to(self, device: torch.device | str) -> Learner:
        """Move the learner to a device, and return it."""
        with self._changing() as become:
            moved = self.state.forked()
            moved.run.to(usable(device, moved.reader.dtype, moved.run.precision))
            become(moved, {})
        return self

    def share(self, ranks: Ranks | None) -> Learner:
        """From now on, learn together with the other processes that `evcl.training.joined()` found.

        Every process must construct the same learner and call `learn` with the same data; all end with the same
        weights. All other calls concern this process only: let one process save.
        """
        if ranks is not None and self.state.run.likelihood.beside:
            raise EvclError("the noise of numbers is measured on whole batches: one process must learn them alone")
        with self._changing():
            self.state.run.ranks = ranks
        return self

    def truncated(self, layer: str, rank: float) -> Learner:
        """A copy of the learner, with a layer of lower rank: see `evcl.nn.truncate`."""
        from evcl.learner.derived import truncated

        return truncated(self, layer, rank)

    def with_inputs(self, count: int) -> Learner:
        """A copy of the learner whose network, an `evcl.nn.mlp`, has this many more inputs after those it has. For rows
        in which they are 0, as if they had always been there, predictions stay the same. The weights of a new input
        start at their prior. It is on the same device; its `history` is empty.
        """
        from evcl.learner.derived import with_inputs

        return with_inputs(self, int(ADDED_INPUTS.check("count", count)))

    def mean_network(self, task: str | int | None = None) -> nn.Module:
        """A plain module from inputs to the logits of a task's head, with the mean weights that predictions use. Of
        numbers, to the numbers in their own units; of counts, to the log of the expected count. Without labels, to the
        network's own outputs.
        """
        from evcl.learner.plain import mean_network

        return mean_network(self, task)

    def export(
        self,
        path: str | os.PathLike[str],
        x: object = None,
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
        from evcl.learner.export import export

        export(self, path, x, task=task, what=what, samples=samples)

    def card(self) -> Described:
        """What the learner was trained on, when, with which method and settings, and how sure it is: a dictionary that
        JSON can hold. Its "tasks" have, for each task, the number of examples and classes, the date (UTC), the epochs
        and, if a validation part was held out, accuracy, NLL and expected calibration error on it; "now" is the
        accuracy on the rows that are kept of the task, if there are any. `save` writes it into the file.
        """
        return card_of(self)

    def save(self, path: str | os.PathLike[str], notes: Mapping[str, str] | None = None) -> None:
        """Write everything needed to continue learning, as safetensors: tensors and JSON, no code.

        `notes` are texts of your own, stored in the file's metadata beside those of evcl.
        """
        write(path, self.described(), notes or {})

    def described(self) -> tuple[Described, dict[str, Tensor]]:
        """The learner's whole state as a JSON-serialisable description and tensors, without a user's own network."""
        return described(self)


def _with_tasks(method: Method, settings: Settings, adapters: LoRA | None) -> Method:
    """The method, with adapters that are shared by all tasks, merged after each, or each task's own."""
    if not isinstance(adapters, LoRA) or adapters.tasks == "shared":
        return method
    from evcl.methods.adapters import check_restarts, one_per_task

    check_restarts(method, settings, adapters.tasks)
    return one_per_task(method) if adapters.tasks == "each" else method


def _dtype_of(network: nn.Module) -> torch.dtype:
    """float64 if all weights of the network are, else float32."""
    kinds = {p.dtype for p in network.parameters()} if isinstance(network, nn.Module) else set()
    return torch.float64 if kinds == {torch.float64} else torch.float32


def usable(device: torch.device | str, dtype: torch.dtype = torch.float32, precision: str = "fp32") -> torch.device:
    """The device, if it can be used on this machine, with this dtype and precision; raises otherwise."""
    try:
        actual = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise EvclError(f"device {str(device)!r} cannot be used here: {str(error).splitlines()[0]}") from None
    if limited(actual) and dtype == torch.float64:
        raise EvclError(f"device {actual.type!r} has no float64: use dtype=torch.float32, or device='cpu'")
    if limited(actual) and precision == "bf16":
        raise EvclError(f"device {actual.type!r} trains in float32 only: use precision='fp32', or device='cpu'")
    return actual
