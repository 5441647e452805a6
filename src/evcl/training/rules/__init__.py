"""Update rules: Adam or SGD for the means, Adam or a natural step for sigma.

In: gradients in flat buffers [R, P], and springs. Out: the buffers, updated in place.
To change: rules can be added (`rule.py` is the contract). Fixed: `buffers()` names everything that a step changes,
for CUDA graphs and checkpoints.
"""

from evcl.training.rules.adam import Adam
from evcl.training.rules.rule import Estimating, Rate, Rule
from evcl.training.rules.sgd import SGD
from evcl.training.rules.update import Natural, Update, gpu_kernels

__all__ = ["SGD", "Adam", "Estimating", "Natural", "Rate", "Rule", "Update", "gpu_kernels"]
