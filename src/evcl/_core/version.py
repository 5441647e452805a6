"""The installed version of evcl, in its own module: looking it up takes longer than most of `evcl --help`."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("evcl")
except PackageNotFoundError:  # run from the source folder, not installed
    __version__ = "0"
