"""The Fisher against a loop over replicas, examples and classes: slow, obvious, in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import evcl
from evcl.curvature import Sample, fisher, sensitivity, spread_out
from evcl.nn import bayesianize, head, head_names
from evcl.nn.independence import check_examples_independent

F64 = torch.float64


class TwiceAndAlong(nn.Module):
    """A layer used twice, tied weights, and a linear layer along a sequence."""

    def __init__(self):
        super().__init__()
        self.token, self.tied = nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied.weight = self.token.weight

    def forward(self, x):
        h = self.token(x).tanh()
        return self.tied(self.token(h).tanh()).tanh().mean(1)


class Embedded(nn.Module):
    """Indices, some of them twice in an example, through a table that the layer behind it is tied to."""

    def __init__(self, padding_idx=None, tied=False):
        super().__init__()
        self.table, self.norm, self.out = nn.Embedding(6, 4, padding_idx), nn.RMSNorm(4), nn.Linear(4, 6)
        if tied:
            self.out.weight = self.table.weight

    def forward(self, x):
        index = (x * 2).abs().long().clamp(max=5)
        return self.out(self.norm(self.table(index).tanh())).tanh().mean(1)


class Attending(nn.Module):
    """Positions that the batch shares, a token of the module's own, self-attention, and attention across."""

    def __init__(self, batch_first):
        super().__init__()
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 4)), nn.Embedding(4, 4)
        self.encode = nn.TransformerEncoderLayer(4, 2, 6, batch_first=batch_first, norm_first=not batch_first)
        self.across = nn.MultiheadAttention(4, 2, kdim=3, batch_first=True)

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places(torch.arange(4))
        first = self.encode.self_attn.batch_first
        mask = torch.ones(4, 4, dtype=torch.bool).triu(1)
        h = self.encode(x, mask) if first else self.encode(x.transpose(0, 1), mask).transpose(0, 1)
        return self.across(h, x[..., :3], h, need_weights=False)[0].tanh().mean(1)


class Folded(nn.Module):
    """Positions folded into the batch: each example has three rows."""

    def __init__(self):
        super().__init__()
        self.patch, self.out = nn.Conv1d(1, 4, 2), nn.Linear(4, 3)

    def forward(self, x):
        rows = self.patch(x.reshape(-1, 1, 4)).tanh()
        return self.out(rows.mean(2)).view(len(x), -1).tanh()


class Scale(nn.Module):
    """A layer of a user's own, taken whole."""

    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return (x * self.gamma).tanh()


