"""Update rules: Adam or SGD for the means, Adam or a natural step for sigma."""

from evcl.training.rules.adam import Adam
from evcl.training.rules.rule import Estimating, Rule
from evcl.training.rules.sgd import SGD
from evcl.training.rules.update import Natural, Update, gpu_kernels

__all__ = ["SGD", "Adam", "Estimating", "Natural", "Rule", "Update", "gpu_kernels"]
