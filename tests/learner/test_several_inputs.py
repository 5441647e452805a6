"""Networks of several inputs and outputs: packed into one tensor, and taken apart again before the network."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
import torch
from checks import quietly, refused, run_of, same
from torch import nn
from torch.utils.data import DataLoader, Dataset

import evcl
from evcl._core.forms import Form, widened
from evcl.curvature import Sample, fisher
from evcl.learner.packing import EXACT, pack
from evcl.nn.inputs import Call
from evcl.training import TaskData


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 8), nn.Linear(3, 8), nn.Linear(16, 8)

    def forward(self, u, v):
        return self.c(torch.cat([self.a(u), self.b(v)], 1).tanh()).tanh()


class Whole(Two):
    """`Two` on one tensor that has both inputs side by side."""

    def forward(self, x):
        return super().forward(x[:, :5], x[:, 5:])


class Reader(nn.Module):
    """The mean embedding of the words that the mask keeps."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(30, 8, padding_idx=0), nn.Linear(8, 8)

    def forward(self, ids, mask=None):
        assert ids.dtype == torch.int64
        assert mask.dtype == torch.bool
        there = mask.unsqueeze(2).to(self.out.weight.dtype if hasattr(self.out, "weight") else torch.float32)
        return self.out((self.words(ids) * there).sum(1) / there.sum(1)).tanh()


Y = torch.arange(40) % 2
U, V = normal(40, 5) + Y[:, None], normal(40, 3, seed=1) - Y[:, None]


def two(method="evcl", **options):
    return evcl.Learner(quietly(Two), method, **{"epochs": 10, "batch_size": 10, **options})


def sentences(n=40, seed=0):
    """Lists of words of different lengths; those of class 1 are the larger numbers."""
    source = np.random.default_rng(seed)
    y = np.arange(n) % 2
    return [(source.integers(1, 15, source.integers(2, 9)) + 15 * c).tolist() for c in y], y


# --- packing -------------------------------------------------------------------------------------------------------


def test_what_is_packed_comes_out_again_with_its_shapes_and_types():
    given = {
        "image": normal(4, 2, 3, 3),
        "ids": torch.randint(0, 9, (4, 6), generator=torch.Generator().manual_seed(0)),
        "mask": torch.ones(4, 6, dtype=torch.bool),
        "features": normal(4, 6, 2),
        "count": torch.arange(4),
    }
    x, form = pack(given, pads={"ids": 7})
    assert x.dtype == torch.float32
    assert x.shape == (4, 18 + 1 + 6 * 4)
    args, named = form.unpack(x)
    assert not args
    assert {name: (t.dtype, t.shape) for name, t in named.items()} == {n: (t.dtype, t.shape) for n, t in given.items()}
    assert all(torch.equal(named[name], given[name]) for name in given)
    assert Form.from_description(form.described()) == form


def test_longer_sequences_have_zeros_at_the_end_and_these_are_padding():
    x, form = pack([[[5, 2, 3], [4, 1]]], pads={0: 9})
    (ids,), _ = form.unpack(widened(x, 5))
    assert ids.tolist() == [[5, 2, 3, 9, 9], [4, 1, 9, 9, 9]]


