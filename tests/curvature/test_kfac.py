"""The Kronecker factors against a loop over replicas, examples and classes by autograd: slow, obvious, in float64."""

from __future__ import annotations

import pytest
import torch
from test_fisher import Asking, TwiceAndAlong, networks, prepared, reference
from torch import nn
from torch.nn.utils import skip_init

import evcl
from evcl.curvature import Sample, blocks, fisher, kfac
from evcl.nn import bayesianize, head

F64 = torch.float64


def made(trunk, generator, replicas=2, width=4):
    """A network with one head of three classes, and weights for it."""
    sources = [torch.Generator().manual_seed(seed) for seed in range(replicas)]
    network = bayesianize(trunk, generators=sources, replicas=replicas, dtype=F64)
    network.add_head()
    layout = network.layout = network.with_slots([head(0, 3, width)])
    return network, layout, torch.randn(replicas, layout.size, dtype=F64, generator=generator)


def test_a_weight_counts_as_so_many_gradients(generator):
    """That the factors of a perceptron are what they should be: tests/methods/test_kfac_ewc.py."""
    network, layout, mean = made(evcl.nn.mlp(5, [4]), generator)
    x, y = torch.randn(2, 4, 5, dtype=F64, generator=generator), torch.zeros(2, 4, dtype=torch.long)
    counts, rows = torch.tensor([2.0, 1, 1, 2], dtype=F64).expand(2, 4), [0, 0, 1, 2, 3, 3]
    samples = Sample(network, mean, layout, [0], x, y), Sample(network, mean, layout, [0], x[:, rows], y[:, rows])
    plain, copied = (kfac(sample).factors for sample in samples)
    for key, (a, g) in kfac(Sample(network, mean, layout, [0], x, y, weights=counts)).factors.items():
        torch.testing.assert_close(a, plain[key][0])
        torch.testing.assert_close(g, copied[key][1] * 6 / 4)


def spread_out(found, network, layout):
    """[R, P]: the diagonal of the whole approximation."""
    total = found.diagonal.clone()
    for key, block in blocks(network, layout).items():
        if key in found.factors:
            a, g = found.factors[key]
            a = a if block.table else a.diagonal(dim1=1, dim2=2)
            block.add(layout, total, g.diagonal(dim1=1, dim2=2).unsqueeze(2) * a.unsqueeze(1))
    return total


@pytest.mark.parametrize("kind", ["exact", "sampled", "empirical"])
@pytest.mark.parametrize("name", ["mlp", "a layer taken whole", "a number"])
def test_the_diagonal_of_one_example_is_the_diagonal_fisher(name, kind):
    """So the two agree on labels and temperature, and what has no factors has its diagonal."""
    _, network, layout, mean, x, y = prepared(name, 2, examples=1)
    found = []
    for measure in (fisher, kfac):
        sources = [torch.Generator().manual_seed(r) for r in range(2)]
        found.append(measure(Sample(network, mean, layout, [0], x, y), kind, sources, temperature=2.0))
    torch.testing.assert_close(spread_out(found[1], network, layout), found[0], rtol=1e-9, atol=1e-15)


WITHOUT = {  # the weights of each network that have no factors
    "convolutional": {"2.weight", "2.bias"},  # in groups
    "depthwise": {"0.weight", "0.bias", "2.weight", "2.bias"},
    "batch norms": {"1.weight", "1.bias", "4.weight", "4.bias"},
    "a tied embedding": {"table.weight", "out.bias", "norm.weight"},
    "an embedding": {"norm.weight"},
    "attention": {"token", *(f"encode.norm{k}.{p}" for k in (1, 2) for p in ("weight", "bias"))},
}


@pytest.mark.parametrize("name", networks())
def test_every_weight_has_factors_or_its_diagonal(name):
    module, network, layout, mean, x, y = prepared(name, 2, examples=4)
    found = kfac(Sample(network, mean, layout, [0], x, y))
    exact = layout.views(reference(module, layout, mean, x, y, "exact"))
    diagonal = layout.views(found.diagonal)
    factored = {n for b in blocks(network, layout).values() for n in (b.weight, b.bias) if n}
    if name in WITHOUT:
        assert layout.shapes.keys() - factored == WITHOUT[name]
    for key, wanted in exact.items():
        torch.testing.assert_close(diagonal[key], torch.zeros_like(wanted) if key in factored else wanted)
    whole = layout.views(spread_out(found, network, layout))
    for key, wanted in exact.items():
        assert torch.equal(whole[key] > 0, wanted > 0) or key in factored
        assert bool((whole[key][wanted > 0] > 0).all())
    for other in (1000, 3):
        again = kfac(Sample(network, mean, layout, [0], x, y, chunk=other))
        for key, pair in found.factors.items():
            torch.testing.assert_close(again.factors[key], pair)