class Times(nn.Module):
    """Another, of one number."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return (x * self.factor).tanh()


class Reads(nn.Module):
    """A recurrent layer, of which the outputs and the last states are used. `packed`: sequences of other lengths."""

    def __init__(self, kind, packed=False, **options):
        super().__init__()
        self.layer, self.packed = kind(4, 3, **options), packed

    def forward(self, x):
        first = self.layer.batch_first
        y = x if first else x.transpose(0, 1)
        if self.packed:
            lengths = 1 + (x[:, :, 0] > 0).sum(1).clamp(max=2)
            y = nn.utils.rnn.pack_padded_sequence(y, lengths, batch_first=first, enforce_sorted=False)
        y, state = self.layer(y)
        if self.packed:
            y, _ = nn.utils.rnn.pad_packed_sequence(y, batch_first=first, total_length=3)
        state = torch.cat(state, 2) if isinstance(state, tuple) else state
        return torch.cat([y.sum(1 if first else 0), state[0]], 1)


class Steps(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cell = kind(4, 3)

    def forward(self, x):
        state = None
        for t in range(3):
            state = self.cell(x[:, t], state)
        return torch.cat(state, 1) if isinstance(state, tuple) else state


class Mixed(nn.Module):
    """Parameters of the module's own between layers: a token, a number, a matrix, a table used past its layer."""

    def __init__(self):
        super().__init__()
        self.token, self.share = nn.Parameter(torch.randn(1, 4)), nn.Parameter(torch.tensor(0.7))
        self.first, self.matrix, self.reads = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4)), nn.GRU(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        h = self.first(x + self.token.unsqueeze(1)).tanh() @ self.matrix * self.share
        h = self.reads(h.transpose(0, 1))[0].sum(0)
        return self.last(h.tanh()) + nn.functional.linear(h, self.last.weight)


class Beside(nn.Module):
    """An LSTM beside a number that is used directly, so that vmap runs the LSTM too."""

    def __init__(self):
        super().__init__()
        self.share, self.reads = nn.Parameter(torch.tensor(0.7)), nn.LSTM(4, 3, batch_first=True)

    def forward(self, x):
        return self.reads(x * self.share)[0].sum(1)


class TimeFirst(nn.Module):
    """Layers whose input has the batch as its second axis, and a table that the batch shares."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.places = nn.Linear(4, 4), nn.LayerNorm(4), nn.Embedding(3, 4)

    def forward(self, x):
        h = self.norm(self.first(x.transpose(0, 1)).tanh()) + self.places(torch.arange(3)).unsqueeze(1)
        return h.tanh().sum(0)


class Conv1D(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.zeros(5))

    def forward(self, x):
        return x @ self.weight + self.bias


Conv1D.__module__ = "transformers.pytorch_utils"


class Asks(nn.Module):
    """What vmap cannot do: a forward pass that looks at a value."""

    def __init__(self):
        super().__init__()
        self.factor, self.out = nn.Parameter(torch.tensor([1.3, 0.4])), nn.Linear(4, 3)

    def forward(self, x):
        rows = [row * self.factor[0] if float(row.sum()) > 0 else row.cos() * self.factor[1] for row in x]
        return self.out(torch.stack(rows).tanh())


def measured(norm):
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    return norm


def networks():
    """Each network, and the shape of an example."""
    images = nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, (3, 2), stride=2, groups=2), nn.ReLU()
    depthwise = (layer for _ in range(2) for layer in (nn.Conv1d(3, 3, 2, groups=3), nn.Tanh()))
    rows = nn.Conv1d(3, 4, 3, padding="same", padding_mode="circular"), nn.GroupNorm(2, 4), nn.Tanh()
    strided = nn.Conv1d(4, 4, 2, stride=2, dilation=2, groups=2, bias=False)
    first_norm, second_norm = measured(nn.BatchNorm2d(4)), measured(nn.BatchNorm1d(8))
    norms = nn.Conv2d(2, 4, 2), first_norm, nn.ReLU(), nn.Flatten(), second_norm, nn.Tanh()
    of_weights = parametrizations.weight_norm(nn.Linear(4, 5)), parametrizations.spectral_norm(nn.Linear(5, 3)).eval()
    in_place = nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 4), nn.ReLU(inplace=True)
    layer_norms = nn.LayerNorm((3, 4)), nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh(), nn.Flatten()
    return {
        "mlp": (evcl.nn.mlp(6, [5, 4]), (6,)),
        "convolutional": (nn.Sequential(*images, nn.Flatten(), nn.Linear(24, 5), nn.Tanh()), (2, 7, 4)),
        "activations in place": (nn.Sequential(*in_place), (6,)),
        "tied, twice, along a sequence": (TwiceAndAlong(), (3, 4)),
        "depthwise": (nn.Sequential(*depthwise, nn.Flatten()), (3, 4)),
        "convolutions in one dimension": (nn.Sequential(*rows, strided, nn.Flatten()), (3, 6)),
        "batch norms": (nn.Sequential(*norms), (2, 3, 2)),
        "layer norms": (nn.Sequential(*layer_norms), (3, 4)),
        "an embedding": (Embedded(padding_idx=1), (5,)),
        "a tied embedding": (Embedded(tied=True), (5,)),
        "attention": (Attending(True), (3, 4)),
        "attention, sequence first": (Attending(False), (3, 4)),
        "folded into the batch": (Folded(), (3, 4)),
        "a layer taken whole": (nn.Sequential(Scale(), nn.Linear(4, 3), nn.PReLU()), (4,)),
        "a number": (nn.Sequential(nn.Linear(4, 3), Times()), (4,)),
        "lstm": (Reads(nn.LSTM, num_layers=2, bidirectional=True), (3, 4)),
        "lstm with projections": (Reads(nn.LSTM, proj_size=2, bias=False, batch_first=True), (3, 4)),
        "gru on packed sequences": (Reads(nn.GRU, packed=True, bidirectional=True, batch_first=True), (3, 4)),
        "lstm on packed sequences": (Reads(nn.LSTM, packed=True, num_layers=2), (3, 4)),
        "rnn": (Reads(nn.RNN, nonlinearity="relu"), (3, 4)),
        "lstm cell": (Steps(nn.LSTMCell), (3, 4)),
        "gru cell": (Steps(nn.GRUCell), (3, 4)),
        "used directly": (Mixed(), (3, 4)),
        "an lstm beside a number": (Beside(), (3, 4)),
        "norms of weights": (nn.Sequential(of_weights[0], nn.Tanh(), of_weights[1]), (4,)),
        "gpt-2's conv1d": (nn.Sequential(Conv1D(), nn.Tanh(), nn.Flatten()), (3, 4)),
        "values that decide": (Asks(), (4,)),
        "time first": (TimeFirst(), (3, 4)),
    }


for _layer in (Scale, Times):
    evcl.nn.register(_layer)


def prepared(name, replicas, dtype=F64, examples=11):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module, shape = networks()[name]
    source = torch.Generator().manual_seed(1)
    network = bayesianize(module, init_std=None, replicas=replicas, dtype=dtype)
    some = torch.randn(3, *shape, generator=torch.Generator().manual_seed(2), dtype=F64).to(dtype)
    check_examples_independent(network, some, strict=True)
    with network.alone():
        width = network(some).shape[1]
    k = network.add_head()
    layout = network.with_slots([head(k, 3, width)])
    mean = 0.7 * torch.randn(replicas, layout.size, generator=source, dtype=F64).to(dtype)
    x = torch.randn(replicas, examples, *shape, generator=source, dtype=F64).to(dtype)
    y = torch.randint(3, (replicas, examples), generator=source)
    return module.double().eval(), network, layout, mean, x, y


def reference(module, layout, mean, x, y, kind):
    """sum_c w_c (d log p(c|x) / d theta)^2, or |d ||f(x)||^2 / d theta|, example by example, replica by replica."""
    names = head_names(0)
    total = torch.zeros_like(mean)
    for r in range(len(mean)):
        weights = {name: view[0].clone().requires_grad_() for name, view in layout.views(mean[r : r + 1]).items()}

        def logits(weights, example):
            trunk = {name: w for name, w in weights.items() if name not in names.values()}
            for name, part in module.named_modules():  # a row of padding is no weight
                if isinstance(part, nn.Embedding) and part.padding_idx is not None:
                    padding = (torch.arange(part.num_embeddings) == part.padding_idx).unsqueeze(1)
                    trunk[f"{name}.weight"] = torch.where(padding, part.weight.detach(), trunk[f"{name}.weight"])
            h = torch.func.functional_call(module, trunk, (example.unsqueeze(0),), tie_weights=True)
            return (h @ weights[names["weight"]].mT + weights[names["bias"]])[0]

        for n in range(x.shape[1]):
            outputs = logits(weights, x[r, n])
            if kind == "sensitivity":
                gradients = torch.autograd.grad(outputs.square().sum(), list(weights.values()))
                for span, gradient in zip(layout.spans.values(), gradients, strict=True):
                    total[r, span] += gradient.flatten().abs() / x.shape[1]
                continue
            outputs = outputs.log_softmax(0)
            p = outputs.detach().exp()
            if kind == "empirical":
                p = nn.functional.one_hot(y[r, n], 3).to(p)
            for c in range(3):
                wanted = list(weights.values())
                gradients = torch.autograd.grad(outputs[c], wanted, retain_graph=True)
                for span, gradient in zip(layout.spans.values(), gradients, strict=True):
                    total[r, span] += p[c] * gradient.flatten().square() / x.shape[1]
    return total


def measure(kind, sample):
    return sensitivity(sample) if kind == "sensitivity" else fisher(sample, kind)


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("kind", ["exact", "empirical", "sensitivity"])
@pytest.mark.parametrize("name", networks())
def test_it_is_the_loop_over_examples(name, kind, replicas):
    module, network, layout, mean, x, y = prepared(name, replicas, examples=5)
    expected = reference(module, layout, mean, x, y, kind)
    assert expected.count_nonzero() > 0.5 * expected.numel()
    for chunk in (1000, 2):
        found = measure(kind, Sample(network, mean, layout, [0], x, y, chunk=chunk))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14 if kind == "sensitivity" else 1e-18)
    if kind == "exact":
        _, network, layout, mean, x, y = prepared(name, replicas, torch.float32, 5)
        found = fisher(Sample(network, mean, layout, [0], x, y), kind)
        torch.testing.assert_close(found, expected.float(), rtol=2e-3, atol=2e-6)
    if kind == "sensitivity":
        threes = torch.full((replicas, 5), 3.0, dtype=F64)
        found = sensitivity(Sample(network, mean, layout, [0], x, weights=threes))
        torch.testing.assert_close(found, 3 * expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("name", networks())
def test_any_importance_is_spread_as_the_fisher_is(name):
    _, network, layout, mean, x, y = prepared(name, 2, examples=5)
    plain, share = fisher(Sample(network, mean, layout, [0], x, y)), torch.tensor([[0.2], [0.7]], dtype=F64)
    wanted = fisher(Sample(network, mean, layout, [0], x, y), spread=share)
    before = plain.clone()
    torch.testing.assert_close(spread_out(network, mean, layout, plain, x, [0], share), wanted)
    assert torch.equal(plain, before)


@pytest.mark.parametrize("name", ["convolutional", "attention", "folded into the batch"])
def test_pieces_of_examples_add_up(name, monkeypatch):
    _, network, layout, mean, x, y = prepared(name, 3)
    whole = fisher(Sample(network, mean, layout, [0], x, y))
    monkeypatch.setattr("evcl.nn.layer.EXAMPLE_GRADIENT_NUMBERS", 1)
    torch.testing.assert_close(fisher(Sample(network, mean, layout, [0], x, y)), whole, rtol=1e-12, atol=0)


def neighbours(weights, inputs, units, learned):
    """For each of the weights, the mean of those that share its input and, where that is learned, of its unit's."""
    found = torch.zeros_like(weights)
    for i in range(len(weights)):
        if inputs is not None:
            found[i] += weights[[j for j in range(len(weights)) if inputs[j] == inputs[i]]].mean()
        if learned:
            found[i] += weights[[j for j in range(len(weights)) if units[j] == units[i]]].mean()
    return found


SPREAD = {  # of a weight, by its indices: its input, its unit, whether the input is learned
    "mlp": {
        "1.weight": (lambda o, i: i, lambda o, i: o, False),  # pixels that are black in a task stay free for the next
        "1.bias": (lambda o: 0, lambda o: o, False),
        "3.weight": (lambda o, i: i, lambda o, i: o, True),
        "head 0.weight": (lambda o, i: i, lambda o, i: o, True),
        "head 0.bias": (lambda o: 0, lambda o: o, False),
    },
    "convolutional": {
        "0.weight": (lambda o, i, y, x: (i, y, x), lambda o, i, y, x: o, False),
        "2.weight": (lambda o, i, y, x: (o // 2, i, y, x), lambda o, i, y, x: o, True),  # two groups of two outputs
        "2.bias": (lambda o: 0, lambda o: o, False),
        "5.weight": (lambda o, i: i, lambda o, i: o, True),
    },
    "depthwise": {
        "0.weight": (None, lambda o, i, x: o, False),  # no other weight has its input
        "0.bias": (lambda o: 0, lambda o: o, False),
        "2.weight": (None, lambda o, i, x: o, True),
    },
    "an embedding": {
        "table.weight": (lambda row, d: row, lambda row, d: d, False),
        "out.weight": (lambda o, i: i, lambda o, i: o, True),
    },
    "a tied embedding": {"table.weight": (lambda row, d: row, lambda row, d: d, False)},  # once
    "attention": {
        "encode.self_attn.in_proj_weight": (lambda o, i: (o // 4, i), lambda o, i: o, True),  # three layers in one
        "encode.self_attn.in_proj_bias": (lambda o: o // 4, lambda o: o, False),
        "across.k_proj_weight": (lambda o, i: i, lambda o, i: o, True),
        "across.out_proj.bias": (lambda o: 0, lambda o: o, False),
    },
}


@pytest.mark.parametrize("name", SPREAD)
def test_a_weight_is_given_its_share_of_its_neighbours(name):
    _, network, layout, mean, x, y = prepared(name, 2)
    plain = layout.views(fisher(Sample(network, mean, layout, [0], x, y)))
    shares = torch.tensor([[0.5], [2.0]], dtype=F64)
    for share, each in ((shares, shares), (0.5, [0.5, 0.5])):
        found = layout.views(fisher(Sample(network, mean, layout, [0], x, y, chunk=4), spread=share))
        for key, (inputs, units, learned) in SPREAD[name].items():
            places = list(itertools.product(*map(range, layout.shapes[key])))
            for r in range(2):
                own = plain[key][r].flatten()
                sources = None if inputs is None else [inputs(*p) for p in places]
                more = neighbours(own, sources, [units(*p) for p in places], learned)
                torch.testing.assert_close(found[key][r].flatten(), own + float(each[r]) * more, rtol=1e-10, atol=1e-18)


class Asking(nn.Module):
    """Attention by one product for query, key and value, by one for each, or both."""

    def __init__(self, how):
        super().__init__()
        self.attend, self.how = nn.MultiheadAttention(4, 2, batch_first=True), how

    def forward(self, x):
        x = x.view(-1, 3, 4)
        asked = {"one": [(x, x, x)], "each": [(x, x * 1, x * 1)], "both": [(x, x, x), (x, x * 1, x * 1)]}[self.how]
        return sum(self.attend(*args, need_weights=False)[0] for args in asked).flatten(1) / len(asked)


def test_attention_is_spread_alike_however_it_is_called():
    found = []
    for how in ("one", "each", "both"):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            network = bayesianize(Asking(how), init_std=None, replicas=1, dtype=F64)
        network.add_head()
        layout = network.with_slots([head(0, 3, 12)])
        source = torch.Generator().manual_seed(1)
        mean = torch.randn(1, layout.size, generator=source, dtype=F64)
        x = torch.randn(1, 5, 12, generator=source, dtype=F64)
        found.append(fisher(Sample(network, mean, layout, [0], x, torch.zeros(1, 5, dtype=torch.long)), spread=0.5))
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found[2], found[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("name", "left", "not_left"), [
    ("layer norms", "0.weight", "1.weight"),
    ("a number", "1.factor", "0.weight"),
])  # fmt: skip
def test_a_weight_that_no_unit_has_is_left_as_it_is(name, left, not_left):
    _, network, layout, mean, x, y = prepared(name, 1)
    plain, spread = (layout.views(fisher(Sample(network, mean, layout, [0], x, y), spread=s)) for s in (0.0, 1.0))
    assert torch.equal(plain[left], spread[left])
    assert not torch.equal(plain[not_left], spread[not_left])


def test_sampled_labels_agree_on_average():
    """Labels drawn from the model give the exact Fisher in expectation; the true labels do not."""
    _, network, layout, mean, x, y = prepared("mlp", 1)
    exact = fisher(Sample(network, mean, layout, [0], x, y))
    many = x.repeat(1, 400, 1), y.repeat(1, 400)
    sources = [torch.Generator().manual_seed(3)]
    sampled = fisher(Sample(network, mean, layout, [0], *many), "sampled", sources)
    big = exact > exact.mean()
    torch.testing.assert_close(sampled[big], exact[big], rtol=0.15, atol=0)
    empirical = fisher(Sample(network, mean, layout, [0], x, y), "empirical")
    assert ((empirical - exact).abs()[big] / exact[big]).max() > 0.3


def test_rows_that_nobody_vouches_for_are_refused():
    _, network, layout, mean, x, y = prepared("folded into the batch", 1, examples=5)
    for layer in network.bayesian_layers():
        layer.fold = 1
    with pytest.raises(evcl.EvclError, match="got 15 rows for 5 examples"):
        fisher(Sample(network, mean, layout, [0], x, y))


def test_an_unknown_kind_is_refused():
    _, network, layout, mean, x, y = prepared("mlp", 1)
    with pytest.raises(evcl.EvclError, match="exact, sampled, empirical"):
        fisher(Sample(network, mean, layout, [0], x, y), "true")
