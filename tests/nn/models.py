"""Small networks as people write them in plain PyTorch, and what tests do with networks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import evcl
from evcl._core.randomness import GeneratorNoise
from evcl._core.settings import resolve
from evcl.methods import METHODS
from evcl.training import Run


class Net(nn.Module):
    """A network of these layers and parameters, with `run` as its forward pass."""

    def __init__(self, run, **parts):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, torch.Tensor) else part)

    def forward(self, x):
        return self.run(self, x)


def run_of(module, method="evcl", seeds=(0,), draw=False, dtype=torch.float32, device="cpu", **given):
    """The replicas of a network, one per seed."""
    settings = resolve(method, METHODS[method].known_settings, given)
    return Run(module, METHODS[method], [settings] * len(seeds), seeds, draw=draw, dtype=dtype, device=device)


def bound(network, noise=None, drawn=True, grads=None):
    """The network, computing with its posterior's means, and with its variances if `drawn`."""
    variance = network.posterior.variance() if drawn else None
    network.bind(network.posterior.mean, variance, network.layout, grads)
    network.weights.noise = noise
    return network


def sources(count):
    """Noise from a generator of its own for each replica."""
    return GeneratorNoise([torch.Generator().manual_seed(r) for r in range(count)])


def saved(learner, folder, x, network=None, task=None):
    """The learner that is read from the file; it predicts the same."""
    learner.save(folder / "model.safetensors")
    again = evcl.load(folder / "model.safetensors", network=network)
    assert torch.equal(again.predict_proba(x, task), learner.predict_proba(x, task))
    return again


def block(ins, outs, stride):
    def run(m, x):
        y = m.bn2(m.conv2(F.relu(m.bn1(m.conv1(x)), inplace=True)))
        y += x if m.down is None else m.down(x)
        return F.relu(y)

    same = stride == 1 and ins == outs
    down = None if same else nn.Sequential(nn.Conv2d(ins, outs, 1, stride, bias=False), nn.BatchNorm2d(outs))
    first = {"conv1": nn.Conv2d(ins, outs, 3, stride, 1, bias=False), "bn1": nn.BatchNorm2d(outs)}
    return Net(run, **first, conv2=nn.Conv2d(outs, outs, 3, 1, 1, bias=False), bn2=nn.BatchNorm2d(outs), down=down)


def resnet():
    def run(m, x):
        return F.adaptive_avg_pool2d(m.layer2(m.layer1(m.stem(x))), 1).flatten(1)

    stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    return Net(run, stem=stem, layer1=block(4, 4, 1), layer2=block(4, 8, 2))


def vit():
    """Patches, a class token, learned positions, torch's encoder."""

    def run(m, x):
        x = m.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([m.token.expand(len(x), -1, -1), x], 1) + m.positions
        return m.encoder(x).mean(1)

    layer = nn.TransformerEncoderLayer(8, 2, 12, 0.05, "gelu", batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8), enable_nested_tensor=False)
    own = {"token": torch.randn(1, 1, 8), "positions": torch.randn(1, 10, 8)}
    return Net(run, patches=nn.Conv2d(1, 8, 2, stride=2), **own, encoder=encoder)


def gpt():
    """A causal transformer written out, which tells languages apart by its last state; 0 is padding."""

    def run(m, x):
        length = x.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        h = m.tokens(x) + m.places(torch.arange(length, device=x.device))
        n = m.norm1(h)
        h = h + m.attention(n, n, n, attn_mask=causal, need_weights=False)[0]
        h = h + m.down(F.gelu(m.up(m.norm2(h))))
        return m.norm(h)[:, -1]

    tables = {"tokens": nn.Embedding(9, 8, padding_idx=0), "places": nn.Embedding(6, 8)}
    norms = {name: nn.RMSNorm(8) for name in ("norm1", "norm2", "norm")}
    attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
    return Net(run, **tables, **norms, attention=attention, up=nn.Linear(8, 16), down=nn.Linear(16, 8))


