"""The page in a real browser: it draws, switches, is reached by keyboard, fits a phone, and has a dark side.

It needs Chromium or Chrome: on the PATH, or named by EVCL_CHROMIUM.
"""

from __future__ import annotations

import re
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from made_up import result, with_bins, write
from made_up_streams import stream

from evcl._core.catalogue import METHOD_SUMMARIES
from evcl.report import by_benchmark, write_report
from evcl.report import page as page_of

EVIL = "<b>mine</b><script>alert(1)</script>"
RESULTS = [
    with_bins(result("evcl", "split-mnist", last=(0.85, 0.86, 0.87))),
    with_bins(result("vcl", "split-mnist", last=(0.84, 0.85, 0.86)), memory=200_000),
    *(result(m, "split-mnist", last=v) for m, v in (
        ("ewc", (0.83,)), ("naive", (0.5, 0.6, 0.4)),
        ("random-coreset", (0.3, 0.35, 0.4)), ("joint", (0.88, 0.89, 0.885)),
    )),
    *(result(m, "data", last=(0.7, 0.8), tasks=9) for m in ("evcl", "vcl", EVIL)),
]  # fmt: skip
READY = "html[data-ready]"
LABELS = ["EVCL", "VCL", "EWC", "random coreset only", "naive", "joint", EVIL]


@pytest.fixture(scope="module")
def page_url(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "index.html"
    path.write_text(page_of(by_benchmark(RESULTS), "A report"), "utf-8")
    return path.as_uri()


def ready(watched, page_url, *size, **options):
    """The page, opened; it consists of one file."""
    page = watched(page_url, *size, allowed=(page_url, "data:,"), **options)
    page.wait_for_selector(READY, state="attached", timeout=60_000)
    return page


@pytest.fixture
def open_page(watched, page_url):
    return partial(ready, watched, page_url)


@pytest.fixture(scope="module")
def page(watched_by_module, page_url):
    """The page, for tests that leave it as it is: it takes seconds to open."""
    return ready(watched_by_module, page_url)


def mentions(page, label):
    """How often the sections of the benchmarks show this word, in headings, keys, tables and matrices."""
    text = page.evaluate(
        "[...document.querySelectorAll('main :is(h3, .key, table, .runs)')]"
        ".filter((part) => part.checkVisibility()).map((part) => part.innerText).join(' ')"
    )
    return len(re.findall(rf"(?<!\w){label}(?!\w)", text))


def markers(page):
    """For each figure, how many parts of each method are shown."""
    return page.evaluate(
        """() => [...document.querySelectorAll('.plot')].map((plot) => {
            const counts = {};
            for (const part of plot.clientWidth ? plot.querySelectorAll('[data-series]:not([hidden])') : []) {
                counts[part.dataset.series] = (counts[part.dataset.series] || 0) + 1;
            }
            return counts;
        })"""
    )


def test_every_figure_is_drawn_with_data(page):
    assert page.title() == "A report"
    assert page.locator(".plot > svg").count() == 6
    curves, measures, reliability, *_ = markers(page)
    for plot in page.locator(".plot").all():
        assert plot.get_attribute("aria-label")
        paths = plot.locator("[data-series] path").evaluate_all(
            "all => all.map((p) => p.getAttribute('d')).filter(Boolean)"
        )
        assert len(paths) > 3
        assert all(path.startswith("M") and "nan" not in path for path in paths)
    # points of the seeds, a band, the published curve and a line, and all but the published one again where enlarged
    assert curves["0"] == curves["1"] == 7
    assert curves["2"] == 3  # one seed: no band and no points
    assert reliability == {"0": 2, "1": 2}  # a line and its points; the others have no bins
    assert measures["5"] < measures["0"]  # joint forgets nothing
    assert page.evaluate("document.querySelector('.plot').textContent.includes('tasks seen')")


def test_a_point_says_what_it_is(page):
    said = page.locator(".plot title").all_text_contents()
    assert "EVCL\nafter task 5: 86.00 ± 1.00" in said
    assert any(text.startswith("EVCL, published\nafter task 1: ") for text in said)
    assert "VCL\n85.00 ± 1.00\n0.2 MB" in said
    assert any("% sure" in text for text in said)


def test_a_name_is_shown_as_it_is_and_nothing_of_it_runs(page):
    assert page.locator(".switches label", has_text=EVIL).count() == 1
    assert page.locator("#benchmark-data-9-tasks .plot text", has_text=EVIL).count() == 1
    assert page.locator("main b").count() == 0


@pytest.mark.full
@pytest.mark.parametrize("label", ["VCL", "EVCL", "joint"])
def test_a_switch_takes_a_method_out_of_every_figure_and_table_and_back(open_page, label):
    page = open_page()
    series = str(LABELS.index(label))
    before, mentioned = markers(page), mentions(page, label)
    assert mentioned >= 7
    box = page.get_by_role("checkbox", name=label, exact=True)
    box.uncheck()
    assert mentions(page, label) == 0
    assert markers(page) == [{key: n for key, n in figure.items() if key != series} for figure in before]
    assert page.locator("#shown").inner_text() == "6 of 7 methods shown"
    box.check()
    assert markers(page) == before
    assert mentions(page, label) == mentioned


@pytest.mark.full
def test_published_curves_and_all_methods_can_be_switched(open_page):
    page = open_page()
    before = markers(page)
    page.get_by_role("checkbox", name="published curves").uncheck()
    after = markers(page)
    assert before[0]["0"] - after[0]["0"] == 1
    assert after[1:] == before[1:]
    page.get_by_role("button", name="none").click()
    assert markers(page) == [{}] * 6
    assert page.locator("main > section:visible").count() == 0  # no empty axes, no captions without figures
    assert page.locator(".nothing").is_visible()
    page.get_by_role("button", name="all").click()
    assert markers(page) == after


@pytest.mark.full
def test_the_keyboard_reaches_the_switches_and_shows_where_it_is(open_page):
    page = open_page()
    reached = []
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate(
                """() => {
                    const e = document.activeElement, style = getComputedStyle(e);
                    const outlined = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2;
                    return [e.dataset.switch ?? e.className ?? e.tagName, outlined];
                }"""
            )
        )
    assert reached[0][0] == "skip"
    names = [name for name, _ in reached]
    assert [name for name in names if name.isdigit()] == list("0123456")
    assert "published" in names
    assert "scroll" in names  # a table that may have to be scrolled
    assert all(outlined for _, outlined in reached)
    page.locator('[data-switch="1"]').focus()
    page.keyboard.press("Space")
    assert all("1" not in figure for figure in markers(page))
    page.keyboard.press("Space")
    assert "1" in markers(page)[0]


