"""What the report says: numbers, names, groups, and the commands that make the results again."""

from __future__ import annotations

import csv
import re
import shlex
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from made_up import generative, result, write
from msgspec.structs import replace

import evcl
from evcl.cli import main
from evcl.experiments import Summary
from evcl.report import (
    by_benchmark,
    caption,
    find_results,
    full_table,
    main_table,
    page,
    paired_difference,
    paired_table,
    percent,
    rows,
    short_columns,
    tables_markdown,
    write_report,
)
from evcl.report.cells import best
from evcl.report.diagnostics import memory_figure, reliability, size_ticks
from evcl.report.figures import FIGURES, enlarged, limits, matrix, only_last
from evcl.report.published import published
from evcl.report.results import scenarios, series
from evcl.report.runs import command
from evcl.report.styles import PAGE_COLOURS, SPARE, STYLES
from evcl.report.tables import scenario_table


def group(*results):
    (found,) = by_benchmark(results).values()
    return found


def cells(table):
    return [dict(zip(table.columns, row, strict=True)) for _, row in table.rows]


# --- numbers -------------------------------------------------------------------------------------------------------


def test_the_tables_say_what_the_results_say():
    one = group(result(last=(0.80, 0.82, 0.84)))
    (row,) = cells(full_table(one))
    assert row == {
        "method": "EVCL",
        "seeds": "0-2",
        "average accuracy": "82.00 ± 2.00",
        "published": "98.5",
        "difference": "-16.5",
        "forgetting": "8.00 ± 2.00",  # from 0.9, each of the first four tasks
        "NLL": "0.180 ± 0.020",
        "ECE": "1.80 ± 0.20",
        "seconds": "1.2",
    }
    assert rows(one)[0][:2] == ("evcl", "82.0 ± 2.0")  # a terminal's: what is typed, and fewer digits
    assert percent(Summary(0.5, None, [0.5]), 1) == "50.0"
    assert percent(Summary(-0.00001, 0.1, []), 1) == "0.0 ± 10.0"
    assert percent(Summary(None, None, [None])) == "-"


@pytest.mark.parametrize(
    ("score", "label", "unit"),
    [
        ("log_likelihood", "log-likelihood (nats)", " nats"),
        pytest.param("average_return", "average return", "", marks=pytest.mark.full),
    ],
)
def test_a_benchmark_is_reported_by_its_own_score(tmp_path, score, label, unit):
    """No accuracy, calibration or per cent: the score, its unit and its own forgetting, in every table and figure."""
    ours, other = generative("evcl", (-90.0, -91.0), score=score), generative("naive", (-100.0, -103.0), score=score)
    one = group(ours, other)
    first, _second = cells(full_table(one))
    places = 2 if score == "log_likelihood" else 1
    assert list(first) == ["method", "seeds", label, "forgetting", "seconds"]
    assert first[label] == f"{-90.5:.{places}f} ± {0.5**0.5:.{places}f}"
    assert first["forgetting"] == f"{10.5:.{places}f} ± {0.5**0.5:.{places}f}"
    assert short_columns(one)[1] == label
    assert rows(one)[0][1] == "-90.5 ± 0.7"
    assert cells(paired_table(one))[0]["difference ± standard error"] == f"{11:+.{places}f} ± {1:.{places}f}"
    np.testing.assert_allclose(matrix(one.lines[0])[2], -90.5)
    np.testing.assert_allclose(one.lines[0].curve[0], [-80, -80, -90.5])
    assert one.score.text(-90.52) == f"-90.5{unit}"
    mixed = tables_markdown(by_benchmark([ours, result()]).values(), "both")
    assert "## Average score after the last task" in mixed
    assert f"characters, 3 tasks: {label}" in mixed
    written = write_report(write(tmp_path, ours, other))
    text = (tmp_path / "index.html").read_text()
    assert "accuracy" not in text.partition("<main")[2].partition("<script>")[0].lower()
    assert f">{label}</text>" in text
    # three figures in three formats; three tables (all benchmarks, this one, matrices) and the differences, twice each
    assert len(written) == 9 + 8 + 2


