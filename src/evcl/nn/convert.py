"""`bayesianize`: put a Gaussian over each weight of any module made of known layers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from itertools import accumulate
from pkgutil import resolve_name
from typing import Any, Literal

import torch
from torch import Tensor, nn

from evcl._core.errors import EvclError, unknown
from evcl.nn.attention import MultiheadAttention, more_keys
from evcl.nn.columns import BayesianScale, Scale
from evcl.nn.film import CHANNELS_FIRST, FILM_LAYERS, Film, film_weights
from evcl.nn.initial import log_stds
from evcl.nn.inputs import Call
from evcl.nn.layer import BayesianLayer, Weights, state_of
from evcl.nn.layers import Conv, Dropout, Embedding, Linear
from evcl.nn.lora import AdaptedAttention, BayesianDown, BayesianUp, Down, Up, bayesian_attention
from evcl.nn.network import BayesianNetwork
from evcl.nn.norms import BatchNorm, GroupNorm, LayerNorm, RMSNorm
from evcl.nn.sampled import Composite, DirectParameters, FreeParameter, Plain, SampledLayer, SecondAxis
from evcl.nn.spectral import SpectralNorm, attach_state
from evcl.posterior import Gaussian, Layout

INIT_SHARE = 0.02  # initial standard deviation, as a fraction of a layer's scale
Names = str | Sequence[str] | None
"""Names of modules, or patterns of them."""

BayesianForm = Callable[[Any], nn.Module]
_FORMS: dict[type[nn.Module], BayesianForm] = {}
# Layers without weights that still cannot be used unchanged, because they draw from torch's global generator.
_DRAW = nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d
_TRANSFORMERS = nn.Transformer, *(getattr(nn, f"Transformer{a}coder{b}") for a in ("En", "De") for b in ("", "Layer"))


def register(layer: type[nn.Module], form: BayesianForm = SampledLayer) -> None:
    """Register the Bayesian form of a layer: `form(layer)` makes the Bayesian layer from the plain one.

    Without a form, the layer itself is used, with weights drawn once per batch: see `evcl.nn.SampledLayer`. A form of
    your own is a `BayesianLayer`, or a module that contains some. The key is the exact type: a subclass may compute
    something else, so it needs its own entry. A later entry replaces an earlier one.
    """
    if not (isinstance(layer, type) and issubclass(layer, nn.Module)):
        raise EvclError(f"register takes a subclass of torch.nn.Module, not {layer!r}")
    _FORMS[layer] = form


_FORMS |= {nn.Linear: Linear, nn.Embedding: Embedding, nn.MultiheadAttention: MultiheadAttention}
_FORMS |= dict.fromkeys((nn.Conv1d, nn.Conv2d), Conv)
_FORMS |= {nn.LayerNorm: LayerNorm, nn.RMSNorm: RMSNorm, nn.GroupNorm: GroupNorm}
_FORMS |= dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), BatchNorm)
_FORMS |= {Scale: BayesianScale, Up: BayesianUp, Down: BayesianDown, AdaptedAttention: bayesian_attention}
_FORMS |= {torch.nn.utils.parametrizations._SpectralNorm: SpectralNorm, nn.Dropout: Dropout}
_FORMS |= {kind: partial(Dropout, positions=k) for k, kind in enumerate((nn.Dropout1d, nn.Dropout2d, nn.Dropout3d), 1)}
_FORMS |= dict.fromkeys((nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), SampledLayer)
_FORMS[nn.PReLU] = SampledLayer
# Layers by their full names: their forms are imported when they are used.
_NAMED = {
    "evcl.nn.winners.KWinners": "evcl.nn.winners:KWinnersLayer",
    **{f"torch.nn.modules.rnn.{kind}": "evcl.nn.recurrent:Recurrent" for kind in ("LSTM", "GRU", "RNN")},
    **{f"torch.nn.modules.rnn.{kind}Cell": "evcl.nn.recurrent:RecurrentCell" for kind in ("LSTM", "GRU", "RNN")},
    "transformers.pytorch_utils.Conv1D": "evcl.nn.layers:TransposedLinear",
}


def _form(layer: nn.Module) -> BayesianForm | None:
    kind = type(layer)
    if kind not in _FORMS:
        place = _NAMED.get(f"{kind.__module__}.{kind.__qualname__}")
        return resolve_name(place) if place else None
    return _FORMS[kind]


def bayesianize(
    module: nn.Module,
    *,
    init_std: float | Sequence[float] | Literal["auto"] | None = "auto",
    generators: Sequence[torch.Generator] | None = None,
    replicas: int = 1,
    only: Names = None,
    skip: Names = None,
    unsupported: Literal["error", "deterministic"] = "error",
    film: bool = False,
    call: Call | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> BayesianNetwork:
    """Return a copy of `module` with a Gaussian over every weight; `module` itself is not changed.

    Posterior means start from the module's own weights or, with `generators` (one per replica), are drawn He-uniform,
    except for norms. `init_std` is the initial standard deviation, one for all replicas or one per replica; "auto" is
    0.02 times each layer's scale (`BayesianLayer.scale`). None makes a network of point weights, without variances.

    `only` and `skip` choose the layers to make Bayesian, by the names of modules in `named_modules()`, which include
    everything inside them, or by patterns (`"*.norm1"`). All other layers are fixed: they keep their weights and run in
    evaluation mode, because a weight that is trained without a prior or penalty forgets. Weights that are frozen
    (`requires_grad=False`) are fixed too. `only=[]` gives a fixed trunk with Bayesian heads.

    A parameter that belongs to no layer with a Bayesian form is drawn once per batch (see `DirectParameters`). With
    `unsupported="deterministic"` it is fixed instead, and a warning names it.

    With `film`, every linear layer and convolution, fixed ones too, has scales and shifts per task (see film.py).
    `call`: how the module is called, if not with one tensor (see inputs.py).
    """
    if not isinstance(module, nn.Module):
        raise EvclError(f"the network must be a torch.nn.Module, not {type(module).__name__}")
    if unsupported not in ("error", "deterministic"):
        raise EvclError(f"unsupported must be 'error' or 'deterministic', not {unsupported!r}")
    _check(module)
    replicas = replicas if generators is None else len(generators)
    chosen = _patterns(only), _patterns(skip) or []
    conversion = _Conversion(module, Weights(replicas), generators, *chosen, unsupported, film)
    trunk = conversion(module, copied(module), "")
    conversion.check()
    if names := [f"{name!r} ({kind})" for name, kind in conversion.frozen.items()]:
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        warnings.warn(
            f"unsupported='deterministic' leaves these weights fixed at their present values: {', '.join(names[:8])}"
            f"{more}. Leave it out, and they learn, drawn once per batch",
            UserWarning,
            stacklevel=2,
        )
    for part in trunk.modules():
        part._buffers.update({key: b.contiguous() for key, b in part._buffers.items() if b is not None})  # for a file
    trunk = trunk.to(device=device, dtype=dtype).eval()
    layout = Layout({name: tuple(m.shape[1:]) for name, m in conversion.means.items()})

    def flat(parts: dict[str, Tensor]) -> Tensor:
        rows = [torch.empty(replicas, 0), *(part.reshape(len(part), -1) for part in parts.values())]
        return torch.cat([row.to(device=device, dtype=dtype) for row in rows], 1)

    mean, log_std = flat(conversion.means), None
    if init_std is not None:
        log_std = log_stds(init_std, conversion.scales, layout, mean, INIT_SHARE).expand_as(mean).clone()
    posterior, centre = Gaussian(mean, log_std), flat(conversion.centres)
    about = (posterior, centre, conversion.scales, conversion.owned, call)
    direct = conversion.direct if conversion.direct.places else None
    network = BayesianNetwork(trunk, conversion.weights, layout, *about, direct, conversion.frozen)
    from evcl.nn.private import private_weights  # it needs bayesianize

    network.task_weights = private_weights(network.trunk, mean)
    if film and network.task_weights is not None:
        raise EvclError("film scales the units of layers that all tasks share, and this network has PerTask layers")
    if film:
        network.task_weights = film_weights(conversion.sites, mean)
    return network


def copied(module: nn.Module) -> nn.Module:
    """A deep copy. Torch does not copy a tensor with a gradient function, such as the old `weight_norm` computes."""
    computed = [t for part in module.modules() for t in vars(part).values() if isinstance(t, Tensor)]
    return copy.deepcopy(module, {id(t): t.detach().clone() for t in computed if t.grad_fn is not None})


def _check(module: nn.Module) -> None:
    """Refuse a module whose weights cannot initialise a posterior."""
    if isinstance(module, torch.jit.ScriptModule):
        raise EvclError("a TorchScript module cannot be converted: pass the module that it was made from")
    for name, p in module.named_parameters():
        if nn.parameter.is_lazy(p):
            raise EvclError(f"{name!r} has no shape yet: call the network on a batch once before passing it")
        if p.is_meta:
            raise EvclError(f"{name!r} is on the device 'meta' and has no values: load the network's weights first")
        if not p.is_floating_point():
            raise EvclError(f"{name!r} is {p.dtype}: weights must be real floating-point numbers")


@dataclass
class _Conversion:
    """Converts a module's copy, part by part, to its Bayesian form, and collects the initial values of its weights."""

    module: nn.Module
    weights: Weights
    generators: Sequence[torch.Generator] | None
    only: list[str] | None
    skip: list[str]
    unsupported: str
    film: bool
    means: dict[str, Tensor] = field(default_factory=dict)
    centres: dict[str, Tensor] = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)
    owned: list[tuple[nn.Module, str, FreeParameter]] = field(default_factory=list)
    direct: DirectParameters = field(default_factory=DirectParameters)
    frozen: dict[str, str] = field(default_factory=dict)  # weights that `unsupported` leaves fixed -> type of module
    done: dict[int, nn.Module] = field(default_factory=dict)  # a layer used twice stays one layer
    fixed: dict[str, str] = field(default_factory=dict)  # name of each fixed weight -> its module
    seen: list[str] = field(default_factory=list)  # the modules and parameters that `only` and `skip` can choose
    sites: dict[str, slice] = field(default_factory=dict)  # see film.py

    def __post_init__(self) -> None:
        self.names = {id(p): name for name, p in self.module.named_parameters()}  # a tied weight has one name
        self.direct.weights = self.weights

    def __call__(self, plain: nn.Module, copied: nn.Module, path: str, second: bool = False) -> nn.Module:
        """Convert one module. `second`: its input has the batch as the second axis, after the positions."""
        if id(plain) not in self.done:
            form, trainable = _form(plain), [p.requires_grad for p in plain.parameters()]
            if form is None or not self._chosen(path) or not (any(trainable) or not trainable):
                self.done[id(plain)] = self._kept(plain, copied, path, second)
            elif not all(trainable) or plain._forward_pre_hooks or plain._forward_hooks or more_keys(plain):
                self.done[id(plain)] = self._kept(plain, copied, path, second, direct=True)
            else:
                made = self._taken_up(form(plain), path, second, type(plain))
                self._remember(made, plain, copied)
                self.done[id(plain)] = made
        return self.done[id(plain)]

    def _remember(self, made: nn.Module, plain: nn.Module, copied: nn.Module) -> None:
        """Keep the plain layer, without its parameters, beside the Bayesian one, for `BayesianNetwork.use_directly`."""
        layer = made.layer if isinstance(made, SecondAxis) else made
        places = [
            (part, key, self.names[id(p)])
            for own, part in zip(plain.modules(), copied.modules(), strict=True)
            for key, p in own._parameters.items()
            if p is not None
        ]
        if places and isinstance(layer, (BayesianLayer, Composite)) and not list(copied.buffers()):
            if isinstance(copied, nn.Embedding):
                copied.register_forward_pre_hook(_as_indices)
            for part, key, _ in places:
                part._parameters[key] = None
            vars(layer)["plain"] = Plain(copied.eval(), places)

    def check(self) -> None:
        """Checks that are only possible after all modules have been converted."""
        for pattern in (*(self.only or ()), *self.skip):
            if any(_matches([pattern], path) for path in self.seen):
                continue
            if any(_matches([pattern], path) for path, _ in self.module.named_modules()):
                raise EvclError(
                    f"{pattern!r} chooses nothing: it has no weights, or is inside a layer converted as a whole"
                )
            raise unknown("module", pattern, self.seen)
        for name in self.means.keys() & self.fixed.keys():
            raise EvclError(f"{name!r} is tied to a weight of {self.fixed[name]!r}: choose both, or leave out both")
        if self.film and not self.sites:
            raise EvclError("film needs a linear layer or a convolution in the network, and this network has none")

    def _chosen(self, path: str) -> bool:
        self.seen.append(path)
        return (self.only is None or _matches(self.only, path)) and not _matches(self.skip, path)

    def _taken_up(self, form: nn.Module, path: str, second: bool, kind: type = nn.Module) -> nn.Module:
        for layer in form.modules():
            if isinstance(layer, BayesianLayer):
                layer.weights, layer.path = self.weights, path
                weight = layer.own.get("weight")
                self._name(layer)
                has_film = kind in FILM_LAYERS if layer is form else isinstance(layer, (Linear, Conv))
                if self.film and has_film and weight is not None:
                    channels = isinstance(layer, Conv) or kind in CHANNELS_FIRST
                    self._site(layer, layer.names["weight"], len(weight), channels, layer.rows.get("weight"))
        return SecondAxis(form) if second and isinstance(form, BayesianLayer) else form

    def _site(self, layer: nn.Module, name: str, units: int, channels_first: bool, part: slice | None = None) -> Film:
        """Give a layer whose weight has this name and this many units FiLM."""
        if name not in self.sites:
            start = max((span.stop for span in self.sites.values()), default=0)
            self.sites[name] = slice(start, start + units)
        hook = Film(self.weights, name, self.sites[name], channels_first, part)
        layer.register_forward_hook(hook)
        return hook

    def _name(self, layer: BayesianLayer, names: dict[str, str] | None = None) -> None:
        r = self.weights.replicas
        if names is None:
            names = layer.names = {key: self.names[id(p)] for key, p in layer.own.items()}
        for key, name in names.items():
            if name not in self.means:
                plain, centre = layer.own[key].detach(), layer.centre(key).detach()
                drawn = [layer.initial(key, g) for g in self.generators or ()]
                self.means[name] = torch.stack(drawn) if drawn else plain.expand(r, *plain.shape)
                self.centres[name] = centre.expand(r, *centre.shape)
                self.scales[name] = layer.scale(key)
        layer.own = {}
        self._stateful(layer)

    def _stateful(self, layer: BayesianLayer) -> None:
        """Give each replica its own state beside the weights."""
        for key, buffer in state_of(layer).items():
            setattr(layer, key, buffer.expand(self.weights.replicas, *buffer.shape[1:]).clone())

    def _kept(self, plain: nn.Module, copied: nn.Module, path: str, second: bool, direct: bool = False) -> nn.Module:
        """Keep the copy itself, and convert its children. `direct`: its own parameters are used as they are."""
        self._check_kept(plain, path)
        for key, p in list(plain._parameters.items()):
            if p is None:
                continue
            name = f"{path}.{key}" if path else key
            use = "direct" if direct and p.requires_grad else self._use(plain, key, name)
            if use == "own":
                own = FreeParameter(plain, key)
                del copied._parameters[key]
                self._taken_up(own, name, False)
                self.owned.append((copied, key, own))
            elif use == "direct":
                known = self.names[id(p)]  # a tied parameter has one name
                self.direct.own = {known: p}
                self._name(self.direct, {known: known})
                self.direct.add(copied, key, known)
            else:
                copied._parameters[key].requires_grad_(False)  # type: ignore[union-attr]
                self.fixed[self.names[id(p)]] = path
        attach_state(copied, path, self.weights, self._stateful)
        if self.film and type(plain) in FILM_LAYERS and "weight" in plain._parameters:
            weight = plain.get_parameter("weight")
            self._site(copied, self.names[id(weight)], len(weight), type(plain) in CHANNELS_FIRST).second = second
        if isinstance(plain, (nn.Embedding, nn.EmbeddingBag)):
            copied.register_forward_pre_hook(_as_indices)
        if isinstance(copied, nn.TransformerEncoderLayer):  # disable its fast path, which reads the layers' weights
            copied.activation_relu_or_gelu = 0
        if isinstance(copied, nn.TransformerEncoder):  # likewise
            copied.use_nested_tensor = False
        if isinstance(plain, _TRANSFORMERS):
            attention = [m for m in plain.modules() if isinstance(m, (nn.MultiheadAttention, AdaptedAttention))]
            second = not all(m.batch_first for m in attention)
        for key, child in plain._modules.items():  # named_children would skip a child that has two names
            if child is not None:
                inner = copied.get_submodule(key)
                setattr(copied, key, self(child, inner, f"{path}.{key}" if path else key, second))
        return copied

    def _use(self, plain: nn.Module, key: str, name: str) -> str | None:
        """How a parameter outside Bayesian layers learns: "own": a value per example; "direct": one per batch; None."""
        p = plain._parameters[key]
        assert p is not None
        if not p.requires_grad or _form(plain) is not None or not self._chosen(name):
            return None  # a layer that has a form is left out as a whole
        lists = type(plain) in (nn.ParameterList, nn.ParameterDict)
        if p.dim() > 1 and p.shape[0] == 1 and (lists or not type(plain).__module__.startswith("torch.nn.")):
            return "own"
        if self.unsupported == "deterministic":
            self.frozen[name] = type(plain).__name__
            return None
        return "direct"

    def _check_kept(self, plain: nn.Module, path: str) -> None:
        """Refuse a layer without weights that would compute something else here than in the plain module."""
        mixes = isinstance(plain, nn.SyncBatchNorm) and self.unsupported != "deterministic"  # then, it stays as it is
        if not (mixes or isinstance(plain, _DRAW)) or not self._chosen(path):
            return
        why = "mixes the examples of a batch" if mixes else "draws from torch's global generator"
        raise EvclError(
            f"{path!r} ({type(plain).__name__}) {why}: leave it out (skip={path!r}), or register a Bayesian form for it"
        )


def _as_indices(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Convert inputs to indices: a learner passes all inputs as floating-point numbers."""
    return (args[0].long(), *args[1:])


def _patterns(names: Names) -> list[str] | None:
    patterns = [names] if isinstance(names, str) else names
    if patterns is None:
        return None
    if not isinstance(patterns, Sequence) or not all(isinstance(name, str) for name in patterns):
        raise EvclError(f"only and skip take module names or patterns, not {names!r}")
    return list(patterns)


def _matches(patterns: Sequence[str], path: str) -> bool:
    """Whether a pattern matches the module at `path` or a module that contains it."""
    around = list(accumulate(path.split("."), "{}.{}".format))
    return any(fnmatchcase(name, pattern) for name in around for pattern in patterns)
