"""What earlier tasks are at now: estimated from a summary, measured on kept rows, and told with what would help."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from tabular import predicted

from evcl import EvclError, tables
from evcl.tables.earlier import MIN_ROWS, Summary, _similar, estimate, standing
from evcl.tables.model import TABLE_NOTE
from evcl.tables.saved import notes_of

FAST = ["--epochs", "30", "--hidden", "16", "--set", "lr=0.02"]


def rows(seed, count=400, rule=(1.0, 1.0, 0.0, 0.0), centre=0.0):
    source = np.random.default_rng(seed)
    x = centre + source.normal(size=(count, 4)).round(3)
    label = np.where((x - centre) @ np.array(rule) + 0.5 * source.normal(size=count) > 0, "yes", "no")
    return pd.DataFrame({**{f"x{i}": x[:, i] for i in range(4)}, "label": label})


@pytest.fixture
def learn(evcl):
    def learn(name, frame, *more):
        frame.to_csv(f"{name}.csv", index=False)
        made = [] if Path("m").exists() else ["--target", "label", *FAST]
        return evcl.done("learn", "--model", "m", "--data", f"{name}.csv", *made, *more)

    return learn


def accuracy(evcl, frame, task):
    out = predicted(evcl, frame, "test", "--task", task, "--json")
    return json.loads(out)["accuracy"]


def test_the_estimate_is_near_the_truth_where_the_model_forgets(evcl, learn):
    """A rule that is reversed makes the model forget the first one, whatever its accuracy was."""
    learn("january", rows(0), "--method", "naive")
    out = learn("february", rows(1, rule=(-1.0, 1.0, 0.0, 0.0)))
    truth = accuracy(evcl, rows(2, 2000), "january")
    found = json.loads(evcl.done("inspect", "m", "--json"))["tasks"]
    assert found[0]["estimated"] is True
    assert found[0]["accuracy"] > truth + 0.2
    assert found[0]["now"] == pytest.approx(truth, abs=0.08)
    assert f"earlier tasks now, estimated: january {100 * found[0]['now']:.1f}%\n" in out
    assert f"~{100 * found[0]['now']:.1f}%" in evcl("inspect", "m")[1]


def test_rows_that_are_kept_are_measured_instead(evcl, learn):
    learn("january", rows(0), "--keep", "60")
    out = learn("february", rows(1))
    found = tables.load_model(Path("m"))
    kept = found.learner.evaluate_kept()["january"]
    assert f"earlier tasks now, on the rows kept of them: january {100 * kept:.1f}%\n" in out
    told = json.loads(evcl.done("inspect", "m", "--json"))["tasks"][0]
    assert (told["now"], told["estimated"]) == (kept, False)
    learn("march", rows(2), "--keep", "8")  # too few rows of each task to measure on
    assert json.loads(evcl.done("inspect", "m", "--json"))["tasks"][0]["estimated"] is True


def test_a_month_like_the_others_needs_no_note(learn):
    learn("january", rows(0))
    assert "note" not in learn("february", rows(1))


def test_tasks_of_one_head_are_predicted_together_as_each_alone(learn, monkeypatch):
    for month, frame in (("january", rows(0)), ("february", rows(1, centre=6.0)), ("march", rows(2))):
        learn(month, frame, *(["--head", "new"] if month == "march" else []))
    found = tables.load_model(Path("m"))
    together = standing(found)
    monkeypatch.setattr("evcl.learner.Learner.predicted_as", lambda self, task: task)
    assert standing(found) == together
    assert set(together) == {"january", "february", "march"}


def test_a_month_unlike_all_before_is_named(learn):
    learn("january", rows(0))
    out = learn("february", rows(1, centre=6.0))
    assert "note: its rows are unlike all earlier ones (unfamiliar " in out
    assert out.count("note") == 1


def test_a_rule_that_changed_is_named_with_what_would_help(learn):
    learn("january", rows(0))
    out = learn("february", rows(1, rule=(-1.0, -1.0, 0.0, 0.0)))
    assert "note: its rows look like earlier ones, but their labels may follow another rule (" in out
    assert "if both rules hold, --head new keeps them apart" in out
    assert "--keep" not in out  # rows of the other rule would contradict these


def test_one_rule_over_inputs_that_move_is_no_other_rule(learn):
    """Only one of four columns moves, to where another part of the same rule holds."""
    frames = [rows(seed, rule=(0.0, 0.0, 2.0, 0.0)) for seed in (0, 1)]
    frames[1].x0 += 3
    frames[1].label = np.where(frames[1].label == "yes", "no", "yes")
    learn("january", frames[0])
    out = learn("february", frames[1])
    assert "(" in out.partition("on the held-out rows: accuracy ")[2]
    assert "another rule" not in out


def test_why_it_is_not_known_what_a_task_is_at(evcl, learn):
    few = "too few rows per class for an estimate"
    assert "not known" not in learn("one", rows(0, count=6).assign(label=list("aabbcc")))
    assert "not known" not in evcl("inspect", "m")[1]
    assert f"earlier tasks now, not known: one ({few})\n" in learn("two", rows(1, count=6).assign(label=list("aabbcc")))
    assert f"Accuracy now, not known: one, two ({few}).\n" in evcl("inspect", "m")[1]


def test_tasks_that_lost_accuracy_are_named(learn):
    """Rows far away by another rule make naive training forget those before."""
    learn("january", rows(0), "--method", "naive")
    out = learn("february", rows(1, 2000, rule=(0.0, 0.0, 3.0, 3.0), centre=3.0))
    assert "note: it cost earlier tasks accuracy: january " in out
    assert "%); --keep 200 keeps rows, and later files then cost less" in out
    assert "cost earlier" not in learn("march", rows(2, 2000, rule=(0.0, 0.0, 3.0, 3.0), centre=3.0))  # it was february


@pytest.mark.parametrize("now", [3, {"nobody": [0.5, True]}, {"january": [1.5, True]}, {"january": "high"}])
def test_damage_to_what_tasks_are_at_is_refused_in_one_line(learn, now):
    learn("january", rows(0))
    text = notes_of(Path("m"))
    save_file(
        load_file("m"), "m", {**text, TABLE_NOTE.name: json.dumps({**json.loads(text[TABLE_NOTE.name]), "now": now})}
    )
    with pytest.raises(EvclError, match=r"^cannot load m: [^\n]*$"):
        tables.load_model(Path("m"))


def test_a_summary_holds_no_row_and_describes_the_classes(generator):
    x = torch.randn(203, 3, generator=generator).float()
    for count in (1, 4, 16):
        means, place = _similar(x, count, generator)
        assert 1 <= len(means) <= count
        assert int(place.bincount(minlength=len(means)).min()) >= MIN_ROWS
        slow = torch.stack([x[place == k].mean(0) for k in range(len(means))])
        torch.testing.assert_close(means, slow, rtol=1e-5, atol=1e-6)
    same = torch.zeros(40, 3)
    assert len(_similar(same, 5, generator)[0]) == 1


def test_pseudo_rows_have_the_moments_of_the_summary():
    means = torch.tensor([[0.0, 5.0], [9.0, 9.0], [1.0, 1.0]])
    std = torch.tensor([[1.0, 0.1], [1.0, 0.1], [2.0, 2.0]])
    codes, counts = torch.tensor([3, 3, 7]), torch.tensor([100, 300, 100])
    summary = Summary(means, std, codes, counts, torch.tensor(0.9, dtype=torch.float64))
    x, y = summary.pseudo_rows(4, 0, 0)
    assert x.shape == (500, 4)
    assert bool((x[:, 2:] == 0).all())  # inputs that came later
    assert y.tolist() == [3] * 400 + [7] * 100
    torch.testing.assert_close(x[100:400, :2].mean(0), means[1], rtol=0, atol=0.2)
    torch.testing.assert_close(x[400:, :2].std(0), std[2], rtol=0.25, atol=0)
    assert torch.equal(summary.pseudo_rows(4, 0, 0)[0], x)
    again = Summary.from_tensors(summary.tensors(), 2, 8)
    assert all(torch.equal(t, getattr(summary, name)) for name, t in vars(again).items())


def test_the_estimate_by_hand():
    assert estimate(0.4, 0.8, None, 0) == 0.4  # nothing was held out
    assert estimate(0.4, 0.0, 0.9, 50) == 0.4
    p = (0.9 * 50 + 1) / 52
    w = 0.05**2 / (0.05**2 + p * (1 - p) / 50)
    assert estimate(0.4, 0.8, 0.9, 50) == pytest.approx(0.4 * (1 + w * (0.9 / 0.8 - 1)))
    assert estimate(0.4, 0.8, 0.9, 10**9) == pytest.approx(0.4 * 0.9 / 0.8)
    assert estimate(1.0, 0.5, 0.9, 10**9) == 1.0


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("means", lambda t: t * torch.nan),
        ("means", lambda t: t[:, :0]),
        ("means", lambda t: torch.cat([t] * 9, 1)),
        ("means", lambda t: t.double()),
        ("std", lambda t: t[:1]),
        ("codes", lambda t: t + 5),
        ("codes", lambda t: t - 1),
        ("counts", lambda t: t * 0),
        ("counts", lambda t: t[1:]),
        ("right", lambda t: t + 2),
        ("right", lambda t: None),
    ],
)
def test_a_damaged_summary_is_refused_in_one_line(learn, name, change):
    learn("january", rows(0))
    text, tensors = notes_of(Path("m")), load_file("m")
    changed = change(tensors.pop(f"summary.0.{name}"))
    save_file(tensors if changed is None else {**tensors, f"summary.0.{name}": changed.contiguous()}, "m", text)
    with pytest.raises(EvclError, match=r"^cannot load m: [^\n]*$"):
        tables.load_model(Path("m"))


def test_a_summary_of_no_task_is_refused(learn):
    learn("january", rows(0))
    tensors = {name.replace("summary.0", "summary.9"): tensor for name, tensor in load_file("m").items()}
    save_file(tensors, "m", notes_of(Path("m")))
    with pytest.raises(EvclError, match="a summary is of a task that was not learned"):
        tables.load_model(Path("m"))
