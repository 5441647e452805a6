"""What is believed about the weights, as a value: what a network is trained to, and what the next task starts from.

In: means, and precisions in one of the structures. Out: draws, products with the precision, KL divergences, and the
posterior with more or less evidence. A structure knows names and shapes, and no network: those are in `evcl.nn`.
"""

from evcl.posterior.gaussian import Evidence, Gaussian
from evcl.posterior.layout import Extending, Layout, Part, Shape
from evcl.posterior.named import NamedPosterior, WeightPosterior

__all__ = ["Evidence", "Extending", "Gaussian", "Layout", "NamedPosterior", "Part", "Shape", "WeightPosterior"]
