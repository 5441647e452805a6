"""Writing and reading models: one family of safetensors files, of tensors and JSON, for learners, tables and streams.

`write` and `opened` are for every kind of file. A learner is described by `described`, and `rebuilt` from that: every
value is checked, and no code from a file is run. All names of earlier formats are in this file.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from evcl._core.bounds import MOST_HEADS
from evcl._core.density import Density
from evcl._core.errors import EvclError
from evcl._core.files import described as text_of
from evcl._core.files import open_tensors, save_tensors
from evcl._core.forms import Form
from evcl._core.settings import Settings, renamed, resolve
from evcl._core.version import __version__
from evcl.methods import Method, for_settings, known_settings, packing
from evcl.methods import get as get_method
from evcl.methods.parts import in_force
from evcl.nn import MLP, Layout, LoRA, Prior, head_names
from evcl.nn.columns import first_column
from evcl.nn.inputs import Output
from evcl.nn.lora import adapter_tensors, base_hash
from evcl.targets import CATEGORICAL, ENERGIES, LIKELIHOODS, Energy
from evcl.training import Given, Run
from evcl.training.account import Account
from evcl.training.session import Group, Session

if TYPE_CHECKING:
    from evcl.learner.learner import Learner


FORMAT = 2
Described = dict[str, Any]  # a learner as its file describes it, in JSON


def write(
    path: str | os.PathLike[str],
    described: tuple[Described, Mapping[str, Tensor]],
    notes: Mapping[str, str],
    name: str = "evcl",
) -> None:
    """Write a description, under this name, and tensors. `notes` are further texts for the file's metadata."""
    save_tensors(path, described[1], {**notes, name: json.dumps(described[0])})


