"""Another network than the benchmark's own: `--network 400x400` or `resnet18`; the preset `authors` names one."""

from __future__ import annotations

import json
import runpy
import tomllib
from functools import partial
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from made_up_cells import registered
from torch import nn

from evcl import data
from evcl._core.errors import EvclError
from evcl.benchmarks import Benchmark, get
from evcl.experiments import configure, execute, open_folder, write_result
from evcl.experiments.folder import describe
from evcl.experiments.paper import cost
from evcl.experiments.parallel import programs
from evcl.experiments.run import execute_together
from evcl.experiments.trunk import is_text, parsed, trunk
from evcl.methods import METHODS
from evcl.report.runs import command, settings

SHORT = {"epochs": 1}
full = partial(pytest.param, marks=pytest.mark.full)
AUTHORS = Path(__file__).parents[2] / "experiments" / "authors"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("100", {"hidden": [100]}),
        ("400x400", {"hidden": [400, 400]}),
        ("800x800, dropout 0.5, input dropout 0.2", {"hidden": [800, 800], "dropout": 0.5, "input_dropout": 0.2}),
        ("resnet18", {"name": "resnet18"}),
        ("reduced-resnet18, group norm", {"name": "reduced-resnet18", "norm": "group"}),
        ("cnn, dropout 0.5", {"name": "cnn", "dropout": 0.5}),
    ],
)
def test_a_network_is_the_widths_of_its_layers_or_a_name(text, wanted):
    assert parsed(text) == wanted


NO_NETWORKS = """resnet | 400 x 400 | 400x | 400x400, dropout | 400, dropout 2 | 400, drop 0.5 | 400, 0.5 | 0x | , |
400, group norm | resnet18, dropout 0.5 | cnn, group norm | cnn, input dropout 0.5 | resnet18 group norm |
resnet18, group norm, batch norm | cnnx400"""


@pytest.mark.parametrize("text", [text.strip() for text in NO_NETWORKS.split("|")])
def test_anything_else_is_refused_with_an_example(text):
    with pytest.raises(EvclError, match="network must be the widths of the hidden layers, such as 400x400"):
        configure("split-digits", "naive", given={"network": text})


def test_a_run_has_the_network_that_it_was_given(tmp_path):
    asked = {**SHORT, "network": "7x5, dropout 0.5"}
    config = configure("split-digits", "naive", "default", [0], 2, asked)
    result = execute(config)
    assert result.config["hidden"] == [7, 5]
    assert result.config["network"] == "7x5, dropout 0.5"
    assert "--network '7x5, dropout 0.5'" in command(result)
    own = execute(configure("split-digits", "naive", "default", [0], 2, SHORT))
    assert own.config["hidden"] == [100, 100]
    assert "network" not in own.config
    assert "--network" not in command(own)
    assert own.accuracy != result.accuracy
    write_result(tmp_path, result)
    assert open_folder(tmp_path, config) is not None  # the same run
    with pytest.raises(EvclError, match="another run"):
        open_folder(tmp_path, configure("split-digits", "naive", "default", [0], 2, SHORT))


def test_networks_do_not_share_a_program_and_have_checkpoints_of_their_own():
    plain, other = (
        configure("split-digits", "naive", "default", [0], 2, {**SHORT, **more}) for more in ({}, {"network": "7"})
    )
    assert programs([plain, other], 8) == [[0], [1]]
    assert "network" not in describe(plain)  # as before there was a choice
    assert json.dumps(describe(plain)) != json.dumps(describe(other))


def test_the_name_of_a_benchmarks_own_network_is_no_choice():
    assert not is_text("small_resnet")
    assert not is_text("reduced_resnet18")  # the own network of split-cifar10-conv
    assert not is_text(None)
    assert is_text("400x400")
    assert is_text("resnet18, group norm")


# --- convolutional networks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "weights", "features"),
    [
        ("reduced-resnet18", 1_093_140, 160),
        ("resnet18", 11_168_832, 512),
        ("resnet18, group norm", 11_168_832, 512),
        ("cnn", 1_245_728, 512),
        ("cnn, dropout 0.5", 1_245_728, 512),
    ],
)
def test_a_named_network_has_its_published_size(text, weights, features):
    with torch.random.fork_rng():
        made, grey = trunk(text, (3, 32, 32)).eval(), trunk(text, (1, 28, 28)).eval()
    assert sum(p.numel() for p in made.parameters()) == weights
    assert made(torch.zeros(2, 3, 32, 32)).shape == (2, features)
    assert grey(torch.zeros(2, 1, 28, 28)).shape == (2, features)
    kinds = {type(layer) for layer in made.modules()}
    assert (nn.BatchNorm2d in kinds) == text.endswith("resnet18")
    assert (nn.GroupNorm in kinds) == text.endswith("group norm")
    assert [layer.p for layer in made.modules() if isinstance(layer, nn.Dropout)] == (
        [0.25, 0.25, 0.5] if "dropout" in text else []
    )


