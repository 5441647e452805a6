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
    """How often the sections of the benchmarks show this word, in headings, keys, tables, matrices and figures."""
    markers(page)  # draws what has changed
    text = page.evaluate(
        "[...document.querySelectorAll('#overview, [id^=benchmark-]')].map((s) => s.innerText).join(' ')"
    )
    return len(re.findall(rf"(?<!\w){label}(?!\w)", text))


def wait_for(page, condition):
    """Until a JavaScript condition holds. (Playwright's own wait is refused by the page's policy.)"""
    for _ in range(200):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"never: {condition}")


def markers(page):
    """For each figure, how many traces of each series it has drawn as SVG; those that are hidden have none."""
    return page.evaluate(
        """() => (dispatchEvent(new Event('beforeprint')), [...document.querySelectorAll('.plot')]).map((plot) => {
            if (!plot.clientWidth) return {};
            const drawn = plot.querySelectorAll('.scatterlayer .trace').length;
            if (drawn !== plot.data.length) throw new Error(`${drawn} of ${plot.data.length} traces are drawn`);
            const counts = {};
            for (const trace of plot.data) counts[trace.meta] = (counts[trace.meta] || 0) + 1;
            return counts;
        })"""
    )


def test_every_figure_is_drawn_with_data(page):
    assert page.title() == "A report"
    assert page.locator(".plot").count() == 6
    curves, measures, reliability, *_ = markers(page)
    assert page.locator(".plot svg.main-svg").count() >= 6
    for plot in page.locator(".plot").all():
        assert plot.get_attribute("aria-label")
        paths = plot.locator(".scatterlayer path").evaluate_all("all => all.map((p) => p.getAttribute('d'))")
        assert len(paths) > 3
        assert all(path.startswith("M") and "NaN" not in path for path in paths)
    labels = page.evaluate("JSON.parse(document.getElementById('data').textContent).series.map((s) => s.label)")
    assert labels == LABELS
    # points of the seeds, a band, the published curve and a line, and all but the published one again where enlarged
    assert curves["0"] == curves["1"] == 7
    assert curves["2"] == 3  # one seed: no band and no points
    assert curves["5"] == 4  # joint: a point, and those of its seeds
    assert reliability == {"0": 1, "1": 1}  # the others have no bins
    assert measures["0"] == 6  # the seeds and the mean of three measures
    assert measures["5"] == 4  # joint forgets nothing
    assert page.evaluate("document.querySelector('.plot').textContent.includes('tasks seen')")


def test_a_name_is_shown_as_it_is_and_nothing_of_it_runs(page):
    markers(page)
    assert page.locator(".switches label", has_text=EVIL).count() == 1
    assert page.evaluate("document.querySelectorAll('#benchmark-data-9-tasks .plot')[1].textContent").count(EVIL) == 1
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
def test_panels_keep_their_labels_and_do_not_overlap(open_page):
    page = open_page(360, 740)
    page.locator(".switches summary").click()
    page.get_by_role("button", name="none").click()
    page.get_by_role("checkbox", name="joint").check()  # it has no forgetting to show
    markers(page)
    assert "joint" in page.locator(".plot").nth(1).text_content()
    page.get_by_role("button", name="all").click()
    markers(page)
    for plot in page.locator(".plot").all():
        clear = plot.evaluate(
            """(plot) => {
                const boxes = (css) => [...plot.querySelectorAll(css)].map((e) => e.getBoundingClientRect());
                const titles = boxes('.xtitle, .x2title, .x3title'), grid = boxes('.gridlayer path');
                if (!titles.length && !plot.textContent.includes('MB')) throw new Error('nothing to compare');
                return titles.every((t) => grid.every((g) => t.bottom <= g.top || g.bottom <= t.top));
            }"""
        )
        assert clear


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


def test_a_phone_does_not_scroll_sideways_but_its_tables_do(open_page):
    page = open_page(360, 740, has_touch=True, is_mobile=True, device_scale_factor=2)
    assert page.evaluate("[document.documentElement.scrollWidth, document.body.scrollWidth, innerWidth]") == [360] * 3
    tables = page.locator(".scroll").evaluate_all(
        "all => all.map((e) => [e.scrollWidth > e.clientWidth, e.clientWidth])"
    )
    assert any(wider for wider, _ in tables)
    assert all(width <= 360 for _, width in tables)
    widths = page.locator(".plot svg.main-svg").evaluate_all("all => all.map((e) => e.getBoundingClientRect().right)")
    assert max(widths) <= 360
    assert not page.get_by_role(
        "checkbox", name="VCL", exact=True
    ).is_visible()  # the switches are folded away, and unfold
    page.locator(".switches summary").click()
    page.get_by_role("checkbox", name="VCL", exact=True).uncheck()
    assert "1" not in markers(page)[0]
    page.set_viewport_size({"width": 1200, "height": 800})
    wait_for(page, "document.querySelector('.plot svg.main-svg').getBoundingClientRect().width > 600")
    assert page.get_by_role("checkbox", name="EWC", exact=True).is_visible()


