"""EWC on three tasks, with Continuum: it has the stream, and the method is written by hand."""

import numpy as np
import torch
from continuum.datasets import InMemoryDataset
from continuum.scenarios import ContinualScenario
from continuum.tasks import TaskType
from digits import tasks
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
streams = []
for part in (slice(0, 2), slice(2, 4)):
    x, y = (np.concatenate([task[part][k].numpy() for task in tasks()]) for k in (0, 1))
    numbers = np.repeat(range(3), len(x) // 3)
    streams.append(ContinualScenario(InMemoryDataset(x, y, numbers, data_type=TaskType.TENSOR)))
train, test = streams
model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
loss_of = nn.CrossEntropyLoss()
anchors: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []  # the weights and the Fisher of each task
for task_set in train:
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(20):
        for x, y, _t in DataLoader(task_set, 64, shuffle=True):
            loss = loss_of(model(x), y)
            for means, fisher in anchors:
                weights = zip(model.parameters(), means, fisher, strict=True)
                loss = loss + sum(500 * (f * (w - m) ** 2).sum() for w, m, f in weights)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    fisher = [torch.zeros_like(w) for w in model.parameters()]
    for x, y, _t in DataLoader(task_set, 1):
        gradients = torch.autograd.grad(loss_of(model(x), y), list(model.parameters()))
        for f, g in zip(fisher, gradients, strict=True):
            f += g**2 / len(task_set)
    anchors.append(([w.detach().clone() for w in model.parameters()], fisher))
right = [torch.cat([model(x).argmax(1) == y for x, y, _t in DataLoader(one, 512)]) for one in test]
print([round(100 * one.float().mean().item()) for one in right])
