"""Loading a saved learner: every value in the file is checked, and no code from it is run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from evcl._core.bounds import MOST_HEADS
from evcl._core.density import Density
from evcl._core.errors import EvclError
from evcl._core.files import described, open_tensors
from evcl._core.forms import Form
from evcl._core.settings import resolve
from evcl.callbacks import Epoch
from evcl.learner.card import checked
from evcl.learner.describing import BESIDE, DENSITY, FIRST, FROZEN, FUNCTION, GIVEN, base_of, restore_frozen, tensors_of
from evcl.learner.learner import Learner
from evcl.learner.saved import reading, upgraded
from evcl.methods import Method, known_settings, packing
from evcl.methods import get as get_method
from evcl.nn import MLP, Layout, LoRA
from evcl.nn.columns import first_column
from evcl.nn.inputs import Output
from evcl.targets import CATEGORICAL, ENERGIES, LIKELIHOODS, Energy
from evcl.training.session import Group, Session

SMALL = 2**18  # weights: 1 MB in float32
STREAM = "it is a stream, not a learner: use evcl.Stream.load, or evcl stream, predict and inspect"


def load(
    path: str | os.PathLike[str],
    network: nn.Module | None = None,
    output: Output = None,
    likelihood: Energy | None = None,
) -> Learner:
    """Load a saved learner, ready to predict and to continue learning. No code from the file is run.

    If the network is not an `evcl.nn.mlp`, pass it; its names and shapes are checked against the file. If the learner's
    `output` was a function, or its `likelihood` an energy of your own, pass that too: functions are not saved.
    """
    with reading(path) as found, open_tensors(found) as file:
        saved = described(file, "evcl")
        if saved is None:
            raise EvclError(STREAM if "evcl_stream" in (file.metadata() or {}) else "it was not saved by evcl")
        names = [name for name in file.keys() if not name.startswith(BESIDE)]  # noqa: SIM118  (it is no dict)
        return rebuilt(saved, {name: file.get_tensor(name) for name in names}, network, output, likelihood)


def unpickled(
    kind: type[Learner],
    saved: dict[str, Any],
    tensors: dict[str, Tensor],
    own: tuple[nn.Module | None, Output, Energy | None, torch.device],
    history: Mapping[str, tuple[Epoch, ...]],
) -> Learner:
    """The inverse of `Learner.__reduce__`."""
    network, output, likelihood, device = own
    made = rebuilt(saved, tensors, network, output, likelihood)
    made.__class__ = kind
    made.parts = replace(made.parts, history=history)
    return made.to(device)


def rebuilt(
    saved: dict[str, Any],
    tensors: dict[str, Tensor],
    network: nn.Module | None = None,
    output: Output = None,
    likelihood: Energy | None = None,
) -> Learner:
    """The learner with this description (see `Learner.described`), on the CPU. Earlier formats are upgraded first."""
    saved, tensors = upgraded(saved, tensors)
    trunk = Layout({name: tuple(shape) for name, shape in saved["trunk"]})
    heads = {name: list(classes) for name, classes in saved["heads"]}
    tasks = dict(saved["tasks"])
    groups = _groups(saved, heads)
    sizes = dict(sorted((group.number, len(group.classes)) for some in groups.values() for group in some))
    whole = _whole(saved)
    weights = trunk.size + (0 if whole else sum((saved["features"] + 1) * size for size in sizes.values()))
    _check_heads(saved, tensors, heads, tasks, weights)
    method = get_method(saved["method"])
    # The file replaces every tensor of an mlp: until then, those of a large one have shapes but no memory. Without
    # memory, torch computes shapes with its compiler, whose import takes seconds.
    device = "cpu" if network is not None or weights <= SMALL else "meta"
    if network is None:
        network = _mlp(saved["mlp"], trunk if method.trunk is None else first_column(trunk)[0])
    more = {"output": _output(saved, output), "device": device, "likelihood": _likelihood(saved, likelihood)}
    learner = _learner(saved, method, network, trunk, tensors, more)
    del network
    _check_base(learner, saved)
    run = learner.parts.run
    run.network.call.form = Form.from_description(saved["form"]) if "form" in saved else None
    run.drawn, run.prior = saved.get("drawn") is True, _prior(saved)
    known = checked(saved.get("records"), tasks)
    learner.parts = replace(learner.parts, shape=_shape(saved), records=tuple(known))
    if method.trunk is not None:
        _restore_columns(learner, first_column(trunk)[1], saved["rounds"], tensors)
    restore_frozen(learner, {name.removeprefix(FROZEN): t for name, t in tensors.items() if name.startswith(FROZEN)})
    if run.network.layout != trunk:
        ours, theirs = run.network.layout.shapes.items(), trunk.shapes.items()
        other = sorted(ours ^ theirs)[:1] or [("the order of the weights", ())]
        raise EvclError(f"the network does not fit the file: {other[0][0]} {other[0][1]} is in only one of them")
    _restore_first_prior(learner, tensors)
    run.network.whole = whole
    if not whole:
        run.add_heads(saved["features"], list(sizes.values()))
    run.add_task_weights(len(tasks))
    session = learner.parts.session
    session.heads, session.groups, session.tasks = heads, groups, tasks
    session.shown, session.seen = _used(saved, session)
    if seen := {name.removeprefix(DENSITY): t for name, t in tensors.items() if name.startswith(DENSITY)}:
        session.density = Density.from_tensors(seen)
    session.scales = run.likelihood.scales_in(saved, heads)
    if len(saved["memory"]) != 1:
        raise EvclError("its memory is not that of this method")
    (outline,) = saved["memory"]
    run.load_tensors(tensors, outline, saved["rounds"], session.seen)
    run.diverged = torch.zeros(1, dtype=torch.bool)
    _check_examples(learner)
    if unexplained := sorted(tensors.keys() - tensors_of(learner).keys()):
        raise EvclError(f"it has a tensor {unexplained[0]!r}, which is not part of the model")
    return learner


def _check_examples(learner: Learner) -> None:
    """Raise unless the network accepts the examples that the file has stored."""
    kept = learner.parts.run.kept_examples()
    for one in kept:
        if one.x.shape[2:] != kept[0].x.shape[2:]:
            raise EvclError("the inputs of its stored examples must all have one shape")
        if one.y.numel():
            learner.parts.tested(one.x[0])


def _learner(
    saved: dict[str, Any],
    method: Method,
    network: nn.Module,
    trunk: Layout,
    tensors: dict[str, Tensor],
    more: dict[str, Any],
) -> Learner:
    """A learner with the file's options, which has learned nothing yet."""
    dtypes = {str(t): t for t in (torch.float32, torch.float64)}
    options: dict[str, Any] = {
        **resolve(method.name, known_settings(method, saved["settings"]), saved["settings"]),
        "seed": saved["seed"],
        "init": "network",
        "unsupported": saved["unsupported"],
        "only": saved.get("only"),
        "skip": saved.get("skip"),
        "prior": "network" if saved.get("prior") == "network" else "zero",  # one of the user's own is restored later
        "accumulate": saved.get("accumulate", 1),
        "adapters": _adapters(saved),
        "dtype": dtypes[saved["dtype"]],
        "precision": saved.get("precision", "tf32"),
        **more,
    }
    learner = Learner(network, method, **options)
    if left := _left_out(learner, trunk, tensors):
        options["skip"] = [*_names(saved.get("skip")), *left]
        learner = Learner(network, method, **options)
    return learner


