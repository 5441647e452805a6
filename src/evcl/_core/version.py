"""The version of evcl. This is its only place: the build reads it, and CITATION.cff is compared with it by a test."""

__version__ = "0.2.0"
