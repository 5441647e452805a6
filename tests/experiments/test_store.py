"""The store: keys, claims, and every order in which several processes can get at one cell."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_cells import result_of

from evcl._core.errors import EvclError
from evcl._core.files import write_once
from evcl._core.settings import Settings
from evcl.experiments import Config, configure, store
from evcl.experiments.folder import program_name
from evcl.experiments.store import MISSED_HEARTBEATS, Claim, Failure, Heartbeats, Store, key


def cell(seed=0, method="naive", **given):
    return configure("split-digits", method, seeds=[seed], tasks=2, given=given)


def test_a_key_names_what_decides_the_numbers_and_nothing_else(monkeypatch):
    config = cell(0, "evcl")
    assert key(config) == key(configure("split-digits", "evcl", seeds=[0], tasks=2))
    assert key(config) == key(replace(config, preset="another"))
    others = [cell(1, "evcl"), cell(0, "vcl"), cell(0, "evcl", strength=3.0), replace(config, tasks=3),
              replace(config, device="cuda"), replace(config, precision="bf16"),
              replace(config, benchmark="permuted-digits")]  # fmt: skip
    names = {key(other) for other in [config, *others]}
    assert len(names) == 1 + len(others)
    monkeypatch.setattr(store, "NUMBERS", store.NUMBERS + 1)
    assert key(config) not in names


def test_keys_and_checkpoint_folders_are_those_of_earlier_versions(monkeypatch):
    """Stores are shared by users of several versions; those of other numbers have other keys."""
    both = [Settings({"lr": lr, "epochs": 1, "fisher": "exact"}) for lr in (1e-5, 1e-2)]
    one, other = (Config("split-digits", "vcl", "tuned", (0, 7), 2, s, "cuda", "tf32") for s in both)
    for numbers, name in ((1, "76a2fc967a7da3632a41"), (2, "736e0191a56a9c54a3ea")):
        monkeypatch.setattr(store, "NUMBERS", numbers)
        assert key(one.cells[1]) == name
    assert program_name(one.cells[1:]) == "seed-7"
    assert program_name([one]) == "program-c020cb7e97dd6ee7"
    assert program_name([one, other]) == "program-c8067a79d4fa919a"


def test_a_file_is_written_once_and_whole(tmp_path, monkeypatch):
    path = tmp_path / "file"
    assert write_once(path, "first")
    assert not write_once(path, "second")
    assert path.read_text() == "first"
    link = os.link

    def answer_is_lost(*names):
        link(*names)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "link", answer_is_lost)
    assert write_once(tmp_path / "other", "made all the same")
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(95, "Operation not supported")))
    with pytest.raises(EvclError, match="no hard links"):
        write_once(tmp_path / "third", "")
    assert sorted(found.name for found in tmp_path.iterdir()) == ["file", "other"]


def test_the_life_of_a_cell(tmp_path):
    config = cell()
    with Store(tmp_path) as mine, Store(tmp_path) as other:
        mine.declare([config])
        assert other.look(key(config)).kind == "todo"
        claim = mine.take(config)
        assert isinstance(claim, Claim)
        assert other.take(config) is None
        assert (other.look(key(config)).kind, other.look(key(config)).owner) == ("running", mine.me)
        mine.fail(claim, Failure("no memory"))
        assert other.take(config) == Failure("no memory")
        again = other.take(config, retry=True)
        assert again == Claim(key(config), 2)
        assert mine.take(config, retry=True) is None  # it is being tried
        assert other.complete(again, result_of(config))
        assert mine.take(config) == result_of(config)
        assert mine.take(replace(config, preset="paper")).preset == "paper"
        assert mine.look(key(config)).kind == "done"
        mine.forget([key(config)])
        assert mine.look(key(config)).kind == "todo"
        assert list(mine.declared()) == [key(config)]
    assert not list((tmp_path / "owners").iterdir())


def test_who_ends_leaves_its_cells_to_others_at_once(tmp_path):
    with Store(tmp_path) as first:
        assert first.take(cell()) == Claim(key(cell()), 1)
    with Store(tmp_path) as second:
        assert second.look(key(cell())).kind == "stale"
        assert second.take(cell()) == Claim(key(cell()), 2)


def test_a_number_that_is_used_again_is_not_the_process(tmp_path):
    with Store(tmp_path) as first, Store(tmp_path) as second:
        first.take(cell())
        assert second.take(cell()) is None
        path = tmp_path / "owners" / f"{first.me}.json"
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**content, "started": "1"}))  # this process started at another time
        assert second.take(cell()) == Claim(key(cell()), 2)
        path.write_text(json.dumps({**content, "started": "1", "machine": "another"}))  # and of others nothing is known
        assert not first._owner(first.me)[0].dead()


class Clock:
    """A watcher's clock, which moves when it is told to."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(store, "time", self)

    def monotonic(self):
        return self.now

    def time(self):
        return 1e9 + self.now


