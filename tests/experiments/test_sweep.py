"""Sweeps: the file, the work on it by several processes at once, what fails, and where it stands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from made_up_cells import result_of, untimed

from evcl import experiments, methods
from evcl._core.errors import EvclError
from evcl.experiments import (
    Failure,
    Store,
    Summary,
    configure,
    engines,
    execute,
    load_plugins,
    read_sweep,
    standing,
    work,
)
from evcl.experiments import parallel as cells_module
from evcl.experiments.engines import Inline, local
from evcl.experiments.parallel import bundle
from evcl.experiments.result import merge
from evcl.experiments.run import Event, execute_together
from evcl.experiments.store import key
from evcl.report import find_results

SWEEP = """
benchmarks = ["split-digits:2", "permuted-digits:2"]
seeds = [0, 7]
draws = 3

[settings]
epochs = 1

[methods.evcl]
strength = [1, 10]
lr = {low = 1e-4, high = 1e-2}

[methods.slow]
method = "evcl"
epochs = 2
[methods.naive]
"""


@pytest.fixture
def file(tmp_path):
    def write(text=SWEEP):
        (tmp_path / "sweep.toml").write_text(text)
        return tmp_path / "sweep.toml"

    return write


def small(count, **given):
    return configure("split-digits", "naive", seeds=range(count), tasks=1, given={"epochs": 1, **given}).cells


class Here(Inline):
    """This process; remembers what was started, and may run something else."""

    def __init__(self, replicas=1, run=None):
        super().__init__(None)
        self.replicas, self.started = replicas, []
        self.run = run or self.run

    def __call__(self, on_event):
        self.on_event = on_event
        return self

    def start(self, number, cells, checkpoints=None):
        self.started.append(list(cells))
        super().start(number, cells, checkpoints)


# --- the file -------------------------------------------------------------------------------------------------------


def test_a_file_asks_for_grids_times_draws_times_seeds(file):
    cells = read_sweep(file())
    assert len(cells) == 2 * 2 * (2 * 3 + 1 + 1)  # benchmarks, seeds, points of the three tables
    assert len({key(cell) for cell in cells}) == len(cells)
    assert {(cell.benchmark, cell.tasks) for cell in cells} == {("split-digits", 2), ("permuted-digits", 2)}
    assert {cell.seeds for cell in cells} == {(0,), (7,)}
    searched = [cell.settings for cell in cells if cell.method == "evcl" and cell.settings.epochs == 1]
    rates = {s.lr for s in searched}
    assert {(s.strength, s.lr) for s in searched} == {(x, y) for x in (1.0, 10.0) for y in rates}
    assert len(rates) == 3
    assert min(rates) >= 1e-4
    assert max(rates) <= 1e-2
    assert read_sweep(file()) == cells
    elsewhere = read_sweep(file(), "cuda", "tf32")
    assert {(cell.device, cell.precision) for cell in elsewhere} == {("cuda", "tf32")}
    plain = read_sweep(file('benchmarks = ["split-digits"]\nmethods = ["evcl", "vcl"]\n'))
    assert [(cell.method, cell.seeds[0]) for cell in plain] == [(m, s) for m in ("evcl", "vcl") for s in (0, 1, 2)]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("epochs = 1", "epochs = 0", r"settings\.epochs: epochs must be a whole number of at least 1"),
        ("[1, 10]", '[1, "a"]', r"methods\.evcl\.strength: strength must be a finite number"),
        ("[1, 10]", "[]", r"methods\.evcl\.strength: a grid needs at least one value"),
        ("[1, 10]", '1\nfisher = "strength"', r"methods\.evcl\.fisher: fisher must be one of"),
        ("draws = 3", "preset = []", r"preset: must be a string, not \[\]"),
        ("strength =", "strenth =", r"methods\.evcl\.strenth: unknown setting of evcl 'strenth'; did you"),
        ("lr = {low = 1e-4", "lr = {low = 0", r"methods\.evcl\.lr: lr must be a value, {choices"),
        ("draws = 3", "", r"methods\.evcl\.lr: is drawn at random: set the number of draws"),
        ("draws = 3", "draws = 1000000", r"draws: must be a whole number <= 10000, not 1000000"),
        ("draws = 3", "draw = 3", r"sweep\.toml: unknown key 'draw'; did you mean 'draws'"),
        ('method = "evcl"', 'method = "evc"', r"methods\.slow: unknown method 'evc'"),
        ("[methods.naive]", "[methods.naiv]", r"methods\.naiv: unknown method"),
        ("split-digits:2", "split-digit:2", r"benchmarks: unknown benchmark 'split-digit'"),
        ("split-digits:2", "split-digits:6", r"benchmarks: tasks of split-digits must be"),
        ("split-digits:2", "split-digits:x", r"benchmarks: expected a benchmark"),
        ("[0, 7]", '["0"]', r"seeds\[0\]: must be a whole number, not \['0'\]"),
        ("[0, 7]", "0", r"seeds: must be a whole number >= 1, not 0"),
        ("[0, 7]", "true", r"seeds: must be a whole number or a list, not True"),
        ("[methods.naive]", "[methods]\nnaive = 3", r"methods\.naive: must be a table, not 3"),
        ("draws = 3", 'draws = 3\npreset = "tund"', r"preset: unknown preset 'tund'"),
        ("[settings]", "[settings", r"cannot be read as TOML: .*line 6"),
        ("[1, 10]", f"{list(range(1, 20000))}", r"methods\.evcl: more than 100,000 cells"),
    ],
)
def test_a_file_that_cannot_be_run_names_the_key(old, new, message, file):
    with pytest.raises(EvclError, match=message):
        read_sweep(file(SWEEP.replace(old, new, 1)))


def test_a_file_is_a_file_of_a_sweep(tmp_path, evcl):
    with pytest.raises(EvclError, match="cannot read"):
        read_sweep(tmp_path / "nowhere.toml")
    (tmp_path / "large.toml").write_bytes(b"#" * 1_000_001)
    status, _, err = evcl("sweep", "large.toml")
    assert (status, err.count("\n")) == (2, 1)
    assert "larger than the limit of 1,000,000 bytes" in err
    status, _, err = evcl("status", ".")
    assert (status, err.count("\n")) == (1, 1)
    assert "holds no sweep" in err


# --- programs -------------------------------------------------------------------------------------------------------


def test_the_results_of_seeds_side_by_side_are_merged_into_that_of_the_configuration():
    config = configure("split-digits", "evcl", seeds=[3, 1], tasks=2, given={"epochs": 1})
    parts = execute_together(config.cells)
    assert [part.seeds for part in parts] == [[3], [1]]
    assert all(part.average_accuracy.std is None for part in parts)
    result = merge(parts)
    assert untimed(result) == untimed(execute(config))
    assert result.seeds == [3, 1]
    assert result.accuracy == [part.accuracy[0] for part in parts]
    assert result.nll.per_seed == [part.nll.mean for part in parts]
    assert result.seconds == round(sum(part.seconds for part in parts), 3)


def test_a_program_is_a_grid_of_configurations_and_seeds():
    cells = [cell for s in (1, 9) for cell in configure("split-digits", "evcl", given={"strength": s}).cells]
    with pytest.raises(ValueError, match="each with the same seeds"):
        execute_together(cells[:4])
    with pytest.raises(ValueError, match="each with the same seeds"):
        execute_together([*cells[:3], *cells[:2:-1]])


def test_cells_of_one_shape_share_a_program_and_each_gets_its_own_result():
    given = {"epochs": 1, "init_std": 0.05}
    configs = [configure("split-digits", "evcl", seeds=[3, 1], tasks=2, given={**given, "strength": s}) for s in (1, 9)]
    configs += [configure("split-digits", "ewc", seeds=[3, 1], tasks=2, given={"epochs": 1})]
    cells = [cell for config in configs for cell in config.cells]
    shuffled = [cells[i] for i in (5, 0, 3, 2, 1, 4)]
    assert bundle(shuffled, 1) == [[i] for i in range(6)]
    groups = bundle(cells, 100)
    assert groups == [[0, 1, 2, 3], [4, 5]]
    assert bundle(cells, 2) == [[0, 1], [2, 3], [4, 5]]
    assert sorted(i for group in bundle(shuffled, 100) for i in group) == list(range(6))
    found = execute_together([cells[i] for i in groups[0]])
    assert [(one.seeds[0], one.config["strength"]) for one in found] == [(3, 1), (1, 1), (3, 9), (1, 9)]


def test_whoever_takes_a_cell_over_goes_on_from_its_checkpoint(tmp_path):
    cell = configure("split-digits", "naive", seeds=[3], given={"epochs": 2})
    whole = execute(cell)

    def stop(some, event):
        if event.task == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(work([cell], Store(tmp_path), Here(), stop))
    kept = Store(tmp_path).cell(key(cell)) / "checkpoint"
    assert list(kept.rglob("*.safetensors"))
    heard = []
    ((_, found),) = work([cell], Store(tmp_path), Here(), lambda some, event: heard.append(event))
    assert min(event.task for event in heard if event.accuracy is None) == 2  # what is before it is learned
    assert untimed(found) == untimed(whole)
    assert not kept.exists()


def test_a_program_that_fails_is_run_in_halves_until_each_cell_fails_for_itself(tmp_path):
    cells = configure("split-digits", "naive", seeds=range(5), tasks=1).cells

    def run(some, on_event, checkpoints):
        if len(some) > 2:
            raise MemoryError("too many")
        if any(cell.seeds == (3,) for cell in some):
            raise RuntimeError("three\nis bad")
        return [result_of(cell) for cell in some]

    engine = Here(replicas=100, run=run)
    found = dict(work(cells, Store(tmp_path), engine))
    assert found[3] == Failure("three is bad")
    assert [found[i].seeds for i in (0, 1, 2, 4)] == [[0], [1], [2], [4]]
    assert max(map(len, engine.started)) == 5
    again = Here(replicas=100, run=run)
    assert dict(work(cells, Store(tmp_path), again)) == found
    assert again.started == []
    later = Here(replicas=100, run=lambda some, *_: [result_of(cell) for cell in some])
    assert dict(work(cells, Store(tmp_path), later, retry_failed=True))[3].seeds == [3]
    assert [[cell.seeds for cell in program] for program in later.started] == [[(3,)]]


def test_halves_of_a_program_are_programs_again(tmp_path):
    """Three seeds of three configurations do not halve evenly: each part has the same seeds of all its own."""
    rates = (0.1, 0.2, 0.3)
    cells = [cell for lr in rates for cell in configure("split-digits", "naive", tasks=1, given={"lr": lr}).cells]

    def run(some, on_event, checkpoints):
        if len(some) > 4:
            raise MemoryError("too many")
        return [result_of(cell) for cell in some]

    engine = Here(replicas=100, run=run)
    found = dict(work(cells, Store(tmp_path), engine))
    assert {i: (one.seeds, one.config["lr"]) for i, one in found.items()} == {
        i: ([cell.seed], cell.settings.lr) for i, cell in enumerate(cells)
    }
    for program in engine.started:
        configs = {cell.settings.lr for cell in program}
        assert [cell.seed for cell in program] == [cell.seed for cell in program[: len(program) // len(configs)]] * len(
            configs
        )


def test_a_loss_that_is_lost_is_a_failure_and_the_rest_goes_on(tmp_path):
    wild = configure("split-digits", "vcl", seeds=[0], tasks=1, given={"epochs": 1, "lr": 10, "std_lr_scale": 1000})
    found = dict(work([wild, *small(1)], Store(tmp_path), Here()))
    assert found[0].message.startswith("diverged")
    assert found[0].result.average_accuracy.mean is None
    assert found[1].average_accuracy.mean > 0
    assert dict(work([wild], Store(tmp_path), Here())) == {0: found[0]}


def test_a_cell_that_is_asked_for_twice_is_run_once(tmp_path):
    (cell,), engine = small(1), Here()
    found = dict(work([cell, cell], Store(tmp_path), engine))
    assert found[0] == found[1]
    assert len(engine.started) == 1


def test_what_another_runs_is_waited_for_and_taken_over_when_it_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(cells_module, "POLL", 0.01)
    cells = small(3)
    other = Store(tmp_path)
    held = [other.take(cell) for cell in cells[:2]]
    events = work(cells, Store(tmp_path), engine := Here(run=lambda some, *_: [result_of(cell) for cell in some]))
    assert next(events)[0] == 2
    other.complete(held[0], result_of(cells[0]))
    assert next(events) == (0, result_of(cells[0]))
    other.__exit__()
    assert next(events) == (1, result_of(cells[1]))
    assert [[cell.seeds for cell in program] for program in engine.started] == [[(2,)], [(1,)]]
    assert not list(events)


@pytest.mark.full
def test_a_process_that_dies_takes_no_other_cell_with_it(tmp_path, monkeypatch):
    """One cell kills its process every time: the others have their results, and it a message."""
    plugin = tmp_path / "deadly.py"
    plugin.write_text(DEADLY.replace("LOG", str(tmp_path / "log")))
    monkeypatch.setattr(engines, "RETRIES", 1)
    monkeypatch.setenv("EVCL_PLUGINS", os.pathsep.join([os.environ["EVCL_PLUGINS"], str(plugin)]))
    load_plugins()
    try:
        deadly = configure("split-digits", "deadly", seeds=[0], tasks=1, given={"epochs": 1})
        found = dict(work([deadly, *small(3)], Store(tmp_path / "s"), lambda heard: local("cpu", "fp32", heard, 2)))
    finally:
        methods.METHODS.remove("deadly")
    assert "ended by SIGKILL, 2 times" in found[0].message
    assert (tmp_path / "log").read_text() == "xx"
    for i, cell in enumerate(small(3), 1):
        assert untimed(found[i]) == untimed(execute(cell))


DEADLY = """
import os, signal
from pathlib import Path
from evcl import methods

