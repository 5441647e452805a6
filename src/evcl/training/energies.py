"""Networks without heads, whose own outputs explain the targets: their data within a session, how likely they make new
examples, and what they generate. See `evcl.targets.Energy`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.randomness import Purpose, generator
from evcl.methods import TaskData
from evcl.nn import VAE, outputs
from evcl.nn.passes import bound_to
from evcl.targets import Bound, Energy

if TYPE_CHECKING:
    from evcl.training.run import Run
    from evcl.training.session import Given, Session

MOST_NUMBERS = 5_000_000  # of a replica's outputs that are held at once; it must not depend on the replicas beside it


def is_energy(run: Run) -> bool:
    """Whether the network has no heads: its own outputs explain the targets."""
    return isinstance(run.likelihood, Energy)


def prepared(session: Session, task: Given, number: int) -> TaskData:
    """A task's data on the run's device. The head of a task is a name only: it has no weights."""
    run, name = session.run, task.head
    if not session.heads:
        x = task.x[0, :1].to(run.network.posterior.mean)
        run.network.whole = run.features(x)
        if isinstance(run.likelihood, Bound):
            _check_widths(run, run.likelihood, x)
    if name not in session.heads:
        session.heads[name] = [name]
        session.groups[name] = [session.group(len(session.groups), [name])]
        session.shown[name] = [{name}]
    session.domains[task.name], session.lacking = 0, []
    run.add_film(number + 1)
    return data(session, task, number)


def _check_widths(run: Run, bound: Bound, x: Tensor) -> None:
    """Refuse a network that does not give what a bound needs for inputs like x [1, ...]."""
    vae = _vae(run)
    decoded, code = bound.width(x.flatten(1)), 2 * vae.latents
    with torch.no_grad(), run.network.alone():
        encoded = vae.encoder(x.clone()).flatten(1).shape[1]
    came = run.network.whole - encoded
    if (came, encoded) != (decoded, code):
        raise EvclError(
            f"for {bound.name} of {x.numel()} inputs with {vae.latents} latents, the encoder must give {code} numbers "
            f"and the decoder {decoded}, not {encoded} and {came}"
        )


def data(session: Session, task: Given, number: int) -> TaskData:
    """A task's inputs and targets. Without targets, the inputs are what is to be explained."""
    mean = session.run.network.posterior.mean
    x = task.x.to(mean)
    y = x if not isinstance(task.y, Tensor) else task.y.to(mean.device)
    weights = None if task.weights is None else task.weights.to(mean)
    return TaskData(x, y, session.groups[task.head][0].number, weights, number)


@torch.no_grad()
def log_likelihood(run: Run, task: TaskData, samples: int | None = None) -> Tensor:
    """[R, N]: log p(x) of each example, in nats, at the posterior's means. For a bound, by importance sampling with
    this many latent draws; for any other energy, its negative.
    """
    likelihood, network = run.likelihood, run.network
    assert isinstance(likelihood, Energy)
    mean = run.predictor(task.task).mean
    with run.precise():
        if isinstance(likelihood, Bound):
            return _importance(run, likelihood, mean, task, samples or likelihood.samples)
        found = outputs(network, mean, network.layout, task.x, [], task=task.task).flatten(0, 1)
        y = task.y.repeat(len(mean) // len(task.y), *[1] * (task.y.dim() - 1)).flatten(0, 1)
        nll: Tensor = likelihood.nll(found, y).unflatten(0, (len(mean), -1))
        return -nll


def _importance(run: Run, bound: Bound, mean: Tensor, task: TaskData, samples: int) -> Tensor:
    """log 1/S sum_s p(x, z_s) / q(z_s | x), z_s drawn from q(z | x): at most log p(x), and equal to it for large S."""
    network, r = run.network, len(mean)
    vae = _vae(run)
    sources = [generator(seed, Purpose.IMPORTANCE, task.task, device=mean.device) for seed in run.seeds]
    rows = max(1, MOST_NUMBERS // network.whole)
    step, found = min(samples, rows), []
    for xs in task.x.split(max(1, rows // samples), 1):
        x = xs.repeat(r // len(xs), *[1] * (xs.dim() - 1)).flatten(0, 1)
        n, pieces = xs.shape[1], []
        with bound_to(network, mean, task.task, len(x)):
            code = vae.encoder(x).unflatten(0, (r, n))
        mu, log_variance = code.chunk(2, 2)
        for start in range(0, samples, step):
            s = min(step, samples - start)
            eps = torch.stack([_normal(source, n, s, mu.shape[2], like=mu) for source in sources])
            z = mu.unsqueeze(2) + (0.5 * log_variance).exp().unsqueeze(2) * eps
            with bound_to(network, mean, task.task, r * n * s):
                shown = vae.decoder(z.flatten(0, 2)).flatten(1)
            each = [t.unsqueeze(2).expand(-1, -1, s, -1).flatten(0, 2) for t in (code, x.view(r, n, -1))]
            pieces.append(bound.log_weight(shown, each[0], eps.flatten(0, 2), each[1]).view(r, n, s).logsumexp(2))
        found.append(torch.stack(pieces).logsumexp(0))
    return torch.cat(found, 1) - float(torch.tensor(float(samples)).log())


def _normal(source: torch.Generator, *shape: int, like: Tensor) -> Tensor:
    return torch.randn(shape, generator=source, device=like.device, dtype=like.dtype)


@torch.no_grad()
def sample(run: Run, task: int, count: int) -> Tensor:
    """[R, count, D]: inputs that a task's model generates: the mean of p(x | z) for z from N(0, I), at the posterior's
    means. They are a function of the seed.
    """
    vae, mean, bound = _vae(run), run.predictor(task).mean, run.likelihood
    assert isinstance(bound, Bound)
    z = torch.stack([torch.randn(count, vae.latents, generator=generator(s, Purpose.SAMPLE, task)) for s in run.seeds])
    with run.precise(), bound_to(run.network, mean, task, len(mean) * count):
        shown: Tensor = bound.shown(vae.decoder(z.to(mean).flatten(0, 1)).flatten(1)).unflatten(0, (len(mean), count))
        return shown


def _vae(run: Run) -> VAE:
    if not isinstance(run.network.trunk, VAE):
        raise EvclError("only a network that is an evcl.nn.VAE, learned with likelihood='bound', has a density")
    return run.network.trunk
