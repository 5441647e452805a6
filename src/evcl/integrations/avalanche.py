"""Avalanche: its benchmarks as evcl's and the reverse, a plugin for its strategies, and a strategy that is a learner.

- `from_avalanche(benchmark)` and `to_avalanche(benchmark)` convert benchmarks.
- `PenaltyPlugin("ewc")` adds a method's terms to the loss of any SGD strategy of Avalanche.
- `LearnerStrategy(learner)` hands each experience to an evcl learner, which trains in its own loop, and reports its
  predictions through Avalanche's metrics and loggers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from evcl._core.errors import EvclError, extra
from evcl.benchmarks import Benchmark, Examples, from_stream
from evcl.benchmarks.own import HIDDEN
from evcl.integrations.penalty import Penalty
from evcl.learner import Learner

with extra("avalanche", "evcl.integrations.avalanche needs avalanche-lib"):
    from avalanche.benchmarks import (
        benchmark_from_datasets,
        task_incremental_benchmark,
        with_classes_timeline,
    )
    from avalanche.benchmarks.utils import as_classification_dataset
    from avalanche.models import MultiTaskModule
    from avalanche.training.plugins import SupervisedPlugin
    from avalanche.training.plugins.evaluation import default_evaluator
    from avalanche.training.templates import SupervisedTemplate

if TYPE_CHECKING:
    from avalanche.benchmarks import CLExperience, CLScenario
    from avalanche.training.plugins import EvaluationPlugin

__all__ = ["LearnerStrategy", "PenaltyPlugin", "from_avalanche", "to_avalanche"]


# --- benchmarks ------------------------------------------------------------------------------------------------------


def from_avalanche(
    benchmark: CLScenario,
    *,
    scenario: str | None = None,
    names: Sequence[str] | None = None,
    hidden: Sequence[int] = HIDDEN,
) -> Benchmark:
    """The train and test streams of an Avalanche benchmark as an evcl benchmark, read into memory.

    The tasks are named after the experiences' numbers. `scenario` is `task`, `domain` or `class`. None: `task` if each
    experience has a task label of its own; otherwise `domain` if all experiences have the same classes, else `class`.
    """
    train, test = benchmark.streams["train"], benchmark.streams["test"]
    if scenario is None:
        tasks = [_task_label(experience) for experience in train]
        scenario = "task" if len(tasks) > 1 and len(set(tasks)) == len(tasks) else None
    sets = [[e.dataset.train() for e in train], [e.dataset.eval() for e in test]]
    return from_stream(*sets, scenario=scenario, names=names, hidden=hidden)


def to_avalanche(benchmark: Benchmark) -> CLScenario:
    """An evcl benchmark as an Avalanche benchmark with the streams `train` and `test`, and `valid` if it has
    validation data.

    Labels stay as they are. Tasks that have their own heads get task labels 0, 1, ...; tasks that share a head share a
    label, and the label is left out if there is one head only. Images are converted to numbers when they are read.
    """
    heads = list(dict.fromkeys(task.head for task in benchmark))
    streams = {"train": [task.train for task in benchmark], "test": [task.test for task in benchmark]}
    held = [task.validation for task in benchmark if task.validation is not None]
    if len(held) == len(benchmark):
        streams["valid"] = held
    scenario = benchmark_from_datasets(
        **{name: [as_classification_dataset(_Rows(part)) for part in parts] for name, parts in streams.items()}
    )
    if len(heads) > 1:
        if len(heads) < len(benchmark):
            raise EvclError("some tasks share a head and others do not, which an Avalanche benchmark cannot express")
        scenario = task_incremental_benchmark(scenario)
    scenario = with_classes_timeline(scenario)
    for stream in scenario.streams.values():
        for experience in stream:  # a set, which Avalanche's own MultiHeadClassifier cannot use as an index
            experience.classes_in_this_experience = sorted(experience.classes_in_this_experience)
    return scenario


class _Rows(Dataset[tuple[Tensor, int]]):
    def __init__(self, examples: Examples) -> None:
        self.examples, self.targets = examples, examples.y.tolist()

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.examples.select(torch.tensor([int(i)])).x[0], self.targets[i]


def _task_label(experience: CLExperience) -> int:
    """The task label of an experience; 0 if its benchmark has none."""
    labels = sorted(set(getattr(experience, "task_labels", None) or [0]))
    if len(labels) > 1:
        raise EvclError(f"an experience has the task labels {labels}, but one task is learned at a time")
    return int(labels[0])


# --- a plugin for Avalanche's own strategies -------------------------------------------------------------------------


class PenaltyPlugin(SupervisedPlugin):
    """Adds the terms of a method such as `ewc`, `mas`, `vcl` or `evcl` to the loss of an SGD strategy.

        strategy = Naive(model=model, optimizer=optimizer, criterion=CrossEntropyLoss(), train_mb_size=64,
                         train_epochs=10, plugins=[PenaltyPlugin("ewc", strength=10)])

    The options are those of `evcl.integrations.Penalty`. With a Bayesian method, the model's weights become Gaussian
    when training begins, and Avalanche's optimizer takes up their standard deviations. The model may grow, as an
    `IncrementalClassifier` does, with methods of point weights only.
    """

    def __init__(self, method: str = "ewc", **options: Any) -> None:
        super().__init__()
        self.method, self.options = method, options
        self.penalty: Penalty | None = None  # created when training begins, for the strategy's model

    def before_training(self, strategy: SupervisedTemplate, **kwargs: object) -> None:
        if self.penalty is None:
            model = strategy.model
            several = isinstance(model, MultiTaskModule)
            self.penalty = Penalty(_OneTask(model) if several else model, self.method, **self.options)

    def before_training_exp(self, strategy: SupervisedTemplate, **kwargs: object) -> None:
        assert self.penalty is not None
        if isinstance(self.penalty.module, _OneTask):
            self.penalty.module.task = _task_label(strategy.experience)
        self.penalty.begin(strategy.experience.dataset.eval())  # what the task is measured on is not augmented

    def before_backward(self, strategy: SupervisedTemplate, **kwargs: object) -> None:
        assert self.penalty is not None
        strategy.loss += self.penalty()

    def after_training_exp(self, strategy: SupervisedTemplate, **kwargs: object) -> None:
        assert self.penalty is not None
        self.penalty.end()


class _OneTask(nn.Module):
    """A module that takes task labels, as one that does not: with the label `task`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.task = module, 0

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.module(x, self.task)
        return outputs