def learn(memory, round_, s):
    with Path("LOG").open("a") as file:
        file.write("x")
    os.kill(os.getpid(), signal.SIGKILL)

methods.register(methods.Method("deadly", "kills its process", bayesian=False, learn=learn))
"""


def test_threads_run_several_programs_at_once_and_a_broken_gpu_ends_them(tmp_path, monkeypatch):
    """What a GPU is for, but for the GPU."""
    monkeypatch.setattr(engines, "streams", lambda: SimpleNamespace(run=None))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    cells, meet = small(4), threading.Barrier(4)

    def run(some, on_event, allow_divergence, checkpoints=None):
        meet.wait(60)  # all four are running
        on_event([0], Event(some[0].seeds, 0, 1, 1.0))
        return [result_of(cell) for cell in some]

    monkeypatch.setattr(engines, "execute_together", run)
    monkeypatch.setattr(engines.Threads, "replicas", 1)
    heard = []
    found = dict(work(cells, Store(tmp_path), partial(engines.Threads, "fp32"), lambda some, event: heard.append(some)))
    assert found == {i: result_of(cell) for i, cell in enumerate(cells)}
    assert sorted(heard) == [[0], [1], [2], [3]]

    def broken(some, on_event, allow_divergence, checkpoints=None):
        raise torch.AcceleratorError("an illegal memory access")

    monkeypatch.setattr(engines, "execute_together", broken)
    with pytest.raises(EvclError, match="the GPU can no longer be used"):
        list(work(small(5)[4:], Store(tmp_path), partial(engines.Threads, "fp32")))
    assert Store(tmp_path).look(key(small(5)[4])).kind == "stale"  # nobody's fault but the GPU's: to be run elsewhere


def test_a_report_puts_the_seeds_of_a_sweep_together(tmp_path):
    cells = small(3) + small(2, lr=0.5)
    list(work(cells, Store(tmp_path), Here(run=lambda some, *_: [result_of(cell) for cell in some])))
    found = sorted(find_results(tmp_path), key=lambda result: result.config["lr"])
    assert [result.seeds for result in found] == [[0, 1, 2], [0, 1]]
    assert found[0].average_accuracy == Summary(0.5, 0.0, [0.5] * 3)


# --- several processes ----------------------------------------------------------------------------------------------


def started(file, folder):
    command = [sys.executable, "-m", "evcl", "sweep", str(file), "--out", str(folder), "--workers", "1"]
    return subprocess.Popen(
        [*command, "--device", "cpu"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(os.environ)
    )


def done(folder):
    return len(list(Path(folder).glob("cells/*/result.json")))


def until(condition, seconds=300):
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds
        time.sleep(0.02)


@pytest.mark.full
@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.soak)])
def test_two_processes_share_a_sweep_and_one_finishes_what_the_other_began(count, file, tmp_path, evcl):
    """Both run some; one is killed in the middle of a cell; the other finishes all, none twice, with equal results."""
    asked = file(f'benchmarks = ["split-digits:2"]\nseeds = {count}\nmethods = ["naive"]\n[settings]\nepochs = 2\n')
    folder = tmp_path / "out"
    both = [started(asked, folder), started(asked, folder)]
    try:
        until(lambda: len({owner(path) for path in folder.glob("cells/*/claim-1.json")}) == 2)
        before = done(folder)
        until(lambda: done(folder) > before)
        victim = both[0]
        mine = {path for path in folder.glob("cells/*/claim-1.json") if f"-{victim.pid}-" in owner(path)}
        victim.send_signal(signal.SIGKILL)
        output, _ = both[1].communicate(timeout=600)
    finally:
        for process in both:
            process.kill()
            process.wait()
            process.stdout.close()
    assert both[1].returncode == 0, output
    assert f"{count} cells, {count} done, 0 to do" in output
    assert mine
    cells = read_sweep(asked)
    again = {path.parent.name for path in folder.glob("cells/*/claim-2.json")}
    assert len(again) <= 1  # what the killed one was at
    assert not list(folder.glob("cells/*/claim-3.json"))
    store = Store(folder)
    checked = [cell for cell in cells if key(cell) in again] + cells[:2]
    for cell in checked:
        assert untimed(store.result(cell)) == untimed(execute(cell))
    assert {store.look(key(cell)).kind for cell in cells} == {"done"}
    status, out, _ = evcl("status", folder)
    assert status == 0
    assert f"{count} cells, {count} done, 0 to do" in out


def owner(path):
    return json.loads(path.read_text())["owner"]


def test_where_a_sweep_stands(tmp_path, evcl, monkeypatch):
    cells = small(5) + small(1, lr=0.5)
    store, other = Store(tmp_path / "s"), Store(tmp_path / "s")
    store.declare(cells)
    store.complete(store.take(cells[0]), result_of(cells[0]))
    store.fail(store.take(cells[1]), Failure("no memory"))
    store.take(cells[2])
    other.take(cells[3])
    other.__exit__()
    found = standing(tmp_path / "s")
    assert [each.state.kind for each in found] == ["done", "failed", "running", "stale", "todo", "todo"]
    assert [each.score for each in found] == [0.5, None, None, None, None, None]
    status, out, err = evcl("status", "s")
    assert (status, err) == (0, "")
    assert "6 cells, 1 done, 1 running, 1 stale (their owner is gone), 1 failed, 2 to do" in out
    assert f"running: 1 by {store.me}" in out
    assert "failed: 1 of split-digits naive: no memory" in out
    assert "50.00" in out
    assert "1/5" in out
    store.__exit__()


def test_status_reads_a_folder_without_torch(tmp_path):
    cells = small(3)
    with Store(tmp_path) as store:
        store.declare(cells)
        store.complete(store.take(cells[0]), result_of(cells[0]))
        store.fail(store.take(cells[1]), Failure("no memory", result_of(cells[1])))
    program = "import sys; from evcl.cli import main; sys.argv.insert(1, 'status')\n"
    program += "try: main()\nfinally: assert 'torch' not in sys.modules"
    ran = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "3 cells, 1 done, 1 failed, 1 to do" in ran.stdout
    assert "50.00" in ran.stdout
    assert "no memory" in ran.stdout


def test_the_command_line_says_what_failed_and_tries_it_again(evcl, file, tmp_path, monkeypatch):
    monkeypatch.setattr(experiments, "local", lambda device, precision, on_event, workers: Here()(on_event))
    text = (
        'benchmarks = ["split-digits:1"]\nseeds = 1\n[methods.vcl]\nepochs = 1\nstd_lr_scale = 1000\nlr = [0.001, 10]'
    )
    command = ["sweep", file(text), "--device", "cpu"]
    status, out, err = evcl(*command)
    assert (status, err.count("\n")) == (1, 1)
    assert "1 of 2 cells failed: see evcl status" in err
    assert "failed: diverged" in out
    assert all(f": split-digits vcl lr={lr} seed 0: " in out for lr in ("0.001", "10.0"))  # which of them it is
    assert "2 cells, 1 done, 1 failed, 0 to do" in out
    (failed,) = (tmp_path / "sweep").glob("cells/*/failed-1.json")
    assert evcl(*command)[0] == 1
    assert [path.name for path in failed.parent.glob("claim-*")] == ["claim-1.json"]
    assert evcl(*command, "--retry-failed")[0] == 1
    assert failed.with_name("failed-2.json").exists()
    wrong = {"--workers": "0", "--engine": "spark", "--address": "1.2.3.4:5"}
    for (option, value), message in zip(wrong.items(), ("from 1 to 4096", "local or ray", "needs"), strict=True):
        status, _, err = evcl(*command, option, value)
        assert (status, err.count("\n")) == (2, 1)
        assert message in err
