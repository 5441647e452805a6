"""EWC and synaptic intelligence (SI) of Avalanche beside those of this library, on one core: accuracy and time.

Both train the same network on the same tasks, from the same initial weights, with Adam (reset for each task) at the
same constant rate, and as many epochs of batches of the same size. Each strength is the best of five on validation
data, with other seeds. The time is that of learning, including the measurement of importance.

On a CPU, Avalanche's SI does not copy the weights that it wants to remember, and so finds that no weight ever moves.
The program therefore also compares its final weights with those of plain training, and has a row "copied": the same
code with copies.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean, median, stdev
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evcl
from evcl._core.settings import resolve
from evcl.benchmarks import Benchmark, Examples, Task
from evcl.methods import METHODS
from evcl.training import Run, TaskData

STREAMS = {"permuted-digits": (4, 5), "split-digits": (5, 10)}  # number of tasks, and of epochs of each
HIDDEN, BATCH, LR = 100, 64, 0.01
SEEDS, OTHER_SEEDS = range(5), range(100, 102)  # for the table; to choose the strengths
GRID = (0.1, 0.3, 1.0, 3.0, 10.0)  # times a method's unit; all units were found good in a wider search


@dataclass(frozen=True)
class Ended:
    """The accuracy on all tasks after the last one, seconds of CPU time per step, and the weights."""

    accuracy: float
    seconds: float
    weights: Tensor


Train = Callable[[Benchmark, int, float], Ended]  # the tasks, a seed, a strength


def labels(examples: Examples, task: Task) -> Tensor:
    """Positions of the labels among the task's classes."""
    return torch.searchsorted(torch.tensor(task.classes), examples.y)


def heads(tasks: Benchmark) -> list[int]:
    """The number of each task's head."""
    names = list(dict.fromkeys(task.head for task in tasks))
    return [names.index(task.head) for task in tasks]


def accuracy(correct: list[Tensor]) -> float:
    return 100 * fmean(float(one.double().mean()) for one in correct)


def epochs(tasks: Benchmark) -> int:
    return STREAMS[tasks.name][1]


