"""Export of a learner: its mean network, or its predictions with their uncertainty, as an ONNX file or a torch.export
program (.pt2). Neither needs evcl to run.
"""

from __future__ import annotations

import json
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from evcl._core.density import Unfamiliar
from evcl._core.errors import EvclError, extra
from evcl._core.files import write_atomically
from evcl._core.forms import Form, Key
from evcl._core.settings import BAYESIAN
from evcl._core.version import __version__
from evcl.learner.plain import plain_networks
from evcl.methods.class_statistics import Likelihood, statistics_in
from evcl.nn import MLP
from evcl.training.predict import weight_draws

if TYPE_CHECKING:
    from evcl.learner.learner import Learner

WHAT = ("predictive", "mean")
SUFFIXES = (".onnx", ".pt2")
TRACED_ROWS = 2  # of the example that a network is traced with
TRACED_LENGTH = 4  # of its sequences
ONE_FILE = 1_800_000_000  # bytes; an ONNX file above 2 GB has its weights beside it, in FILE.data
TOLERANCE = 1e-3  # largest difference of a probability between the exported network and the learner


class Plan(NamedTuple):
    """How a network is traced."""

    together: bool = False  # all draws of the weights at once
    strict: bool = False  # by the code of `forward`, in which len(x) is then not a constant
    free: bool = True  # with sequences of any length


PLANS = (Plan(together=True), Plan(), Plan(strict=True), Plan(free=False), Plan(strict=True, free=False))


class Signature(NamedTuple):
    """The inputs of an exported network, in order: their places in `forward`, and their names in the file."""

    keys: tuple[Key, ...]
    names: tuple[str, ...]
    form: Form | None
    dtype: torch.dtype  # of the learner

    def call(self, network: Callable[..., Any], inputs: Sequence[Tensor]) -> Tensor:
        """Call a plain network as the learner would."""
        by_place = [x for key, x in zip(self.keys, inputs, strict=True) if isinstance(key, int)]
        named = {key: x for key, x in zip(self.keys, inputs, strict=True) if isinstance(key, str)}
        output: Tensor = network(*by_place, **named)
        return output

    def packed(self, inputs: Sequence[Tensor]) -> Tensor:
        """The inputs as the one tensor that a learner computes with."""
        if self.form is None:
            return inputs[0].to(self.dtype)
        return self.form.packed(dict(zip(self.keys, inputs, strict=True)), self.dtype)


class Mean(nn.Module):
    """The mean network."""

    outputs = ("logits",)

    def __init__(self, network: nn.Module, signature: Signature) -> None:
        super().__init__()
        self.network, self.signature = network, signature

    def forward(self, *inputs: Tensor) -> dict[str, Tensor]:
        return {"logits": self.signature.call(self.network, inputs)}