@contextmanager
def opened(path: str | os.PathLike[str], name: str) -> Iterator[tuple[Any, Any]]:
    """The description of this name in a file, None if there is none, and the open file. Inside this context, whatever
    is wrong with it is reported in one line.
    """
    with reading(path) as readable, open_tensors(readable) as file:
        yield text_of(file, name), file


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Inside this context, whatever is wrong with a learner's file is reported in one line."""
    try:
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError
    except (OSError, TypeError, ValueError):
        raise EvclError(f"there is no file {path}") from None
    try:
        yield path
    except SafetensorError as error:
        raise EvclError(f"cannot load {path}: it is cut short or not a safetensors file ({error})") from error
    except OSError as error:
        raise EvclError(f"cannot read {path}: {error.strerror or error}") from error
    except EvclError as error:
        raise EvclError(f"cannot load {path}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise EvclError(f"cannot load {path}: it is damaged ({type(error).__name__} {error})") from error


def upgraded(saved: Described, tensors: Mapping[str, Tensor]) -> tuple[Described, dict[str, Tensor]]:
    """A file's description and tensors, in the current format."""
    if saved["format"] == FORMAT:
        return dict(saved), dict(tensors)
    if saved["format"] != 1:
        raise EvclError(f"the file has format {saved['format']!r}, but this version of evcl reads only 1 and {FORMAT}")
    settings = dict(saved["settings"])
    method = get_method(saved["method"])
    if "fisher_spread" in method.known_settings:
        settings.setdefault("fisher_spread", 0.0)  # before this setting existed, nothing was spread
    if "distill" in method.known_settings:
        settings.setdefault("distill", 0.0)
    new_tensors = {name: t for name, t in tensors.items() if name.startswith(("posterior.", "statistics.", "kept."))}
    memory = _from_1(for_settings(method, Settings(settings)).memory, "memory/", saved, tensors, new_tensors)
    return {**saved, "format": FORMAT, "settings": settings, "memory": [memory]}, new_tensors


def _from_1(
    memory: type, path: str, saved: Described, tensors: Mapping[str, Tensor], found: dict[str, Tensor]
) -> Described:
    """Convert format 1 (evcl 0.1): each run stored a prior, an importance and `used`, and separately its coresets and
    a copy of the weights tuned on them.
    """
    described: Described = {}
    for one in fields(memory):
        at = f"{path}{one.name}"
        if one.name == "inner":
            described["inner"] = _from_1(one.type, f"{at}/", saved, tensors, found)  # type: ignore[arg-type]
        elif one.name in ("prior", "tuned"):
            source = "posterior" if f"{one.name}.mean" not in tensors else one.name
            parts = [tensors.get(f"{source}.{part}") for part in ("mean", "log_std")]
            described[one.name] = {"gaussian": [None if part is None else "tensor" for part in parts]}
            pairs = zip(("mean", "log_std"), parts, strict=True)
            found |= {f"{at}/{part}": tensor for part, tensor in pairs if tensor is not None}
        elif one.name in ("rows", "beta", "factors"):  # format 1 had none, and beta was constant
            described[one.name] = {"dict": {}}
        elif one.name in ("importance", "used"):
            described[one.name], found[at] = "tensor", tensors[one.name].expand_as(tensors["posterior.mean"]).clone()
        elif one.name != "classes":  # format 1 had none
            described[one.name] = _coresets(at, saved, tensors, found)
    return {"fields": described}


def _coresets(at: str, saved: Described, tensors: Mapping[str, Tensor], found: dict[str, Tensor]) -> list[Any]:
    """The coreset of each task."""
    heads = [name for name, _ in saved["heads"]]
    described = []
    for i, (_, head) in enumerate(saved["tasks"]):
        found |= {f"{at}/{i}/{part}": tensors[f"coreset {i}.{part}"] for part in ("x", "y")}
        about = {"x": "tensor", "y": "tensor", "weights": None, "head": heads.index(head), "task": i}
        described.append({"examples": about})
    return described


DENSITY = "density."  # in a file, the prefix of the tensors that describe the density of the rows learned from
ACCOUNT = "account."  # in a file, the prefix of sketches of Fishers: see training/account.py
FROZEN = "kept."  # in a file, the prefix of the trunk's tensors outside the posterior: frozen layers, buffers
FIRST_PREFIX = "first."  # in a file, the prefix of the tensors that every new column of a network starts from
BESIDE = "summary."  # in a file, the prefix of tensors that are not the learner's: see tables/earlier.py
FUNCTION = "function"  # in a file, in place of an `output` that is a function
OWN_PRIOR = "given"  # in a file, in place of a first prior of the user's own


def about(learner: Learner) -> Described:
    """The part of the description that a card needs."""
    network, session = learner.state.run.network, learner.state.session
    return {
        "method": learner.method.name,
        "settings": dict(learner.settings),
        **in_force(learner.state.run.method, learner.settings),
        "seed": learner.seed,
        "dtype": str(network.posterior.mean.dtype),
        "trunk": [[name, list(network.layout.shapes[name])] for name in network.trunk_names],
        "features": network.layout.shapes[head_names(0)["weight"]][1] if network.heads else 0,
        "heads": [[name, classes] for name, classes in session.heads.items()],
        "tasks": [[name, head] for name, head in session.tasks.items()],
    }


def card_of(learner: Learner) -> Described:
    """The card: see `Learner.card`."""
    description = {**about(learner), "records": list(learner.state.records), "versions": versions()}
    if learner.state.adapters is not None:
        description["base"] = base_of(learner)
    return card(description, learner.evaluate_kept() if learner.tasks else None)


def base_of(learner: Learner) -> str:
    """The sha256 of the base model that adapters are added to."""
    return base_hash(learner.state.run.network.trunk, learner.state.adapters)


def described(learner: Learner) -> tuple[Described, dict[str, Tensor]]:
    """The description, which JSON can hold, and the tensors: see `Learner.described`."""
    run, plain, session = learner.state.run, learner.state.plain, learner.state.session
    mlp = plain.described() if isinstance(plain, MLP) else None
    description: Described = {
        **about(learner),
        "format": FORMAT,
        "rounds": run.rounds,  # with the seed, it determines every generator
        "drawn": run.drawn,  # whether the first weights are random: then the first task may take larger steps
        "prior": OWN_PRIOR if isinstance(run.prior, Prior) else run.prior,
        "memory": [run.outline()],
        "mlp": mlp,  # None: a network of the user's own
        "unsupported": run.how.unsupported,
        "precision": run.precision,
        "only": run.how.only,
        "skip": run.how.skip,
    }
    call = run.network.call
    if call.form is not None:
        description["form"] = call.form.described()
    if call.output is not None:
        description["output"] = [FUNCTION] if callable(call.output) else call.output
    if learner.state.records:
        description |= {"records": list(learner.state.records), "versions": versions()}
    if learner.state.shape is not None:
        description["shape"] = list(learner.state.shape)
    description |= run.likelihood.described(session.scales)
    if run.network.whole:
        description["outputs"] = run.network.whole
    if run.accumulate != 1:
        description["accumulate"] = run.accumulate
    description |= _described_groups(learner)
    if adapter_tensors(plain, learner.state.adapters) is not None:
        description["mlp"] = None  # the base model is not in the file
        lora = None if learner.state.adapters is None else learner.state.adapters.described()
        description |= {"adapters": lora, "base": base_of(learner)}
    return description, {name: t.detach().cpu().clone() for name, t in tensors_of(learner).items()}


def tensors_of(learner: Learner) -> dict[str, Tensor]:
    """The tensors of a learner's file, by name; they are the learner's own."""
    run, plain, session = learner.state.run, learner.state.plain, learner.state.session
    frozen = run.network.trunk.state_dict()
    if (ours := adapter_tensors(plain, learner.state.adapters)) is not None:
        frozen = {name: tensor for name, tensor in frozen.items() if name in ours}
    more = {f"{FROZEN}{name}": tensor for name, tensor in frozen.items()}
    if learner.method.trunk is not None and not (
        run.drawn and isinstance(plain, MLP)
    ):  # those of an mlp are drawn from the seed
        more |= {f"{FIRST_PREFIX}{name}": tensor for name, tensor in plain.state_dict().items()}
    if run.prior != "zero":
        more["centre"] = run.network.centre
    if run.network.width is not None:
        more["width"] = run.network.width
    if session.density is not None:
        more |= {f"{DENSITY}{name}": tensor for name, tensor in session.density.tensors().items()}
    if run.account is not None:
        more |= {f"{ACCOUNT}{name}": tensor for name, tensor in run.account.tensors().items()}
    return {**run.tensors(), **more}


def _described_groups(learner: Learner) -> Described:
    """The groups of classes and the domains of the heads; empty if every head is one group, all of it shown."""
    session = learner.state.session
    heads, groups, shown = session.heads, session.groups, session.shown
    if not any(len(some) > 1 for some in groups.values()) and not any(shown[k][0] < set(c) for k, c in heads.items()):
        return {}
    parts = {name: [one if one.domain else one[:2] for one in some] for name, some in groups.items()}
    rows = {name: [[c for c in classes if c in some] for some in shown[name]] for name, classes in heads.items()}
    each = {name: some if len(some) > 1 else some[0] for name, some in rows.items()}  # one list per domain
    return {"groups": parts, "shown": each, "seen": session.seen}


def restore_frozen(learner: Learner, frozen: dict[str, Tensor]) -> None:
    """Restore saved frozen layers and buffers, in the Bayesian network and in the plain copy beside it."""
    trunk, plain = learner.state.run.network.trunk, learner.state.plain
    own = trunk.state_dict()
    if (ours := adapter_tensors(plain, learner.state.adapters)) is not None:
        own = {name: tensor for name, tensor in own.items() if name in ours}
    if {name: t.shape for name, t in own.items()} != {name: t.shape for name, t in frozen.items()}:
        raise EvclError("the network does not fit the file: its frozen layers or buffers differ")
    for module in (trunk, plain):
        module.load_state_dict(frozen, strict=False)


SMALL_NETWORK = 2**18  # weights: 1 MB in float32
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
    with opened(path, "evcl") as (saved, file):
        if saved is None:
            raise EvclError(STREAM if "evcl_stream" in (file.metadata() or {}) else "it was not saved by evcl")
        names = [name for name in file.keys() if not name.startswith(BESIDE)]  # noqa: SIM118  (it is no dict)
        return rebuilt(saved, {name: file.get_tensor(name) for name in names}, network, output, likelihood)


def unpickled(
    kind: type[Learner],
    saved: Described,
    tensors: dict[str, Tensor],
    own: tuple[nn.Module | None, Output, Energy | None, torch.device],
    method: Method | None,
) -> Learner:
    """The inverse of `Learner.__reduce__`."""
    network, output, likelihood, device = own
    made = rebuilt(saved, tensors, network, output, likelihood, method)
    made.__class__ = kind
    return made.to(device)


def rebuilt(
    saved: Described,
    tensors: dict[str, Tensor],
    network: nn.Module | None = None,
    output: Output = None,
    likelihood: Energy | None = None,
    method: Method | None = None,
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
    method = method or get_method(saved["method"])
    # The file replaces every tensor of an mlp: until then, those of a large one have shapes but no memory. Without
    # memory, torch computes shapes with its compiler, whose import takes seconds.
    device = "cpu" if network is not None or weights <= SMALL_NETWORK else "meta"
    if network is None:
        network = _mlp(saved["mlp"], trunk if method.trunk is None else first_column(trunk)[0])
    more = {"output": _output(saved, output), "device": device, "likelihood": _likelihood(saved, likelihood)}
    learner = _learner(saved, method, network, trunk, tensors, more)
    del network
    _check_base(learner, saved)
    run = learner.state.run
    run.network.call.form = Form.from_description(saved["form"]) if "form" in saved else None
    run.drawn, run.prior = saved.get("drawn") is True, _prior(saved)
    known = checked(saved.get("records"), tasks)
    learner.state = replace(learner.state, shape=_shape(saved), records=tuple(known))
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
    session = learner.state.session
    session.heads, session.groups, session.tasks = heads, groups, tasks
    session.shown, session.seen = _used(saved, session)
    if seen := {name.removeprefix(DENSITY): t for name, t in tensors.items() if name.startswith(DENSITY)}:
        session.density = Density.from_tensors(seen)
    session.scales = run.likelihood.scales_in(saved, heads)
    run.account = Account.read(
        {name.removeprefix(ACCOUNT): t for name, t in tensors.items() if name.startswith(ACCOUNT)}, len(tasks)
    )
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
    kept = learner.state.run.kept_examples()
    for one in kept:
        if one.x.shape[2:] != kept[0].x.shape[2:]:
            raise EvclError("the inputs of its stored examples must all have one shape")
        if one.y.numel():
            learner.state.tested(one.x[0])


def _learner(
    saved: Described,
    method: Method,
    network: nn.Module,
    trunk: Layout,
    tensors: dict[str, Tensor],
    more: Described,
) -> Learner:
    """A learner with the file's options, which has learned nothing yet."""
    dtypes = {str(t): t for t in (torch.float32, torch.float64)}
    known = known_settings(method, saved["settings"])
    earlier = {"posterior": "diagonal"} if "posterior" in known else {}  # until 0.2, it was always diagonal
    options: Described = {
        **resolve(method.name, known, {**earlier, **renamed(saved["settings"])}),
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
    from evcl.learner.learner import Learner

    learner = Learner(network, method, **options)
    if left := _left_out(learner, trunk, tensors):
        options["skip"] = [*_names(saved.get("skip")), *left]
        learner = Learner(network, method, **options)
    return learner


def _check_heads(
    saved: Described,
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


def _whole(saved: Described) -> int:
    """The number of outputs of a network without heads; 0: it has heads."""
    outputs = saved.get("outputs", 0)
    if type(outputs) is not int or not 0 <= outputs < 2**31:
        raise EvclError("the number of its outputs must be a whole number")
    return outputs


def _likelihood(saved: Described, given: Energy | None) -> str | Energy:
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
    if learner.state.run.how.unsupported != "deterministic":
        return []
    more = [name for name in learner.state.run.network.trunk_names if name not in trunk.shapes]
    layers = dict.fromkeys(name.rpartition(".")[0] or name for name in more if f"{FROZEN}{name}" in tensors)
    return list(layers)


def _names(given: str | Iterable[str] | None) -> list[str]:
    return [given] if isinstance(given, str) else list(given or ())


def _shape(saved: Described) -> tuple[int, ...] | None:
    """The shape of an example; earlier files do not say."""
    shape = saved.get("shape")
    if shape is not None and not (isinstance(shape, list) and all(type(n) is int and 0 < n < 2**40 for n in shape)):
        raise EvclError("the shape of its inputs must be whole numbers")
    return None if shape is None else tuple(shape)


def _prior(saved: Described) -> str:
    """The centre of the trunk's first prior; earlier files do not say."""
    prior = saved.get("prior", "zero")
    if prior not in ("zero", "network", OWN_PRIOR):
        raise EvclError(f"its first prior must be zero, network or {OWN_PRIOR}, not {prior!r}")
    return str(prior)


def _restore_columns(learner: Learner, columns: int, rounds: int, tensors: dict[str, Tensor]) -> None:
    """Add the columns, and restore what later ones will start from. A file without that has an mlp, whose columns are
    drawn, or is older: then they start from the network that was passed.
    """
    if columns != max(1, rounds):
        raise EvclError("the number of its columns does not fit the number of its rounds")
    first = {name.removeprefix(FIRST_PREFIX): t for name, t in tensors.items() if name.startswith(FIRST_PREFIX)}
    if first:
        own = learner.state.plain.state_dict()
        fits = {name: t.shape for name, t in own.items()} == {name: t.shape for name, t in first.items()}
        if not fits or not all(packing.finite(t) for t in first.values()):
            raise EvclError("the first weights of a new column do not fit the network, or are not finite")
        learner.state.plain.load_state_dict(first)
    learner.state.run.grow_trunk(rounds)


def _restore_first_prior(learner: Learner, tensors: dict[str, Tensor]) -> None:
    """Restore the trunk's first prior: its centre, if it was the network's own weights, or all of it."""
    run = learner.state.run
    if run.prior == "zero":
        return
    centre, wanted = tensors["centre"], run.network.centre
    if centre.shape != wanted.shape or centre.dtype != wanted.dtype or not packing.finite(centre):
        raise EvclError(f"its first prior must be {wanted.dtype} {tuple(wanted.shape)} and finite")
    run.network.centre = centre
    if run.prior == OWN_PRIOR:
        width = tensors["width"]
        if width.shape != wanted.shape or width.dtype != wanted.dtype or not packing.finite(width):
            raise EvclError(f"the width of its first prior must be {wanted.dtype} {tuple(wanted.shape)} and finite")
        run.network.width = width
        run.settings = run.settled(learner.settings)  # posterior=auto depends on it


def _output(saved: Described, given: Output) -> Output:
    """Which output of the network is used: the file's choice, unless that was a function."""
    output = saved.get("output")
    if output == [FUNCTION]:
        if not callable(given):
            raise EvclError(
                "its output is a function, which is not in the file: pass it, load(path, network, output=...)"
            )
        return given
    if output is not None and type(output) not in (str, int):
        raise EvclError("its output must be a name or a number")
    if given is not None and given != output:
        raise EvclError(f"it was trained with output={output!r}, not {given!r}")
    return output


def _check_base(learner: Learner, saved: Described) -> None:
    if "base" in saved and base_of(learner) != saved["base"]:
        raise EvclError("its adapters belong to another base model: pass the network that they were trained on")


def _adapters(saved: Described) -> LoRA | None:
    given = saved.get("adapters")
    return None if given is None else LoRA(**given)


def _groups(saved: Described, heads: dict[str, list[Any]]) -> dict[str, list[Group]]:
    """The groups of classes of each head. Before there were groups, a head was one."""
    if "groups" not in saved:
        return {name: [Group(k, classes)] for k, (name, classes) in enumerate(heads.items())}
    groups = {
        name: [Group(k, list(classes), *domain) for k, classes, *domain in some]
        for name, some in saved["groups"].items()
    }
    if groups.keys() != heads.keys():
        raise EvclError("its groups of classes do not fit its heads")
    for name, classes in heads.items():
        grouped = {label for group in groups[name] for label in group.classes}
        distinct = all(group.classes and len(set(group.classes)) == len(group.classes) for group in groups[name])
        if not distinct or grouped != set(classes) or not all(type(group.number) is int for group in groups[name]):
            raise EvclError("its groups of classes do not fit its heads")
        numbered = [group.domain for group in groups[name]]
        if any(type(d) is not int or not 0 <= d <= max([-1, *numbered[:i]]) + 1 for i, d in enumerate(numbered)):
            raise EvclError("the domains of its groups are not in order")
    numbers = sorted(group.number for some in groups.values() for group in some)
    if numbers != list(range(len(numbers))):
        raise EvclError("its groups of classes do not fit its heads")
    return groups


def _used(saved: Described, session: Session) -> tuple[dict[str, list[set[Any]]], list[int]]:
    """For each head and each of its domains, the classes that some row had; and the network's heads that the tasks
    used.
    """
    domains = {name: 1 + max(group.domain for group in groups) for name, groups in session.groups.items()}
    classes_of = {
        name: [set(some) for some in (classes if domains[name] > 1 else [classes])]
        for name, classes in saved.get("shown", session.heads).items()
    }
    numbers = {name: [group.number for group in groups] for name, groups in session.groups.items()}
    seen = list(saved.get("seen", [numbers[head][0] for head in session.tasks.values()]))
    if {name: len(some) for name, some in classes_of.items()} != domains or not set(seen) <= {
        k for own in numbers.values() for k in own
    }:
        raise EvclError("its tasks do not fit its heads")
    return classes_of, seen


def _mlp(saved: Described | None, trunk: Layout) -> MLP:
    """The network described in the file, built only after its size is known to match the weights."""
    if saved is None:
        raise EvclError("the file was saved with your own network: pass it as load(path, network=...)")
    widths = [saved["inputs"], *saved["hidden"]]
    if trunk.size != sum((a + 1) * b for a, b in pairwise(widths)):
        raise EvclError("its network does not fit its weights")
    dropped = {name: saved[name] for name in ("dropout", "input_dropout") if name in saved}
    return MLP(saved["inputs"], saved["hidden"], **dropped)


Record = dict[str, Any]
"""What is known of one learned task."""


def versions() -> dict[str, str]:
    return {"evcl": __version__, "torch": str(torch.__version__).partition("+")[0], "python": platform.python_version()}


def now() -> str:
    """The time, to the minute, in UTC; or that of SOURCE_DATE_EPOCH, in seconds since 1970, for files that are the same
    whenever they are made.
    """
    given = os.environ.get("SOURCE_DATE_EPOCH", "")[:11]
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(int(given) if given.isdecimal() else None))


def fingerprint(mean: Tensor) -> str:
    """A short hash of the posterior's means [R, P]: whether a model started from another (see merging.py)."""
    return hashlib.blake2b(mean.detach().cpu().contiguous().numpy().tobytes(), digest_size=8).hexdigest()


def record(task: Given, epochs: int, run: Run, names: Sequence[str], new: int = 1) -> Record:
    """The record of a task that has just been learned, one of the last `new` of these tasks. It says nothing of this
    machine.
    """
    rows = task.rows()
    if isinstance(task.y, Tensor):  # targets that are not classes
        rows = {0: task.y.shape[0] * task.y.shape[1]}
    elif not any(task.y):  # no targets
        return record(task._replace(y=task.x), epochs, run, names, new)
    return {
        "task": task.name,
        "learned": now(),
        "examples": sum(rows.values()) // max(1, len(task.y) if task.counts is None else 1),
        "classes": 0 if isinstance(task.y, Tensor) else len(rows),
        "epochs": epochs,
        "posterior": fingerprint(run.network.posterior.mean),
        "resolved": run.resolved[0],
        **({} if run.account is None else run.account.described(names, new)),
    }


def checked(saved: Any, tasks: Mapping[str, str]) -> list[Record]:
    """The records in a file; earlier files have none. Raises if they cannot be read."""
    if saved is None:
        return []
    try:
        for one in saved:
            numbers = [one["examples"], one["classes"], one["epochs"], *(one.get("validation") or {}).values()]
            numbers += [
                *one.get("elbo", {}).values(),
                *(c for row in one.get("account", {}).values() for c in row.values()),
            ]
            if one["task"] not in tasks or not isinstance(one["learned"], str) or not all(map(_is_number, numbers)):
                raise ValueError
    except (TypeError, ValueError, KeyError, AttributeError):
        raise EvclError("the records of its tasks cannot be read") from None
    return list(saved)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def card(saved: Described, now: Mapping[str, float] | None = None) -> Described:
    """The card of a learner with this description (see `Learner.described`). `now`: the accuracy of tasks on the rows
    that are kept of them.
    """
    records = {one["task"]: one for one in saved.get("records") or ()}
    heads = {name: list(classes) for name, classes in saved["heads"]}
    tasks = []
    for name, head in saved["tasks"]:
        entry = {"task": name, "head": head, **records.get(name, {})}
        if now is not None and name in now:
            entry["now"] = now[name]
        tasks.append(entry)
    about: Described = {
        key: saved[key] for key in ("method", "parts", "rules", "seed", "settings", "dtype") if key in saved
    }
    weights = sum(math.prod(shape) for _, shape in saved["trunk"])
    outputs = sum(len(group[1]) for some in saved.get("groups", {}).values() for group in some)
    outputs = outputs or sum(map(len, heads.values()))
    return {
        **about,
        "weights": weights + (saved["features"] + 1) * outputs,
        **({"base": saved["base"]} if "base" in saved else {}),
        "heads": heads,
        "tasks": tasks,
        "versions": dict(saved.get("versions") or {}),
    }


def read_card(path: str | os.PathLike[str]) -> Described:
    """The card of a saved learner, read without its network. What earlier tasks are at now is not in it: for that,
    load the learner.
    """
    with opened(path, "evcl") as (saved, _):
        if saved is None:
            raise EvclError("it was not saved by evcl")
        checked(saved.get("records"), dict(saved["tasks"]))
        return card(saved)
