"""River: the classifier and the regressor in its pipelines, its evaluation and its checks."""

from __future__ import annotations

import datetime
import math
import random
from pathlib import Path

import numpy as np
import pytest
from others import needed

needed("river")
import pandas as pd  # noqa: E402
from river import compose, datasets, evaluate, metrics, preprocessing, stream  # noqa: E402

from evcl import Stream  # noqa: E402
from evcl.integrations.river import StreamClassifier, StreamRegressor  # noqa: E402
from evcl.tables.encoding import Encoder  # noqa: E402
from evcl.tables.source import kind_of, piece_of  # noqa: E402


def rows(count=300, seed=0, change=None):
    """Rain by heat and sky; the rule is reversed at the row `change`."""
    draws = random.Random(seed)
    for i in range(count):
        x = {"heat": draws.gauss(20, 5), "sky": draws.choice(["clear", "cloudy"])}
        wet = (x["heat"] < 20) ^ (x["sky"] == "cloudy" and draws.random() < 0.1)
        yield x, "wet" if wet ^ (change is not None and i >= change) else "dry"


def test_progressive_validation_with_a_pipeline():
    model = preprocessing.StandardScaler() | StreamClassifier()
    numbers = (({"heat": x["heat"]}, y == "wet") for x, y in rows(150))
    found = evaluate.progressive_val_score(numbers, model, metrics.Accuracy() + metrics.LogLoss())
    assert found[0].get() > 0.8
    assert found[1].get() < 0.6
    assert set(model.predict_proba_one({"heat": 12.0})) == {True, False}
    assert model.predict_one({"heat": 12.0}) is True


def test_texts_dates_and_missing_features_need_no_pipeline():
    model = StreamClassifier()
    assert model.predict_proba_one({"heat": 1.0}) == {}
    assert model.predict_one({"heat": 1.0}) is None
    for i, (x, y) in enumerate(rows(120)):
        x["day"] = datetime.datetime(2024, 1, 1) + datetime.timedelta(days=i)
        if i % 7 == 0:
            del x["heat"]
        if i > 60:
            x["new"] = float(i)
        p = model.predict_proba_one(x)
        assert not p or math.isclose(sum(p.values()), 1, abs_tol=1e-6)
        model.learn_one(x, y)
    assert model.predict_one({"heat": 8.0, "sky": "clear"}) == "wet"
    assert model.predict_one({"heat": 32.0, "sky": "clear"}) == "dry"


def test_a_row_is_learned_as_by_the_stream_itself():
    model, plain = StreamClassifier(seed=3), Stream(seed=3)
    encoder, labels = None, ["dry", "wet"]
    for x, y in rows(40):
        piece = piece_of([x])
        encoder = encoder or Encoder.for_rows({name: kind_of(values) for name, values in piece.columns.items()})
        plain.learn(encoder.encode(piece, Path("x")), [y])
        model.learn_one(x, y)
    x = {"heat": 18.0, "sky": "cloudy"}
    inputs = encoder.encode(piece_of([x]), Path("x"), learn=False)
    wanted = dict(zip(plain.classes, plain.predict_proba(inputs)[0].tolist(), strict=True))
    assert model.predict_proba_one(x) == pytest.approx(wanted)
    assert set(wanted) == set(labels)


def test_frames_are_learned_and_predicted():
    pairs = list(rows(192))
    frame, y = pd.DataFrame([x for x, _ in pairs]), pd.Series([y for _, y in pairs])
    frame.loc[5, "heat"] = math.nan
    model = StreamClassifier()
    assert model.predict_proba_many(frame[:4]).empty
    for start in range(0, 160, 32):
        model.learn_many(frame[start : start + 32], y[start : start + 32])
    p = model.predict_proba_many(frame[160:])
    assert p.index.equals(frame.index[160:])
    assert np.allclose(p.sum(1), 1)
    assert p.iloc[3].to_dict() == pytest.approx(model.predict_proba_one(frame.iloc[163].to_dict()))
    assert (model.predict_many(frame[160:]) == y[160:]).mean() > 0.8


def test_a_change_raises_an_alarm_that_names_features():
    model = StreamClassifier(false_alarms=1e-3)
    for start in range(0, 800, 16):
        batch = list(rows(800, change=400))[start : start + 16]
        model.learn_many(pd.DataFrame([x for x, _ in batch]), pd.Series([y for _, y in batch]))
    assert any(400 <= alarm.row < 500 for alarm in model.alarms)
    assert all(isinstance(name, str) for alarm in model.alarms for name in alarm.columns)


def test_numbers_in_a_pipeline_and_as_frames():
    draws = np.random.default_rng(0)
    x = draws.normal(size=(150, 2))
    y = 3 * x[:, 0] - x[:, 1] + 5 + draws.normal(0, 0.1, 150)
    model = compose.Select("a", "b") | StreamRegressor()
    assert model.predict_one({"a": 0.0, "b": 0.0}) == 0
    found = evaluate.progressive_val_score(stream.iter_array(x, y, feature_names=["a", "b"]), model, metrics.RMSE())
    assert found.get() < 1.8
    assert model.predict_one({"a": 1.0, "b": 0.0}) == pytest.approx(8, abs=1)
    assert 0.05 < model["StreamRegressor"].predict_std_one({"a": 1.0, "b": 0.0}) < 1.5
    frame = pd.DataFrame(x, columns=["a", "b"])
    many = StreamRegressor()
    for start in range(0, 128, 32):
        many.learn_many(frame[start : start + 32], pd.Series(y[start : start + 32]))
    assert many.predict_many(frame[128:]).to_numpy() == pytest.approx(y[128:], abs=2)


@pytest.mark.parametrize("model", [StreamClassifier(seed=4, false_alarms=0.01), StreamRegressor(method="mesu")])
def test_a_clone_has_the_same_settings_and_nothing_learned(model):
    x = {"a": 1.0}
    model.learn_one(x, 1)
    again = model.clone()
    assert (again.seed, again.false_alarms, again.method) == (model.seed, model.false_alarms, model.method)
    assert again.alarms == []
    assert again._encoder is None


@pytest.mark.full
def test_phishing_with_rivers_own_evaluation():
    """Beside logistic regression, which River's documents show on this set."""
    metric = metrics.Accuracy()
    evaluate.progressive_val_score(datasets.Phishing(), StreamClassifier(), metric)
    assert metric.get() > 0.87


@pytest.mark.parametrize(("make", "labels"), [(StreamClassifier, ["a", "b"]), (StreamRegressor, [1.0, 2.0])])
def test_rows_without_a_label_are_passed_over(make, labels):
    model, plain = make(), make()
    for i, label in enumerate([None, labels[0], math.nan, labels[1]]):
        model.learn_one({"x": float(i)}, label)
        if i % 2:
            plain.learn_one({"x": float(i)}, label)
    for one in (model, plain):
        one.learn_many(pd.DataFrame({"x": [1.0]}), pd.Series([labels[0]]))
    model.learn_many(pd.DataFrame({"x": [5.0, 6.0]}), pd.Series([None, math.nan]))
    assert model._stream.rows == 3
    assert model.predict_one({"x": 2.0}) == plain.predict_one({"x": 2.0})
