"""`evcl.Stream`, as a user meets it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import evcl
from evcl import EvclError
from evcl._core.files import save_tensors
from evcl.streams.stream import State
from evcl.tables.saved import notes_of


def table(rows: int = 300, seed: int = 0) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=source)
    return x, (x[:, 0] + x[:, 1] * x[:, 2] > 0).long()


def fed(stream: evcl.Stream, x: Any, y: Any, batch: int = 20) -> list[Any]:
    return [stream.step(x[i : i + batch], y[i : i + batch])[0] for i in range(0, len(x), batch)]


def same(a: evcl.Stream, b: evcl.Stream) -> bool:
    one, other = a.state.arrays(), b.state.arrays()
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def goes_on(
    stream: evcl.Stream, folder: Path, x: Any, y: Any, batch: int, network: nn.Module | None = None
) -> list[Any]:
    """What a stream predicts, which is what it predicts when it was saved and loaded."""
    stream.save(folder / "stream.safetensors")
    other = evcl.Stream.load(folder / "stream.safetensors", network)
    assert (other.classes, other.rows, other.alarms) == (stream.classes, stream.rows, stream.alarms)
    found = fed(stream, x, y, batch)
    assert all(torch.equal(a, b) for a, b in zip(found, fed(other, x, y, batch), strict=True))
    assert same(stream, other)
    return found


VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "units": {"covariance": "units"},
    "low-rank": {"covariance": "low-rank", "rank": 5},
    "diagonal": {"covariance": "diagonal"},
    "mesu": {"method": "mesu"},
    "inner": {"inner_steps": 2},
    "mlp": {"network": evcl.nn.mlp(4, [8, 6])},
    "linear": {"network": evcl.nn.mlp(4, [])},
    "own": {"network": nn.Sequential(evcl.nn.mlp(4, [6]), nn.Tanh())},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_learns_grows_and_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    x, y = table()
    words = np.array(["no", "yes", "perhaps"])[(y + (x[:, 3] > 1).long() * (torch.arange(300) > 100)).clamp_max(2)]
    stream = evcl.Stream(**VARIANTS[name])
    first = fed(stream, x[:200], words[:200])
    assert first[0].shape == (20, 0)
    assert stream.classes == list(dict.fromkeys(words[:200].tolist()))
    for p in goes_on(stream, tmp_path, x[200:], words[200:], 20, VARIANTS[name]["network"] if name == "own" else None):
        assert torch.allclose(p.sum(1), torch.ones(len(p), dtype=torch.float64))
    hits = stream.predict(x[200:]) == words[200:]
    assert hits.mean() > 0.6


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("covariance", ["full", "units"])
def test_a_stream_of_single_rows_goes_on_bit_for_bit(covariance: str, classes: int, tmp_path: Path) -> None:
    """Also where the last rows are not yet part of the covariance."""
    x, y = table(160)
    y = (y + (x[:, 3] > 0).long()) % classes
    stream = evcl.Stream(classes=list(range(classes)), covariance=covariance)
    fed(stream, x[:101], y[:101], 1)
    goes_on(stream, tmp_path, x[101:], y[101:], 1)


@pytest.mark.parametrize("name", VARIANTS)
def test_batches_of_the_first_class_alone_are_learned(name: str) -> None:
    x, _ = table(40)
    stream = evcl.Stream(**VARIANTS[name])
    for i in range(0, 40, 5):
        stream.learn(x[i : i + 5], ["first"] * 5)
    assert torch.allclose(stream.predict_proba(x), torch.ones(40, 1, dtype=torch.float64))
    stream.learn(x[:5], ["second"] * 5)
    assert stream.classes == ["first", "second"]
    assert float(stream.predict_proba(x)[:, 1].max()) > 0.1


def test_what_is_predicted_does_not_depend_on_how_often() -> None:
    x, y = table()
    asked, silent = evcl.Stream(), evcl.Stream()
    for i in range(0, 100, 10):
        part = x[i : i + 10], y[i : i + 10]
        p = asked.predict_proba(part[0])
        asked.predict_proba(x)  # any number of rows
        assert torch.equal(p, asked.predict_proba(part[0]))
        asked.learn(*part)
        silent.learn(*part)
    assert same(asked, silent)


def test_rows_changed_in_place_are_predicted_anew() -> None:
    x, y = table(100)
    stream, rows = evcl.Stream(), x[:3].double()
    stream.learn(x, y)
    before = stream.predict_proba(rows)
    rows += 1
    after = stream.predict_proba(rows)
    assert not torch.equal(after, before)
    assert torch.equal(after, stream.predict_proba(rows.clone()))


def test_it_learns_a_rule_that_no_line_separates_and_is_calibrated() -> None:
    x, y = table(2000)
    p = torch.cat(fed(evcl.Stream(classes=[0, 1]), x, y))[1000:]
    right = (p.argmax(1) == y[1000:]).double()
    assert right.mean() > 0.93
    assert (right.mean() - p.max(1).values.mean()).abs() < 0.02


def test_it_adapts_to_a_reversal_and_raises_the_alarm() -> None:
    x, y = table(2000)
    y[1000:] = 1 - y[1000:]
    stream = evcl.Stream(classes=[0, 1])
    p = torch.cat(fed(stream, x, y))
    assert (p.argmax(1) == y)[1500:].double().mean() > 0.9
    (alarm,) = [a for a in stream.alarms if a.row >= 1000][:1]
    assert alarm.row < 1100
    assert alarm.surprise > math.log(1e4)
    assert "experts that remember" in alarm.action
    assert {0, 1, 2} & set(alarm.columns)
    assert set(alarm.reasons) == {"relation"}


def test_batches_and_single_rows_give_the_same_linear_model() -> None:
    x, _ = table(64)
    y = (x @ torch.tensor([1.0, -1.0, 0.5, 0.0]) + 3).double()
    one, many = (
        evcl.Stream(evcl.nn.mlp(4, []), "gaussian", noise=0.3, standardize=False, memories=[math.inf]) for _ in range(2)
    )
    for i in range(64):
        one.learn(x[i], y[i])
    many.learn(x[:40], y[:40])
    many.learn(x[40:], y[40:])
    a, b = one.predictions(x), many.predictions(x)
    assert (a.mean - b.mean).abs().max() < 1e-10
    assert (a.std - b.std).abs().max() < 1e-10


def test_numbers_have_noise_that_is_inferred() -> None:
    x, _ = table(2000)
    y = 1000 + 50 * x[:, 0] + 10 * torch.randn(2000, generator=torch.Generator().manual_seed(3))
    stream = evcl.Stream(likelihood="gaussian")
    fed(stream, x[:1500], y[:1500])
    found = stream.predictions(x[1500:].numpy())
    z = (y[1500:].numpy() - found.mean) / found.std
    assert abs(found.std.mean() - 10) < 2.5
    assert 0.93 < (np.abs(z) < 1.96).mean() < 0.985


def test_almost_equal_first_numbers_do_no_harm() -> None:
    draws = np.random.default_rng(0)
    x = draws.normal(size=(3000, 3))
    y = 2 * x[:, 0] + 0.1 * draws.normal(size=3000)
    y[:5] = 1 + 1e-6 * draws.normal(size=5)
    means = np.concatenate([one.mean for one in fed(evcl.Stream(likelihood="gaussian"), x, y, 5)])
    assert np.sqrt(np.mean((y - means)[2000:] ** 2)) < 0.3


def test_outliers_raise_no_alarm_but_a_change_does() -> None:
    draws = np.random.default_rng(0)
    x = draws.normal(size=(6200, 3))
    y = 2 * x[:, 0] * np.where(np.arange(6200) < 6000, 1, -1) + draws.standard_t(3, 6200)
    stream = evcl.Stream(likelihood="gaussian")
    fed(stream, x, y, 50)
    rows = [alarm.row for alarm in stream.alarms]
    assert sum(row < 6000 for row in rows) <= 1
    assert any(6000 <= row < 6100 for row in rows)


def test_counts_and_yes_or_no_labels() -> None:
    x, _ = table(1000)
    counts = torch.poisson((1 + 0.5 * x[:, 0]).exp(), generator=torch.Generator().manual_seed(3))
    stream = evcl.Stream(likelihood="poisson")
    fed(stream, x, counts)
    found = stream.predictions(x)
    assert ((found.mean - (1 + 0.5 * x[:, 0]).exp()).abs() / found.std).mean() < 0.2
    labels = (x[:, :2] > 0).long()
    stream = evcl.Stream(likelihood="bernoulli")
    fed(stream, x, labels)
    assert (stream.predict(x) == labels).double().mean() > 0.95
    assert stream.predict_proba(x).shape == (1000, 2)


@pytest.mark.parametrize("log_mean", [0, 5, 10, 12])
def test_counts_are_learned_whatever_their_size(log_mean: int) -> None:
    draws = np.random.default_rng(2)
    x = draws.normal(size=(2000, 3))
    y = draws.poisson(np.exp(log_mean + 0.5 * x[:, 0])).astype(float)
    means = np.concatenate([one.mean for one in fed(evcl.Stream(likelihood="poisson"), x, y, 50)])
    assert np.sqrt(np.mean((y - means)[1000:] ** 2)) < y.std()


def test_a_single_row_is_a_row_or_a_batch_of_one() -> None:
    x, y = table(30)
    stream = evcl.Stream()
    for i in range(30):
        stream.learn(x[i], int(y[i]))
    assert torch.equal(stream.predict_proba(x[0]), stream.predict_proba(x[:1]))
    assert stream.predict_proba(x[0].tolist()).shape == (1, 2)


def test_any_shape_of_rows() -> None:
    x = torch.randn(40, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    y = (x.mean((1, 2, 3)) > 0).long()
    with torch.random.fork_rng():
        network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten())
    stream = evcl.Stream(network)
    before = {name: p.clone() for name, p in network.state_dict().items()}
    fed(stream, x, y)
    assert stream.predict_proba(x[0]).shape == (1, 2)
    assert all(torch.equal(p, before[name]) for name, p in network.state_dict().items())  # the user's own is unchanged


BAD: dict[str, tuple[Any, Any, str]] = {
    "nan": (torch.tensor([[1.0, math.nan, 0, 0]]), [1], "NaN"),
    "width": (torch.zeros(1, 5), [1], "shape"),
    "text": (np.array([["a", "b", "c", "d"]]), [1], "numbers"),
    "empty": (torch.zeros(0, 4), [], "empty"),
    "fewer labels": (torch.zeros(3, 4), [1, 0], "3 inputs but 2"),
    "float labels": (torch.zeros(1, 4), [0.5], "integers or strings"),
    "another type": (torch.zeros(1, 4), ["one"], "type"),
    "infinite squares": (np.array([[1e160, 0.0, 0.0, 0.0]]), [0], "below 1e\\+100"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_refused_in_one_line_and_change_nothing(name: str) -> None:
    x, y = table(40)
    stream, untouched = evcl.Stream(), evcl.Stream()
    for one in (stream, untouched):
        one.learn(x, y)
    bad_x, bad_y, wanted = BAD[name]
    for call in (stream.learn, stream.step):
        with pytest.raises(EvclError, match=wanted) as error:
            call(bad_x, bad_y)
        assert "\n" not in str(error.value)
    assert (stream.rows, stream.classes) == (40, untouched.classes)
    assert same(stream, untouched)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"memories": []}, "memories"),
        ({"memories": [0.5]}, "memories"),
        ({"noise": 1.0}, "noise"),
        ({"covariance": "some"}, "covariance"),
        ({"network": 3}, "network"),
        ({"classes": [1, 1]}, "differ"),
        ({"likelihood": "beta"}, "likelihood"),
        ({"speed": 3}, "speed"),
        ({"false_alarms": 2}, "false_alarms"),
    ],
)
def test_bad_settings_are_named(given: dict[str, Any], wanted: str) -> None:
    with pytest.raises(EvclError, match=wanted):
        evcl.Stream(**given)


def test_damaged_files_are_refused_in_one_line(tmp_path: Path) -> None:
    stream, path = evcl.Stream(), tmp_path / "stream.safetensors"
    with pytest.raises(EvclError, match="first row"):
        stream.save(path)
    stream.learn(*table(40))
    stream.save(path)
    tensors, about = load_file(path), json.loads(notes_of(path)["evcl_stream"])
    damaged: list[tuple[dict[str, Any], dict[str, Tensor]]] = [
        ({**about, "format": 99}, tensors),
        ({**about, "classes": [0, 1, 2]}, tensors),
        ({name: value for name, value in about.items() if name != "shape"}, tensors),
        (about, {**tensors, "bank/experts/0/filter/mean": tensors["bank/experts/0/filter/mean"] * math.nan}),
        (about, {name: t for name, t in tensors.items() if name != "scaling/mean"}),
        ({**about, "shape": [10**9]}, tensors),
    ]
    for i, (text, own) in enumerate(damaged):
        bad = tmp_path / f"{i}.safetensors"
        save_tensors(bad, own, {"evcl_stream": json.dumps(text)})
        with pytest.raises(EvclError, match="cannot load") as error:
            evcl.Stream.load(bad)
        assert "\n" not in str(error.value)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(EvclError, match="cannot load"):
        evcl.Stream.load(path)


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian", "poisson"])
def test_a_changed_file_predicts_probabilities_or_is_refused(likelihood: str, tmp_path: Path) -> None:
    stream, path = evcl.Stream(likelihood=likelihood), tmp_path / "stream.safetensors"
    x, y = table(60)
    fed(stream, x, y)
    stream.save(path)
    tensors, about = load_file(path), notes_of(path)
    refused = set()
    for name, tensor in tensors.items():
        for value in (0, 1e300):
            changed = torch.full_like(tensor, value if tensor.is_floating_point() else min(value, 10**9))
            save_tensors(path, {**tensors, name: changed}, about)
            try:
                other = evcl.Stream.load(path)
                if likelihood == "categorical":
                    p = other.predict_proba(x[:5])
                    assert bool((p >= 0).all()), (name, value)
                    assert torch.allclose(p.sum(1), torch.ones(5, dtype=torch.float64)), (name, value)
                else:
                    assert all(bool(part.isfinite().all()) for part in other.predictions(x[:5])), (name, value)
            except EvclError:
                refused.add((name, value))
    shares = {"bank/shares/log", *(["bank/ways/log"] if likelihood == "categorical" else [])}
    assert {(name, value) for name in shares for value in (0, 1e300)} <= refused


def test_the_state_does_not_grow() -> None:
    x, y = table(600)
    stream = evcl.Stream(classes=[0, 1])
    sizes = []
    for _ in range(3):
        fed(stream, x, y, 50)
        sizes.append(sum(array.size for array in stream.state.arrays().values()))
    assert len(set(sizes)) == 1


def test_constant_columns_and_huge_numbers_do_no_harm() -> None:
    x, y = table(300)
    x = torch.cat([x * torch.tensor([1e12, 1e-12, 1.0, 1.0]), torch.ones(300, 1)], 1)
    x[100, 0] = 1e30
    stream = evcl.Stream(classes=[0, 1])
    p = torch.cat(fed(stream, x, y))
    assert bool(p.isfinite().all())
    assert (p.argmax(1) == y)[200:].double().mean() > 0.75


@pytest.mark.soak
def test_a_long_stream_stays_finite_in_flat_memory() -> None:
    """60,000 rows whose rule turns round every 5,000."""
    resource = pytest.importorskip("resource")
    stream, memory = evcl.Stream(classes=[0, 1]), []
    for part in range(12):
        x, y = table(5000, seed=part)
        p = torch.cat(fed(stream, x, y if part % 2 else 1 - y, 50))
        assert bool(p.isfinite().all())
        memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert memory[-1] < 1.05 * memory[2]


def test_an_expert_that_is_replaced_has_the_noise_of_its_source() -> None:
    """Otherwise it predicts with the noise of its first rows, and is replaced again and again."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(3000, 4))
    y = x[:, 0] + 0.1 * generator.normal(size=3000)
    stream = evcl.Stream(likelihood="gaussian")
    for start in range(0, 3000, 8):
        stream.learn(x[start : start + 8], y[start : start + 8])
    assert stream.shares[math.inf] > 0.2  # it was 0.01
    experts = stream.state.bank.experts
    experts.copy(0, 1)
    assert experts.observing.noise[0] == experts.observing.noise[1]


