"""One's own data: files of examples in, a model that learns them one after another, predictions out."""

from evcl.tables.commands import Predicted, checkpoint_folder, learn, predict
from evcl.tables.model import Model, load_model

__all__ = ["Model", "Predicted", "checkpoint_folder", "learn", "load_model", "predict"]
