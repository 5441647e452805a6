"""Callbacks: what a task reports while it is learned, and who listens."""

from evcl.callbacks.callback import Callback, Epoch
from evcl.callbacks.logs import CsvLog, TensorBoard

__all__ = ["Callback", "CsvLog", "Epoch", "TensorBoard"]
