"""Every layer against a naive form of itself: outputs, gradients for the same noise, and the KL.

The references loop over replicas, and where weights are drawn for each example, over examples: they draw a weight, put
it into the plain layer, and leave the rest to torch.
"""

from __future__ import annotations

import pytest
import torch
from models import Net, bound, run_of
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call
from torch.nn.utils import parametrizations

from evcl.nn import bayesianize

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'", "ignore:.*weight_norm. is deprecated")
B, T = 4, 5


class Attention(nn.Module):
    """Self-attention, or attention to a part of the input with kdim and vdim, behind masks of several kinds."""

    def __init__(self, mask="none", across=False, **options):
        super().__init__()
        sizes = {"kdim": 3, "vdim": 2} if across else {}
        self.attention, self.mask, self.across = nn.MultiheadAttention(4, 2, **sizes, **options), mask, across

    def masks(self, x):
        causal = torch.ones(T, T, dtype=torch.bool).triu(1)
        return {
            "none": (None, None),
            "causal": (causal, None),
            "numbers": (torch.linspace(-1, 1, T * T, dtype=x.dtype).view(T, T), None),
            "heads": (torch.linspace(-1, 1, 2 * T * T, dtype=x.dtype).view(2, T, T).repeat(len(x), 1, 1), None),
            "padding": (None, x[..., 0] > 0.8),
            "both": (causal, (x[..., 0] > 0.8) & (torch.arange(T) > 0)),
        }[self.mask]

    def inputs(self, x):
        return (x, x[..., :3], x[..., :2]) if self.across else (x, x, x)

    def forward(self, x):
        attn, padding = self.masks(x)
        inputs = self.inputs(x)
        if not self.attention.batch_first:
            inputs = tuple(i.transpose(0, 1) for i in inputs) if self.across else (x.transpose(0, 1),) * 3
        out = self.attention(*inputs, attn_mask=attn, key_padding_mask=padding, need_weights=self.mask == "heads")[0]
        return out if self.attention.batch_first else out.transpose(0, 1)


def tokens():
    """Parameters of the module's own."""

    def run(m, x):
        return torch.cat([m.token.expand(len(x), -1, -1), x], 1) * m.place

    return Net(run, token=torch.randn(1, 1, 4), place=torch.randn(1, T + 1, 4))


class Scale(Net):
    """A layer of a user's own: taken whole."""

    def __init__(self):
        super().__init__(lambda m, x: m.inner(x * m.gamma).tanh(), gamma=torch.randn(4), inner=nn.Linear(4, 3))


def two():
    """A table that is also the matrix of two layers."""
    net = Net(None, table=nn.Embedding(7, 4), first=nn.Linear(4, 7, bias=False), second=nn.Linear(4, 7))
    net.first.weight = net.second.weight = net.table.weight
    return net


class Reads(nn.Module):
    """A recurrent layer: its outputs, and its last states. `packed`: sequences of different lengths."""

    def __init__(self, kind, packed=False, started=False, **options):
        super().__init__()
        self.layer, self.packed, self.started = kind(4, 3, **options), packed, started

    def forward(self, x):
        first, layer = self.layer.batch_first, self.layer
        layers = layer.num_layers * (2 if layer.bidirectional else 1)
        hx = None
        if self.started:  # states that the forward pass makes, by the size of its batch
            hx = torch.zeros(layers, x.size(0), layer.hidden_size, dtype=x.dtype) + x[:, 0, :1]
            hx = (hx, hx.cos()) if isinstance(hx, torch.Tensor) and "LSTM" in str(getattr(layer, "mode", "")) else hx
        y = x if first else x.transpose(0, 1)
        if self.packed:
            lengths = 1 + (x[:, :, 0] > 0).sum(1).clamp(max=T - 1)
            y = nn.utils.rnn.pack_padded_sequence(y, lengths.cpu(), batch_first=first, enforce_sorted=False)
        y, state = layer(y, hx)
        if self.packed:
            y, _ = nn.utils.rnn.pad_packed_sequence(y, batch_first=first, total_length=T)
        state = torch.cat(state, 2) if isinstance(state, tuple) else state
        y = y if first else y.transpose(0, 1)
        return torch.cat([y.flatten(1), state.transpose(0, 1).flatten(1)], 1)


