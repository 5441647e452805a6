"""Avalanche's benchmarks, its strategies with a penalty, and a learner as a strategy."""

from __future__ import annotations

import pytest
import torch
from others import needed
from torch import nn
from torch.utils.data import TensorDataset

import evcl

needed("avalanche")
from avalanche.benchmarks import ni_benchmark  # noqa: E402
from avalanche.benchmarks.utils import as_classification_dataset  # noqa: E402
from avalanche.evaluation.metrics import accuracy_metrics, loss_metrics  # noqa: E402
from avalanche.models import IncrementalClassifier, MultiHeadClassifier, MultiTaskModule  # noqa: E402
from avalanche.training.plugins import EvaluationPlugin  # noqa: E402
from avalanche.training.supervised import Naive  # noqa: E402

from evcl.integrations.avalanche import LearnerStrategy, PenaltyPlugin, from_avalanche, to_avalanche  # noqa: E402

PERMUTED = evcl.benchmarks.get("permuted-digits", tasks=2)


def split(scenario):
    return evcl.benchmarks.get("split-digits", tasks=3, scenario=scenario)


def evaluator():
    return EvaluationPlugin(accuracy_metrics(experience=True, stream=True), loss_metrics(stream=True), loggers=[])


def accuracies(strategy, stream):
    found = strategy.eval(stream)
    return [value for name, value in found.items() if name.startswith("Top1_Acc_Exp")], found


def naive(model, plugins, epochs=5):
    adam = torch.optim.Adam(model.parameters(), 3e-3)
    options = {"train_mb_size": 64, "train_epochs": epochs, "eval_mb_size": 256, "evaluator": evaluator()}
    return Naive(model=model, optimizer=adam, criterion=nn.CrossEntropyLoss(), plugins=plugins, **options)


def flat(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


# --- benchmarks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", ["task", "class", "domain"])
def test_there_and_back_it_is_the_same_benchmark(scenario):
    benchmark = split(scenario)
    found = from_avalanche(to_avalanche(benchmark))
    names = [task.name for task in benchmark]
    for ours, task in zip(found, benchmark, strict=True):
        assert (names[[t.name for t in found].index(ours.head)], ours.classes) == (task.head, task.classes)
        for part in ("train", "test"):
            assert torch.equal(getattr(ours, part).x, getattr(task, part).x)
            assert torch.equal(getattr(ours, part).y, getattr(task, part).y)


def test_an_avalanche_benchmark_has_streams_labels_and_validation():
    made = to_avalanche(split("task").hold_out(0.2))
    assert sorted(made.streams) == ["test", "train", "valid"]
    assert [experience.task_labels for experience in made.train_stream] == [[0], [1], [2]]
    assert [experience.classes_in_this_experience for experience in made.train_stream] == [[0, 1], [2, 3], [4, 5]]
    x, y, task = made.train_stream[1].dataset[0]
    assert torch.equal(x, split("task").hold_out(0.2)[1].train.x[0])
    assert (int(y), int(task)) == (int(split("task").hold_out(0.2)[1].train.y[0]), 1)
    assert not hasattr(to_avalanche(PERMUTED).train_stream[0], "task_labels")


def test_avalanche_s_own_benchmarks_are_read():
    def data(part):
        made = TensorDataset(part.x, part.y)
        made.targets = part.y.tolist()
        return made

    made = ni_benchmark(
        data(PERMUTED[0].train), data(PERMUTED[0].test), n_experiences=3, balance_experiences=True, seed=1
    )
    found = from_avalanche(made)
    assert len(found) == 3
    assert {task.head for task in found} == {"task 0"}  # new instances: one head
    assert sum(len(task.train) for task in found) == len(PERMUTED[0].train)
    assert all(len(task.test) == len(PERMUTED[0].test) for task in found)  # one test set for all


# --- the plugin ------------------------------------------------------------------------------------------------------


def network(outputs=10):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 30), nn.ReLU(), nn.Linear(30, outputs))


@pytest.mark.parametrize("method", ["ewc", "evcl"])
def test_the_plugin_keeps_what_a_strategy_forgets(method):
    made, results = to_avalanche(PERMUTED), []
    for plugins in ([], [PenaltyPlugin(method)]):
        strategy = naive(network(), plugins, epochs=15)
        for experience in made.train_stream:
            strategy.train(experience)
        results.append(accuracies(strategy, made.test_stream)[0])
    assert results[1][0] > results[0][0] + 0.15
    assert results[1][1] > 0.6


