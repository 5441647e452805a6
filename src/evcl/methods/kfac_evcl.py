"""EVCL with a Kronecker-factored Fisher: the elastic term on the means of a layer is a matrix penalty.

L_t = mean NLL + beta/N_t KL(q_t || q_{t-1}) + distillation
      + lambda/2 sum_l { tr(D_l^T G_l D_l A_l) + sum_oi G_oo A_ii (s2_oi - s2*_oi)^2 },   D_l = M_l - M*_l

M_l are the means of [W_l, b_l]; the KL holds the means of weights without factors only (see evcl.py). The factors and
their merging are in kronecker.py. EVCL's `fisher_spread` is, to first order, a damping of the factors, read on the
diagonal of their product; here it is that damping. It is EVCL with `importance` kfac and Laplace's strength, 1: the
default of EVCL makes up for what a diagonal misses.
"""

from __future__ import annotations

from dataclasses import replace

from evcl.methods.evcl import EVCL
from evcl.methods.method import Method


def with_factors(method: Method) -> Method:
    """The method NAME with Kronecker factors and Laplace's strength by default, as `kfac-NAME`."""
    name, own = f"kfac-{method.name}", dict(method.settings)
    own["importance"] = replace(method.known_settings["importance"], default="kfac")
    own["strength"] = replace(method.known_settings["strength"], default=1.0)
    return replace(method, name=name, summary="", settings=own)


KFAC_EVCL = with_factors(EVCL)
