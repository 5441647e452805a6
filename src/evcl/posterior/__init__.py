"""What is believed about the weights, as a value: what a network is trained to, and what the next task starts from.

In: means, and precisions in one of the structures. Out: draws, products with the precision, KL divergences, and the
posterior with more or less evidence.
To change: structures can be added. Fixed: the closed forms (`tests/posterior`). A structure knows names and shapes,
and no network: those are in `evcl.nn`.
"""

from typing import TYPE_CHECKING

from evcl._core.lazy import lazily
from evcl.posterior.gaussian import Evidence, Gaussian
from evcl.posterior.layout import Extending, Layout, Part, Shape

if TYPE_CHECKING:
    from evcl.posterior.named import NamedPosterior, WeightPosterior
else:
    __getattr__, __dir__ = lazily(__name__, {"evcl.posterior.named": "NamedPosterior WeightPosterior"})

__all__ = ["Evidence", "Extending", "Gaussian", "Layout", "NamedPosterior", "Part", "Shape", "WeightPosterior"]