def steps(kind, **options):
    """A cell, called once per time step."""

    def run(m, x):
        state, found = None, []
        for t in range(T):
            state = m.cell(x[:, t], state)
            found += state if isinstance(state, tuple) else [state]
        return torch.cat(found, 1)

    return Net(run, cell=kind(4, 3, **options))


def own():
    """Parameters of all shapes, used directly."""

    def run(m, x):
        h = nn.functional.linear(x * m.gamma, m.weight).tanh() + m.more[0]
        both = nn.functional.conv1d(h[:, :1], m.kernel, padding=1) * m.share
        return both.flatten(1) @ torch.cat([m.more[1]] * 3, 0)[:6] + h.mean(1)

    more = nn.ParameterList([torch.randn(3), torch.randn(2, 3)])
    parts = {"kernel": torch.randn(2, 1, 3), "share": torch.tensor(0.5), "more": more}
    return Net(run, weight=torch.randn(3, 4), gamma=torch.ones(4), **parts)


def pairs():
    """A layer of torch's that has no Bayesian form, and takes two tensors."""
    return Net(lambda m, x: m.both(x[:, 0], x[:, 1]), both=nn.Bilinear(4, 4, 3))


class Adapted(nn.Linear):
    """A frozen layer, and a low-rank change of it."""

    def __init__(self):
        super().__init__(4, 3)
        self.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(3, 2))

    def forward(self, x):
        return super().forward(x) + x @ self.a.mT @ self.b.mT


