"""The kernel of a network's probabilities at a few examples, if its weights have a Gaussian with a diagonal covariance.

    K_c = J_c S J_c^T,   J_c = d p_c(X) / d theta   [M, P],   p = softmax(outputs),   S = diag(variance)

K_c is the covariance of p_c(X), the probabilities of class c at M examples, if the network is linearised. It is summed
over the weights of one layer at a time, from blocks of J_c. Nearly equal examples make K_c nearly singular, so it is
computed in float64: rounding must not make it indefinite.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from evcl._core.devices import double
from evcl.curvature.fisher import forward_pass, output_gradients, rows_at_once, uses_of, whole_gradient
from evcl.nn import BayesianNetwork, Layout


def kernels(
    network: BayesianNetwork,
    mean: Tensor,
    layout: Layout,
    x: Tensor,
    heads: Sequence[int],
    variance: Tensor,
    task: int | None = None,
) -> tuple[Tensor, Tensor]:
    """p [R, M, C] at the weights `mean` [R, P] for examples x [R, M, ...], and K [R, C, M, M] in float64.

    K is on the CPU if the device has no float64. `variance` [R, P] is the diagonal of S, over the weights of `layout`.
    `task`: whose FiLM row to use.
    """
    network.bind(mean, None, layout)
    network.weights.noise = None
    probabilities: list[Tensor] = []

    def each_class(outputs: Tensor) -> list[Tensor]:
        p = outputs.softmax(2)
        probabilities.append(p.detach())
        return [one.sum() for one in p.unbind(2)]

    with network.using(task):
        calls, targets = forward_pass(network, x, heads, each_class)
    r, examples = x.shape[:2]
    deviation = double(variance).sqrt()
    k, scales = deviation.new_zeros(r, len(targets), examples, examples), layout.views(deviation)
    for c, deltas in enumerate(output_gradients(calls, targets)):
        for name, uses in uses_of(scales, calls, deltas, examples).items():
            scale, shape, size = scales[name].unsqueeze(1), scales[name].shape[1:], rows_at_once(uses)
            blocks = [slice(i, min(i + size, examples)) for i in range(0, examples, size)]
            for i, rows in enumerate(blocks):
                a = (double(whole_gradient(name, uses, shape, rows)) * scale).flatten(2)
                k[:, c, rows, rows] += a @ a.mT
                for others in blocks[i + 1 :]:
                    part = a @ (double(whole_gradient(name, uses, shape, others)) * scale).flatten(2).mT
                    k[:, c, rows, others] += part
                    k[:, c, others, rows] += part.mT
    return probabilities[0], k
