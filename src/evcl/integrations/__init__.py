"""evcl in other libraries' loops and with their data: Avalanche, Continuum, Hugging Face, Lightning, laplace-torch.

Each submodule needs the package it is named after: `import evcl.integrations.avalanche`.
"""

from evcl.integrations.penalty import Penalty

__all__ = ["Penalty"]