def test_a_known_noise_is_in_the_units_of_the_targets() -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(600, 3))
    y = 100 * x[:, 0] + 5 * generator.normal(size=600)
    stream = evcl.Stream(likelihood="gaussian", noise=5.0)
    stream.learn(x, y)
    assert 5 < stream.predictions(np.zeros((1, 3))).std[0] < 7  # it was 500


def test_any_layout_in_memory_is_a_row() -> None:
    x, y = np.random.default_rng(0).normal(size=(8, 5)), [0, 1] * 4
    frozen = x.copy()
    frozen.flags.writeable = False
    wanted = None
    for given in (x, np.asfortranarray(x), x[::-1][::-1], frozen):
        with torch.random.fork_rng():
            stream = evcl.Stream(nn.Linear(5, 4), standardize=False)
        stream.network.load_state_dict({"weight": torch.ones(4, 5) / 9, "bias": torch.zeros(4)})
        stream.learn(given, y)
        found = stream.predict_proba(x)
        wanted = found if wanted is None else wanted
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(("covariance", "columns", "wanted"), [("auto", 3, "cannot take"), ("units", 5, "low-rank")])
def test_a_first_call_that_is_refused_leaves_the_stream_as_it_was(covariance: str, columns: int, wanted: str) -> None:
    with torch.random.fork_rng():
        stream = evcl.Stream(nn.Linear(5, 4), covariance=covariance)
    with pytest.raises(EvclError, match=wanted):
        stream.learn(np.zeros((4, columns)), [0, 1, 2, 3])
    assert (stream.classes, stream.rows) == ([], 0)
    if covariance == "auto":
        stream.learn(np.zeros((4, 5)), [0, 1, 0, 1])
        assert stream.classes == [0, 1]


