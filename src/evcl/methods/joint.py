"""Joint training: a plain network on all tasks together; the ceiling, not a continual learner.

L = mean NLL over the examples of every task, each through its own head
"""

from evcl._core.summaries import METHOD_SUMMARIES
from evcl.methods.method import Method

JOINT = Method(name="joint", summary=METHOD_SUMMARIES["joint"], bayesian=False, jointly=True)