def test_a_curve_is_the_mean_over_seeds_of_the_average_over_tasks_seen():
    mean, spread = group(result(last=(0.80, 0.84), tasks=2)).lines[0].curve
    np.testing.assert_allclose(mean, [0.9, 0.82])
    np.testing.assert_allclose(spread, [0, np.std([0.80, 0.84], ddof=1)], atol=1e-12)


def test_joint_training_has_its_last_point_and_one_seed_has_no_spread():
    joint, alone = group(result("joint"), result("vcl", last=(0.7,))).lines[::-1]
    mean, _ = joint.curve
    assert np.isnan(mean[:-1]).all()
    assert mean[-1] == pytest.approx(0.82)
    assert np.isnan(alone.curve[1]).all()
    table = cells(full_table(group(result("joint"), result("vcl", last=(0.7,)))))
    assert [row["average accuracy"] for row in table] == ["70.00", "82.00 ± 2.00"]
    assert table[1]["forgetting"] == "-"


def test_paired_differences_are_over_common_seeds_as_worked_out_by_hand():
    evcl_, vcl = group(
        result(last=(0.90, 0.80, 0.70), seeds=(0, 1, 2)), result("vcl", last=(0.60, 0.78, 0.84), seeds=(2, 1, 0))
    ).lines
    common, mean, error = paired_difference(evcl_, vcl)
    # 0.06, 0.02, 0.10: mean 0.06, deviation 0.04, error 0.04 / sqrt(3)
    assert common == [0, 1, 2]
    assert mean == pytest.approx(0.06)
    assert error == pytest.approx(0.04 / 3**0.5)
    both = group(
        result(last=(0.9, 0.8)),
        result("vcl", last=(0.7, 0.6), seeds=(1, 5)),
        result("ewc", last=(0.7,), seeds=(9,)),
    )
    assert [tuple(row.values()) for row in cells(paired_table(both))] == [
        ("VCL", "+10.00", "1"),  # one common seed has no error
        ("EWC", "no common seed", "0"),
    ]
    assert paired_table(group(result("vcl"), result("ewc"))) is None
    assert paired_table(group(result())) is None


def test_the_best_values_are_those_within_one_standard_error_of_the_best():
    """By hand: EVCL minus VCL is 0.01, 0.02, 0.03 (0.02 ± 0.006); EVCL minus SI is -0.01, 0.02, 0.02 (0.01 ± 0.01)."""
    found = group(
        result(last=(0.80, 0.82, 0.84)),
        result("vcl", last=(0.79, 0.80, 0.81)),
        result("si", last=(0.81, 0.80, 0.82)),
        result("joint", last=(0.95, 0.95, 0.95)),  # a ceiling, which does not take part
        result("ewc", last=(0.815,), seeds=(7,)),  # one seed, and none in common: nothing is known of its error
    )
    lines = found.lines
    assert best(lines, lambda line: line.result.average_accuracy, 1) == {"EVCL", "SI"}
    assert best(lines, lambda line: line.result.nll, -1) == {"EVCL", "SI"}
    assert best(lines[:1], lambda line: line.result.nll, -1) == set()  # nothing to compare with
    single = group(result(last=(0.8,)), result("vcl", last=(0.5,)))
    assert best(single.lines, lambda line: line.result.average_accuracy, 1) == set()
    assert "**82.00 ± 2.00**" in full_table(found).markdown(mark=True)
    assert "**" not in full_table(found).markdown()


def test_a_table_as_csv_and_latex():
    found = full_table(
        group(result(last=(0.80, 0.82, 0.84)), result("joint"), result("=a_b%", last=(0.5,))), every=True
    )
    head, first, joint, last = csv.reader(found.csv().splitlines())
    row = dict(zip(head, first, strict=True))
    assert row["method"] == "EVCL"
    assert row["average accuracy (%)"] == "82"
    assert float(row["average accuracy (%), standard deviation"]) == pytest.approx(2)
    assert float(row["backward transfer (%)"]) == pytest.approx(-8)
    assert dict(zip(head, joint, strict=True))["forgetting (%)"] == ""
    assert last[0] == "'=a_b%"  # no formula of a spreadsheet
    text = found.latex()
    assert text.startswith("\\begin{tabular}{lr")
    assert r"EVCL & 0-2 & \textbf{82.00 $\pm$ 2.00}" in text
    assert r"$-$16.5" in text
    assert r"=a\_b\%" in text
    assert text.count(r" \\") == 4


