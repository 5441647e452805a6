"""One's own data: files of examples in, a model that learns them one after another, predictions out."""

from evcl.tables.model import Model, load_model
from evcl.tables.work import Predicted, checkpoint_folder, learn, predict

__all__ = ["Model", "Predicted", "checkpoint_folder", "learn", "load_model", "predict"]