@pytest.mark.parametrize(
    ("text", "shape", "message"),
    [
        ("resnet18", (784,), r"network resnet18 needs images \[channels, height, width\], .* the shape \[784\]"),
        ("cnn", (3, 8, 8), "network cnn needs square images of at least 10 x 10 pixels, not 8 x 8"),
    ],
)
def test_a_named_network_needs_images(text, shape, message):
    with pytest.raises(EvclError, match=message):
        trunk(text, shape)


@pytest.fixture
def pictures(monkeypatch):
    """CIFAR-10 with few images: eight of each class to train, four to test."""

    def load(name, data_dir=None, offline=None):
        source = np.random.default_rng(0)
        parts = []
        for count in (80, 40):
            labels = np.arange(count).astype(np.uint8) % 10
            images = source.integers(0, 100, (count, 32, 32, 3), np.uint8)
            parts += [images + labels[:, None, None, None] * np.uint8(15), labels]
        return data.Dataset(name, *parts)

    monkeypatch.setattr(data, "load", load)


def small(method, **given):
    precision = given.pop("precision", None)
    few = {"fisher_examples": 4, "predict_samples": 2, "epochs": 1, "batch_size": 8}
    few = {name: value for name, value in few.items() if name in METHODS[method].known_settings}
    return configure("split-cifar10-conv", method, "tuned", [0, 1], 2, {**few, **given}, "cpu", precision)


def test_images_are_augmented_where_published_results_are(pictures):
    config = small("naive")
    assert config.settings.augment is True
    assert small("naive", augment=False).settings.augment is False
    assert configure("split-cifar10-conv", "naive", "default").settings.augment is False
    assert configure("split-cifar10", "naive").settings.augment is False
    result = execute(config)
    assert (result.config["network"], result.config["augment"]) == ("reduced_resnet18", True)
    assert "--network" not in command(result)
    assert "augment" not in command(result)  # the preset's


NETWORKS = ["cnn, dropout 0.5", full("reduced-resnet18"), full("reduced-resnet18, group norm")]


@pytest.mark.parametrize("method", ["naive", full("ewc"), "evcl"])
@pytest.mark.parametrize("network", NETWORKS)
def test_plain_and_bayesian_methods_train_convolutional_networks(method, network, pictures, tmp_path):
    config = small(method, network=network)
    result = execute(config)
    assert result.config["network"] == network
    assert "hidden" not in result.config
    assert network in command(result)
    write_result(tmp_path, result)
    assert open_folder(tmp_path, config) is not None
    assert not result.diverged
    (alone,) = execute_together([config.cells[1]])
    assert alone.accuracy[0] == result.accuracy[1]


def test_in_any_scenario(pictures):
    sizes = []
    for scenario in ("task", "domain", "class"):
        result = execute(small("naive", network="cnn", scenario=scenario, augment=False))
        sizes.append(result.config["scenario"])
        assert len(result.accuracy[0]) == 2
    assert sizes == ["task", "domain", "class"]


@pytest.mark.parametrize("method", ["naive", full("evcl")])
def test_convolutions_in_bf16_learn_nearly_the_same(method, pictures):
    of_one_kind = {"std_rate": 0.01} if method == "evcl" else {}  # in few steps, it is 1 by default
    exact, rough = (
        execute(small(method, network="cnn", precision=precision, lr=1e-4, **of_one_kind))
        for precision in ("fp32", "bf16")
    )
    assert rough.config["precision"] == "bf16"
    assert rough.nll != exact.nll
    assert rough.nll.mean == pytest.approx(exact.nll.mean, rel=0.02)


# --- a benchmark's own network; that torch's generator is left alone, conftest.py checks -----------------------------


def test_a_benchmarks_own_network_is_told_from_one_that_was_chosen(tmp_path):
    def resnet18():
        return nn.Sequential(nn.Flatten(), nn.utils.skip_init(nn.Linear, 64, 5))

    with registered("own", network=resnet18):
        config = configure("own", "naive", "default", [0], 1, SHORT)
        result = execute(config)
        write_result(tmp_path, result)
        assert open_folder(tmp_path, config) is not None
        assert "--network" not in command(result)


