"""A cache of its own for every test, made-up catalogue entries, and a web server on this machine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from local_server import Server

from evcl.data.catalog import CATALOG, CatalogEntry


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the cache will be; no variable of the machine has a say."""
    for name in ("EVCL_DATA", "EVCL_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("EVCL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def add() -> Iterator[Callable[[CatalogEntry], CatalogEntry]]:
    """Puts an entry into the catalogue for the length of a test."""
    added = []

    def _add(entry: CatalogEntry) -> CatalogEntry:
        CATALOG.add(entry.name, entry, overwrite=True)
        added.append(entry.name)
        return entry

    yield _add
    for name in set(added):
        CATALOG.remove(name)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.done.set()
    made.http.shutdown()
    made.http.server_close()
    thread.join()
