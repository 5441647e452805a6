"""A registry: named entries to which users can add their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pkgutil import resolve_name
from typing import Generic, TypeVar

from evcl._core.bounds import LONGEST_NAME
from evcl._core.errors import EvclError, unknown

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """A mapping from names to entries. Looking up an unknown name raises an error that suggests the closest one."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._entries: dict[str, Callable[[], T]] = {}

    def add(self, name: str, entry: T, *, overwrite: bool = False) -> None:
        if not isinstance(name, str) or not name or name != name.strip():
            raise EvclError(f"a {self._kind} needs a name without leading or trailing spaces, not {name!r}")
        if len(name) > LONGEST_NAME:
            raise EvclError(f"the name of a {self._kind} may have at most {LONGEST_NAME} characters, not {len(name)}")
        if name in self._entries and not overwrite:
            raise EvclError(f"{self._kind} {name!r} is registered already: choose another name, or pass overwrite=True")
        self._entries[name] = lambda: entry

    def add_later(self, name: str, place: str) -> None:
        """Add an entry that is imported from `place`, "module:constant", when it is first looked up. The constant is
        the entry, or a tuple of entries of which one has this name.
        """

        def found() -> T:
            entry = resolve_name(place)
            one: T = next(one for one in entry if one.name == name) if isinstance(entry, tuple) else entry
            return one

        self._entries[name] = found

    def remove(self, name: str) -> None:
        del self._entries[name]

    def __getitem__(self, name: str) -> T:
        if name not in self:
            raise unknown(self._kind, str(name), self._entries)
        return self._entries[name]()

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
