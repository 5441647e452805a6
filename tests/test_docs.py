"""Every document from top to bottom, as a reader follows it: its Python and its commands, in one folder. And what the
documents say of the settings is what the code says.
"""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from msgspec import structs

from evcl._core.catalogue import METHOD_SUMMARIES, measured
from evcl._core.settings import VALIDATION
from evcl.benchmarks import BENCHMARKS
from evcl.experiments import RESULT, write_found
from evcl.methods import METHODS

ROOT = Path(__file__).parent.parent
PAPER = ROOT / "experiments" / "paper"
DOCS = ROOT / "docs"
DOCUMENTS = [
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md")),
    *sorted((DOCS / "tutorials").glob("*.md")),
    *sorted((DOCS / "methods").glob("*.md")),
]  # fmt: skip
DOCUMENTS.remove(DOCS / "integrations.md")  # needs other libraries: tests/integrations/test_document.py
GUIDES = ("start", "models", "data", "training", "methods/index", "own-method", "command-line", "faq", "comparison")
GO_ON = ("own-method",)  # their pieces of Python go on from one another
REGISTERED = set(BENCHMARKS)
COMMANDS = {"README": 4, "start": 4, "data": 4, "numbers": 2, "sites": 5, "streams": 3, "generative": 2}
COMMANDS |= {"own-method": 4, "rl": 2, "install": 1, "table": 4, "cluster": 3}


def installs(line, arguments):
    """Not run: it needs a network. What can be said without one: bash reads it, and the extras that it names exist."""
    subprocess.run(["bash", "-n", "-c", line], check=True)
    known = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for extra in re.findall(r"\[([\w,]+)\]", " ".join(arguments)):
        assert set(extra.split(",")) <= set(known), line


def makes(line, arguments):
    """Not run: it would build an environment. Its target is in the Makefile."""
    assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text("utf-8"), re.M), line


NOT_RUN = {"pip": installs, "uv": installs, "make": makes}  # and why: their documentation


@pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard.*")
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_a_document_from_top_to_bottom(path, evcl, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("EVCL_PLUGINS", "")  # a command changes it
    modules, methods, commands = set(sys.modules), set(METHODS), 0
    blocks = re.findall(r"^```(python|sh|text)\n(.*?)^```", path.read_text("utf-8"), re.M | re.S)
    names = {"__name__": "example"}
    for number, (language, block) in enumerate(blocks):
        if file := re.match(r"# (\w+\.py)\n", block):  # a file that what follows uses
            Path(file[1]).write_text(block)
        elif language == "python":
            if path.stem not in GO_ON:
                names = {"__name__": "example"}
            with torch.random.fork_rng(), redirect_stdout(io.StringIO()) as printed:
                torch.manual_seed(0)
                exec(compile(block, f"{path.name}, block {number}", "exec", dont_inherit=True), names)
        elif language == "text":
            assert_printed(printed.getvalue(), block)
        else:
            printed = io.StringIO()
            for line in filter(None, map(str.strip, block.splitlines())):
                forget(modules, methods)  # a command is a process of its own
                program, *arguments = shlex.split(line, comments=True)
                if program in NOT_RUN:
                    NOT_RUN[program](line, arguments)
                    continue
                assert program == "evcl"
                status, out, err = evcl(*arguments)
                assert status == 0, f"{line}: {err}"
                printed.write(out)
                commands += 1
    forget(modules, methods)
    assert commands == COMMANDS.get(path.stem, 0)
    if path.stem == "data":
        first = Path("predictions.csv").read_text().partition("\n")[0]
        assert first == "age,income,city,label,prediction,probability_no,probability_yes,entropy,epistemic,unfamiliar"


def test_the_command_that_checks_a_method_of_ones_own_selects_its_cases(tmp_path):
    text = (DOCS / "own-method.md").read_text("utf-8")
    (block,) = re.findall(r"^```python\n(# my_method\.py\n.*?)^```", text, re.M | re.S)
    (tmp_path / "my_method.py").write_text(block)
    (command,) = re.findall(r"`EVCL_PLUGINS=my_method.py python (-m pytest .*?)`", text)
    environment = {**os.environ, "EVCL_PLUGINS": str(tmp_path / "my_method.py")}
    asked = [sys.executable, *shlex.split(command), "--collect-only", "-q"]
    found = subprocess.run(asked, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    cases = re.findall(r"^tests/\S+: (\d+)$", found.stdout, re.M)
    assert sum(map(int, cases)) > 10, found.stdout


NUMBER = re.compile(r"([-\d.]*\d)(%?[,:]?)")


def assert_printed(found, wanted):
    """The same words, and numbers within 1 (below 2, within 0.05): an example may be decided otherwise elsewhere."""
    for one, other in zip(found.split(), wanted.split(), strict=True):
        claimed, printed = NUMBER.fullmatch(other), NUMBER.fullmatch(one)
        if claimed and printed:
            size = float(claimed[1])
            assert float(printed[1]) == pytest.approx(size, abs=1 if abs(size) > 2 else 0.05), f"{one}, not {other}"
            assert printed[2] == claimed[2]
        else:
            assert one == other


def forget(modules, methods):
    for name in set(METHODS) - methods:
        METHODS.remove(name)
    for name in set(BENCHMARKS) - REGISTERED:
        BENCHMARKS.remove(name)
    for name in set(sys.modules) - modules:
        if name == "my_method" or name.startswith("evcl_plugin:"):
            del sys.modules[name]


def table_after(text, start):
    return re.findall(r"^\| (`.*?) \| (.*?) \|", text.partition(start)[2].partition("\n\n")[0], re.M)


def test_the_defaults_in_the_documents_are_the_codes():
    text = (DOCS / "methods" / "settings.md").read_text("utf-8")
    found = {}
    for names, defaults in table_after(text, "| setting | default |"):
        found |= dict(zip(re.findall(r"`([\w.]+)`", names), defaults.replace("`", "").split(", "), strict=True))
    settings = {**METHODS["evcl"].known_settings, "validation": VALIDATION}
    assert found.keys() == settings.keys()
    for name, setting in settings.items():
        assert setting.check(name, found[name]) == setting.default, name


def test_the_documents_name_what_other_methods_have_of_their_own():
    text = (DOCS / "methods" / "settings.md").read_text("utf-8")
    found = {
        (method, name.strip("`"), METHODS[method].known_settings[name.strip("`")].check(name, default))
        for name, defaults in table_after(text, "| setting | default of |")
        for method, default in re.findall(r"`([\w-]+)` ([\w.]+)", defaults)
    }
    usual = {name: setting.default for name, setting in METHODS["evcl"].known_settings.items()}
    assert found == {
        (method, name, setting.default)
        for method in METHOD_SUMMARIES
        if method != "evcl-paper"  # whose defaults are those of a preset
        for name, setting in METHODS[method].known_settings.items()
        if name not in usual or setting.default != usual[name]
    }


def test_every_method_is_on_the_page_of_methods():
    text = (DOCS / "methods" / "index.md").read_text("utf-8").partition("## Which to choose")[0]
    assert set(METHOD_SUMMARIES) <= set(re.findall(r"`([\w-]+)`", text))


def test_the_table_of_costs_is_that_of_the_measuring_program(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "perf"))
    made = runpy.run_path(str(ROOT / "perf" / "methods.py"))["table"](measured()[0])
    assert made in (DOCS / "PERFORMANCE.md").read_text("utf-8"), "copy there what python perf/methods.py prints"


def test_the_table_of_methods_is_made_from_the_registry(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "experiments" / "field"))
    filled = runpy.run_path(str(ROOT / "experiments" / "field" / "write_methods.py"))["filled"]
    text = (DOCS / "methods" / "field.md").read_text("utf-8")
    assert filled(text) == text, "run python experiments/field/write_methods.py"


