"""laplace-torch, PEFT and Continuum beside this library, on one core: what each has in common with it, and its time.

    python perf/peers_others.py                  # measure everything, and write the tables of docs/comparison.md
    python perf/peers_others.py laplace peft     # measure these again
    python perf/peers_others.py table            # only write the tables, from perf/results/peers_others.json

laplace: a posterior that becomes the next task's prior, as in `peers_methods.py`: the same network, initial weights,
batches and epochs, and Adam at the same rate. Each strength is the best of five on validation data with other seeds,
and the precision of laplace-torch's first prior the best of three. peft: LoRA on a BERT of two layers, on three tasks
that share a head. continuum: split MNIST, from the files to batches; Continuum learns nothing. Times are of the CPU,
one thread.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

import evcl
from evcl._core.files import write_atomically
from evcl.benchmarks import Benchmark
from evcl.experiments.compare import between
from evcl.experiments.run import environment
from peers_methods import (
    BATCH,
    GRID,
    LR,
    OTHER_SEEDS,
    STREAMS,
    Ended,
    Train,
    accuracy,
    epochs,
    layer,
    made,
    ours,
    steps,
)

HERE = Path(__file__).resolve().parent
RESULTS, DOCUMENT = HERE / "results" / "peers_others.json", HERE.parent / "docs" / "comparison.md"
SEEDS = range(3)
PRIORS = (1.0, 1e-2, 1e-4)  # precisions of laplace-torch's first prior
Rows = list[dict[str, Any]]  # of a table: the library, the method, and lists of numbers, one per seed


# laplace-torch


def laplace_s(structure: str, prior: float) -> Train:
    """Training with the penalty -log p(weights) of laplace-torch's posterior, which takes in one task after another."""

    def train(tasks: Benchmark, seed: int, strength: float) -> Ended:
        from laplace import Laplace
        from laplace.curvature.backpack import BackPackGGN  # the default took far longer in a first try

        torch.manual_seed(seed)  # the order of the batches
        run = made("naive", tasks, seed, 0.0)
        network = nn.Sequential(nn.Flatten(), layer(run, "1"), nn.ReLU(), layer(run, "head 0"))
        la: Any = Laplace(network, "classification", "all", structure, prior_precision=prior, backend=BackPackGGN)
        taken = 0.0
        for k, task in enumerate(tasks):
            (x, y), start = task.train, time.process_time()
            optimizer = torch.optim.Adam(network.parameters(), LR)
            network.train()
            for _ in range(epochs(tasks)):
                for rows in torch.randperm(len(x)).split(BATCH):
                    weights = parameters_to_vector(network.parameters())
                    pull = -la.log_prob(weights, normalized=False) if k else prior * weights.square().sum() / 2
                    loss = F.cross_entropy(network(x[rows]), y[rows]) + strength * pull / len(x)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            la.fit(DataLoader(TensorDataset(x, y), 256), override=k == 0)
            taken += time.process_time() - start
        correct = [la(task.held_out.x).argmax(1) == task.held_out.y for task in tasks]
        return Ended(accuracy(correct), taken / steps(tasks), la.mean.detach())

    return train


def measure_laplace() -> Rows:
    tasks = evcl.benchmarks.get("permuted-digits", tasks=STREAMS["permuted-digits"][0])
    held, found = tasks.hold_out(0.2), []
    for library, method, unit, trains in (
        ("evcl", "`ewc`: diagonal", 1.0, [ours("ewc")]),
        ("evcl", "`kfac-ewc`: Kronecker factors", 1.0, [ours("kfac-ewc")]),
        ("evcl", "`evcl`: diagonal, Gaussian weights", 1.0, [ours("evcl")]),
        ("laplace-torch", "diagonal", 10.0, [laplace_s("diag", prior) for prior in PRIORS]),
        ("laplace-torch", "Kronecker factors", 10.0, [laplace_s("kron", prior) for prior in PRIORS]),
    ):
        trials = list(itertools.product(range(len(trains)), (unit * one for one in GRID)))
        scores = [fmean(trains[k](held, seed, s).accuracy for seed in OTHER_SEEDS) for k, s in trials]
        k, strength = trials[scores.index(max(scores))]
        ends = [trains[k](tasks, seed, strength) for seed in SEEDS]
        numbers = {"accuracy": [one.accuracy for one in ends], "ms": [1e3 * one.seconds for one in ends]}
        found.append({"library": library, "method": method, "strength": strength, "prior": k, **numbers})
    return found


