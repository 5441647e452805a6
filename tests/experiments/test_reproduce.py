from __future__ import annotations

from functools import partial

import pytest

from evcl._core.errors import EvclError
from evcl.experiments import Forecast, configure, execute, read_result, reproduce, standing, write_result
from evcl.experiments.engines import Inline
from evcl.experiments.paper import cost
from evcl.report import find_results


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_the_end_is_predicted_from_the_work_done_so_far():
    clock = Clock()
    forecast = Forecast([10.0, 30.0], clock)
    assert forecast.remaining() is None
    clock.now += 20
    forecast.update(0, 1.0)  # a quarter of the work in 20 s
    assert forecast.remaining() == pytest.approx(60)
    clock.now += 40
    forecast.update(1, 2 / 3)  # three quarters in 60 s
    assert forecast.part == pytest.approx(0.75)
    assert forecast.remaining() == pytest.approx(20)
    forecast.update(1, 0.1)  # late news does not turn it back
    assert forecast.remaining() == pytest.approx(20)
    clock.now += 20
    forecast.update(1, 1.0)
    assert forecast.remaining() == 0


def test_cost_counts_what_takes_time():
    def of(method, **given):
        return cost(configure("split-digits", method, seeds=[0], given=given))

    assert of("naive", epochs=10) == 2 * of("naive", epochs=5)
    assert of("evcl") > 2 * of("naive")
    assert of("vcl-random-coreset") > of("vcl")
    assert of("evcl", coreset="kcenter") == of("vcl-kcenter-coreset")
    assert cost(configure("split-digits", "naive", seeds=[0, 1])) == 2 * of("naive")


def configs(*methods, epochs=1, seeds=(0, 1)):
    return [configure("split-digits", m, seeds=seeds, tasks=2, given={"epochs": epochs}) for m in methods]


@pytest.mark.full
def test_what_is_done_is_kept_and_never_run_twice(tmp_path, monkeypatch):
    wanted = configs("evcl", "naive")
    first = dict(reproduce(wanted, tmp_path))
    assert first.keys() == {0, 1}
    for i, config in enumerate(wanted):
        stored = read_result(tmp_path / "split-digits" / config.method / "result.json")
        assert stored == first[i]
        assert first[i].seeds == [0, 1]
    monkeypatch.setattr("evcl.experiments.paper.execute_all", lambda *_, **__: pytest.fail("run again"))
    assert dict(reproduce(wanted, tmp_path)) == first


@pytest.mark.parametrize("same", [True, False])
def test_a_result_that_came_meanwhile_is_not_replaced(same, tmp_path):
    """One of the same run, by a process that shares the folder, is as good as ours; another is an error."""
    (wanted,) = configs("naive", seeds=(0,))
    came = execute(wanted if same else configs("naive", epochs=2)[0])

    class Sharing(Inline):
        def run(self, cells, on_event, checkpoints):
            write_result(tmp_path / "split-digits" / "naive", came)
            return super().run(cells, on_event, checkpoints)

    if same:
        assert dict(reproduce([wanted], tmp_path, engine=Sharing)).keys() == {0}
    else:
        with pytest.raises(EvclError, match=r"is the result of another run \(split-digits naive\)"):
            list(reproduce([wanted], tmp_path, engine=Sharing))
    assert read_result(tmp_path / "split-digits" / "naive" / "result.json") == came


class Stopping(Inline):
    """This process, interrupted in the middle of its second run."""

    def __init__(self, ran, on_event):
        super().__init__(on_event)
        self.ran = ran

    def run(self, cells, on_event, checkpoints):
        self.ran.append(cells[0].seeds)
        if len(self.ran) == 2:
            raise KeyboardInterrupt
        return super().run(cells, on_event, checkpoints)


