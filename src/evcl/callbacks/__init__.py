"""Callbacks: the events of training a task, and loggers that write them to files.

In: events of training. Out: rows of a CSV file, TensorBoard's files, or whatever a user's callback does.
To change: loggers can be added. Fixed: a callback sees numbers, never the state of a run, so that it changes no
result.
"""

from evcl.callbacks.callback import Callback, Epoch
from evcl.callbacks.logs import CsvLog, TensorBoard

__all__ = ["Callback", "CsvLog", "Epoch", "TensorBoard"]
