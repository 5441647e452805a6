"""The command line: `app` has the main commands, and each other file a group of them."""

from evcl.cli.app import main

__all__ = ["main"]
