"""What each method adds to the loss and what it remembers; a short file each."""

from evcl.methods.coreset import KCENTER, RANDOM, VCL_KCENTER, VCL_RANDOM
from evcl.methods.evcl import EVCL
from evcl.methods.ewc import EWC
from evcl.methods.joint import JOINT
from evcl.methods.method import METHODS, FinishedTask, Memory, Method, elastic, get, register
from evcl.methods.naive import NAIVE
from evcl.methods.terms import KL, Centred, Elastic, Pull, Quadratic, Term, autograd_gradients, collapse
from evcl.methods.together import together
from evcl.methods.vcl import VCL

# the order of `evcl list`
for _method in (EVCL, VCL, VCL_RANDOM, VCL_KCENTER, EWC, RANDOM, KCENTER, NAIVE, JOINT):
    register(_method)

__all__ = [
    "KL",
    "METHODS",
    "Centred",
    "Elastic",
    "FinishedTask",
    "Memory",
    "Method",
    "Pull",
    "Quadratic",
    "Term",
    "autograd_gradients",
    "collapse",
    "elastic",
    "get",
    "register",
    "together",
]