def test_rows_changed_in_place_between_predicting_and_learning() -> None:
    x, y = np.random.default_rng(0).normal(size=(6, 3)), [0, 1, 0, 1, 1, 0]
    streams = [evcl.Stream(standardize=False, inner_steps=3) for _ in range(2)]
    for stream, changed in zip(streams, (False, True), strict=True):
        stream.learn(x, y)
        own = 2 * x
        stream.predict(own)
        if changed:
            own[:] = 99
        stream.learn(2 * x, y)
    np.testing.assert_array_equal(*(stream.predict_proba(x) for stream in streams))


@pytest.mark.parametrize("covariance", ["full", "units", "low-rank", "diagonal"])
def test_classes_known_in_advance_are_those_that_come_one_by_one(covariance: str) -> None:
    x = np.random.default_rng(0).normal(size=(4, 3))
    known, new = (evcl.Stream(classes=classes, covariance=covariance) for classes in ([0, 1, 2, 3], [0]))
    one, other = State(known, x, 3), State(new, x, 0)
    for _ in range(3):
        other.grow(1)
    for name, wanted in one.arrays().items():
        np.testing.assert_array_equal(other.arrays()[name], wanted, name)


def test_with_many_classes_the_covariance_has_a_block_per_unit(tmp_path: Path) -> None:
    """All of it would take 0.1 s per row. Few classes keep all of it."""
    x = np.random.default_rng(0).normal(size=(60, 10))
    stream = evcl.Stream()
    sizes = []
    for i in range(60):
        stream.step(x[i], i % 20)
        sizes.append(max(array.size for array in stream.state.arrays().values()))
    assert sizes[5] > 3 * 352**2  # 6 classes
    assert max(sizes[20:]) < 3 * 352**2
    stream.save(tmp_path / "stream.safetensors")
    other = evcl.Stream.load(tmp_path / "stream.safetensors")
    assert np.array_equal(other.predict_proba(x), stream.predict_proba(x))