def test_a_phone_does_not_scroll_sideways_but_its_tables_and_figures_do(open_page):
    page = open_page(360, 740, has_touch=True, is_mobile=True, device_scale_factor=2)
    assert page.evaluate("[document.documentElement.scrollWidth, document.body.scrollWidth, innerWidth]") == [360] * 3
    tables = page.locator(".scroll").evaluate_all(
        "all => all.map((e) => [e.scrollWidth > e.clientWidth, e.clientWidth])"
    )
    assert any(wider for wider, _ in tables)
    assert all(width <= 360 for _, width in tables)
    figures = page.locator(".plot").evaluate_all("all => all.map((e) => [e.scrollWidth, e.clientWidth, e.tabIndex])")
    assert all(width <= 360 < whole and place == 0 for whole, width, place in figures)
    assert not page.get_by_role(
        "checkbox", name="VCL", exact=True
    ).is_visible()  # the switches are folded away, and unfold
    page.locator(".switches summary").click()
    page.get_by_role("checkbox", name="VCL", exact=True).uncheck()
    assert "1" not in markers(page)[0]
    page.set_viewport_size({"width": 1200, "height": 800})
    assert page.locator(".plot svg").first.evaluate("(e) => e.getBoundingClientRect().width > 600")
    assert page.get_by_role("checkbox", name="EWC", exact=True).is_visible()


@pytest.mark.full
def test_dark_follows_the_system_in_page_and_figures(open_page):
    page = open_page(color_scheme="light")

    def look():
        return page.evaluate(
            """() => ['body', '.plot text', '.plot .line > path', '.plot .line use', '.key .sign'].flatMap((one) => {
                const style = getComputedStyle(document.querySelector(one));
                return [style.backgroundColor, style.color, style.fill, style.stroke];
            })"""
        )

    light = look()
    assert light[0] == "rgb(255, 255, 255)"
    page.emulate_media(color_scheme="dark")
    dark = look()
    changed = {i for i, (a, b) in enumerate(zip(light, dark, strict=True)) if a != b}
    assert {0, 1, 6, 11, 14, 17} <= changed, (light, dark)  # the page, texts, lines, points, and the key's signs
    page.emulate_media(color_scheme="light")
    assert look() == light


def test_without_javascript_tables_and_figures_are_there(chromium, page_url):
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(page_url)
    assert "JavaScript" in page.locator(".note").first.inner_text()
    assert page.locator("tbody th", has_text="EVCL").first.is_visible()
    assert page.locator(".plot svg").first.is_visible()
    context.close()