def of_rows(a, g, examples):
    """A is the mean over all rows, G the sum over the rows of an example, as a mean over examples."""
    return a.mT @ a / len(a), g.mT @ g / examples


def test_a_convolution_s_rows_are_its_patches(generator):
    conv = skip_init(nn.Conv2d, 2, 3, (2, 3), stride=(1, 2), padding=1, dilation=(2, 1))
    network, layout, mean = made(nn.Sequential(conv, nn.Tanh(), nn.Flatten()), generator, 2, 27)
    x = torch.randn(2, 5, 2, 3, 6, dtype=F64, generator=generator)
    found = kfac(Sample(network, mean, layout, [0], x, torch.zeros(2, 5).long())).factors["0.weight"]
    parts = layout.views(mean)
    for r in range(2):
        a, g = [], []
        padded = nn.functional.pad(x[r], (1, 1, 1, 1))
        out = nn.functional.conv2d(
            x[r], parts["0.weight"][r], parts["0.bias"][r], stride=(1, 2), padding=1, dilation=(2, 1)
        ).requires_grad_()
        logits = out.tanh().flatten(1) @ parts["head 0.weight"][r].mT + parts["head 0.bias"][r]
        log_p = logits.log_softmax(1)
        for c in range(3):
            weighed = (log_p[:, c] * log_p[:, c].detach().exp().sqrt()).sum()
            (delta,) = torch.autograd.grad(weighed, out, retain_graph=True)
            g += [delta[b, :, i, j] for b in range(5) for i in range(3) for j in range(3)]
        for b in range(5):
            for i in range(3):
                for j in range(3):
                    patch = padded[b, :, i : i + 3 : 2, 2 * j : 2 * j + 3]
                    a.append(torch.cat([patch.flatten(), torch.ones(1, dtype=F64)]))
        for one, wanted in zip(found, of_rows(torch.stack(a), torch.stack(g), 5), strict=True):
            torch.testing.assert_close(one[r], wanted)


def test_a_weight_that_is_used_several_times_has_a_row_for_each_use(generator):
    """Three positions, through `token` twice and through `tied` once, whose bias is another."""
    with torch.random.fork_rng():
        network, layout, mean = made(TwiceAndAlong(), generator, 1)
    x = torch.randn(1, 5, 3, 4, dtype=F64, generator=generator)
    found = kfac(Sample(network, mean, layout, [0], x, torch.zeros(1, 5).long()))
    w, b, other, hw, hb = (layout.views(mean)[k][0] for k in
        ("token.weight", "token.bias", "tied.bias", "head 0.weight", "head 0.bias"))  # fmt: skip
    one = (x[0] @ w.mT + b).requires_grad_()
    two = one.tanh() @ w.mT + b
    three = two.tanh() @ w.mT + other
    log_p = (three.tanh().mean(1) @ hw.mT + hb).log_softmax(1)
    g = []
    for c in range(3):
        weighed = (log_p[:, c] * log_p[:, c].detach().exp().sqrt()).sum()
        deltas = torch.autograd.grad(weighed, [one, two, three], retain_graph=True)
        g += [delta.flatten(0, 1) for delta in deltas]
    a = torch.cat([part.detach().flatten(0, 1) for part in (x[0], one.tanh(), two.tanh())])
    for factor, wanted in zip(found.factors["token.weight"], of_rows(a, torch.cat(g), 5), strict=True):
        torch.testing.assert_close(factor[0], wanted)
    exact = layout.views(fisher(Sample(network, mean, layout, [0], x, torch.zeros(1, 5).long())))
    for bias in ("token.bias", "tied.bias"):  # the weight has several, so that it has none
        torch.testing.assert_close(layout.views(found.diagonal)[bias], exact[bias])


