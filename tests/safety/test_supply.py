"""What comes from elsewhere: downloads have pinned checksums, and dependencies have licences that allow their use."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

from evcl.data import CATALOG

ROOT = Path(__file__).parents[2]
# LGPL is that of pygame-ce, which MiniGrid imports.
ALLOWED = r"MIT|BSD|Apache|PSF|Python Software|MPL|Mozilla|ISC|Unlicense|HPND|Zlib|CC0|CNRI|LGPL"
COPYLEFT = r"(?<!L)(?<!Lesser )\bA?GPL|General Public License"  # of what evcl is built on, none may be like this


def pinned() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [match[1] for line in lines if (match := re.match(r"([A-Za-z0-9_.-]+)==", line))]


@pytest.mark.parametrize("name", list(CATALOG))
def test_every_download_has_a_checksum(name):
    """Files, and the arrays that are decoded from them, whatever mirror or package they come from."""
    entry = CATALOG[name]
    sums = [array.sha256 for array in entry.arrays.values()]
    sums += [file.sha256 for form in vars(entry).values() if isinstance(form, tuple) for file in form
             if hasattr(file, "sha256")]  # fmt: skip
    assert sums
    for one in sums:
        assert re.fullmatch("[0-9a-f]{64}", one)
    assert entry.licence


def test_every_version_is_pinned():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert len(pinned()) == len(lines)


def test_licences_of_what_is_installed():
    """Of those packages among the pinned ones that are installed here; the others are in the public workflow."""
    found = {}
    for name in pinned():
        try:
            about = importlib.metadata.metadata(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        kinds = [text.rpartition(" :: ")[2] for text in about.get_all("Classifier") or [] if text.startswith("License")]
        first = (about.get("License") or "").splitlines()[:1]
        found[name] = " ".join([about.get("License-Expression") or "", *kinds, *first])
    assert {"torch", "numpy", "safetensors"} <= found.keys()
    assert {name: text for name, text in found.items() if not re.search(ALLOWED, text, re.IGNORECASE)} == {}
    found.pop("pygame-ce", None)  # LGPL; MiniGrid imports it, evcl does not
    assert {name: text for name, text in found.items() if re.search(COPYLEFT, text)} == {}


def test_the_public_workflow_asks_for_advisories():
    text = (ROOT / ".github" / "workflows" / "supply.yml").read_text()
    assert "pip-audit" in text
    assert "constraints.txt" in text
