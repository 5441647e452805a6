"""The site that `make docs` builds: without a warning, with every public name in it, and complete without a network."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

import pytest
from public_names import MODULES, PARTLY

ROOT = Path(__file__).parent.parent
MISSING = [name for name in ("mkdocs", "material", "mkdocstrings") if find_spec(name) is None]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if MISSING:
        pytest.skip(f"{', '.join(MISSING)} not installed: `make docs` installs what builds the site")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.mark.parametrize("module", [*MODULES, *PARTLY])
def test_every_public_name_has_an_entry(site, module):
    pages = "".join(page.read_text("utf-8") for page in (site / "api").glob("*.html"))
    entries = set(re.findall(r'<h\d id="([^"]+)"', pages))
    names = PARTLY.get(module) or importlib.import_module(module).__all__
    wanted = {module, *(f"{module}.{name}" for name in names)}
    assert wanted <= entries, f"no docstring, or not on the page: {sorted(wanted - entries)}"


def test_nothing_is_fetched_while_it_is_read(site):
    for page in site.rglob("*.html"):
        loads = re.findall(r'<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)="(https?:)?//', page.read_text("utf-8"))
        assert not loads, page.name


def test_the_pages_name_public_names_only():
    public = {*MODULES, *PARTLY, *(f"evcl.{name}" for name in importlib.import_module("evcl").__all__)}
    for page in (ROOT / "docs" / "api").glob("*.md"):
        assert set(re.findall(r"^::: (\S+)", page.read_text("utf-8"), re.M)) <= public, page.name


@pytest.mark.parametrize("name", ["Learner", "Stream"])
def test_the_learners_have_all_their_methods_with_types(site, name):
    """Those that a learner inherits, too."""
    page = (site / "api" / "evcl.html").read_text("utf-8")
    made = getattr(importlib.import_module("evcl"), name)
    methods = [method for method, value in inspect.getmembers(made) if method[0] != "_" and inspect.isroutine(value)]
    assert "predictions" in methods
    for method in methods:
        assert f'id="evcl.{name}.{method}"' in page, method
        assert inspect.signature(getattr(made, method)).return_annotation is not inspect.Signature.empty, method


def test_a_page_has_one_name():
    """Its title is its name in the navigation, or that and a colon and more. The first page has the library's name."""
    named = re.findall(r"^ +- (?:(.+): )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.M)
    assert len(named) > 40
    for name, page in named:
        title = re.search(r"^# (.+)$", (ROOT / "docs" / page).read_text("utf-8"), re.M)
        if name and title and page != "index.md":  # a page of the reference has no title of its own
            assert title[1] == name or title[1].startswith(f"{name}: "), page


class Anchors(HTMLParser):
    """The ids of a page, and what it links to."""

    def __init__(self):
        super().__init__()
        self.ids, self.links = set(), set()

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids.add(found.get("id"))
        if tag in ("a", "img", "script", "link"):
            self.links.add(found.get("href") or found.get("src"))


def test_no_link_is_broken(site):
    pages = {}
    for path in site.rglob("*.html"):
        pages[path] = Anchors()
        pages[path].feed(path.read_text("utf-8"))
    broken = []
    for path, page in pages.items():
        if path.name == "404.html":  # it is shown in place of any page, so its links begin at the root
            continue
        for link in filter(None, page.links):
            address, _, anchor = unquote(link).partition("#")
            if re.match(r"\w+:", address):
                continue
            target = (path.parent / address).resolve() if address else path
            if not target.exists() or (anchor and target in pages and anchor not in pages[target].ids):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert broken == []


@pytest.fixture
def open_page(watched, site):
    """Open a page of the site from the disk."""
    return lambda name, width=1400: watched((site / name).as_uri(), width, 900)


@pytest.mark.parametrize("width", [390, 1400])
def test_every_page_opens_without_an_error_and_fits(open_page, site, width):
    page = open_page("index.html", width)
    for path in sorted(site.rglob("*.html")):
        if path.name != "404.html":
            page.goto(path.as_uri())
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path.name


def test_the_search_finds_a_word_without_a_server(open_page):
    page = open_page("tutorials/table.html")
    page.click("input.md-search__input")
    page.keyboard.type("heartbeat")
    page.wait_for_selector(".md-search-result__item", timeout=30_000)
    assert "SCALE.html" in page.locator(".md-search-result__item a").first.get_attribute("href")


def test_the_table_of_methods_can_be_filtered(open_page):
    page = open_page("methods/field.html")
    rows = page.locator("tbody tr:visible")
    everything = rows.count()
    page.select_option("#field-filters label:has-text('Scenario') select", index=3)
    page.select_option("#field-filters label:has-text('Memory') select", index=1)
    found = {row.split()[0] for row in rows.all_inner_texts()}
    assert {"evcl", "generative-classifier", "dgr"} <= found
    assert not found & {"er", "ewc", "naive"}
    assert page.inner_text("#field-filters [role=status]") == f"{len(found)} of {everything} methods"