def test_published_values_are_those_of_the_method_that_was_published():
    found = group(result(), result(coreset="random"), result("vcl-random-coreset", coreset="random"))
    shown = {row["method"]: row["published"] for row in cells(full_table(found))}
    assert shown == {"EVCL (no coreset)": "98.5", "EVCL (coreset=random)": "-", "VCL + random coreset": "96.7"}


def test_scenarios_are_not_mixed_but_compared():
    found = by_benchmark([result(), result(scenario="class", last=(0.3, 0.4)), result("vcl", scenario="class")])
    assert list(found) == ["split-mnist", "split-mnist, class scenario"]
    assert [g.has_published for g in found.values()] == [True, False]
    ((name, some),) = scenarios(found.values()).items()
    assert name == "split-mnist"
    assert cells(scenario_table(some)) == [
        {"method": "EVCL", "default scenario": "82.00 ± 2.00 (98.5)", "class scenario": "35.00 ± 7.07"},
        {"method": "VCL", "default scenario": "-", "class scenario": "82.00 ± 2.00"},
    ]
    assert scenarios(by_benchmark([result(), result("vcl", "split-digits")]).values()) == {}
    both = [result(scenario=kind, validation=held) for held in (0.0, 0.1) for kind in ("task", "class")]
    assert list(scenarios(by_benchmark(both).values())) == [
        "split-mnist, 5 tasks, 0% held out",
        "split-mnist, 5 tasks, 10% held out",
    ]


def test_reliability_is_averaged_by_the_number_of_predictions():
    one = result(last=(0.8, 0.9))
    bins = [[(0.0, 0.0, 0.0)] * 13 + [(a, 0.9, 0.7), (1 - a, 1.0, 1.0)] for a in (0.2, 0.6)]
    bins[1][13] = (0.6, 0.9, 0.9)
    found = reliability(group(replace(one, reliability=bins)).lines[0])
    np.testing.assert_allclose(found.share, [0.4, 0.6])
    np.testing.assert_allclose(found.accuracy, [(0.2 * 0.7 + 0.6 * 0.9) / 0.8, 1.0])
    assert reliability(group(one).lines[0]) is None


def test_the_figure_of_memory_has_plain_numbers_at_its_ticks():
    one = group(
        replace(result("evcl"), memory_bytes=51_000_000), replace(result("vcl"), memory_bytes=59_000_000)
    )  # between two round numbers
    axes = memory_figure(one).axes[0]
    axes.figure.draw_without_rendering()
    assert [text.get_text() for text in axes.get_xticklabels()] == ["51", "59"]
    assert not [text for text in axes.get_xticklabels(minor=True) if text.get_text()]
    assert size_ticks([0.03, 3.0]) == pytest.approx([0.05, 0.1, 0.2, 0.5, 1, 2])
    assert size_ticks([4.0, 4.0]) == [4.0]


def test_an_axis_is_not_ruled_by_the_worst():
    assert limits([0.1, 0.12, 0.2, 2.5]) == (None, pytest.approx(0.48))
    assert limits([0.1, 0.12, 0.2, -1.6]) == (pytest.approx(-0.33), None)  # forgetting may be negative
    assert limits([0.1, 0.2]) == limits([-3.0, 0.1]) == (None, None)
    assert limits([]) == (None, None)
    (panel, *_) = FIGURES["-measures"](
        group(*(result(m, last=(v, v + 0.01)) for m, v in (("evcl", 0.85), ("vcl", 0.84), ("naive", 0.1))))
    ).axes
    assert panel.get_xlim()[1] < 30  # forgetting: 4.5, 5.5 and 79.5 %
    assert "79.5 →" in [text.get_text() for text in panel.texts]


# --- names and groups ----------------------------------------------------------------------------------------------


