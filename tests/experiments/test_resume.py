"""A run that is stopped, anywhere, goes on to the bytes of one that never was; what is damaged is refused."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from itertools import count, cycle
from pathlib import Path

import pytest
import torch
from made_up_cells import registered, untimed
from torch import nn

from evcl._core.errors import EvclError
from evcl._core.files import write_tensors
from evcl.benchmarks import get
from evcl.experiments import configure, execute, open_checkpoints, read_result, write_result
from evcl.experiments.run import execute_together
from evcl.training import Checkpoints, Run, Step, Stopped
from evcl.training.checkpoint import DESCRIPTION, newest, read, write
from evcl.training.stream import Evaluation

GIVEN = {"epochs": 2, "batch_size": 100}  # three steps an epoch
SMALL = {"coreset_size": 20, "batch_size": 20}
CASES = {
    "EVCL": ("split-digits", "evcl", {}),
    "EWC, which has no sigma": ("permuted-digits", "ewc", {"batch_size": 400}),
    "a coreset": ("split-digits", "vcl-kcenter-coreset", SMALL),
    "nothing but a coreset": ("permuted-digits", "random-coreset", {"coreset_size": 20, "batch_size": 15}),
    "a coreset beside an elastic term": ("split-digits", "evcl", {"coreset": "random", **SMALL}),
    "a path integral beside a teacher": ("split-digits", "evcl", {"importance": "si", "distill": 0.5}),
    "a teacher": ("split-digits", "lwf", {}),
    "a method of one's own": ("split-digits", "huber", {}),
    "joint": ("split-digits", "joint", {}),
    "natural steps, falling rates": ("split-digits", "evcl", {"std_update": "natural", "lr_schedule": "cosine"}),
    "an early end": ("split-digits", "evcl", {"stop_nll": 0.35, "epochs": 8}),  # one seed before the other
}


def config(case="EVCL", seeds=(0, 1)):
    benchmark, method, given = CASES[case]
    return configure(benchmark, method, "paper", seeds, 2, {**GIVEN, **given})  # which no search changes


def last(folder):
    """The tensors of the only program's last checkpoint: after the last task, so all that the run ends with."""
    (program,) = folder.iterdir()
    return newest(program).tensors


def same(a, b):
    bits = [{name: bytes(t.reshape(-1).view(torch.uint8).numpy()) for name, t in one.items()} for one in (a, b)]
    return bits[0] == bits[1]


def stop_after(polls):
    numbers = count(1)
    return lambda: next(numbers) >= polls


def relay(run, folder):
    """Stopped again and again, after one step or a few: the result, and how often."""
    for stops, polls in enumerate(cycle((1, 2, 6, 3))):
        try:
            return run(Checkpoints(folder, 1e6, resume=True, stop=stop_after(polls))), stops
        except Stopped:
            continue
    return None


def check(one, tmp_path):
    """Saving changes nothing, and the run that is stopped at every turn ends with the same bits."""
    wanted = execute(one, checkpoints=Checkpoints(tmp_path / "whole", 0))
    found, stops = relay(lambda kept: execute(one, checkpoints=kept), tmp_path / "parts")
    assert stops > 3
    assert untimed(found) == untimed(wanted) == untimed(execute(one))
    assert same(last(tmp_path / "parts"), last(tmp_path / "whole"))
    return wanted


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_a_run_stopped_at_every_turn_is_the_run_that_never_was(case, tmp_path):
    check(config(case), tmp_path)


def test_of_two_seeds_one_ends_early(tmp_path, monkeypatch):
    """So that the case above is what it says: a replica is frozen, and the other goes on."""
    seen = set()

    def look(path, description, tensors):
        seen.add(tuple(tensors["stopped"].tolist()) if "stopped" in tensors else None)

    monkeypatch.setattr("evcl.training.checkpoint.write", look)
    execute(config("an early end"), checkpoints=Checkpoints(tmp_path, 1e-9))
    assert (False, False) in seen
    assert seen & {(True, False), (False, True)}


def test_one_that_is_lost_among_others_stays_lost(tmp_path):
    one = config(seeds=(0,))
    wild = configure("split-digits", "evcl", "paper", (0,), 2, {**one.settings, "lr": 10.0, "std_lr_scale": 1e3})
    configs = [one, wild]
    wanted = execute_together(configs, allow_divergence=True)
    found, _ = relay(lambda kept: execute_together(configs, allow_divergence=True, checkpoints=kept), tmp_path)
    assert [untimed(result) for result in found] == [untimed(result) for result in wanted]
    assert [result.diverged for result in found] == [False, True]


