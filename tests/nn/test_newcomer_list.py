"""What a newcomer tries first with a network and data of their own: each works, or is refused with what to do."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pandas
import polars
import pytest
import torch
import torch.nn.functional as F
from models import Net, saved
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import evcl

FIXTURES = Path(__file__).parent.parent / "fixtures"


pytestmark = pytest.mark.usefixtures("torch_draws")


def rows(n=40):
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long()


def words(n=40):
    source, y = torch.Generator().manual_seed(0), torch.arange(n) % 2
    return torch.randint(1, 5, (n, 5), generator=source) + 4 * y.unsqueeze(1), y


X, Y = rows()


def learner_of(method="naive", network=None, **options):
    return evcl.Learner(network or evcl.nn.mlp(3, [8]), method, **{"epochs": 2, **options})


# --- networks --------------------------------------------------------------------------------------------------------


def last(m, x):
    return m.reads(m.words(x))[0][:, -1]


def stepwise(m, x):
    h = torch.zeros(len(x), 4)
    for one in m.words(x).unbind(1):
        h = m.reads(one, h)
    return h


@pytest.mark.parametrize("method", ["evcl", "ewc", "naive"])
@pytest.mark.parametrize(
    ("run", "reads"),
    [
        (last, lambda: nn.LSTM(4, 4, batch_first=True)),
        (last, lambda: nn.GRU(4, 4, batch_first=True)),
        (stepwise, lambda: nn.GRUCell(4, 4)),
    ],
)
def test_recurrent_networks(run, reads, method):
    learner = learner_of(method, Net(run, words=nn.Embedding(9, 4), reads=reads()), epochs=15, lr=0.05)
    x, y = words()
    learner.learn((x, y))
    assert learner.measure((x, y)).accuracy > 0.8


@pytest.mark.parametrize("method", ["evcl", "ewc", "naive"])
def test_parameters_of_every_kind(method):
    """A scalar parameter, a matrix used by a function, weight norm, spectral norm, and LoRA beside a frozen layer."""

    def run(m, x):
        h = m.spectral(torch.relu(m.share * m.normed(torch.relu(F.linear(x, m.w)))))
        return torch.relu(m.base(h) + F.linear(F.linear(h, m.down), m.up))

    own = {
        "share": torch.tensor(0.5),
        "w": torch.randn(8, 3) / 2,
        "down": torch.randn(2, 8) / 3,
        "up": torch.zeros(8, 2),
    }
    norms = nn.utils.parametrizations
    layers = {"normed": norms.weight_norm(nn.Linear(8, 8)), "spectral": norms.spectral_norm(nn.Linear(8, 8))}
    network = Net(run, **own, **layers, base=nn.Linear(8, 8).requires_grad_(False))
    learner = learner_of(method, network)
    learner.learn(X, Y)
    names = {name for name, p in network.named_parameters() if p.requires_grad}
    assert set(learner.state.run.network.trunk_names) == names


class Several(Net):
    """Its output is what `run` makes of the features."""

    def __init__(self, run):
        super().__init__(run, words=nn.Embedding(9, 4))

    def forward(self, input_ids, attention_mask):
        there = attention_mask.unsqueeze(2)
        return self.run((self.words(input_ids) * there).sum(1) / there.sum(1))


@pytest.mark.parametrize(
    ("form", "output"), [(lambda h: h, None), (lambda h: (h, None), 0), (lambda h: {"features": h}, "features")]
)
def test_two_inputs_and_every_form_of_output(form, output):
    x, y = words()
    learner = learner_of("evcl", Several(form), output=output)
    mask = torch.ones_like(x)
    learner.learn(((x, mask), y))
    assert learner.predict({"input_ids": x, "attention_mask": mask}).shape == (40,)


def test_a_network_in_float64_stays_in_float64(tmp_path):
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh()).double()
    learner = learner_of("evcl", network)
    learner.learn(X.double(), Y)
    assert learner.predict_proba(X).dtype == torch.float64
    saved(learner, tmp_path, X, network)
    assert learner_of(network=network, dtype=torch.float32).state.run.network.posterior.mean.dtype == torch.float32
    mixed = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4).double())
    assert learner_of(network=mixed).state.run.network.posterior.mean.dtype == torch.float32


def test_a_file_from_before_lstms_learned_keeps_its_lstm_fixed(tmp_path):
    """It was saved with unsupported="deterministic" at commit 0ca757a, where an LSTM had no form."""

    def run(m, x):
        return m.out(m.lstm(m.words(x))[1][0][-1])

    layers = {"words": nn.Embedding(9, 4), "lstm": nn.LSTM(4, 4, batch_first=True), "out": nn.Linear(4, 4)}
    network = Net(run, **layers)
    learner = evcl.load(FIXTURES / "deterministic_lstm.safetensors", network)
    source = torch.Generator().manual_seed(0)
    for p in network.parameters():
        torch.empty_like(p).normal_(generator=source)
    x = torch.randint(1, 9, (20, 5), generator=source)
    wanted = [0.6925531625747681, 0.2832271456718445, 0.38371366262435913, 0.666711151599884]
    assert learner.predict_proba(x[:4])[:, 0].tolist() == pytest.approx(wanted, abs=1e-6)
    learner.learn((x, torch.arange(20) % 2), task="more", epochs=1)
    assert not any("lstm" in name for name in learner.state.run.network.trunk_names)
    saved(learner, tmp_path, x, network, "more")


# --- data ------------------------------------------------------------------------------------------------------------


class Duck:
    """A data set that is no torch Dataset."""

    def __len__(self):
        return len(Y)

    def __getitem__(self, i):
        return X[i], int(Y[i])


class Dicts(Dataset):
    def __len__(self):
        return len(Y)

    def __getitem__(self, i):
        return {"pixel_values": X[i], "label": int(Y[i]), "path": f"{i}.png"}


FRAME = pandas.DataFrame({"a": X[:, 0].numpy(), "b": X[:, 1].numpy(), "c": X[:, 2].numpy() > 0})
NULLABLE = FRAME.assign(c=pandas.array([1, 2] * 20, dtype="Int64"))
POLARS = polars.DataFrame({name: FRAME[name].to_numpy() for name in FRAME})
GOOD = {
    "learn(x, y)": (X, Y),
    "a frame with truth values": (FRAME, Y),
    "a frame and a series": (FRAME, pandas.Series(Y.numpy())),
    "a frame of nullable integers": (NULLABLE, Y),
    "labels as a category": (FRAME, pandas.Series(["no", "yes"] * 20, dtype="category")),
    "polars": (POLARS, polars.Series(Y.numpy())),
    "labels [N, 1]": (X, Y[:, None]),
    "a frame of labels": (X, pandas.DataFrame({"y": Y.numpy()})),
    "a frame with its labels": (FRAME.assign(label=Y.numpy()),),
    "a polars frame with its labels": (POLARS.with_columns(label=polars.Series(Y.numpy())),),
    "lists": (X.tolist(), Y.tolist()),
    "bfloat16": (X.bfloat16(), Y),
    "uint8": ((X * 10).clamp(0).byte(), Y),
    "batches of labels [n, 1]": ([(X[:20], Y[:20, None]), (X[20:], Y[20:, None])],),
    "a data set with labels [1]": (TensorDataset(X, Y[:, None]),),
    "a loader": (DataLoader(TensorDataset(X, Y), 10),),
    "a data set that is no torch Dataset": (Duck(),),
    "a data set of dicts": (Dicts(),),
    "a dict": ({"x": X, "label": Y},),
}


@pytest.mark.parametrize("how", GOOD)
def test_data_of_every_kind(how):
    learner = learner_of()
    learner.learn(*GOOD[how])
    assert sum(one["examples"] for one in learner.card()["tasks"]) == 40


def test_the_column_of_labels_is_named():
    learner = learner_of()
    learner.learn(FRAME.assign(sold=Y.numpy()), label="sold")
    again = learner_of()
    again.learn(FRAME, Y)
    assert torch.equal(learner.state.run.network.posterior.mean, again.state.run.network.posterior.mean)
    assert learner.predict(FRAME).shape == (40,)


def test_inputs_of_one_column():
    learner = learner_of(network=evcl.nn.mlp(1, [4]))
    learner.learn(X[:, :1], Y)
    assert learner.predict(X[:, :1]).shape == (40,)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((X[:, 0], Y), r"inputs must have shape \[examples, ...\].*pass x\[None\]"),
        ((X, torch.stack([Y, Y], 1)), r"labels must have shape \[examples\], one class per example, not \(40, 2\)"),
        ((X, Y.double()), "classes are integers or strings.*astype"),
        ((FRAME.assign(city="Rome"), Y), "encode text and categories first"),
        ((FRAME,), "there is no column 'label' or 'labels' among a, b, c: name the column"),
    ],
)
def test_data_that_is_refused_says_what_to_do(data, message):
    with pytest.raises(evcl.EvclError, match=message):
        learner_of().learn(*data)


def test_augmentation_anew_each_epoch():
    class Augmented(Duck, Dataset):
        def __getitem__(self, i):
            return X[i] + torch.randn(3), int(Y[i])

    learner = learner_of()
    learner.learn(DataLoader(Augmented(), 10), reread=True)
    assert learner.predict(X).shape == (40,)


def test_own_data_is_measured_in_one_call_and_evaluate_says_so():
    learner = learner_of()
    learner.learn(X, Y)
    assert 0 <= learner.measure((X, Y)).ece <= 1
    with pytest.raises(evcl.EvclError, match=r"use measure\(\(x, y\)\)"):
        learner.evaluate((X, Y))


def test_a_task_is_printed_by_its_sizes():
    task = evcl.benchmarks.get("split-digits")[0]
    assert len(str(task)) < 300
    assert "Examples(inputs [" in str(task)


def test_float64_arrays_and_a_plain_network_raise_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learner_of().learn(X.double().numpy(), np.asarray(Y))