def test_methods_come_in_the_papers_order_and_twins_are_told_apart():
    found = group(*(result(m) for m in ("mine", "joint", "ewc", "kcenter-coreset", "vcl-random-coreset", "evcl")))
    assert [line.label for line in found.lines] == [
        "EVCL", "VCL + random coreset", "EWC", "k-center coreset only", "joint", "mine",
    ]  # fmt: skip
    presets = group(result(preset="paper"), result())
    assert [line.label for line in presets.lines] == ["EVCL (tuned)", "EVCL (paper)"]
    assert [line.name for line in presets.lines] == ["evcl (tuned)", "evcl (paper)"]
    settings = group(result(strength=10.0, lr=0.1), result(strength=20.0, lr=0.1))
    assert [line.label for line in settings.lines] == ["EVCL (strength=10.0)", "EVCL (strength=20.0)"]
    memories = group(
        result(strength=10.0), result(strength=10.0, memory=12, memory_policy="balanced", replay_share=0.5)
    )
    assert [line.label for line in memories.lines] == ["EVCL (no memory)", "EVCL (memory=12)"]
    same = group(result(), result(last=(0.1, 0.2, 0.3)))
    assert [line.label for line in same.lines] == ["EVCL (1)", "EVCL (2)"]
    assert [line.label for line in group(result(), result("EVCL")).lines] == ["evcl", "EVCL"]


def test_only_what_can_be_compared_is_side_by_side():
    groups = by_benchmark(
        [result(), result("vcl", tasks=3, last=(0.5,)), result("ewc", validation=0.1), result("vcl", "of mine")]
    )
    assert list(groups) == ["split-mnist, 3 tasks", "split-mnist", "split-mnist, held-out data (0.1)", "of mine"]
    assert [g.has_published for g in groups.values()] == [False, True, False, False]
    assert "on held-out data" in caption(groups["split-mnist, held-out data (0.1)"])
    assert "on test data" in caption(groups["split-mnist"])
    table = cells(main_table(groups.values()))
    assert [row["method"] for row in table] == ["EVCL", "VCL", "EWC"]
    assert table[0]["split-mnist"] == "82.00 ± 2.00 (98.5)"
    assert table[0]["of mine"] == "-"


def test_the_caption_says_which_seeds():
    assert caption(group(result())).startswith("5 tasks; mean ± standard deviation over seeds 0-2, on test data; cpu")
    assert caption(group(result(last=(0.5,), seeds=(7,), tasks=1))).startswith("1 task; seed 7, on test data")
    assert "over differing seeds" in caption(group(result(), result("vcl", last=(0.5,))))


def test_a_method_has_one_style_in_all_figures():
    groups = by_benchmark([result("vcl"), result("mine"), result("vcl", "split-cifar10"), result("b", "split-cifar10")])
    styles = series(groups.values())
    assert styles["VCL"] is STYLES["vcl"]
    assert len(set(styles.values())) == len(styles) == 3
    for found in groups.values():
        assert all(line.style == styles[line.label] for line in found.lines)
    many = series(by_benchmark([result(f"m{i:02}") for i in range(12)]).values())
    assert len(set(many.values())) == 12


def _linear(color):
    part = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)


def _oklab(linear):
    """Ottosson, 2020."""
    lms = np.array([[0.41222147, 0.53633254, 0.05144599], [0.2119035, 0.68069955, 0.10739696],
                    [0.08830246, 0.28171884, 0.6299787]]) @ np.clip(linear, 0, 1)  # fmt: skip
    return np.array([[0.21045426, 0.79361779, -0.00407205], [1.9779985, -2.42859221, 0.45059371],
                     [0.02590404, 0.78277177, -0.80867577]]) @ np.cbrt(lms)  # fmt: skip


# Machado, Oliveira and Fernandes, 2009, severity 1.
SIGHT = {
    "normal": [1, 0, 0, 0, 1, 0, 0, 0, 1],
    "protan": [0.152286, 1.052583, -0.204868, 0.114503, 0.786281, 0.099216, -0.003882, -0.048116, 1.051998],
    "deutan": [0.367322, 0.860646, -0.227968, 0.280085, 0.672501, 0.047413, -0.01182, 0.04294, 0.968881],
    "tritan": [1.255528, -0.076749, -0.178779, -0.078411, 0.930809, 0.147602, 0.004733, 0.691367, 0.3039],
}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_colours_can_be_told_apart(theme):
    luminance = np.array([0.2126, 0.7152, 0.0722])
    for style in (*STYLES.values(), *SPARE):
        dark, light = sorted(luminance @ _linear(c) for c in (getattr(style, theme), PAGE_COLOURS[theme]))
        assert (light + 0.05) / (dark + 0.05) >= 3, style
    for sight, seen in SIGHT.items():
        places = [_oklab(np.reshape(seen, (3, 3)) @ _linear(getattr(style, theme))) for style in STYLES.values()]
        distances = [100 * np.linalg.norm(a - b) for i, a in enumerate(places) for b in places[:i]]
        assert min(distances) >= 8, sight


