"""The command line: the options before a command; turns every error into a one-line message."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import time
import traceback
from typing import Annotated

import typer

from evcl._core.errors import EvclError, brief
from evcl._core.interrupts import Interrupted
from evcl._core.shown import shown
from evcl._core.torchrun import own, world
from evcl.cli.options import HELP, ClosedPipe, Sections, Usage, UsageError, wrong
from evcl.cli.progress import console

app = typer.Typer(
    cls=Sections,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=HELP,
    help="Bayesian continual learning: EVCL and its peers on streams of tasks.",
)


def _interrupted(*_: object) -> None:
    raise Interrupted


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback when something fails.")] = False,
) -> None:
    context.obj = {"debug": debug}
    if version:
        from evcl import __version__

        typer.echo(f"evcl {__version__}")
        raise typer.Exit
    if own() > 0:
        console().quiet = True
    if world() > 1 and context.invoked_subcommand != "run":
        raise Usage(f"torchrun works only with evcl run: start evcl {context.invoked_subcommand or ''} without it")
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


def main() -> None:
    """Run the command line. Exit status: 0 on success, 1 on failure, 2 on wrong usage, 141 if the reader of its output
    has ended. Errors print one line.
    """
    debug = "--debug" in sys.argv[1:]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show "±" prints "?"
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupted)
    try:
        status = app(standalone_mode=False, prog_name="evcl")
        sys.exit(status if isinstance(status, int) else 0)
    except UsageError as error:
        _fail(wrong(error), 2, debug)
    except EvclError as error:
        _fail(str(error), 2 if isinstance(error, Usage) else 1, debug)
    except (Interrupted, typer.Abort) as error:
        command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
        what = str(error) or ("finished runs are kept" if command in KEEPING else "nothing was written")
        _fail(f"interrupted; {what}", 1, debug, wait=0)
    except (ClosedPipe, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE if hasattr(signal, "SIGPIPE") else 0)
    except Exception as error:
        if message := out_of_memory(error):
            _fail(message, 1, debug)
        if isinstance(error, OSError) and error.filename:
            _fail(f"cannot use {brief(str(error.filename))}: {error.strerror or error}", 1, debug)
        where = "" if debug else "; evcl --debug shows where"
        _fail(f"{type(error).__name__}: {error}{where}".replace("\n", " "), 1, debug)


KEEPING = ("demo", "reproduce", "tune", "sweep")  # commands that make many runs, and write each when it has ended
RANK_WAIT_SECONDS = 30.0


def _fail(message: str, status: int, debug: bool, wait: float = RANK_WAIT_SECONDS) -> None:
    """Print one line and exit. If all processes of a run fail alike, only process 0 prints: torchrun ends the others
    when it exits. So the others wait first; one that still runs after `wait` seconds is the only one that failed.
    """
    rank = 0
    with contextlib.suppress(EvclError):
        rank = own()
    with contextlib.suppress(Interrupted):
        if rank > 0:
            time.sleep(wait)
            message = f"process {rank}: {message}"
        if rank == 0 or wait:
            if debug:
                traceback.print_exc()
            sys.stderr.write(f"evcl: {shown(message, line=True)}\n")
    sys.exit(status)


if __name__ == "__main__":
    main()


def out_of_memory(error: BaseException) -> str | None:
    """The message for an error that means too little memory, on this machine or its GPU; None for another error."""
    text = str(error)
    if type(error).__name__ == "OutOfMemoryError" or "CUDA out of memory" in text:
        return (
            "the GPU has too little memory: lower batch_size, predict_samples or the number of seeds, use a smaller "
            "network, or use --device cpu; what was saved before is kept"
        )
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        return "there is too little memory: use a smaller network, smaller batches or fewer rows; saved work is kept"
    return None
