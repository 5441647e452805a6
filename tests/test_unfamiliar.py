"""Unknown means unknown: how far a row lies from all that was learned, whatever learned it, saved it or failed to."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from checks import quietly
from safetensors.torch import load_file
from sklearn.metrics import roc_auc_score

import evcl as package
from evcl._core.density import MAX_DIRECTIONS, VALUES_AT_ONCE, Density, density, room
from evcl.methods import METHODS
from evcl.sklearn import EVCLClassifier

HERE = Path(__file__).parent
SOURCE = np.random.default_rng(0)
MIX = SOURCE.normal(size=(4, 10))


def rows(n, seed=0, at=0.0):
    """Ten columns that go together, of deviations about 1."""
    source = np.random.default_rng(seed)
    x = (source.normal(size=(n, 4)) @ MIX + 0.3 * source.normal(size=(n, 10))) / np.sqrt((MIX**2).sum(0)) + at
    return x.astype("float32"), (x[:, 0] > at).astype(int)


def learned(method="evcl", **options):
    learner = package.Learner(package.nn.mlp(10, [16]), method, epochs=5, **options)
    learner.learn(rows(200), "first")
    return learner


def auroc(known, far):
    return roc_auc_score(np.repeat([0, 1], [len(known), len(far)]), np.concatenate([known, far]))


def of(x, most=MAX_DIRECTIONS):
    return density(torch.as_tensor(x), torch.full((len(x),), 0.5), most)


def assert_same(one, other, tolerance=0.0):
    for name, tensor in one.tensors().items():
        torch.testing.assert_close(other.tensors()[name], tensor, rtol=tolerance, atol=tolerance)


# --- the number ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["evcl", "vcl", "ewc", "naive", "lwf", "vcl-random-coreset"])
def test_changed_rows_are_farther_than_held_out_ones(method):
    assert method in METHODS
    learner, (x, _) = learned(method), rows(300, seed=1)
    known = learner.predictions(x).unfamiliar
    assert known.shape == (300,)
    assert 0.7 < np.median(known) < 1.3
    shuffled = np.stack([SOURCE.permutation(column) for column in x.T], 1)
    for far, least in ((5 * x, 0.95), (x + 4, 0.95), (shuffled, 0.8)):
        assert auroc(known, learner.predictions(far).unfamiliar) >= least


def test_it_is_the_distance_that_its_definition_says():
    x = rows(300)[0].astype("float64")
    x[:, 3] *= 1000  # the scale of a column does not matter
    z = (x - x.mean(0)) / x.std(0)
    t = (10 / 3) / (300 + 10 / 3)
    shrunk = (1 - t) * np.corrcoef(x.T) + t * np.eye(10)
    together = (z @ np.linalg.inv(shrunk) * z).sum(1) / np.trace(np.linalg.solve(shrunk, np.corrcoef(x.T)))
    wanted = np.sqrt((np.maximum(together, (z**2).mean(1)) + 0.7 / 0.5) / 2)
    found = of(x).unfamiliar(torch.tensor(x), torch.full((300,), 0.7))
    assert found.numpy() == pytest.approx(wanted, rel=1e-4)


def test_a_doubtful_row_is_less_familiar_than_a_sure_one_at_the_same_place():
    """Half of it is the doubt: 4 times the usual one makes it sqrt((d^2 + 4) / (d^2 + 1)) times as large."""
    x = torch.tensor(rows(200)[0]).double()
    sure, doubtful = (of(x).unfamiliar(x, torch.full((200,), doubt)) for doubt in (0.5, 2.0))
    torch.testing.assert_close(doubtful.square() - sure.square(), torch.full_like(sure, 1.5), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("columns", [1, 3, 30, 300])
def test_a_typical_row_has_about_1_whatever_the_columns(columns):
    x = torch.tensor(np.random.default_rng(0).normal(size=(1000, columns)))
    found = of(x[:500]).unfamiliar(x[500:], torch.full((500,), 0.5))
    assert 0.7 < float(found.median()) < 1.3


def test_few_rows_constant_and_repeated_columns():
    x = np.random.default_rng(0).normal(size=(40, 30)).astype("float32") * 1e6
    x[:, 3], x[:, 4], x[:, 5], x[:, 6] = x[:, 7], 2 * x[:, 8], 2.0, 0.0
    seen, doubt = of(x[:20]), torch.full((20,), 0.5)
    assert 0.5 < float(seen.unfamiliar(torch.tensor(x[20:]), doubt).median()) < 3
    for column in (3, 5, 6):
        moved = x[20:].copy()
        moved[:, column] += 3e6
        found = seen.unfamiliar(torch.tensor(moved), doubt)
        assert (found > seen.unfamiliar(torch.tensor(x[20:]), doubt)).float().mean() > 0.7
        assert float(found.max()) < 100


@pytest.mark.parametrize("x", [np.zeros((5, 3)), np.ones((1, 4)), np.full((3, 2), 1e30)])
def test_rows_that_are_all_alike(x):
    found = of(x).unfamiliar(torch.tensor(np.concatenate([x, x + 1])), torch.zeros(2 * len(x)))
    assert found.isfinite().all()
    assert (found[: len(x)] < 1e-6).all()


def test_a_huge_number_is_far_and_finite():
    found = learned().predictions(np.full((1, 10), 1e15, dtype="float32"))
    assert np.isfinite(found.unfamiliar).all()
    assert found.unfamiliar[0] > 1e6


def test_a_category_never_seen_in_this_combination_is_finite():
    source = np.random.default_rng(0)
    kind = source.integers(0, 3, 400)
    x = np.concatenate([source.normal(size=(400, 4)), np.eye(4)[kind], np.eye(3)[kind]], 1)  # the fourth is never there
    seen = of(x)
    other = np.concatenate([x[:100, :4], np.eye(4)[kind[:100]], np.eye(3)[(kind[:100] + 1) % 3]], 1)
    absent = np.concatenate([x[:100, :4], np.zeros((100, 7))], 1)
    known = seen.unfamiliar(torch.tensor(x), torch.zeros(400))
    for far in (other, absent):
        found = seen.unfamiliar(torch.tensor(far), torch.zeros(100))
        assert float(known.max()) < float(found.min()) < float(found.max()) < 100


# --- merging -------------------------------------------------------------------------------------------------------


def test_two_halves_are_the_whole():
    x, at = rows(300)[0], rows(500, at=3.0)[0]
    whole, halves = of(np.concatenate([x, at])), of(x).merged(of(at), MAX_DIRECTIONS)
    for name in ("about", "mean", "variance"):
        torch.testing.assert_close(getattr(halves, name), getattr(whole, name))
    torch.testing.assert_close(halves.rows.T @ halves.rows, whole.rows.T @ whole.rows, rtol=1e-5, atol=1e-5)
    new, doubt = torch.tensor(rows(50, seed=2)[0]), torch.full((50,), 0.2)
    torch.testing.assert_close(halves.unfamiliar(new, doubt), whole.unfamiliar(new, doubt), rtol=1e-4, atol=1e-5)


def test_many_tasks_have_the_size_of_one_and_wide_inputs_are_bounded():
    falling = 0.9 ** np.arange(40)
    x = (np.random.default_rng(0).normal(size=(500, 40)) * falling) @ np.random.default_rng(1).normal(size=(40, 400))
    most = room(400, weights=4000)
    assert most == 25
    found = of(x[:100], most)
    for start in range(100, 500, 100):
        found = found.merged(of(x[start : start + 100], most), most)
    assert found.rows.shape == (25, 400)
    assert room(784, 784 * 100) == room(100, 0) == 100
    assert room(20_000, 0) == 1
    doubt = torch.full((500,), 0.5)
    assert float(found.about[0]) == 500
    together, apart = of(x, most).unfamiliar(torch.tensor(x), doubt), found.unfamiliar(torch.tensor(x), doubt)
    assert np.corrcoef(together, apart)[0, 1] > 0.9


def test_rows_come_in_chunks():
    """A fifth of rows that are there five times says what all of them say."""
    x = torch.tensor(rows(VALUES_AT_ONCE // 40)[0]).repeat(5, 1)
    parts, whole = of(x), of(x[: VALUES_AT_ONCE // 40])
    for name in ("mean", "variance"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name))
    new = torch.tensor(rows(100, seed=1)[0])
    found, wanted = (one.unfamiliar(new, torch.zeros(100)) for one in (parts, whole))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    far = parts.unfamiliar(x, torch.zeros(len(x)))
    torch.testing.assert_close(far[-100:], parts.unfamiliar(x[-100:], torch.zeros(100)))


def test_an_earlier_task_stays_familiar():
    learner = learned()
    before = learner.predictions(rows(200, seed=1, at=9.0)[0], "first").unfamiliar
    learner.learn(rows(200, at=9.0), "second")
    old, new = (learner.predictions(rows(200, seed=1, at=at)[0], "infer").unfamiliar for at in (0.0, 9.0))
    assert np.median(before) > 4
    assert np.median(old) < 1.6
    assert np.median(new) < 1.6
    assert learner.state.session.density.about[0] == 400
    assert learner.state.session.density.rows.shape == (10, 10)


# --- files ---------------------------------------------------------------------------------------------------------


def test_saved_and_loaded_bit_for_bit(tmp_path):
    learner, (x, _) = learned(), rows(50, seed=1)
    learner.save(tmp_path / "m")
    again = package.load(tmp_path / "m")
    assert_same(learner.state.session.density, again.state.session.density)
    assert (again.predictions(x).unfamiliar == learner.predictions(x).unfamiliar).all()
    for one in (learner, again):
        one.learn(rows(80, seed=2), "second", head="first")
    assert_same(learner.state.session.density, again.state.session.density)
    assert not any(t.shape[0] == 200 for t in load_file(tmp_path / "m").values() if t.dim())  # no rows


def test_a_model_of_an_earlier_release_says_nothing(evcl):
    kept = HERE / "tables" / "kept"
    learner = package.load(kept / "model-1.safetensors")
    x = np.zeros((3, learner.state.plain.inputs))
    assert learner.predictions(x, 0).unfamiliar is None
    learner.learn((np.random.default_rng(0).normal(size=(20, x.shape[1])), np.arange(20) % 2), "more")
    assert learner.predictions(x, "more").unfamiliar is None  # of what came before nothing is known
    words = ("--model", kept / "model-1.safetensors", "--data", kept / "new.csv", "--out", "p.csv")
    status, out, _ = evcl("predict", *words)
    assert status == 0
    assert out.count("no column unfamiliar") == 1
    with Path("p.csv").open(newline="") as file:
        assert "unfamiliar" not in next(csv.reader(file))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("about", torch.tensor([0.0, 0.5], dtype=torch.float64)),
        ("about", torch.tensor([3.0, -1.0], dtype=torch.float64)),
        ("about", torch.tensor([3.0], dtype=torch.float64)),
        ("mean", torch.zeros(4, dtype=torch.float64)),
        ("mean", torch.full((10,), torch.nan, dtype=torch.float64)),
        ("variance", torch.full((10,), -1.0, dtype=torch.float64)),
        ("variance", torch.ones(10)),
        ("rows", torch.zeros(3, 4)),
        ("rows", torch.full((3, 10), torch.inf)),
        ("low", torch.zeros(4, dtype=torch.float64)),
        ("low", torch.full((10,), 99.0, dtype=torch.float64)),
        ("high", torch.full((10,), torch.nan, dtype=torch.float64)),
        ("high", torch.full((10,), 99.0)),
    ],
)
def test_a_damaged_density_is_refused(name, value):
    with pytest.raises(package.EvclError, match="density"):
        Density.from_tensors({**of(rows(20)[0]).tensors(), name: value})


# --- rounds --------------------------------------------------------------------------------------------------------


class Fails(package.Callback):
    def end_task(self, *_):
        raise RuntimeError("at the very end")


def test_a_round_that_fails_leaves_it_as_it_was():
    learner, (x, _) = learned(), rows(50, seed=1)
    before, said = learner.state.session.density, learner.predictions(x).unfamiliar
    with pytest.raises(RuntimeError, match="at the very end"):
        learner.learn(rows(200, at=9.0), "second", head="first", callbacks=[Fails()])
    assert learner.state.session.density is before
    assert (learner.predictions(x).unfamiliar == said).all()
    fresh = package.EVCL(package.nn.mlp(10, [4]), epochs=1)
    with pytest.raises(RuntimeError, match="at the very end"):
        fresh.learn(rows(20), "first", callbacks=[Fails()])
    assert not fresh.knows_unfamiliar


def test_a_resumed_task_ends_with_the_same(tmp_path):
    class Stop(package.Callback):
        def end_epoch(self, epoch):
            if epoch.epoch == 2:
                raise KeyboardInterrupt

    one, other = (package.EVCL(package.nn.mlp(10, [4]), epochs=4) for _ in range(2))
    one.learn(rows(60), "first")
    with pytest.raises(KeyboardInterrupt):
        other.learn(rows(60), "first", callbacks=[Stop()], checkpoint=tmp_path / "c")
    other.learn(rows(60), "first", checkpoint=tmp_path / "c")
    assert_same(one.state.session.density, other.state.session.density)


def test_what_is_held_out_is_not_learned():
    learner = package.EVCL(package.nn.mlp(10, [4]), epochs=1)
    learner.learn(rows(100), "first", validation=0.2)
    assert learner.state.session.density.about[0] == 80


# --- inputs of any shape -------------------------------------------------------------------------------------------


def trunk():
    first = quietly(lambda: torch.nn.Conv2d(1, 4, 3)), torch.nn.ReLU()
    return torch.nn.Sequential(*first, torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten())


def test_images_of_bytes():
    x = np.random.default_rng(0).integers(0, 100, size=(60, 1, 8, 8)).astype("uint8")
    learner = package.EVCL(trunk(), epochs=1)
    learner.learn(x, np.arange(60) % 2)
    known, inverted = learner.predictions(x).unfamiliar, learner.predictions(255 - x).unfamiliar
    assert known.max() < inverted.min()


def test_images_of_another_size_have_no_number():
    x = np.random.default_rng(0).normal(size=(20, 1, 8, 8))
    learner = package.EVCL(trunk(), epochs=1)
    learner.learn(x, np.arange(20) % 2)
    assert learner.predictions(x[..., :6]).unfamiliar is None
    learner.learn(x[..., :6], np.arange(20) % 2)
    assert learner.predictions(x, 0).unfamiliar is None  # of two shapes there is no one density


class Tokens(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = quietly(lambda: torch.nn.Embedding(9, 4))

    def forward(self, x):
        return self.embedding(x.long()).flatten(1)


def test_tokens_have_no_number():
    x = np.random.default_rng(0).integers(0, 9, size=(30, 5))
    learner = package.EVCL(Tokens(), epochs=1)
    learner.learn(x, np.arange(30) % 2)
    assert learner.predictions(x).unfamiliar is None
    assert not learner.knows_unfamiliar


def test_tensors_and_float16():
    learner, x = learned(), torch.tensor(rows(20, seed=1)[0])
    found = learner.predictions(x.half()).unfamiliar
    assert isinstance(found, torch.Tensor)
    assert found.dtype == torch.float32
    assert found.numpy() == pytest.approx(learner.predictions(x).unfamiliar.numpy(), rel=0.02)


# --- other forms ---------------------------------------------------------------------------------------------------


def test_the_estimator_says_it():
    model = EVCLClassifier(epochs=5, random_state=0).fit(*rows(200))
    x = rows(100, seed=1)[0]
    known, far = model.uncertainty(x).unfamiliar, model.uncertainty(x + 4).unfamiliar
    assert auroc(known, far) > 0.95


def test_the_command_line_writes_it(evcl):
    names = [f"c{k}" for k in range(10)]
    for name, (x, y) in {"january": rows(200), "new": rows(100, seed=1), "far": rows(100, seed=1, at=4.0)}.items():
        with Path(f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([[*names, "y"], *([*row, label] for row, label in zip(x, y, strict=True))])
    assert evcl("learn", "--model", "m", "--data", "january.csv", "--target", "y", "--epochs", "5")[0] == 0
    found = {}
    for name in ("new", "far"):
        status, out, _ = evcl("predict", "--model", "m", "--data", f"{name}.csv", "--out", "p.csv")
        assert status == 0
        with Path("p.csv").open(newline="") as file:
            found[name] = np.array([float(row["unfamiliar"]) for row in csv.DictReader(file)])
        assert float(out.partition("unfamiliar ")[2].split()[0]) == pytest.approx(found[name].mean(), abs=0.002)
    assert 0.7 < np.median(found["new"]) < 1.3
    assert auroc(found["new"], found["far"]) > 0.95
