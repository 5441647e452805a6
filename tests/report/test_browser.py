"""The page in a real browser: it draws, switches, is reached by keyboard, fits a phone, and has a dark side.

It needs Chromium or Chrome: on the PATH, or named by EVCL_CHROMIUM.
"""

from __future__ import annotations

import os
import re
import shutil

import pytest
from made_up import result, write
from made_up_streams import stream

from evcl.report import write_report

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = os.environ.get("EVCL_CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None,
    reason="needs Chromium or Chrome: install one (apt-get install chromium), or name it in EVCL_CHROMIUM",
)
EVIL = "<b>mine</b><script>alert(1)</script>"
RESULTS = [
    *(result(m, "split-mnist", last=v) for m, v in (
        ("evcl", (0.85, 0.86, 0.87)), ("vcl", (0.84, 0.85, 0.86)), ("ewc", (0.83,)), ("naive", (0.5, 0.6, 0.4)),
        ("random-coreset", (0.3, 0.35, 0.4)), ("joint", (0.88, 0.89, 0.885)),
    )),
    *(result(m, "data", last=(0.7, 0.8), tasks=9) for m in ("evcl", "vcl", EVIL)),
]  # fmt: skip
DRAWN = "html[data-drawn]"
LABELS = ["EVCL", "VCL", "EWC", "random coreset only", "naive", "joint", EVIL]


@pytest.fixture(scope="module")
def page_url(tmp_path_factory):
    folder = write(tmp_path_factory.mktemp("report"), *RESULTS)
    return write_report(folder, "A report")[-1].as_uri()


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        flags = ["--no-sandbox"] if os.name == "posix" and os.geteuid() == 0 else []  # Chromium refuses root without it
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium, page_url):
    """Open the page; at the end nothing may have gone wrong, and nothing been asked of the network."""
    contexts, wrong = [], []

    def start(width=1200, height=800, **options):
        context = chromium.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda r: None if r.url in (page_url, "data:,") else wrong.append(r.url))
        page.goto(page_url)
        page.wait_for_selector(DRAWN, state="attached", timeout=60_000)
        return page

    yield start
    for context in contexts:
        context.close()
    assert wrong == []


def mentions(page, label):
    """How often the sections of the benchmarks show this word, in headings, keys, tables, matrices and figures."""
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
    """For each figure, how many traces of each series it has drawn as SVG."""
    return page.evaluate(
        """() => [...document.querySelectorAll('.plot')].map((plot) => {
            const drawn = plot.querySelectorAll('.scatterlayer .trace').length;
            if (drawn !== plot.data.length) throw new Error(`${drawn} of ${plot.data.length} traces are drawn`);
            const counts = {};
            for (const trace of plot.data) counts[trace.meta] = (counts[trace.meta] || 0) + 1;
            return counts;
        })"""
    )


def test_every_figure_is_drawn_with_data(open_page):
    page = open_page()
    assert page.title() == "A report"
    assert page.locator(".plot").count() == 4
    assert page.locator(".plot svg.main-svg").count() >= 4
    for plot in page.locator(".plot").all():
        assert plot.get_attribute("aria-label")
        paths = plot.locator(".scatterlayer path").evaluate_all("all => all.map((p) => p.getAttribute('d'))")
        assert len(paths) > 10
        assert all(path.startswith("M") and "NaN" not in path for path in paths)
    curves, measures, *_ = markers(page)
    labels = page.evaluate("JSON.parse(document.getElementById('data').textContent).series.map((s) => s.label)")
    assert labels == LABELS
    # a band, the published curve and a line, and the band and the line again where they are enlarged
    assert curves["0"] == curves["1"] == 5
    assert curves["2"] == 3  # one seed: no band
    assert curves["5"] == 2  # joint: a point
    assert measures["0"] == 6  # the seeds and the mean of three measures
    assert measures["5"] == 4  # joint forgets nothing
    assert page.evaluate("document.querySelector('.plot').textContent.includes('tasks seen')")


def test_a_name_is_shown_as_it_is_and_nothing_of_it_runs(open_page):
    page = open_page()
    assert page.locator(".switches label", has_text=EVIL).count() == 1
    assert page.evaluate("document.querySelectorAll('.plot')[3].textContent").count(EVIL) == 1
    assert page.locator("main b").count() == 0


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


def test_published_curves_and_all_methods_can_be_switched(open_page):
    page = open_page()
    before = markers(page)
    page.get_by_role("checkbox", name="published curves").uncheck()
    after = markers(page)
    assert before[0]["0"] - after[0]["0"] == 1
    assert after[1:] == before[1:]
    page.get_by_role("button", name="none").click()
    assert markers(page) == [{}, {}, {}, {}]
    page.get_by_role("button", name="all").click()
    assert markers(page) == after


def test_panels_keep_their_labels_and_do_not_overlap(open_page):
    page = open_page(360, 740)
    page.locator(".switches summary").click()
    page.get_by_role("button", name="none").click()
    page.get_by_role("checkbox", name="joint").check()  # it has no forgetting to show
    assert "joint" in page.locator(".plot").nth(1).text_content()
    page.get_by_role("button", name="all").click()
    for plot in page.locator(".plot").all():
        clear = plot.evaluate(
            """(plot) => {
                const boxes = (css) => [...plot.querySelectorAll(css)].map((e) => e.getBoundingClientRect());
                const titles = boxes('.xtitle, .x2title, .x3title'), grid = boxes('.gridlayer path');
                if (!titles.length || !grid.length) throw new Error('nothing to compare');
                return titles.every((t) => grid.every((g) => t.bottom <= g.top || g.bottom <= t.top));
            }"""
        )
        assert clear


def test_the_keyboard_reaches_the_switches_and_shows_where_it_is(open_page):
    page = open_page()
    reached = []
    for _ in range(30):
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


@pytest.mark.parametrize("width", [1400, 390])
def test_streams_are_drawn_with_alarms_and_fit_their_window(chromium, tmp_path, width):
    folder = write(tmp_path, stream(changes=[525]), stream("naive", level=0.7, alarms=()), result("evcl"))
    wrong, page = [], chromium.new_page(viewport={"width": width, "height": 800})
    page.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(write_report(folder, "Streams")[-1].as_uri())
    page.wait_for_selector(DRAWN, state="attached", timeout=60_000)
    drawn = "document.querySelector('#benchmark-weather-1-050-rows .plot')"
    traces = page.evaluate(f"{drawn}.data.map((one) => [one.mode, one.x.length])")
    assert [one for one in traces if one[0] == "markers"] == [["markers", 2]]  # an alarm of each seed
    assert sum(one == ["lines", 105] for one in traces) == 4  # two methods, two measures
    assert page.evaluate(f"{drawn}.layout.shapes.length") == 2  # the known change, in both panels
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    if width > 1000:  # the switches are open
        page.click("[data-all=off]")
        assert page.evaluate(f"{drawn}.data.length") == 0
    page.close()
    assert wrong == []