def _check_heads(
    saved: dict[str, Any],
    tensors: dict[str, Tensor],
    heads: dict[str, list[Any]],
    tasks: dict[str, str],
    weights: int,
) -> None:
    """Raise if the heads cannot be right; there should be this many weights."""
    if len(heads) > MOST_HEADS:
        raise EvclError(f"it has {len(heads):,} heads, but the maximum is {MOST_HEADS:,}")
    if tensors["posterior.mean"].shape != (1, weights) or not set(tasks.values()) <= set(heads):
        raise EvclError("its heads do not fit its weights")
    for classes in heads.values():
        if len(set(classes)) != len(classes) or {type(c) for c in classes} not in ({int}, {str}, {bool}):
            raise EvclError("a head's classes must all differ and be of one type")
    if not isinstance(saved["rounds"], int) or saved["rounds"] < 0:
        raise EvclError("rounds must be a whole number")


def _whole(saved: dict[str, Any]) -> int:
    """The number of outputs of a network without heads; 0: it has heads."""
    found = saved.get("outputs", 0)
    if type(found) is not int or not 0 <= found < 2**31:
        raise EvclError("the number of its outputs must be a whole number")
    return found


def _likelihood(saved: dict[str, Any], given: Energy | None) -> str | Energy:
    """What it learns: the file says, unless that was an energy of the user's own."""
    name = saved.get("likelihood", CATEGORICAL.name)
    if (name in LIKELIHOODS or name in ENERGIES) and given is None:
        return str(name)
    if given is None:
        raise EvclError(f"its likelihood is your own, {name!r}, which is not in the file: load(..., likelihood=...)")
    if given.name != name:
        raise EvclError(f"it was trained with likelihood={name!r}, not {given.name!r}")
    return given