def test_it_goes_on_where_it_was_stopped(tmp_path):
    """Stopped after one seed of two: that one is not run again, and the result is that of an undisturbed run."""
    (wanted,), ran = configs("evcl"), []
    with pytest.raises(KeyboardInterrupt):
        list(reproduce([wanted], tmp_path, engine=partial(Stopping, ran)))
    assert not list(tmp_path.glob("split-digits/evcl/*"))
    assert [each.state.kind for each in standing(tmp_path)] == ["done", "stale"]
    ((_, result),) = reproduce([wanted], tmp_path, engine=partial(Stopping, ran))
    assert ran == [(0,), (1,), (1,)]
    assert [path.name for path in (tmp_path / "split-digits" / "evcl").iterdir()] == ["result.json"]
    assert [each.state.kind for each in standing(tmp_path)] == ["done", "done"]
    alone = [execute(configs("evcl", seeds=(seed,))[0]) for seed in (0, 1)]
    assert result.accuracy == [one.accuracy[0] for one in alone]
    assert result.nll.per_seed == [one.nll.mean for one in alone]
    assert len(find_results(tmp_path)) == 1  # its cells are not shown beside it


@pytest.mark.full
def test_cells_of_another_configuration_are_run_again_and_results_refused(tmp_path):
    (few,), (many,) = configs("naive", epochs=1), configs("naive", epochs=2)
    list(reproduce([few], tmp_path))
    with pytest.raises(EvclError, match="holds another run"):
        list(reproduce([many], tmp_path))
    ((_, result),) = reproduce([many], tmp_path, overwrite=True)
    assert result.config["epochs"] == 2


@pytest.mark.full
def test_one_that_diverges_does_not_stop_the_others(tmp_path):
    wild = configure("split-digits", "vcl", seeds=(0, 1), tasks=2, given={"epochs": 1, "lr": 10, "std_lr_scale": 1000})
    each = list(reproduce([wild, *configs("naive")], tmp_path))
    assert sorted(i for i, _ in each) == [0, 1]  # one result each, though both seeds are lost
    found = dict(each)
    assert found[0].average_accuracy.mean is None
    assert found[0].nll.mean is None
    assert found[1].average_accuracy.mean > 0.5
    assert [path.parent.name for path in tmp_path.glob("split-digits/*/*.json")] == ["naive"]


def test_overwriting_that_is_stopped_can_be_gone_on_with(tmp_path):
    few, many = configs("evcl", "naive", epochs=1), configs("evcl", "naive", epochs=2)
    list(reproduce(few, tmp_path, engine=Inline))
    with pytest.raises(KeyboardInterrupt):
        list(reproduce(many, tmp_path, overwrite=True, engine=partial(Stopping, [])))
    ran = ["begun", "before"]
    assert {i for i, _ in reproduce(many, tmp_path, engine=partial(Stopping, ran))} == {0, 1}
    assert len(ran) == 2 + 3  # all but the one that was done


def test_what_is_to_be_overwritten_is_run_again(tmp_path):
    (wanted,), ran = configs("naive"), ["begun", "before"]
    for overwrite in (False, False, True):
        list(reproduce([wanted], tmp_path, overwrite=overwrite, engine=partial(Stopping, ran)))
    assert ran[2:] == [(0,), (1,)] * 2


@pytest.mark.full
def test_the_command_line_ends_with_a_report(evcl, tmp_path):
    few = ["--method", "evcl", "--method", "naive", "--quick", "--epochs", "1", "--device", "cpu", "--out", "r"]
    status, out, err = evcl("reproduce", "split-digits", *few)
    assert (status, err) == (0, "")
    assert "2 of 2: split-digits" in out
    assert evcl("reproduce", "split-digits", "--method", "huber", *few[4:-1], "plugin")[0] == 0  # by EVCL_PLUGINS
    assert (tmp_path / "r" / "index.html").exists()
    status, _, err = evcl("reproduce", "nonsense")
    assert status == 2
    assert err.startswith("evcl: unknown benchmark 'nonsense'")
