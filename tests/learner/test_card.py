"""The card: what a learner was trained on, when and how sure it is; in the file, and by `evcl inspect`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checks import refused
from safetensors.torch import save_file
from torch import nn

from evcl import EVCL, Callback, EvclError, __version__, load
from evcl.learner import read_card
from evcl.nn import mlp

FIXTURES = Path(__file__).parent.parent / "fixtures" / "models"


def rows(n=40):
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long()


def trained(network=None, **options):
    learner = EVCL(network or mlp(3, [8]), epochs=4, lr=0.02, memory=10, **options)
    x, y = rows()
    learner.learn((x, y), task="january", validation=0.25)
    learner.learn((x, y), task="february", head="january", epochs=2)
    return learner


def test_it_says_what_when_and_how_sure(tmp_path):
    learner = trained()
    card = learner.card()
    first, second = card["tasks"]
    assert (first["task"], first["examples"], first["classes"], first["epochs"]) == ("january", 30, 2, 4)
    assert first["learned"] == "2026-01-01 00:00"  # as SOURCE_DATE_EPOCH says: tests/conftest.py
    assert first["validation"].keys() == {"examples", "accuracy", "nll", "ece"}
    assert first["validation"]["examples"] == 10
    assert (second["head"], second["examples"], second["epochs"], "validation" in second) == ("january", 40, 2, False)
    assert 0 <= first["now"] <= 1
    assert (card["method"], card["seed"], card["settings"]["lr"]) == ("evcl", 0, 0.02)
    assert card["versions"]["evcl"] == __version__
    assert card["weights"] == learner.state.run.network.posterior.mean.shape[1]
    learner.save(tmp_path / "model.safetensors")
    assert load(tmp_path / "model.safetensors").card() == card
    for task in card["tasks"]:
        task.pop("now", None)
    assert read_card(tmp_path / "model.safetensors") == card
    assert json.loads(json.dumps(card)) == card


def test_the_validation_part_is_measured_as_measure_does():
    learner = EVCL(mlp(3, [8]), epochs=4)
    x, y = rows()
    learner.learn((x[:30], y[:30]), validation=(x[30:], y[30:]))
    found, wanted = learner.card()["tasks"][0], learner.measure((x[30:], y[30:]))
    assert found["examples"] == 30
    assert found["validation"] == pytest.approx({"examples": 10, **wanted._asdict()})


def test_a_failed_task_leaves_no_trace():
    learner = trained()
    before = learner.card()

    class Fail(Callback):
        def end_task(self, task, history):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        learner.learn(rows(), task="march", callbacks=[Fail()])
    assert learner.card() == before


def test_a_file_saved_at_the_end_of_a_task_has_its_record(tmp_path):
    learner = EVCL(mlp(3, [8]), epochs=1)

    class Save(Callback):
        def end_task(self, task, history):
            learner.save(tmp_path / "model.safetensors")

    learner.learn(rows(), task="january", callbacks=[Save()])
    assert read_card(tmp_path / "model.safetensors")["tasks"][0]["examples"] == 40


def test_inspect_shows_any_model_without_its_network(evcl, tmp_path):
    with torch.random.fork_rng(devices=[]):
        network = nn.Sequential(nn.Linear(3, 8), nn.Tanh())
    learner = trained(network)
    learner.save("own.safetensors")
    status, out, _ = evcl("inspect", "own.safetensors")
    held = learner.card()["tasks"][0]["validation"]
    assert status == 0
    for text in ("2 tasks", "method   evcl, seed 0, lr=0.02", "torch", "january", f"{100 * held['accuracy']:.1f}%"):
        assert text in out
    assert str(tmp_path) not in Path("own.safetensors").read_bytes().decode("latin-1")


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*.safetensors")), ids=lambda path: path.stem)
def test_files_of_earlier_versions_have_less_to_show(path, evcl):
    status, out, err = evcl("inspect", str(path))
    assert (status, err) == (0, "")
    assert "method" in out


def test_damaged_records_are_refused_in_one_line(tmp_path):
    path, (about, tensors) = tmp_path / "model.safetensors", trained().described()
    for damage in (3, [{}], [{"task": "nobody"}], [{**about["records"][0], "examples": "many"}]):
        save_file(tensors, path, {"evcl": json.dumps({**about, "records": damage})})
        for read in (load, read_card):
            with refused("records of its tasks cannot be read"):
                read(path)


def test_no_file_is_one_clear_line(tmp_path):
    for path in (None, tmp_path, tmp_path / "none"):
        for read in (load, read_card):
            with pytest.raises(EvclError, match="there is no file"):
                read(path)


def test_a_table_is_exported_with_its_labels(evcl, tmp_path):
    x, y = rows()
    lines = [f"{a:.3f},{b:.3f},{'yes' if label else 'no'}" for (a, b, _), label in zip(x.tolist(), y, strict=True)]
    Path("january.csv").write_text("\n".join(["a,b,sold", *lines]))
    learn = ["learn", "--model", "m", "--data", "january.csv", "--target", "sold", "--epochs", "2"]
    assert evcl(*learn)[0] == 0
    assert evcl("export", "m", "m.pt2", "--samples", "2")[0] == 0
    texts = {"evcl.json": ""}
    program = torch.export.load("m.pt2", extra_files=texts).module()
    about = json.loads(texts["evcl.json"])
    assert json.loads(about["evcl.classes"]) == ["no", "yes"]
    assert [one["name"] for one in json.loads(about["evcl.columns"])] == ["a", "b"]
    assert program(torch.zeros(3, 2))["probabilities"].shape == (3, 2)
    status, _, err = evcl("export", "m", "m.txt")
    assert (status, err) == (1, "evcl: m.txt should end in .onnx or .pt2: ONNX, or a program of torch.export\n")
