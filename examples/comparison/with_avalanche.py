"""EWC on three tasks, with Avalanche."""

import torch
from avalanche.benchmarks import benchmark_from_datasets
from avalanche.benchmarks.utils import as_classification_dataset
from avalanche.evaluation.metrics import accuracy_metrics
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.supervised import EWC
from digits import tasks
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def rows(x: Tensor, y: Tensor):  # type: ignore[no-untyped-def]
    data = TensorDataset(x, y)
    data.targets = y.tolist()  # type: ignore[attr-defined]
    return as_classification_dataset(data)


torch.manual_seed(0)
stream = tasks()
benchmark = benchmark_from_datasets(train=[rows(*one[:2]) for one in stream], test=[rows(*one[2:]) for one in stream])
model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
strategy = EWC(
    model=model,
    optimizer=torch.optim.Adam(model.parameters(), 1e-3),
    criterion=nn.CrossEntropyLoss(),
    ewc_lambda=1000,
    train_mb_size=64,
    train_epochs=20,
    evaluator=EvaluationPlugin(accuracy_metrics(experience=True), loggers=[]),
)
for experience in benchmark.train_stream:
    strategy.train(experience)
found = strategy.eval(benchmark.test_stream)
print([round(100 * accuracy) for accuracy in found.values()])