# --- a strategy that is an evcl learner ------------------------------------------------------------------------------


class LearnerStrategy(SupervisedTemplate):
    """An Avalanche strategy that hands each experience to an evcl learner.

    The learner trains in its own loop, with its own settings (epochs, batch size, rate), so that all of evcl's methods
    can be used. Avalanche's evaluation works as with any strategy: `strategy.eval(stream)`, its metrics, its loggers.
    Metrics of training batches and epochs have nothing to report. The outputs are log-probabilities; the column is the
    label.

    Experiences with the same task label share a head, which grows with their classes; without task labels, there is one
    head. A task label that has not been learned yet gets uniform predictions. `options` are those of `Learner.learn`,
    such as {"reread": True}.
    """

    def __init__(
        self,
        learner: Learner,
        *,
        eval_mb_size: int = 256,
        plugins: Sequence[SupervisedPlugin] | None = None,
        evaluator: EvaluationPlugin = default_evaluator,
        eval_every: int = -1,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        device = learner.state.run.network.posterior.mean.device
        super().__init__(
            model=nn.Identity(),  # the learner has the weights
            optimizer=None,
            eval_mb_size=eval_mb_size,
            device=device,
            plugins=plugins,
            evaluator=evaluator,
            eval_every=eval_every,
            peval_mode="experience",
        )
        self.learner, self.options = learner, dict(options or {})
        self.heads: dict[int, str] = {}  # task label -> the last task with it

    def check_model_and_optimizer(self, **kwargs: object) -> None:
        """There is no optimizer: the learner has its own."""

    def _train_exp(self, experience: CLExperience, eval_streams: object = None, **kwargs: object) -> None:
        label = _task_label(experience)
        name = f"experience {len(self.learner.tasks)}"
        head = self.heads.get(label, "new")
        self.learner.learn(self.adapted_dataset, task=name, head=head, **self.options)
        self.heads[label] = name

    def forward(self) -> Tensor:
        """[B, labels]: log-probabilities of the present mini-batch."""
        x, y = self.mb_x, self.mb_y
        labels = self.mb_task_id if hasattr(self.experience, "task_labels") else torch.zeros_like(y)
        names = {label: self.heads.get(label) for label in labels.unique().tolist()}
        known = [c for name in names.values() if name is not None for c in self.learner.classes(name)]
        outputs: Tensor = x.new_zeros(len(x), 1 + max([int(y.max()), *map(int, known)]), dtype=torch.float32)
        for label, name in names.items():
            if name is not None:
                rows = (labels == label).nonzero().flatten()
                columns = torch.tensor([int(c) for c in self.learner.classes(name)], device=x.device)
                p = self.learner.predict_proba(x[rows], task=name).to(outputs)
                outputs[rows.unsqueeze(1), columns] = p
                outputs[rows] = outputs[rows].clamp_min(torch.finfo(outputs.dtype).tiny).log()
        return outputs