def test_silence_is_what_a_watcher_hears_while_awake(monkeypatch):
    clock, silence = Clock(monkeypatch), Heartbeats()

    def after(seconds, stamp):
        clock.now += seconds
        return silence.of("a", stamp, 1.0)

    assert after(0, 7) == 0
    assert after(0.5, 7) == 0.5
    assert after(1000, 7) == 1.5  # the watcher slept
    assert after(0.5, 8) == 0
    assert after(1, 8) == 1


@pytest.mark.parametrize("first", ["sleeper", "taker"])
def test_an_owner_that_only_slept_changes_nothing_when_it_comes_back(first, tmp_path, monkeypatch):
    """It lives on this machine, but gives no sign of life while the other looks on, MISSED beats long."""
    config, beat, clock = cell(), 1000.0, Clock(monkeypatch)
    with Store(tmp_path, beat) as sleeper, Store(tmp_path, beat) as taker:
        claim = sleeper.take(config)
        owner = tmp_path / "owners" / f"{sleeper.me}.json"
        for sign in range(5 * MISSED_HEARTBEATS):
            os.utime(owner, (1e9, 1e9 + sign))
            assert taker.take(config) is None  # it lives
            clock.now += beat
        for _ in range(MISSED_HEARTBEATS):  # it sleeps
            assert taker.take(config) is None
            clock.now += beat
        took = taker.take(config)
        assert took == Claim(key(config), 2)
        sleeper.fail(claim, Failure("woke up"))
        assert taker._claimed_by(key(config), 2) == taker.me
        assert sleeper.take(config) is None
        results = {sleeper: result_of(config, 0.25), taker: result_of(config, 0.75)}
        order = [(sleeper, claim), (taker, took)][:: 1 if first == "sleeper" else -1]
        assert [one.complete(held, results[one]) for one, held in order] == [True, False]
        assert taker.result(config) == results[order[0][0]]


def test_a_result_that_comes_while_its_owner_is_given_up_is_not_run_again(tmp_path, monkeypatch):
    config = cell()
    with Store(tmp_path) as sleeper, Store(tmp_path) as taker:
        claim = sleeper.take(config)
        monkeypatch.setattr(taker, "_gone", lambda name: sleeper.complete(claim, result_of(config)))
        assert taker.take(config) == result_of(config)


def test_signs_of_life_are_given(tmp_path):
    with Store(tmp_path, beat=0.01) as mine:
        mine.take(cell())
        path = tmp_path / "owners" / f"{mine.me}.json"
        os.utime(path, (1e9, 1e9))
        begun = time.monotonic()
        while path.stat().st_mtime == 1e9:
            assert time.monotonic() - begun < 30
            time.sleep(0.01)


# --- every order ----------------------------------------------------------------------------------------------------


class Stopped(BaseException):
    pass


class Actors:
    """Threads that take turns: one at a time, from one access to the file system to the next."""

    def __init__(self, programs):
        self.turns = [threading.Semaphore(0) for _ in programs]
        self.back = threading.Semaphore(0)
        self.alive = set(range(len(programs)))
        self.over = False
        self.errors = []
        self.me = threading.local()
        self.threads = [threading.Thread(target=self._run, args=(i, p), daemon=True) for i, p in enumerate(programs)]
        for thread in self.threads:
            thread.start()

    def _run(self, i, program):
        self.me.number = i
        try:
            self.pause(first=True)
            program()
        except Stopped:
            return
        except BaseException as error:
            self.errors.append(error)
        self.alive.discard(i)
        self.back.release()

    def pause(self, first=False):
        number = getattr(self.me, "number", None)
        if number is None:
            return
        if not first:
            self.back.release()
        self.turns[number].acquire()
        if self.over:
            raise Stopped

    def step(self, i):
        self.turns[i].release()
        assert self.back.acquire(timeout=10)

    def stop(self):
        self.over = True
        for i in self.alive | self.crashed:
            self.turns[i].release()
        for thread in self.threads:
            thread.join(10)

    crashed: set = frozenset()


TURNS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 19)), max_size=120)  # whose, and what is thrown


