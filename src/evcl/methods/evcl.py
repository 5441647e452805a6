"""EVCL: VCL plus a Fisher-weighted elastic penalty on the means and variances, and a distillation loss on the outputs.

L_t = mean NLL + beta/N_t KL(q_t || q_{t-1}) + lambda/2 sum_i F_i [(mu_i - mu*_i)^2 + (s2_i - s2*_i)^2] + distillation

The anchor (mu*, s2*) is the posterior at the end of the last task, which is also the prior q_{t-1}. With the default
`fisher_scale`, F = sum_k n_k T^2 F_k / N_t: the weight that Laplace's approximation gives the rows of earlier tasks
relative to those of the new one, so that lambda = 1 has a meaning. `importance` chooses another measure in place of the
Fisher (see importance.py). The last term is in `teacher.py`; the paper does not have it (`distill` 0).

New classes: if a task has rows of half of its head's old classes at most, its new classes are learned in a softmax of
their own, a group of classes g,

    p(y | x) = p(g | x) p(y | x, g)

p(y | x, g) is the network's, trained and protected as if g were the head of another task: no old class is taught to be
silent. p(g | x) comes from a Gaussian likelihood per class, which forgets nothing (see generative.py).

New domains: a task of old classes whose inputs are of another kind, and whose labels follow another rule, would
overwrite what the softmax knows. It is a domain d of its head, with a softmax and likelihoods of its own, and

    p(y | x) = sum_d p(d | x) p(y | x, d)

Whether a task is one, its rows decide (see domains.py). Tasks of one distribution share one softmax. With the
setting `one_softmax`, a head always has one softmax over all its classes.

With Kronecker factors (`importance` kfac, see kronecker.py), the precision of q_{t-1} would be a second, diagonal
estimate of the curvature that the factors estimate, and the past would count twice. So the KL then leaves the means of
weights with factors to the matrix penalty, and holds only their variances.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from evcl._core.settings import ELASTIC, Setting, Settings
from evcl.methods import class_statistics
from evcl.methods.class_statistics import Statistics
from evcl.methods.domains import domains as judged
from evcl.methods.domains import familiarity
from evcl.methods.elastic_memory import Memory as ElasticMemory
from evcl.methods.generative import with_classes
from evcl.methods.importance import trackers
from evcl.methods.kronecker import MERGE, factored, penalty, remembered
from evcl.methods.label_noise import tempering
from evcl.methods.method import Asked, Fit, Learned, Learning, Method, Newcomer, Round
from evcl.methods.teacher import DISTILLATION, USUAL, protection, taught, unlearned
from evcl.methods.vcl import betas, kl
from evcl.nn import Gaussian


@dataclass(frozen=True)
class Memory(ElasticMemory):
    """What EWC keeps, and the likelihood per class."""

    classes: Statistics = field(default_factory=Statistics)


def learn(memory: ElasticMemory, round_: Round, s: Settings) -> Learning:
    heads = taught(round_.tasks, round_)
    familiar = familiarity(memory.classes, round_, heads) if isinstance(memory, Memory) else {}
    past, beta = protection(memory.rows, round_, s, familiar), tempering(s, round_)
    to_prior = kl(memory.prior, beta, memory.beta, past, round_, s)
    if memory.factors:
        to_prior = replace(to_prior, means=1 - factored(memory, round_))
    terms = [to_prior, *penalty(memory, s, round_, past.elastic)]
    fitted = yield Fit(round_.tasks, terms=terms, losses=past.losses, trackers=trackers(s))
    fitted = unlearned(fitted, to_prior.prior, past, round_)
    return Learned(fitted.q, remembered(memory, fitted, round_, s, betas(beta, memory.beta, past, round_, s)))


def log_joint(memory: Memory, q: Gaussian, asked: Asked) -> list[Tensor] | None:
    return class_statistics.log_joint(memory.classes, q, asked)


def domains(memory: Memory, q: Gaussian, asked: Asked, task: Newcomer) -> tuple[Tensor, Tensor] | None:
    return judged(memory.classes, q, asked, task)


ONE_SOFTMAX = Setting(
    False,
    "whether a head always has one softmax over all its classes. Otherwise the new classes of a task that lacks half "
    "of the head's old classes, and a task whose inputs and labels are unlike those of earlier tasks, get a softmax of "
    "their own there, and a Gaussian likelihood per class tells which of them predicts an input",
)
EVCL = Method(
    name="evcl",
    bayesian=True,
    learn=with_classes(learn),
    memory=Memory,
    log_joint=log_joint,
    domains=domains,
    settings={
        **ELASTIC,
        "kfac_merge": MERGE,
        **DISTILLATION,
        "distill": replace(DISTILLATION["distill"], default=USUAL),
        "one_softmax": ONE_SOFTMAX,
    },
    kept_as="evidence",
    apart=True,
)