# --- what was published --------------------------------------------------------------------------------------------


def test_the_published_curves_are_the_papers():
    curves = published()
    assert len(curves) == 5 * 7
    assert all(len(curve) == 5 and all(0 < v <= 1 for v in curve) for curve in curves.values())
    assert curves["split-mnist", "evcl"][-1] == pytest.approx(0.984, abs=2e-3)  # the text of the paper says 98.4
    assert curves["permuted-mnist", "ewc"][-1] == pytest.approx(0.65, abs=2e-3)
    lines = files("evcl.report").joinpath("published.csv").read_text("utf-8").splitlines()
    assert "arXiv:2406.15972" in lines[0]
    assert len(list(csv.reader(lines[2:]))) == 175


def test_the_reason_for_the_difference_is_given_where_something_published_is_shown():
    said = "reading the code released with the paper"
    for results, expected in (([result()], True), ([result(benchmark="split-digits")], False)):
        groups = by_benchmark(results)
        assert (said in tables_markdown(groups.values(), "t")) is expected
        assert (said in page(groups, "t")) is expected


# --- figures -------------------------------------------------------------------------------------------------------


def test_a_panel_enlarges_what_cannot_be_told_apart():
    close = [result(m, "split-digits", last=(v, v)) for m, v in zip("abcd", (0.899, 0.898, 0.3, 0.2), strict=True)]
    low, high = enlarged(group(*close))
    assert 89 < low < 89.8
    assert 90 < high < 91
    assert (
        enlarged(group(*(result(m, "split-digits", last=(v, v)) for m, v in (("a", 0.8), ("b", 0.5), ("c", 0.2)))))
        is None
    )
    assert enlarged(group(*close[:2])) is None
    assert len(FIGURES[""](group(*close)).axes) == 2
    assert len(FIGURES[""](group(*close[:2])).axes) == 1


def test_the_figure_holds_every_curve_and_the_published_ones_dashed():
    figure = FIGURES[""](
        group(result(last=(0.80, 0.84)), result("vcl", last=(0.7,)), result("joint", last=(0.9, 0.92)))
    )
    drawn = [line for line in figure.axes[0].lines if line.get_linestyle() != "None"]
    lines = {(line.get_color(), line.is_dashed()): line for line in drawn}
    own = lines[STYLES["evcl"].light, False].get_ydata()
    np.testing.assert_allclose([own[0], own[-1]], [90, 82])
    for method in ("evcl", "vcl"):
        dashed = lines[STYLES[method].light, True].get_ydata()
        np.testing.assert_allclose(dashed, 100 * np.array(published()["split-mnist", method]))
    np.testing.assert_allclose(lines[STYLES["joint"].light, False].get_xdata(), [5])
    low, high = figure.axes[0].get_ylim()
    assert low < 70
    assert high > 99


def test_matrices_leave_out_what_was_not_measured():
    values = matrix(group(result(tasks=2, last=(0.5,))).lines[0])
    np.testing.assert_allclose(values, [[90, np.nan], [50, 50]])


def test_joint_has_one_row_which_the_page_and_the_figure_explain():
    one = group(result("evcl", tasks=3), result("joint", tasks=3))
    assert [only_last(line) for line in one.lines] == [False, True]
    text = page({"one": one}, "A title")
    drawn = re.findall(r"<figure data-series.+?</table></figure>", text, re.S)
    assert [figure.count('scope="row"') for figure in drawn] == [3, 1]
    assert "A method with one row was measured after the last task only." in text
    texts = [[text.get_text() for text in axes.texts] for axes in FIGURES["-matrices"](one).axes[:2]]
    assert ["measured after\nthe last task only" in found for found in texts] == [False, True]
    assert "A method with one row" not in page({"one": group(result("evcl", tasks=1))}, "A title")