# PEFT

WORDS, LENGTH, RANK, TEXTS = 12, 10, 4, 512  # words of each of the three tasks, words per text


def base(seed: int) -> Any:
    """The small BERT that the tests use, with random weights; LoRA leaves them as they are."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(seed)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(vocab_size=40, max_position_embeddings=16, **shape, **still))


def texts(task: int, part: int) -> tuple[Tensor, Tensor]:
    """Token numbers, most of them from one half of the task's own words: from which half is the label."""
    source, half = torch.Generator().manual_seed(1000 * (part + 1) + task), WORDS // 2
    y = torch.randint(2, (TEXTS, 1), generator=source)
    side = torch.where(torch.rand(TEXTS, LENGTH, generator=source) < 0.8, y, 1 - y)
    return 1 + WORDS * task + half * side + torch.randint(half, (TEXTS, LENGTH), generator=source), y[:, 0]


def fine_tune(seed: int) -> tuple[float, float]:
    """Plain training of PEFT's adapters and the classifier, one task after another: accuracy, seconds per step."""
    from peft import LoraConfig, TaskType, get_peft_model

    model = get_peft_model(base(seed), LoraConfig(TaskType.SEQ_CLS, r=RANK, target_modules=["query", "value"]))
    taken, torch_steps = 0.0, 0
    for task in range(3):
        x, y = texts(task, 0)
        start = time.process_time()
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], LR)
        for _ in range(10):
            for rows in torch.randperm(len(x)).split(BATCH):
                loss = F.cross_entropy(model(input_ids=x[rows]).logits, y[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                torch_steps += 1
        taken += time.process_time() - start
    with torch.no_grad():
        tests = [texts(task, 1) for task in range(3)]
        return accuracy([model(input_ids=x).logits.argmax(1) == y for x, y in tests]), taken / torch_steps


def adapters_of(method: str) -> Callable[[int], tuple[float, float]]:
    def train(seed: int) -> tuple[float, float]:
        how: dict[str, Any] = {"epochs": 10, "batch_size": BATCH, "lr": LR, "lr_schedule": "constant", "seed": seed}
        learner = evcl.Learner(base(seed), method, adapters=evcl.nn.LoRA(rank=RANK), **how)
        taken = 0.0
        for task in range(3):
            x, y = texts(task, 0)
            start = time.process_time()
            learner.learn({"input_ids": x}, y, head=0 if task else "new")
            taken += time.process_time() - start
        tests = [texts(task, 1) for task in range(3)]
        correct = [torch.as_tensor(learner.predict({"input_ids": x})) == y for x, y in tests]
        return accuracy(correct), taken / (3 * 10 * -(-TEXTS // BATCH))

    return train


def measure_peft() -> Rows:
    found = []
    for library, method, train in (
        ("PEFT", "fine-tuning", fine_tune),
        ("evcl", "`naive`", adapters_of("naive")),
        ("evcl", "`evcl`", adapters_of("evcl")),
    ):
        ends = [train(seed) for seed in SEEDS]
        accuracies, seconds = zip(*ends, strict=True)
        found.append({"library": library, "method": method, "accuracy": accuracies, "ms": [1e3 * s for s in seconds]})
    return found


# Continuum


def write_idx(folder: Path) -> None:
    """MNIST's files in the form in which torchvision, which Continuum reads them with, expects them."""
    raw, found = folder / "MNIST" / "raw", evcl.data.load("mnist")
    raw.mkdir(parents=True)
    for name, values in {
        "train-images-idx3": found.train_images, "train-labels-idx1": found.train_labels,
        "t10k-images-idx3": found.test_images, "t10k-labels-idx1": found.test_labels,
    }.items():  # fmt: skip
        head = np.array([0x800 + values.ndim, *values.shape], ">i4").tobytes()
        (raw / f"{name}-ubyte").write_bytes(head + values.astype(np.uint8).tobytes())


def measure_continuum() -> Rows:
    from continuum import ClassIncremental
    from continuum.datasets import MNIST

    rows: Rows = [{"library": name, "stream": [], "epoch": []} for name in ("evcl", "Continuum")]
    with tempfile.TemporaryDirectory() as folder:
        write_idx(Path(folder))
        for seed in (-1, *SEEDS):  # the first round is not counted: both then find their files in memory
            torch.manual_seed(seed + 1)
            start = time.process_time()
            stream = evcl.benchmarks.get("split-mnist")
            middle, total = time.process_time(), 0.0
            for task in stream:
                x, y = task.train
                for some in torch.randperm(len(x)).split(BATCH):
                    one, _ = x[some], y[some]
                    total += float(one.sum())
            ends = [(middle - start, time.process_time() - middle)]
            start = time.process_time()
            both = [
                ClassIncremental(MNIST(folder, train=train, download=False), increment=2) for train in (True, False)
            ]
            middle, theirs = time.process_time(), 0.0
            for task_set in both[0]:
                for one, _, _ in DataLoader(task_set, BATCH, shuffle=True):
                    theirs += float(one.sum())
            ends.append((middle - start, time.process_time() - middle))
            assert abs(total / theirs - 1) < 1e-4, f"the two streams differ: {total}, {theirs}"
            for row, (made_in, read_in) in zip(rows, ends, strict=True):
                if seed >= 0:
                    row["stream"].append(made_in)
                    row["epoch"].append(read_in)
    return rows


# Tables


def spread(numbers: list[float], digits: int) -> str:
    return f"{fmean(numbers):.{digits}f} ± {stdev(numbers):.{digits}f}"


def tables(saved: dict[str, Any]) -> dict[str, str]:
    """The tables of the document, by name."""
    found = {}
    for name, head in (("laplace", "| library | penalty |"), ("peft", "| library | method |")):
        lines = [f"{head} accuracy | ms per step |", "|---|---|---:|---:|"]
        for row in saved[name]["rows"]:
            cells = (row["library"], row["method"], spread(row["accuracy"], 1), spread(row["ms"], 2))
            lines.append(f"| {' | '.join(cells)} |")
        found[name] = "\n".join(lines)
    lines = ["| library | files to tasks, s | an epoch of batches, s |", "|---|---:|---:|"]
    for row in saved["continuum"]["rows"]:
        lines.append(f"| {row['library']} | {spread(row['stream'], 2)} | {spread(row['epoch'], 2)} |")
    found["continuum"] = "\n".join(lines)
    return {name: f"{table}\n\n{saved[name]['where']}." for name, table in found.items()}


def filled(text: str, saved: dict[str, Any]) -> str:
    """The document with these tables, each between `<!-- NAME -->` and `<!-- end NAME -->`."""
    for name, table in tables(saved).items():
        text = between(text, name, table)
    return text


MEASURES: dict[str, tuple[Callable[[], Rows], tuple[str, ...]]] = {
    "laplace": (measure_laplace, ("laplace-torch", "backpack-for-pytorch")),
    "peft": (measure_peft, ("peft", "transformers")),
    "continuum": (measure_continuum, ("continuum", "torchvision")),
}


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    sys.modules.setdefault("torchvision._meta_registrations", ModuleType("left out: see peers_methods.py"))
    warnings.simplefilter("ignore")  # from the other libraries
    saved = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    for name in names or MEASURES:
        if name == "table":
            continue
        measure, packages = MEASURES[name]
        rows, machine = measure(), environment("cpu")
        used = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)
        where = f"{used}, torch {machine.torch}; one thread of an {machine.device}"
        where += f"; seeds 0 to {SEEDS[-1]}, mean ± deviation"
        saved[name] = {"where": where, "rows": rows}
        text = json.dumps(saved, indent=1) + "\n"
        write_atomically(RESULTS, lambda path, text=text: path.write_text(text, "utf-8"))  # type: ignore[misc]
    text = filled(DOCUMENT.read_text("utf-8"), saved)
    write_atomically(DOCUMENT, lambda path: path.write_text(text, "utf-8"))


if __name__ == "__main__":
    main(sys.argv[1:])
