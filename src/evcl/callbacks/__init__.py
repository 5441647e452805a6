"""Callbacks: the events of training a task, and loggers that write them to files."""

from evcl.callbacks.callback import Callback, Epoch
from evcl.callbacks.logs import CsvLog, TensorBoard

__all__ = ["Callback", "CsvLog", "Epoch", "TensorBoard"]