def test_a_stronger_penalty_moves_the_weights_less():
    made, moved = to_avalanche(PERMUTED), []
    for strength in (0.0, 1.0, 100.0):
        model = network()
        strategy = naive(model, [PenaltyPlugin("ewc", strength=strength)])
        strategy.train(made.train_stream[0])
        first = flat(model)
        strategy.train(made.train_stream[1])
        moved.append(float((flat(model) - first).norm()))
    assert moved[2] < 0.97 * moved[1] < 0.97 * moved[0]


class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 30), nn.ReLU())
        self.classifier = IncrementalClassifier(30, masking=False)

    def forward(self, x):
        return self.classifier(self.trunk(x))


class Heads(MultiTaskModule):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 30), nn.ReLU())
        self.classifier = MultiHeadClassifier(30)

    def forward(self, x, task_labels):
        return self.classifier(self.trunk(x), task_labels)


@pytest.mark.parametrize(("scenario", "model"), [("class", Growing), ("task", Heads)])
def test_models_that_grow_with_the_stream(scenario, model):
    made, results = to_avalanche(split(scenario)), []
    for strength in (0.0, 100.0):
        torch.manual_seed(0)
        grown = model()
        plugin = PenaltyPlugin("ewc", strength=strength)
        strategy = naive(grown, [plugin])
        before = []
        for experience in made.train_stream:
            strategy.train(experience)
            before.append(grown.trunk[0].weight.detach().clone())
        assert plugin.penalty.tasks == 3
        results.append(float((before[2] - before[0]).norm()))
        assert plugin.penalty.memory.importance.shape[1] == flat(grown).numel()
        assert accuracies(strategy, made.test_stream)[0][2] > 0.8
    assert results[1] < 0.8 * results[0]


def test_a_gaussian_model_cannot_grow():
    made = to_avalanche(split("class"))
    strategy = naive(Growing(), [PenaltyPlugin("evcl")])
    strategy.train(made.train_stream[0])
    with pytest.raises(evcl.EvclError, match="give the module all its outputs at the start"):
        strategy.train(made.train_stream[1])


# --- the strategy ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", ["task", "class", "domain"])
def test_a_learner_as_a_strategy_reports_what_the_learner_measures(scenario):
    benchmark = split(scenario)
    made = to_avalanche(benchmark)
    learner = evcl.EVCL(evcl.nn.mlp(64, [30]), epochs=5)
    alone = evcl.EVCL(evcl.nn.mlp(64, [30]), epochs=5)
    strategy = LearnerStrategy(learner, evaluator=evaluator())
    first = strategy.train(made.train_stream[0])
    assert isinstance(first, dict)
    early, _ = accuracies(strategy, made.test_stream)  # later experiences too, which have not been learned
    assert early[0] > 0.9
    for experience in made.train_stream[1:]:
        strategy.train(experience)
    for k, task in enumerate(benchmark):
        shared = benchmark[0].head == benchmark[1].head and k
        alone.learn(tuple(task.train), task=task.name, head=benchmark[0].name if shared else "new")
    found, every = accuracies(strategy, made.test_stream)
    for accuracy, task in zip(found, benchmark, strict=True):
        assert accuracy == pytest.approx(alone.measure(tuple(task.test), task.name).accuracy)
    if scenario != "task":
        nll = sum(alone.measure(tuple(t.test), t.name).nll * len(t.test) for t in benchmark)
        loss = next(value for name, value in every.items() if name.startswith("Loss_Stream"))
        assert loss == pytest.approx(nll / sum(len(t.test) for t in benchmark), rel=1e-3)


def test_a_strategy_evaluates_as_it_goes_and_passes_options_on():
    made = to_avalanche(PERMUTED)
    strategy = LearnerStrategy(
        evcl.EWC(evcl.nn.mlp(64, [20])), evaluator=evaluator(), eval_every=0, options={"epochs": 1}
    )
    for experience in made.train_stream:
        strategy.train(experience, eval_streams=[made.test_stream])
    assert strategy.learner.tasks == ("experience 0", "experience 1")
    assert len(strategy.learner.history["experience 1"]) == 1
    seen = strategy.evaluator.get_all_metrics()
    steps, _ = next(values for name, values in seen.items() if name.startswith("Top1_Acc_Stream/eval_phase/test"))
    assert len(steps) >= 2


def test_an_experience_of_several_tasks_is_refused():
    data = TensorDataset(torch.randn(8, 3), torch.arange(8) % 2)
    data.targets = data.tensors[1].tolist()
    both = as_classification_dataset(data)

    class Mixed:
        task_labels = [0, 1]  # noqa: RUF012
        dataset = both

    strategy = LearnerStrategy(evcl.EWC(evcl.nn.mlp(3, [4])), evaluator=evaluator())
    with pytest.raises(evcl.EvclError, match=r"task labels \[0, 1\], but one task is learned at a time"):
        strategy._train_exp(Mixed())