@pytest.mark.full
@pytest.mark.parametrize("width", [1400, 390])
def test_streams_are_drawn_with_alarms_and_fit_their_window(chromium, tmp_path, width):
    folder = write(tmp_path, stream(changes=[525]), stream("naive", level=0.7, alarms=()), result("evcl"))
    wrong, page = [], chromium.new_page(viewport={"width": width, "height": 800})
    page.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(write_report(folder, "Streams")[-1].as_uri())
    page.wait_for_selector(READY, state="attached", timeout=60_000)
    drawn = page.locator("#benchmark-weather-1-050-rows .plot").first
    texts = drawn.locator("title").all_text_contents()
    assert texts.count("EKF: alarm\nrow 530\nrain, <i>wind</i>") == 1  # of both seeds
    assert sum("up to row" in text for text in texts) == 4 * 105  # two methods, two measures
    assert "up to row 1,050" in texts[-1]
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    if width > 1000:  # the switches are open
        page.click("[data-all=off]")
        assert not drawn.is_visible()
    page.close()
    assert wrong == []


def test_a_column_is_sorted_by_a_button_that_says_so(open_page):
    page = open_page()
    head = page.locator("#benchmark-split-mnist table.wide").first.locator("thead th", has_text="average accuracy")

    def methods():
        return page.locator("#benchmark-split-mnist table.wide").first.locator("tbody th").all_inner_texts()

    before = methods()
    assert head.get_attribute("aria-sort") == "none"
    head.get_by_role("button").focus()
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    assert methods() == ["joint", "EVCL", "VCL", "EWC", "naive", "random coreset only"]
    page.keyboard.press("Enter")
    assert methods() == ["joint", "EVCL", "VCL", "EWC", "naive", "random coreset only"][::-1]
    page.keyboard.press("Enter")
    assert methods() == before


def test_tables_are_downloaded_as_csv_and_latex(page):
    for kind, start in (("CSV", "method,seeds,average accuracy (%)"), ("LaTeX", r"\begin{tabular}")):
        with page.expect_download() as download:
            page.locator("#benchmark-split-mnist .files a", has_text=kind).first.click()
        text = Path(download.value.path()).read_text("utf-8")
        assert text.startswith(start)
        assert download.value.suggested_filename == f"split-mnist.{'csv' if kind == 'CSV' else 'tex'}"


def test_headings_tables_and_figures_say_what_they_are(page):
    levels = [int(tag[1]) for tag in page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map((h) => h.tagName)")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))
    assert page.evaluate("[...document.querySelectorAll('main table')].every((t) => t.caption?.textContent.trim())")
    assert page.evaluate("[...document.querySelectorAll('.plot, main img')].every((e) => e.ariaLabel || e.alt)")
    assert page.evaluate("[...document.querySelectorAll('.scroll')].every((e) => e.tabIndex === 0 && e.ariaLabel)")


def test_the_best_is_marked_and_the_worst_does_not_rule_the_axis(page):
    marked = (
        page.locator("#benchmark-split-mnist table.wide").first.locator("tbody tr:has(strong) th").all_inner_texts()
    )
    assert marked == ["EVCL"]
    texts = page.locator("#benchmark-split-mnist .plot").nth(1).locator("text").all_text_contents()
    assert "0.65 →" in texts  # NLL: 0.14, 0.15, 0.17, 0.5, 0.65 and, of joint, 0.12


@pytest.mark.full
def test_thirty_methods_on_six_benchmarks_open_at_once_and_stay_readable(chromium, tmp_path):
    methods = [*list(METHOD_SUMMARIES)[:29], "joint"]
    found = [
        with_bins(result(method, name, last=[0.97 - 0.02 * i - 0.001 * s for s in range(5)]), 100_000 + 5000 * i)
        for name in ("split-mnist", "split-fashion-mnist", "split-notmnist", "split-cifar10", "permuted-mnist", "mine")
        for i, method in enumerate(methods)
    ]
    path = tmp_path / "index.html"
    path.write_text(page_of(by_benchmark(found), "Thirty"), "utf-8")
    assert path.stat().st_size < 4_500_000
    opened = []
    for _ in range(3):
        page = chromium.new_page(viewport={"width": 1400, "height": 900})
        page.goto(path.as_uri(), wait_until="load")
        opened.append(page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd"))
        page.wait_for_selector(READY, state="attached", timeout=60_000)
        page.close()
    assert min(opened) < 2000
    page = chromium.new_page(viewport={"width": 390, "height": 844})
    page.goto(path.as_uri())
    page.wait_for_selector(READY, state="attached", timeout=60_000)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    plot = page.locator("#benchmark-split-mnist .plot").first
    colours = plot.evaluate(
        "(p) => new Set([...p.querySelectorAll('.line:not(.faint)')].map((line) => line.dataset.series)).size"
    )
    assert colours == 8  # the best few; the others are grey
    assert page.locator("#benchmark-split-mnist .others").first.is_visible()
    page.close()
