"""The ways to compute the steps of a fit, fastest first. Each says why it cannot, and the first that has no reason to
refuse a fit computes it. The epochs that a fit reports name it (`evcl.Epoch.path`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from evcl._core.devices import limited
from evcl.methods import Fit
from evcl.nn import BayesianNetwork, Gaussian
from evcl.nn.chain import LayerNames
from evcl.training.data import Pool
from evcl.training.rules import gpu_kernels
from evcl.training.step import Execution


@dataclass(frozen=True)
class Request:
    """What decides how the steps of a fit are computed.

    Attributes:
        network: the network to train
        weights: all its weights
        fit: what the method asked for
        pool: the examples
        how: how the run computes its steps
        chain: the network's layers, if it is a chain (nn/chain.py)
        reread: whether the examples are read anew in each epoch
    """

    network: BayesianNetwork
    weights: Gaussian
    fit: Fit
    pool: Pool
    how: Execution
    chain: LayerNames | None
    reread: bool = False

    @property
    def on_gpu(self) -> bool:
        return self.weights.mean.is_cuda


Refuses = Callable[[Request], str | None]


def kernels(request: Request) -> str | None:
    """The pass of a chain and the update in Triton kernels, captured as CUDA graphs (kernels/gpu.py)."""
    r, compiled = request, None
    if r.on_gpu and r.weights.mean.dtype == torch.float32:
        compiled = gpu_kernels()
    if compiled is None:
        return "they need a GPU, Triton and weights in float32"
    return _first(
        (r.how.noise is not None or r.how.ranks is not None, "they draw their own noise, for whole batches"),
        (not r.fit.capture, "the fit cannot be captured"),
        (r.how.accumulate > 1, "they compute a step at once"),
        (r.network.task_weights is not None, "tasks have weights of their own"),
        (r.reread, "examples are read anew"),
        (r.pool.classes > compiled.MOST_CLASSES, "there are too many classes"),
        (r.pool.weights is not None, "examples have weights"),
        (r.fit.project, "the gradient is projected"),
    ) or _by_hand(r)


def graph(request: Request) -> str | None:
    """Autograd, captured as CUDA graphs (training/graphed.py)."""
    r = request
    if not r.on_gpu:
        return "it needs a GPU"
    return _first(
        (r.how.noise is not None, "the noise is handed in"),
        (not r.fit.capture, "the fit says so"),
        (not r.network.capturable, "a layer reads values on the host"),
        (r.how.ranks is not None and not r.how.ranks.capturable, "the processes cannot be captured"),
        (r.reread, "examples are read anew"),
    )


def chain(request: Request) -> str | None:
    """The pass of a chain, written by hand (nn/chain.py)."""
    r = request
    return _first(
        (r.on_gpu, "a GPU has kernels"),
        (r.reread and bool(r.fit.losses), "what losses know of the examples changes as they are read"),
        (r.network.task_weights is not None and len(r.pool.tasks) > 1, "each task has weights of its own"),
    ) or _by_hand(r)


def autograd(request: Request) -> None:
    """Operation by operation, for any network."""


PATHS: dict[str, Refuses] = {"kernels": kernels, "graph": graph, "chain": chain, "autograd": autograd}
BY_HAND = "kernels", "chain"  # paths that use the network's form as a chain


def chosen(request: Request) -> str:
    """The name of the first path that does not refuse."""
    return next(name for name, refuses in PATHS.items() if refuses(request) is None)


def _by_hand(r: Request) -> str | None:
    """Why a pass written by hand cannot take the place of autograd."""
    return _first(
        (r.how.reference, "terms are differentiated by autograd"),
        (not r.pool.likelihood.compiled, "the likelihood is not a softmax"),
        (limited(r.weights.mean.device), "the device lacks operations"),
        (r.pool.augment, "images change from step to step"),
        (r.chain is None, "the network is not a chain of linear layers and ReLUs"),
    )


def _first(*reasons: tuple[bool, str]) -> str | None:
    return next((why for holds, why in reasons if holds), None)
