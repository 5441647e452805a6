"""A learner's whole state as a description and tensors: what `save` writes, and `loading.py` reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from evcl._core.errors import EvclError
from evcl.learner import card
from evcl.learner.saved import FORMAT
from evcl.nn import MLP, Prior, head_names
from evcl.nn.lora import adapter_tensors, base_hash

if TYPE_CHECKING:
    from evcl.learner.learner import Learner

DENSITY = "density."  # in a file, the prefix of the tensors that describe the density of the rows learned from
FROZEN = "kept."  # in a file, the prefix of the trunk's tensors outside the posterior: frozen layers, buffers
FIRST = "first."  # in a file, the prefix of the tensors that every new column of a network starts from
BESIDE = "summary."  # in a file, the prefix of tensors that are not the learner's: see tables/earlier.py
FUNCTION = "function"  # in a file, in place of an `output` that is a function
GIVEN = "given"  # in a file, in place of a first prior of the user's own


def about(learner: Learner) -> dict[str, Any]:
    """The part of the description that a card needs."""
    network, session = learner.parts.run.network, learner.parts.session
    return {
        "method": learner.method.name,
        "settings": dict(learner.settings),
        "seed": learner.seed,
        "dtype": str(network.posterior.mean.dtype),
        "trunk": [[name, list(network.layout.shapes[name])] for name in network.trunk_names],
        "features": network.layout.shapes[head_names(0)["weight"]][1] if network.heads else 0,
        "heads": [[name, classes] for name, classes in session.heads.items()],
        "tasks": [[name, head] for name, head in session.tasks.items()],
    }


def card_of(learner: Learner) -> dict[str, Any]:
    """The card: see `Learner.card`."""
    told = {**about(learner), "records": list(learner.parts.records), "versions": card.versions()}
    if learner.parts.adapters is not None:
        told["base"] = base_of(learner)
    return card.card(told, learner.evaluate_kept() if learner.tasks else None)


def base_of(learner: Learner) -> str:
    """The sha256 of the base model that adapters are added to."""
    return base_hash(learner.parts.run.network.trunk, learner.parts.adapters)


def described(learner: Learner) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description, which JSON can hold, and the tensors: see `Learner.described`."""
    run, plain, session = learner.parts.run, learner.parts.plain, learner.parts.session
    mlp = plain.described() if isinstance(plain, MLP) else None
    description: dict[str, Any] = {
        **about(learner),
        "format": FORMAT,
        "rounds": run.rounds,  # with the seed, it determines every generator
        "drawn": run.drawn,  # whether the first weights are random: then the first task may take larger steps
        "prior": GIVEN if isinstance(run.prior, Prior) else run.prior,
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
    if learner.parts.records:
        description |= {"records": list(learner.parts.records), "versions": card.versions()}
    if learner.parts.shape is not None:
        description["shape"] = list(learner.parts.shape)
    description |= run.likelihood.described(session.scales)
    if run.network.whole:
        description["outputs"] = run.network.whole
    if run.accumulate != 1:
        description["accumulate"] = run.accumulate
    description |= _groups(learner)
    if adapter_tensors(plain, learner.parts.adapters) is not None:
        description["mlp"] = None  # the base model is not in the file
        lora = None if learner.parts.adapters is None else learner.parts.adapters.described()
        description |= {"adapters": lora, "base": base_of(learner)}
    return description, {name: t.detach().cpu().clone() for name, t in tensors_of(learner).items()}


def tensors_of(learner: Learner) -> dict[str, Tensor]:
    """The tensors of a learner's file, by name; they are the learner's own."""
    run, plain, session = learner.parts.run, learner.parts.plain, learner.parts.session
    frozen = run.network.trunk.state_dict()
    if (ours := adapter_tensors(plain, learner.parts.adapters)) is not None:
        frozen = {name: tensor for name, tensor in frozen.items() if name in ours}
    more = {f"{FROZEN}{name}": tensor for name, tensor in frozen.items()}
    if learner.method.trunk is not None and not (
        run.drawn and isinstance(plain, MLP)
    ):  # those of an mlp are drawn from the seed
        more |= {f"{FIRST}{name}": tensor for name, tensor in plain.state_dict().items()}
    if run.prior != "zero":
        more["centre"] = run.network.centre
    if run.network.width is not None:
        more["width"] = run.network.width
    if session.density is not None:
        more |= {f"{DENSITY}{name}": tensor for name, tensor in session.density.tensors().items()}
    return {**run.tensors(), **more}


def _groups(learner: Learner) -> dict[str, Any]:
    """The groups of classes and the domains of the heads; empty if every head is one group, all of it shown."""
    session = learner.parts.session
    heads, groups, shown = session.heads, session.groups, session.shown
    if not any(len(some) > 1 for some in groups.values()) and not any(shown[k][0] < set(c) for k, c in heads.items()):
        return {}
    parts = {name: [one if one.domain else one[:2] for one in some] for name, some in groups.items()}
    rows = {name: [[c for c in classes if c in some] for some in shown[name]] for name, classes in heads.items()}
    each = {name: some if len(some) > 1 else some[0] for name, some in rows.items()}  # one list per domain
    return {"groups": parts, "shown": each, "seen": session.seen}


def restore_frozen(learner: Learner, frozen: dict[str, Tensor]) -> None:
    """Restore saved frozen layers and buffers, in the Bayesian network and in the plain copy beside it."""
    trunk, plain = learner.parts.run.network.trunk, learner.parts.plain
    own = trunk.state_dict()
    if (ours := adapter_tensors(plain, learner.parts.adapters)) is not None:
        own = {name: tensor for name, tensor in own.items() if name in ours}
    if {name: t.shape for name, t in own.items()} != {name: t.shape for name, t in frozen.items()}:
        raise EvclError("the network does not fit the file: its frozen layers or buffers differ")
    for module in (trunk, plain):
        module.load_state_dict(frozen, strict=False)
