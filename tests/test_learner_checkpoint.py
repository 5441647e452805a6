"""`learn(..., checkpoint=FOLDER)`: stopped anywhere, the same call ends with the bytes of one that never was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from calls import counted, signal_at
from checks import bits, refused

import evcl
from evcl.training.checkpoint import newest

STEP = "Step.__call__"
SMALL = {"epochs": 4, "batch_size": 16}  # four steps an epoch
CASES = {
    "evcl": {},
    "evcl-film": {},
    "ewc": {},
    "vcl-kcenter-coreset": {"coreset_size": 20},  # two fits
    "random-coreset": {"coreset_size": 20},
    "lwf": {},
    "vogn": {},
    "ivon": {},
    "noisy-kfac": {},
    "ekf": {"rank": 2, "inner_steps": 2},
    "huber": {},
}


def blobs(seed, labels=(0, 1)):
    source = np.random.default_rng(seed)
    y = np.arange(64) % 2
    return (source.normal(size=(64, 4)) + 2 * y[:, None]).astype(np.float32), np.array(labels)[y]


def begun(method="evcl", **options):
    """A learner that knows one task."""
    learner = evcl.Learner(evcl.nn.mlp(4, [8]), method, seed=3, **{**SMALL, **options})
    learner.learn(*blobs(0), epochs=1)
    return learner


@pytest.mark.parametrize("method", CASES)
def test_interrupted_again_and_again(method, tmp_path):
    whole = begun(method, **CASES[method])
    whole.learn(blobs(1), task="b")
    stops = 0
    for nth in (1, 3, 4, 2, 7, 5, 1, 100):
        learner = begun(method, **CASES[method])  # as a new process would make it
        before = bits(learner)
        try:
            with signal_at(STEP, nth):
                learner.learn(blobs(1), task="b", checkpoint=tmp_path / "c")
            break
        except KeyboardInterrupt:
            stops += 1
            assert bits(learner) == before
            assert newest(tmp_path / "c") is not None
    assert stops >= 3
    assert bits(learner) == bits(whole)
    assert not (tmp_path / "c").exists()


def noise(seed):
    """Nothing to learn: what is learned of it does not hold elsewhere."""
    x, y = blobs(seed)
    return x[np.random.default_rng(seed).permutation(len(x))], y


@pytest.mark.parametrize("options", [{"validation": noise(2), "patience": 3}, {"class_weight": {1: 5.0}}], ids=list)
def test_with_other_options(options, tmp_path):
    """Which epoch was the best, and how long ago, is remembered too."""
    more = {"lr": 0.03, "epochs": 20}
    whole, learner = begun(**more), begun(**more)
    whole.learn(noise(1), **options)
    epochs = whole.history["1"]
    if "patience" in options:
        nlls = [epoch.validation_nll for epoch in epochs]
        assert 3 < len(nlls) < 20
        assert nlls.index(min(nlls)) == len(nlls) - 4
    for nth in (2, 4 * len(epochs) - 6, 3):  # in the first epoch, and twice after the best
        with pytest.raises(KeyboardInterrupt), signal_at(STEP, nth):
            learner.learn(noise(1), checkpoint=tmp_path / "c", **options)
    learner.learn(noise(1), checkpoint=tmp_path / "c", **options)
    assert bits(learner) == bits(whole)
    assert len(learner.history["1"]) < len(epochs)


def test_interrupted_after_the_last_step(tmp_path):
    """While the Fisher is computed there is nothing to save: then what was learned is saved, and not lost."""
    whole, learner = begun(), begun()
    with counted() as usual:
        whole.learn(blobs(1))
    before = bits(learner)
    with pytest.raises(KeyboardInterrupt), signal_at("methods.kronecker.measured", 1):
        learner.learn(blobs(1), checkpoint=tmp_path / "c")
    assert bits(learner) == before
    assert newest(tmp_path / "c").description["learned"] is True
    with counted() as again:
        learner.learn(blobs(1), checkpoint=tmp_path / "c")
    assert 0 == again[STEP] < usual[STEP]
    assert bits(learner) == bits(whole)
    assert not (tmp_path / "c").exists()


def test_a_callback_that_fails_at_the_end_leaves_the_checkpoint(tmp_path):
    class Fails(evcl.Callback):
        def end_task(self, task, history):
            raise RuntimeError("no")

    learner = begun()
    before = bits(learner)
    with pytest.raises(KeyboardInterrupt), signal_at(STEP, 5):
        learner.learn(blobs(1), checkpoint=tmp_path / "c")
    with pytest.raises(RuntimeError, match="no"):
        learner.learn(blobs(1), checkpoint=tmp_path / "c", callbacks=[Fails()])
    assert bits(learner) == before
    assert newest(tmp_path / "c") is not None


def test_another_tasks_checkpoint_is_refused(tmp_path):
    folder, learner = tmp_path / "c", begun()
    with pytest.raises(KeyboardInterrupt), signal_at(STEP, 5):
        learner.learn(blobs(1), task="b", checkpoint=folder)
    saved = {path: path.read_bytes() for path in folder.iterdir()}
    before = bits(learner)
    others = [
        (blobs(2), {}, "data is"),  # other examples
        (blobs(1), {"task": "c"}, "tasks is"),
        (blobs(1), {"epochs": 5}, "epochs is 4 there and 5 here"),
        (blobs(1), {"class_weight": {1: 2.0}}, "data is"),
        (blobs(1), {"sample_weight": np.arange(1, 1 + len(blobs(1)[1]))}, "data is"),
        (blobs(1), {"validation": blobs(3)}, "data is"),
        (blobs(1), {"validation": 0.25, "patience": 1}, "patience is None there and 1 here"),
    ]
    for data, options, difference in others:
        where = f"task '{options.get('task', 'b')}': {folder} holds the checkpoint of another task ({difference}"
        with refused(where) as error:
            learner.learn(data, checkpoint=folder, **{"task": "b", **options})
        assert str(error.value).endswith("): finish that task, or remove the folder")
        assert bits(learner) == before
    assert {path: path.read_bytes() for path in folder.iterdir()} == saved
    other = begun(lr=0.5)
    with pytest.raises(evcl.EvclError, match=r"of another task \(lr is auto there and 0.5 here\)"):
        other.learn(blobs(1), task="b", checkpoint=folder)


def test_what_diverged_keeps_no_checkpoint(tmp_path):
    learner = evcl.VCL(evcl.nn.mlp(4, [8]), lr=1.0, std_update="adam", std_lr_scale=1000.0, epochs=2)
    with pytest.raises(KeyboardInterrupt), signal_at(STEP, 1):
        learner.learn(blobs(0), checkpoint=tmp_path / "c")
    assert newest(tmp_path / "c") is not None
    with pytest.raises(evcl.Diverged):
        learner.learn(blobs(0), checkpoint=tmp_path / "c")
    assert not (tmp_path / "c").exists()


# Another process: it saves itself after each step, and is killed in the middle of the second task.
KILLED = """
import signal, sys
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
from test_learner_checkpoint import begun, blobs, signal_at, STEP
from evcl.training import Checkpointer
learner, Checkpointer.due = begun(sys.argv[3]), lambda self: True
with signal_at(STEP, 7, signal.SIGKILL):
    learner.learn(blobs(1, ("x", "y")), task="b", checkpoint=sys.argv[2])
"""


@pytest.mark.skipif(os.name != "posix", reason="there is no SIGKILL")
@pytest.mark.parametrize("method", ["evcl", pytest.param("random-coreset", marks=pytest.mark.full)])
def test_killed_in_the_middle_of_a_task(method, tmp_path):
    folder = tmp_path / "c"
    command = [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(folder), method]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    about = newest(folder).description
    assert (about["round"], about["learned"], about["epoch"], about["batch"]) == (1, False, 1, 2)
    whole, learner = begun(method), begun(method)
    whole.learn(blobs(1, ("x", "y")), task="b")
    assert learner.learn(blobs(1, ("x", "y")), task="b", checkpoint=folder) == "b"
    assert bits(learner) == bits(whole)
    assert len(learner.history["b"]) == 3  # the epochs since
    assert not folder.exists()
