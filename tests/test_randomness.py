"""The purposes of random numbers: their strings are part of every number that the library gives."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import pytest

import evcl
from evcl._core.randomness import Purpose, generator, weights_of
from evcl.methods import METHODS

SOURCES = sorted(Path(evcl.__file__).parent.rglob("*.py"))
PURPOSES = """
    init|init private|init generator|active column|output layer|redraw|gates|lora|features|feature|stream|order|noise
    gpu|length|loader|window|trial|validation|fisher|sensitivity|unlearned|agreement|doubt|taught|rivals|folds|domain
    mixtures|memory|kept|coreset|generated|predict|importance|sample|classifier|pseudo-rows|summary|permutation|test
    notmnist|digits|bbc|mails|hyperplane|led|rbf|rbf classes|rbf centres|policy weights|values weights|episode|actions
    random actions|measured actions|draw|thompson|replay|reservoir|film|settling|account
"""
TAKE = ("generator", "generators", "drawn", "noise", "_numbers", "of", "weights_of")  # functions that take a purpose
OPEN = {"init", "lora", "gpu", "stream", "bbc", "mails", "episode"}  # purposes of several things, each with its name


def test_the_strings_are_as_they_were():
    assert sorted(Purpose) == sorted(one.strip() for one in PURPOSES.replace("\n", "|").split("|") if one.strip())
    assert [Purpose.INIT.of("teacher"), weights_of("head 0.weight", "teacher"), weights_of("head 0.weight")] == [
        "init teacher",
        "teacher head 0.weight",
        "head 0.weight",
    ]


@pytest.mark.parametrize(
    ("key", "seed"),
    [
        ((0, Purpose.ORDER), 1831626777886060391),
        ((3, Purpose.NOISE, 2, 1), 313996859388595775),
        ((7, Purpose.INIT.of("teacher")), 899693435438849347),
        ((7, weights_of("head 0.weight"), 0), 4731221234570201896),
    ],
)
def test_a_generator_is_a_function_of_its_seed_purpose_and_indices(key, seed):
    assert generator(*key).initial_seed() == seed
    assert generator(key[0], str(key[1]), *key[2:]).initial_seed() == seed


def _calls():
    for path in SOURCES:
        text = path.read_text("utf-8")
        if path.name == "randomness.py" or ("generator" not in text and "Purpose" not in text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                yield path, name, node


def test_no_call_names_a_purpose_of_its_own():
    named = [
        f"{path}:{node.lineno} {ast.unparse(one)}"
        for path, name, node in _calls()
        if name in ("generator", "generators") or (name in TAKE and "Purpose" in ast.unparse(node))
        for one in [*node.args, *(word.value for word in node.keywords)]
        if isinstance(one, ast.JoinedStr) or (isinstance(one, ast.Constant) and isinstance(one.value, str))
    ]
    assert named == [], "a purpose is a line of evcl._core.randomness.Purpose"


def test_every_purpose_is_used_and_those_with_names_are_known():
    text = "\n".join(path.read_text("utf-8") for path in SOURCES)
    assert [one.name for one in Purpose if f"Purpose.{one.name}" not in text and "weights" not in one] == []
    opened = {one for one in Purpose if f"Purpose.{one.name}.of(" in text}
    assert opened == OPEN


def test_no_two_purposes_are_one():
    """A purpose with a name is never another purpose, nor the weights of a second network: checked where it is made."""
    for open_ in OPEN:
        for one in Purpose:
            if one.startswith(f"{open_} "):
                with pytest.raises(ValueError, match="is another purpose"):
                    Purpose(open_).of(one.removeprefix(f"{open_} "))
    assert not any(":" in one for one in Purpose)  # which separates seed, purpose and indices
    memories = {field.name for method in METHODS.values() for field in fields(method.memory)}
    assert not memories & OPEN