@pytest.mark.full
def test_dark_follows_the_system_in_page_and_figures(open_page):
    page = open_page(color_scheme="light")

    def look():
        return page.evaluate(
            """() => [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color,
            document.querySelector('.plot .xtick text').style.fill,
            document.querySelector('.plot .scatterlayer .js-line').style.stroke,
            document.querySelector('.plot .scatterlayer .point').style.fill,
            getComputedStyle(document.querySelector('.key .sign')).color]"""
        )

    light = look()
    assert light[0] == "rgb(255, 255, 255)"
    page.emulate_media(color_scheme="dark")
    wait_for(page, "document.querySelector('.plot .xtick text').style.fill === 'rgb(230, 237, 243)'")
    dark = look()
    assert all(a != b for a, b in zip(light[:3] + light[5:], dark[:3] + dark[5:], strict=True)), (light, dark)
    page.emulate_media(color_scheme="light")
    wait_for(page, "document.querySelector('.plot .xtick text').style.fill === 'rgb(27, 31, 36)'")
    assert look() == light


def test_without_javascript_the_tables_are_there(chromium, page_url):
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(page_url)
    assert "JavaScript" in page.locator(".note").first.inner_text()
    assert page.locator("tbody th", has_text="EVCL").first.is_visible()
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
    drawn = "document.querySelector('#benchmark-weather-1-050-rows .plot')"
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    traces = page.evaluate(f"{drawn}.data.map((one) => [one.mode, one.x.length])")
    assert [one for one in traces if one[0] == "markers"] == [["markers", 2]]  # an alarm of each seed
    assert sum(one == ["lines", 105] for one in traces) == 4  # two methods, two measures
    assert page.evaluate(f"{drawn}.layout.shapes.length") == 2  # the known change, in both panels
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    if width > 1000:  # the switches are open
        page.click("[data-all=off]")
        assert page.evaluate(f"{drawn}.clientWidth") == 0
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
    markers(page)
    plot = "document.querySelectorAll('#benchmark-split-mnist .plot')[1]"
    left, right = page.evaluate(f"{plot}.layout.xaxis2.range")  # NLL: 0.14, 0.15, 0.17, 0.5, 0.65 and, of joint, 0.12
    assert left <= 0
    assert right < 0.6
    assert "0.650" in page.evaluate(f"{plot}.textContent")  # beyond it: an arrow and the number


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
        assert page.evaluate("[...document.querySelectorAll('.plot')].filter((p) => p.data).length") <= 3
        page.close()
    assert min(opened) < 2000
    page = chromium.new_page(viewport={"width": 390, "height": 844})
    page.goto(path.as_uri())
    page.wait_for_selector(READY, state="attached", timeout=60_000)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    plot = page.locator("#benchmark-split-mnist .plot").first
    plot.scroll_into_view_if_needed()
    wait_for(page, "document.querySelector('#benchmark-split-mnist .plot').data?.length > 0")
    colours = plot.evaluate(
        "(p) => new Set(p.data.filter((t) => t.mode === 'lines+markers' && !t.line.dash).map((t) => t.meta)).size"
    )
    assert colours == 8  # the best few; the others are grey
    assert page.locator("#benchmark-split-mnist .others").is_visible()
    page.close()


def test_long_names_leave_room_for_the_numbers_on_a_phone(watched, tmp_path):
    """Names are cut, and a panel lists only the methods that it measured."""
    long = "a method whose name is far too long for a phone"
    folder = write(tmp_path, result("evcl"), result(long, last=(0.7, 0.8)), result("joint", last=(0.9, 0.9)))
    url = write_report(folder, "A report")[-1].as_uri()
    page = watched(url, 390, 800, allowed=(url, "data:,"))
    page.wait_for_selector(READY, state="attached", timeout=60_000)
    markers(page)
    shown = page.evaluate(
        """() => {
            const plot = document.querySelectorAll('.plot')[1];
            const names = (axis) => [...plot.querySelectorAll(`.${axis}tick text`)].map((e) => e.textContent);
            return [names('y'), names('y2'), plot._fullLayout.xaxis._length / plot.clientWidth];
        }"""
    )
    assert shown[0] == ["EVCL", "a method whose name\u2026"]  # joint training has no forgetting
    assert len(shown[1]) == 3
    assert shown[2] > 0.5
