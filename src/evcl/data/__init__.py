"""Bytes in, uint8 arrays out."""

from evcl.data.digits import digits

__all__ = ["digits"]