def steps(tasks: Benchmark) -> int:
    return epochs(tasks) * sum(-(-len(task.train) // BATCH) for task in tasks)


def made(method: str, tasks: Benchmark, seed: int, strength: float) -> Run:
    known = METHODS[method].known_settings
    given = {"epochs": epochs(tasks), "batch_size": BATCH, "lr": LR, "lr_schedule": "constant", "strength": strength}
    settings = resolve(method, known, {name: value for name, value in given.items() if name in known})
    run = Run(evcl.nn.mlp(tasks.inputs, [HIDDEN]), METHODS[method], [settings], [seed], draw=True)
    run.add_heads(HIDDEN, [len(tasks[0].classes)] * (1 + max(heads(tasks))))
    return run


def ours(method: str) -> Train:
    def train(tasks: Benchmark, seed: int, strength: float) -> Ended:
        run, taken = made(method, tasks, seed, strength), 0.0
        for k, (task, head) in enumerate(zip(tasks, heads(tasks), strict=True)):
            data = TaskData(task.train.x.unsqueeze(0), labels(task.train, task).unsqueeze(0), head, task=k)
            start = time.process_time()
            run.learn([data])
            taken += time.process_time() - start
        correct = []
        for k, (task, head) in enumerate(zip(tasks, heads(tasks), strict=True)):
            found = run.predict(task.held_out.x.unsqueeze(0), head, task=k)[0].argmax(1)
            correct.append(found == labels(task.held_out, task))
        return Ended(accuracy(correct), taken / steps(tasks), run.network.posterior.mean[0].clone())

    return train


def avalanche_s(plugin: Callable[[float], Any] | None) -> Train:
    """`plugin(strength)` makes the part of a strategy that protects earlier tasks; None: plain training."""

    def train(tasks: Benchmark, seed: int, strength: float) -> Ended:
        from avalanche.training.plugins import EvaluationPlugin
        from avalanche.training.templates import SupervisedTemplate

        torch.manual_seed(seed)  # the order of the batches
        network = network_of(made("naive", tasks, seed, 0.0), tasks)
        strategy = SupervisedTemplate(
            model=network,
            optimizer=torch.optim.Adam(network.parameters(), LR),
            criterion=nn.CrossEntropyLoss(),
            train_mb_size=BATCH,
            train_epochs=epochs(tasks),
            plugins=[] if plugin is None else [plugin(strength)],
            evaluator=EvaluationPlugin(),  # reports nothing
        )
        taken = 0.0
        for experience in experiences(tasks):
            start = time.process_time()
            strategy.train(experience, reset_optimizer_state=True)
            taken += time.process_time() - start
        network.eval()
        correct = []
        with torch.no_grad():
            for k, task in enumerate(tasks):
                found = network(task.held_out.x, *network.labels(k)).argmax(1)
                correct.append(found == labels(task.held_out, task))
        weights = torch.cat([w.detach().flatten() for w in network.parameters()])
        return Ended(accuracy(correct), taken / steps(tasks), weights)

    return train


def experiences(tasks: Benchmark) -> Any:
    """The tasks as Avalanche takes them, with their numbers."""
    from avalanche.benchmarks import benchmark_from_datasets, task_incremental_benchmark, with_classes_timeline
    from avalanche.benchmarks.utils import as_classification_dataset

    class Rows(TensorDataset):
        def __init__(self, task: Task) -> None:
            super().__init__(task.train.x, labels(task.train, task))
            self.targets = self.tensors[1].tolist()

    sets = [as_classification_dataset(Rows(task)) for task in tasks]
    return with_classes_timeline(task_incremental_benchmark(benchmark_from_datasets(train=sets))).streams["train"]


def layer(run: Run, name: str) -> nn.Linear:
    """A linear layer of the run's network, with its initial weights, in plain torch."""
    views = {part: view[0] for part, view in run.network.layout.views(run.network.posterior.mean).items()}
    outputs, inputs = views[f"{name}.weight"].shape
    found = nn.Linear(inputs, outputs)
    found.load_state_dict({part: views[f"{name}.{part}"].clone() for part in ("weight", "bias")})
    return found


def network_of(run: Run, tasks: Benchmark) -> Any:
    """The run's network, with its initial weights, as Avalanche's users write it: heads are chosen by the task."""
    from avalanche.models import MultiTaskModule

    class OneHead(nn.Sequential):
        def labels(self, task: int) -> tuple[int, ...]:
            return ()

    class Heads(MultiTaskModule):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Sequential(nn.Flatten(), layer(run, "1"), nn.ReLU())
            self.heads = nn.ModuleList(layer(run, f"head {k}") for k in heads(tasks))

        def forward_single_task(self, x: Tensor, task_label: int) -> Tensor:
            found: Tensor = self.heads[task_label](self.trunk(x))
            return found

        def labels(self, task: int) -> tuple[int, ...]:
            return (task,)

    return Heads() if max(heads(tasks)) else OneHead(nn.Flatten(), layer(run, "1"), nn.ReLU(), layer(run, "head 0"))


def ewc_plugin(strength: float) -> Any:
    from avalanche.training.plugins import EWCPlugin

    return EWCPlugin(strength, mode="online", decay_factor=1.0)


def si_plugin(strength: float) -> Any:
    from avalanche.training.plugins import SynapticIntelligencePlugin

    return SynapticIntelligencePlugin(strength)


@contextmanager
def copied_weights() -> Iterator[None]:
    """Within this context, Avalanche's SI remembers copies of the weights, as it does on a GPU."""
    from avalanche.training.plugins import SynapticIntelligencePlugin as Plugin

    original = Plugin.extract_weights

    def copied(model: Any, target: Any, excluded: Any) -> None:
        original(model, target, excluded)
        for one in target.values():
            one.data = one.data.clone()

    Plugin.extract_weights = staticmethod(copied)
    try:
        yield
    finally:
        Plugin.extract_weights = staticmethod(original)


def with_copies(train: Train) -> Train:
    def run(tasks: Benchmark, seed: int, strength: float) -> Ended:
        with copied_weights():
            return train(tasks, seed, strength)

    return run


def avalanche_version() -> str:
    """Import Avalanche and return its version.

    It imports torchvision, whose compiled part cannot be loaded beside a torch of another build. Nothing here uses that
    part, but torchvision then fails to describe it to torch, in a module of its own: this leaves that module out.
    """
    sys.modules.setdefault("torchvision._meta_registrations", ModuleType("torchvision._meta_registrations"))
    warnings.filterwarnings("ignore", message="No loggers specified")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from packages that it imports
        import avalanche

        found: str = avalanche.__version__
    return found


@dataclass(frozen=True)
class Row:
    package: str
    method: str
    train: Train
    unit: float | None = None  # of its strength; None: it has none


SI, COPIED = "si", "si, copied"
OURS = [
    Row("evcl", "naive", ours("naive")),
    Row("evcl", "ewc", ours("ewc"), 1.0),
    Row("evcl", SI, ours("si"), 1.0),
]
THEIRS = [
    Row("Avalanche", "naive", avalanche_s(None)),
    Row("Avalanche", "ewc", avalanche_s(ewc_plugin), 1000.0),
    Row("Avalanche", SI, avalanche_s(si_plugin), 100.0),
    Row("Avalanche", COPIED, with_copies(avalanche_s(si_plugin)), 100.0),
]


def chosen(row: Row, tasks: Benchmark) -> float:
    """The strength with the highest accuracy on validation data."""
    if row.unit is None:
        return 0.0
    held, found = tasks.hold_out(0.2), {}
    for strength in (row.unit * one for one in GRID):
        found[strength] = fmean(row.train(held, seed, strength).accuracy for seed in OTHER_SEEDS)
    return max(found, key=lambda one: found[one])


def table(name: str, rows: list[Row]) -> None:
    tasks = evcl.benchmarks.get(name, tasks=STREAMS[name][0])
    print(f"\n{name}, {len(tasks)} tasks, {epochs(tasks)} epochs each: {steps(tasks)} steps")
    strengths = [chosen(row, tasks) for row in rows]
    runs = [[row.train(tasks, seed, strength) for row, strength in zip(rows, strengths, strict=True)] for seed in SEEDS]
    print(f"{'library':<12}{'method':<14}{'strength':>9}{'accuracy':>15}{'CPU ms / step':>15}")
    ends = {(row.package, row.method): found for row, found in zip(rows, zip(*runs, strict=True), strict=True)}
    for row, strength in zip(rows, strengths, strict=True):
        found = ends[row.package, row.method]
        numbers, ms = [one.accuracy for one in found], 1e3 * median(one.seconds for one in found)
        spread, said = f"{fmean(numbers):.1f} ± {stdev(numbers):.1f}", "" if row.unit is None else f"{strength:g}"
        print(f"{row.package:<12}{row.method:<14}{said:>9}{spread:>15}{ms:>15.3f}")
    plain = ends.get(("Avalanche", "naive"))
    for method in (SI, COPIED) if plain else ():
        pairs = zip(ends["Avalanche", method], plain or (), strict=True)
        same = sum(torch.equal(one.weights, other.weights) for one, other in pairs)
        print(f"Avalanche's {method} ends with exactly the weights of its naive: {same} of {len(SEEDS)} seeds")


def main() -> None:
    torch.set_num_threads(1)
    rows = OURS
    try:
        print(f"Avalanche {avalanche_version()}, ", end="")
        rows = OURS + THEIRS
    except ImportError as error:
        print(f"Avalanche is left out, because it is not installed ({error})")
    print(f"torch {torch.__version__}, one thread; 64-{HIDDEN}, batch {BATCH}, Adam, lr {LR}")
    for name in STREAMS:
        table(name, rows)


if __name__ == "__main__":
    main()
