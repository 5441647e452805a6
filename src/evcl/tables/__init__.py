"""Your own data: a model that learns files of examples one after another, and predicts files."""

from evcl.tables.commands import Predicted, checkpoint_folder, export, learn, predict
from evcl.tables.model import Model, is_table, load_model

__all__ = ["Model", "Predicted", "checkpoint_folder", "export", "is_table", "learn", "load_model", "predict"]
