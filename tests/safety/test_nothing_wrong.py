"""No wrong answer without a word: integers, NaN, labels."""

from __future__ import annotations

import attacks
import numpy as np
import pytest
import torch

import evcl as library
from evcl._core.errors import EvclError
from evcl.learner.persist import rebuilt
from evcl.tables import learn

LARGE = [2**53 + i for i in range(3)]


@pytest.mark.parametrize("kind", ["parquet", "npz", "npy", "csv", "csv with fractions"])
def test_large_integers_are_different_labels(tmp_path, kind):
    """4.1: everything went through float64."""
    y = [f"{label}.0" for label in LARGE * 10] if "fractions" in kind else np.array(LARGE * 10)
    data = attacks.table(tmp_path / f"t.{kind.split()[0]}", x=np.arange(30.0), y=y)
    found = learn(tmp_path / "m.safetensors", data, "y", epochs=1, hidden=(2,))
    assert found.model.labels == [str(label) for label in LARGE]


@pytest.mark.parametrize("method", ["evcl", "naive", "ekf"])
def test_no_nan_is_predicted(evcl, tmp_path, method):
    """4.2: rows far outside of the data gave NaN, with status 0."""
    rng = np.random.default_rng(0)
    rows = [",".join(map(str, row)) for row in rng.normal(size=(40, 6)).round(3)]
    (tmp_path / "t.csv").write_text(
        "a,b,c,d,e,f,y\n" + "\n".join(f"{row},{i % 2}" for i, row in enumerate(rows)) + "\n"
    )
    words = ("--epochs", 1, "--hidden", "50,50,50", "--method", method, "--target", "y")
    status, _, err = evcl("learn", "--model", "m.safetensors", "--data", "t.csv", *words)
    assert (status, err) == (0, "")
    (tmp_path / "far.csv").write_text(f"a,b,c,d,e,f\n{rows[0]}\n1e38,-1e38,2e38,-3e38,1e38,2e38\n")
    status, _, err = evcl("predict", "--model", "m.safetensors", "--data", "far.csv", "--out", "p.csv")
    if status:
        assert "line 3" in err
        assert err.count("\n") == 1
        assert not (tmp_path / "p.csv").exists()
    else:
        assert "nan" not in (tmp_path / "p.csv").read_text()


@pytest.mark.parametrize(("name", "value"), [("log_std", 200.0), ("log_std", -200.0), ("mean", 3e38), ("mean", -1e19)])
@pytest.mark.parametrize("where", ["posterior", "memory/prior"])
def test_weights_have_a_range_in_a_file(name, value, where):
    learner = library.EVCL(library.nn.mlp(2, [2]), epochs=1)
    learner.learn(np.zeros((4, 2), "f"), np.arange(4) % 2)
    description, tensors = learner.described()
    tensors[f"{where}.{name}" if where == "posterior" else f"{where}/{name}"][0, 1] = value
    with pytest.raises(EvclError, match=r"must be (below|at)"):
        rebuilt(description, tensors)


@pytest.mark.parametrize("last", ["\0", "\0\0", " ", "\n"])
@pytest.mark.parametrize(
    "array", [list, np.array, lambda y: np.array(y, dtype=object)], ids=["list", "array", "objects"]
)
def test_labels_keep_their_last_byte(last, array):
    """4.3: numpy cuts zeros off the end of a text."""
    labels = ["a", f"a{last}", "b"] * 4
    given = array(labels)
    learner = library.Naive(library.nn.mlp(1, [2]), epochs=1)
    learner.learn(np.arange(12.0)[:, None], given)
    kept = given if isinstance(given, list) else given.tolist()  # an array of numpy's texts has lost it before
    assert sorted(learner.classes(0)) == sorted(set(kept))
    assert set(map(str, learner.predict(np.arange(12.0)[:, None]))) <= set(kept)


def test_predictions_keep_the_last_byte():
    learner = library.Naive(library.nn.mlp(1, [4]), epochs=60, lr=0.1)
    x = np.repeat([[-1.0], [1.0]], 20, 0)
    learner.learn(x, ["a\0"] * 20 + ["b"] * 20)
    assert learner.predict(np.array([[-1.0], [1.0]])).tolist() == ["a\0", "b"]
    assert torch.is_tensor(learner.state.run.network.posterior.mean)
