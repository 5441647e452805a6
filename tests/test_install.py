"""What works without the extras, what is said where one is missing, and which commands start without torch.

Each test starts a Python of its own: in this one everything is imported already.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import evcl as package
from evcl import experiments
from evcl._core.errors import EvclError, missing

OPTIONAL = [
    "PIL", "filelock", "matplotlib", "msgspec", "platformdirs", "pyarrow", "ray", "rich",
    "sklearn", "tensorboard", "tokenizers", "typer",
]  # fmt: skip


@pytest.fixture
def python(tmp_path):
    """Run a program in an empty folder, without the test's plugins and caches: (status, output, errors)."""
    source = str(Path(package.__file__).parent.parent)  # the evcl that is tested here, whatever is installed
    hidden = ("EVCL_", "XDG_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}

    def run(program):
        ran = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env={**environment, "HOME": str(tmp_path), "PYTHONPATH": source},
        )
        return ran.returncode, ran.stdout, ran.stderr

    return run


def command(*arguments, torch=False):
    """A program that runs a command, and fails if that imports torch, unless it may."""
    return f"""
import sys
from evcl.cli import main
sys.argv = ["evcl", *{arguments!r}]
try:
    main()
finally:
    assert {torch} or "torch" not in sys.modules
"""


def without_extras(program):
    return f"import sys\nsys.modules.update(dict.fromkeys({OPTIONAL!r}))\n{program}"


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["--help"], "Usage:"),
        (["run", "--help"], "--method"),
        (["--version"], f"evcl {package.__version__}\n"),
        (["list"], "split-digits"),
        (["list", "methods"], "Zenke et al."),
        (["data", "list"], "fashion-mnist"),
    ],
)
def test_a_command_that_trains_nothing_starts_without_torch(python, arguments, printed):
    status, out, err = python(command(*arguments))
    assert (status, err) == (0, "")
    assert printed in out


def test_a_learner_loads_only_the_part_of_the_library_that_it_uses(python):
    """No benchmarks, data sets, tables or streams; a method is imported when it is asked for."""
    program = """
import sys
import evcl

evcl.Learner
modules = {name for name in sys.modules if name.partition(".")[0] == "evcl"}
parts = {name.split(".")[1] for name in modules if "." in name}
print(len(modules) <= 120, sorted(parts & {"benchmarks", "data", "tables", "streams", "curvature", "experiments"}))
learner = evcl.Learner(evcl.nn.mlp(4, [8]), "si")
print("evcl.methods.si" in sys.modules, "evcl.methods.fromp" in sys.modules)
"""
    assert python(program) == (0, "True []\nTrue False\n", "")


def test_list_names_what_is_registered(python):
    """With a plugin, here one that registers nothing, `evcl list` reads the tables of methods and benchmarks."""
    status, registered, _ = python(command("list", "--plugin", "json", torch=True))
    assert status == 0
    assert python(command("list"))[1] == registered


def test_without_extras_a_model_learns_predicts_and_is_saved(python):
    program = """
import numpy as np
import evcl
from evcl import EVCL
from evcl.benchmarks import from_arrays
from evcl.methods import Method, register

x = np.random.default_rng(0).normal(size=(60, 4)).astype("float32")
y = np.where(x[:, 0] > 0, "up", "down")
learner = EVCL(evcl.nn.mlp(4, [8]), seed=0)
learner.learn(x, y, task="first", epochs=20)
assert (learner.predict(x) == y).mean() > 0.9
learner.save("model.safetensors")
again = evcl.load("model.safetensors")
assert (again.predictions(x).probabilities == learner.predictions(x).probabilities).all()

register(Method("mine", "of mine", bayesian=False))
numbers = (y == "up").astype(int)
stream = from_arrays([(x, numbers, x, numbers)])
mine = evcl.Learner(evcl.nn.mlp(4, [8]), "mine")
mine.learn(stream[0], epochs=1)
print(list(mine.evaluate(stream)))
"""
    assert python(without_extras(program)) == (0, "['0']\n", "")


def test_a_missing_extra_is_one_line_that_says_what_to_install(python):
    wanted = {
        "import evcl.sklearn": "evcl.sklearn needs scikit-learn: pip install 'evcl[tables]'",
        "import evcl.experiments": "evcl.experiments needs msgspec: pip install 'evcl[cli]'",
        "import evcl.report": "evcl.experiments needs msgspec: pip install 'evcl[cli]'",
        "evcl.benchmarks.get('split-digits')": ("the embedded digits come with scikit-learn: pip install 'evcl[data]'"),
        "evcl.benchmarks.get('split-mnist')": (
            "fetching a data set needs filelock, Pillow and rich: pip install 'evcl[data]'"
        ),
        "evcl.callbacks.TensorBoard('runs')": "this callback needs TensorBoard: pip install 'evcl[tensorboard]'",
        "import evcl.tables; evcl.tables.learn(Path('m'), Path('x.csv'), 'y')": (
            "locking a file needs filelock: pip install 'evcl[cli]'"
        ),
    }
    program = f"""
import evcl
from pathlib import Path
for statement in {list(wanted)!r}:
    try:
        exec(statement)
    except evcl.EvclError as error:
        print(error)
"""
    status, out, err = python(without_extras(program))
    assert (status, err) == (0, "")
    assert out.splitlines() == list(wanted.values())


def test_the_command_line_without_its_packages_is_one_line(python):
    status, out, err = python(without_extras(command("list")))
    assert (status, out) == (1, "")
    assert err == "evcl: the command line needs typer and rich: pip install 'evcl[cli]'\n"


@pytest.mark.parametrize("arguments", [["demo"], ["reproduce", "split-digits"]])
def test_what_ends_in_a_report_asks_for_its_packages_first(evcl, monkeypatch, tmp_path, arguments):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, err = evcl(*arguments)
    assert (status, out) == (1, "")
    assert err == "evcl: figures and the page need matplotlib and Jinja2: pip install 'evcl[report]'\n"
    assert not list(tmp_path.iterdir())


def test_a_missing_extra_is_told_by_a_process_that_trains():
    error = missing("data", "the digits need scikit-learn")
    assert isinstance(error, ImportError)
    told = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (type(told), str(told)) == (type(error), "the digits need scikit-learn: pip install 'evcl[data]'")
    assert isinstance(told, EvclError)


@pytest.mark.parametrize("module", [package, experiments], ids=lambda module: module.__name__)
def test_every_public_name_is_there_and_no_other(module):
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'EVLC'"):
        _ = module.EVLC
