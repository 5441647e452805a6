"""A model file whose memory was tampered with is refused in one line, whatever was done to it."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import evcl

X = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
Y = np.arange(40) % 2


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """EVCL with coresets: a memory inside a memory, Gaussians, tensors and examples."""
    path = tmp_path_factory.mktemp("model") / "m.safetensors"
    learner = evcl.EVCL(evcl.nn.mlp(4, [5]), epochs=1, coreset="random", coreset_size=6)
    learner.learn(X, Y)
    learner.learn(X, Y)
    learner.save(path)
    with safe_open(path, framework="pt") as file:
        description = json.loads(file.metadata()["evcl"])
    return path, description, load_file(path)


def refused(path, description, tensors):
    """The line, without where; None if it is taken."""
    save_file({name: t.contiguous() for name, t in tensors.items()}, path, {"evcl": json.dumps(description)})
    try:
        learner = evcl.load(path)
    except evcl.EvclError as error:
        line = str(error)
    else:
        assert np.isfinite(learner.predict_proba(X, 0)).all()
        return None
    assert "\n" not in line
    assert line.startswith(f"cannot load {path}: ")
    return line.removeprefix(f"cannot load {path}: ")


def test_it_is_what_is_mutated_here(saved, tmp_path):
    _, description, tensors = saved
    assert refused(tmp_path / "m", description, tensors) is None
    example = {"examples": {"x": "tensor", "y": "tensor", "weights": None, "head": 0, "task": 0}}
    gaussian = {"gaussian": ["tensor", "tensor"]}
    rows, beta = ({"dict": [[k, "tensor"] for k in keys]} for keys in ((0, 1), (-1, 0, 1)))
    inner = {"prior": gaussian, "importance": "tensor", "used": "tensor", "rows": rows, "beta": beta}
    factors = {"dict": [[f"{layer}.weight", ["tensor", "tensor"]] for layer in ("1", "head 0", "head 1")]}
    inner["factors"] = factors
    inner["classes"] = {"fields": {"classes": {"dict": []}, "common": {"dict": []}}}  # without a coreset alone
    second = {"examples": {**example["examples"], "head": 1, "task": 1}}
    outline = {"fields": {"inner": {"fields": inner}, "kept": [example, second], "tuned": gaussian}}
    assert description["memory"] == [outline]


# --- tensors -------------------------------------------------------------------------------------------------------

DAMAGE = {
    "it is gone": lambda t: None,
    "no rows": lambda t: t[:0],
    "two replicas": lambda t: t.repeat(2, *[1] * (t.dim() - 1)),
    "one number less": lambda t: t[:, :-1],
    "one column less": lambda t: t[..., 1:],
    "one axis more": lambda t: t.unsqueeze(-1),
    "one axis less": lambda t: t[..., 0],
    "another type": lambda t: t.double() if t.is_floating_point() else t.int(),
    "whole numbers": lambda t: t.long() if t.is_floating_point() else t.float(),
    "too large": lambda t: torch.full_like(t, 3e38) if t.is_floating_point() else torch.full_like(t, 2),
    "too small": lambda t: torch.full_like(t, -3e38) if t.is_floating_point() else torch.full_like(t, -1),
    "no numbers": lambda t: torch.full_like(t, torch.nan) if t.is_floating_point() else t.bool(),
    "infinite": lambda t: torch.full_like(t, torch.inf) if t.is_floating_point() else t.to(torch.uint8),
}
MEMORY = [
    "inner/prior/mean", "inner/prior/log_std", "inner/importance", "inner/used", "tuned/mean", "tuned/log_std",
    "kept/0/x", "kept/0/y", "kept/1/x", "kept/1/y",
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", MEMORY)
def test_a_tensor_of_the_memory(saved, tmp_path, name, damage):
    _, description, tensors = saved
    if name.endswith("/x") and damage in ("too large", "too small"):
        return  # inputs may be of any size
    found = DAMAGE[damage](tensors[f"memory/{name}"])
    changed = {key: t for key, t in tensors.items() if key != f"memory/{name}"}
    if found is not None:
        changed[f"memory/{name}"] = found
    assert refused(tmp_path / "m", description, changed)


# --- the outline ---------------------------------------------------------------------------------------------------


def places(node, path=()):
    """Where something stands in a tree of JSON."""
    yield path
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, inside in items:
        yield from places(inside, (*path, key))


def replaced(tree, path, value):
    if not path:
        return value
    tree = copy.deepcopy(tree)
    node = tree
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return tree


OTHERS = [
    None, "tensor", "x", 7, -1, 0.5, True, [], {}, [[]], ["tensor"], {"fields": {}}, {"gaussian": []},
    {"gaussian": ["tensor"]}, {"gaussian": [None, None]}, {"examples": {}}, {"model": [None, None]}, {"dict": []},
    {"dict": [[None, None]]}, {"dict": [["a", "tensor"]]}, {"a": 1, "b": 2}, {"odd": None},
]  # fmt: skip


@pytest.mark.full
def test_the_outline_of_the_memory(saved, tmp_path):
    _, description, tensors = saved
    taken, tried = [], 0
    for path in places(description["memory"]):
        for other in OTHERS:
            changed = replaced(description["memory"], path, other)
            if changed == description["memory"]:
                continue
            tried += 1
            if refused(tmp_path / "m", {**description, "memory": changed}, tensors) is None:
                taken.append((path, other))
    assert tried > 400
    # What is empty may be written as another empty thing. Leaving out what the file holds is refused: tensors are left.
    inner = (0, "fields", "inner", "fields")
    empty = [(*inner, "classes", "fields", name) for name in ("classes", "common")]
    assert taken == [((*at, "dict"), {}) for at in empty]


@pytest.mark.parametrize("path", [(), ("inner",), ("tuned",)], ids=str)
def test_a_field_too_many_and_one_too_few(saved, tmp_path, path):
    _, description, tensors = saved
    for change in ("more", "less"):
        memory = copy.deepcopy(description["memory"])
        node = memory[0]["fields"]
        for key in path:
            node = node[key]
        node = node.get("fields", node)
        if change == "more":
            node["more"] = None
        else:
            node.pop("classes", None)  # which files of earlier versions do not have
            node.popitem()
        assert refused(tmp_path / "m", {**description, "memory": memory}, tensors), change


@pytest.mark.parametrize(("end", "change"), [("x", lambda t: t[..., 1:]), ("", lambda t: torch.cat([t, t]))])
def test_examples_that_were_all_changed_alike(saved, tmp_path, end, change):
    """Inputs that the network does not take, and replicas that it does not have."""
    _, description, tensors = saved
    kept = {name: change(t) for name, t in tensors.items() if "kept/" in name and name.endswith(end)}
    assert refused(tmp_path / "m", description, {**tensors, **kept})


def test_the_memory_of_another_method(saved, tmp_path):
    _, description, tensors = saved
    line = refused(tmp_path / "m", {**description, "method": "vcl", "settings": {}}, tensors)
    wanted = "its memory has the fields ['inner', 'kept', 'tuned'], but this method's has ['beta', 'prior', 'rows']"
    assert line == wanted
    assert refused(tmp_path / "m", {**description, "memory": []}, tensors) == "its memory is not that of this method"
    assert refused(tmp_path / "m", {k: v for k, v in description.items() if k != "memory"}, tensors)
