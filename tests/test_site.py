"""The site that `make docs` builds: without a warning, with every public name in it, and complete without a network."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

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


def test_the_pages_name_public_modules_only():
    for page in (ROOT / "docs" / "api").glob("*.md"):
        assert set(re.findall(r"^::: (\S+)", page.read_text("utf-8"), re.M)) <= {*MODULES, *PARTLY}, page.name