class Conv1D(nn.Module):
    """The layer of GPT-2 as the transformers package has it: a linear layer with weights [i, o]."""

    def __init__(self, outs, ins):
        super().__init__()
        self.nf, self.nx = outs, ins
        self.weight, self.bias = nn.Parameter(torch.randn(ins, outs)), nn.Parameter(torch.zeros(outs))

    def forward(self, x):
        return torch.addmm(self.bias, x.reshape(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


Conv1D.__module__ = "transformers.pytorch_utils"


# --- references: (plain, means, variances, noise, x) of one replica -> y ---------------------------------------------


def local(plain, mean, variance, noise, x):
    """Pre-activations have the mean and the variance that drawn weights give them."""
    spread = functional_call(plain, variance, (x.square(),))
    return functional_call(plain, mean, (x,)) + noise[0].view_as(spread) * spread.sqrt()


def flip(weight, ins, outs):
    """Signs of a weight [o, i / groups, ...]: those of its output times those of its input."""
    groups = len(ins) // weight.shape[1]
    rows = [outs[o] * ins.view(groups, -1)[o * groups // len(outs)] for o in range(len(outs))]
    return torch.stack(rows).view(*weight.shape[:2], *[1] * (weight.dim() - 2))


def flipped(plain, mean, variance, noise, x):
    """Positions: weights for each example, from one draw for the batch with the example's own signs."""
    eps, signs, *shift = noise
    ins, outs = signs.sign().tensor_split([signs.shape[1] - len(eps)], 1)
    rows = []
    for b in range(len(x)):
        drawn = {"weight": mean["weight"] + variance["weight"].sqrt() * eps * flip(eps, ins[b], outs[b])}
        if shift:
            drawn["bias"] = mean["bias"] + variance["bias"].sqrt() * shift[0][b]
        rows.append(functional_call(plain, drawn, (x[b : b + 1],))[0])
    return torch.stack(rows)


def each_example(plain, mean, variance, noise, x):
    """A draw of the weights for each example."""
    rows = []
    for b in range(len(x)):
        drawn = {k: mean[k] + variance[k].sqrt() * eps[b] for k, eps in zip(mean, noise, strict=True)}
        rows.append(functional_call(plain, drawn, (x[b : b + 1],))[0])
    return torch.stack(rows)


def once(plain, mean, variance, noise, x):
    """One draw for the batch."""
    drawn = {k: mean[k] + variance[k].sqrt() * eps[0] for k, eps in zip(mean, noise, strict=True)}
    return functional_call(plain, drawn, (x,))


def transposed(plain, mean, variance, noise, x):
    """A linear layer with weights [i, o]: one with weights [o, i]."""
    turned = [{key: value.mT if key == "weight" else value for key, value in of.items()} for of in (mean, variance)]
    return (local if x.dim() == 2 else flipped)(nn.Linear(4, 3), *turned, noise, x)


def normed(plain, mean, variance, noise, x):
    """A norm's output itself is drawn."""
    n = functional_call(plain, {k: torch.full_like(w, float(k == "weight")) for k, w in mean.items()}, (x,))
    y = n * mean["weight"] + mean.get("bias", 0)
    return y + noise[0] * (n.square() * variance["weight"] + variance.get("bias", 0)).sqrt()


def by_the_batch(plain, mean, variance, noise, x):
    """A batch norm by the statistics of this replica's batch, and a draw for each example."""
    axes = [0, *range(2, x.dim())]
    spread, centre = torch.var_mean(x, axes, keepdim=True, correction=0)
    n = (x - centre) / (spread + plain.eps).sqrt()
    gamma, beta = (mean[k] + variance[k].sqrt() * eps for k, eps in zip(("weight", "bias"), noise, strict=True))
    shape = (*gamma.shape, *[1] * (x.dim() - 2))
    return n * gamma.view(shape) + beta.view(shape)


def looked_up(plain, mean, variance, noise, x):
    """A draw of each row for each example: all positions that ask for it have it from the first of them."""
    rows = []
    for b in range(len(x)):
        drawn = {}
        for t, token in enumerate(x[b].tolist()):
            row = mean["weight"][token] + variance["weight"][token].sqrt() * noise[0][b, t]
            drawn.setdefault(token, plain.weight[token].detach() if token == plain.padding_idx else row)
        rows.append(torch.stack([drawn[token] for token in x[b].tolist()]))
    return torch.stack(rows)


def attended(plain, mean, variance, noise, x):
    """Attention written out: linear layers with weights for each example, softmax head by head."""
    attention, drawn = plain.attention, iter(noise)

    def project(x, weight, bias, rows=slice(None)):
        linear = nn.Linear(x.shape[-1], len(mean[weight]), bias=bias in mean)
        means, variances = ({"weight": of[weight]} for of in (mean, variance))
        if bias in mean:
            means["bias"], variances["bias"] = mean[bias][rows], variance[bias][rows]
        taken = [next(drawn) for _ in range(1 + len(means))]
        return flipped(linear, means, variances, taken, x)

    q, k, v = plain.inputs(x)
    bias = "attention.in_proj_bias"
    if plain.across:
        parts = enumerate(zip("qkv", (q, k, v), strict=True))
        q, k, v = (
            project(x, f"attention.{letter}_proj_weight", bias, slice(4 * i, 4 * i + 4)) for i, (letter, x) in parts
        )
    else:
        q, k, v = project(x, "attention.in_proj_weight", bias).chunk(3, -1)
    attn, padding = plain.masks(x)
    heads = []
    for h in range(2):
        part = slice(2 * h, 2 * h + 2)
        scores = q[..., part] @ k[..., part].mT / 2**0.5
        if attn is not None and attn.dtype == torch.bool:
            scores = scores.masked_fill(attn, -torch.inf)
        elif attn is not None:
            scores = scores + (attn if attn.dim() == 2 else attn.view(len(x), 2, T, T)[:, h])
        if padding is not None:
            scores = scores.masked_fill(padding.unsqueeze(1), -torch.inf)
        heads.append(scores.softmax(-1) @ v[..., part])
    assert attention.num_heads == 2
    return project(torch.cat(heads, -1), "attention.out_proj.weight", "attention.out_proj.bias")


CASES = {
    "linear": (lambda: nn.Linear(4, 3), (4,), local),
    "linear without a bias": (lambda: nn.Linear(4, 3, bias=False), (4,), local),
    "linear along a sequence with a bias": (lambda: nn.Linear(4, 3), (2, T, 4), flipped),
    "linear along a sequence": (lambda: nn.Linear(4, 3, bias=False), (T, 4), flipped),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2), (4, 9), flipped),
    "conv1d same": (lambda: nn.Conv1d(4, 2, 4, padding="same", padding_mode="circular"), (4, 9), flipped),
    "conv1d replicated": (lambda: nn.Conv1d(4, 6, 3, padding=2, padding_mode="replicate", groups=2), (4, 9), flipped),
    "conv1d valid": (lambda: nn.Conv1d(4, 2, 2, padding="valid", bias=False), (4, 9), flipped),
    "conv2d": (lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 2), groups=2), (4, 7, 5), flipped),
    "conv2d, a channel a group": (lambda: nn.Conv2d(4, 8, 2, dilation=2, groups=4, bias=False), (4, 5, 4), flipped),
    "conv2d same": (lambda: nn.Conv2d(4, 6, (3, 4), padding="same"), (4, 6, 5), flipped),
    "conv2d around": (lambda: nn.Conv2d(4, 2, 3, padding=(1, 2), padding_mode="circular"), (4, 6, 5), flipped),
    "conv2d reflected": (lambda: nn.Conv2d(4, 2, 3, padding="same", padding_mode="reflect"), (4, 6, 5), flipped),
    "embedding": (lambda: nn.Embedding(7, 3), "indices", looked_up),
    "embedding with padding": (lambda: nn.Embedding(7, 3, padding_idx=2), "indices", looked_up),
    "layer norm": (lambda: nn.LayerNorm(4), (4,), normed),
    "layer norm along a sequence": (lambda: nn.LayerNorm(4), (T, 4), each_example),
    "layer norm of two axes": (lambda: nn.LayerNorm((3, 4), bias=False), (T, 3, 4), each_example),
    "rms norm": (lambda: nn.RMSNorm(4), (4,), normed),
    "rms norm along a sequence": (lambda: nn.RMSNorm(4, eps=1e-3), (T, 4), each_example),
    "group norm": (lambda: nn.GroupNorm(2, 4), (4, 3, 2), each_example),
    "group norm of features": (lambda: nn.GroupNorm(2, 4), (4,), normed),
    "batch norm 1d": (lambda: nn.BatchNorm1d(4), (4, T), by_the_batch),
    "batch norm 2d": (lambda: nn.BatchNorm2d(4), (4, 3, 2), by_the_batch),
    "batch norm of fixed statistics": (lambda: measured(nn.BatchNorm2d(4)), (4, 3, 2), each_example),
    "attention": (lambda: Attention(batch_first=True), (T, 4), attended),
    "attention, sequence first": (lambda: Attention("causal"), (T, 4), attended),
    "attention, no bias": (lambda: Attention("both", batch_first=True, bias=False), (T, 4), attended),
    "attention, a mask of numbers": (lambda: Attention("numbers", batch_first=True), (T, 4), attended),
    "attention, a mask a head": (lambda: Attention("heads", batch_first=True), (T, 4), attended),
    "attention across": (lambda: Attention("padding", across=True, batch_first=True), (T, 4), attended),
    "attention across, sequence first": (lambda: Attention("none", across=True), (T, 4), attended),
    "parameters of its own": (tokens, (T, 4), each_example),
    "taken whole": (Scale, (T, 4), once),
    "transposed convolution": (lambda: nn.ConvTranspose2d(4, 3, 2, stride=2), (4, 3, 2), once),
    "prelu": (lambda: nn.PReLU(4), (4, 3), once),
    "lstm": (lambda: Reads(nn.LSTM), (T, 4), once),
    "lstm, stacked, both directions": (
        lambda: Reads(nn.LSTM, num_layers=2, bidirectional=True, batch_first=True, started=True),
        (T, 4),
        once,
    ),
    "lstm with projections": (lambda: Reads(nn.LSTM, proj_size=2, bias=False, num_layers=2), (T, 4), once),
    "lstm on packed sequences": (lambda: Reads(nn.LSTM, packed=True, bidirectional=True, started=True), (T, 4), once),
    "gru": (lambda: Reads(nn.GRU, batch_first=True, started=True), (T, 4), once),
    "gru on packed sequences": (
        lambda: Reads(nn.GRU, packed=True, num_layers=2, bidirectional=True, batch_first=True),
        (T, 4),
        once,
    ),
    "rnn": (lambda: Reads(nn.RNN, num_layers=2), (T, 4), once),
    "rnn with relu": (lambda: Reads(nn.RNN, nonlinearity="relu", bias=False, bidirectional=True), (T, 4), once),
    "lstm cell": (lambda: steps(nn.LSTMCell), (T, 4), once),
    "gru cell": (lambda: steps(nn.GRUCell, bias=False), (T, 4), once),
    "rnn cell": (lambda: steps(nn.RNNCell, nonlinearity="relu"), (T, 4), once),
    "used directly": (own, (3, 4), once),
    "bilinear": (pairs, (2, 4), once),
    "an adapter beside a frozen layer": (Adapted, (4,), once),
    "parametrised by a weight norm": (lambda: parametrizations.weight_norm(nn.Conv1d(4, 3, 2)), (4, 5), once),
    "old weight norm": (lambda: nn.utils.weight_norm(nn.Linear(4, 3)), (T, 4), once),
    "parametrised as orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(4, 3)), (4,), once),
    "with a bias for keys": (lambda: Attention(batch_first=True, add_bias_kv=True), (T, 4), once),
    "gpt-2's conv1d": (lambda: Conv1D(3, 4), (4,), transposed),
    "gpt-2's conv1d along a sequence": (lambda: Conv1D(3, 4), (T, 4), transposed),
}


