"""The Kronecker-factored methods: their penalty by whole matrices and by autograd, their training by plain torch."""

from __future__ import annotations

from functools import partial

import pytest
import small_runs
import torch
import torch.nn.functional as F
from small_runs import EXAMPLES, F64, adam, assert_springs, assert_weights, learned, logits, plain, round_of, task
from torch import nn

import evcl
from evcl._core.settings import Settings, resolve
from evcl.curvature import Sample, blocks, kfac
from evcl.methods import KL, METHODS, Gradients, Round, TaskData, autograd_gradients
from evcl.methods.applied import add_gradients
from evcl.methods.elastic_memory import Elastic
from evcl.methods.kronecker import MEASURES, Factored
from evcl.methods.task_inference import Memory
from evcl.nn import Gaussian, bayesianize, head
from evcl.nn.independence import check_examples_independent
from evcl.posterior.kronecker import merged
from evcl.targets import CATEGORICAL

MERGES = ("nearest", "sum", "pi", "tasks")


def data(k, head=0, examples=EXAMPLES):
    return task(k, head, examples, classes=3)


made = partial(small_runs.run_of, hidden=(4,), heads=(3, 3))


def covariance(size, generator, k=1, replicas=2):
    root = torch.randn(replicas, k, size, size + 2, generator=generator, dtype=F64)
    return root @ root.mT


# --- the penalty ------------------------------------------------------------------------------------------------------


