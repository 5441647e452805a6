"""`bayesianize`: any module made of known layers, with a Gaussian over each of its weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from evcl.errors import EvclError
from evcl.nn.layers import BayesianLayer, Conv2d, Dropout, Linear, Weights
from evcl.nn.network import BayesianNetwork, he_uniform
from evcl.nn.posterior import Gaussian, Layout

Factory = Callable[[nn.Module], BayesianLayer]
_FORMS: dict[type[nn.Module], Factory] = {}
# Layers without weights that still cannot stay as they are, and why.
_REFUSED: dict[type[nn.Module], str] = {
    nn.AlphaDropout: "draws from torch's global generator",
    nn.FeatureAlphaDropout: "draws from torch's global generator",
    nn.RReLU: "draws from torch's global generator",
    nn.FractionalMaxPool2d: "draws from torch's global generator",
    nn.FractionalMaxPool3d: "draws from torch's global generator",
    nn.BatchNorm1d: "mixes the examples of a batch",
    nn.BatchNorm2d: "mixes the examples of a batch",
    nn.BatchNorm3d: "mixes the examples of a batch",
    nn.SyncBatchNorm: "mixes the examples of a batch",
}


def register(layer: type[nn.Module], form: Callable[..., BayesianLayer]) -> None:
    """Say how a layer becomes Bayesian: `form(layer)` makes the Bayesian one from the plain one.

    The key is the exact type: a subclass may compute something else, so it needs an entry of its own. A later entry
    replaces an earlier one.
    """
    if not (isinstance(layer, type) and issubclass(layer, nn.Module)):
        raise EvclError(f"register takes a subclass of torch.nn.Module, not {layer!r}")
    _FORMS[layer] = form


register(nn.Linear, Linear)
register(nn.Conv2d, Conv2d)
register(nn.Dropout, Dropout)
register(nn.Dropout1d, partial(Dropout, positions=1))
register(nn.Dropout2d, partial(Dropout, positions=2))
register(nn.Dropout3d, partial(Dropout, positions=3))


def bayesianize(
    module: nn.Module,
    *,
    init_std: float | Sequence[float] | None = 0.01,
    generators: Sequence[torch.Generator] | None = None,
    replicas: int = 1,
    unsupported: Literal["error", "deterministic"] = "error",
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> BayesianNetwork:
    """A new network like `module`, with a Gaussian over every weight; `module` itself is left alone.

    Posterior means start from the module's own weights or, with `generators` (one a replica), are drawn He-uniform.
    `init_std` (one for all, or one a replica) is the standard deviation at the start; None makes a network of points,
    without variances. A layer whose weights are all frozen (`requires_grad=False`) stays plain and fixed; so does,
    with `unsupported="deterministic"`, a layer that has no Bayesian form.
    """
    if not isinstance(module, nn.Module):
        raise EvclError(f"the network must be a torch.nn.Module, not {type(module).__name__}")
    if unsupported not in ("error", "deterministic"):
        raise EvclError(f"unsupported must be 'error' or 'deterministic', not {unsupported!r}")
    if generators is not None:
        replicas = len(generators)
    weights = Weights(replicas)
    names = {id(p): name for name, p in module.named_parameters()}  # a tied weight has one name
    kept = copy.deepcopy(module)
    means: dict[str, Tensor] = {}
    converted: dict[int, nn.Module] = {}  # a layer used twice stays one layer

    def convert(plain: nn.Module, copied: nn.Module, path: str) -> nn.Module:
        if id(plain) in converted:
            return converted[id(plain)]
        form = _FORMS.get(type(plain))
        own = dict(plain.named_parameters(recurse=False))
        trainable = [p.requires_grad for p in own.values()]
        if form is not None and (any(trainable) or not own):
            if not all(trainable):
                raise EvclError(f"{path!r} ({type(plain).__name__}) is frozen in part: freeze all of it, or none")
            layer = form(plain)
            layer.weights = weights
            layer.names = {key: names[id(p)] for key, p in own.items()}
            for key, p in own.items():
                if names[id(p)] not in means:
                    means[names[id(p)]] = _initial(key, own, generators, replicas)
            result: nn.Module = layer
        else:
            _check_kept(plain, path, own, unsupported)
            for p in copied.parameters(recurse=False):
                p.requires_grad_(False)
            for key, child in plain._modules.items():  # named_children leaves out a child's second name
                if child is not None:
                    inner = copied.get_submodule(key)
                    setattr(copied, key, convert(child, inner, f"{path}.{key}" if path else key))
            result = copied
        converted[id(plain)] = result
        return result

    trunk = convert(module, kept, "").to(device=device, dtype=dtype).eval()
    layout = Layout({name: tuple(m.shape[1:]) for name, m in means.items()})
    flat = [m.flatten(1) for m in means.values()]
    mean = torch.cat(flat, 1) if flat else torch.empty(replicas, 0)
    mean = mean.to(device=device, dtype=dtype)
    log_std = None
    if init_std is not None:
        stds = mean.new_tensor(init_std, dtype=torch.float64).reshape(-1, 1)
        log_std = stds.log().to(dtype).expand_as(mean).clone()
    return BayesianNetwork(trunk, weights, layout, Gaussian(mean, log_std))


def _initial(
    key: str,
    own: dict[str, nn.Parameter],
    generators: Sequence[torch.Generator] | None,
    replicas: int,
) -> Tensor:
    """[R, *shape]: the module's own weights for every replica, or a He-uniform draw a replica."""
    parameter = own[key].detach()
    if generators is None:
        return parameter.expand(replicas, *parameter.shape)
    fan_in = math.prod(own["weight"].shape[1:]) if "weight" in own else parameter.numel()
    return torch.stack([he_uniform(parameter.shape, fan_in, g) for g in generators])


def _check_kept(plain: nn.Module, path: str, own: dict[str, nn.Parameter], unsupported: str) -> None:
    """Refuse to keep, silently, a layer that learns nothing or computes something else here."""
    kind = type(plain).__name__
    why = next((reason for t, reason in _REFUSED.items() if isinstance(plain, t)), None)
    if unsupported == "deterministic" and (why is None or "mixes" in why):
        return  # in evaluation mode a batch norm uses its stored statistics
    if any(p.requires_grad for p in own.values()):
        parameter = next(iter(own))
        name = f"{path}.{parameter}" if path else parameter
        raise EvclError(f"{name!r} ({kind}) has no Bayesian form: register one, or pass unsupported='deterministic'")
    if why is not None:
        raise EvclError(f"{path!r} ({kind}) {why}: leave it out, or register a Bayesian form for it")
