"""The page that shows the whole method: it stays a page, it works, and the library computes what it says.

In float64, with the same first weights, batches and noise, the page is the oracle of the preset `paper`.
"""

from __future__ import annotations

import ast
import inspect
import runpy
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from calls import heard
from torch.optim.optimizer import register_optimizer_step_post_hook

import evcl
from evcl._core.settings import resolve
from evcl.curvature import Sample, fisher
from evcl.experiments import configure
from evcl.methods import METHODS, Round
from evcl.methods.memories import narrowed
from evcl.nn import Gaussian
from evcl.training import Run, TaskData

PAGE = Path(__file__).parent.parent.parent / "examples" / "evcl_in_100_lines.py"
F64 = torch.float64
N, INPUTS, WIDTHS, CLASSES = 20, 6, [5, 4], 3
LAMBDA, BETA, GAMMA, LR, EPOCHS, BATCH, SIGMA = 50.0, 0.3, 0.9, 0.01, 3, 8, 0.1


@pytest.fixture
def page():
    return SimpleNamespace(**runpy.run_path(str(PAGE)))


def test_it_is_one_page_and_needs_nothing_of_the_library():
    text = PAGE.read_text("utf-8")
    assert len(text.splitlines()) <= 100
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module.partition(".")[0])
    assert imported == {"torch", "sklearn"}


@pytest.mark.full
def test_as_a_program_it_keeps_what_it_learned(program):
    rows = [line.split("\t") for line in program(PAGE).splitlines()[1:]]
    found = {name: [float(cell.removesuffix("%")) for cell in cells] for name, *cells in rows}
    assert list(found) == ["EVCL", "VCL"]
    assert len(found["EVCL"]) == len(found["VCL"]) == 5
    assert min(found["EVCL"]) > 90
    assert sum(found["EVCL"]) / 5 > 96
    assert sum(found["EVCL"]) > sum(found["VCL"])


# --- the oracle ------------------------------------------------------------------------------------------------------


class Handed:
    """Noise for the library from the generator that the page draws from."""

    def __init__(self, source):
        self.source = source

    def normal_(self, out):
        return out.normal_(generator=self.source)


class Pair:
    """The page and the library, about to learn two tasks with a head each: the same data, first weights and noise."""

    def __init__(self, page, monkeypatch):
        self.page = page
        source = torch.Generator().manual_seed(0)
        self.x = torch.randn(2, N, INPUTS, generator=source, dtype=F64)
        self.y = torch.randint(CLASSES, (2, N), generator=source)
        widths = [INPUTS, *WIDTHS]
        self.trunk = [page.Layer(*pair, source, SIGMA) for pair in pairwise(widths)]
        self.heads = [page.Layer(widths[-1], CLASSES, source, SIGMA) for _ in range(2)]
        for layer in (*self.trunk, *self.heads):
            for name, tensor in vars(layer).items():
                setattr(layer, name, tensor.detach().double().requires_grad_(tensor.requires_grad))

        given = {"strength": LAMBDA, "tempering": BETA, "fisher_decay": GAMMA, "init_std": SIGMA}
        given |= {"lr": LR, "epochs": EPOCHS, "batch_size": BATCH}
        preset = configure("split-digits", "evcl", "paper", given=given).settings
        known = METHODS["evcl"].known_settings
        settings = resolve("evcl", known, {name: preset[name] for name in known})
        self.run = Run(evcl.nn.mlp(INPUTS, WIDTHS), METHODS["evcl"], [settings], [0], draw=True, dtype=F64)
        self.start_from(self.trunk)

        # The page draws batches and noise from one generator, and now so does the library.
        self.source = torch.Generator()
        monkeypatch.setattr("evcl.training.optimise.generator", lambda *_: self.source)

    def start_from(self, layers):
        """Set the last weights of the library's posterior to those of these layers."""
        mean, log_std = self.run.network.posterior.mean.clone(), self.run.network.posterior.log_std.clone()
        for flat, attribute in ((mean, "mu"), (log_std, "log_sigma")):
            values = flat_of(layers, attribute)
            flat[:, -values.shape[1] :] = values
        self.run.network.posterior = Gaussian(mean, log_std)

    def task(self, k):
        return TaskData(self.x[k : k + 1], self.y[k : k + 1], k)

    def layers(self, k):
        return [*self.trunk, self.heads[k]]

    def add_head(self, k):
        assert self.run.add_head(WIDTHS[-1], CLASSES) == k
        self.start_from([self.heads[k]])

    def learn_by_library(self, k):
        self.source.manual_seed(k)
        self.run.learn([self.task(k)], noise=Handed(self.source))

    def learn_by_page(self, k):
        """Returns the weights after each step: means, then log sigmas."""
        steps = []

        def note(*_):
            steps.extend(flat_of(self.layers(k), attribute) for attribute in ("mu", "log_sigma"))

        hook = register_optimizer_step_post_hook(note)
        try:
            self.source.manual_seed(k)
            self.page.learn(self.layers(k), self.x[k], self.y[k], self.source, LAMBDA, BETA, GAMMA, LR, EPOCHS, BATCH)
        finally:
            hook.remove()
        return steps


