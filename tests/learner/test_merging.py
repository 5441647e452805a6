"""Models that learned apart are merged: the product is exact where posteriors are, and what cannot be is refused."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from checks import refused

import evcl
from evcl import EvclError
from evcl._core.density import density as density_of
from evcl._core.density import of_sites
from evcl.learner import rebuilt
from evcl.methods import KL, Fit, Learned, Method, per_head, per_weight, register
from evcl.methods.class_statistics import TEMPERATURES, Statistics, square, triangle
from evcl.methods.merging import Moved
from evcl.posterior import Gaussian


@pytest.fixture(autouse=True)
def _files_lack_classes_here():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", evcl.ForgettingWarning)
        yield


def rows(seed, classes=(0, 1, 2), count=150):
    """Classes are blobs at the corners of a polygon."""
    source = np.random.default_rng(seed)
    y = source.choice(np.array(classes), count)
    centres = 3 * np.stack([np.cos(np.arange(9)), np.sin(np.arange(9)), np.arange(9) % 3 - 1.0], 1)
    return (centres[y] + 0.5 * source.normal(size=(count, 3))).astype("float32"), y


def learner(method="evcl", **more):
    return evcl.Learner(evcl.nn.mlp(3, [12]), method, epochs=20, lr=0.02, **more)


def started(classes=(0, 1, 2), method="evcl", **more):
    made = learner(method, **more)
    made.learn(rows(0, classes, 60), task="base")
    return made


def after(base, seed, classes, task="more", head=0):
    site = rebuilt(*base.described())
    site.learn(rows(seed, classes), task=task, head=head)
    return site


def test_the_product_is_exact_for_linear_regression():
    """Rows of a design with orthogonal columns have a diagonal posterior: that of all rows is the product."""
    source = np.random.default_rng(0)
    w, noise = source.normal(size=5), 0.3
    parts = []
    for count in (7, 30, 12):
        x = np.linalg.qr(source.normal(size=(count, 5)))[0] * source.uniform(1, 4, 5)
        parts.append((x, x @ w + noise * source.normal(size=count)))

    def posterior(*some):
        precision = np.full(5, 2.0) + sum((x**2).sum(0) for x, _ in some) / noise**2
        mean = sum(x.T @ y for x, y in some) / noise**2 / precision
        return Gaussian(torch.from_numpy(mean)[None], -0.5 * torch.from_numpy(precision)[None].log())

    base, *sites = parts
    found, wanted = posterior(base), posterior(base, *sites)
    for site in sites:
        found = found.plus(posterior(base, site).since(posterior(base)))
    torch.testing.assert_close(found.mean, wanted.mean)
    torch.testing.assert_close(found.log_std, wanted.log_std)


def test_statistics_of_classes_are_those_of_all_rows(generator):
    """Exactly, whatever classes the sites have."""
    f = torch.randn(90, 4, generator=generator, dtype=torch.float64) + 2
    y = torch.randint(0, 4, (90,), generator=generator)
    parts = [torch.arange(90) < 30, torch.arange(90) < 60, (torch.arange(90) < 30) | (torch.arange(90) >= 60)]

    def counted(some):
        classes, scatter = torch.zeros(1, 4, 5, dtype=torch.float64), torch.zeros(4, 4, dtype=torch.float64)
        for c in range(4):
            own = f[some & (y == c)]
            classes[0, c] = torch.cat([torch.tensor([float(len(own))]), own.mean(0)])
            scatter += (own - own.mean(0)).T @ (own - own.mean(0))
        common = {
            "scatter": triangle(scatter)[None],
            "squares": (f[some] ** 2).sum(0)[None],
            "nll": torch.zeros(1, len(TEMPERATURES)),
        }
        return Statistics({0: classes}, {**common, "centre": torch.zeros(1, 4), "scale": torch.ones(1, 1)})

    base, *sites = map(counted, parts)
    same = Moved("same", torch.arange(1), 1, {0: (0, torch.arange(4))}, {0: 4})
    found, wanted = base.merged(sites, [same] * 3), counted(torch.ones(90, dtype=torch.bool))
    torch.testing.assert_close(found.classes[0], wanted.classes[0])
    torch.testing.assert_close(square(found.common["scatter"][0]), square(wanted.common["scatter"][0]))
    torch.testing.assert_close(found.common["squares"], wanted.common["squares"])


def test_the_density_is_that_of_all_rows(generator):
    x = torch.randn(90, 3, generator=generator, dtype=torch.float64) @ torch.randn(3, 3, generator=generator).double()
    parts = [x[:30], x[:60], torch.cat([x[:30], x[60:]])]
    base, *sites = (density_of(some, torch.full((len(some),), 0.2), 3) for some in parts)
    found, wanted = of_sites(base, sites), density_of(x, torch.full((90,), 0.2), 3)
    for name in ("about", "mean", "variance", "low", "high"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name))
    torch.testing.assert_close(found.rows.T @ found.rows, wanted.rows.T @ wanted.rows, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["evcl", "vcl"])
def test_sites_of_other_classes_make_one_model_of_all(method):
    base = started(method=method, tempering=0.02, **({"posterior": "diagonal"} if method == "evcl" else {}))
    sites = [after(base, 1, (0,)), after(base, 2, (1, 2))]
    merged = evcl.merge(base, sites, ["rome", "oslo"])
    assert merged.tasks == ("base", "rome: more", "oslo: more")
    x, y = rows(3, count=600)
    right = [one.measure((x, y), 0).accuracy for one in (merged, *sites)]
    assert right[0] > 0.95
    assert right[0] >= max(right) - 0.01
    at_once = after(base, 4, (0, 1, 2))
    assert right[0] >= at_once.measure((x, y), 0).accuracy - 0.03
    certain = [float(one.state.run.network.posterior.log_std.mean()) for one in (base, *sites, merged)]
    assert certain[-1] < min(certain[1:-1]) < certain[0]  # in one unit, it has learned from more rows than any other


def test_the_order_of_sites_does_not_matter():
    base = started()
    sites = [after(base, k, (0, 1, 2), task=f"site {k}") for k in (1, 2, 3)]
    x, _ = rows(4)
    found = [evcl.merge(base, some).predict_proba(x) for some in (sites, sites[::-1])]
    np.testing.assert_allclose(*found, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("known", "sites", "accuracy"),
    [
        ((0, 1), [(2, 3), (4, 5)], 0.93),  # each has new ones
        ((0, 1), [(2, 3), (3, 4)], 0.93),  # a class is new at both
        ((0, 1, 2), [(0, 1, 2, 3), (0, 1, 2, 4)], 0.9),  # a softmax has grown at both
    ],
)
def test_new_classes_of_the_sites_are_all_known(known, sites, accuracy):
    base = started(known)
    merged = evcl.merge(base, [after(base, 1 + k, classes) for k, classes in enumerate(sites)])
    every = tuple(sorted({*known, *sites[0], *sites[1]}))
    assert merged.classes(0) == every
    assert merged.measure(rows(3, every if len(known) == 2 else known, 600), 0).accuracy > accuracy
    assert merged.predictions(rows(3)[0], 0).unfamiliar is not None


def test_heads_of_their_own_keep_their_predictions():
    base = started()
    sites = [after(base, 1, (0, 1, 2), task="a"), after(base, 2, (3, 4), task="b", head="new")]
    merged = evcl.merge(base, sites)
    assert merged.heads == ("base", "b")
    assert merged.classes("b") == (3, 4)
    assert merged.measure(rows(3, (3, 4)), "b").accuracy > 0.95


def test_a_merged_model_is_saved_and_learns_on(tmp_path):
    base = started()
    merged = evcl.merge(base, [after(base, 1, (0,)), after(base, 2, (1, 2))])
    merged.save(tmp_path / "m.safetensors")
    again = evcl.load(tmp_path / "m.safetensors")
    x, y = rows(3)
    assert np.array_equal(again.predict_proba(x), merged.predict_proba(x))
    again.learn((x, y), task="next", head=0)
    assert again.measure((x, y), 0).accuracy > 0.95
    assert len(again.card()["tasks"]) == 4
    site = after(merged, 5, (0, 1), task="second round")  # and it can be a base
    assert evcl.merge(merged, [site, after(merged, 6, (1, 2), task="too")]).tasks[-2:] == ("second round", "too")


def test_the_rows_of_a_site_count_once():
    """A merged model with one of its sites, and a site with itself at an earlier time, would count rows twice."""
    base = started()
    north, south = after(base, 1, (0, 1), task="may"), after(base, 2, (1, 2), task="june")
    merged = evcl.merge(base, [north, south], ["north", "south"])
    later = after(north, 3, (0, 1), task="july")
    for sites, names in (([merged, north], ["all", "north"]), ([north, later], ["north", "later"])):
        message = f"{names[0]} and {names[1]} have both learned the rows of '.*', which would count twice: leave one"
        with pytest.raises(EvclError, match=message) as told:
            evcl.merge(base, sites, names)
        assert "\n" not in str(told.value)
    west = after(merged, 4, (0, 2), task="west")  # the base has learned those of both
    assert len(evcl.merge(merged, [west, after(merged, 5, (1, 2), task="east")]).tasks) == 5


def test_what_cannot_be_merged_is_refused_in_one_line():
    base = started()
    sites = [after(base, 1, (0, 1)), after(base, 2, (1, 2))]
    other = started(seed=1)
    kept = rebuilt(*base.described()).keep(10)
    kept.learn(rows(1), task="more", head=0)
    ewc = started(method="ewc")
    numbers = learner(likelihood="gaussian")
    numbers.learn((rows(0)[0], rows(0)[0][:, 0]), task="base")
    cases = {
        "the base predicts numbers, or several labels": (numbers, sites),
        "at least two sites": (base, sites[:1]),
        "site 2 is the same model as another site": (base, [sites[0], rebuilt(*sites[0].described())]),
        "site 2 has another seed than the base": (base, [sites[0], after(other, 1, (0, 1))]),
        "site 1 has learned nothing since the base": (base, [base, sites[0]]),
        "site 1 does not continue the base": (sites[0], [sites[1], after(sites[0], 3, (0, 1), task="third")]),
        "keeps rows, which would leave their site": (base, [sites[0], kept]),
        "ewc with its settings cannot be merged": (ewc, [after(ewc, 1, (0, 1)), after(ewc, 2, (0, 1))]),
    }
    for message, (first, some) in cases.items():
        with refused(message):
            evcl.merge(first, some)


@dataclass(frozen=True)
class Counted:
    prior: Gaussian = per_weight(Gaussian, "prior", merge="posterior")
    steps: torch.Tensor = per_weight(merge="sum")  # how often each weight was trained
    largest: torch.Tensor = per_weight(merge="max")
    rows: dict[int, torch.Tensor] = per_head(merge="sum")


@dataclass(frozen=True)
class Silent(Counted):
    again: torch.Tensor = per_weight()


def own_method(memory):
    def learn(before, round_, s):
        fitted = yield Fit(round_.tasks, terms=[KL(before.prior, 1 / round_.n)])
        steps, (task,) = before.steps + fitted.used, round_.tasks
        rows = {**before.rows, task.head: before.rows.get(task.head, torch.zeros(1, 1)) + task.n}
        largest = torch.maximum(before.largest, fitted.q.mean.abs())
        return Learned(fitted.q, replace(before, prior=fitted.q, steps=steps, largest=largest, rows=rows))

    return register(Method(f"merges-{memory.__name__}", "an example", True, learn, memory), overwrite=True)


def test_a_memory_of_one_s_own_merges_as_its_fields_declare():
    base = started(method=own_method(Counted))
    sites = [after(base, 1, (0, 1)), after(base, 2, (1, 2))]
    merged = evcl.merge(base, sites)
    memory, parts = merged.state.run.memory, [one.state.run.memory for one in (base, *sites)]
    assert torch.equal(memory.steps, torch.full_like(memory.steps, 3))  # once at the base, once at each site
    assert torch.equal(memory.largest, torch.stack([one.largest for one in parts]).amax(0))
    assert float(memory.rows[0]) == 60 + 2 * 150
    assert torch.equal(memory.prior.mean[0, :36].view(12, 3), merged.posterior["1.weight"].mean)


def test_a_memory_that_does_not_say_how_it_merges_is_refused():
    base = started(method=own_method(Silent))
    message = "the base: merges-Silent with its settings cannot be merged: its memory's field 'again' does not declare"
    with refused(message):
        evcl.merge(base, [after(base, 1, (0, 1)), after(base, 2, (1, 2))])
