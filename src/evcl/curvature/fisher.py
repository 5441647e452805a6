"""The diagonal Fisher information, from per-example gradients.

    F_p = 1/n sum_b sum_c w_bc (d log p(c|x_b) / d theta_p)^2

`exact`: all classes, w = p(c|x_b). `sampled`: one label drawn from p(.|x_b). `empirical`: the true label; this is not
the Fisher of the model, although much code calls it that. The gradient of each example is squared, never the mean
gradient of a batch. Because examples do not affect each other, one backward pass of their sum gives the output
gradients of each example, from which each layer computes its sum of squares. An example with weight u in the loss has
weight u here too, so that what is protected is what was minimised.

A diagonal misses the joint effect of two weights. If a unit was inactive in a task, the weights out of it have Fisher
0, and so have all weights into it. A later task may activate the unit and change the weights out of it: either change
alone is harmless, but both together are not. `spread` adds to each weight a fraction of the Fisher of its neighbours:
the weights from the same input and, if that input is itself learned and may change, the weights into the same unit.

`sensitivity`, the importance of memory aware synapses (Aljundi et al., 2018), is computed in the same way from absolute
values in place of squares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.randomness import Noise
from evcl._core.ranks import Ranks
from evcl._core.settings import ELASTIC
from evcl.nn import BayesianLayer, BayesianNetwork, Layout, head_names
from evcl.targets import CATEGORICAL, Estimate, Likelihood

KINDS = ELASTIC["fisher"].choices
CHUNK_NUMBERS, CHUNK_ROWS = (
    2_000_000,
    (16, 1000),
)  # input values, and limits of the examples, that go through the network at once


@dataclass(frozen=True)
class Sample:
    """Examples of a task, and the weights at which a network is measured on them.

    Attributes:
        network: the network
        mean: [R, P], the weights
        layout: names the weights to include
        heads: the heads whose outputs are measured, concatenated
        x: [R, n, ...], the inputs
        y: [R, n], the labels; None: all 0
        weights: [R, n], the weights of the examples; None: all 1
        task: whose FiLM row to use, if the network has any; None: that of the last task used
        ranks: the processes that share the work; all of them pass the same examples
        chunk: number of examples that go through the network at once; None: by the size of their activations
        from_below: whether x is what `network.below` has made of the inputs
        noise: from which latent variables are drawn, if the network has any; None: they are at their means
    """

    network: BayesianNetwork
    mean: Tensor
    layout: Layout
    heads: Sequence[int]
    x: Tensor
    y: Tensor | None = None
    weights: Tensor | None = None
    task: int | None = None
    ranks: Ranks | None = None
    chunk: int | None = None
    from_below: bool = False
    noise: Noise | None = None

    def _most(self) -> int:
        """The number of examples per replica whose activations may be held at once."""
        network, x = self.network, self.x
        if x.dim() == 3 and network.dense:
            return CHUNK_ROWS[1]

        def run(some: Tensor) -> object:
            return forward_pass(network, some.unsqueeze(0), [], lambda _: [], self.from_below)

        size = network.size(x, run, f"fisher {self.from_below}")
        return CHUNK_ROWS[1] if size is None else max(1, size.backward_rows(x.is_cuda, len(x)) // len(x))

    def passes(self, targets: Targets) -> Iterator[Pass]:
        """The forward passes of this process's share of the examples."""
        network, x, chunk, ranks = self.network, self.x, self.chunk, self.ranks
        if chunk is None:
            chunk = min(max(CHUNK_NUMBERS // x[:, :1].numel(), CHUNK_ROWS[0]), CHUNK_ROWS[1])
            chunk = CHUNK_ROWS[1] if x.is_cuda else chunk  # few, long kernels; on a CPU, a chunk that fits its cache
            chunk = min(chunk, self._most())
        if ranks is not None and targets.skip is None:  # random draws depend on the chunks
            chunk = min(chunk, -(-x.shape[1] // ranks.size))
        network.bind(self.mean, None, self.layout)
        network.weights.noise = self.noise
        y = torch.zeros(x.shape[:2], dtype=torch.long, device=x.device) if self.y is None else self.y
        counts = x.new_ones(x.shape[:2]) if self.weights is None else self.weights
        for turn, (xs, ys, us) in enumerate(zip(*(t.split(chunk, 1) for t in (x, y, counts)), strict=True)):
            if ranks is not None and turn % ranks.size != ranks.rank:
                if targets.skip is not None:
                    targets.skip(ys)
                continue
            with network.using(self.task):
                calls, values = _passed(network, xs, ys, us, self.heads, targets, self.from_below)
            yield Pass(calls, values, ys.shape[1])


def fisher(
    sample: Sample,
    kind: str = "exact",
    generators: Sequence[torch.Generator] | None = None,
    temperature: Tensor | float = 1.0,
    spread: Tensor | float = 0.0,
    likelihood: Likelihood = CATEGORICAL,
) -> Tensor:
    """[R, P]: the Fisher of these examples.

    `generators`, one per replica, are used only by `sampled`. `temperature` ([R, 1], or one number) is that of
    `Estimate`. `spread` ([R, 1], or one number) times the mean Fisher of a weight's neighbours is added to its own.
    """
    targets = likelihood_targets(sample, kind, generators, temperature, likelihood)
    return _mean_of(torch.square, sample, targets, spread)


def sensitivity(sample: Sample, spread: Tensor | float = 0.0) -> Tensor:
    """[R, P]: 1/n sum_b |d ||f(x_b)||^2 / d theta_p|, how sensitive the heads' outputs f are to each weight.

    It needs no labels; `spread` is as in `fisher`.
    """

    def targets(outputs: Tensor, y: Tensor, u: Tensor) -> list[Tensor]:
        return [(u * outputs.square().sum(2)).sum()]

    return _mean_of(torch.abs, sample, Targets(targets), spread)


Of = Callable[[Tensor], Tensor]  # torch.square or torch.abs


class Targets(NamedTuple):
    """What to differentiate: outputs [R, n, o], labels and weights of examples -> scalars.

    `skip`, if random numbers are drawn for them, draws those of examples that another process computes.
    """

    of: Callable[[Tensor, Tensor, Tensor], list[Tensor]]
    skip: Callable[[Tensor], None] | None = None


def likelihood_targets(
    sample: Sample,
    kind: str,
    generators: Sequence[torch.Generator] | None,
    temperature: Tensor | float,
    likelihood: Likelihood,
) -> Targets:
    """The targets of a Fisher; the arguments are those of `fisher`."""
    if kind not in KINDS:
        raise EvclError(f"fisher must be one of {', '.join(KINDS)}, not {kind!r}")

    estimate = Estimate(kind, generators, temperature)

    def targets(outputs: Tensor, y: Tensor, u: Tensor) -> list[Tensor]:
        return likelihood.fisher_targets(outputs, y, u, estimate)

    def skip(y: Tensor) -> None:
        classes = sum(sample.layout.shapes[head_names(k)["bias"]][0] for k in sample.heads)
        likelihood.skip_labels(sample.mean.new_empty(*y.shape[:2], classes), generators)

    return Targets(targets, skip if kind == "sampled" else None)


def _mean_of(of: Of, sample: Sample, targets: Targets, spread: Tensor | float) -> Tensor:
    """[R, P]: 1/n sum_b sum over targets of(gradient of example b's part of the target)."""
    total = torch.zeros_like(sample.mean)
    names = sample.network.names_of(sample.heads)  # not all of the layout's: it may have many heads
    parts = {name: sample.layout.view(total, name) for name in names if name in sample.layout.shapes}
    seen: dict[BayesianLayer, bool] = {}  # the layers that were called, and whether their inputs are learned
    for calls, values, examples in sample.passes(targets):
        note_layers(seen, calls)
        for deltas in output_gradients(calls, values):
            add(of, parts, calls, deltas, examples)
    if isinstance(spread, Tensor) or spread > 0:
        add_neighbours(parts, seen, spread)
    if sample.ranks is not None:
        sample.ranks.sum_(total)
    return total / sample.x.shape[1]


def note_layers(seen: dict[BayesianLayer, bool], calls: Sequence[Call]) -> None:
    """Note which layers were called, and whether their inputs depend on weights in any of the calls."""
    for call in calls:
        seen[call.layer] = call.learned or seen.get(call.layer, False)


def spread_out(
    network: BayesianNetwork,
    mean: Tensor,
    layout: Layout,
    importance: Tensor,
    x: Tensor,
    heads: Sequence[int],
    spread: Tensor | float,
) -> Tensor:
    """[R, P]: any importance of the weights, plus `spread` times the mean importance of each weight's neighbours.

    One example of x [R, n, ...] goes through the network, to find the layers in use.
    """
    total = importance.clone()
    add_neighbours(layout.views(total), layers_in_use(network, mean, layout, x, heads), spread)
    return total


def layers_in_use(
    network: BayesianNetwork, mean: Tensor, layout: Layout, x: Tensor, heads: Sequence[int]
) -> dict[BayesianLayer, bool]:
    """The layers that these heads use, and whether their inputs depend on weights: found with one example of x."""
    network.bind(mean, None, layout)
    network.weights.noise = None
    calls, _ = _passed(network, x[:, :1], x[:, :1], x[:, :1], heads, Targets(lambda *_: []))
    seen: dict[BayesianLayer, bool] = {}
    note_layers(seen, calls)
    return seen


@dataclass
class Call:
    """One call of a layer by all replicas. If the replicas run one after another, each has an output of its own."""

    layer: BayesianLayer
    x: Tensor
    outputs: list[Tensor]
    learned: bool  # whether the layer's input depends on weights


class Pass(NamedTuple):
    calls: list[Call]
    targets: list[Tensor]
    examples: int


def _passed(
    network: BayesianNetwork,
    x: Tensor,
    y: Tensor,
    weights: Tensor,
    heads: Sequence[int],
    targets: Targets,
    from_below: bool = False,
) -> tuple[list[Call], list[Tensor]]:
    return forward_pass(network, x, heads, lambda outputs: targets.of(outputs, y, weights), from_below)


def forward_pass(
    network: BayesianNetwork,
    x: Tensor,
    heads: Sequence[int],
    of: Callable[[Tensor], list[Tensor]],
    from_below: bool = False,
) -> tuple[list[Call], list[Tensor]]:
    """The calls of layers with weights in one pass of x [R, n, ...], and the scalars `of` its outputs [R, n, o].

    `from_below`: x is what `network.below` has made of the inputs.
    """
    with record(network, heads) as calls, torch.enable_grad():
        return calls, of(network.logits(x.flatten(0, 1), heads, from_below).unflatten(0, x.shape[:2]))


def output_gradients(calls: Sequence[Call], targets: Sequence[Tensor]) -> Iterator[tuple[Tensor | None, ...]]:
    """For each target, its gradients with respect to the outputs of these calls."""
    outputs = [output for call in calls for output in call.outputs]
    for i, target in enumerate(targets):
        grads = torch.autograd.grad(target, outputs, retain_graph=i + 1 < len(targets), allow_unused=True)
        each = iter(zip(grads, outputs, strict=True))
        yield tuple(_gathered([next(each) for _ in call.outputs]) for call in calls)


def _gathered(found: list[tuple[Tensor | None, Tensor]]) -> Tensor | None:
    """The gradients of all replicas with respect to one call; None if no target depends on it."""
    if len(found) == 1:
        return found[0][0]
    if all(gradient is None for gradient, _ in found):
        return None
    return torch.cat([torch.zeros_like(output) if gradient is None else gradient for gradient, output in found])


@contextmanager
def record(network: BayesianNetwork, heads: Sequence[int]) -> Iterator[list[Call]]:
    """Inside this context, record the input and output of every layer of the trunk and of these heads that has weights,
    each time it is called.
    """
    calls: list[Call] = []
    alone: dict[BayesianLayer, list[list[Call]]] = {}  # calls by replicas that run one after another

    def note(layer: BayesianLayer, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Return a copy to the network, because an in-place activation would change the recorded output."""
        x, watched = layer.watched(args[0], output)
        call = Call(layer, x.detach().clone() if x is args[0] else x, [watched], args[0].requires_grad)
        lane = layer.weights.lane
        if lane is None:
            calls.append(call)
            return output.clone()
        known = alone.setdefault(layer, [])
        known += [[] for _ in range(lane + 1 - len(known))]
        known[lane].append(call)
        if lane == 0:
            calls.append(call)
        else:  # this layer's call of the same number by replica 0
            first = known[0][len(known[lane]) - 1] if len(known[lane]) <= len(known[0]) else None
            if first is None or first.x.shape[1:] != call.x.shape[1:]:
                raise EvclError(f"{layer.path!r}: the replicas call this layer in different ways: train one at a time")
            first.x = torch.cat([first.x, call.x])
            first.outputs.append(watched)
            first.learned = first.learned or call.learned
        return output.clone()

    layers = [layer for layer in network.layers_of(heads) if layer.names]
    network.weights.recorded = True
    handles = [layer.register_forward_hook(note, prepend=True) for layer in layers]  # before FiLM
    try:
        yield calls
    finally:
        network.weights.recorded = False
        for handle in handles:
            handle.remove()


@torch.no_grad()
def add(of: Of, parts: dict[str, Tensor], calls: list[Call], deltas: Sequence[Tensor | None], examples: int) -> None:
    """Add sum_b of(g_b) for each weight; if a weight is used several times, its gradients are summed first."""
    for name, uses in uses_of(parts, calls, deltas, examples).items():
        layer, parameter, x, delta = uses[0]
        if len(uses) == 1 and layer.fold == 1:
            part = layer.part(parts, parameter)
            assert part is not None
            part += layer.sum_of(of, parameter, x, delta)
            continue
        rows = rows_at_once(uses)
        for start in range(0, examples, rows):
            parts[name] += of(whole_gradient(name, uses, parts[name].shape[1:], slice(start, start + rows))).sum(1)


Use = tuple[BayesianLayer, str, Tensor, Tensor]  # a layer, its parameter's name, its inputs and output gradients


def uses_of(
    parts: Mapping[str, Tensor], calls: list[Call], deltas: Sequence[Tensor | None], examples: int
) -> dict[str, list[Use]]:
    """The layers that use each weight in `parts`, with their parameter's name, inputs and output gradients, [R, B, ...]
    each.
    """
    uses: dict[str, list[Use]] = {}
    for call, delta in zip(calls, deltas, strict=True):
        if delta is None:
            continue
        layer = call.layer
        x, delta = layer.unfold(call.x), layer.unfold(delta)
        if x.shape[1] != examples * layer.fold:
            raise EvclError(
                f"{type(layer).__name__} {list(layer.names.values())} got {x.shape[1]} rows for {examples} examples: "
                "keep the batch as the first axis, followed by positions, so that the Fisher can separate the examples"
            )
        for parameter, name in layer.names.items():
            if name in parts:
                uses.setdefault(name, []).append((layer, parameter, x, delta))
    return uses


def add_neighbours(parts: dict[str, Tensor], layers: dict[BayesianLayer, bool], share: Tensor | float) -> None:
    """Add to each weight a fraction `share` of its neighbours' Fisher. If several layers use a weight, this is done
    once, as for the first of them.
    """
    uses: dict[tuple[str, int, int], tuple[BayesianLayer, str, bool]] = {}
    for layer, learned in layers.items():
        for parameter, name in layer.names.items():
            part = layer.part(parts, parameter) if name in parts else None
            if part is None or part.dim() == 1:  # a single number has no neighbours
                continue
            length, start = part.shape[1] // layer.pieces, layer.rows.get(parameter, slice(0)).start or 0
            for piece in range(start, start + part.shape[1], length):
                first, known, before = uses.get((name, piece, length), (layer, parameter, False))
                uses[name, piece, length] = first, known, before or learned
    pairs = []
    for (name, start, length), (layer, parameter, learned) in uses.items():
        part = parts[name][:, start : start + length]
        pairs.append((part, layer.neighbours(parameter, part, learned)))
    for part, neighbours in pairs:
        part += neighbours * (share.view(-1, *[1] * (part.dim() - 1)) if isinstance(share, Tensor) else share)


def gradient_of(layer: BayesianLayer, parameter: str, x: Tensor, delta: Tensor, piece: slice) -> Tensor:
    """The gradients [R, b, *shape] of a slice of the examples, each summed over its rows."""
    rows = slice(piece.start * layer.fold, piece.stop * layer.fold)
    gradient = layer.example_gradient(parameter, x[:, rows], delta[:, rows])
    return gradient if layer.fold == 1 else gradient.unflatten(1, (-1, layer.fold)).sum(2)


def rows_at_once(uses: Sequence[Use]) -> int:
    """The number of examples whose gradients of one weight tensor may be held in memory at once."""
    return max(1, min(layer.rows_at_once(p, x, delta) // layer.fold for layer, p, x, delta in uses))


def whole_gradient(name: str, uses: Sequence[Use], shape: Sequence[int], piece: slice) -> Tensor:
    """[R, b, *shape]: the gradients of a slice of the examples with respect to the weights `name`, over all uses."""
    gradients = [gradient_of(*use, piece) for use in uses]
    whole = gradients[0].new_zeros(*gradients[0].shape[:2], *shape)
    for (layer, parameter, _, _), gradient in zip(uses, gradients, strict=True):
        part = layer.part({name: whole.flatten(0, 1)}, parameter)
        assert part is not None
        part += gradient.flatten(0, 1)
    return whole
