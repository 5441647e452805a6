"""The command line as a person uses it: what it prints, writes and returns."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name

import pytest
import typer
from rich.console import Console

from evcl import experiments
from evcl._core.catalogue import (
    AGENT_FACTS,
    AGENT_SUMMARIES,
    BENCHMARK_SUMMARIES,
    EXAMPLE_NETWORK,
    METHOD_FACTS,
    METHOD_SUMMARIES,
    ROW_SUMMARIES,
    measured,
)
from evcl._core.errors import EvclError
from evcl.cli import app, lists

FAST = ["--epochs", "1", "--seeds", "2", "--tasks", "2"]


def test_run_writes_the_documented_result(evcl):
    status, out, err = evcl("run", "permuted-digits", "--method", "evcl", *FAST, "--set", "strength=7", "--out", "r")
    assert (status, err) == (0, "")
    result = json.loads(Path("r/result.json").read_text())
    assert list(result) == [
        "schema", "benchmark", "method", "preset", "config", "parts", "rules", "seeds", "accuracy", "average_accuracy",
        "forgetting", "backward_transfer", "nll", "ece", "reliability", "resolved", "task_names", "seconds",
        "memory_bytes",
        "environment",
    ]  # fmt: skip
    assert (result["schema"], result["benchmark"], result["method"], result["preset"], result["seeds"]) == (
        1, "permuted-digits", "evcl", "tuned", [0, 1],
    )  # fmt: skip
    config = result["config"]
    assert (config["strength"], config["epochs"], config["tasks"], config["validation"]) == (7.0, 1, 2, 0.0)
    assert {"tempering", "init_std", "prior_std", "std_lr_scale", "fisher", "fisher_examples", "fisher_decay"} <= set(
        config
    )
    assert len(result["accuracy"]) == 2
    assert result["accuracy"][0][0][1] is None
    for key in ("average_accuracy", "forgetting", "backward_transfer", "nll", "ece"):
        assert set(result[key]) == {"mean", "std", "per_seed"}
        assert len(result[key]["per_seed"]) == 2
    last = [row[-1] for row in result["accuracy"]]
    assert result["average_accuracy"]["per_seed"] == [pytest.approx(sum(row) / 2) for row in last]
    assert set(result["environment"]) == {"evcl", "torch", "device", "threads", "platform"}
    assert result["environment"]["threads"] == 1
    assert result["environment"]["device"]  # the processor's name
    assert "task 2 of 2 learned" in out
    assert "result: r/result.json" in out
    assert str(Path.cwd()) not in Path("r/result.json").read_text()
    assert [p.name for p in Path("r").iterdir()] == ["result.json"]


def test_the_list_of_constants_names_parts_and_reasons(evcl):
    status, out, _ = evcl("list", "constants", "kfac-evcl")
    assert status == 0
    for text in ("infer.known", "p(y | x) = sum_g", "ADAM_STEP_FRACTION", "Kingma and Ba"):
        assert text in out
    assert evcl("list", "constants", "ekfc")[0] == 2
    assert evcl("list", "constants", "mesu")[0] == 2


@pytest.mark.full
def test_a_result_and_a_report_name_the_method_that_the_settings_compose(evcl):
    assert evcl("run", "split-digits", "--method", "evcl", "--set", "memory=20", *FAST, "--out", "r")[0] == 0
    result = json.loads(Path("r/result.json").read_text())
    assert (result["method"], result["composed"], result["config"]["memory"]) == ("evcl", "evcl-er", 20)
    assert "evcl-er" in evcl("report", "r")[1]


def test_the_same_command_twice_gives_the_same_bytes_but_for_seconds(evcl):
    texts = []
    for folder in ("a", "b"):
        assert evcl("run", "split-digits", *FAST, "--out", folder)[0] == 0
        lines = Path(folder, "result.json").read_text().splitlines()
        texts.append([line for line in lines if not line.startswith(' "seconds"')])
        assert len(lines) == len(texts[-1]) + 1
    assert texts[0] == texts[1]


@pytest.mark.full
def test_validation_measures_on_the_held_out_part(evcl):
    evcl("run", "split-digits", "--method", "naive", *FAST, "--validation", "0.2", "--out", "v")
    result = json.loads(Path("v/result.json").read_text())
    assert result["config"]["validation"] == 0.2
    held = round(0.2 * 279)  # 0/1: 279 of the 1,400
    assert any(
        abs(result["accuracy"][0][0][0] * n - round(result["accuracy"][0][0][0] * n)) < 1e-9 for n in (held, held + 1)
    )


@pytest.mark.full
def test_joint_fills_the_last_row_alone(evcl):
    assert evcl("run", "split-digits", "--method", "joint", *FAST)[0] == 0
    result = json.loads(Path("runs/split-digits/joint/result.json").read_text())
    assert result["accuracy"][0][0] == [None, None]
    assert None not in result["accuracy"][0][1]
    assert result["forgetting"] == {"mean": None, "std": None, "per_seed": [None, None]}


def test_a_finished_run_is_left_alone_and_another_is_refused(evcl):
    command = ["run", "split-digits", "--method", "naive", *FAST, "--out", "r"]
    evcl(*command)
    before = Path("r/result.json").read_bytes()
    status, out, _ = evcl(*command)
    assert status == 0
    assert "already holds this run" in out
    assert Path("r/result.json").read_bytes() == before
    for other in (["--set", "lr=0.01"], ["--tasks", "3"]):
        status, _, err = evcl(*(command if other[0] == "--set" else command[:-4] + command[-2:]), *other)
        assert (status, err) == (1, "evcl: r holds another run (split-digits naive): pass --overwrite or --out\n")
        assert Path("r/result.json").read_bytes() == before
    assert evcl(*command, "--set", "lr=0.01", "--overwrite")[0] == 0
    assert json.loads(Path("r/result.json").read_text())["config"]["lr"] == 0.01
    Path("r/result.json").write_text("{")
    status, _, err = evcl(*command)
    assert status == 1
    assert "is not a result of evcl" in err
    assert evcl(*command, "--overwrite")[0] == 0


ONE = ["--epochs", "1", "--seeds", "1", "--tasks", "2"]
ELSE = ["run", "split-digits", "--method", "naive", *ONE]


def meanwhile(monkeypatch, happens, home="evcl.experiments.run.execute_seeds"):
    """Something happens while a run trains."""
    train = resolve_name(home)

    def trains(*arguments, **options):
        happens()
        return train(*arguments, **options)

    monkeypatch.setattr(home, trains)


def test_a_second_run_in_the_folder_is_refused_while_the_first_is_at_work(evcl, monkeypatch):
    ends = []

    def second():
        command = [sys.executable, "-m", "evcl", *ELSE, "--overwrite", "--out", "link"]
        ends.append(subprocess.run(command, capture_output=True, text=True, check=False))

    Path("link").symlink_to("r")
    meanwhile(monkeypatch, second)
    assert evcl("run", "permuted-digits", *ONE, "--out", "r")[0] == 0
    assert (ends[0].returncode, ends[0].stdout) == (1, "")
    who = rf"process {os.getpid()} on \S+, since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d UTC"
    assert re.fullmatch(rf"evcl: link: another evcl is at work on it \({who}\); wait for it to end\n", ends[0].stderr)
    assert json.loads(Path("r/result.json").read_text())["benchmark"] == "permuted-digits"
    assert [p.name for p in Path("r").iterdir()] == ["result.json"]


def test_a_run_that_was_killed_holds_no_folder(evcl):
    code = "import sys; from pathlib import Path; from evcl.experiments import claimed\n"
    code += "with claimed(Path('r')): print('held', flush=True); sys.stdin.readline()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as other:
        assert other.stdout.readline() == b"held\n"
        status, _, err = evcl(*ELSE, "--out", "r")
        assert (status, f"(process {other.pid} on " in err) == (1, True)
        other.kill()
    assert list(Path("r").iterdir())  # what it left
    assert evcl(*ELSE, "--out", "r")[0] == 0
    assert [p.name for p in Path("r").iterdir()] == ["result.json"]


def test_a_demo_holds_the_folders_of_its_results(evcl, monkeypatch):
    refused = []

    def others():
        for benchmark in ("permuted-digits", "split-digits"):
            for method in ("evcl", "vcl", "ewc", "naive"):
                with pytest.raises(EvclError, match="another evcl is at work on it"):
                    experiments.claimed(Path("d", benchmark, method)).__enter__()
                refused.append(method)
        raise EvclError("enough")

    meanwhile(monkeypatch, others, "evcl.experiments.reproduce")
    status, _, err = evcl("demo", "--out", "d", "--epochs", "1")
    assert (status, err, len(refused)) == (1, "evcl: enough\n", 8)
    assert not Path("d").exists()


def test_a_result_that_came_while_a_run_was_at_work_stays(evcl, monkeypatch):
    """By hand, say, or on a file system without locks."""
    evcl(*ELSE, "--out", "other")
    finished = Path("other/result.json").read_bytes()
    run = ["run", "permuted-digits", *ONE, "--out", "r"]
    with monkeypatch.context() as patch:
        meanwhile(patch, lambda: Path("r/result.json").write_bytes(finished))
        status, out, err = evcl(*run)
    assert status == 1
    assert err.startswith("evcl: r/result.json is the result of another run (split-digits naive) that ended meanwhile")
    assert "the run is done: it is saved in r/checkpoint, and the same command with --resume continues from" in err
    assert "forgetting" in out  # the table
    assert Path("r/result.json").read_bytes() == finished
    Path("r/result.json").unlink()
    assert evcl(*run, "--resume")[0] == 0
    assert json.loads(Path("r/result.json").read_text())["benchmark"] == "permuted-digits"
    with monkeypatch.context() as patch:
        meanwhile(patch, lambda: Path("r/result.json").write_bytes(finished))
        assert evcl(*run, "--overwrite")[0] == 0
    assert json.loads(Path("r/result.json").read_text())["benchmark"] == "permuted-digits"


USAGE = {  # wrong words, and what is said of them
    "run split-digit": "unknown benchmark 'split-digit'; did you mean 'split-digits'?",
    "run split-digits --method evlc": "unknown method 'evlc'; did you mean 'evcl'?",
    "run split-digits --preset tund": "unknown preset 'tund'; did you mean 'tuned'?",
    "run split-digits --set strenght=1": "unknown setting of evcl 'strenght'; did you mean 'strength'?",
    "run split-digits --set strength": "--set takes name=value, not 'strength'",
    "run split-digits --set strength=-1": "strength must be a finite number of at least 0 and at most 1e+12, or auto, "
    "not '-1'",
    "run split-digits --set strength=nan": "strength must be a finite number",
    "run split-digits --set lr=1 --set lr=2": "--set lr is given twice",
    "run split-digits --epochs 2 --set epochs=3": "cannot be used together",
    "run split-digits --epochs 0": "epochs must be a whole number of at least 1",
    "run split-digits --epochs two": "--epochs must be a whole number, not 'two' (see evcl run --help)",
    "run split-digits --validation=x": "--validation must be a number, not 'x' (see evcl run --help)",
    "run split-digits --method a --method b": "--method is given twice, but takes one value",
    "run split-digits --out=a --out --out=b": "--out is given twice",
    "data fetch mnist --data-dir a --data-dir b": "--data-dir is given twice",
    "predict --model m --data d.csv": "--out is missing (see evcl predict --help)",
    "list settings evlc": "unknown method 'evlc'; did you mean 'evcl'?",
    "list methods ewc": "evcl list settings ewc may be meant",
    "run split-digits --seeds 0": "--seeds must be a number from 1 to 10000, not 0",
    "run split-digits --seeds 2 --seed-list 1": "cannot be used together",
    "run split-digits --seed-list 1,x": "--seed-list takes whole numbers separated by commas, not '1,x'",
    "run split-digits --seed-list 1,1": "seeds must be different numbers",
    "run split-digits --tasks 9": "at most 5",
    "run split-digits --validation 1.5": "validation must be",
    "run split-digits --resume --overwrite": "--resume and --overwrite cannot be used together",
    "run split-digits --checkpoint-seconds -1": "--checkpoint-seconds must be a finite number of at",
    "run split-digits --checkpoint-seconds nan": "--checkpoint-seconds must be a finite number of at",
    "run split-digits --device cpu --precision tf32": "must be one of fp32, bf16, not 'tf32'",
    "run split-digits --device cuda": "device cuda cannot be used: torch finds no GPU here",
    "run split-digits --device tpu": "device must be auto, cpu, cuda or mps, not 'tpu'",
    "run split-digits --data-dir x": "--data-dir: there is no folder x",
    "run split-digits --bogus": "No such option",
    "run": "BENCHMARK is missing (see evcl run --help)",
    "runn": "No such command",
    "evaluate m.safetensors": "No such command 'evaluate': evcl predict says the accuracy if the file has",
    "demo --epochs 0": "epochs must be",
}


@pytest.mark.parametrize(("arguments", "message"), USAGE.items())
def test_wrong_usage_is_one_line_and_status_2(evcl, tmp_path, arguments, message, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    status, _, err = evcl(*arguments.split())
    assert (status, err.count("\n"), list(tmp_path.iterdir())) == (2, 1, [])
    assert message in err
    assert err.startswith("evcl: ")


@pytest.mark.full
def test_a_run_that_fails_writes_nothing_and_says_where(evcl):
    """Both seeds fail, each in its own process."""
    wild = ["--set", "lr=10", "--set", "std_lr_scale=1000"]
    status, _, err = evcl("run", "split-digits", "--method", "vcl", *wild, *FAST, "--out", "r")
    assert status == 1
    assert err.startswith("evcl: task '0/1': the loss is not a number in epoch 1 of 1 (seed ")
    assert err.count("\n") == 1
    assert not Path("r").exists()


def test_a_folder_that_cannot_be_written_is_found_before_training(evcl):
    Path("file").write_text("in the way")
    status, out, err = evcl("run", "split-digits", *FAST, "--out", "file/r")
    assert status == 1
    assert err.startswith("evcl: cannot write to file/r: ")
    assert "learned" not in out


def test_a_folder_made_for_a_run_that_fails_goes_again(evcl, tmp_path):
    status, _, err = evcl("run", "split-digits", *FAST, "--out", f"a/b/{'n' * 300}")
    assert (status, err.count("\n")) == (1, 1)
    assert "File name too long" in err
    assert not list(tmp_path.iterdir())


def test_debug_shows_the_traceback(evcl):
    Path("file").write_text("in the way")
    assert "Traceback" in evcl("--debug", "run", "split-digits", *FAST, "--out", "file/r")[2]


def test_what_nobody_foresaw_is_one_line_too(evcl, monkeypatch):
    monkeypatch.setenv("EVCL_PLUGINS", "")
    Path("odd.py").write_text(
        "from evcl.methods import METHODS, Method, register\n"
        "register(Method('odd', 'divides', bayesian=False, learn=lambda memory, round_, s: 1 / 0), overwrite=True)"
    )
    status, _, err = evcl("run", "split-digits", "--method", "odd", *FAST, "--plugin", "odd.py")
    assert (status, err) == (1, "evcl: ZeroDivisionError: division by zero; evcl --debug shows where\n")
    from evcl.methods import METHODS

    METHODS.remove("odd")


def test_help_without_a_command(evcl):
    for arguments in ([], ["--debug"]):
        status, out, err = evcl(*arguments)
        assert (status, err) == (2, "")
        assert "Your own data:" in out


@pytest.mark.full
def test_a_narrow_terminal_keeps_the_names(evcl, monkeypatch):
    evcl("run", "split-digits", "--method", "naive", *FAST, "--out", "r")
    monkeypatch.setattr("evcl.cli.progress.console", lambda: Console(width=50, highlight=False))
    out = evcl("report", "r")[1]
    assert "naive" in out
    assert "NLL" in out
    assert "…" not in out


@pytest.mark.full
@pytest.mark.parametrize("how", ["interrupt", "terminate"])
def test_an_interrupted_demo_says_so_and_leaves_no_process(how, tmp_path):
    command = [sys.executable, "-m", "evcl", "demo", "--out", str(tmp_path / "d")]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert "learned" in demo.stdout.readline()  # the workers are at work
    if how == "interrupt":
        os.killpg(demo.pid, signal.SIGINT)  # as Ctrl-C does: to all of them
    else:
        demo.terminate()
    _, err = demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert err == "evcl: interrupted; finished runs are kept\n"
    for _ in range(100):
        try:
            os.killpg(demo.pid, 0)
        except ProcessLookupError:  # nobody is left in the session
            return
        time.sleep(0.1)
    pytest.fail("processes are left")


def test_list_names_everything(evcl):
    status, out, _ = evcl("list")
    assert status == 0
    methods = ("evcl", "vcl", "vcl-random-coreset", "vcl-kcenter-coreset", "ewc", "random-coreset", "kcenter-coreset")
    for name in (
        *methods,
        *["naive", "joint", "clear", "separate", "mesu", "split-mnist", "permuted-digits", "tuned", "paper"],
    ):
        assert f"  {name} " in out
    tables = (METHOD_SUMMARIES, AGENT_SUMMARIES, ROW_SUMMARIES, BENCHMARK_SUMMARIES, experiments.SUMMARIES)
    ours = {name for table in tables for name in table}  # the tests register others
    assert all(len(line) <= 80 for line in out.splitlines() if line.split()[0] in ours)


def test_list_shows_one_kind(evcl):
    whole = evcl("list")[1]
    parts = {kind: evcl("list", kind) for kind in ("benchmarks", "presets")}
    for kind, (status, out, _) in parts.items():
        assert status == 0
        assert out.startswith(f"{kind}\n")
        assert out in whole
    assert whole.endswith("".join(out for _, out, _ in parts.values()))
    status, out, err = evcl("list", "method")
    wanted = "evcl list takes methods, benchmarks, presets, settings, constants or the name of a method, not 'method'"
    assert (status, out, err) == (2, "", f"evcl: {wanted}\n")


def test_list_methods_has_a_line_for_each_in_a_pipe(evcl):
    status, out, _ = evcl("list", "methods")
    assert status == 0
    rows = {line.split()[0]: line for line in out.splitlines()}
    for name, facts in METHOD_FACTS.items():
        assert facts.keeps in rows[name]
        assert rows[name].split()[1] == str(facts.year or "-")
        assert facts.authors in rows[name]
        cost = measured()[0][EXAMPLE_NETWORK][name]
        assert rows[name].split()[-2:] == [f"{cost['step']:.1f}", f"{cost['task']:.1f}"]
    for name, facts in AGENT_FACTS.items():  # no costs, which are measured on labelled rows
        assert facts.keeps in rows[name]
        assert rows[name].split()[-2:] == ["-", "-"]


@pytest.mark.parametrize("width", [80, 120])
def test_list_methods_fits_a_terminal(evcl, monkeypatch, width):
    monkeypatch.setattr(lists, "console", lambda: Console(width=width, force_terminal=True, color_system=None))
    _, out, _ = evcl("list", "methods")
    assert max(map(len, out.splitlines())) <= width
    assert EXAMPLE_NETWORK in out.splitlines()[-2]
    assert "…" not in out
    for facts in METHOD_FACTS.values():
        assert facts.authors in out
    if width == 120:
        assert all(facts.keeps in out for facts in METHOD_FACTS.values())


def test_help_names_every_command_whole(evcl, monkeypatch):
    """At 80 columns, the line of no command is cut, and every option and argument has a help text."""
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = evcl("-h")
    assert (status, "..." in out.replace("[ARGS]...", "")) == (0, False)
    sections = [line for line in out.splitlines() if line.endswith(":")]
    assert sections == ["Options:", "Your own data:", "Benchmarks:", "Many runs:"]
    whole = typer.main.get_command(app.app)
    groups = [(name, whole.get_command(None, name)) for name in whole.list_commands(None)]
    groups += [(f"data {name}", one) for name, one in dict(groups)["data"].commands.items()]
    for name, one in groups:
        assert name.split()[0] in out
        assert evcl(*name.split(), "-h") == evcl(*name.split(), "--help")
        assert all(param.help for param in one.params), name


@pytest.mark.parametrize(("command", "read"), [("sweep", experiments.read_sweep), ("tune", experiments.read_search)])
def test_the_file_that_a_help_shows_is_one(evcl, monkeypatch, command, read):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = evcl(command, "--help")
    shown = out.partition(" file:\n")[2].partition("Arguments:")[0]
    assert all(len(line) <= 80 for line in shown.splitlines())
    Path("shown.toml").write_text("\n".join(line.strip() for line in shown.splitlines()))
    assert read(Path("shown.toml"))


def test_a_shell_completes_commands_and_options():
    for words, wanted in (
        ("evcl pre", ["predict"]),
        ("evcl predict --only", ["--only-predictions"]),
        ("evcl run split-c", ["split-cifar10", "split-cifar10-rgb", "split-cifar10-conv", "split-cifar100"]),
        ("evcl learn --method kfac-e", ["kfac-ewc", "kfac-evcl"]),
    ):
        more = {"_EVCL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        command = [sys.executable, "-m", "evcl"]
        out = subprocess.run(command, env={**os.environ, **more}, capture_output=True, text=True, check=False).stdout
        assert sorted(out.split()) == sorted(wanted)


def test_list_shows_the_settings_of_a_method(evcl):
    status, out, _ = evcl("list", "si")
    assert status == 0
    assert evcl("list", "settings", "si") == (status, out, "")
    default = evcl("list", "settings")[1]
    assert default.startswith("evcl: ")
    for line in (
        r"strength +auto +>= 0, <= 1e\+12, or auto +lambda, ",
        r"fisher +exact +exact, sampled, empirical ",
        r"memory +0 ",
    ):
        assert re.search(rf"^{line}", default, re.MULTILINE), line
    rows = {line.split()[0]: line.split()[1] for line in out.splitlines() if line and not line.startswith(" ")}
    assert {rows[name] for name in ("xi", "lr")} == {"auto"}
    assert (rows["strength"], rows["film"]) == ("1.0", "false")
    assert "weight of the penalty" in out


def test_a_users_method_runs_from_a_file(evcl, monkeypatch):
    monkeypatch.setenv("EVCL_PLUGINS", "")
    lines = ["from evcl.methods import Method, register", "register(Method('mine', 'of mine', bayesian=False))"]
    Path("mine.py").write_text("\n".join(lines))
    status, _, err = evcl("run", "split-digits", "--method", "mine", *FAST, "--plugin", "mine.py")
    assert (status, err) == (0, "")
    assert Path("runs/split-digits/mine/result.json").exists()
    assert "of mine" in evcl("list", "--plugin", "mine.py")[1]
    table = evcl("list", "methods", "--plugin", "mine.py")[1].splitlines()
    assert ["mine", "-", "-", "-", "-", "-"] in [line.split() for line in table]
    Path("broken.py").write_text("raise ValueError('oh')")
    status, _, err = evcl("list", "--plugin", "broken.py")
    assert status == 1
    assert "plugin broken.py cannot be imported: ValueError: oh" in err
    from evcl.methods import METHODS

    METHODS.remove("mine")


@pytest.mark.full
def test_paper_preset_is_the_papers(evcl):
    evcl("run", "split-digits", *FAST, "--preset", "paper")
    config = json.loads(Path("runs/split-digits/evcl/result.json").read_text())["config"]
    wanted = {"strength": 100.0, "tempering": 1.0, "init_std": 1e-4, "prior_std": 1.0, "std_lr_scale": 1.0, "lr": 1e-3,
              "batch_size": 64, "fisher": "exact", "fisher_examples": 5000, "fisher_floor": 0.0}  # fmt: skip
    assert {key: config[key] for key in wanted} == wanted


@pytest.mark.full
def test_demo_and_report(evcl):
    status, out, err = evcl("demo", "--epochs", "1", "--out", "d")
    assert (status, err) == (0, "")
    assert len(list(Path("d").glob("*/*/result.json"))) == 8
    for name in ("permuted-digits", "split-digits"):
        for kind in ("png", "svg", "pdf"):
            assert Path("d/figures", f"{name}.{kind}").stat().st_size > 2000
        assert name in out
    for path in ("d/index.html", "d/tables.md", "d/figures"):
        assert str(Path(path)) in out
    page = Path("d/index.html").read_text("utf-8")
    fetched = r"<(?:link|img|iframe)(?! rel=\"icon\" href=\"data:,\")|<script[^>]* src|url\((?!#)|@import"
    assert not re.findall(fetched, page)  # nothing is fetched
    status, out, _ = evcl("demo", "--epochs", "1", "--out", "d")
    assert "8 of 8 results are already in d" in out
    first = Path("d/figures/permuted-digits.svg").read_bytes()
    assert evcl("report", "d")[0] == 0
    assert Path("d/figures/permuted-digits.svg").read_bytes() == first
    assert evcl("demo", "--epochs", "2", "--out", "d")[0] == 1  # another run is there
    status, _, err = evcl("report", "nowhere")
    assert (status, err) == (1, "evcl: there is no folder nowhere\n")


def test_the_command_is_installed_and_help_says_what_it_does():
    command = [sys.executable, "-m", "evcl", "--help"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    for word in ("run", "demo", "report", "list"):
        assert f"  {word} " in found.stdout
    assert subprocess.run([*command[:-1], "--version"], capture_output=True, text=True, check=True).stdout.startswith(
        "evcl "
    )


@pytest.mark.skipif(not hasattr(signal, "SIGPIPE"), reason="needs closed pipes")
def test_a_reader_that_ends_early_is_no_failure():
    """As in evcl ... | head: no message, and the status that other tools have."""
    code = "import sys; sys.argv = ['evcl', 'list', 'methods']; input(); from evcl.cli.app import main; main()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as other:
        other.stdout.close()
        other.stdin.write(b"\n")
        other.stdin.flush()
        assert other.stderr.read() == b""
        assert other.wait() == 128 + signal.SIGPIPE


@pytest.mark.skipif(sys.platform == "win32", reason="a terminal of Unix")
@pytest.mark.parametrize("words", [["list"], ["list", "settings", "mesu"]])
def test_lists_fit_a_narrow_terminal(words):
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 60, 0, 0))
    rest = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    run = subprocess.Popen(
        [sys.executable, "-m", "evcl", *words], stdin=theirs, stdout=theirs, env={**rest, "TERM": "xterm"}
    )
    os.close(theirs)
    out = b""
    with suppress(OSError):  # Linux says that the other end is closed by an error
        while part := os.read(ours, 4096):
            out += part
    os.close(ours)
    assert run.wait() == 0
    lines = out.decode().splitlines()
    assert len(lines) > 10
    assert max(map(len, lines)) <= 60
