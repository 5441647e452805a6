"""LoRA (Hu et al., 2022): a pretrained network learns through low-rank additions to some of its weights.

    W = W0 + (alpha / rank) B A,    A [rank, in],  B [out, rank]

W0 is frozen. A has orthonormal rows, drawn once, and stays as it is; B starts at 0 and is Gaussian. A could be trained
too, but then (A, B) and (-A, -B) are the same network: the posterior has two modes, and a penalty that holds A and B
one by one does not hold their product. With A fixed, the addition D = (alpha / rank) B A is linear in B: a Gaussian
over B is one over D. As the rows of A are orthonormal, distances between two B are, up to the factor, those between
their D. So every term of a method that acts on B acts on the product: the KL term, and the elastic penalty, whose
Fisher is that of W, seen from the rows of A:

    dL/dB = (alpha / rank) dL/dW A^T,    sum F_B (B - B*)^2 = the penalty on D - D* = (alpha / rank) (B - B*) A

Training B alone costs little accuracy: A only chooses which inputs are read (Zhu et al., 2024; LoRA-FA, Zhang et al.,
2023). The first prior is as wide as makes D x as large as W0 x, for inputs x without a preferred direction.

Models of the package PEFT are used as they are: their lora_A and lora_B are trained, and both are Gaussian.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from hashlib import sha256
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evcl._core.errors import EvclError, unknown
from evcl._core.randomness import Purpose, generator
from evcl.nn.attention import Attention, more_keys
from evcl.nn.layers import Linear

PROJECTIONS = ("query", "value", "q_proj", "v_proj", "q_lin", "v_lin", "q", "v")  # their names in the field
DOWN = "down"  # the buffers that hold A
QUERY, KEY, VALUE = range(3)


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters for `Learner(network, adapters=LoRA(rank=8))`.

    Attributes:
        rank: the rank of the additions
        alpha: the factor of the additions is alpha / rank; None: twice the rank
        targets: names of linear layers, or patterns of them ("encoder.layer.5.*"); None: the query and value
            projections of attention and, if there are none, every linear layer
        tasks: "shared": one adapter, which is carried from task to task as a posterior; "each": one per task, so that
            predicting needs the task; "merged": at the end of a task, the addition is added to the frozen weight, and
            the next task starts from a new one
        seed: of the matrices A
    """

    rank: int = 8
    alpha: float | None = None
    targets: str | Sequence[str] | None = None
    tasks: Literal["shared", "each", "merged"] = "shared"
    seed: int = 0

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise EvclError(f"rank must be a whole number of at least 1, not {self.rank!r}")
        alpha = self.alpha
        if alpha is not None and (isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not alpha > 0):
            raise EvclError(f"alpha must be a number above 0, not {alpha!r}")
        if self.tasks not in ("shared", "each", "merged"):
            raise EvclError(f"tasks must be 'shared', 'each' or 'merged', not {self.tasks!r}")
        given = [self.targets] if isinstance(self.targets, str) else self.targets
        if given is not None and (not isinstance(given, Sequence) or not all(isinstance(one, str) for one in given)):
            raise EvclError(f"targets takes names of layers or patterns, not {self.targets!r}")
        if given is not None and not isinstance(given, str):
            object.__setattr__(self, "targets", tuple(given))

    @property
    def scale(self) -> float:
        return (2 * self.rank if self.alpha is None else self.alpha) / self.rank

    def described(self) -> dict[str, object]:
        """As in a file: `LoRA(**described)` makes it again."""
        return asdict(self)

    def __call__(self, network: nn.Module) -> nn.Module:
        """A copy of the network with adapters; everything else is frozen."""
        if not isinstance(network, nn.Module):
            raise EvclError(f"the network must be a torch.nn.Module, not {type(network).__name__}")
        if next(adapted(network), None) is not None:
            raise EvclError("the network has adapters already: leave adapters out")
        network = copy.deepcopy(network)
        for p in network.parameters():
            p.requires_grad_(False)
        for path in self._chosen(network):
            layer = network.get_submodule(path)
            kind = AdaptedAttention if isinstance(layer, nn.MultiheadAttention) else AdaptedLinear
            made: nn.Module = kind(layer, self, path)  # type: ignore[arg-type]
            if not path:
                return made
            network.set_submodule(path, made)
        return network

    def _chosen(self, network: nn.Module) -> list[str]:
        inside = {f"{path}.out_proj" for path, m in network.named_modules() if isinstance(m, nn.MultiheadAttention)}
        layers = {path: m for path, m in network.named_modules() if _can(m) and path not in inside}
        if not layers:
            raise EvclError("the network has no linear layer for an adapter")
        if self.targets is None:
            usual = [p for p, m in layers.items() if type(m) is not nn.Linear or p.rpartition(".")[2] in PROJECTIONS]
            return usual or list(layers)
        chosen: list[str] = []
        for pattern in [self.targets] if isinstance(self.targets, str) else self.targets:
            matching = [path for path in layers if fnmatchcase(path, pattern) or path.endswith(f".{pattern}")]
            if not matching:
                raise unknown("linear layer", pattern, list(layers))
            chosen += [path for path in matching if path not in chosen]
        return [path for path in layers if path in chosen]


