"""The data of the programs beside this one: three tasks, the 8x8 digits with the pixels in three orders."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor

TRAIN = 1300  # the first so many rows of a task, in a random order; the others are for the test


def tasks() -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """(inputs, labels, test inputs, test labels) of each task."""
    images, labels = load_digits(return_X_y=True)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(len(images), generator=generator)
    x, y = torch.tensor(images / 16, dtype=torch.float32)[rows], torch.tensor(labels)[rows]
    orders = (torch.randperm(64, generator=generator) for _ in range(3))
    return [(x[:TRAIN, order], y[:TRAIN], x[TRAIN:, order], y[TRAIN:]) for order in orders]
