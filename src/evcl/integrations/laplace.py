"""laplace-torch: a Laplace approximation as a learner's first prior."""

from __future__ import annotations

from torch import Tensor

from evcl._core.errors import EvclError, extra
from evcl.nn import Prior

with extra("laplace", "evcl.integrations.laplace needs laplace-torch"):
    from laplace import DiagLaplace

__all__ = ["from_laplace"]


def from_laplace(la: DiagLaplace) -> Prior:
    """The posterior of a fitted `DiagLaplace`, `Laplace(model, "classification", "all", "diag")`, as a prior.

        la.fit(loader)
        learner = evcl.EVCL(trunk, prior=from_laplace(la), init="network")

    Means and precisions are found by the names of the model's parameters, so the learner's trunk must be a part of that
    model with the same names there, such as `model[:-1]` of an `nn.Sequential`. Weights that the trunk does not have,
    such as those of the model's last layer, are left out: the learner's heads are new.

    The precision counts every example that the Laplace approximation has seen once. In the first task, the learner
    weighs it with `tempering`, which is far below 1 by default: `tempering=1` gives it its full weight.
    """
    if not isinstance(la, DiagLaplace):
        raise EvclError(
            f"the posterior must be a DiagLaplace, not {type(la).__name__}: "
            "Laplace(model, likelihood, subset_of_weights='all', hessian_structure='diag')"
        )
    if not isinstance(getattr(la, "mean", None), Tensor):
        raise EvclError("the Laplace approximation has no posterior yet: call its fit(loader) first")
    means, stds, start = {}, {}, 0
    precision = la.posterior_precision.detach()
    for name, weight in la.model.named_parameters():
        if weight.requires_grad:
            part = slice(start, start + weight.numel())
            means[name] = la.mean[part].detach().reshape(weight.shape).clone()
            stds[name] = precision[part].rsqrt().reshape(weight.shape)
            start = part.stop
    if start != len(precision):
        raise EvclError(f"the posterior has {len(precision)} weights, but the model has {start} that are not frozen")
    return Prior(means, stds)