def _can(module: nn.Module) -> bool:
    kinds = nn.Linear, nn.MultiheadAttention, nn.modules.linear.NonDynamicallyQuantizableLinear
    return type(module) in kinds and not more_keys(module)


def _rows(lora: LoRA, path: str, ins: int, turn: int) -> Tensor:
    """A [rank, in]: random orthonormal rows, a function of the seed, the layer and the turn."""
    if lora.rank > ins:
        raise EvclError(f"rank {lora.rank} is more than the {ins} inputs of {path!r}: choose a smaller one")
    source = generator(lora.seed, Purpose.LORA.of(path), turn)
    q, r = torch.linalg.qr(torch.randn(ins, lora.rank, generator=source, dtype=torch.float64))
    basis: Tensor = q * r.diagonal().sign()
    return basis.T.to(torch.float32).contiguous()


class Up(nn.Linear):
    """z -> B z, without bias. `width` is the standard deviation of its first prior."""

    def __init__(self, rank: int, outs: int, width: float) -> None:
        super().__init__(rank, outs, bias=False, device="meta")
        self.weight = nn.Parameter(torch.zeros(outs, rank))
        self.width = width


class BayesianUp(Linear):
    """The form of `Up`. B is 0 at first, which is also the centre of its first prior; it is never random."""

    random = False

    def __init__(self, layer: Up) -> None:
        super().__init__(layer)
        self.width = layer.width

    def redrawn(self, mean: Tensor, scale: float, source: torch.Generator) -> Tensor:
        return torch.zeros_like(mean)

    def scale(self, parameter: str) -> float:
        return self.width


class Down(nn.Linear):
    """x -> A x, for an A that is trained: that of a PEFT model."""


class BayesianDown(Linear):
    """The form of `Down`. Its first prior is centred on A as it is: at 0, nothing could reach B."""

    random = False

    def centre(self, parameter: str) -> Tensor:
        return self.own[parameter].detach().clone()


def _prior(weight: Tensor, rank: int, scale: float) -> float:
    """The width of the prior of B: that for which D x is as large as W0 x."""
    spread = float(weight.detach().square().mean().sqrt())
    return max(spread, 1e-6) * math.sqrt(weight.shape[1] / rank) / scale


class AdaptedLinear(nn.Module):
    """W0 x + b + scale B A x. W0 is frozen, as the layer `base`."""

    down: Tensor

    def __init__(self, base: nn.Linear, lora: LoRA, path: str) -> None:
        super().__init__()
        self.base, self.lora, self.scale, self.path = base, lora, lora.scale, path
        self.up = Up(lora.rank, base.out_features, _prior(base.weight, lora.rank, lora.scale)).to(base.weight)
        self.register_buffer(DOWN, _rows(lora, path, base.in_features, 0).to(base.weight))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.up(F.linear(x, self.down) * self.scale)
        return y

    def merge(self, up: dict[str, Tensor], lora: LoRA, turn: int) -> None:
        """W0 += scale B A for these B, by name within the layer, and draw the A of the next turn."""
        merged = self.base.weight.detach() + self.scale * (up["up.weight"].to(self.down) @ self.down)
        self.base.weight = nn.Parameter(merged, requires_grad=False)  # not in place: copies of the layer share it
        self.down = _rows(lora, self.path, self.down.shape[1], turn).to(self.down)

    def frozen(self) -> list[str]:
        """The names of the weights that `merge` changes."""
        return ["base.weight"]


class AdaptedAttention(Attention):
    """nn.MultiheadAttention with adapters of its query and value projections. Its own weights are frozen buffers."""

    down: Tensor

    def __init__(self, base: nn.MultiheadAttention, lora: LoRA, path: str) -> None:
        super().__init__()
        self.batch_first, self.num_heads, self.scale, self.path = base.batch_first, base.num_heads, lora.scale, path
        self.lora = lora
        packed, bias = base.in_proj_weight, base.in_proj_bias
        weights = [base.q_proj_weight, base.k_proj_weight, base.v_proj_weight] if packed is None else packed.chunk(3)
        for k, name in enumerate(("query", "key", "value")):
            self.register_buffer(name, weights[k].detach().clone())
            self.register_buffer(f"{name}_bias", None if bias is None else bias.detach().chunk(3)[k].clone())
        self.register_buffer("out", base.out_proj.weight.detach().clone())
        self.register_buffer("out_bias", None if base.out_proj.bias is None else base.out_proj.bias.detach().clone())
        self.up = nn.ModuleDict()
        for name in ("query", "value"):
            weight = self.get_buffer(name)
            self.up[name] = Up(lora.rank, len(weight), _prior(weight, lora.rank, lora.scale)).to(weight)
            self.register_buffer(f"{DOWN}_{name}", _rows(lora, f"{path}.{name}", weight.shape[1], 0).to(weight))

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        projected = []
        for name, x in (("query", query), ("key", key), ("value", value)):
            y = F.linear(x, self.get_buffer(name), self._buffers[f"{name}_bias"])
            if name in self.up:
                y = y + self.up[name](F.linear(x, self.get_buffer(f"{DOWN}_{name}")) * self.scale)
            projected.append(y)
        return projected

    def combine(self, y: Tensor) -> Tensor:
        return F.linear(y, self.get_buffer("out"), self._buffers["out_bias"])

    def merge(self, up: dict[str, Tensor], lora: LoRA, turn: int) -> None:
        for name in self.up:
            down = self.get_buffer(f"{DOWN}_{name}")
            added = self.scale * (up[f"up.{name}.weight"].to(down) @ down)
            setattr(self, name, self.get_buffer(name) + added)
            setattr(self, f"{DOWN}_{name}", _rows(lora, f"{self.path}.{name}", down.shape[1], turn).to(down))

    def frozen(self) -> list[str]:
        return list(self.up)


