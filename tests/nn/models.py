"""Small networks as people write them in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, ins, outs, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(ins, outs, 3, stride, 1, bias=False), nn.BatchNorm2d(outs)
        self.conv2, self.bn2 = nn.Conv2d(outs, outs, 3, 1, 1, bias=False), nn.BatchNorm2d(outs)
        self.down = None
        if stride != 1 or ins != outs:
            self.down = nn.Sequential(nn.Conv2d(ins, outs, 1, stride, bias=False), nn.BatchNorm2d(outs))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        y += x if self.down is None else self.down(x)
        return F.relu(y)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.layer1, self.layer2 = Block(4, 4, 1), Block(4, 8, 2)

    def forward(self, x):
        return F.adaptive_avg_pool2d(self.layer2(self.layer1(self.stem(x))), 1).flatten(1)


class ViT(nn.Module):
    """Patches, a class token, learned positions, torch's encoder."""

    def __init__(self, width=8):
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 10, width))
        layer = nn.TransformerEncoderLayer(width, 2, 12, 0.05, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.encoder(x).mean(1)


class GPT(nn.Module):
    """A causal transformer written out, which tells languages apart by its last state; 0 is padding."""

    def __init__(self, vocabulary=9, length=6, width=8):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width, padding_idx=0), nn.Embedding(length, width)
        self.norm1, self.norm2, self.norm = nn.RMSNorm(width), nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.up, self.down = nn.Linear(width, 16), nn.Linear(16, width)

    def forward(self, x):
        length = x.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        h = self.tokens(x) + self.places(torch.arange(length, device=x.device))
        n = self.norm1(h)
        h = h + self.attention(n, n, n, attn_mask=causal, need_weights=False)[0]
        h = h + self.down(F.gelu(self.up(self.norm2(h))))
        return self.norm(h)[:, -1]


class Old(nn.Module):
    """Torch's encoder and decoder, with the sequence as the first axis, and a mask of padding."""

    def __init__(self, width=8):
        super().__init__()
        self.tokens = nn.Embedding(9, width)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, 2, 12, 0.1), 1, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoderLayer(width, 2, 12, 0.1)

    def forward(self, x):
        h = self.tokens(x.long()).transpose(0, 1)
        memory = self.encoder(h, src_key_padding_mask=x == 0)
        return self.decoder(h[:2], memory, memory_key_padding_mask=x == 0)[0]


def images(generator, task, n=40):
    """Two classes: which of two places, another pair in each task, is bright."""
    y = torch.arange(n) % 2
    x = 0.3 * torch.randn(n, 1, 6, 6, generator=generator)
    for i, label in enumerate(y.tolist()):
        x[i, 0, 4 * label : 4 * label + 2, 3 * task : 3 * task + 3] += 1.5
    return x, y


def sentences(generator, task, n=40):
    """Two languages: words of the one, or of the other."""
    y = torch.arange(n) % 2
    first = 1 + 4 * task
    x = torch.randint(first, first + 2, (n, 6), generator=generator) + 2 * y.unsqueeze(1)
    x[:, 0] = 0
    return x, y


MODELS = {"ResNet": (ResNet, images), "ViT": (ViT, images), "GPT": (GPT, sentences), "old": (Old, sentences)}
