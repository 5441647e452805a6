"""experiment"""
from __future__ import annotations
import os
import math
import torch
from torch import Tensor
from evcl._core.settings import Setting, Settings
from evcl._core.summaries import METHOD_SUMMARIES
from evcl.methods import vcl
from evcl.methods.method import Learning, Method, Round
from evcl.methods.teacher import DISTILLATION
from evcl.nn import Gaussian, log_stds
from evcl._core.randomness import generator

def drawn(round_: Round, s: Settings) -> Gaussian | None:
    if not round_.seen:
        return None
    net=round_.network
    mean = torch.empty_like(round_.posterior.mean)
    mode=os.environ.get("MODE","fresh")
    for i,seed in enumerate(round_.seeds):
        g = generator(seed, "redrawn", round_.number if mode!="same" else 0)
        for name, span in net.layout.spans.items():
            b = math.sqrt(3)*net.scales[name]
            n=mean[i, span].numel()
            mean[i, span] = torch.empty(n, dtype=torch.float64).uniform_(-b,b,generator=g).to(mean)
    if os.environ.get("KEEPHEAD"):
        for name, span in net.layout.spans.items():
            if name.startswith("head "): mean[:,span]=round_.posterior.mean[:,span]
    std = log_stds(s.init_std, net.scales, net.layout, mean, 0.02).expand_as(mean).clone()
    if mode=="post":
        mean=round_.posterior.mean
    return Gaussian(mean, std)

def learn(memory, round_, s) -> Learning:
    learned = yield from vcl.learn(memory, round_, s, drawn(round_, s))
    return learned

IMPROVED_VCL = Method(name="improved-vcl", summary=METHOD_SUMMARIES["improved-vcl"], bayesian=True, learn=learn, memory=vcl.Memory, settings=DISTILLATION)
