"""Naive training: fit each new task and do nothing against forgetting.

L_t = mean NLL
"""

from evcl._core.summaries import METHOD_SUMMARIES
from evcl.methods.method import Method

NAIVE = Method(name="naive", summary=METHOD_SUMMARIES["naive"], bayesian=False)
