"""The streams of texts, on texts and a vocabulary that the test makes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import evcl
from evcl._core.errors import EvclError
from evcl.benchmarks import texts
from evcl.data.wordpiece import WordPiece

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"{kind}{k}" for kind in "abcde" for k in range(60))]
MAIL = "From me@here.org  Thu {month} 22 12:36:23 {year}\nSubject: {subject}\nX-Spam: yes\n\n{body}\n"


def mail(i, month, year, spam):
    return MAIL.format(month=month, year=year, subject=f"{'ab'[spam]}{i % 60}", body=f"<b>{'ab'[spam]}{i // 60}</b>")


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    def load(name, data_dir=None, offline=None):
        if name == "bbc":
            some = [f"{kind}{k} {kind}{k + 1}" for kind in "abcde" for k in range(50)]
            labels = np.repeat(np.arange(5, dtype=np.uint8), 50)
            return [*some, some[0]], np.append(labels, 0).astype(np.uint8)  # the last is a copy
        months = [("Jun", 2002), ("Jul", 2002), ("Aug", 2002), ("Sep", 2002), ("Oct", 2002), ("Dec", 2002)]
        rows = [(mail(20 * m + i, *when, spam), 3 * spam) for m, when in enumerate(months) for i in range(20)
                for spam in (0, 1)]  # fmt: skip
        rows.append(("Subject: no date\n\nb1", 3))
        return [text for text, _ in rows], np.array([label for _, label in rows], np.uint8)

    monkeypatch.setattr(texts, "load_texts", load)
    monkeypatch.setattr(texts, "minilm_tokeniser", lambda data_dir=None: WordPiece(WORDS))
    for cached in (texts._bbc_parts, texts._mail_parts):
        cached.cache_clear()
    yield
    for cached in (texts._bbc_parts, texts._mail_parts):
        cached.cache_clear()


def rows(part):
    return {row.tobytes() for row in part.x.numpy()}


def test_a_question_per_topic_has_as_many_texts_of_other_topics():
    stream = evcl.benchmarks.get("bbc-topics")
    assert [task.name for task in stream] == list(texts.TOPICS)
    for task in stream:
        assert task.head == task.name
        assert task.classes == (0, 1)
        assert task.train.labels.bincount().tolist() == [40, 40]
        assert task.test.labels.bincount().tolist() == [10, 10]
    train = set().union(*(rows(task.train) for task in stream))
    test = set().union(*(rows(task.test) for task in stream))
    assert not train & test
    assert len(train | test) == 250
    others = stream[0].train.x[stream[0].train.labels == 0]
    assert len({WORDS[int(row[1])][0] for row in others}) == 4  # negatives from all topics


def test_in_the_scenario_class_every_task_is_a_topic():
    stream = evcl.benchmarks.get("bbc-topics", scenario="class", validation=0.2)
    for k, task in enumerate(stream):
        assert task.head == "business"
        assert task.classes == (0, 1, 2, 3, 4)
        assert set(task.train.labels.tolist()) == set(task.test.labels.tolist()) == {k}
        assert (len(task.train), len(task.validation), len(task.test)) == (32, 8, 10)
    assert {task.head for task in evcl.benchmarks.get("bbc-topics", scenario="domain")} == {"business"}
    apart = evcl.benchmarks.get("bbc-topics", scenario="task", tasks=2)
    assert [task.head for task in apart] == ["business", "entertainment"]
    with pytest.raises(EvclError, match="leave classes out"):
        evcl.benchmarks.get("bbc-topics", classes=[[0, 1]])


def test_mails_come_month_by_month_without_their_headers():
    stream = evcl.benchmarks.get("mails")
    assert [task.name for task in stream] == list(texts.MONTHS)
    assert [len(task.train) + len(task.test) for task in stream] == [80, 40, 40, 80]
    for task in stream:
        assert task.head == "until July 2002"
        assert set(task.train.labels.tolist()) == {0, 1}
        firsts = {int(y): {WORDS[int(row[1])][0] for row in task.train.x[task.train.labels == y]} for y in (0, 1)}
        assert firsts == {0: {"a"}, 1: {"b"}}
    with pytest.raises(EvclError, match="leave classes out"):
        evcl.benchmarks.get("mails", classes=[[0, 1]])


def test_what_is_read_of_a_mail():
    assert texts.month(mail(0, "Aug", 2002, 0)) == (2002, 8)
    assert texts.month("Delivery-Date: Thu Sep  5 23:42:38 2002\n\nbody") == (2002, 9)
    assert texts.month("Subject: x\n\nFrom me@here.org  Thu Aug 22 12:36:23 2002") is None
    html = "Subject: Buy\nContent-Type: text/html\n\n<p>now &amp; here</p>"
    assert texts.readable(html).split() == ["Buy", "now", "&", "here"]
    coded = "Subject: x\nContent-Transfer-Encoding: base64\nContent-Type: text/plain\n\naGVsbG8=\n"
    assert texts.readable(coded).split() == ["x", "hello"]
    assert texts.readable("").strip() == ""


def test_a_small_network_learns_the_stream(monkeypatch):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = evcl.nn.Bert(vocabulary=len(WORDS), width=16, layers=1, heads=2, inner=16, positions=64)
    learner = evcl.EVCL(network, adapters=evcl.nn.LoRA(rank=2), epochs=2)
    stream = evcl.benchmarks.get("bbc-topics", tasks=2)
    for task in stream:
        learner.learn(task)
    assert learner.evaluate(stream).keys() == {"business", "entertainment"}