@settings(max_examples=200, deadline=None)
@given(turns=TURNS, wrong=st.booleans())
def test_in_every_order_a_cell_has_one_result_and_a_claim_one_owner(turns, wrong, tmp_path_factory):
    """Three processes at one cell, stopped and gone on with at every access, and killed; with `wrong`, living ones are
    taken for gone too. Whatever happens: one result, which never changes; an owner a claim; and if nobody is taken for
    gone who lives, a cell is run once by those who live.
    """
    folder, config = tmp_path_factory.mktemp("store"), cell()
    stores = [Store(folder, beat=1000) for _ in range(3)]
    ran, kept, heard = [], [], []

    def program(i):
        def run():
            while True:
                took = stores[i].take(config)
                if isinstance(took, Claim):
                    ran.append((i, took.number))
                    actors.pause()
                    kept.append((i, stores[i].complete(took, result_of(config, accuracy=i / 10))))
                elif took is not None:
                    heard.append(took)
                    return
                actors.pause()

        return run

    real_write, real_names = store.write_once, store._names
    actors = Actors([program(i) for i in range(3)])
    actors.crashed = set()

    def write(path, text):
        actors.pause()
        return real_write(path, text)

    def names(path):
        actors.pause()
        return real_names(path)

    thrown = 0

    def gone(self, name):
        owner = next((i for i, one in enumerate(stores) if one.me == name), None)
        return owner in actors.crashed or (wrong and thrown > 10)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "write_once", write)
        patch.setattr(store, "_names", names)
        patch.setattr(Store, "_gone", gone)
        patch.setattr(os, "fsync", lambda _: None)
        try:
            for i, thrown in turns:
                if i in actors.alive and thrown == 0 and len(actors.alive) > 1:
                    actors.alive.discard(i)
                    actors.crashed.add(i)
                elif i in actors.alive:
                    actors.step(i)
            thrown = 0
            for _ in range(200):  # and whoever is left comes to an end
                for i in sorted(actors.alive):
                    actors.step(i)
        finally:
            actors.stop()
            for one in stores:
                one._ended.set()
    assert not actors.errors
    assert not actors.alive
    assert len(heard) == 3 - len(actors.crashed) > 0
    assert all(each == heard[0] for each in heard)
    assert len({number for _, number in ran}) == len(ran)
    assert sum(done for _, done in kept) <= 1
    if not wrong:
        lived = [i for i, _ in ran if i not in actors.crashed]
        assert len(lived) <= 1
        assert all(done for i, done in kept)


# --- many processes at one folder -----------------------------------------------------------------------------------


def hammer(folder, cells, log, dies):
    """A process that runs what it can get, and is killed in the middle of its third cell."""
    with Store(folder) as mine, log.open("a") as file:
        left, mine_so_far = list(cells), 0
        while left:
            for config in list(left):
                took = mine.take(config)
                if took is None:
                    continue
                if isinstance(took, Claim):
                    mine_so_far += 1
                    last = dies and mine_so_far == 3
                    file.write(f"{took.key} {took.number} {os.getpid()} {'killed' if last else 'lived'}\n")
                    file.flush()
                    if last:
                        os.kill(os.getpid(), signal.SIGKILL)
                    time.sleep(0.001)
                    assert mine.complete(took, result_of(config))
                left.remove(config)
    os._exit(0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("processes", "count"), [(6, 40), pytest.param(24, 2000, marks=pytest.mark.soak)], ids=["some", "many"]
)
def test_many_processes_at_one_folder_run_every_cell_once(processes, count, tmp_path):
    cells, log = [cell(seed) for seed in range(count)], tmp_path / "log"
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=hammer, args=(tmp_path, cells, log, i % 2 == 0)) for i in range(processes)]
    for process in started:
        process.start()
    for process in started:
        process.join(300)
        assert process.exitcode in (0, -signal.SIGKILL)
    ran = [line.split() for line in log.read_text().splitlines()]
    assert len({(name, number) for name, number, _, _ in ran}) == len(ran)
    assert sorted(name for name, _, _, how in ran if how == "lived") == sorted(key(config) for config in cells)
    kills = sum(how == "killed" for *_, how in ran)
    print(f"{kills} processes killed")  # noqa: T201  (shown with -s)
    assert kills == sum(process.exitcode != 0 for process in started) > 0
    with Store(tmp_path) as after:
        assert all(after.take(config) == result_of(config) for config in cells)
    assert not list(tmp_path.rglob(".*.tmp"))


def test_what_cannot_be_written_or_read_says_so(tmp_path):
    config, folder = cell(), tmp_path / "s"
    with Store(folder) as mine:
        claim = mine.take(config)
        mine.complete(claim, result_of(cell(1)))
        with pytest.raises(EvclError, match="is not the result of split-digits naive: remove its folder"):
            mine.take(config)
    (folder / "cells" / key(cell(2))).write_text("a file in the way")
    with Store(folder) as mine, pytest.raises(EvclError, match="cannot read"):
        mine.take(cell(2))
    with pytest.raises(EvclError, match="cannot write to"):
        Store(Path(os.devnull) / "s").declare([config])
    (folder / "sweeps").mkdir()
    (folder / "sweeps" / "a.json").write_text('{"cells": 3}')
    with pytest.raises(EvclError, match="not a list of cells"):
        Store(folder).declared()
