"""A penalty in a Trainer of Hugging Face."""

from __future__ import annotations

import random

import pytest
import torch
from others import needed
from torch.utils.data import Dataset

import evcl
from evcl.integrations import Penalty

needed("accelerate")
needed("transformers")
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments  # noqa: E402

from evcl.integrations.transformers import PenaltyCallback  # noqa: E402


class Sentences(Dataset):
    """A word of the sentence says its class; which word says which class differs from task to task."""

    def __init__(self, task, count=96):
        source, self.rows = random.Random(task), []
        for _ in range(count):
            label = source.randrange(2)
            ids = [source.randrange(10, 40) for _ in range(source.randrange(4, 9))]
            ids[source.randrange(len(ids))] = 2 + (label + task) % 2
            self.rows.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": label})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    length = max(len(row["input_ids"]) for row in rows)
    padded = {
        name: torch.tensor([row[name] + [0] * (length - len(row[name])) for row in rows])
        for name in ("input_ids", "attention_mask")
    }
    return {**padded, "labels": torch.tensor([row["labels"] for row in rows])}


def bert():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(vocab_size=40, num_labels=2, **sizes, **off))


def trained(folder, model, callback, tasks=(0, 1), **options):
    arguments = TrainingArguments(
        str(folder), num_train_epochs=3, per_device_train_batch_size=16, learning_rate=2e-3, report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=True, **options,
    )  # fmt: skip
    weights = []
    for task in tasks:
        callbacks = [] if callback is None else [callback]
        Trainer(model, arguments, train_dataset=Sentences(task), data_collator=collate, callbacks=callbacks).train()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return weights


def test_the_callback_holds_the_weights_of_the_first_task(tmp_path):
    moved = []
    for strength in (None, 10.0, 1e5):
        callback = None if strength is None else PenaltyCallback("ewc", strength=strength)
        first, second = trained(tmp_path, bert(), callback)
        moved.append(float((second - first).norm()))
        if callback is not None:
            assert callback.penalty.tasks == 2
            assert float(callback.value) > 0
    assert moved[2] < 0.97 * moved[1] < 0.97 * moved[0]


def test_it_is_the_loss_with_the_term_in_it(tmp_path):
    """The callback adds the gradient of the terms; a trainer with the terms in its loss takes the same steps."""

    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return super().compute_loss(model, inputs) + penalty()

    one, other = bert(), bert()
    first, second = trained(tmp_path, one, PenaltyCallback("ewc", strength=100.0), max_grad_norm=0.0)
    penalty = Penalty(other, "ewc", strength=100.0)
    arguments = TrainingArguments(
        str(tmp_path), num_train_epochs=3, per_device_train_batch_size=16, learning_rate=2e-3, report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=True, max_grad_norm=0.0,
    )  # fmt: skip
    for task, wanted in enumerate((first, second)):
        data = Sentences(task)
        with penalty.task(data):
            Own(other, arguments, train_dataset=data, data_collator=collate).train()
        found = torch.cat([p.detach().flatten() for p in other.parameters()])
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=2e-4)


def test_evcl_trains_gaussian_weights(tmp_path):
    model, callback = bert(), PenaltyCallback("evcl", prior="network")
    trained(tmp_path, model, callback)
    plain = callback.penalty.plain().eval()
    assert list(plain.state_dict()) == list(bert().state_dict())
    batch = collate(Sentences(1).rows)
    batch.pop("labels")
    with torch.no_grad():
        model.eval()
        torch.testing.assert_close(plain(**batch).logits, model(**batch).logits)
    stds = [p for name, p in model.named_parameters() if name.endswith("log_std")]
    assert len(stds) == len(list(plain.parameters()))
    assert any(float((std - std.flatten()[0]).abs().max()) > 0 for std in stds)  # they were trained


def test_mistakes_are_one_clear_line(tmp_path):
    callback = PenaltyCallback("evcl")
    with pytest.raises(evcl.EvclError, match="use weight_decay=0"):
        trained(tmp_path, bert(), callback, tasks=(0,), weight_decay=0.1)
    with pytest.raises(evcl.EvclError, match="belongs to another model"):
        trained(tmp_path, bert(), callback, tasks=(0,))
