"""What is released: the version is one, and the wheel and the source archive hold what they should, install and run.

The archives are built by hatchling as it is installed here: nothing is downloaded.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import evcl

ROOT = Path(__file__).parent.parent
MOST_BYTES = 2_000_000  # of the source archive
full = pytest.mark.full


def test_the_version_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert "version" in project["project"]["dynamic"]
    assert f"\nversion: {evcl.__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    newest = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)[0]
    assert newest in (evcl.__version__, "Unreleased")


def test_the_hooks_of_a_commit_use_the_pinned_linter():
    if not (ROOT / ".pre-commit-config.yaml").exists():
        pytest.skip("not in this copy")
    (pinned,) = re.findall(r"^ruff==\S+", (ROOT / "constraints.txt").read_text("utf-8"), re.M)
    assert set(re.findall(r"ruff==[\d.]+", (ROOT / ".pre-commit-config.yaml").read_text("utf-8"))) == {pinned}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(the wheel, the source archive)"""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, source


@pytest.fixture(scope="module")
def unpacked(built, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(built[1]) as archive:
        archive.extractall(folder, filter="data")
    (top,) = folder.iterdir()
    return top


@full
def test_the_wheel_is_the_package_and_nothing_else(built):
    wheel, _ = built
    assert wheel.name == f"evcl-{evcl.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        about = archive.read(f"evcl-{evcl.__version__}.dist-info/METADATA").decode()
    source = ROOT / "src"
    ours = {path.relative_to(source).as_posix() for path in (source / "evcl").rglob("*") if path.is_file()}
    ours = {name for name in ours if "__pycache__" not in name}
    assert {name for name in names if not name.startswith(f"evcl-{evcl.__version__}.dist-info/")} == ours
    assert {"evcl/py.typed", "evcl/report/page.html.j2", "evcl/kernels/native.c"} <= names
    licence = f"evcl-{evcl.__version__}.dist-info/licenses/LICENSE"
    assert licence in names
    for line in (f"Version: {evcl.__version__}", "License-Expression: Apache-2.0", "Requires-Python: >=3.11",
                 "Description-Content-Type: text/markdown"):  # fmt: skip
        assert line in about.splitlines()


@full
def test_the_source_archive_is_small_and_has_what_a_packager_needs(built, unpacked):
    assert built[1].stat().st_size < MOST_BYTES
    top = {path.name for path in unpacked.iterdir()}
    assert top == {
        ".ci", ".github", ".gitignore", ".pre-commit-config.yaml", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md",
        "LICENSE", "Makefile", "PKG-INFO", "README.md", "SECURITY.md", "constraints.txt", "docs", "examples",
        "experiments", "laws", "mkdocs.yml", "perf", "pyproject.toml", "src", "tests",
    }  # fmt: skip
    assert not list(unpacked.glob("experiments/*/results"))
    for part in ("src", "tests", "docs", "examples", "laws", "perf"):
        here = {path.relative_to(ROOT).as_posix() for path in (ROOT / part).rglob("*.py")}
        assert here == {path.relative_to(unpacked).as_posix() for path in (unpacked / part).rglob("*.py")}


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """An environment with the wheel and, so that nothing is downloaded, the packages of this one: its Python."""
    folder = tmp_path_factory.mktemp("environment") / "v"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    say = "import sysconfig; print(sysconfig.get_path('purelib'))"
    purelib = subprocess.run([python, "-c", say], capture_output=True, text=True, check=True).stdout.strip()
    (Path(purelib) / "here.pth").write_text(sysconfig.get_path("purelib") + "\n", "utf-8")
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    ran = subprocess.run([*install, str(built[0])], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return python


def tried(python, folder, *words):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("EVCL_", "PYTHON"))}
    environment |= {"OMP_NUM_THREADS": "1", "HOME": str(folder), "EVCL_CACHE": str(folder / "cache")}
    ran = subprocess.run([*map(str, words)], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@full
def test_the_wheel_works_in_an_environment_of_its_own(installed, tmp_path):
    where = tried(installed, tmp_path, installed, "-c", "import evcl; print(evcl.__file__)").strip()
    assert Path(where).is_relative_to(installed.parents[1])
    command = installed.with_name("evcl.exe" if os.name == "nt" else "evcl")
    assert tried(installed, tmp_path, command, "--version") == f"evcl {evcl.__version__}\n"
    learned = "split-digits --method evcl --seeds 1 --tasks 2 --epochs 1 --out tried"
    assert "average accuracy" in tried(installed, tmp_path, command, "run", *learned.split())
    tried(installed, tmp_path, command, "report", "tried")
    assert (tmp_path / "tried" / "index.html").stat().st_size > 40_000
    program = """
import numpy as np, evcl
x = np.random.default_rng(0).normal(size=(60, 4)).astype("float32")
learner = evcl.EVCL(evcl.nn.mlp(4, [8]))
learner.learn(x, x[:, 0] > 0, epochs=2)
learner.save("m.safetensors")
print(evcl.load("m.safetensors").predict(x).shape)
"""
    assert tried(installed, tmp_path, installed, "-c", program) == "(60,)\n"


@full
def test_the_tests_of_the_source_archive_run(unpacked, tmp_path):
    """A part of them passes, and all are found: the workflow of the public forge runs all."""
    environment = {**os.environ, "PYTHONPATH": str(unpacked / "src"), "OMP_NUM_THREADS": "1"}
    environment.pop("EVCL_PLUGINS", None)
    python = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist"]
    some = ["test_api.py", "test_metrics.py", "test_release.py", "report/test_report.py", "experiments/test_presets.py"]
    parts = [str(unpacked / "tests" / name) for name in some]
    ran = subprocess.run([*python, *parts], cwd=unpacked, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:]
    found = [*python, "--collect-only", "-m", "not soak"]
    ran = subprocess.run(found, cwd=unpacked, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:]


@full
def test_twine_has_nothing_to_say(built):
    if shutil.which("twine") is None:
        pytest.skip("twine is not installed: the workflow of the public forge runs it")
    ran = subprocess.run(["twine", "check", "--strict", *map(str, built)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
