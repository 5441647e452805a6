"""Your own data: a model that learns files of examples one after another, and predicts files.

In: files: CSV, Excel, Parquet, Arrow, DuckDB, NPY, NPZ, folders of images. Out: a model file that includes the
encoding of the columns, and files of predictions.
To change: readers can be added (`source.py` is their interface). Fixed: an encoding is only ever extended, and models
in `tests/tables/kept` are read, and never made again.
"""

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
