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


class LSTM(nn.Module):
    """Sentences without their padding, read in both directions."""

    def __init__(self, width=8):
        super().__init__()
        self.tokens = nn.Embedding(9, width, padding_idx=0)
        self.reads = nn.LSTM(width, width, 2, batch_first=True, bidirectional=True, dropout=0.1)

    def forward(self, x):
        h, lengths = self.tokens(x), (x != 0).sum(1).cpu()
        start = h.new_zeros(4, len(x), 8)
        packed = nn.utils.rnn.pack_padded_sequence(h, lengths, True, enforce_sorted=False)
        _, (h, _) = self.reads(packed, (start, start))
        return torch.cat([h[-2], h[-1]], 1)


class GRU(nn.Module):
    """Time as the first axis; the first state is learned; a cell reads what the layer says."""

    def __init__(self, width=8):
        super().__init__()
        self.tokens, self.reads = nn.Embedding(9, width), nn.GRU(width, width)
        self.start, self.cell = nn.Parameter(torch.zeros(1, 1, width)), nn.GRUCell(width, width)

    def forward(self, x):
        said, h = self.reads(self.tokens(x).transpose(0, 1), self.start.expand(-1, len(x), -1).contiguous())
        h = h[0]
        for one in said:
            h = self.cell(one, h)
        return h


class Norm(nn.Module):
    """An RMSNorm as Hugging Face models have it."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon))


class Llama(nn.Module):
    """Rotary attention written out, norms of its own, a gate, a table used a second time as a matrix."""

    inv_freq: torch.Tensor

    def __init__(self, width=8):
        super().__init__()
        self.tokens, self.norm1, self.norm2 = nn.Embedding(9, width), Norm(width), Norm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(width, 12), nn.Linear(width, 12), nn.Linear(12, width)
        self.register_buffer("inv_freq", 100 ** -(torch.arange(0, 4, 2) / 4), persistent=False)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def turned(self, x):
        angles = torch.outer(torch.arange(x.shape[2], device=x.device).to(self.inv_freq), self.inv_freq)
        angles = torch.cat([angles, angles], -1).to(x)
        a, b = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-b, a], -1) * angles.sin()

    def forward(self, x):
        h = self.tokens(x)
        n = self.norm1(h)
        q, k, v = (f(n).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        dropped = 0.1 if self.training else 0.0
        y = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True, dropout_p=dropped)
        h = h + self.o(y.transpose(1, 2).flatten(2))
        n = self.norm2(h)
        h = h + self.down(F.silu(self.gate(n)) * self.up(n)) * self.scale
        return F.linear(h.mean(1), self.tokens.weight)


class Normed(nn.Module):
    """Weight norm and spectral norm, behind a batch norm and dropout."""

    def __init__(self):
        super().__init__()
        normed = nn.utils.parametrizations
        self.conv, self.norm = normed.weight_norm(nn.Conv2d(1, 4, 3, padding=1)), nn.BatchNorm2d(1)
        self.drop, self.out = nn.Dropout(0.1), normed.spectral_norm(nn.Linear(36, 8))

    def forward(self, x):
        h = F.max_pool2d(F.relu(self.conv(self.norm(x))), 2)
        return F.relu(self.out(self.drop(h.flatten(1)))) * 2


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


MODELS = {
    "ResNet": (ResNet, images),
    "ViT": (ViT, images),
    "GPT": (GPT, sentences),
    "old": (Old, sentences),
    "LSTM": (LSTM, sentences),
    "GRU": (GRU, sentences),
    "Llama": (Llama, sentences),
    "normed": (Normed, images),
}