def test_integers_that_a_float_cannot_hold_are_refused():
    largest = EXACT[torch.float32]
    x, form = pack({"ids": torch.tensor([[largest, 0], [1, 2]])})
    assert form.unpack(x)[1]["ids"].tolist() == [[largest, 0], [1, 2]]
    with refused("exact only up to 16,777,216: make the learner with dtype=torch.float64"):
        pack({"ids": torch.tensor([[largest + 1, 0]])})
    x, form = pack({"ids": torch.tensor([[largest + 1, 0]])}, dtype=torch.float64)
    assert int(form.unpack(x)[1]["ids"][0, 0]) == largest + 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"u": U, "v": V[:39]}, "the same number of examples, but input 'u' has 40, input 'v' has 39"),
        ({"u": U}, "input 'v' is missing"),
        ({"u": U, "v": V, "w": V}, "input 'w' is not among them"),
        ({"u": U[:, :4], "v": V}, "input 'u': an example had the shape (5,) at first, but now an example has (4,)"),
        ({"u": U.double() * torch.nan, "v": V}, "input 'u' has NaN or infinity (first in example 0)"),
        ({"u": np.array([["a"] * 5] * 40), "v": V}, "input 'u' must be numbers"),
        ({"u": U, "v": torch.tensor(3.0)}, "input 'v' is empty or a single number"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_in_one_line(given, message):
    _, form = pack({"u": U, "v": V})
    with refused(message):
        pack(given, form)


@pytest.mark.parametrize("damage", [None, [], [[0, "text", [3], False, 0]], [["a", "int", [-1], True, 0]], [[1] * 5]])
def test_a_damaged_form_is_refused(damage):
    with pytest.raises(evcl.EvclError, match="the form of its inputs cannot be read"):
        Form.from_description(damage)


# --- learning ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["evcl", "ewc", "vcl", "naive", "er", "kfac-evcl"])
def test_two_inputs_are_learned_as_the_same_network_learns_them_from_one(method):
    """The means, the Fisher and the memory are those of a network that takes both inputs in one tensor."""
    whole = evcl.Learner(quietly(Whole), method, epochs=4, batch_size=10)
    learner = two(method, epochs=4)
    for k in range(2):
        whole.learn((torch.cat([U, V], 1) + k, Y))
        learner.learn(((U + k, V + k), Y))
    ours, theirs = learner.state.run.tensors(), whole.state.run.tensors()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-6)
    x = torch.cat([U, V], 1)
    torch.testing.assert_close(learner.predict_proba((U, V), task=0), whole.predict_proba(x, task=0))
    found, wanted = learner.predictions((U, V), task=1), whole.predictions(x, task=1)
    torch.testing.assert_close(found.unfamiliar, wanted.unfamiliar)


@pytest.mark.parametrize("method", ["evcl", "naive"])
def test_replicas_beside_each_other_learn_as_alone(method):
    x, form = pack({"u": U, "v": V}, dtype=torch.float64)
    data = TaskData(x.unsqueeze(0), Y.unsqueeze(0), 0)

    def learned(seeds):
        call = Call()
        call.form = form
        run = run_of(method, quietly(Two), two(method).settings, seeds, dtype=torch.float64, call=call)
        run.add_head(run.features(x[:1]), 2)
        run.learn([data], 3)
        return run.network.posterior.mean

    together = learned([0, 1, 2])
    for r in range(3):
        torch.testing.assert_close(together[r : r + 1], learned([r]), rtol=1e-9, atol=1e-12)


def test_the_fisher_of_packed_inputs_is_that_of_single_examples():
    learner = two("ewc", dtype=torch.float64)
    learner.learn(((U, V), Y))
    network, mean = learner.state.run.network, learner.state.run.network.posterior.mean
    x, _ = pack({"u": U, "v": V}, network.call.form, torch.float64)
    found = fisher(Sample(network, mean, network.layout, [0], x.unsqueeze(0), Y.unsqueeze(0)), "empirical")
    total = torch.zeros_like(found)
    plain = learner.mean_network().double()
    for i in range(len(Y)):
        loss = nn.functional.cross_entropy(plain(U[i : i + 1].double(), V[i : i + 1].double()), Y[i : i + 1])
        grads = torch.autograd.grad(loss, list(plain.parameters()))
        total += torch.cat([g.flatten() for g in grads]).square()
    torch.testing.assert_close(found, total / len(Y))