class Everything(nn.Module):
    """A table, attention, a convolution, a norm, and a layer used twice."""

    def __init__(self):
        super().__init__()
        self.table, self.attend = nn.Embedding(6, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.conv, self.norm, self.twice = nn.Conv1d(3, 4, 2), nn.LayerNorm(3), nn.Linear(3, 3)

    def forward(self, x):
        h = self.table((x * 2).abs().long().clamp(max=5))
        h = self.norm(self.conv(self.attend(h, h, h, need_weights=False)[0]).tanh())
        return self.twice(self.twice(h).tanh()).flatten(1)


@pytest.fixture
def everything(generator):
    """A network of two replicas, its weights, and its factors, of one task or of three."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = bayesianize(Everything(), init_std=None, replicas=2, dtype=F64)
    x = torch.randn(2, 6, 3, dtype=F64, generator=generator)
    check_examples_independent(network, x[0], strict=True)
    network.add_head()
    layout = network.layout = network.with_slots([head(0, 3, 12)])
    mean = torch.randn(2, layout.size, dtype=F64, generator=generator)
    found = [kfac(Sample(network, mean * k, layout, [0], x, torch.zeros(2, 6).long())).factors for k in (1.0, 0.5, 2.0)]
    several = {key: tuple(torch.stack([one[key][j] for one in found], 1) for j in (0, 1)) for key in found[0]}
    return network, layout, mean, several


@pytest.mark.parametrize("tasks", [1, 3])
def test_its_gradient_is_autograd_s_and_its_value_that_of_the_whole_matrix(everything, tasks, generator):
    network, layout, mean, several = everything
    factors = {key: (a[:, :tasks], g[:, :tasks]) for key, (a, g) in several.items()}
    known = blocks(network, layout)
    assert factors.keys() == known.keys()
    anchor = Gaussian(mean + torch.randn(mean.shape, generator=generator, dtype=F64), None)
    q, term = Gaussian(mean, None, layout), Factored(anchor, factors, known)
    grads = Gradients(torch.ones_like(mean), None, layout)
    term.add_gradient(q, grads)
    torch.testing.assert_close(grads.mean - 1, autograd_gradients([term], q)[0])
    assert (grads.mean != 1).sum() > 0.8 * mean.numel()
    value = 0
    for key, (a, g) in factors.items():
        d = known[key].matrix(layout, mean - anchor.mean, g.shape[-1])[1].flatten()
        for k in range(tasks):
            full = torch.kron(g[1, k], a[1, k].diag() if a.dim() == 3 else a[1, k])
            value = value + 0.5 * d @ full @ d
    torch.testing.assert_close(term.loss(q)[1], value)


def test_new_rows_of_a_head_are_free(generator):
    network = bayesianize(evcl.nn.mlp(5, [4]), init_std=None, replicas=2, dtype=F64)
    network.add_head()
    layout = network.layout = network.with_slots([head(0, 5, 4)])
    factors = {"head 0.weight": (covariance(5, generator), covariance(3, generator))}
    mean = torch.randn(2, layout.size, dtype=F64, generator=generator)
    q, grads = Gaussian(mean, None, layout), Gradients(torch.zeros_like(mean), None, layout)
    Factored(Gaussian(torch.zeros_like(mean), None), factors, blocks(network, layout)).add_gradient(q, grads)
    for name in ("head 0.weight", "head 0.bias"):
        assert bool((grads.part(name)[:, :3] != 0).all())
        assert not grads.part(name)[:, 3:].any()
    old = factors["head 0.weight"]
    _, g = merged(old, (covariance(5, generator), covariance(5, generator)), "sum")
    assert g.shape == (2, 1, 5, 5)


@pytest.mark.parametrize("over", [True, False])
def test_variances_have_the_diagonal_of_the_product(everything, over):
    network, layout, mean, several = everything
    prior = Gaussian(mean, torch.zeros_like(mean))
    zeros = torch.zeros_like(mean)
    memory = Memory(prior, zeros, zeros, factors=several)
    given = {"strength": 0.7, "fisher_scale": "examples" if over else "none"}
    s = resolve("kfac-evcl", METHODS["kfac-evcl"].known_settings, given)
    one = TaskData(torch.zeros(1, 11, 3), torch.zeros(1, 11).long(), 0)
    round_ = Round(1, [one], network, prior, [0], [0, 1], CATEGORICAL)
    term, rest = MEASURES["kfac"].penalty(memory, s, round_, 0.5)
    assert isinstance(rest, Elastic)
    assert not rest.importance.any()
    weight = 0.5 * 0.7 / (11 if over else 1)
    for key, (a, g) in several.items():
        block = blocks(network, layout)[key]
        i, o = block.sizes(layout)
        found = block.matrix(layout, rest.variances, o)
        for place in ((0, 0), (o - 1, i - 1), (o // 2, i // 2)):
            own = sum(g[:, k, place[0], place[0]] * (a[:, k, place[1]] if block.table else a[:, k, place[1], place[1]])
                for k in range(3))  # fmt: skip
            torch.testing.assert_close(found[:, place[0], place[1]], weight * own)
        torch.testing.assert_close(term.factors[key][1], weight * g)


# --- several tasks ----------------------------------------------------------------------------------------------------


def product(pair):
    a, g = pair
    return sum(torch.stack([torch.kron(g[r, k], a[r, k]) for r in range(len(a))]) for k in range(a.shape[1]))


@pytest.mark.parametrize("how", MERGES)
def test_merging_is_what_its_equation_says(how, generator):
    old, new = ((covariance(4, generator), covariance(3, generator)) for _ in range(2))
    found, exact = product(merged(old, new, how)), product(old) + product(new)
    (a, g), (b, h) = old, new
    if how == "sum":
        torch.testing.assert_close(found, product((a + b, g + h)))
    if how == "tasks":
        torch.testing.assert_close(found, exact)
    if how == "pi":
        traces = [x.diagonal(dim1=2, dim2=3).sum((1, 2)) for x in (g, b, h, a)]
        pi = (traces[0] * traces[1] / (traces[2] * traces[3])).sqrt().view(2, 1, 1, 1)
        torch.testing.assert_close(found, product((a + b / pi, g + pi * h)))
    if how == "nearest":  # Van Loan and Pitsianis (1993): the leading singular pair of the rearranged matrix
        for r in range(2):
            blocks_ = exact[r].view(3, 4, 3, 4).permute(0, 2, 1, 3).reshape(9, 16)
            u, s, v = torch.linalg.svd(blocks_)
            best = (s[0] * torch.outer(u[:, 0], v[0])).view(3, 3, 4, 4).permute(0, 2, 1, 3).reshape(12, 12)
            torch.testing.assert_close(found[r], best)


def test_nothing_seen_is_merged_without_a_division_by_zero(generator):
    zero = torch.zeros(2, 1, 4, 4, dtype=F64), torch.zeros(2, 1, 3, 3, dtype=F64)
    new = covariance(4, generator), covariance(3, generator)
    for how in MERGES:
        for pair in ((zero, new), (new, zero), (zero, zero)):
            assert all(bool(x.isfinite().all()) for x in merged(*pair, how))
        if how != "pi":
            torch.testing.assert_close(product(merged(zero, new, how)), product(new))


# --- training ---------------------------------------------------------------------------------------------------------


def factors_by_definition(network, x, temperature):
    """A and G of both layers: sum over examples and classes of outer products, one by one."""
    layers = {name: network[name] for name in ("1", "head 0")}
    found = {name: [0.0, 0.0] for name in layers}
    for example in x:
        pre = network["1"](example)
        hidden = torch.relu(pre)
        out = network["head 0"](hidden)
        logs = (out / temperature).log_softmax(0)
        for name, inputs in (("1", example), ("head 0", hidden)):
            a = torch.cat([inputs.detach(), torch.ones(1, dtype=F64)])
            found[name][0] = found[name][0] + torch.outer(a, a) / len(x)
        for c in range(3):
            grads = torch.autograd.grad(logs[c], [pre, out], retain_graph=True)
            for name, g in zip(layers, grads, strict=True):
                found[name][1] = found[name][1] + logs[c].exp().detach() * torch.outer(g, g) / len(x)
    return found


def damped(a, g, rho, learned):
    g = g + rho * g.diagonal().mean() * torch.eye(len(g), dtype=F64)
    if learned:
        free = torch.ones(len(a), dtype=F64)
        free[-1] = 0
        a = a + rho * a.diagonal()[:-1].mean() * free.diag()
    return a, g


def test_kfac_ewc_is_what_plain_torch_makes_of_its_equations():
    """Three tasks through one head, by whole matrices kron(G, A), every task's product kept."""
    rho, strength, warm = 0.3, 0.8, 2.0
    run = made("kfac-ewc", strength=strength, fisher_spread=rho, fisher_temperature=warm, kfac_merge="tasks")
    network, matrices, anchor = plain(run), {"1": 0.0, "head 0": 0.0}, {}

    def both(name):
        return torch.cat([network[name].weight, network[name].bias.unsqueeze(1)], 1)

    for k, n in enumerate((EXAMPLES, 20, EXAMPLES)):
        one = data(k, examples=n)
        run.learn([one])

        def loss(one=one):
            moved = {name: (both(name) - at).flatten() for name, at in anchor.items()}
            penalty = sum(d @ matrices[name] @ d for name, d in moved.items())
            return F.cross_entropy(logits(network, one.x[0]), one.y[0]) + strength / 2 * penalty / one.n

        adam(small_runs.used_by(network, 0), loss)
        for name, (a, g) in factors_by_definition(network, one.x[0], warm).items():
            a, g = damped(a, g, rho, name != "1")
            matrices[name] = matrices[name] + n * warm**2 * torch.kron(g, a)
            anchor[name] = both(name).detach().clone()
    assert_weights(run, run.network.posterior.mean, dict(network.named_parameters()))
    torch.testing.assert_close(product(run.memory.factors["1.weight"])[0], matrices["1"])


def test_kfac_evcl_s_gradient_is_autograd_s(generator):
    """Of all its terms together, as a step adds them; each replica has its own strength."""
    run = made("evcl", importance="kfac", replicas=2, fisher_floor=0.1)
    run.learn([data(0)])
    posterior, layout = run.network.posterior, run.network.layout
    s = Settings({**run.settings, "strength": torch.tensor([[0.5], [4.0]], dtype=F64)})
    terms = next(run.method.learn(run.memory, round_of(run, [data(1)]), s)).terms
    assert [type(term) for term in terms] == [KL, Factored, Elastic]
    q = posterior.map(lambda t: t + 0.1 * torch.randn(t.shape, generator=generator, dtype=F64), layout)
    assert_springs([terms[0], terms[2]], q)
    grads = Gradients(torch.zeros_like(q.mean), torch.zeros_like(q.mean), layout)
    add_gradients([terms[1]], q, grads, q.variance())
    wanted = autograd_gradients([terms[1]], q)
    torch.testing.assert_close(grads.mean, wanted[0], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(grads.variance * q.variance(), wanted[1], rtol=1e-9, atol=1e-12)
    one, two = (torch.rand(q.mean.shape, generator=generator, dtype=F64) for _ in range(2))
    assert_springs([Elastic(posterior, one, two)], q)  # which may hold variances otherwise than means


def test_the_kl_leaves_means_that_have_factors_to_them():
    """By its default, and no others: a norm has none."""
    network = nn.Sequential(nn.utils.skip_init(nn.Linear, 5, 4), nn.LayerNorm(4), nn.ReLU())
    run = made("evcl", importance="kfac", network=network, distill=0.0, tempering=0.1)
    layout, every = run.network.layout, run.network.posterior.mean.shape
    for number in range(2):
        springs = small_runs.first_fit(run, [data(number)]).terms[0].springs()
        for name in layout.shapes:
            pull = layout.view(springs.mean.w.expand(every), name)
            assert bool((pull > 0).all()) == (number == 0 or name.startswith(("1.", "head 1"))), name
            assert bool((layout.view(springs.linear.w.expand(every), name) > 0).all())
        run.learn([data(number)])


@pytest.mark.parametrize(
    ("plain", "factored", "choice"),
    [("ewc", "kfac-ewc", {"importance": "kfac"}), ("evcl", "kfac-evcl", {"posterior": "kronecker"})],
)
def test_a_method_with_factors_is_a_choice_of_settings(plain, factored, choice):
    """The choice and the strength of the other method give the other method."""
    tasks, given = [data(0), data(1)], {"hidden": (4,), "heads": (3, 3)}
    one = learned(plain, tasks, strength=1.0, **choice, **given)
    other = learned(factored, tasks, fisher_temperature=float(one.settings.fisher_temperature), **given)
    assert torch.equal(one.network.posterior.mean, other.network.posterior.mean)


def test_old_factors_fade_and_those_of_another_head_do_not():
    """`fisher_decay`, once per round, for the layers that the round trains."""
    run = made("kfac-ewc", kfac_merge="tasks", fisher_decay=0.5)
    run.learn([data(0)])
    before = run.memory.factors
    run.learn([data(1, head=1)])
    after = run.memory.factors
    assert after["1.weight"][0].shape[1] == 2
    torch.testing.assert_close(after["1.weight"][1][:, :1], 0.5 * before["1.weight"][1])
    assert torch.equal(after["head 0.weight"][1], before["head 0.weight"][1])
