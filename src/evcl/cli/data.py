"""`evcl data`: list the data sets, fetch them, and verify the cached files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from evcl._core.errors import EvclError
from evcl.cli.commands import HELP, Once
from evcl.cli.options import DataDir
from evcl.cli.progress import echo

app = typer.Typer(rich_markup_mode=None, context_settings=HELP, help="List, fetch and verify data sets.")


@app.command("list", cls=Once)
def list_() -> None:
    """List every data set.

    What the cache holds, where it was fetched from, and its licence.
    """
    from evcl import data
    from evcl.data.progress import megabytes

    for name, entry in data.CATALOG.items():
        here = data.status(name)
        state = f"{megabytes(here.bytes)} in {here.folder}, from {here.source}" if here.fetched else "not fetched"
        if here.fetched and here.problem:
            state = f"{here.problem}; run evcl data fetch {name}"
        echo(f"{name:<14} {entry.summary}")
        echo(f"{'':<14} {state}")
        echo(f"{'':<14} licence: {entry.licence}; cite: {entry.citation}")


@app.command(cls=Once)
def fetch(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="Data sets to fetch; see evcl data list.")],
    data_dir: DataDir = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Use only --data-dir and the cache [EVCL_OFFLINE=1].")
    ] = False,
) -> None:
    """Fetch data sets into the cache.

    From the first source whose files have the right checksums.
    """
    from evcl import data
    from evcl.data.progress import megabytes

    _known(names)
    if data_dir is not None and not data_dir.is_dir():
        raise typer.BadParameter(f"--data-dir: there is no folder {data_dir}")

    def one(name: str) -> str:
        here = data.fetch(name, data_dir, offline or None)
        return f"{name}: verified, {megabytes(here.bytes)} in {here.folder}, from {here.source}"

    _each(names, one)


@app.command(cls=Once)
def verify(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Data sets to verify [all that were fetched].")
    ] = None,
) -> None:
    """Check every byte in the cache, and count duplicate images."""
    from evcl import data
    from evcl.data.progress import megabytes

    _known(names or [])
    wanted = names or [name for name in data.CATALOG if data.status(name).fetched]
    if not wanted:
        echo("nothing has been fetched yet; see evcl data fetch")

    def one(name: str) -> str:
        found = data.verify(name)
        entry = data.CATALOG[name]
        if not entry.images:
            twice = f"{found.copies} texts are duplicates" if "texts" in entry.arrays else "files, byte by byte"
        elif found.test_images:
            twice = f"{found.shared} of {found.test_images} test images are also training images"
        else:
            twice = f"no published train/test split; {found.copies} images are duplicates"
        return f"{name}: intact, {megabytes(found.bytes)}, from {found.source}; {twice}"

    _each(wanted, one)


def _known(names: list[str]) -> None:
    from evcl import data

    try:
        for name in names:
            data.CATALOG[name]
    except EvclError as error:
        raise typer.BadParameter(str(error)) from error


def _each(names: list[str], one: Callable[[str], str]) -> None:
    """Print one line per data set. If one fails, still process the others, then raise."""
    failed = []
    for name in names:
        try:
            echo(one(name))
        except EvclError as error:
            failed.append(str(error))
    if failed:
        raise EvclError("; ".join(failed))