def test_a_network_that_measures_and_drops_out(tmp_path):
    def network():
        layers = nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.3)
        return nn.Sequential(*layers, nn.Flatten())

    with registered("pictures", network=network):
        check(configure("pictures", "evcl", seeds=(0, 1), tasks=2, given={**GIVEN, "fisher_examples": 50}), tmp_path)
    assert any("num_batches_tracked" in name for name in last(tmp_path / "parts"))


def test_images_that_are_augmented(tmp_path):
    def images(part):
        return replace(part, inputs=part.inputs.view(-1, 1, 8, 8))

    tasks = [replace(task, train=images(task.train), test=images(task.test)) for task in get("split-digits")]
    with registered("pictures", tasks, hidden=(10,)):
        one, plain = (
            configure("pictures", "evcl", "paper", (0, 1), 2, {**GIVEN, "augment": on}) for on in (True, False)
        )
        assert untimed(execute(plain)) != untimed(check(one, tmp_path))


# --- crashes -------------------------------------------------------------------------------------------------------


class Crash(BaseException):
    """As if the process ended here: nothing handles it."""


POINTS = {
    "in an epoch": (Step, "__call__"),
    "in the consolidation": ("evcl.curvature", "fisher"),
    "when a round is taken over": (Run, "changed"),
    "before an evaluation": (Run, "draws"),
    "in an evaluation": (Evaluation, "__call__"),
    "while a checkpoint is written": ("evcl._core.files", "write_tensors"),
    "between the write and the rename": (Path, "replace"),
    "before old checkpoints are removed": ("evcl.training.checkpoint", "clear"),
}


NOW = ("in an epoch", "in an evaluation", "while a checkpoint is written", "between the write and the rename")
ALL = [point if point in NOW else pytest.param(point, marks=pytest.mark.full) for point in POINTS]


@pytest.mark.parametrize("point", ALL)
def test_a_crash_loses_nothing(point, tmp_path, monkeypatch):
    """At the first call, the second, the fourth, ...: as often as there are calls."""
    owner, name = POINTS[point]
    wanted = execute(config(seeds=(0,)), checkpoints=Checkpoints(tmp_path / "whole", 1e-9))
    crashes = 0
    for nth in (1, 2, 4, 8, 12):
        folder = tmp_path / str(nth)
        with monkeypatch.context() as patch:
            target = f"{owner}.{name}" if isinstance(owner, str) else None
            original = getattr(__import__(owner, fromlist=["_"]) if target else owner, name)
            calls = count(1)

            def crash(*args, nth=nth, calls=calls, original=original, **options):
                if next(calls) == nth:
                    if name == "write_tensors":
                        args[0].write_bytes(b"half of it")
                    raise Crash
                return original(*args, **options)

            patch.setattr(*((target, crash) if target else (owner, name, crash)))
            try:
                execute(config(seeds=(0,)), checkpoints=Checkpoints(folder, 1e-9))
                continue  # there are fewer calls
            except Crash:
                crashes += 1
        found = execute(config(seeds=(0,)), checkpoints=Checkpoints(folder, 1e-9, resume=True))
        assert untimed(found) == untimed(wanted)
        assert same(last(folder), last(tmp_path / "whole"))
        assert len(list((folder / "seed-0").iterdir())) == 2  # the last two, and nothing half-written
    assert crashes >= 2


def test_seconds_are_those_of_all_parts(tmp_path):
    with pytest.raises(Stopped):
        execute(config(), checkpoints=Checkpoints(tmp_path, 1e6, stop=stop_after(1)))
    (program,) = tmp_path.iterdir()
    saved = newest(program)
    write(saved.path, {**saved.description, "seconds": 1000.0}, saved.tensors)
    assert 1000 < execute(config(), checkpoints=Checkpoints(tmp_path, resume=True)).seconds < 2000


def test_between_the_ends_of_tasks_time_decides(tmp_path, monkeypatch):
    """Six steps and an end a task, two tasks; the clock runs a second a step."""
    now, step, saved = [0.0], Step.__call__, []

    def stepped(self, *args):
        now[0] += 1
        return step(self, *args)

    def counted(path, *args):
        saved.append(path)
        write(path, *args)

    monkeypatch.setattr("evcl.training.checkpoint.time.monotonic", lambda: now[0])
    monkeypatch.setattr(Step, "__call__", stepped)
    monkeypatch.setattr("evcl.training.checkpoint.write", counted)
    for seconds, wanted in ((0, 2), (1e6, 2), (4, 4), (3, 6), (1e-9, 14)):
        saved.clear()
        execute(config(), checkpoints=Checkpoints(tmp_path / str(seconds), seconds))
        assert len(saved) == wanted, seconds


