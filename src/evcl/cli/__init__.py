"""The command line. `app.py` registers the commands; the other files each define a group of them."""

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
