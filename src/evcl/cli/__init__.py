"""The command line. `app.py` registers the commands; the other files each define a group of them."""

from evcl.cli.app import main

__all__ = ["main"]