def convolutional():
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten())


@pytest.fixture
def benchmark():
    with registered("pictures", network=convolutional) as name:
        yield name


def test_it_is_what_learns(benchmark):
    given = {"epochs": 5, "lr": 0.01, "batch_size": 32}
    results = [execute(configure(benchmark, "vcl", "paper", [0], 1, given)) for _ in range(2)]
    assert results[0].accuracy == results[1].accuracy
    assert results[0].average_accuracy.mean > 0.9
    assert results[0].memory_bytes // 8 == 4 * 9 + 4 + 2 * (4 * 36 + 1)  # a mean and a sigma per weight
    assert "hidden" not in results[0].config
    assert results[0].config["network"] == settings(results[0])["network"] == "convolutional"


def test_it_stays_with_a_part_of_the_stream_and_the_forecast_counts_its_weights(benchmark):
    assert get(benchmark, tasks=2, validation=0.2).network is convolutional
    assert cost(configure(benchmark, "naive", "paper", [0], 1, SHORT)) == (4 * 9 + 4) * len(get(benchmark)[0].train)


def test_a_stream_has_hidden_layers_or_a_network():
    for given in ({}, {"hidden": (8,), "network": convolutional}):
        with pytest.raises(EvclError, match=r"needs either hidden= .* or network="):
            Benchmark("pictures", get("split-digits"), **given)


# --- the preset authors ----------------------------------------------------------------------------------------------


def authors():
    tables = tomllib.loads(files("evcl.experiments").joinpath("presets.toml").read_text("utf-8"))["authors"]
    return [(benchmark, method) for benchmark, each in tables.items() if benchmark != "*" for method in each]


@pytest.mark.parametrize(("benchmark", "method"), authors())
def test_authors_protocols_are_complete_configurations(benchmark, method):
    """Every setting is known and in its range; the number of tasks and the network are the authors', unless given."""
    assert method in METHODS
    config = configure(benchmark, method, "authors", [0])
    assert config.preset == "authors"
    assert config.settings.epochs >= (1 if method in ("er", "derpp") else 10)
    assert configure(benchmark, method, "authors", [0], tasks=2, given={"network": "20"}).tasks == 2
    assert configure(benchmark, method, "authors", [0], given={"network": "20"}).network == "20"


@pytest.mark.records
def test_the_table_of_the_authors_protocols_is_made_from_the_results():
    made = runpy.run_path(str(AUTHORS / "reproduce.py"))
    text = made["DOCUMENT"].read_text("utf-8")
    assert made["filled"](text) == text, "run python experiments/authors/reproduce.py table"
    assert {(one.benchmark, one.method) for one in made["PROTOCOLS"]} == set(authors())


def test_authors_of_imm_used_three_tasks_and_dropout():
    config = configure("permuted-mnist", "imm-mode", "authors", [0])
    assert config.tasks == 3
    assert config.network == "800x800, dropout 0.5, input dropout 0.2"
    assert config.settings.optimizer == "sgd"


def test_a_method_without_a_protocol_says_where_there_is_one():
    with pytest.raises(EvclError, match=r"no si on split-digits; it has si only on permuted-mnist and split-mnist$"):
        configure("split-digits", "si", "authors", [0])
    with pytest.raises(EvclError, match=r"no naive on split-mnist; it has only derpp, .*er, ewc, .* si there$"):
        configure("split-mnist", "naive", "authors", [0])
    with pytest.raises(EvclError, match=r"no evcl on split-digits; it has only permuted-mnist and split-mnist$"):
        configure("split-digits", "evcl", "authors", [0])


@pytest.mark.parametrize(
    ("method", "asked", "why"),
    [
        ("xdg", {"importance": "kfac"}, "a matrix couples weights of units that a task closes"),
        ("ewc-offline", {"importance": "kfac"}, "use kfac-ewc with kfac_merge=tasks"),
        ("vogn", {"film": "true"}, "FiLM's scales and shifts are not part of it"),
    ],
)
def test_what_cannot_be_combined_is_refused_with_the_reason(method, asked, why):
    ((name, value),) = asked.items()
    with pytest.raises(EvclError, match=f"{name}={value} cannot be used with this method: .*{why}"):
        configure("split-digits", method, "default", [0], given=asked)