def measured(norm):
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    norm.num_batches_tracked += 1
    return norm


class Recorded:
    """Noise that is kept."""

    def __init__(self, generator):
        self.generator, self.kept = generator, []

    def normal_(self, out):
        self.kept.append(out.normal_(generator=self.generator).clone())
        return out

    def shared(self):
        return self

    def of(self, rows):
        return self


@pytest.fixture(autouse=True)
def _one_is_registered(torch_draws, registered):
    registered(Scale)


def prepared(name, replicas, dtype, generator):
    make, shape, reference = CASES[name]
    plain = make().to(dtype).eval()
    network = bayesianize(plain, init_std=0.3, replicas=replicas, dtype=dtype)
    posterior = network.posterior
    posterior.mean += 0.3 * torch.randn(posterior.mean.shape, generator=generator, dtype=dtype)
    posterior.log_std += 0.3 * torch.randn(posterior.mean.shape, generator=generator, dtype=dtype)
    if shape == "indices":
        x = torch.randint(7, (replicas * B, 6), generator=generator)
    else:
        x = torch.randn(replicas * B, *shape, generator=generator, dtype=dtype)
    return plain, network, x, reference


def close(dtype):
    return {"rtol": 1e-9, "atol": 1e-11} if dtype == torch.float64 else {"rtol": 2e-4, "atol": 2e-5}


