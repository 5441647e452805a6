"""How a network is called: its inputs are unpacked from one tensor, and one of its outputs is chosen."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from evcl._core.errors import EvclError
from evcl._core.forms import MASKS, Form

Output = str | int | Callable[[Any], Tensor] | None
POOLED, STATES, LOGITS = "pooler_output", "last_hidden_state", "logits"


class Call:
    """Calls a network on packed inputs (see `Form`), and chooses the features among its outputs.

    A learner and its networks share one such object. `form` is None for a network of one input, which gets the tensor
    as it is; the first task sets it.

    `output` is the name of an output (an attribute, or the key of a dict), a position in a tuple, or a function of what
    the network returns. None: the output itself if it is a tensor. Of a dict, or an output of a Hugging Face model:
    `pooler_output`; if there is none, `last_hidden_state`; if there is none, `logits`. The states of a sequence,
    `last_hidden_state` [N, L, features], are averaged over the steps that the mask keeps.
    """

    def __init__(self, output: Output = None) -> None:
        if output is not None and (
            isinstance(output, bool) or not (isinstance(output, (str, int)) or callable(output))
        ):
            raise EvclError(f"output must be a name, a number or a function, not {output!r}")
        self.output = output
        self.form: Form | None = None

    @property
    def plain(self) -> bool:
        """Whether it changes nothing: one tensor in, and the network's own output out."""
        return self.form is None and self.output is None

    def __call__(self, network: Callable[..., object], x: Tensor) -> Any:
        """What the network returns for packed inputs x [N, ...]: a tensor, unless it cannot be chosen."""
        if self.form is None:
            return self.chosen(network(x), None)
        args, named = self.form.unpack(x)
        mask = self.form.mask
        return self.chosen(network(*args, **named), None if mask is None else named[str(mask.key)])

    def chosen(self, found: Any, mask: Tensor | None) -> Any:
        """The features among a network's outputs."""
        output = self.output
        if output is None:
            names = [name for name in (POOLED, STATES, LOGITS) if _get(found, name) is not None]
            if not names:
                return found
            output = names[0]
        if callable(output):
            return output(found)
        if isinstance(output, int):
            found = found.to_tuple() if hasattr(found, "to_tuple") else found
            if not isinstance(found, (tuple, list)) or not -len(found) <= output < len(found):
                raise EvclError(f"output={output}: the network returns {described(found)}")
            return found[output]
        value = _get(found, output)
        if value is None:
            raise EvclError(f"output={output!r}: the network returns {described(found)}")
        return _pooled(value, mask) if output == STATES and isinstance(value, Tensor) and value.dim() == 3 else value


def _get(found: object, name: str) -> Any:
    return found.get(name) if isinstance(found, Mapping) else getattr(found, name, None)


def _pooled(states: Tensor, mask: Tensor | None) -> Tensor:
    """[N, features]: the mean of states [N, L, features] over the steps where the mask [N, L] is not 0."""
    if mask is None or mask.shape != states.shape[:2]:
        return states.mean(1)
    there = mask.to(states.dtype).unsqueeze(2)
    return (states * there).sum(1) / there.sum(1).clamp_min(1)


def described(found: object) -> str:
    """What a network returned, in words."""
    if isinstance(found, Tensor):
        return f"a tensor of shape {tuple(found.shape)}"
    if isinstance(found, Mapping):
        return f"a {type(found).__name__} with {', '.join(map(str, found))}"
    if isinstance(found, (tuple, list)):
        return f"a {type(found).__name__} of {len(found)}"
    return f"a {type(found).__name__}"


@dataclass(frozen=True)
class Arguments:
    """The arguments of a network's `forward`.

    Attributes:
        names: in their order
        required: how many of them have no default
        more: whether there may be any number by position (*args)
        any_name: whether there may be any by name (**kwargs)
    """

    names: tuple[str, ...] = ()
    required: int = 1
    more: bool = False
    any_name: bool = False

    @classmethod
    def of(cls, network: nn.Module) -> Arguments:
        try:
            parameters = inspect.signature(network.forward).parameters.values()
        except (TypeError, ValueError):
            return cls(more=True, any_name=True)
        named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        return cls(
            tuple(p.name for p in named),
            sum(p.default is p.empty for p in named),
            any(p.kind is p.VAR_POSITIONAL for p in parameters),
            any(p.kind is p.VAR_KEYWORD for p in parameters),
        )

    def takes(self, count: int) -> bool:
        """Whether there may be this many by position."""
        return self.required <= count <= len(self.names) or (self.more and count >= self.required)

    @property
    def masks(self) -> list[str]:
        """The masks among them that a learner can make."""
        return [name for name in MASKS if name in self.names[1:]]


def without_classifier(network: nn.Module, output: Output) -> nn.Module:
    """A Hugging Face classifier without its last layer, whose place a learner's heads take; others as they are.

    Such a model has a `base_model` inside it and a `config.num_labels`, and its last linear layer outside the base has
    as many outputs. That layer is replaced, in a copy, by the identity, so that the model's `logits` are the features
    that the layer would have seen. If `output` is given, the model stays as it is.
    """
    base, config = getattr(network, "base_model", None), getattr(network, "config", None)
    labels = getattr(config, "num_labels", None)
    if output is not None or labels is None or not isinstance(base, nn.Module) or base is network:
        return network
    inside = {id(module) for module in base.modules()}
    last = [
        name
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and id(module) not in inside and module.out_features == labels
    ]
    if not last:
        return network
    trunk = copy.deepcopy(network)
    trunk.set_submodule(last[-1], nn.Identity())
    return trunk


def headed(network: nn.Module, head: nn.Module, call: Call) -> nn.Sequential:
    """A network and a head on the output that `call` chooses. It takes the inputs that the network takes."""
    if call.plain and isinstance(network, nn.Sequential):
        return nn.Sequential(network, head)
    return _Headed(network, head, call)


class _Headed(nn.Sequential):
    def __init__(self, network: nn.Module, head: nn.Module, call: Call) -> None:
        super().__init__(network, head)
        self.output, form = call.output, call.form
        self.mask = None if form is None or form.mask is None else str(form.mask.key)

    def forward(self, *args: object, **named: Any) -> Tensor:
        mask = None if self.mask is None else named.get(self.mask)
        y: Tensor = self[1](Call(self.output).chosen(self[0](*args, **named), mask))
        return y
