"""One step, one task, a whole stream; prediction."""

from evcl.training.adam import Adam
from evcl.training.checkpoint import Checkpoints
from evcl.training.early import Validation
from evcl.training.history import History
from evcl.training.run import Run, State
from evcl.training.saver import Saver, Stopped
from evcl.training.stream import StreamResult, learn_stream
from evcl.training.task import OnEpoch, Pool, Progress, Step, TaskData, matmul_precision, optimise, streams

__all__ = [
    "Adam",
    "Checkpoints",
    "History",
    "OnEpoch",
    "Pool",
    "Progress",
    "Run",
    "Saver",
    "State",
    "Step",
    "Stopped",
    "StreamResult",
    "TaskData",
    "Validation",
    "learn_stream",
    "matmul_precision",
    "optimise",
    "streams",
]
