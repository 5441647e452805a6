"""Naive training: fit each new task and do nothing against forgetting.

L_t = mean NLL
"""

from evcl.methods.method import Method

NAIVE = Method(name="naive")