# --- which checkpoint ----------------------------------------------------------------------------------------------


def stopped(folder, polls=4, seconds=1e-9, **options):
    """A run of one seed that was stopped: the folder of its program."""
    with pytest.raises(Stopped):
        execute(config(seeds=(0,), **options), checkpoints=Checkpoints(folder, seconds, stop=stop_after(polls)))
    return folder / "seed-0"


def test_a_damaged_one_falls_back_to_the_one_before(tmp_path):
    wanted = execute(config(seeds=(0,)))
    for number, damage in enumerate((b"", b"junk", None)):
        program = stopped(tmp_path / str(number))
        older, newer = sorted(program.iterdir())
        content = bytearray(newer.read_bytes())
        content[-5] ^= 1
        newer.write_bytes(content if damage is None else damage)
        kept = Checkpoints(program.parent, resume=True)
        assert newest(program).path == older
        assert untimed(execute(config(seeds=(0,)), checkpoints=kept)) == untimed(wanted)
        assert newest(program).path.name >= newer.name


def test_two_damaged_ones_are_an_error(tmp_path):
    for path in stopped(tmp_path).iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(EvclError, match=r"is damaged .*; the checkpoint .* is damaged .*--overwrite"):
        execute(config(seeds=(0,)), checkpoints=Checkpoints(tmp_path, resume=True))


def test_another_configurations_is_refused(tmp_path):
    stopped(tmp_path / "checkpoint")
    other = configure("split-digits", "evcl", "paper", (0,), 2, {**GIVEN, "lr": 0.5})
    for attempt in (
        lambda: execute(other, checkpoints=Checkpoints(tmp_path / "checkpoint", resume=True)),
        lambda: open_checkpoints(tmp_path, other, resume=True),
    ):
        with pytest.raises(EvclError, match=r"of another run \(lr is 0.001 there and 0.5 here\): pass --overwrite"):
            attempt()
    with pytest.raises(EvclError, match=r"\(seeds is \[0\] there and \[1\] here\)"):
        open_checkpoints(tmp_path, config(seeds=(1,)), resume=True)


def test_an_unfinished_run_is_not_started_over_by_mistake(tmp_path):
    stopped(tmp_path / "checkpoint")
    for attempt in (
        lambda: execute(config(seeds=(0,)), checkpoints=Checkpoints(tmp_path / "checkpoint")),
        lambda: open_checkpoints(tmp_path, config(seeds=(0,))),
    ):
        with pytest.raises(EvclError, match="pass --resume to continue it, or --overwrite to start again"):
            attempt()
    (tmp_path / "checkpoint" / "seed-0" / "mine.txt").touch()
    (tmp_path / "checkpoint" / "mine").mkdir()
    assert not open_checkpoints(tmp_path, config(seeds=(0,)), overwrite=True).resume
    left = sorted(path.name for path in (tmp_path / "checkpoint").rglob("*"))
    assert left == ["mine", "mine.txt", "seed-0"]  # what is not ours stays


WRONG = {
    "no posterior": (lambda d, t: t.pop("run posterior.mean"), "posterior.mean"),
    "weights of another network": (
        lambda d, t: t.update({"run memory/prior/mean": torch.zeros(1, 3)}),
        "prior/mean must be",
    ),
    "weights that are no numbers": (lambda d, t: t["run posterior.mean"].fill_(torch.nan), "and finite"),
    "an importance below 0": (lambda d, t: t["run memory/importance"].fill_(-1), "importance must be at least 0"),
    "a buffer of another type": (lambda d, t: t.update({"step 1": t["step 1"].double()}), "step 1 must be"),
    "no buffers": (lambda d, t: [t.pop(name) for name in list(t) if name.startswith("step")], "step 0 must be"),
    "an epoch too far": (lambda d, t: d.update(epoch=2), "epoch is '2', but there are only 2"),
    "an epoch that is none": (lambda d, t: d.update(epoch=True), "epoch is 'True'"),
    "a batch too far": (lambda d, t: d.update(batch=4), "batch is '4'"),
    "a round too far": (lambda d, t: d.update(round=2), "round is '2'"),
    "an unknown stage": (lambda d, t: d.update(stage=["task"]), "stage"),
    "a stage that is not reached": (lambda d, t: d.update(stage=1), "fit 0 mean must be"),
    "no outline": (lambda d, t: d.pop("outline"), "its memory is not that of this method"),
    "the outline of another method": (
        lambda d, t: d["outline"]["fields"].pop("used"),
        r"has the fields \[.*'prior', 'rows'\], but this method's has \[.*'rows', 'used'\]",
    ),
    "a time that is none": (lambda d, t: d.update(seconds="long"), "seconds 'long'"),
    "an accuracy of 2": (lambda d, t: t["extra accuracy"].fill_(2.0), "accuracy"),
    "diverged, as numbers": (lambda d, t: t.update(diverged=torch.zeros(1)), "diverged must be"),
    "no state of the noise": (lambda d, t: t.pop("noise 0"), "noise: 0 generators"),
    "a state that is none": (lambda d, t: t["noise 0"].fill_(255), "noise: "),
    "another format": (lambda d, t: d.update(format=9), r"format 9, but this one reads 3\): finish the run with"),
}


