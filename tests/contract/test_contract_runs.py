"""What a method gets for nothing, whoever wrote it: it is stopped and resumed, trained beside other seeds, other settings
and other methods, by several processes, and on a GPU, and ends where it ends alone.

EVCL_PLUGINS=mine.py pytest tests/contract   puts a method of yours through it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from itertools import count, cycle
from pathlib import Path

import pytest
import small
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

import evcl
from evcl.experiments import configure, execute
from evcl.experiments.programs import programs
from evcl.methods import METHODS, together
from evcl.training import Checkpoints, Stopped
from evcl.training.checkpoint import newest

ALL = list(METHODS)
every_method = pytest.mark.parametrize("method", ALL)


@cache
def alone(method, seeds=(0, 1)):
    return small.train([method] * len(seeds), seeds)


def check(found, wanted):
    """The same tensors, but for rounding."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}")


def rows(found, some, group=None):
    """What these replicas have of it; `group`: with what their method remembers, of several methods' memories."""
    own = "memory/" if group is None else f"memory {group}/"
    kept = {name.replace(own, "memory/"): t for name, t in found.items() if not name.startswith("memory ")}
    if group is not None:
        kept |= {name.replace(own, "memory/"): t for name, t in found.items() if name.startswith(own)}
        some = {False: some, True: slice(None)}
        return {name: t[some[name.startswith("memory/")]] for name, t in kept.items()}
    return {name: t[some] for name, t in kept.items()}


# --- seeds, settings and methods in one program ----------------------------------------------------------------------


@every_method
def test_three_seeds_in_one_program_are_three_alone(method):
    three = small.train([method] * 3, [0, 1, 2])
    for r in range(3):
        check(rows(three, [r]), small.train([method], [r], replicas=[r]))


def halved(method):
    """Every real number that is the method's own, and the learning rate, is half of its default."""
    s = small.settings(method)
    return {name: value / 2 for name, value in s.items() if isinstance(value, float)}


@every_method
def test_two_choices_of_its_settings_share_a_program(method):
    configs = [configured(method), configured(method, **halved(method))]
    assert programs(configs, 8) == [[0, 1]]
    both = [small.settings(method), small.settings(method, **halved(method))]
    found = small.train([method] * 2, [0, 0], both, replicas=[0, 1])
    for r in range(2):
        check(rows(found, [r]), small.train([method], [0], [both[r]], replicas=[r]))


def configured(method, **given):
    defaults = {name: setting.default for name, setting in METHODS[method].known_settings.items()}
    return configure("split-digits", method, "tuned", (0,), 2, {**defaults, **given})


def of_its_kind(method):
    return tuple(other for other in ALL if together.kind(METHODS[other]) == together.kind(METHODS[method]))


@cache
def all_of(methods):
    """Two seeds of each of these methods, in one program."""
    return small.train([m for m in methods for _ in range(2)], [0, 1] * len(methods), replicas=[0, 1] * len(methods))


@every_method
def test_beside_all_methods_of_its_kind_it_is_as_alone(method):
    """Where there is no other, no program has it beside another."""
    methods = of_its_kind(method)
    place = methods.index(method)
    found = programs([configured(other) for other in ALL], 2 * len(ALL))
    assert [ALL.index(other) for other in methods] in found
    if len(methods) > 1:
        check(rows(all_of(methods), slice(2 * place, 2 * place + 2), place), alone(method))


# --- stopped and resumed ---------------------------------------------------------------------------------------------


def stop_after(polls):
    numbers = count(1)
    return lambda: next(numbers) >= polls


@every_method
def test_stopped_again_and_again_it_ends_to_the_bit_where_it_would_have(method, tmp_path):
    given = {"epochs": 2, "batch_size": 40, "coreset_size": 80, "memory": 60}
    known = METHODS[method].known_settings
    config = configure(
        "split-digits", method, "paper", (0, 1), 2, {name: value for name, value in given.items() if name in known}
    )

    def last(folder):
        (program,) = folder.iterdir()
        return newest(program)

    wanted = execute(config, checkpoints=Checkpoints(tmp_path / "whole", 0))
    stopped = set()
    for polls in cycle((1, 2, 6, 3)):
        try:
            resumed = Checkpoints(tmp_path / "parts", 1e6, resume=True, stop=stop_after(polls))
            found = execute(config, checkpoints=resumed)
            break
        except Stopped:
            where = last(tmp_path / "parts").description
            stopped.add((where["round"], where.get("stage")))
    rounds = range(1 if METHODS[method].jointly else 2)
    assert stopped >= {(number, stage) for number in rounds for stage in range(METHODS[method].stages)}
    assert replace(found, seconds=0.0) == replace(wanted, seconds=0.0)
    ours, theirs = (last(tmp_path / name).tensors for name in ("parts", "whole"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name].view(torch.uint8), theirs[name].view(torch.uint8)) for name in ours)


# --- elsewhere -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def by_two(tmp_path_factory):
    """What two processes end with that train together: of a method, what each of them has."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(Path(evcl.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, small.__file__, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return lambda method: [load_file(folder / f"{method} {rank}") for rank in range(2)]


@every_method
def test_two_processes_end_where_one_does(method, by_two):
    first, second = by_two(method)
    assert all(torch.equal(first[name], second[name]) for name in first)
    check(first, alone(method))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@every_method
def test_a_gpu_learns_as_much(method):
    benchmark = evcl.benchmarks.get("split-digits", tasks=2)
    accuracy = []
    for device in ("cpu", "cuda"):
        one = evcl.Learner(evcl.nn.mlp(benchmark.inputs, [50]), method, seed=0, epochs=20, device=device)
        if one.method.jointly:
            one.learn_jointly(benchmark)
        else:
            for task in benchmark:
                one.learn(task)
        accuracy.append(sum(one.evaluate(benchmark).values()) / 2)
    assert accuracy[1] == pytest.approx(accuracy[0], abs=0.02)
