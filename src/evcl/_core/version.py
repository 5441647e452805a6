"""The version of evcl that is installed. Asking for it takes longer than most of `evcl --help`: see lazy.py."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("evcl")
except PackageNotFoundError:  # run from the source folder, not installed
    __version__ = "0"