@pytest.mark.parametrize("name", ["full", "identity", "frozen"])
def test_a_stream_that_begins_without_weights_learns_its_second_class(name: str) -> None:
    """With one class there are no outputs, and these networks have no weights below them."""
    with torch.random.fork_rng():
        networks = {"identity": nn.Identity(), "frozen": nn.Linear(4, 8).requires_grad_(False)}
    stream = evcl.Stream(networks.get(name), covariance="full" if name == "full" else "auto")
    x = np.random.default_rng(0).normal(size=(120, 4))
    y = (x[:, 0] > 0).astype(int)
    y[:20] = 0
    for row, label in zip(x, y, strict=True):
        stream.learn(row, label)
    assert (stream.predict(x[20:]) == y[20:]).mean() > 0.9


def test_what_is_done_to_a_prediction_does_not_change_what_is_learned() -> None:
    x, y = np.random.default_rng(0).normal(size=(64, 3)), np.arange(64) % 2
    streams = [evcl.Stream(seed=0), evcl.Stream(seed=0)]
    for k, stream in enumerate(streams):
        stream.learn(x, y)
        said = stream.predict_proba(x)
        if k:
            said[:] = 0.5
    reports = [stream.learn(x, y) for stream in streams]
    assert reports[0].surprise == reports[1].surprise


def test_a_network_that_failed_can_be_saved_and_loaded(tmp_path: Path) -> None:
    stream = evcl.Stream(standardize=False, seed=0)
    for k, row in enumerate(1e60 * np.random.default_rng(0).normal(size=(12, 3))):
        stream.learn(row, k % 3)
    stream.save(tmp_path / "s.safetensors")
    assert evcl.Stream.load(tmp_path / "s.safetensors").rows == 12
