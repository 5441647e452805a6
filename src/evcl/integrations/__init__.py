"""evcl in other libraries' loops and with their data: Avalanche, Continuum, Hugging Face, Lightning, laplace-torch.

In: another library's loop, stream or posterior. Out: a method's terms in its loss, or its data as tasks; all by
`penalty.py`.
To change: one file for each library; `make test-integrations` runs it with the library itself.

Each submodule needs the package it is named after: `import evcl.integrations.avalanche`.
"""

from evcl.integrations.penalty import Penalty

__all__ = ["Penalty"]