def forward(network, x):
    """The trunk alone, whatever the shape of its output, as `BayesianNetwork.forward` calls it."""
    network.weights.batch = len(x)
    network.weights.passes += 1
    for (module, key), own in zip(network._places, network.owned, strict=True):
        setattr(module, key, own(x))
    return network.trunk(x) if network.direct is None else network.direct(x, network.trunk)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_the_naive_ones(name, replicas, dtype, generator):
    plain, network, x, reference = prepared(name, replicas, dtype, generator)
    whole = not x.is_floating_point()
    layout, posterior = network.layout, network.posterior
    noise = Recorded(generator)
    network.begin()

    def point(plain, mean, variance, noise, x):
        """With point weights it is the plain layer."""
        y = functional_call(plain, mean, (x,))
        if getattr(plain, "padding_idx", None) is None:
            return y
        return torch.where((x == plain.padding_idx).unsqueeze(-1), plain.weight.detach()[plain.padding_idx], y)

    for drawn, source in ((False, torch.Generator().manual_seed(1)), (True, generator)):
        grads = torch.zeros_like(posterior.mean), torch.zeros_like(posterior.mean) if drawn else None
        bound(network, noise if drawn else None, drawn, grads)
        fast_x = x if whole else x.clone().requires_grad_()
        y = forward(network, fast_x)
        y = y.mul_(1) if name.startswith("linear") else y  # what follows may work in place
        up = torch.randn(y.shape, generator=source, dtype=dtype)
        (y * up).sum().backward()
        network.collect_gradients()

        mean, variance = (flat.clone().requires_grad_() for flat in (posterior.mean, posterior.variance()))
        slow_x = x if whole else x.clone().requires_grad_()
        rows = []
        for r in range(replicas):
            means, variances = ({k: view[r] for k, view in layout.views(flat).items()} for flat in (mean, variance))
            about = plain, means, variances, [eps[r] for eps in noise.kept], slow_x.split(B)[r]
            rows.append((reference if drawn else point)(*about))
        slow = torch.cat(rows)
        (slow * up).sum().backward()
        torch.testing.assert_close(y, slow, **close(dtype))
        torch.testing.assert_close(grads[0], mean.grad, **close(dtype))
        if drawn:
            torch.testing.assert_close(grads[1], 2 * variance.grad, **close(dtype))
            assert grads[1].abs().max() > 0
        if not whole:
            torch.testing.assert_close(fast_x.grad, slow_x.grad, **close(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("name", [*CASES, "tied"])
def test_the_kl_is_the_sum_over_the_plain_parameters(name, replicas, dtype, generator):
    """To the first prior: N(0, prior_std^2), but N(1, .) for the scale of a norm, and centred on a row of padding."""
    module = two() if name == "tied" else CASES[name][0]()
    run = run_of(module, "vcl", range(replicas), draw=True, dtype=dtype, prior_std=0.4, init_std=0.2)
    q = run.network.posterior
    q.mean += 0.3 * torch.randn(q.mean.shape, generator=generator, dtype=dtype)
    q.log_std += 0.3 * torch.randn(q.mean.shape, generator=generator, dtype=dtype)
    means, stds = run.network.layout.views(q.mean), run.network.layout.views(q.log_std.exp())
    learned = {key: p for key, p in module.named_parameters() if p.requires_grad}
    assert means.keys() == learned.keys()
    for r in range(replicas):
        total = 0.0
        for parameter, plain in learned.items():
            centre = torch.zeros(plain.shape, dtype=dtype)
            unit = parameter in run.network.direct.names if run.network.direct is not None else False
            if unit and plain.shape[1:].numel() == 1:  # a scale or a bias, it may be
                centre += plain.detach().to(dtype)
            elif "norm" in name and parameter.endswith("weight"):
                centre += 1
            if "padding" in name and isinstance(module, nn.Embedding):
                centre[2] = plain.detach()[2].to(dtype)
            prior = Normal(centre, torch.full_like(centre, 0.4))
            total = total + kl_divergence(Normal(means[parameter][r], stds[parameter][r]), prior).sum()
        torch.testing.assert_close(q.kl(run.memory.prior)[r], total, **close(dtype))