def _left_out(learner: Learner, trunk: Layout, tensors: dict[str, Tensor]) -> list[str]:
    """The modules that unsupported="deterministic" left fixed when the file was saved, but that learn in this version:
    LSTM and GRU had no Bayesian form then. The file has their weights among those that do not learn.
    """
    if learner.parts.run.how.unsupported != "deterministic":
        return []
    more = [name for name in learner.parts.run.network.trunk_names if name not in trunk.shapes]
    found = dict.fromkeys(name.rpartition(".")[0] or name for name in more if f"{FROZEN}{name}" in tensors)
    return list(found)


def _names(given: Any) -> list[str]:
    return [given] if isinstance(given, str) else list(given or ())


def _shape(saved: dict[str, Any]) -> tuple[int, ...] | None:
    """The shape of an example; earlier files do not say."""
    found = saved.get("shape")
    if found is not None and not (isinstance(found, list) and all(type(n) is int and 0 < n < 2**40 for n in found)):
        raise EvclError("the shape of its inputs must be whole numbers")
    return None if found is None else tuple(found)


def _prior(saved: dict[str, Any]) -> str:
    """The centre of the trunk's first prior; earlier files do not say."""
    found = saved.get("prior", "zero")
    if found not in ("zero", "network", GIVEN):
        raise EvclError(f"its first prior must be zero, network or {GIVEN}, not {found!r}")
    return str(found)


def _restore_columns(learner: Learner, columns: int, rounds: int, tensors: dict[str, Tensor]) -> None:
    """Add the columns, and restore what later ones will start from. A file without that has an mlp, whose columns are
    drawn, or is older: then they start from the network that was passed.
    """
    if columns != max(1, rounds):
        raise EvclError("the number of its columns does not fit the number of its rounds")
    first = {name.removeprefix(FIRST): t for name, t in tensors.items() if name.startswith(FIRST)}
    if first:
        own = learner.parts.plain.state_dict()
        fits = {name: t.shape for name, t in own.items()} == {name: t.shape for name, t in first.items()}
        if not fits or not all(packing.finite(t) for t in first.values()):
            raise EvclError("the first weights of a new column do not fit the network, or are not finite")
        learner.parts.plain.load_state_dict(first)
    learner.parts.run.grow_trunk(rounds)


def _restore_first_prior(learner: Learner, tensors: dict[str, Tensor]) -> None:
    """Restore the trunk's first prior: its centre, if it was the network's own weights, or all of it."""
    run = learner.parts.run
    if run.prior == "zero":
        return
    found, wanted = tensors["centre"], run.network.centre
    if found.shape != wanted.shape or found.dtype != wanted.dtype or not packing.finite(found):
        raise EvclError(f"its first prior must be {wanted.dtype} {tuple(wanted.shape)} and finite")
    run.network.centre = found
    if run.prior == GIVEN:
        width = tensors["width"]
        if width.shape != wanted.shape or width.dtype != wanted.dtype or not packing.finite(width):
            raise EvclError(f"the width of its first prior must be {wanted.dtype} {tuple(wanted.shape)} and finite")
        run.network.width = width


