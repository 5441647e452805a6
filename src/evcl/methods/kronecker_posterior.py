"""EVCL with a matrix for every layer (`posterior="kronecker"`): q_t = N(mu, L_t^-1), and L_t has Kronecker products.

    L_t = 1/s_p^2 I + 1/beta sum_k S_k,    S_k = n_k E_q[F_k] ~ G_k (x) A_k for the [W, b] of a layer

This is the fixed point of natural-gradient steps on VCL's objective, mean NLL + beta/N KL(q || q_{t-1}), for a Gaussian
of this structure: rows add N/beta times their expected Fisher to the prior's precision (Khan and Rue, 2023). The matrix
has what a diagonal leaves out, so that there is no elastic term beside it: with this S_k, rows count once, for any
beta. The means are fitted first,

    mean NLL + 1/(2N) (mu - mu*)^T (beta/s_p^2 I + sum_{k<t} S_k) (mu - mu*),

with the noise of the diagonal Gaussian that is nearest under the same KL; then F_t is measured at draws of it.

The NLL is quadratic only near mu, and a new task moves the weights further. There the NLL of the old rows grows faster
than F says, most where the network is certain and F is nearly 0. So F is that of softened predictions, T^2 F_T, which
is F if all classes are equally likely; and a part of the mean of their diagonals is added to G and A, for units that
were not active. Softened, a row counts about ten times. Where new rows agree with the old ones (forgetting.py), there
is nothing to protect against, and a tenth of it counts. T = 1, damping = 0 and once = 1 are Bayes' rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.settings import ELASTIC, Setting, Settings
from evcl.curvature import blocks
from evcl.methods.elastic_memory import Memory
from evcl.methods.kl import KL, betas, first_precision
from evcl.methods.kronecker import Factored, measured
from evcl.methods.memory import TRUNK_KEY
from evcl.methods.method import Fit, Learned, Learning, Method, Past, Round
from evcl.methods.parts import Rules, rule
from evcl.methods.terms import Number
from evcl.nn import BayesianNetwork, Gaussian, head_names
from evcl.posterior.kronecker import Factors, KroneckerGaussian, diagonals
from evcl.targets import Likelihood

MAX_AUTO_SIDE = 1024  # posterior=auto: the largest matrix, whose eigenvectors take half a second on one core
POSTERIOR = Setting(
    "auto",
    "the structure of the Gaussian over the weights: diagonal, a variance for each; kronecker, a covariance for each "
    f"layer; auto: kronecker if targets are classes, tempering is not 0 and no layer has more than {MAX_AUTO_SIDE} "
    "inputs or outputs",
    choices=("auto", "diagonal", "kronecker"),
)
DIAGONAL_STRENGTH = 3.0  # a diagonal misses what weights do together; a matrix does not
STRENGTH = replace(
    ELASTIC["strength"],
    default="auto",
    help="lambda, the weight of the elastic term; with posterior=kronecker, how often the evidence of earlier rows "
    f"counts; auto: {DIAGONAL_STRENGTH:g}, and with posterior=kronecker 1",
    auto=True,
)
DIAGONAL = {"posterior": replace(POSTERIOR, default="diagonal", choices=("diagonal",)), "strength": ELASTIC["strength"]}
"""The settings of a method that computes with a diagonal posterior only."""


@dataclass(frozen=True)
class Kronecker(Rules):
    """The rules of a Kronecker posterior."""

    prefix: ClassVar[str] = "kronecker"
    temperature: float = rule(
        4.0,
        "T: the Fisher uses the probabilities softmax(logits / T); 1 is Laplace's approximation",
        "ablated: 1, 2, 4, 8 and 16 on validation data of random streams and permuted digits",
        low=1e-2,
        high=1e3,
    )
    damping: float = rule(
        0.05,
        "fraction of the mean of its diagonal that is added to each factor of the Fisher",
        "ablated: 0, 0.05 and 0.2 on validation data of random streams and permuted digits",
        high=1e3,
    )
    once: float = rule(
        0.1,
        "the least share of the evidence of earlier rows that counts where new rows agree with them, and nothing is to "
        "be protected: the softened Fisher counts a row about ten times",
        "ablated: 0.03, 0.1, 0.3 and 1 on validation data of digits in 26 files",
        high=1.0,
    )
    draws: int = rule(
        4, "draws of the weights that the Fisher is averaged over", "bound: its error and the time it takes", low=1
    )


class Matrix(Factored):
    """The part of the KL that pulls the means to each other, as a matrix."""

    name: ClassVar[str] = "kl"


def diagonal_only(method: Method, **changes: Any) -> Method:
    """A method made from EVCL, for a diagonal posterior only."""
    settings = {**method.settings, **dict.fromkeys(Kronecker().settings), **DIAGONAL, **changes.pop("settings", {})}
    return replace(method, structure=None, settled=None, settings=settings, **changes)


def settled(s: Settings, network: BayesianNetwork, likelihood: Likelihood) -> Settings:
    """The settings with the structure that `posterior=auto` chooses, and its `strength`."""
    chosen = s.posterior
    if chosen == "auto":
        wide = (max(block.sizes(network.layout)) for block in blocks(network, network.layout).values())
        small = max(wide, default=MAX_AUTO_SIDE + 1) <= MAX_AUTO_SIDE
        plain = s.importance == "fisher" and not s.film and network.width is None and s.tempering != 0
        chosen = "kronecker" if small and likelihood.softmax and plain else "diagonal"
    elif chosen == "kronecker" and s.tempering == 0:
        raise EvclError("with tempering=0 the weights have no covariance: use posterior=diagonal", setting="posterior")
    elif chosen == "kronecker" and network.width is not None:
        raise EvclError("a prior of your own has a width for each weight: use posterior=diagonal", setting="posterior")
    if chosen == "kronecker" and s.get("kfac_merge") == "tasks":
        raise EvclError("a sum of products has no draws: use another kfac_merge than tasks", setting="kfac_merge")
    usual = 1.0 if chosen == "kronecker" else DIAGONAL_STRENGTH
    strength = usual if isinstance(s.strength, str) else s.strength
    return Settings({**s, "posterior": chosen, "strength": strength})


def learn(memory: Memory, round_: Round, s: Settings, beta: Number, past: Past) -> Learning:
    own = Kronecker.of(s)
    kept = past.prior * torch.as_tensor(past.elastic).clamp_min(own.once).to(memory.importance)
    prior = belief(memory, round_.network, s, dict.fromkeys(memory.beta, beta) | {TRUNK_KEY: beta}, kept)
    variance, first = 1 / prior.precision(), first_precision(round_, s)
    # the rest of the pull on means with factors is the matrix's
    pull = torch.where(prior.factored() > 0, first * variance, 1.0)
    to_prior = KL(Gaussian(prior.mean, 0.5 * variance.log()), beta / round_.n, pull)
    rows = {key: (a[:, 1:], _column(beta / round_.n) * g[:, 1:]) for key, (a, g) in prior.factors.items()}
    matrix = [Matrix(memory.prior, rows, prior.blocks)] if rows else []
    fitted = yield Fit(round_.tasks, terms=[to_prior, *matrix], losses=past.losses)
    how: dict[str, Any] = {"fisher_temperature": own.temperature, "fisher_spread": own.damping}
    how |= {"fisher_draws": own.draws, "fisher_scale": "examples", "kfac_merge": s.get("kfac_merge", "nearest")}
    factors, rest = measured(memory, fitted, round_, Settings({**s, **how}))
    last = betas(beta, memory.beta, past, round_, s)
    return Learned(fitted.q, replace(memory, factors=factors).after(fitted, round_, rest, s.fisher_decay, last))


def structure(memory: Memory, network: BayesianNetwork, s: Settings) -> KroneckerGaussian | None:
    """The posterior from which predictions draw; None: a diagonal one."""
    if s.get("posterior") != "kronecker" or not memory.factors:
        return None
    beta: Mapping[int, Any] = memory.beta or {TRUNK_KEY: s.tempering}
    return replace(belief(memory, network, s, beta), mean=network.posterior.mean)


def without_matrices(memory: Memory, network: BayesianNetwork) -> Memory:
    """The memory with the diagonals of its matrices alone."""
    known, diagonal = blocks(network, network.layout), memory.importance.clone()
    for key, pair in memory.factors.items():
        known[key].add(network.layout, diagonal, diagonals(*pair))
    return replace(memory, importance=diagonal, factors={})


def belief(
    memory: Memory, network: BayesianNetwork, s: Settings, beta: Mapping[int, Any], kept: Number = 1.0
) -> KroneckerGaussian:
    """N(mu, L^-1), L as at the top. `beta`: by head, and of the trunk; `kept`: the part of the evidence that counts."""
    layout, mean = network.layout, memory.prior.mean
    first = (-2 * network.first_log_std(s.prior_std, mean)).exp().expand_as(mean)
    of_head = {name: one for k, one in beta.items() if k != TRUNK_KEY for name in head_names(k).values()}
    known = blocks(network, layout)
    factors: Factors = {}
    for key, (a, g) in memory.factors.items():
        width = known[key].views(layout, first, 1)[0][:, :1, :1].unsqueeze(3)  # one prior for the whole layer
        share = _column(kept * s.strength / of_head.get(known[key].weight, beta[TRUNK_KEY]))
        one, eye = (torch.ones_like(f[:, :1]) if f.dim() == 3 else _eye(f) for f in (a, g))
        factors[key] = torch.cat([one, a], 1), torch.cat([width * eye, share * g], 1)
    rest = first + kept * s.strength / beta[TRUNK_KEY] * memory.importance
    made = KroneckerGaussian(mean, layout, known, factors, rest)
    return replace(made, rest=made.rest * (1 - made.factored()))


def _eye(factor: Tensor) -> Tensor:
    return torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device).expand_as(factor[:, :1])


def _column(value: Number) -> Number:
    return value.view(-1, 1, 1, 1) if isinstance(value, Tensor) else value
