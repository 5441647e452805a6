from __future__ import annotations

import json

import pytest

import evcl
from evcl.report import by_benchmark, find_results, page, percent, rows


def result(method="evcl", preset="tuned", benchmark="permuted-digits", accuracy=(0.5, 0.75), **more):
    matrix = [[0.9, None], list(accuracy)]
    mean = sum(accuracy) / 2
    summary = {"mean": mean, "std": 0.01, "per_seed": [mean, mean]}
    return {
        "schema": 1,
        "benchmark": benchmark,
        "method": method,
        "preset": preset,
        "config": {"tasks": 2, "validation": 0.0},
        "seeds": [0, 1],
        "accuracy": [matrix, matrix],
        "average_accuracy": summary,
        "forgetting": summary,
        "nll": {"mean": 0.5, "std": 0.1, "per_seed": [0.4, 0.6]},
        "ece": {"mean": None, "std": None, "per_seed": [None, None]},
        "seconds": 1.234,
        "environment": {"device": "cpu", "platform": "somewhere"},
        **more,
    }


def test_a_table_row_says_what_the_result_says():
    assert rows([result()]) == [("evcl", "62.5 ± 1.0", "62.5 ± 1.0", "0.50", "-", "1.2")]
    assert percent({"mean": 0.5, "std": None}) == "50.0"


def test_methods_come_in_the_order_of_the_list_and_twins_are_told_apart():
    group = by_benchmark([result("naive"), result("mine"), result("evcl", "paper"), result("evcl")])["permuted-digits"]
    assert [row[0] for row in rows(group)] == ["evcl (paper)", "evcl (tuned)", "naive", "mine"]
    twins = [result(seconds=1.0), result(seconds=2.0)]
    assert [row[0] for row in rows(twins)] == ["evcl (1)", "evcl (2)"]


def test_names_are_escaped_on_the_page():
    text = page(by_benchmark([result("<b>x</b>", benchmark="a&b")]), "<title>")
    assert "<b>x</b>" not in text
    assert "a&amp;b" in text
    assert "<title>&lt;title&gt;</title>" in text


def test_a_folder_without_results_is_refused(tmp_path):
    with pytest.raises(evcl.EvclError, match=r"holds no result\.json"):
        find_results(tmp_path)
    (tmp_path / "result.json").write_text(json.dumps({"schema": 7}))
    with pytest.raises(evcl.EvclError, match="is not a result of evcl"):
        find_results(tmp_path)