def old():
    """Torch's encoder and decoder, with the sequence as the first axis, and a mask of padding."""

    def run(m, x):
        h = m.tokens(x.long()).transpose(0, 1)
        memory = m.encoder(h, src_key_padding_mask=x == 0)
        return m.decoder(h[:2], memory, memory_key_padding_mask=x == 0)[0]

    layer = nn.TransformerEncoderLayer(8, 2, 12, 0.1)
    encoder = nn.TransformerEncoder(layer, 1, nn.LayerNorm(8), enable_nested_tensor=False)
    return Net(run, tokens=nn.Embedding(9, 8), encoder=encoder, decoder=nn.TransformerDecoderLayer(8, 2, 12, 0.1))


def lstm():
    """Sentences without their padding, read in both directions."""

    def run(m, x):
        h, lengths = m.tokens(x), (x != 0).sum(1).cpu()
        start = h.new_zeros(4, len(x), 8)
        packed = nn.utils.rnn.pack_padded_sequence(h, lengths, True, enforce_sorted=False)
        _, (h, _) = m.reads(packed, (start, start))
        return torch.cat([h[-2], h[-1]], 1)

    reads = nn.LSTM(8, 8, 2, batch_first=True, bidirectional=True, dropout=0.1)
    return Net(run, tokens=nn.Embedding(9, 8, padding_idx=0), reads=reads)


def gru():
    """Time as the first axis; the first state is learned; a cell reads what the layer says."""

    def run(m, x):
        said, h = m.reads(m.tokens(x).transpose(0, 1), m.start.expand(-1, len(x), -1).contiguous())
        h = h[0]
        for one in said:
            h = m.cell(one, h)
        return h

    return Net(run, tokens=nn.Embedding(9, 8), reads=nn.GRU(8, 8), start=torch.zeros(1, 1, 8), cell=nn.GRUCell(8, 8))


def norm():
    """An RMSNorm as Hugging Face models have it."""
    return Net(lambda m, x: m.weight * (x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()), weight=torch.ones(8))


def llama():
    """Rotary attention written out, norms of its own, a gate, a table used a second time as a matrix."""

    def turned(m, x):
        angles = torch.outer(torch.arange(x.shape[2], device=x.device).to(m.inv_freq), m.inv_freq)
        angles = torch.cat([angles, angles], -1).to(x)
        a, b = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-b, a], -1) * angles.sin()

    def run(m, x):
        h = m.tokens(x)
        n = m.norm1(h)
        q, k, v = (f(n).unflatten(-1, (2, -1)).transpose(1, 2) for f in (m.q, m.k, m.v))
        dropped = 0.1 if m.training else 0.0
        y = F.scaled_dot_product_attention(turned(m, q), turned(m, k), v, is_causal=True, dropout_p=dropped)
        h = h + m.o(y.transpose(1, 2).flatten(2))
        n = m.norm2(h)
        h = h + m.down(F.silu(m.gate(n)) * m.up(n)) * m.scale
        return F.linear(h.mean(1), m.tokens.weight)

    layers = {"tokens": nn.Embedding(9, 8), "norm1": norm(), "norm2": norm()}
    layers |= {name: nn.Linear(8, 8, bias=False) for name in "qkvo"}
    layers |= {"gate": nn.Linear(8, 12), "up": nn.Linear(8, 12), "down": nn.Linear(12, 8)}
    net = Net(run, **layers, scale=torch.tensor(0.5))
    net.register_buffer("inv_freq", 100 ** -(torch.arange(0, 4, 2) / 4), persistent=False)
    return net


def normed():
    """Weight norm and spectral norm, behind a batch norm and dropout."""

    def run(m, x):
        h = F.max_pool2d(F.relu(m.conv(m.norm(x))), 2)
        return F.relu(m.out(m.drop(h.flatten(1)))) * 2

    weight_norm, spectral_norm = nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm
    conv, out = weight_norm(nn.Conv2d(1, 4, 3, padding=1)), spectral_norm(nn.Linear(36, 8))
    return Net(run, conv=conv, norm=nn.BatchNorm2d(1), drop=nn.Dropout(0.1), out=out)


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
    "ResNet": (resnet, images),
    "ViT": (vit, images),
    "GPT": (gpt, sentences),
    "old": (old, sentences),
    "LSTM": (lstm, sentences),
    "GRU": (gru, sentences),
    "Llama": (llama, sentences),
    "normed": (normed, images),
}