class Duck:
    """A data set of rows that is no torch Dataset."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class Rows(Duck, Dataset):
    """The same, as torch has it."""


ROWS = [{"v": v, "u": u, "label": int(c), "text": "words"} for u, v, c in zip(U, V, Y, strict=True)]


@pytest.mark.parametrize(
    "data",
    [
        ((U, V), Y),
        ([U, V], Y),
        (U, V, Y),
        ({"v": V.numpy(), "u": U.tolist()}, Y.tolist()),
        {"u": U, "v": V, "labels": Y},
        OrderedDict(label=Y, v=V, u=U),
        Rows(list(zip(U, V, Y, strict=True))),
        Rows([((u, v), int(c)) for u, v, c in zip(U, V, Y, strict=True)]),
        Rows([({"u": u, "v": v}, c) for u, v, c in zip(U, V, Y, strict=True)]),
        Rows(ROWS),
        Duck(ROWS),
        ROWS,
        DataLoader(Rows(list(zip(U, V, Y, strict=True))), 7, generator=torch.Generator()),
        DataLoader(Rows(ROWS), 7, generator=torch.Generator()),
        [{"u": U[:25], "v": V[:25], "labels": Y[:25]}, {"u": U[25:], "v": V[25:], "labels": Y[25:]}],
    ],
    ids=range(15),
)
def test_every_form_of_the_same_data_is_learned_alike(data):
    wanted, learner = two(epochs=2), two(epochs=2)
    wanted.learn((U, V), Y)
    learner.learn(data)
    assert same(learner, wanted)
    assert learner.measure(data) == wanted.measure(((U, V), Y))
    for x in ((U, V), {"u": U, "v": V}, {"v": V, "u": U, "label": Y}):
        assert torch.equal(learner.predict_proba(x), wanted.predict_proba((U, V)))
        assert isinstance(learner.predict(x), torch.Tensor)
    assert isinstance(learner.predict_proba({"u": U.numpy(), "v": V.numpy()}), np.ndarray)


def test_the_column_of_labels_can_be_named():
    learner = two(epochs=2)
    with pytest.raises(evcl.EvclError, match=r"no column 'label' or 'labels' among u, v, topic: name the column"):
        learner.learn({"u": U, "v": V, "topic": Y})
    assert learner.state.run.network.call.form is None
    learner.learn({"u": U, "v": V, "topic": ["a", "b"] * 20}, label="topic")
    assert learner.classes() == ("a", "b")
    named = {"u": U, "v": V, "topic": ["a", "b"] * 20}
    assert learner.measure(named, label="topic") == learner.measure(((U, V), ["a", "b"] * 20))


def test_columns_that_the_network_does_not_take_are_left_out_and_named():
    learner = two(epochs=1)
    with pytest.warns(UserWarning, match="the network takes no input called number, so it is left out"):
        learner.learn({"u": U, "v": V, "number": torch.arange(40), "text": ["words"] * 40, "label": Y})
    learner.predict({"u": U, "v": V, "number": torch.arange(40)})


def test_a_dict_with_one_input_is_that_input():
    x = normal(20, 4)
    learner = evcl.EVCL(evcl.nn.mlp(4, [8]), epochs=1)
    learner.learn({"pixel_values": x, "label": Y[:20]})
    assert learner.state.run.network.call.form is None
    assert torch.equal(learner.predict_proba({"pixel_values": x}), learner.predict_proba(x))


def test_items_of_a_stream_have_their_task_as_the_third_part():
    x = normal(20, 4)
    whole, learner = (evcl.EVCL(evcl.nn.mlp(4, [8]), epochs=2) for _ in range(2))
    whole.learn((x, Y[:20]))
    learner.learn(Rows([(a, int(c), 3) for a, c in zip(x, Y, strict=False)]))
    rows = Rows([(a, int(c), 4) for a, c in zip(x, Y, strict=False)])
    learner.learn(DataLoader(rows, 8, generator=torch.Generator()))
    assert learner.measure((x, Y[:20], torch.full((20,), 4)), task=0) == learner.measure((x, Y[:20]), task=0)
    assert learner.history["0"] == whole.history["0"]
    with pytest.raises(evcl.EvclError, match=r"its task, but these are several \(0, 1\): learn one at a time"):
        learner.learn(Rows([(a, int(c), i % 2) for i, (a, c) in enumerate(zip(x, Y, strict=False))]))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (U, "the network was trained with input 'u', input 'v': pass all of them, as a tuple or a dict"),
        ({"u": U}, "input 'v' is missing"),
        ({"a": U, "b": V}, "but input 'u' is missing"),
        ((U, V[:3]), "the same number of examples"),
        ((V, U), "input 'u': an example had the shape (5,)"),
    ],
)
def test_other_inputs_than_those_learned_are_refused_in_one_line(x, message):
    learner = two(epochs=1)
    learner.learn((U, V), Y)
    with refused(message):
        learner.predict(x)


def test_a_failed_first_task_decides_nothing():
    learner, array = two(epochs=1), evcl.EVCL(quietly(Whole), epochs=1)
    with refused("the network does not take 'u' [40, 3], 'v' [40, 5]"):
        learner.learn((V, U), Y)
    assert learner.state.run.network.call.form is None
    learner.learn((U, V), Y)
    array.learn((torch.cat([U, V], 1), Y))
    with pytest.raises(evcl.EvclError):  # it takes one array
        array.predict({"u": U, "v": V})


def test_only_and_skip_and_files_use_the_networks_own_names(tmp_path):
    learner = two(epochs=2, only="c")
    learner.learn((U, V), Y)
    assert learner.state.run.network.trunk_names == ("c.weight", "c.bias")
    plain = learner.mean_network()
    assert [name for name, _ in plain.named_parameters()][:2] == ["0.a.weight", "0.a.bias"]
    torch.testing.assert_close(plain(U, V), plain(v=V, u=U))
    learner.save(tmp_path / "model.safetensors")
    loaded = evcl.load(tmp_path / "model.safetensors", quietly(Two))
    assert loaded.state.run.network.call.form == learner.state.run.network.call.form
    assert torch.equal(loaded.predict_proba({"u": U, "v": V}), learner.predict_proba((U, V)))


@pytest.mark.parametrize("method", ["progressive", "progress-compress"])
def test_a_method_that_copies_layers_takes_one_input_only(method):
    with pytest.raises(evcl.EvclError, match="takes networks of one input only"):
        two(method).learn((U, V), Y)


# --- sequences of different lengths ----------------------------------------------------------------------------------


def reader(method="evcl", **options):
    return evcl.Learner(quietly(Reader), method, **{"epochs": 12, "batch_size": 10, "lr": 0.05, **options})


@pytest.mark.parametrize("method", ["evcl", "er", "ewc"])
def test_sequences_of_different_lengths_are_padded_and_masked(method, tmp_path):
    """Kept examples, a new task with longer sequences, predictions of shorter ones, and a file."""
    learner = reader(method, **({"memory": 20} if method == "er" else {}))
    for k in range(3):
        x, y = sentences(seed=k)
        learner.learn((x if k != 2 else [[*one, *one] for one in x], y))
    x, y = sentences(seed=9)
    assert learner.measure((x, y), task=0).accuracy > 0.9
    one = learner.predict_proba([x[0]], task=0)  # alone, without padding
    assert one == pytest.approx(learner.predict_proba(x, task=0)[:1], abs=1e-6)
    rows = torch.nn.utils.rnn.pad_sequence([torch.tensor(one) for one in x], True)
    named = {"ids": rows, "mask": rows > 0}
    assert learner.predict_proba(named, task=0).numpy() == pytest.approx(learner.predict_proba(x, task=0), abs=1e-6)
    learner.save(tmp_path / "model.safetensors")
    again = evcl.load(tmp_path / "model.safetensors", quietly(Reader))
    assert np.array_equal(again.predict_proba(x, task=0), learner.predict_proba(x, task=0))
    for each in (learner, again):
        each.learn((x[:20], y[:20]), task="more")
    assert same(learner, again)


def test_batches_may_have_different_lengths():
    x, y = sentences()

    def collate(items):
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(one) for one, _ in items], True)
        return {"ids": ids, "mask": ids > 0, "labels": torch.tensor([c for _, c in items])}

    items = Rows(list(zip(x, y, strict=True)))
    learner, whole = reader(epochs=2), reader(epochs=2)
    learner.learn(DataLoader(items, 5, collate_fn=collate, generator=torch.Generator()))
    whole.learn((x, y))
    items.items = [(torch.tensor(a), c) for a, c in items.items]
    alike = reader(epochs=2)
    alike.learn(items)
    assert same(whole, learner, alike)


def test_validation_may_be_longer():
    learner = reader(epochs=2)
    x, y = sentences()
    learner.learn((x, y), validation=([[*one, *one] for one in x], y), patience=2)
    assert learner.history["0"][-1].validation_nll is not None


def test_an_input_that_is_no_sequence_must_not_have_the_same_length():
    _, form = pack({"ids": torch.ones(2, 4, dtype=torch.long), "kind": torch.ones(2, 4, dtype=torch.long)})
    with pytest.raises(evcl.EvclError, match="one length in common so far, but input 'ids' has 5, input 'kind' has 4"):
        pack({"ids": torch.ones(2, 5, dtype=torch.long), "kind": torch.ones(2, 4, dtype=torch.long)}, form)


# --- outputs -------------------------------------------------------------------------------------------------------


class Outputs(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.body, self.form = nn.Linear(4, 8), form

    def forward(self, x, attention_mask=None):
        h = self.body(x).tanh()
        return self.form(h)


class Said:
    def __init__(self, **values):
        vars(self).update(values)


X4 = normal(20, 4) + Y[:20, None]


@pytest.mark.parametrize(
    ("form", "output"),
    [
        (lambda h: (h, 2 * h), 0),
        (lambda h: (2 * h, [h]), lambda found: found[1][0]),
        (lambda h: {"a": 2 * h, "b": h}, "b"),
        (lambda h: {"pooler_output": h, "last_hidden_state": h}, None),
        (lambda h: Said(pooler_output=None, last_hidden_state=torch.stack([h - 1, h + 1], 1)), None),
        (lambda h: Said(logits=h, loss=None), None),
        (lambda h: Said(states=h), "states"),
    ],
)
def test_an_output_is_chosen(tmp_path, form, output):
    plain = evcl.EVCL(quietly(lambda: Outputs(lambda h: h)), epochs=2)
    learner = evcl.EVCL(quietly(lambda: Outputs(form)), epochs=2, output=output)
    for one in (plain, learner):
        one.learn((X4, Y[:20]))
    torch.testing.assert_close(learner.state.run.network.posterior.mean, plain.state.run.network.posterior.mean)
    torch.testing.assert_close(learner.mean_network()(X4), plain.mean_network()(X4))
    learner.save(tmp_path / "model.safetensors")
    network = quietly(lambda: Outputs(form))
    if callable(output):
        with pytest.raises(evcl.EvclError, match="its output is a function, which is not in the file: pass it"):
            evcl.load(tmp_path / "model.safetensors", network)
    loaded = evcl.load(tmp_path / "model.safetensors", network, output=output if callable(output) else None)
    torch.testing.assert_close(loaded.predict_proba(X4), learner.predict_proba(X4))


@pytest.mark.parametrize(
    ("form", "output", "message"),
    [
        (lambda h: (h, h), None, "not a tuple of 2: choose one of its outputs, output=NAME or output=0"),
        (lambda h: (h, h), 2, "output=2: the network returns a tuple of 2"),
        (lambda h: {"a": h}, "b", "output='b': the network returns a dict with a"),
        (lambda h: {"a": h}, None, "not a dict with a: choose"),
        (lambda h: h, 1.5, "output must be a name, a number or a function, not 1.5"),
    ],
)
def test_an_output_that_is_not_there_is_refused(form, output, message):
    with refused(message):
        evcl.EVCL(quietly(lambda: Outputs(form)), epochs=1, output=output).learn((X4, Y[:20]))


# --- other processes -----------------------------------------------------------------------------------------------
