"""Streams of texts for a pretrained transformer: news by topic, and mails by month.

A text is the numbers of its first MAX_PIECES pieces (see `evcl.nn.minilm_tokeniser`). The trunk is MiniLM with LoRA of
rank 8. Of texts with the same pieces, the first is kept; 80% of every class and month are to train and 20% to
test. The split is fixed.
"""

from __future__ import annotations

import email
import email.policy
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from html import unescape
from pathlib import Path

import torch
from torch import Tensor, nn

from evcl._core.randomness import Purpose, generator
from evcl._core.tasks import Examples, Task
from evcl.benchmarks.benchmark import Benchmark, Request, entry, parted
from evcl.data import load_texts
from evcl.nn import LoRA, minilm, minilm_tokeniser

MAX_PIECES = 64  # of a text
LORA_RANK = 8
TOPICS = ("business", "entertainment", "politics", "sports", "tech")
HAM, SPAM, FIRST_SPAM = 0, 1, 3  # labels, and the first group of spam among the groups of the data set
MONTHS = {  # the last month of each task's mails; before August 2002, most months have spam only
    "until July 2002": (2002, 7),
    "August 2002": (2002, 8),
    "September 2002": (2002, 9),
    "October to December 2002": (2002, 12),
}
MONTH_NAMES = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
DELIVERY_DATE = re.compile(r"^(?:From \S+|Delivery-Date:) +\w{3} +(\w{3}) +\d+ [\d:]+ (\d{4})", re.MULTILINE)
MOST_CHARACTERS = 20 * MAX_PIECES  # of a mail's text
Parts = tuple[Examples, Examples]  # train, test


def minilm_lora() -> nn.Module:
    """MiniLM with LoRA of rank 8 for the query and value projections."""
    return LoRA(rank=LORA_RANK)(minilm())


class Topics(Benchmark):
    """One question per topic, "this topic or not". In the scenario `class` there is one topic per task instead. A head
    of one class would be none, so it has all topics from the start.
    """

    def _of(self, tasks: Sequence[Task]) -> Benchmark:
        return Topics(self.name, tasks, network=self.network, seed=self.seed)

    def in_scenario(self, scenario: str) -> Benchmark:
        if scenario != "class":
            return super().in_scenario(scenario)
        numbers = tuple(TOPICS.index(task.name) for task in self)
        tasks = [replace(_alone(task), head=self[0].name, classes=numbers) for task in self]
        return Benchmark(self.name, tasks, network=self.network, seed=self.seed)


def _alone(task: Task) -> Task:
    """The rows of the task's topic, with the topic's number as their label."""
    number = TOPICS.index(task.name)

    def own(part: Examples) -> Examples:
        rows = part.select((part.labels == 1).nonzero().flatten())
        return replace(rows, labels=torch.full_like(rows.labels, number))

    validation = None if task.validation is None else own(task.validation)
    return Task(task.name, task.name, (number,), own(task.train), own(task.test), validation)


def _bbc(request: Request) -> Benchmark:
    parts = _bbc_parts(request.data_dir)
    tasks = []
    for k, topic in enumerate(TOPICS[: request.tasks]):
        train, test = (_question(part, k, name) for part, name in zip(parts, ("train", "test"), strict=True))
        tasks.append(Task(topic, topic, (0, 1), train, test))
    return Topics("bbc-topics", tasks, network=minilm_lora, seed=request.seed)


def _question(part: Examples, topic: int, name: str) -> Examples:
    """The texts of a topic, with the label 1, and as many others, drawn from all other topics, with the label 0."""
    own = (part.labels == topic).nonzero().flatten()
    others = (part.labels != topic).nonzero().flatten()
    order = torch.randperm(len(others), generator=generator(0, Purpose.BBC.of(name), topic))
    rows = torch.cat([own, others[order[: len(own)]]]).sort().values
    return replace(part.select(rows), labels=(part.labels[rows] == topic).long())


@cache
def _bbc_parts(data_dir: Path | None) -> Parts:
    texts, labels = load_texts("bbc", data_dir)
    x, rows = _distinct(_pieces(texts, data_dir))
    return parted(Examples(x, torch.from_numpy(labels).long()[rows]), round(0.2 * len(x)), Purpose.BBC)


def _mails(request: Request) -> Benchmark:
    first = next(iter(MONTHS))
    tasks = [
        Task(name, first, (HAM, SPAM), train, test)
        for name, (train, test) in list(_mail_parts(request.data_dir).items())[: request.tasks]
    ]
    return Benchmark("mails", tasks, network=minilm_lora, seed=request.seed)


@cache
def _mail_parts(data_dir: Path | None) -> dict[str, Parts]:
    """The mails of each task. Those without a date of delivery are left out."""
    texts, groups = load_texts("spam-assassin", data_dir)
    dated = [(month(text), text, int(group >= FIRST_SPAM)) for text, group in zip(texts, groups.tolist(), strict=True)]
    kept = sorted(((when, i) for i, (when, _, _) in enumerate(dated) if when is not None))
    x, rows = _distinct(_pieces([readable(dated[i][1]) for _, i in kept], data_dir))
    tasks, start = {}, (0, 0)
    for k, (name, end) in enumerate(MONTHS.items()):
        own = [row for row, i in enumerate(rows.tolist()) if start < kept[i][0] <= end]
        labels = torch.tensor([dated[kept[int(rows[row])][1]][2] for row in own])
        tasks[name] = parted(Examples(x[own], labels), round(0.2 * len(own)), Purpose.MAILS.of(k))
        start = end
    return tasks


def month(mail: str) -> tuple[int, int] | None:
    """The year and month in which a mail was delivered, from its headers; None if they do not say."""
    match = DELIVERY_DATE.search(mail.partition("\n\n")[0])
    return None if match is None or match[1] not in MONTH_NAMES else (int(match[2]), MONTH_NAMES.index(match[1]) + 1)


def readable(mail: str) -> str:
    """A mail's subject and text. The other headers would say how it was collected."""
    message = email.message_from_string(mail, policy=email.policy.compat32)
    text = ""
    for kind in ("text/plain", "text/html"):
        part = next((one for one in message.walk() if one.get_content_type() == kind), None)
        if part is not None:
            content = part.get_payload(decode=True)
            text = content.decode("latin-1") if isinstance(content, bytes) else str(part.get_payload())
            break
    if "<" in text:
        text = unescape(re.sub(r"<[^>]*>", " ", text[: 10 * MOST_CHARACTERS]))
    return f"{message.get('Subject', '')}\n{text[:MOST_CHARACTERS]}"


def _pieces(texts: Sequence[str], data_dir: Path | None) -> Tensor:
    return minilm_tokeniser(data_dir)(texts, MAX_PIECES)


def _distinct(x: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that equal no earlier row, and their numbers."""
    first: dict[bytes, int] = {}
    for i, row in enumerate(x.numpy()):
        first.setdefault(row.tobytes(), i)
    rows = torch.tensor(list(first.values()))
    return x[rows], rows


ENTRIES = (
    entry("bbc-topics", _bbc, 5, "has one topic per task"),
    entry("mails", _mails, len(MONTHS), "are spam or not in every task"),
)
