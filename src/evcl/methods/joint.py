"""Joint training: a plain network trained on all tasks at once. It is an upper bound, not a continual learner.

L = mean NLL over the examples of all tasks, each through its own head
"""

from evcl.methods.method import Method

JOINT = Method(name="joint", jointly=True)
