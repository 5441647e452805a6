"""The report on streams: curves over rows, alarms, and tables of their measures, beside results with tasks."""

from __future__ import annotations

import numpy as np
import pytest
from made_up import result, write
from made_up_streams import stream

from evcl.report import by_benchmark, write_report
from evcl.report.streams import curve, overview, short_table, stream_figure, stream_table


@pytest.fixture
def group():
    (found,) = by_benchmark([stream(changes=[525]), stream("naive", level=0.7, alarms=())]).values()
    return found


def test_the_table_says_what_the_results_say(group):
    assert group.name == "weather, 1,050 rows"
    found = stream_table(group)
    assert found.columns[:4] == ("method", "seeds", "accuracy (%)", "log-loss (nats)")
    first = dict(zip(found.columns, found.rows[1][1], strict=True))
    summary = group.lines[1].result.prequential.measures["accuracy"]
    assert first["method"] == "EKF"
    assert first["accuracy (%)"] == f"{100 * summary.mean:.2f} ± {100 * summary.std:.2f}"
    assert first["alarms"] == "1.0"
    assert first["seconds"] == "1.2"
    assert first["rows/s"] == f"{1050 / 1.234:,.0f}"


def test_the_table_for_a_terminal_is_short(group):
    found = short_table(group)
    assert found.columns == ("method", "accuracy %", "log-loss", "Brier", "ECE %", "kappa", "alarms", "rows/s")
    assert found.rows[1][1][:2] == ("ekf", "79.6 ± 0.0")
    assert found.rows[1][1][-2:] == ("1.0", "851")


def test_a_curve_has_the_last_row_of_each_window_and_the_spread_over_seeds(group):
    ends, mean, spread = curve(group.lines[1], "accuracy")
    assert ends[:3].tolist() == [10, 20, 30]
    assert ends[-1] == 1050
    each = 100 * np.array(group.lines[1].result.prequential.curves["accuracy"])
    assert mean == pytest.approx(each.mean(0))
    assert spread == pytest.approx(each.std(0, ddof=1))


def test_a_last_window_of_few_rows_is_not_drawn():
    for rows, last in ((1053, 1050), (1056, 1056)):
        (found,) = by_benchmark([stream(rows=rows)]).values()
        assert curve(found.lines[0], "accuracy")[0][-1] == last


def test_the_figure_marks_alarms_and_known_changes(group):
    figure = stream_figure(group)
    top, below = figure.axes
    assert top.get_ylabel() == "accuracy (%)"
    assert below.get_ylabel() == "log-loss (nats)"
    (ticks,) = [one for one in top.collections if hasattr(one, "get_segments") and len(one.get_segments())]
    assert ticks.get_segments()[0][0][0] == 530
    dashed = [line for line in top.lines if line.get_xdata()[0] == 525]
    assert len(dashed) == 1
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {"EKF", "naive", "alarm", "known change"}


def test_streams_of_numbers_are_shown_by_their_error():
    (found,) = by_benchmark([stream(numbers=True)]).values()
    assert stream_table(found).columns[2:5] == ("RMSE", "log-loss (nats)", "coverage (%)")
    assert [axes.get_ylabel() for axes in stream_figure(found).axes] == ["RMSE", "log-loss (nats)"]


def test_streams_of_other_lengths_are_other_groups():
    assert list(by_benchmark([stream(), stream(rows=500, alarms=())])) == ["weather, 500 rows", "weather, 1,050 rows"]


def test_an_overview_has_a_column_per_stream():
    groups = list(by_benchmark([stream(), stream("naive"), stream(benchmark="census", alarms=())]).values())
    found = overview(groups, "accuracy")
    assert set(found.columns) == {"method", "weather, 1,050 rows", "census, 1,050 rows"}
    naive = next(cells for labels, cells in found.rows if labels == ("naive",))
    assert "-" in naive


def test_a_report_has_streams_and_tasks_side_by_side(tmp_path, monkeypatch):
    monkeypatch.setattr("evcl.report.written.FIGURE_FORMATS", ("svg",))
    folder = write(tmp_path, stream(changes=[525]), stream("naive"), stream(benchmark="census"), result("evcl"))
    written = {path.name: path for path in write_report(folder)}
    assert {"weather-1-050-rows.svg", "split-mnist.svg", "split-mnist-matrices.svg"} <= set(written)
    assert "weather-1-050-rows-matrices.svg" not in written
    tables = written["tables.md"].read_text()
    assert "## split-mnist" in tables
    assert "## weather, 1,050 rows" in tables
    assert "evcl run weather" in tables
    page = written["index.html"].read_text()
    for text in (
        "Average accuracy after the last task",
        "each row is predicted before it is learned",
        "Ticks: alarms",
    ):
        assert text in page
    assert page.count('aria-label="Measures over the rows of') == 2


def test_a_report_of_streams_alone_speaks_of_no_tasks(tmp_path, monkeypatch):
    monkeypatch.setattr("evcl.report.written.FIGURE_FORMATS", ("svg",))
    written = {path.name: path for path in write_report(write(tmp_path, stream()))}
    for name in ("tables.md", "index.html"):
        text = written[name].read_text()
        assert "tasks seen so far" not in text
        assert "predicted before it is learned" in text
