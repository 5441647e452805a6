"""The command line. `app.py` registers the commands; the other files each define a group of them.

In: words of a command line. Out: text, through `progress.py` alone, and a status: 0, 1 for an error, 2 for wrong
usage.
To change: words and layout of what is printed. A command parses, calls one function and prints. Fixed: no heavy
import at the top of a file: `evcl --help` starts without torch (`tests/test_install.py`).
"""

import sys

from evcl._core.errors import MissingExtra, extra


def main() -> None:
    """Run the command line, or say in one line what it needs."""
    try:
        with extra("cli", "the command line needs typer and rich"):
            import rich  # noqa: F401
            import typer  # noqa: F401
        from evcl.cli import app
    except MissingExtra as error:
        sys.exit(f"evcl: {error}")
    app.main()


__all__ = ["main"]