@pytest.mark.parametrize("what", WRONG)
def test_whatever_a_file_says_is_checked(what, tmp_path, monkeypatch):
    change, message = WRONG[what]
    program = stopped(tmp_path, polls=2)
    saved = read(max(program.iterdir()))
    change(saved.description, saved.tensors)
    monkeypatch.setattr("evcl.training.checkpoint.FORMAT", saved.description.pop("format"))
    for path in program.iterdir():
        write(path, saved.description, saved.tensors)
    monkeypatch.undo()
    with pytest.raises(EvclError, match=message) as error:
        execute(config(seeds=(0,)), checkpoints=Checkpoints(tmp_path, resume=True))
    assert "\n" not in str(error.value)
    assert str(program) in str(error.value)


def test_a_description_that_is_no_json_is_damage(tmp_path):
    from safetensors.torch import save_file

    program = stopped(tmp_path, polls=1)
    for text in ("[" * 100_000, "{", "[]", '{"format": 1e999}'):
        for path in program.iterdir():
            save_file({"x": torch.zeros(1)}, path, {DESCRIPTION: text, "digest": "0"})
        with pytest.raises(EvclError, match="is damaged"):
            execute(config(seeds=(0,)), checkpoints=Checkpoints(tmp_path, resume=True))


def test_another_environment_is_told_of(tmp_path):
    program = stopped(tmp_path)
    saved = newest(program)
    saved.description["environment"]["torch"] = "0.1"
    write(saved.path, saved.description, saved.tensors)
    notes = []
    execute(config(seeds=(0,)), lambda event: notes.append(event.note), checkpoints=Checkpoints(tmp_path, resume=True))
    assert "was written in another environment: results may differ by rounding" in notes[0]
    assert set(notes[1:]) == {None}


# --- disks ---------------------------------------------------------------------------------------------------------


def full(path):
    path.write_bytes(b"half of it")
    raise OSError(errno.ENOSPC, "No space left on device")


def read_only(path):
    raise OSError(errno.EROFS, "Read-only file system")


def vanished(path):
    if path.parent.exists():
        path.parent.parent.rename(path.parent.parent.with_name("elsewhere"))
    path.write_bytes(b"")  # it fails


TROUBLE = {full: "No space left on device", read_only: "Read-only file system", vanished: "No such file or directory"}


@pytest.mark.parametrize("trouble", TROUBLE, ids=lambda trouble: trouble.__name__)
def test_a_disk_in_trouble_does_not_end_a_run_and_leaves_the_last_checkpoint(trouble, tmp_path, monkeypatch):
    wanted = execute(config(seeds=(0,)))
    calls, notes, folder = Counter(), [], tmp_path / "r" / "checkpoint"

    def save(path, *rest):
        calls["all"] += 1
        if calls["all"] > 3:
            trouble(path)
        write_tensors(path, *rest)

    monkeypatch.setattr("evcl._core.files.write_tensors", save)
    found = execute(config(seeds=(0,)), lambda event: notes.append(event.note), checkpoints=Checkpoints(folder, 1e-9))
    monkeypatch.undo()
    assert untimed(found) == untimed(wanted)
    told = [note for note in notes if note]
    assert len(told) == 1
    assert TROUBLE[trouble] in told[0]
    assert "training continues, and the last checkpoint is" in told[0]
    assert told[0].endswith("00000003.safetensors")
    back = folder if folder.exists() else folder.with_name("elsewhere")
    assert sorted(path.name for path in (back / "seed-0").iterdir()) == ["00000002.safetensors", "00000003.safetensors"]
    assert newest(back / "seed-0").description["batch"] == 3
    assert untimed(execute(config(seeds=(0,)), checkpoints=Checkpoints(back, resume=True))) == untimed(wanted)