def _output(saved: dict[str, Any], given: Output) -> Output:
    """Which output of the network is used: the file's choice, unless that was a function."""
    found = saved.get("output")
    if found == [FUNCTION]:
        if not callable(given):
            raise EvclError(
                "its output is a function, which is not in the file: pass it, load(path, network, output=...)"
            )
        return given
    if found is not None and type(found) not in (str, int):
        raise EvclError("its output must be a name or a number")
    if given is not None and given != found:
        raise EvclError(f"it was trained with output={found!r}, not {given!r}")
    return found


def _check_base(learner: Learner, saved: dict[str, Any]) -> None:
    if "base" in saved and base_of(learner) != saved["base"]:
        raise EvclError("its adapters belong to another base model: pass the network that they were trained on")


def _adapters(saved: dict[str, Any]) -> LoRA | None:
    given = saved.get("adapters")
    return None if given is None else LoRA(**given)


def _groups(saved: dict[str, Any], heads: dict[str, list[Any]]) -> dict[str, list[Group]]:
    """The groups of classes of each head. Before there were groups, a head was one."""
    if "groups" not in saved:
        return {name: [Group(k, classes)] for k, (name, classes) in enumerate(heads.items())}
    found = {
        name: [Group(k, list(classes), *domain) for k, classes, *domain in some]
        for name, some in saved["groups"].items()
    }
    if found.keys() != heads.keys():
        raise EvclError("its groups of classes do not fit its heads")
    for name, classes in heads.items():
        grouped = {label for group in found[name] for label in group.classes}
        distinct = all(group.classes and len(set(group.classes)) == len(group.classes) for group in found[name])
        if not distinct or grouped != set(classes) or not all(type(group.number) is int for group in found[name]):
            raise EvclError("its groups of classes do not fit its heads")
        numbered = [group.domain for group in found[name]]
        if any(type(d) is not int or not 0 <= d <= max([-1, *numbered[:i]]) + 1 for i, d in enumerate(numbered)):
            raise EvclError("the domains of its groups are not in order")
    numbers = sorted(group.number for some in found.values() for group in some)
    if numbers != list(range(len(numbers))):
        raise EvclError("its groups of classes do not fit its heads")
    return found


def _used(saved: dict[str, Any], session: Session) -> tuple[dict[str, list[set[Any]]], list[int]]:
    """For each head and each of its domains, the classes that some row had; and the network's heads that the tasks
    used.
    """
    domains = {name: 1 + max(group.domain for group in groups) for name, groups in session.groups.items()}
    shown = {
        name: [set(some) for some in (classes if domains[name] > 1 else [classes])]
        for name, classes in saved.get("shown", session.heads).items()
    }
    numbers = {name: [group.number for group in groups] for name, groups in session.groups.items()}
    seen = list(saved.get("seen", [numbers[head][0] for head in session.tasks.values()]))
    if {name: len(some) for name, some in shown.items()} != domains or not set(seen) <= {
        k for own in numbers.values() for k in own
    }:
        raise EvclError("its tasks do not fit its heads")
    return shown, seen


def _mlp(saved: dict[str, Any] | None, trunk: Layout) -> MLP:
    """The network described in the file, built only after its size is known to match the weights."""
    if saved is None:
        raise EvclError("the file was saved with your own network: pass it as load(path, network=...)")
    widths = [saved["inputs"], *saved["hidden"]]
    if trunk.size != sum((a + 1) * b for a, b in pairwise(widths)):
        raise EvclError("its network does not fit its weights")
    dropped = {name: saved[name] for name in ("dropout", "input_dropout") if name in saved}
    return MLP(saved["inputs"], saved["hidden"], **dropped)
