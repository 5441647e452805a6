"""Training: one step, one fit, one round of a method, a whole stream. Also prediction.

In: a network, a method and the rows of tasks. Out: the state after a round, histories, checkpoints, predictions.
To change: how fast a step is (`paths.py`). No file knows a method, or a field of its memory. Fixed: golden numbers;
resumed from a checkpoint, a run ends with the same bits; a round that fails leaves the state as it was.
"""

from evcl._core.ranks import joined
from evcl.methods import Reread, TaskData
from evcl.training.checkpoint import Checkpoints, Stopped
from evcl.training.checkpointer import Checkpointer
from evcl.training.data import Pool
from evcl.training.graphed import streams
from evcl.training.observer import History, Observer, Observers, Position, Progress, Validation
from evcl.training.rules import Adam
from evcl.training.run import Run
from evcl.training.session import Given, Session
from evcl.training.step import Step, matmul_precision
from evcl.training.stream import StreamResult, learn_stream

__all__ = [
    "Adam",
    "Checkpointer",
    "Checkpoints",
    "Given",
    "History",
    "Observer",
    "Observers",
    "Pool",
    "Position",
    "Progress",
    "Reread",
    "Run",
    "Session",
    "Step",
    "Stopped",
    "StreamResult",
    "TaskData",
    "Validation",
    "joined",
    "learn_stream",
    "matmul_precision",
    "streams",
]
