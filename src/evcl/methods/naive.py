"""Naive training: the next task and nothing else.

L_t = mean NLL
"""

from evcl.methods.method import Method

NAIVE = Method(name="naive", summary="plain training, task after task", bayesian=False)
