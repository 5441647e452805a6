"""BERT (Devlin et al., 2019) from plain layers, and MiniLM, a small pretrained one of it.

The names of its weights are those of `transformers.BertModel`, whose files it reads. It takes a batch of texts as one
tensor of floats [N, length], the numbers of their pieces, with 0 where a text has ended, and gives one vector per text:
the mean over the text's pieces, scaled to a length of sqrt(width), so that its numbers are about 1 in size. The cosine
of two such vectors says how similar two texts are.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evcl._core.errors import EvclError
from evcl.data import load_arrays
from evcl.data.weights import read_safetensors
from evcl.data.wordpiece import WordPiece

PADDING_SCORE = -1e9  # added to the score of a place without a piece; finite, so that an empty text has a softmax too
UNUSED = ("embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias")  # in files, but not in this network


class _Added(nn.Module):
    """A linear layer, added to what came before it, and a norm."""

    def __init__(self, ins: int, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(ins, width)
        self.LayerNorm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, h: Tensor, before: Tensor) -> Tensor:
        y: Tensor = self.LayerNorm(self.dense(h) + before)
        return y


class _Layer(nn.Module):
    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        projections = nn.ModuleDict({name: nn.Linear(width, width) for name in ("query", "key", "value")})
        self.attention = nn.ModuleDict({"self": projections, "output": _Added(width, width)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(width, inner)})
        self.output = _Added(inner, width)

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        projections = self.attention["self"].children()
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in projections)
        h = self.attention["output"](F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2), h)
        y: Tensor = self.output(F.gelu(self.intermediate["dense"](h)), h)
        return y


class Bert(nn.Module):
    """From numbers of pieces [N, length], as floats, to vectors [N, width]. Without dropout."""

    def __init__(
        self,
        vocabulary: int = 30522,
        width: int = 384,
        layers: int = 6,
        heads: int = 12,
        inner: int = 1536,
        positions: int = 512,
    ) -> None:
        super().__init__()
        if width % heads:
            raise EvclError(f"width must be a multiple of heads, but {width} is not one of {heads}")
        self.width, self.positions = width, positions
        rows = {"word_embeddings": vocabulary, "position_embeddings": positions, "token_type_embeddings": 2}
        self.embeddings = nn.ModuleDict({name: nn.Embedding(count, width) for name, count in rows.items()})
        self.embeddings["LayerNorm"] = nn.LayerNorm(width, eps=1e-12)
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(_Layer(width, inner, heads) for _ in range(layers))})

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 2 or x.shape[1] > self.positions:
            raise EvclError(
                f"Bert takes numbers of pieces [N, length] with a length of up to {self.positions}, not shape "
                f"{tuple(x.shape)}"
            )
        return pooled(*through(self, x, len(layers(self))))


class BertTop(nn.Module):
    """The last layers of a Bert, from `first` on. Its input is what `below` makes of numbers of pieces.

    If adapters are added to these layers alone, the layers below never change, and need to be computed only once.
    """

    def __init__(self, bert: Bert, first: int) -> None:
        super().__init__()
        self.layer = layers(bert)[first:]

    def forward(self, x: Tensor) -> Tensor:
        h, there = x[..., :-1], x[..., -1]
        for layer in self.layer:
            h = layer(h, ignored(there))
        return pooled(h, there)


@torch.no_grad()
def below(bert: Bert, first: int, x: Tensor) -> Tensor:
    """[N, length, width + 1]: the output of the layers before `first` for x [N, length], and where there are pieces."""
    h, there = through(bert, x, first)
    return torch.cat([h, there.unsqueeze(2)], 2)


def layers(bert: Bert) -> nn.ModuleList:
    return cast(nn.ModuleList, bert.encoder["layer"])


def through(bert: Bert, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """[N, length, width]: the output of the first layers; and [N, length]: 1 where there are pieces, otherwise 0."""
    pieces, of = x.long(), bert.embeddings
    places = torch.arange(x.shape[1], device=x.device).expand(x.shape)
    h = of["word_embeddings"](pieces) + of["token_type_embeddings"](torch.zeros_like(pieces))
    h = of["LayerNorm"](h + of["position_embeddings"](places))
    there = (x != 0).to(h.dtype)
    for layer in layers(bert)[:count]:
        h = layer(h, ignored(there))
    return h, there


def ignored(there: Tensor) -> Tensor:
    """What to add to the scores of an attention, for places that are 1 if they have a piece: [N, 1, 1, length]."""
    return (1 - there).mul(PADDING_SCORE)[:, None, None]


def pooled(h: Tensor, there: Tensor) -> Tensor:
    """The vector of each text, from those of its pieces."""
    mean = (h * there.unsqueeze(2)).sum(1) / there.sum(1, keepdim=True).clamp_min(1)
    return F.normalize(mean, dim=1) * math.sqrt(h.shape[2])


def minilm(data_dir: Path | None = None) -> Bert:
    """all-MiniLM-L6-v2, pretrained; weights are fetched if the cache does not have them. A vector has 384 numbers."""
    tensors = read_safetensors(load_arrays("minilm", data_dir)["model"])
    with torch.device("meta"):
        made = Bert()
    made.load_state_dict({name: t for name, t in tensors.items() if name not in UNUSED}, assign=True)
    for p in made.parameters():
        p.data = p.data.clone()  # memory of its own, rather than that of the memory-mapped file
    return made.eval()


def minilm_tokeniser(data_dir: Path | None = None) -> WordPiece:
    """The tokeniser of `minilm`: `minilm_tokeniser()(texts, length=128)` gives the network's input."""
    return WordPiece.from_bytes(load_arrays("minilm", data_dir)["vocab"].tobytes())