@pytest.fixture
def make():
    return runpy.run_path(str(PAPER / "make_tables.py"))


@pytest.mark.records
def test_the_tables_are_made_from_the_result_files(make):
    for path in make["DOCUMENTS"]:
        text = path.read_text("utf-8")
        assert len(make["TABLE"].findall(text)) == text.count("<!-- table: ") > 0
        assert make["filled"](text) == text, f"run python experiments/paper/make_tables.py: {path.name}"


def shown(path):
    """The numbers that a figure's file says it shows."""
    (found,) = ElementTree.parse(path).iter("{http://purl.org/dc/elements/1.1/}description")
    return json.loads(found.text)


@pytest.mark.records
def test_the_figures_are_drawn_from_the_result_files(make, tmp_path):
    groups = make["groups"]("tuned")
    assert {f"{group.slug}.svg" for group in groups} == {path.name for path in make["FIGURES"].glob("*.svg")}
    for group in groups:
        drawn = make["draw"](group, tmp_path)
        there = make["FIGURES"] / drawn.name
        assert shown(drawn) == shown(there), f"run python experiments/paper/make_tables.py: {there.name}"


@pytest.mark.records
def test_a_figure_drawn_before_a_result_changed_is_noticed(make, tmp_path):
    group = make["groups"]("ten-tasks")[0]
    before = shown(make["draw"](group, tmp_path))
    line = group.lines[0]
    accuracy = [[list(row) for row in matrix] for matrix in line.result.accuracy]
    accuracy[0][-1][0] -= 0.001
    changed = replace(line, result=structs.replace(line.result, accuracy=accuracy))
    after = shown(make["draw"](replace(group, lines=(changed, *group.lines[1:])), tmp_path))
    assert [label for label in before if before[label] != after[label]] == [line.label]


@pytest.mark.records
def test_the_files_behind_the_documents_are_kept_short(make, tmp_path):
    """One line per trial of a search, and per key of a result."""
    for path in make["RESULTS"].rglob(RESULT):
        text = path.read_text("utf-8")
        assert make["kept"](text) == text, f"run python experiments/paper/make_tables.py: {path}"
    found = [*make["SEARCHES"].glob("*/*.json"), *make["RESULTS"].glob("*/search/*.json")]
    assert {path.parents[1] for path in found} == {make["SEARCHES"], make["RESULTS"] / "architectures"}
    for path in found:
        text = path.read_text("utf-8")
        write_found(tmp_path / path.name, json.loads(text))
        assert (tmp_path / path.name).read_text("utf-8") == text, path


def test_every_guide_is_there_and_linked():
    readme = (ROOT / "README.md").read_text("utf-8")
    assert all(f"(docs/{name}.md)" in readme for name in GUIDES)
    for path in (*DOCUMENTS, PAPER / "README.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text("utf-8")):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_the_first_page_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) < 150