def bayesian_attention(layer: AdaptedAttention) -> AdaptedAttention:
    """The form of `AdaptedAttention`: the same with Bayesian additions."""
    made = copy.copy(layer)
    made._buffers = dict(layer._buffers)
    made._modules = {"up": nn.ModuleDict({name: BayesianUp(up) for name, up in layer.up.items()})}  # type: ignore[arg-type]
    return made


class AdaptedPeft(nn.Module):
    """A layer of PEFT, as one of ours: base(x) + scale B A x, with A trained too."""

    def __init__(self, base: nn.Module, down: nn.Linear, up: nn.Linear, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.down = Down(down.in_features, down.out_features, bias=False, device="meta")  # which draws nothing
        self.down.weight = nn.Parameter(down.weight.detach().clone())
        weight = base.get_parameter("weight")
        self.up = Up(up.in_features, up.out_features, _prior(weight, up.in_features, scale)).to(up.weight)
        self.up.weight = nn.Parameter(up.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.up(self.down(x) * self.scale)
        return y


Adapted = AdaptedLinear | AdaptedAttention | AdaptedPeft


def adapted(network: nn.Module) -> Iterator[tuple[str, Adapted]]:
    """The layers of a network that have adapters, with their names."""
    return ((path, m) for path, m in network.named_modules() if isinstance(m, Adapted))


def with_adapters(network: nn.Module, lora: LoRA | None) -> nn.Module:
    """The network with these adapters. Layers of PEFT become layers of ours; without any, it is the network itself."""
    if lora is not None:
        if not isinstance(lora, LoRA):
            raise EvclError(f"adapters must be an evcl.nn.LoRA, such as evcl.nn.LoRA(rank=8), not {lora!r}")
        known = [layer for _, layer in adapted(network)]
        if known and all(getattr(layer, "lora", None) == lora for layer in known):  # that of a pickled learner
            return network
        return lora(network)
    if not isinstance(network, nn.Module) or not any(_of_peft(m) for m in network.modules()):
        return network
    network = copy.deepcopy(network)
    for path, layer in list(network.named_modules()):
        if _of_peft(layer):
            network.set_submodule(path, _from_peft(path, layer))
    return network


def _of_peft(module: Any) -> bool:
    return type(module).__module__.startswith("peft.tuners.lora") and hasattr(module, "lora_A")


def _from_peft(path: str, layer: Any) -> AdaptedPeft:
    active = list(layer.active_adapters)
    special = getattr(layer, "use_dora", {}).get(active[0] if active else "", False) or layer.merged
    if len(active) != 1 or type(layer.base_layer) is not nn.Linear or special or layer.fan_in_fan_out:
        raise EvclError(
            f"{path!r} of the PEFT model cannot be used: it needs one active LoRA adapter that is not merged, without "
            "DoRA, of a torch.nn.Linear"
        )
    down, up = layer.lora_A[active[0]], layer.lora_B[active[0]]
    if up.bias is not None:
        raise EvclError(f"{path!r} of the PEFT model cannot be used: leave out lora_bias")
    return AdaptedPeft(layer.base_layer, down, up, float(layer.scaling[active[0]]))


def adapter_tensors(network: nn.Module, lora: LoRA | None) -> set[str] | None:
    """The names of those frozen tensors of a network that belong in a file: those of its adapters, and the weights that
    they were merged into. All others are the base model's. None: the network has no adapters.
    """
    if next(adapted(network), None) is None:
        return None
    tensors: set[str] = set()
    for path, layer in adapted(network):
        names = [key for key, _ in layer.named_buffers(recurse=False) if key.startswith(DOWN)]
        if lora is not None and lora.tasks == "merged" and not isinstance(layer, AdaptedPeft):
            names += layer.frozen()
        tensors |= {f"{path}.{name}" if path else name for name in names}
    return tensors


def base_hash(network: nn.Module, lora: LoRA | None) -> str:
    """The sha256 of a network's frozen tensors, except those that a file of its adapters has."""
    digest, skip = sha256(), adapter_tensors(network, lora) or set()
    for name, tensor in sorted(network.state_dict().items()):
        if name not in skip:
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