# --- the command of a run ------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments",
    [
        "split-digits --method evcl --epochs 1 --seeds 2 --tasks 2 --set strength=7 --set init_std=0.0002",
        "permuted-digits --method ewc --epochs 1 --seed-list 3,1 --preset paper --validation 0.25",
        "split-digits --method joint --epochs 1 --seeds 1 --precision bf16 --tasks 2",
    ],
)
def test_the_command_makes_the_result_again(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(words):
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as stop:
            main()
        assert not stop.value.code
        return capsys.readouterr().out

    run(["evcl", "run", *arguments.split(), "--out", "r"])
    (found,) = find_results(Path("r"))
    said = shlex.split(command(found))
    assert "r already holds this run" in run([*said, "--out", "r"])
    assert said.count("--set") == arguments.count("--set")  # what the preset says is not said again


def test_the_command_of_a_method_that_is_not_registered_says_everything():
    said = command(result("no such method", stiffness=0.3))
    assert "--method 'no such method'" in said
    assert "--set stiffness=0.3" in said
    assert said.endswith("--plugin FILE.py")


# --- files ---------------------------------------------------------------------------------------------------------


def test_a_report_is_figures_tables_and_a_page_and_the_same_twice(tmp_path):
    write(tmp_path, result(), result("joint"), result("vcl", "split-digits", tasks=1, last=(0.5,)))
    written = write_report(tmp_path, "A title")
    assert [path.name for path in written[-2:]] == ["tables.md", "index.html"]
    assert [sum(path.suffix == kind for path in written) for kind in (".svg", ".csv", ".tex")] == [6, 6, 6]
    first = {path: path.read_bytes() for path in written}
    for path, data in first.items():
        start = {
            ".png": b"\x89PNG",
            ".pdf": b"%PDF",
            ".svg": b"<?xml",
            ".md": b"# A title",
            ".html": b"<!doctype",
            ".csv": b"EVCL minus" if path.stem.endswith("differences") else b"method",
            ".tex": rb"\begin{tabular}",
        }
        assert data.startswith(start[path.suffix]), path
    write_report(tmp_path, "A title")
    assert {path: path.read_bytes() for path in written} == first
    assert len(first[written[-1]]) < 2_500_000


def test_markdown_tables_have_as_many_cells_as_columns(tmp_path):
    text = tables_markdown(by_benchmark([result(), result("a|b*<c>"), result("vcl", "x|y")]).values(), "t")
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        counts = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(counts) == 1, table
    assert r"a\|b\*\<c\>" in text
    assert "| VCL |" in text


@pytest.mark.full
def test_names_are_only_names(tmp_path):
    evil = "<script>alert(1)</script>"
    names = [evil, "$x^{$", "_hidden", "%{x}", "語", '"onload="x', "../../up"]
    write(tmp_path / "in", *(result(name) for name in names), result(benchmark="../../" + evil, preset=evil))
    written = write_report(tmp_path / "in", evil)
    assert all((tmp_path / "in") in path.resolve().parents for path in written)
    text = written[-1].read_text("utf-8")
    assert "<script>alert" not in text
    assert "</script>alert" not in text
    assert re.search(r'<[a-z][^<>]*"onload="x', text) is None
    assert text.count("<script") == 1
    assert "&lt;script&gt;alert(1)" in text


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([], r"has no result\.json"),
        ([result(), result("a" * 201)], r"1/result\.json is not a result of evcl .*length <= 200 - at `\$\.method`"),
        ([replace(result(), accuracy=None)], r"0/result\.json has no accuracy"),
        (None, "there is no folder"),
    ],
)
def test_what_cannot_be_reported_is_refused_by_name(results, message, tmp_path):
    folder = tmp_path / "nowhere" if results is None else write(tmp_path, *results)
    with pytest.raises(evcl.EvclError, match=message):
        find_results(folder)


def test_the_report_loads_matplotlib_when_it_draws():
    code = "import sys, evcl.report; print('matplotlib' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_a_report_is_made_without_torch(tmp_path):
    write(tmp_path, result(), result("naive", epochs=3), result("of-mine", "unknown"))
    program = f"from evcl.cli.run import report\nreport(Path({str(tmp_path)!r}))\nassert 'torch' not in sys.modules"
    ran = subprocess.run(
        [sys.executable, "-c", f"import sys\nfrom pathlib import Path\n{program}"], capture_output=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert b"unknown" in ran.stdout
