"""Another network than the benchmark's own: `--network 400x400`, and the preset `authors`, which names one."""

from __future__ import annotations

import json
import runpy
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

from evcl._core.errors import EvclError
from evcl.experiments import configure, execute, open_folder, write_result
from evcl.experiments.programs import programs
from evcl.experiments.resume import describe
from evcl.experiments.trunk import is_text, parsed
from evcl.methods import METHODS
from evcl.report.runs import command

SHORT = {"epochs": 1}
AUTHORS = Path(__file__).parents[2] / "experiments" / "authors"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("100", {"hidden": [100]}),
        ("400x400", {"hidden": [400, 400]}),
        (
            "800x800, dropout 0.5, input dropout 0.2",
            {"hidden": [800, 800], "dropout": 0.5, "input_dropout": 0.2},
        ),
    ],
)
def test_a_network_is_the_widths_of_its_layers(text, wanted):
    assert parsed(text) == wanted


@pytest.mark.parametrize(
    "text",
    ["resnet", "400 x 400", "400x", "400x400, dropout", "400, dropout 2", "400, drop 0.5", "400, 0.5", "0x", ","],
)
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
    assert not is_text(None)
    assert is_text("400x400")


def authors():
    tables = tomllib.loads(files("evcl.experiments").joinpath("presets.toml").read_text("utf-8"))["authors"]
    return [(benchmark, method) for benchmark, each in tables.items() if benchmark != "*" for method in each]


@pytest.mark.parametrize(("benchmark", "method"), authors())
def test_authors_protocols_are_complete_configurations(benchmark, method):
    """Every setting is known and in its range; the number of tasks and the network are the authors', unless given."""
    assert method in METHODS
    config = configure(benchmark, method, "authors", [0])
    assert config.preset == "authors"
    assert config.settings.epochs >= 10
    assert configure(benchmark, method, "authors", [0], tasks=2, given={"network": "20"}).tasks == 2
    assert configure(benchmark, method, "authors", [0], given={"network": "20"}).network == "20"


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
    with pytest.raises(EvclError, match=r"no naive on split-mnist; it has only ewc, gvcl, .* xdg$"):
        configure("split-mnist", "naive", "authors", [0])


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