def test_an_embedding_s_inputs_are_how_often_each_row_is_used(generator):
    _, network, layout, mean, x, y = prepared("an embedding", 2, examples=4)
    a, g = kfac(Sample(network, mean, layout, [0], x, y)).factors["table.weight"]
    index = (x * 2).abs().long().clamp(max=5)
    for r in range(2):
        counts = torch.bincount(index[r].flatten(), minlength=6).to(F64)
        counts[1] = 0  # the padding
        torch.testing.assert_close(a[r], counts / counts.sum())
    exact = layout.views(fisher(Sample(network, mean, layout, [0], x, y)))["table.weight"]
    assert g.shape == (2, 4, 4)
    assert torch.equal(a > 0, exact.sum(2) > 0)


def test_attention_has_the_same_factors_however_it_is_called():
    found = []
    for how in ("one", "each"):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            network, layout, mean = made(Asking(how), torch.Generator().manual_seed(0), 2, 12)
        x = torch.randn(2, 5, 3, 4, dtype=F64, generator=torch.Generator().manual_seed(1))
        found.append(kfac(Sample(network, mean, layout, [0], x, torch.zeros(2, 5).long()), spread=0.3).factors)
    names = {f"attend.in_proj_weight {k}:{k + 4}" for k in (0, 4, 8)}
    assert found[0].keys() == found[1].keys() == names | {"attend.out_proj.weight", "head 0.weight"}
    for key, pair in found[0].items():
        torch.testing.assert_close(found[1][key], pair)


def test_the_damping_is_fisher_spread_to_first_order():
    """For one example the diagonal Fisher factorises; what both add is then the same, but for the square of rho."""
    _, network, layout, mean, x, y = prepared("mlp", 2, examples=1)
    for rho in (1e-7, torch.tensor([[1e-7], [2e-7]], dtype=F64)):
        added = []
        for s in (0.0, rho):
            damped = spread_out(kfac(Sample(network, mean, layout, [0], x, y), spread=s), network, layout)
            added.append((damped, fisher(Sample(network, mean, layout, [0], x, y), spread=s)))
        ours, theirs = ((after - before) / rho for before, after in zip(*added, strict=True))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        assert float(ours.max()) > 1e-2


def test_an_unknown_kind_is_refused(generator):
    network, layout, mean = made(evcl.nn.mlp(5, [4]), generator)
    with pytest.raises(evcl.EvclError, match="exact, sampled, empirical"):
        kfac(Sample(network, mean, layout, [0], torch.zeros(2, 1, 5, dtype=F64), torch.zeros(2, 1).long()), "true")


@pytest.mark.filterwarnings("ignore")  # of the packages that it imports
@pytest.mark.parametrize("kind", ["exact", "empirical"])
def test_it_is_what_curvlinops_computes(kind, generator):
    """A convolution, a hidden layer and the head: G (x) A times a vector. `make test-all` installs it."""
    curvlinops = pytest.importorskip("curvlinops")
    shapes = (skip_init(nn.Conv2d, 2, 3, 2, padding=1), skip_init(nn.Linear, 48, 4))
    network, layout, mean = made(nn.Sequential(shapes[0], nn.Tanh(), nn.Flatten(), shapes[1], nn.ReLU()), generator, 1)
    x = torch.randn(1, 5, 2, 3, 3, generator=generator, dtype=F64)
    y = torch.randint(3, (1, 5), generator=generator)
    plain = nn.Sequential(shapes[0], nn.Tanh(), nn.Flatten(), shapes[1], nn.ReLU(), skip_init(nn.Linear, 4, 3)).double()
    names = [name.replace("5.", "head 0.") for name in plain.state_dict()]
    plain.load_state_dict({key: layout.view(mean, n)[0] for key, n in zip(plain.state_dict(), names, strict=True)})
    with torch.random.fork_rng():
        whole = curvlinops.KFACLinearOperator(
            plain,
            nn.CrossEntropyLoss(),
            list(plain.parameters()),
            [(x[0], y[0])],
            fisher_type={"exact": "type-2", "empirical": "empirical"}[kind],
            separate_weight_and_bias=False,
        )
    factors = kfac(Sample(network, mean, layout, [0], x, y), kind).factors
    change = torch.randn(1, layout.size, generator=generator, dtype=F64)
    found = torch.zeros_like(change)
    for key, block in blocks(network, layout).items():
        a, g = factors[key]
        block.add(layout, found, g @ block.matrix(layout, change, g.shape[1]) @ a)
    change, found = (torch.cat([layout.view(flat, name).flatten() for name in names]) for flat in (change, found))
    with torch.random.fork_rng():
        torch.testing.assert_close(found, whole @ change)