def flat_of(layers, attribute):
    return flattened([getattr(layer, attribute) for layer in layers])


def flattened(tensors):
    """[1, P]: the page's [inputs + 1, outputs] tensors in the library's order, weight [outputs, inputs] and bias."""
    return torch.cat([part for t in tensors for part in (t[:-1].T.flatten(), t[-1])]).detach().unsqueeze(0)


@pytest.fixture
def pair(page, monkeypatch):
    return Pair(page, monkeypatch)


@pytest.fixture
def updates():
    """(gradient, weights after the step) of each update by the library's Adam: the means', then the log sigmas'."""
    grads, noted = [], []
    with (
        heard("rules.Adam.step", lambda given: grads.append(given["grad"].clone())),
        heard("rules.Adam.step", lambda left: noted.append((grads.pop(), left["self"].weights.clone())), "return"),
    ):
        yield noted


def test_the_fisher_is_that_of_the_last_task_alone(page):
    """As in Algorithm 1 of the paper. The released code sums the Fishers: gamma = 1."""
    assert inspect.signature(page.learn).parameters["gamma"].default == 0
    assert configure("split-digits", "evcl", "paper").settings["fisher_decay"] == 0


def test_the_library_takes_the_pages_steps(pair, updates):
    """Two tasks of nine steps each; then what is remembered of them: the prior, which is the anchor, and the Fisher."""
    for k in range(2):
        pair.add_head(k)
        updates.clear()
        pair.learn_by_library(k)
        steps = pair.learn_by_page(k)
        assert len(steps) == 2 * 9
        for (_, found), wanted in zip(updates, steps, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)
        posterior, memory, layers = pair.run.network.posterior, pair.run.memory, [*pair.trunk, *pair.heads[: k + 1]]
        for found, attribute in (
            (posterior.mean, "mu"),
            (posterior.log_std, "log_sigma"),
            (memory.prior.mean, "mu_star"),
            (memory.prior.log_std, "log_sigma_star"),
            (memory.importance, "fisher"),
        ):
            torch.testing.assert_close(found, flat_of(layers, attribute), rtol=0, atol=1e-9)


def test_the_librarys_objective_is_the_pages(pair, updates):
    """In the second task, away from the anchor: the KL, the elastic term, and the gradient of the whole."""
    pair.add_head(0)
    pair.learn_by_library(0)
    pair.learn_by_page(0)
    pair.add_head(1)
    run, layers, task = pair.run, pair.layers(1), pair.task(1)
    for layer in layers:
        with torch.no_grad():
            layer.mu += 0.1
            layer.log_sigma += 0.2
        layer.mu.grad = layer.log_sigma.grad = None
    pair.start_from([*pair.trunk, *pair.heads])

    def objective(lambda_, beta):
        rows = torch.randperm(N, generator=pair.source.manual_seed(1))[:BATCH]
        return pair.page.objective(layers, task.x[0, rows], task.y[0, rows], N, lambda_, beta, pair.source)

    round_ = Round(1, [task], run.network, run.network.posterior, run.seen, run.seeds, run.likelihood)
    terms = {term.name: term for term in next(METHODS["evcl"].learn(run.memory, round_, run.settings)).terms}
    kl, elastic = (float((objective(*weights) - objective(0, 0)).detach()) for weights in ((0, BETA), (LAMBDA, 0)))
    part = run.network.layout.part(run.network.names_of([1]))
    q = run.network.posterior.map(lambda t: run.network.layout.gather(t, part))
    for name, wanted in (("kl", kl), ("elastic", elastic)):
        found = float(narrowed(terms[name], run.network.layout, part).loss(q))
        assert wanted > 1e-3
        assert found == pytest.approx(wanted, rel=1e-9)

    objective(LAMBDA, BETA).backward()
    updates.clear()
    pair.learn_by_library(1)
    for (found, _), attribute in zip(updates[:2], ("mu", "log_sigma"), strict=True):
        wanted = flattened([getattr(layer, attribute).grad for layer in layers])
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def test_the_librarys_fisher_is_the_pages(pair):
    pair.add_head(0)
    network, task = pair.run.network, pair.task(0)
    found = fisher(Sample(network, network.posterior.mean, network.layout, [0], task.x, task.y))
    wanted = flattened(pair.page.fisher(pair.layers(0), task.x[0]))
    assert wanted.max() > 1e-2
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-14)


def test_the_librarys_predictions_are_the_pages_where_sigma_is_nothing(pair):
    """They draw in different ways, so that only what they draw around is the same."""
    pair.add_head(0)
    for layer in pair.layers(0):
        layer.log_sigma.data.fill_(-30)
    pair.start_from(pair.layers(0))
    found = pair.page.predict(pair.layers(0), pair.x[0], pair.source.manual_seed(0))
    torch.testing.assert_close(pair.run.predict(pair.x[:1], 0)[0], found, rtol=0, atol=1e-9)
