"""Joint training: a plain network trained on all tasks at once. It is an upper bound, not a continual learner.

L = mean NLL over the examples of all tasks, each through its own head
"""

from evcl._core.summaries import METHOD_SUMMARIES
from evcl.methods.method import Method

JOINT = Method(name="joint", summary=METHOD_SUMMARIES["joint"], bayesian=False, jointly=True)
