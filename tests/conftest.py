"""Every test runs on one thread, finds torch's global generator at one seed, and knows the plugins of EVCL_PLUGINS."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import runpy
import shutil
import signal
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
import typer.main

HERE = Path(__file__).parent
OWN = (HERE / "user_method.py", *sorted((HERE / "plugins").glob("*.py")))
# What a test compiles or caches is not the user's.
os.environ["EVCL_CACHE"] = tempfile.mkdtemp(prefix="evcl-tests-")
os.environ.pop("EVCL_NATIVE", None)
os.environ["SOURCE_DATE_EPOCH"] = "1767225600"  # what is learned twice is the same file
if not torch.cuda.is_available():  # Triton's interpreter then runs the kernels of a GPU: read when Triton is imported
    os.environ["TRITON_INTERPRET"] = "1"
atexit.register(shutil.rmtree, os.environ["EVCL_CACHE"], ignore_errors=True)
os.environ["EVCL_PLUGINS"] = os.pathsep.join(filter(None, [os.environ.get("EVCL_PLUGINS"), *map(str, OWN)]))

from evcl.cli import main  # noqa: E402
from evcl.experiments import load_plugins  # noqa: E402  (after the variable is set)

torch.set_num_threads(1)
load_plugins()
typer.main.get_command = cache(typer.main.get_command)  # thousands of commands are called in this process


SAMPLE = ("evcl", "ewc", "naive")  # the methods that `make test` puts through the contract
RECORDS = HERE.parent / "experiments" / "paper" / "results"
FULL = ("test_docs.py", "test_site.py", "contract/test_plugins.py", "training/test_kernels.py")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """`make test-all` also runs what is marked `full`: every method's contract, a GPU's kernels, documents, site."""
    for item in items:
        path = item.path.relative_to(HERE).as_posix()
        about = getattr(item, "callspec", None)
        method = about.params.get("method", SAMPLE[0]) if about else SAMPLE[0]
        contract = path.startswith(("contract/", "test_contract.py")) and str(method) not in SAMPLE
        if contract or path in FULL:
            item.add_marker(pytest.mark.full)
        if item.get_closest_marker("records") and not RECORDS.is_dir():
            item.add_marker(pytest.mark.skip(reason="needs the records of experiments/: only the repository has them"))


def pytest_collection_finish():
    """What is imported by now stays until the end: the collector of garbage does not look at it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _global_generator_is_left_alone():
    """It begins each test at one seed, whatever ran before: a network made there has the same weights in any order."""
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    yield
    assert torch.equal(before, torch.random.get_rng_state()), "torch's global generator was used"


@pytest.fixture(autouse=True)
def _signals_do_what_they_did():
    """A command sets handlers of its own; the next test in this process has Python's."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.fixture
def generator():
    """A generator of the test's own."""
    return torch.Generator().manual_seed(0)


@pytest.fixture
def evcl(capsys, tmp_path):
    """Run a command in an empty folder: (status, standard output, standard error). `evcl.done` runs one that has to
    succeed, and returns its output; `evcl.refused` one that has to fail, and returns the line that says why.

    The plugins that a command adds are forgotten afterwards.
    """

    def call(*arguments):
        sys.argv = ["evcl", *map(str, arguments)]
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    def done(*arguments):
        status, out, err = call(*arguments)
        assert (status, err) == (0, ""), err
        return out

    def refused(*arguments):
        status, _, err = call(*arguments)
        assert (status, err[:6], err.count("\n")) == (1, "evcl: ", 1), err
        return err.removeprefix("evcl: ").rstrip("\n")

    call.done, call.refused = done, refused
    before = sys.argv, os.environ["EVCL_PLUGINS"]
    with contextlib.chdir(tmp_path):
        yield call
    sys.argv, os.environ["EVCL_PLUGINS"] = before


@pytest.fixture
def program(capsys):
    """Run a Python file with these words: what it prints."""

    def call(path, *words):
        before, sys.argv = sys.argv, [str(path), *map(str, words)]
        try:
            runpy.run_path(str(path), run_name="__main__")
        finally:
            sys.argv = before
        return capsys.readouterr().out

    return call


@pytest.fixture(scope="module")
def _written():
    return {}


@pytest.fixture
def made_once(evcl, _written):
    """Call `make`, which writes into the empty folder; the file's next tests get copies of what it wrote."""

    def call(make):
        name = make.__qualname__  # a file may make several things
        if name not in _written:
            make()
            _written[name] = {path: path.read_bytes() for path in Path().iterdir()}
        for path, content in _written[name].items():
            path.write_bytes(content)

    return call


@pytest.fixture(scope="module")
def chromium():
    """Chromium or Chrome, on the PATH or named by EVCL_CHROMIUM; without one, the test is skipped."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    path = os.environ.get("EVCL_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("needs Chromium or Chrome: install one (apt-get install chromium), or name it in EVCL_CHROMIUM")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        flags = ["--no-sandbox"] if os.name == "posix" and os.geteuid() == 0 else []  # Chromium refuses root without it
        browser = playwright.chromium.launch(executable_path=path, args=flags)
        yield browser
        browser.close()


def _watched(chromium):
    """Open an address. At the end nothing may have gone wrong, and only addresses that begin with one of `allowed` may
    have been asked for: by default, those on the disk.
    """
    contexts, wrong = [], []

    def start(url, width=1200, height=800, allowed=("file:", "data:"), **options):
        context = chromium.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda asked: None if asked.url.startswith(allowed) else wrong.append(asked.url))
        page.goto(url)
        return page

    yield start
    for context in contexts:
        context.close()
    assert wrong == []


watched = pytest.fixture(_watched)
watched_by_module = pytest.fixture(scope="module")(_watched)  # for a page that all tests of a file look at