class Groups(nn.Module):
    """How the classes of a head are put together from its groups: see `Session.mixed_with_entropy`.

    For each group, `mixing` [its classes, the head's classes] has a 1 where a class of the head belongs to it.
    """

    def __init__(
        self, likelihood: Likelihood, base: nn.Module | None, sizes: Sequence[int], mixing: Sequence[Tensor]
    ) -> None:
        super().__init__()
        self.likelihood, self.base, self.sizes = likelihood, base, list(sizes)
        self.mixing = nn.ParameterList(mixing).requires_grad_(False)

    def probabilities(self, seen: Tensor) -> Tensor:
        """[N, groups], from what the likelihood sees of the inputs."""
        each = self.likelihood(seen).split(self.sizes, 1)
        return torch.stack([part.logsumexp(1) for part in each], 1).softmax(1)

    def forward(self, p: Tensor, entropy: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
        probabilities: Tensor | float = 0.0
        least = torch.finfo(p.dtype).tiny
        for g, (part, into) in enumerate(zip(p.split(self.sizes, 1), self.mixing, strict=True)):
            own = part @ into
            probabilities = probabilities + group[:, g : g + 1] * own / own.sum(1, keepdim=True).clamp_min(least)
        return torch.as_tensor(probabilities), _entropy(group) + (group * entropy).sum(1)


class Draws(nn.Module):
    """A plain network with `count` draws of its weights: inputs -> logits [draws, N, outputs].

    `weights` holds the weights that differ from draw to draw, [draws, ...] each. The network runs once on all of them
    (torch.func.vmap) or, if `one_by_one`, once for each: some layers, such as an LSTM, cannot use several weights at
    once.
    """

    one_by_one = True

    def __init__(self, networks: Iterable[nn.Module]) -> None:
        super().__init__()
        drawn = list(networks)
        each = [dict(one.named_parameters()) for one in drawn]
        self.network, self.count = drawn[0], len(drawn)
        differ = [name for name, p in each[0].items() if all(p is not one[name] for one in each[1:])]
        self.names = {name.replace(".", "/"): name for name in (differ if self.count > 1 else ())}
        for key, name in self.names.items():
            self.register_buffer(key, torch.stack([one[name].detach() for one in each]))

    def forward(self, call: Callable[[Callable[..., Any]], Tensor]) -> Tensor:
        """`call` runs a network on the inputs."""

        def run(weights: dict[str, Tensor]) -> Tensor:
            return call(lambda *args, **named: functional_call(self.network, weights, args, named))

        every = {name: self.get_buffer(key) for key, name in self.names.items()}
        if not every:
            return call(self.network).unsqueeze(0)
        if self.one_by_one:
            return torch.stack([run({name: w[s] for name, w in every.items()}) for s in range(self.count)])
        with sdpa_kernel(SDPBackend.MATH):  # vmap knows this kernel only
            outputs: Tensor = torch.func.vmap(run)(every)
        return outputs


class Predictive(nn.Module):
    """Predictions and their uncertainty, averaged over fixed draws of the weights: the fields of `Predictions`."""

    def __init__(
        self,
        draws: Draws | None,
        signature: Signature,
        sizes: Sequence[int],
        groups: Groups | None = None,
        density: Unfamiliar | None = None,
    ) -> None:
        super().__init__()
        self.draws, self.signature, self.sizes = draws, signature, list(sizes)
        self.groups, self.density = groups, density
        self.outputs = ("probabilities", "entropy", "aleatoric", "epistemic", *(("unfamiliar",) if density else ()))

    def forward(self, *inputs: Tensor) -> dict[str, Tensor]:
        p, aleatoric = self._mixed(inputs)
        entropy = _entropy(p)
        aleatoric = torch.minimum(aleatoric, entropy)
        answer = {"probabilities": p, "entropy": entropy, "aleatoric": aleatoric, "epistemic": entropy - aleatoric}
        if self.density is not None:
            doubt = entropy / math.log(max(2, p.shape[1]))
            answer["unfamiliar"] = self.density(self.signature.packed(inputs).flatten(1), doubt)
        return answer

    def _mixed(self, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Probabilities, and the mean entropy of the predictions of single draws."""
        signature, groups = self.signature, self.groups
        group = None
        if groups is not None:
            seen = signature.packed(inputs) if groups.base is None else signature.call(groups.base, inputs)
            if self.draws is None:  # the likelihood alone predicts
                p = groups.likelihood(seen).softmax(1)
                return p, _entropy(p)
            group = groups.probabilities(seen)
        assert self.draws is not None
        logits = self.draws(lambda network: signature.call(network, inputs))
        each = [z.softmax(2) for z in logits.split(self.sizes, 2)]
        p, entropy = torch.cat(each, 2).mean(0), torch.stack([_entropy(one).mean(0) for one in each], 1)
        return (p, entropy[:, 0]) if groups is None or group is None else groups(p, entropy, group)


def _entropy(p: Tensor) -> Tensor:
    return -(p * p.clamp_min(torch.finfo(p.dtype).tiny).log()).sum(-1)


def export(
    learner: Learner,
    path: str | os.PathLike[str],
    x: object = None,
    *,
    task: str | int | None = None,
    what: str = "predictive",
    samples: int | None = None,
    classes: Sequence[Any] | None = None,
    notes: Mapping[str, str] | None = None,
) -> None:
    """See `Learner.export`. `classes`: other names of the labels; `notes`: further texts for the file."""
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise EvclError(f"{path} should end in {' or '.join(SUFFIXES)}: ONNX, or a program of torch.export")
    if what not in WHAT:
        raise EvclError(f"what must be {' or '.join(map(repr, WHAT))}, not {what!r}")
    if not learner.state.run.likelihood.softmax:
        raise EvclError("only learners of classes can be exported: for other targets, use mean_network")
    if samples is not None:
        samples = int(BAYESIAN["predict_samples"].check("samples", samples))
    if path.suffix == ".onnx":
        with extra("onnx", "ONNX files need onnx and onnxscript"):
            import onnx  # noqa: F401
            import onnxscript  # noqa: F401
    learner.state.head(task)  # raises if there is none, or if a task must be chosen
    packed = _example(learner, x)
    with _tracing():
        module, inputs = _made(learner, packed, task, what, samples)
        module.eval()
        for p in module.parameters():
            p.requires_grad_(False)
        about = {
            "evcl": __version__,
            "method": learner.method.name,
            "task": learner.tasks[-1] if task is None else str(task) if isinstance(task, str) else learner.tasks[task],
            "what": what,
            "samples": module.draws.count if isinstance(module, Predictive) and module.draws is not None else 1,
            "classes": list(learner.classes(task) if classes is None else classes),
        }
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in about.items()}
        _write(path, module, inputs, {**(notes or {}), **{f"evcl.{key}": text for key, text in texts.items()}})


# --- the network to export --------------------------------------------------------------------------------------------


def _example(learner: Learner, x: object) -> Tensor:
    """A few rows as the learner computes with them: those given, or ones in the shape that it has learned from."""
    if x is not None:
        example = learner.state.inputs(x).cpu()[:TRACED_ROWS]
    else:
        shape, form = _shape(learner), learner.state.reader.call.form
        if shape is None:
            raise EvclError(
                "the file does not say which inputs the network takes: pass some, export(path, x), as to predict"
            )
        if form is not None and form.step:
            shape = (form.fixed + form.step * min(TRACED_LENGTH, (shape[0] - form.fixed) // form.step),)
        example = torch.ones(TRACED_ROWS, *shape, dtype=learner.state.reader.dtype)
    return example.repeat(TRACED_ROWS, *[1] * (example.dim() - 1))[:TRACED_ROWS]


def _shape(learner: Learner) -> tuple[int, ...] | None:
    """The shape of an example; None for a network of the user's own in a file of an earlier version."""
    if learner.state.shape is None and isinstance(learner.state.plain, MLP):
        return (learner.state.plain.inputs,)
    return learner.state.shape


def _made(
    learner: Learner, packed: Tensor, task: str | int | None, what: str, samples: int | None
) -> tuple[Mean | Predictive, list[Tensor]]:
    """The module, and inputs to trace it with."""
    if what == "mean":
        mean = learner.mean_network(task).cpu()
        signature, inputs = _signature(learner, packed, mean)
        return Mean(mean, signature), inputs
    run, session, number, head = (
        learner.state.run,
        learner.state.session,
        learner.state.number(task),
        learner.state.head(task),
    )
    groups = session.groups[head]
    heads, sizes = [one.number for one in groups], [len(one.classes) for one in groups]
    count = run.settings.get("predict_samples", 1) if samples is None else samples
    weights, base_weights = [], _base_weights(learner)
    if not learner.method.generative:
        weights = [w.cpu() for w in weight_draws(run.network, run.predictor(number), run.seeds, count, heads)]
    drawn = [one.cpu() for one in plain_networks(learner, [*weights, *base_weights], heads, number)]
    base = drawn.pop() if base_weights else None
    draws = Draws(drawn) if drawn else None
    if base is not None:
        base[1] = nn.Identity()  # features, not logits
    signature, inputs = _signature(learner, packed, draws.network if draws is not None else base)
    mixing = None
    if len(groups) > 1 or learner.method.generative:
        mixing = _groups(learner, head, base, packed if base is None else signature.call(base, inputs))
    density = session.density
    far = None if density is None or len(density.mean) != packed[0].numel() else Unfamiliar(density)
    module = Predictive(draws, signature, sizes, mixing, far)
    _check(learner, module, packed, inputs, [w.to(run.network.posterior.mean) for w in weights], task)
    return module, inputs


def _signature(learner: Learner, packed: Tensor, network: nn.Module | None) -> tuple[Signature, list[Tensor]]:
    """What the exported network takes, and an example of it."""
    form, dtype, arguments = learner.state.reader.call.form, learner.state.reader.dtype, learner.state.reader.arguments
    if form is not None:
        args, named = form.unpack(packed)
        keys: tuple[Key, ...] = (*range(len(args)), *named)
        names = [arguments.names[key] if isinstance(key, int) and key < len(arguments.names) else key for key in keys]
        texts = tuple(name if isinstance(name, str) else f"input_{name}" for name in names)
        return Signature(keys, texts, form, dtype), [*args, *named.values()]
    signature = Signature((0,), (arguments.names[0] if arguments.names else "input",), None, dtype)
    try:
        with torch.no_grad():
            if network is not None:
                signature.call(network, [packed])
    except (RuntimeError, TypeError, IndexError):  # its inputs are indices
        return signature, [packed.long()]
    return signature, [packed]


def _base_weights(learner: Learner) -> list[Tensor]:
    """The weights [1, P] of the network whose features the likelihood per class sees; none if it sees the inputs."""
    network = learner.state.run.network
    if network.trunk_names and not network.base_features:
        return []
    weights = network.posterior.mean
    return [(network.without_adapters(weights) if network.base_features else weights).cpu()]


def _groups(learner: Learner, head: str, base: nn.Module | None, seen: Tensor) -> Groups:
    """The likelihood that tells the groups of a head apart."""
    session = learner.state.session
    groups, classes = session.groups[head], session.heads[head]
    statistics, heads = statistics_in(learner.state.run.memory), [one.number for one in groups]
    numbers = math.prod(seen.shape[1:])
    if statistics is None or not all(k in statistics.classes for k in heads):
        raise EvclError(f"{learner.method.name} tells the classes of this head apart in a way that cannot be exported")
    if statistics.common["centre"].shape[1] != numbers:
        raise EvclError(f"the classes are told apart by inputs of another shape than these, {tuple(seen.shape[1:])}")
    mixing = []
    for g, one in enumerate(groups):
        into = seen.new_zeros(len(one.classes), len(classes))
        for label, (owner, position) in session.owners(head, one.domain).items():
            if owner == g:
                into[position, classes.index(label)] = 1
        mixing.append(into)
    likelihood = Likelihood(statistics, learner.seed, seen.shape[1:], heads).cpu()
    return Groups(likelihood, base, [len(one.classes) for one in groups], mixing)


@torch.no_grad()
def _check(
    learner: Learner,
    module: Predictive,
    packed: Tensor,
    inputs: Sequence[Tensor],
    draws: Sequence[Tensor],
    task: str | int | None,
) -> None:
    """Raise if the module predicts something else than the learner does with the same draws of the weights."""
    run, session, head = learner.state.run, learner.state.session, learner.state.head(task)
    x, heads = packed.to(run.network.posterior.mean).unsqueeze(0), [one.number for one in session.groups[head]]
    wanted = session.mixed(x, head, run.predict_each(x, heads, draws or None, learner.state.number(task)))[0]
    exported = module(*inputs)["probabilities"]
    if float((exported - wanted.to(exported)).abs().max()) > TOLERANCE:
        raise EvclError("no plain network predicts what this learner predicts, so it cannot be exported")


# --- the file ---------------------------------------------------------------------------------------------------------


def _write(path: Path, module: Mean | Predictive, inputs: Sequence[Tensor], texts: Mapping[str, str]) -> None:
    """Trace the module and write the file. What torch cannot trace with a free length of sequences, or without running
    the code's own control flow, is traced in another way.
    """
    with torch.no_grad():
        wanted = module(*inputs)
    draws, last = module.draws if isinstance(module, Predictive) else None, None
    for how in PLANS:
        if (how.together and draws is None) or (not how.free and not any(_sequences(module.signature, inputs))):
            continue
        if draws is not None:
            draws.one_by_one = not how.together
        try:
            program = _traced(module, inputs, how)
            torch.testing.assert_close(program.module()(*inputs), wanted, rtol=TOLERANCE, atol=TOLERANCE)
            if path.suffix == ".pt2":
                write_atomically(path, lambda temporary, p=program: _save(p, temporary, texts))  # type: ignore[misc]
            else:
                _write_onnx(path, program, module, texts)
            return
        except (OSError, EvclError):
            raise
        except Exception as error:  # torch's tracers have no type of their own for what they cannot do
            last = error
    lines = str(last).strip().splitlines() or [type(last).__name__]
    why = next((line.partition("'>: ")[2] for line in lines if line.startswith("<class")), lines[0]).strip(" .")
    raise EvclError(
        f"torch cannot trace this network ({why}): its forward must not depend on the values of its inputs, as packed "
        "sequences do"
    ) from last


def _sequences(signature: Signature, inputs: Sequence[Tensor]) -> list[bool]:
    """Which of the inputs are sequences, whose length may differ from call to call."""
    if signature.form is not None:
        return [one.sequence for one in signature.form.inputs]
    return [not x.is_floating_point() and x.dim() > 1 for x in inputs]


def _traced(module: Mean | Predictive, inputs: Sequence[Tensor], how: Plan) -> ExportedProgram:
    batch = Dim("batch", min=1)
    free = [how.free and sequence for sequence in _sequences(module.signature, inputs)]
    shapes = tuple({0: batch, 1: Dim.AUTO} if one else {0: batch} for one in free)
    with torch.no_grad():
        return torch.export.export(module, tuple(inputs), dynamic_shapes=(shapes,), strict=how.strict)


def _save(program: ExportedProgram, path: Path, texts: Mapping[str, str]) -> None:
    with path.open("wb") as file:
        torch.export.save(program, file, extra_files={"evcl.json": json.dumps(dict(texts))})


def _write_onnx(path: Path, program: ExportedProgram, module: Mean | Predictive, texts: Mapping[str, str]) -> None:
    names = list(module.signature.names)
    exported = torch.onnx.export(program, input_names=names, output_names=list(module.outputs), verbose=False)
    assert exported is not None
    for shape in (one.shape for one in exported.model.graph.inputs if one.shape is not None):
        free = [(str(size), name) for size, name in zip(shape, ("batch", "length"), strict=False)]
        exported.rename_axes({size: name for size, name in free if size.isidentifier()})
    exported.model.metadata_props.update(texts)
    size = sum(t.numel() * t.element_size() for t in program.state_dict.values())
    if size > ONE_FILE:
        exported.save(path, external_data=True)
    else:
        write_atomically(path, lambda temporary: temporary.write_bytes(exported.model_proto.SerializeToString()))


@contextmanager
def _tracing() -> Iterator[None]:
    """Without the remarks of torch's exporters, which concern their authors, and without the fused kernels of torch's
    transformers, which ONNX does not have.
    """
    disabled, fast = logging.root.manager.disable, torch.backends.mha.get_fastpath_enabled()
    logging.disable(logging.CRITICAL)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        torch.backends.mha.set_fastpath_enabled(fast)
