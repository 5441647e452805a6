"""The estimator keeps scikit-learn's conventions, all of them, and learns task after task."""

from __future__ import annotations

import pickle
import warnings

import numpy as np
import pandas as pd
import polars as pl
import pytest
from calls import heard
from scipy.sparse import csr_matrix
from sklearn.base import clone
from sklearn.datasets import load_digits, load_iris
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_dataframe_column_names_consistency, check_estimator

import evcl
from evcl._core.settings import BAYESIAN, ELASTIC, TRAINING
from evcl.sklearn import STOCHASTIC, EVCLClassifier, EVCLRegressor
from evcl.sklearn.estimator import SETTINGS

X, Y = load_iris(return_X_y=True)
X = ((X - X.mean(0)) / X.std(0)).astype(np.float32)
NAMES = np.array(["setosa", "versicolor", "virginica"])[Y]


def small(**options):
    return EVCLClassifier(
        **{"hidden_layer_sizes": (16,), "epochs": 10, "lr": 0.01, "random_state": 0, "scale": False, **options}
    )


@pytest.mark.full
@pytest.mark.parametrize("epochs", [1, *(pytest.param(k, marks=pytest.mark.soak) for k in (5, 20)), None])
@pytest.mark.parametrize("kind", [EVCLClassifier, EVCLRegressor])
def test_the_checks_of_scikit_learn_pass_whatever_the_epochs(kind, epochs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = check_estimator(kind(epochs=epochs), on_skip=None, on_fail=None, expected_failed_checks=STOCHASTIC)
    assert [r["check_name"] for r in found if r["status"] == "failed"] == []
    assert {r["check_name"] for r in found if r["status"] == "xfail"} <= set(STOCHASTIC)


@pytest.mark.full
def test_no_check_of_scikit_learn_fails_and_none_is_skipped_that_its_own_network_does_not_skip():
    results = {}
    for estimator in (EVCLClassifier(epochs=2), MLPClassifier()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MLPClassifier's own, that it has not converged
            expected = STOCHASTIC if isinstance(estimator, EVCLClassifier) else None
            found = check_estimator(estimator, on_skip=None, on_fail=None, expected_failed_checks=expected)
        results[type(estimator)] = {kind: {r["check_name"] for r in found if r["status"] == kind} for kind in
                                    ("passed", "failed", "skipped", "xfail")}  # fmt: skip
    ours, theirs = results[EVCLClassifier], results[MLPClassifier]
    assert (ours["failed"], ours["xfail"]) == (set(), set(STOCHASTIC))
    assert ours["skipped"] <= theirs["skipped"]
    assert len(ours["passed"]) > 50
    check_dataframe_column_names_consistency("EVCLClassifier", EVCLClassifier())  # not among them, and needs pandas


@pytest.mark.filterwarnings("error")
def test_it_works_in_a_pipeline_and_a_grid_search():
    raw = load_iris().data
    pipeline = make_pipeline(StandardScaler(), small(epochs=100))
    assert cross_val_score(pipeline, raw, NAMES, cv=3).min() > 0.85
    grid = {"evclclassifier__strength": [1.0, 100.0], "evclclassifier__hidden_layer_sizes": [(4,), (8, 8)]}
    search = GridSearchCV(pipeline, grid, cv=2).fit(raw, NAMES)
    assert set(search.best_params_) == set(grid)
    assert search.best_estimator_.predict(raw[:1])[0] in NAMES


@pytest.mark.parametrize("library", [pd, pl])
def test_frames_are_taken_and_their_column_names_are_held_against_later_ones(library):
    columns = ["a", "b", "c", "d"]
    frame = library.DataFrame(dict(zip(columns, X.T, strict=True)))
    model = small().fit(frame, library.Series(NAMES.tolist()))
    assert model.feature_names_in_.tolist() == columns
    assert (model.predict(frame) == small().fit(X, NAMES).predict(X)).all()
    with pytest.raises(ValueError, match="feature names should match"):
        model.predict(frame[["b", "a", "c", "d"]])
    with pytest.raises(ValueError, match="feature names should match"):
        model.partial_fit(frame[["b", "a", "c", "d"]], NAMES)


def test_a_copy_and_a_pickle_are_the_same_and_go_on_learning_the_same():
    model = small().partial_fit(X[Y < 2], NAMES[Y < 2])
    other = pickle.loads(pickle.dumps(model))  # noqa: S301
    assert b"torch.nn" not in pickle.dumps(model)  # no network inside: tensors and words
    for one in (model, other):
        one.partial_fit(X, NAMES)
    assert (model.predict_proba(X) == other.predict_proba(X)).all()
    fresh = clone(model)
    assert fresh.get_params() == model.get_params()
    with pytest.raises(NotFittedError):
        fresh.predict(X)


@pytest.mark.filterwarnings("ignore::evcl.ForgettingWarning")
@pytest.mark.parametrize("pickled", [False, True])
def test_calls_with_one_task_name_are_one_task(pickled):
    """Exactly: the same numbers as in one call, whether it is the first task or a later one."""
    first, second = slice(None, 90), slice(90, None)
    whole, pieces = small(), small()
    for name, x in (("january", X), ("february", X + 1)):
        whole.partial_fit(x, NAMES, task=name)
        for part in (first, second):
            pieces.partial_fit(x[part], NAMES[part], task=name)
            if pickled:
                pieces = pickle.loads(pickle.dumps(pieces))  # noqa: S301
    assert whole.tasks_ == pieces.tasks_ == ("january", "february")
    assert (whole.predict_proba(X) == pieces.predict_proba(X)).all()
    with pytest.raises(evcl.EvclError, match="'january' is already learned"):
        pieces.partial_fit(X, NAMES, task="january")
    pieces.partial_fit(X, NAMES)
    assert pieces.tasks_ == ("january", "february", "2")
    pieces.partial_fit(np.tile(X, (50, 1)), np.tile(NAMES, 50), task="march")
    size = len(pickle.dumps(pieces))
    pieces.partial_fit(X, NAMES, task="april")
    assert len(pickle.dumps(pieces)) < size - 45 * X.nbytes  # the rows of the last named task are let go


def test_new_classes_come_with_a_later_task_and_columns_stay_sorted():
    model = small(epochs=60).partial_fit(X[Y > 0], NAMES[Y > 0])
    assert model.classes_.tolist() == ["versicolor", "virginica"]
    model.partial_fit(X, NAMES)
    assert model.classes_.tolist() == ["setosa", "versicolor", "virginica"]
    assert model.labels_.tolist() == ["versicolor", "virginica", "setosa"]
    p = model.predict_proba(X)
    assert (model.classes_[p.argmax(1)] == NAMES).mean() > 0.9
    model.partial_fit(X[:4], np.array(["a very long name", "setosa"] * 2))
    assert model.classes_.tolist()[0] == "a very long name"


def test_classes_names_what_is_still_to_come():
    with pytest.raises(ValueError, match="only 1 class, setosa"):
        small().partial_fit(X[Y == 0], NAMES[Y == 0])
    model = small().partial_fit(X[Y == 0], NAMES[Y == 0], classes=np.unique(NAMES))
    assert model.predict_proba(X).shape == (150, 3)
    with pytest.raises(ValueError, match="all numbers or all text"):
        model.partial_fit(X, Y)
    assert model.tasks_ == ("0",)


def test_what_was_learned_first_is_kept_where_naive_training_loses_it():
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(64)
    kept = {}
    for method in ("evcl", "naive"):
        model = EVCLClassifier((100,), method=method, epochs=30, random_state=0, scale=False)
        for task in (x, x[:, order], x[:, order[order]]):
            model.partial_fit(task[:1000], y[:1000])
        kept[method] = model.score(x[1000:], y[1000:])
    assert kept["evcl"] > kept["naive"] + 0.15
    assert kept["evcl"] > 0.8


def test_a_task_without_old_classes_is_told_by_their_names_and_with_what_the_estimator_has():
    model = small(method="naive").partial_fit(X, NAMES, task="0")
    some = NAMES != "setosa"
    with pytest.warns(evcl.ForgettingWarning, match=r"no rows of 'setosa', .*: set_params\(memory=200\) would keep"):
        model.partial_fit(X[some], NAMES[some], task="1")
    with pytest.raises(evcl.ForgettingWarning):  # in the tests, warnings are errors
        model.partial_fit(X[some], NAMES[some], task="2")
    assert model.tasks_ == ("0", "1")  # as after any error


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("method", ["naive", "evcl"])
def test_memory_is_the_learners(method):
    """From the start, or from the task on before which it was set; examples of all classes are kept."""
    some = NAMES != "setosa"
    begun, later = small(method=method, memory=30), small(method=method)
    for model in (begun, later):
        model.partial_fit(X, NAMES, task="0")
    assert (begun.learner_.kept, later.learner_.kept) == (30, 0)
    for model in (begun, later.set_params(memory=12)):
        model.partial_fit(X, NAMES, task="1")
        model.partial_fit(X[some], NAMES[some], task="2")
    assert (begun.learner_.kept, later.learner_.kept) == (30, 12)
    alone = evcl.Learner(evcl.nn.mlp(4, [16]), method, seed=begun.learner_.seed, epochs=10, lr=0.01, memory=30)
    for k, rows in enumerate((slice(None), slice(None), some)):
        y = [begun.labels_.tolist().index(name) for name in NAMES[rows]]
        alone.learn((X[rows], y), head=0 if k else "new")
    assert np.array_equal(alone.predict_proba(X), begun.learner_.predict_proba(X))
    assert (begun.predict(X[~some]) == "setosa").mean() > 0.9
    model = pickle.loads(pickle.dumps(later))  # noqa: S301
    assert model.partial_fit(X, NAMES).learner_.kept == 12
    assert small(method="er", memory=None).fit(X, NAMES).learner_.settings.memory == 200


def test_fit_starts_over():
    model = small().fit(X + 5, NAMES[::-1])
    assert (model.fit(X, NAMES).predict_proba(X) == small().fit(X, NAMES).predict_proba(X)).all()
    assert model.tasks_ == ("0",)


def test_uncertainty_is_the_learners():
    model = small().fit(X, NAMES)
    found, inside = model.uncertainty(X), model.learner_.predictions(X)
    assert (found.entropy == inside.entropy).all()
    assert found.entropy == pytest.approx(found.aleatoric + found.epistemic, abs=1e-6)
    assert small(method="naive").fit(X, NAMES).uncertainty(X).epistemic == pytest.approx(np.zeros(150), abs=1e-6)


def test_settings_reach_the_method_and_wrong_ones_are_refused():
    model = small(strength=7, settings={"coreset": "random", "coreset_size": 5}).fit(X, NAMES)
    assert (model.learner_.settings.strength, model.learner_.settings.coreset_size) == (7.0, 5)
    with pytest.raises(ValueError, match="unknown setting of naive 'strength'"):
        small(method="naive", strength=7).fit(X, NAMES)
    with pytest.raises(ValueError, match="unknown method 'evlc'"):
        small(method="evlc").fit(X, NAMES)
    with pytest.raises(ValueError, match="joint trains on all tasks at once, but EVCLClassifier learns one at a time"):
        small(method="joint").fit(X, NAMES)
    assert set(SETTINGS) <= {*TRAINING, *BAYESIAN, *ELASTIC, "memory"}


def test_random_state_decides():
    a, b, c = (small(random_state=s).fit(X, Y).predict_proba(X) for s in (1, 1, 2))
    assert (a == b).all()
    assert (a != c).any()


def test_early_stopping_and_class_weights_are_the_learners():
    model = small(epochs=300, lr=0.05, early_stopping=True, validation_fraction=0.3, n_iter_no_change=4).fit(X, NAMES)
    nll = [epoch.validation_nll for epoch in model.learner_.history["0"]]
    assert len(nll) == np.argmin(nll) + 5 < 300
    plain, weighted = (
        small(epochs=40, class_weight=weight).fit(X, NAMES) for weight in (None, {"versicolor": 30.0, "setosa": 1})
    )
    found = [(model.predict(X) == "versicolor").sum() for model in (plain, weighted)]
    assert found[1] > found[0] + 5
    weighted.partial_fit(X, NAMES)
    assert clone(weighted).get_params()["class_weight"] == {"versicolor": 30.0, "setosa": 1}
    with pytest.raises(evcl.EvclError, match="class_weight: 'rose' is not among the classes"):
        small(class_weight={"rose": 2}).fit(X, NAMES)
    balanced = small(class_weight="balanced").fit(X, NAMES)
    assert np.array_equal(balanced.predict_proba(X), small().fit(X, NAMES).predict_proba(X))  # they are, already


def test_mini_batches_of_a_stream_are_learned_together():
    """Batches of 10 rows end where all rows at once do, and at most 1,000 rows are kept."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], y[order]
    model = EVCLClassifier((50,), epochs=5, random_state=0)
    sizes = []
    for k in range(0, 1200, 10):
        model.partial_fit(x[k : k + 10], y[k : k + 10], classes=range(10))
        sizes.append(len(pickle.dumps(model)))
    assert sizes[98] - sizes[99] > x[:800].astype(np.float32).nbytes  # when there are 1,000 rows, they are let go
    assert model.tasks_ == ("0", "1")
    assert model.score(x[1200:], y[1200:]) > 0.93
    whole, some = EVCLClassifier((50,), epochs=5, random_state=0), EVCLClassifier((50,), epochs=5, random_state=0)
    whole.partial_fit(x[:200], y[:200])
    for part in (slice(0, 90), slice(90, 200)):
        some.partial_fit(x[part], y[part], classes=range(10))
    pickled = pickle.loads(pickle.dumps(some))  # noqa: S301
    assert (some.predict_proba(x) == pickled.predict_proba(x)).all()
    assert np.abs(whole.predict_proba(x) - some.predict_proba(x)).max() < 1e-6


def test_inputs_are_scaled_by_the_first_task_they_vary_in():
    raw = 1000 * load_iris().data.astype(np.float32) + 1e5
    raw[:, 1] = 3.0
    later = raw + np.arange(150)[:, None] * np.array([0, 1, 0, 0], np.float32)
    own = np.where([True, False, True, True], (raw - raw.mean(0, np.float64)) / raw.std(0, dtype=np.float64).clip(1), 0)
    new = own + np.array([0, 1, 0, 0]) * ((later - later.mean(0)) / later.std(0).clip(1))
    model, by_hand = (small(scale=scale, epochs=60, lr=0.02) for scale in (True, False))
    for task, x, scaled in (("a", raw, own), ("b", later, new)):
        model.partial_fit(x, NAMES, task=task)
        by_hand.partial_fit(scaled, NAMES, task=task)
        assert model.score(x, NAMES) > 0.9
        assert model.predict_proba(x) == pytest.approx(by_hand.predict_proba(scaled), abs=1e-3)


def test_sparse_input_weights_and_what_scikit_learns_networks_tell(capsys):
    sparse = csr_matrix(np.where(np.abs(X) > 0.5, X, 0))
    model = small(verbose=True).fit(sparse, NAMES)
    assert "Iteration 10, loss = " in capsys.readouterr().out
    assert (model.predict(sparse) == model.predict(sparse.toarray())).all()
    assert (model.n_iter_, len(model.loss_curve_)) == (10, 10)
    assert np.exp(model.predict_log_proba(X)) == pytest.approx(model.predict_proba(X))
    linear = small(hidden_layer_sizes=(), epochs=60, lr=0.05).fit(X, NAMES)
    assert linear.score(X, NAMES) > 0.9
    heavy = small(epochs=60).fit(X, NAMES, sample_weight=np.where(NAMES == "versicolor", 50.0, 1.0))
    assert (heavy.predict(X) == "versicolor").sum() > 60
    without = small().fit(X, NAMES, sample_weight=NAMES != "setosa")
    assert without.classes_.tolist() == ["versicolor", "virginica"]
    with pytest.raises(ValueError, match="Negative"):
        small().fit(X, NAMES, sample_weight=-np.ones(150))


def test_the_regressor_has_noise_and_intervals():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 3))
    y = 1e4 + 100 * x[:, 0] + 50 * rng.normal(size=400)
    model = EVCLRegressor((20,), epochs=20, random_state=0).fit(x[:300], y[:300])
    mean, std = model.predict(x[300:], return_std=True)
    assert 40 < std.mean() < 70
    assert (model.predict(x[300:]) == mean).all()
    ends = model.predict_interval(x[300:], 0.9)
    assert ends.shape == (100, 2)
    assert 0.8 < ((ends[:, 0] < y[300:]) & (y[300:] < ends[:, 1])).mean() < 0.98
    assert model.score(x[300:], y[300:]) > 0.6
    found = model.uncertainty(x[300:])
    assert found.std == pytest.approx(np.sqrt(found.aleatoric**2 + found.epistemic**2))
    model.partial_fit(x[:50], y[:50], task="more")
    again = pickle.loads(pickle.dumps(model))  # noqa: S301
    assert (again.predict(x) == model.predict(x)).all()
    assert clone(model).get_params() == model.get_params()
    both = EVCLRegressor((20,), epochs=5, random_state=0).fit(x, np.stack([y, -y], 1))
    assert both.predict(x).shape == (400, 2)
    assert both.predict_interval(x).shape == (400, 2, 2)


def test_an_error_leaves_the_estimator_as_it_was():
    model = small().fit(X, NAMES)
    before = model.predict_proba(X)
    with pytest.raises(evcl.EvclError, match="unknown method 'nope'"):
        model.set_params(method="nope").fit(X[:, :3], Y + 5)
    assert model.classes_.tolist() == ["setosa", "versicolor", "virginica"]
    assert model.n_features_in_ == 4
    assert (model.predict_proba(X) == before).all()
    numbers = EVCLRegressor((4,), epochs=1, random_state=0).fit(X, X[:, 0])
    mean = numbers.predict(X)
    with pytest.raises(evcl.EvclError, match="unknown method 'nope'"):
        numbers.set_params(method="nope").fit(X[:, :3], X[:, 0])
    assert (numbers.predict(X) == mean).all()


def test_what_can_change_between_tasks_does_and_all_else_is_refused():
    model = small(settings={"fisher": "sampled"}).fit(X, NAMES)
    first = model.learner_.settings
    model.set_params(epochs=2, strength=5.0, batch_size=50, predict_samples=7).partial_fit(X, NAMES, task="1")
    now = model.learner_.settings
    assert (now.epochs, now.strength, now.batch_size, now.predict_samples, model.n_iter_) == (2, 5.0, 50, 7, 2)
    changed = {"epochs", "strength", "batch_size", "predict_samples"}
    assert {name for name in first if first[name] != now[name]} == changed
    before = model.predict_proba(X)
    for change, message in (
        ({"init_std": 0.1}, "init_std cannot change between two tasks: set it back to 'auto', or start over with fit"),
        ({"method": "vcl"}, "method cannot change between two tasks: set it back to 'evcl'"),
        ({"hidden_layer_sizes": 8}, r"hidden_layer_sizes cannot change between two tasks: set it back to \[16\]"),
        ({"scale": True}, "scale cannot change between two tasks: set it back to False"),
        ({"settings": {"fisher": "exact"}}, "fisher cannot change between two tasks: set it back to 'sampled'"),
        ({"epochs": 0}, "epochs must be a whole number"),
    ):
        params = model.get_params()
        with pytest.raises(evcl.EvclError, match=message):
            model.set_params(**change).partial_fit(X, NAMES, task="2")
        assert (model.predict_proba(X) == before).all()
        model.set_params(**params)
    assert model.tasks_ == ("0", "1")


@pytest.mark.filterwarnings("ignore::evcl.ForgettingWarning")
def test_a_task_without_a_name_takes_the_next_free_number():
    model = small(epochs=1).partial_fit(X, NAMES, task="1")
    model.partial_fit(X, NAMES)
    assert model.tasks_ == ("1", "2")
    with pytest.raises(evcl.EvclError, match="'1' is already learned, and other rows have come since: choose another"):
        model.partial_fit(X, NAMES, task="1")


def test_the_number_of_targets_stays():
    y = X[:, 0]
    model = EVCLRegressor((4,), epochs=1, random_state=0).partial_fit(X, y).partial_fit(X, y[:, None])
    assert model.predict(X).shape == (150,)
    for task in (None, "more"):
        with pytest.raises(evcl.EvclError, match="y must have 1 number per row, as in earlier calls, not 2"):
            model.partial_fit(X, X[:, :2], task=task)
    with pytest.raises(evcl.EvclError, match="y must have 2 numbers per row, as in earlier calls, not 1"):
        EVCLRegressor((4,), epochs=1).fit(X, X[:, :2]).partial_fit(X, y)


@pytest.mark.parametrize("name", [None, pytest.param("a", marks=pytest.mark.full)])
def test_the_spread_of_numbers_is_measured_when_it_is_wanted(name):
    """It takes five more trainings, but is that of one call with all rows, and leaves the means as they were."""
    measured = []
    with heard("Learning._trials", lambda given: measured.append(given["task"].name)):
        check_when_the_spread_is_measured(name, measured)


def check_when_the_spread_is_measured(name, measured):
    x = X[::3]
    y = x[:, 0] + x[:, 1]
    whole = EVCLRegressor((4,), epochs=2, random_state=0).fit(x, y)
    assert measured == ["0"]
    for state in (0, np.random.RandomState(0)):
        measured.clear()
        model = EVCLRegressor((4,), epochs=2, random_state=state)
        for part in (slice(0, 20), slice(20, 50)):
            mean = model.partial_fit(x[part], y[part], task=name).predict(x)
        pickled = pickle.loads(pickle.dumps(model))  # noqa: S301
        assert (model.tasks_, model.n_iter_, measured) == ((name or "0",), 2, [])
        ends = model.predict_interval(x)
        assert (model.predict(x) == mean).all()
        assert (pickled.predict_interval(x) == ends).all()
        assert len(measured) == 2
        assert isinstance(state, np.random.RandomState) or (ends == whole.predict_interval(x)).all()
        model.partial_fit(x, y, task="b").predict_interval(x)
        assert len(measured) == 2  # rows of a later task are predicted before they are learned
