"""Progress of a fetch, on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


def say(line: str) -> None:
    from rich.console import Console

    Console(stderr=True, highlight=False, markup=False).print(line, soft_wrap=True)


@contextmanager
def bar(label: str, done: int, total: int) -> Iterator[Callable[[int], None]]:
    """Show the progress of a download; yields `advance(bytes)`."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        say(f"{label}: {megabytes(total - done)}")
        yield lambda count: None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task(label, total=total, completed=done)
        yield lambda count: progress.advance(task, count)


def megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
