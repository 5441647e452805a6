"""Update rules: Adam for the means, Adam or a natural step for sigma."""

from evcl.training.rules.adam import Adam
from evcl.training.rules.rule import Estimating, Rule
from evcl.training.rules.update import Natural, Update, gpu_kernels

__all__ = ["Adam", "Estimating", "Natural", "Rule", "Update", "gpu_kernels"]
