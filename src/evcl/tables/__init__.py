"""Your own data: a model that learns files of examples one after another, and predicts files."""

from evcl.tables.commands import checkpoint_folder, export, learn
from evcl.tables.merging import merge
from evcl.tables.model import Model, is_table, load_model
from evcl.tables.predicting import Predicted, predict

__all__ = ["Model", "Predicted", "checkpoint_folder", "export", "is_table", "learn", "load_model", "merge", "predict"]
