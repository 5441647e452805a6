"""What only a GPU can show: kernels against plain operations, the learning of a CPU, captures and waits counted."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import evcl
from evcl.coresets import kcenter
from evcl.experiments import configure, execute, execute_all
from evcl.methods import METHODS, Centred, Pull
from evcl.nn import Gaussian
from evcl.nn.chain import Chain, find_chain, find_places, padded
from evcl.randomness import DeviceNoise
from evcl.settings import resolve, stack
from evcl.training import Pool, Run, TaskData
from evcl.training.task import GraphedSteps
from evcl.training.update import Update, gpu_kernels

try:
    import triton
    import triton.language as tl
except ImportError:  # then there is no GPU either
    pass
else:

    @triton.jit
    def drawn(out, seed, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + at, tl.randn(seed, at), mask=at < n)


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def draw(*shape, seed=0):
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


class Handed:
    """The noise that the kernels draw, layer by layer, for plain operations."""

    def __init__(self, seed):
        self.seed, self.layer = seed, 0

    def normal_(self, out):
        self.layer += 1
        width = out.shape[2] if self.layer == 3 else -(-out.shape[2] // 4) * 4  # padded, but not the heads
        found = torch.empty(*out.shape[:2], width, device="cuda")
        drawn[(triton.cdiv(found.numel(), 1024),)](found, self.seed + (self.layer << 32), found.numel(), BLOCK=1024)
        return out.copy_(found[..., : out.shape[2]])


@pytest.mark.parametrize("bayesian", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("shared", [True, False])
def test_a_chain_of_kernels_is_the_plain_one(bayesian, bias, heads, shared):
    """The same NLL and gradients as plain operations in float64, given the noise that the kernels drew."""
    linear = partial(torch.nn.utils.skip_init, torch.nn.Linear, bias=bias)
    relu = torch.nn.ReLU()
    network = torch.nn.Sequential(linear(37, 44), relu, linear(44, 30), relu)
    method = METHODS["evcl" if bayesian else "ewc"]
    settings = [resolve(method.name, method.known_settings, {"init_std": 0.1} if bayesian else {})] * 3
    run = Run(network, method, settings, range(3), draw=True, device="cuda")
    tasks = []
    for k in range(heads):
        x = draw(1 if shared else 3, 37, 90, seed=k).mT  # of another stride than the kernel wants
        y = torch.arange(90, device="cuda").expand(len(x), 90) % (2 + k)
        tasks.append(TaskData(x, y, run.add_head(30, 2 + k)))
    pool, layout, names = Pool(tasks, run.classes), run.network.layout, run.network.names_of(range(heads))
    found = find_chain(run.network, pool.x)
    rows = torch.stack([torch.randperm(len(pool), generator=torch.Generator().manual_seed(r))[:70] for r in range(3)])
    noise = DeviceNoise(torch.Generator("cuda").manual_seed(0))
    noise.seed.fill_(5)
    posterior, results = run.network.posterior, []
    for part, kind, dtype, device, source in (
        (
            layout.part(names, padded(found, layout, pool.heads, 4), 4),
            gpu_kernels().Chain,
            torch.float32,
            "cuda",
            noise,
        ),
        (layout.part(names), Chain, torch.float64, "cpu", Handed(5)),
    ):
        mean = layout.gather(posterior.mean, part).to(device, dtype)
        values = mean.unsqueeze(0)
        if bayesian:
            values = torch.stack([mean, (2 * layout.gather(posterior.log_std, part).to(device, dtype)).exp()])
        grads = torch.full_like(values, 7.0)
        there = Pool([TaskData(t.x.to(device, dtype), t.y.to(device), t.head) for t in tasks], run.classes)
        nll = kind(find_places(found, part, pool.heads), values, grads, there, None)(rows.to(device), source)
        results.append([nll.cpu().double(), *(v.cpu().double() for flat in grads for v in part.views(flat).values())])
        if device == "cuda":  # a padded unit gets no gradient, so that it stays what it is
            inside = torch.zeros_like(grads[0])
            for view in part.views(inside).values():
                view.fill_(1)
            end = part.spans[names[-1]].stop  # of what the chain writes to
            assert not (grads * (1 - inside))[..., :end].any()
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("rule", ["points", "adam", "natural"])
@pytest.mark.parametrize("parts", [0, 1, 2])
def test_the_update_kernels_are_the_plain_update(rule, parts, monkeypatch):
    """Five steps in float32 against plain operations in float64; a rate a replica."""
    if rule == "natural" and parts == 0:
        pytest.skip("a natural step needs a KL")
    known = METHODS["naive" if rule == "points" else "vcl"].known_settings
    given = {} if rule == "points" else {"std_update": rule}
    each = [resolve("", known, {**given, "lr": lr}) for lr in (1e-3, 1e-2, 0.1)]
    found = []
    for dtype in (torch.float32, torch.float64):
        start, springs = draw(3, 501, seed=20).to(dtype), []
        for k in range(3):
            springs.append(
                Centred(draw(3, 501, seed=k).square().to(dtype), draw(3, 501, seed=10 + k).square().to(dtype))
            )
        pull = Pull(springs[0] if parts else None)
        if rule != "points":
            pull.linear, pull.square = springs[1] if parts else None, springs[2] if parts == 2 else None
        q = Gaussian(start.clone(), None if rule == "points" else 0.1 * start)
        variance = None if q.log_std is None else (2 * q.log_std).exp()
        grads = torch.zeros(1 if rule == "points" else 2, 3, 501, device="cuda", dtype=dtype)
        update = Update(q, variance, grads, [Given(pull)], stack(each, start), reference=False)
        assert (update._move is None) == (dtype == torch.float64)
        for k in range(5):
            grads.copy_(torch.stack([draw(3, 501, seed=30 + k + 10 * s) for s in range(len(grads))]))
            update()
        found.append([t.double() for t in (q.mean, q.log_std, variance) if t is not None])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class Given:
    """A term that is its pull."""

    def __init__(self, pull):
        self._pull = pull

    def loss(self, q):
        raise NotImplementedError

    def pull(self):
        return self._pull


def stream(method, replicas, device, epochs=30, batch_size=64):
    source = torch.Generator().manual_seed(0)
    x = torch.randn(1, 600, 20, generator=source)
    y = ((x[..., 0] + x[..., 1]) > 0).long()
    settings = resolve(method, METHODS[method].known_settings, {"epochs": epochs, "batch_size": batch_size, "lr": 3e-3})
    run = Run(
        evcl.nn.mlp(20, [50, 50]), METHODS[method], [settings] * replicas, range(replicas), draw=True, device=device
    )
    head = run.add_head(50, 2)
    accuracy = []
    for labels in (y, (x[..., 2] > 0).long()):
        task = TaskData(x.to(device), labels.to(device), head)
        run.learn([task])
        accuracy.append((run.predict(task.x, head).argmax(2) == task.y).double().mean())
    return torch.stack(accuracy).cpu()


@pytest.mark.parametrize("method", ["evcl", "vcl", "ewc", "naive", "vcl-kcenter-coreset", "random-coreset"])
def test_a_gpu_learns_what_a_cpu_learns(method):
    torch.testing.assert_close(stream(method, 4, "cuda"), stream(method, 4, "cpu"), rtol=0, atol=0.03)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch calls it a prototype
def test_one_capture_a_shape_and_no_wait_in_an_epoch(monkeypatch):
    captures = []
    capture = GraphedSteps._capture
    monkeypatch.setattr(
        GraphedSteps, "_capture", lambda self, size, steps: captures.append((size, steps)) or capture(self, size, steps)
    )
    epoch = GraphedSteps.epoch

    def watched(self, number, batch):
        if number == 0:
            return epoch(self, number, batch)
        torch.cuda.set_sync_debug_mode("error")  # a wait for the device is an error
        try:
            return epoch(self, number, batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(GraphedSteps, "epoch", watched)
    stream("evcl", 3, "cuda", epochs=4)
    assert captures == 2 * [(64, 1), (24, 1)]  # 600 examples in batches of 64, two tasks
    captures.clear()
    stream("evcl", 3, "cuda", epochs=4, batch_size=50)
    assert captures == 2 * [(50, 10), (50, 1)]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_k_centers_are_a_cpus_without_a_wait():
    """Small whole numbers and copies: ties abound, and are exact."""
    x = torch.randint(-3, 4, (3, 2048, 20), generator=torch.Generator().manual_seed(0)).float()
    x[:, 1024:] = x[:, :1024]
    on_gpu = x.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = kcenter(on_gpu, 100)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found.cpu(), kcenter(x, 100))


def test_a_learner_with_a_coreset_moves():
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    learner = evcl.EVCL(evcl.nn.mlp(4, [8]), coreset="random", epochs=3)
    learner.learn((x, (x[:, 0] > 0).long()))
    before = learner.predict_proba(x)
    torch.testing.assert_close(learner.to("cuda").predict_proba(x), before, rtol=1e-3, atol=1e-3)
    learner.learn((x, (x[:, 1] > 0).long()))
    assert learner.to("cpu").predict_proba(x, task=0).isfinite().all()


def posterior(**options):
    source = torch.Generator().manual_seed(0)
    x = torch.randn(1, 100, 20, generator=source).cuda()
    network = options.pop("network", None) or evcl.nn.mlp(20, [50, 50])
    method = options.pop("method", METHODS["evcl"])
    rates = options.pop("rates", [1e-3] * 3)
    given = options.pop("given", {})
    settings = [resolve(method.name, method.known_settings, {"epochs": 2, "lr": lr, **given}) for lr in rates]
    run = Run(network, method, settings, range(3), draw=True, device="cuda", **options)
    for k in range(2):
        head = run.add_head(run.features(x[0, :1].to(run.network.posterior.mean)), 2)
        run.train([TaskData(x.to(run.network.posterior.mean), (x[..., k] > 0).long(), head)])
    run.train([TaskData(x.to(run.network.posterior.mean), (x[..., k] > 0).long(), k) for k in range(2)])  # jointly
    found = run.network.posterior
    assert found.mean.isfinite().all()
    return found.mean if found.log_std is None else torch.cat([found.mean, found.log_std])


def convolutional():
    make = torch.nn.utils.skip_init
    return torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 4, 5)), make(torch.nn.Conv2d, 1, 3, 2), torch.nn.ReLU(), torch.nn.Dropout(0.1),
        torch.nn.Flatten(), make(torch.nn.Linear, 36, 8),
    )  # fmt: skip


def test_graphs_give_the_same_weights_twice():
    assert torch.equal(posterior(), posterior())


@pytest.mark.parametrize("method", ["evcl", "vcl", "ewc", "naive", "huber"])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_everything_trains_in_every_precision(method, precision):
    posterior(method=METHODS[method], precision=precision)


@pytest.mark.parametrize("method", ["evcl", "ewc", "huber"])
def test_other_layers_other_rates_and_float64(method):
    posterior(method=METHODS[method], network=convolutional())
    posterior(method=METHODS[method], rates=[1e-3, 1e-2, 1e-4])
    posterior(method=METHODS[method], dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_natural_steps_in_a_graph(dtype):
    posterior(given={"std_update": "natural"}, dtype=dtype)
    posterior(given={"std_update": "natural"}, network=convolutional(), dtype=dtype)


def test_a_stiffness_that_is_broadcast():
    def terms(memory, s, n):
        return [evcl.methods.Elastic(memory.prior, memory.used.expand_as(memory.importance))]

    posterior(method=evcl.methods.Method("flat", "", bayesian=True, terms=terms))


def test_the_process_keeps_its_precision():
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        posterior(precision="fp32")
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = "ieee"


def test_a_network_that_waits_for_the_device_is_named():
    class Waits(torch.nn.Module):
        def forward(self, x):
            return x * float(x.max())

    learner = evcl.Naive(Waits(), epochs=1).to("cuda")
    with pytest.raises(evcl.EvclError, match="cannot be captured as a CUDA graph"):
        learner.learn((torch.arange(80.0).view(20, 4), torch.arange(20) % 2))


def test_programs_that_run_at_a_time_are_the_programs_alone():
    """Forty of them, with more captures than torch has streams; each is the same to the last bit."""
    configs = [
        configure("split-digits", method, seeds=[seed], tasks=3, device="cuda", given={"epochs": 3})
        for method in ("evcl", "ewc", "vcl-random-coreset", "naive")
        for seed in range(10)
    ]
    found = dict(execute_all(configs, lambda i, event: None))
    for i, config in enumerate(configs):
        alone = execute(config)
        assert found[i]["accuracy"] == alone["accuracy"]
        assert found[i]["nll"] == alone["nll"]
