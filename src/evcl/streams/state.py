"""What rows have taught an object, as arrays by name: the form in which it is saved."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from evcl.streams.arrays import Array


class Stateful:
    """An object whose state is in its attributes `names`, which are arrays or numbers, and in its `parts`."""

    names: tuple[str, ...] = ()

    def parts(self) -> Mapping[str, Stateful]:
        """The objects that it consists of; in the state, each one's names stand below its own."""
        return {}

    def arrays(self) -> dict[str, Array]:
        """Everything that rows change, by name."""
        found = {name: np.asarray(getattr(self, name)) for name in self.names}
        for prefix, part in self.parts().items():
            found |= {f"{prefix}/{name}": array for name, array in part.arrays().items()}
        return found

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """The inverse of `arrays`."""
        for name in self.names:
            is_array = isinstance(getattr(self, name), np.ndarray)
            setattr(self, name, arrays[name] if is_array else arrays[name].tolist())
        for prefix, part in self.parts().items():
            start = f"{prefix}/"
            part.restore({name.removeprefix(start): a for name, a in arrays.items() if name.startswith(start)})
