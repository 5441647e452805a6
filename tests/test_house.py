"""How large and how entangled the library may be. These budgets only go down: what makes one smaller lowers it here."""

from __future__ import annotations

import ast
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from subprocess import run

import pytest

HERE = Path(__file__).parent
SOURCE = HERE.parent / "src" / "evcl"
BUDGETS = {
    "lines of src": 52_046,
    "private names of other objects": 0,
    "branches on the kind of a target": 3,
    "functions with more than 8 parameters": 15,
    "Any": 329,
    "lines of tests": 42_465,
}
WALKS = {  # how many functions and classes are entered for the first time, and in how many files
    "learn a second task": (450, 62),
    "learn a row": (74, 13),
    "evcl run": (925, 122),
    "evcl learn": (1127, 150),
    "evcl report": (230, 30),
}
KINDS = {"CATEGORICAL", "BERNOULLI", "NEXT_TOKEN", "GAUSSIAN", "POISSON"}
LIKELIHOODS = ("Likelihood", "Categorical", "Gaussian(", "Poisson", "Bernoulli", "Energy", "NegativeBinomial")
NOT_OURS = {"_replace", "_asdict", "_fields", "_make", "_field_defaults"}  # public names of a NamedTuple
NOT_OURS |= {
    "_version",
    "_base",
    "_modules",
    "_parameters",
    "_buffers",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_non_persistent_buffers_set",
    "_apply",
    "_is_view",
    "_C",
}  # torch's


def modules_named(tree: ast.AST) -> set[str]:
    """The names under which a file knows modules, of which private names are none of an object's."""
    imported = (node for node in ast.walk(tree) if isinstance(node, ast.Import))
    return {(alias.asname or alias.name).split(".")[0] for node in imported for alias in node.names} | {"_foreach"}


def private(node: ast.AST, modules: set[str]) -> bool:
    """Whether this is `other._name`."""
    if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
        return False
    owner = node.value
    if isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and owner.func.id == "super":
        return False
    if isinstance(owner, ast.Attribute) and ast.unparse(owner).startswith("torch."):
        return False
    return not (isinstance(owner, ast.Name) and owner.id in {"self", "cls", *modules}) and node.attr not in NOT_OURS


def branches(node: ast.AST) -> bool:
    """Whether this asks what kind of target there is: by identity, or by the class of a likelihood."""
    if isinstance(node, ast.Compare) and any(isinstance(sign, ast.Is | ast.IsNot) for sign in node.ops):
        return any(isinstance(side, ast.Name) and side.id in KINDS for side in (node.left, *node.comparators))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
        asked = ast.unparse(node.args[1])
        return any(name in f"{asked}(" for name in LIKELIHOODS) and "posterior" not in asked
    return False


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    about = node.args
    named = [one.arg for one in (*about.posonlyargs, *about.args, *about.kwonlyargs)]
    return len(named) - (named[:1] in (["self"], ["cls"])) + bool(about.vararg) + bool(about.kwarg)


def traits(path: Path) -> Iterator[str]:
    """Each thing in a file of src that a budget counts."""
    tree = ast.parse(path.read_text("utf-8"))
    modules = modules_named(tree)
    for node in ast.walk(tree):
        if private(node, modules):
            yield "private names of other objects"
        if branches(node) and SOURCE / "targets" not in path.parents:
            yield "branches on the kind of a target"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and parameters(node) > 8:
            yield "functions with more than 8 parameters"
        if isinstance(node, ast.Name) and node.id == "Any":
            yield "Any"


def lines(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.rglob("*.py"))


def test_the_house_is_within_its_budgets():
    found = Counter(chain.from_iterable(map(traits, SOURCE.rglob("*.py"))))
    found |= {"lines of src": lines(SOURCE), "lines of tests": lines(HERE)}
    assert {name: found[name] for name in BUDGETS if found[name] > BUDGETS[name]} == {}


def test_every_package_says_what_comes_in_what_goes_out_and_what_may_be_touched():
    abouts = {path: ast.get_docstring(ast.parse(path.read_text("utf-8"))) for path in SOURCE.glob("**/*/__init__.py")}
    words = ("In: ", " Out: ", "To change: ")
    assert [path for path, about in abouts.items() if not all(word in (about or "") for word in words)] == []


# Each walk is made in a copy of a process that has imported torch, or nothing for the report, which needs no torch.
PROGRAM = """
import contextlib, io, json, os, sys

FOLDER = {source!r}
entered = dict()

def note(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(FOLDER) and code.co_name[0] != "<":
        entered.setdefault(code)

def walk(name, function):
    entered.clear()
    with contextlib.redirect_stdout(io.StringIO()):
        sys.setprofile(note)
        try:
            function()
        except SystemExit as stop:
            assert not stop.code, stop.code
        finally:
            sys.setprofile(None)
    sys.stdout.write(json.dumps([name, len(entered), len({{code.co_filename for code in entered}})]) + "\\n")

def command(*arguments):
    def call():
        from evcl.cli import main
        sys.argv = ["evcl", *arguments]
        main()
    return call

def apart(function):
    sys.stdout.flush()
    child = os.fork()
    if not child:
        status = 1
        try:
            function()
            sys.stdout.flush()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0

def in_python():
    import numpy as np
    import evcl
    tasks = list(evcl.benchmarks.get("split-digits", 1, 2))
    learner = evcl.Learner(evcl.nn.mlp(64, [100, 100]), epochs=2)
    learner.learn(tasks[0])
    walk("learn a second task", lambda: learner.learn(tasks[1]))
    stream, x = evcl.Stream(), np.random.default_rng(0).normal(size=(101, 3))
    for row in x[:100]:
        stream.learn(row, int(row[0] > 0))
    walk("learn a row", lambda: stream.learn(x[100], int(x[100][0] > 0)))

apart(lambda: walk("evcl report", command("report", "results")))
import torch
apart(in_python)
run = command("run", "split-digits", "--method", "evcl", "--seeds", "1", "--tasks", "2", "--epochs", "2", "--out", "r")
apart(lambda: walk("evcl run", run))
apart(lambda: walk("evcl learn", command("learn", "--model", "m", "--data", "x.csv", "--target", "y", "--epochs", "2")))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_walk_through_the_house_is_no_longer_than_its_budget(evcl, tmp_path):
    rows = (f"{(k * 37 % 100) / 10},{'pq'[k % 3 > 1]},{('no', 'yes')[k * 37 % 100 > 50]}" for k in range(300))
    (tmp_path / "x.csv").write_text("\n".join(["a,b,y", *rows]))
    for method in ("evcl", "naive"):
        folder = f"results/{method}"
        options = ("--seeds", 1, "--tasks", 2, "--epochs", 1, "--out", folder)
        assert evcl("run", "split-digits", "--method", method, *options)[0] == 0
    program = PROGRAM.format(source=str(SOURCE))
    ended = run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ended.returncode == 0, ended.stderr
    found = {name: counts for name, *counts in map(json.loads, ended.stdout.splitlines())}
    assert found.keys() == WALKS.keys()
    over = [name for name in WALKS if any(n > most for n, most in zip(found[name], WALKS[name], strict=True))]
    assert over == [], found