def test_a_disk_that_is_well_again_is_told_of(tmp_path, monkeypatch):
    calls, notes = count(1), []

    def save(path, *rest):
        if next(calls) <= 2:
            full(path)
        write_tensors(path, *rest)

    monkeypatch.setattr("evcl._core.files.write_tensors", save)
    execute(config(seeds=(0,)), lambda event: notes.append(event.note), checkpoints=Checkpoints(tmp_path, 1e-9))
    first, second = [note for note in notes if note]
    assert "there is no checkpoint yet" in first
    assert "checkpoints can be written again" in second


@pytest.mark.soak
def test_a_disk_that_is_full(tmp_path, evcl):
    """A real one, of 2.2 MB, where a checkpoint takes 1: two are kept, and a third has no room beside them."""
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("only root can make a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2200k", "none", str(disk)], check=False)
    if made.returncode != 0:
        pytest.skip("no disk can be mounted here")
    try:
        often = ["--checkpoint-seconds", "0.000001"]
        status, _, err = evcl(*COMMAND, *often, "--out", disk / "r")
        assert status == 0
        assert err.count("No space left on device") == err.count("training continues") == 1
        assert evcl(*COMMAND, "--out", "whole")[0] == 0
        assert written(disk / "r") == written("whole")
        assert [path.name for path in (disk / "r").iterdir()] == ["result.json"]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# --- the command ---------------------------------------------------------------------------------------------------

COMMAND = ["run", "split-digits", "--preset", "paper", "--tasks", "2", "--epochs", "2", "--seed-list", "0"]
COMMAND += ["--set", "batch_size=100"]


def written(folder):
    return untimed(read_result(Path(folder, "result.json")))


def test_the_command_goes_on_and_cleans_up(evcl):
    assert evcl(*COMMAND, "--out", "whole")[0] == 0
    stopped(Path("r/checkpoint"))
    status, _, err = evcl(*COMMAND, "--out", "r")
    assert status == 1
    assert err.startswith("evcl: r contains the checkpoint of an unfinished run: pass --resume")
    status, _, err = evcl(*COMMAND, "--out", "r", "--set", "lr=0.5", "--resume")
    assert status == 1
    assert "is a checkpoint of another run (lr is" in err
    assert evcl(*COMMAND, "--out", "r", "--resume")[0] == 0
    assert written("r") == written("whole")
    assert [path.name for path in Path("r").iterdir()] == ["result.json"]
    status, out, _ = evcl(*COMMAND, "--out", "r", "--resume")
    assert (status, "already holds this run" in out) == (0, True)
    status, out, _ = evcl(*COMMAND, "--out", "new", "--resume")
    assert (status, "new holds no checkpoint: the run starts from the beginning" in out) == (0, True)


def test_a_run_that_replaces_another_can_be_gone_on_with(evcl):
    write_result(Path("r"), execute(config(seeds=(5,))))
    stopped(Path("r/checkpoint"))
    assert evcl(*COMMAND, "--out", "r", "--resume")[0] == 0
    assert written("r").seeds == [0]
    assert not Path("r/checkpoint").exists()


def test_a_result_that_cannot_be_written_is_not_lost(evcl, monkeypatch):
    with monkeypatch.context() as patch:
        original = Path.open

        def opened(self, mode="r", *args, **options):
            if "result.json" in self.name and mode != "r":
                raise OSError(errno.ENOSPC, "No space left on device")
            return original(self, mode, *args, **options)

        patch.setattr(Path, "open", opened)
        status, out, err = evcl(*COMMAND, "--out", "r")
    assert status == 1
    assert err.startswith(
        "evcl: cannot write r/result.json: No space left on device; the run is done: it is saved in r/"
    )
    assert "evcl" in out  # the table
    assert evcl(*COMMAND, "--out", "r", "--resume")[0] == 0
    assert evcl(*COMMAND, "--out", "whole")[0] == 0
    assert written("r") == written("whole")


def test_a_run_whose_loss_is_lost_keeps_no_checkpoint(evcl):
    shutil.rmtree("r", ignore_errors=True)
    wild = ["--method", "vcl", "--set", "lr=10", "--set", "std_lr_scale=1000", "--checkpoint-seconds", "0.000001"]
    status, _, err = evcl(*COMMAND, *wild, "--out", "r")
    assert (status, "the loss is not a number" in err) == (1, True)
    assert not Path("r/checkpoint").exists()
