"""Your own data: a model that learns files of examples one after another, and predicts files."""

from evcl.tables.asked import Learning, Predicting
from evcl.tables.commands import Learned, checkpoint_folder, export, learn, learn_file
from evcl.tables.merging import merge
from evcl.tables.model import Model, is_table, load_model
from evcl.tables.predicting import Predicted, predict, predict_file

__all__ = [
    "Learned",
    "Learning",
    "Model",
    "Predicted",
    "Predicting",
    "checkpoint_folder",
    "export",
    "is_table",
    "learn",
    "learn_file",
    "load_model",
    "merge",
    "predict",
    "predict_file",
]
