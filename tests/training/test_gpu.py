"""What only a GPU can show: kernels against plain operations, the learning of a CPU, captures and waits counted."""

from __future__ import annotations

import pytest
import torch

import evcl
from evcl.coresets import kcenter
from evcl.methods import METHODS
from evcl.nn.layers import LocalDraw
from evcl.randomness import DeviceNoise
from evcl.settings import resolve
from evcl.training import Adam, Run, TaskData
from evcl.training.adam import fused_update
from evcl.training.task import GraphedSteps, gpu_kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def draw(*shape, seed=0):
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


@pytest.mark.parametrize("bias", [True, False])
def test_the_stacked_pass_is_the_plain_one(bias):
    """The same outputs and gradients as LocalDraw, given the noise that the kernel drew."""
    r, b, i, o = 3, 70, 37, 45
    x = draw(r, b, i, seed=1).requires_grad_()
    weight = torch.stack([draw(r, o, i, seed=2), draw(r, o, i, seed=3).square() * 0.01])
    biases = torch.stack([draw(r, o, seed=4), draw(r, o, seed=5).square() * 0.01]) if bias else None
    grads = torch.zeros_like(weight), torch.zeros_like(biases) if bias else None
    noise = DeviceNoise(torch.Generator("cuda").manual_seed(0))
    leaf = torch.zeros(1, device="cuda", requires_grad=True)
    y = gpu_kernels().StackedDraw.apply(x, weight, biases, grads, noise.seed, noise.salt(), leaf)
    up = draw(r, b, o, seed=6)
    (dx,) = torch.autograd.grad(y, x, up)

    with torch.no_grad():
        mean = torch.bmm(x, weight[0].mT) + (biases[0].unsqueeze(1) if bias else 0)
        std = (torch.bmm(x.square(), weight[1].mT) + (biases[1].unsqueeze(1) if bias else 0)).sqrt()
        eps = (y - mean) / std
    assert abs(float(eps.mean())) < 0.05
    assert abs(float(eps.std()) - 1) < 0.05
    again = gpu_kernels().StackedDraw.apply(x, weight, biases, grads, noise.seed, noise.salt(), leaf)
    assert not torch.equal(again, y)  # another salt, other noise

    plain = [torch.zeros_like(weight[0]), torch.zeros_like(biases[0]) if bias else None,
             torch.zeros_like(weight[1]), torch.zeros_like(biases[1]) if bias else None]  # fmt: skip
    twin = x.detach().clone().requires_grad_()
    parts = (weight[0].clone().requires_grad_(), biases[0] if bias else None, weight[1], biases[1] if bias else None)
    out = LocalDraw.apply(twin, *parts, eps, plain, None)
    (expected,) = torch.autograd.grad(out, twin, up)
    close = {"rtol": 1e-3, "atol": 1e-3}
    torch.testing.assert_close(out, y, **close)
    torch.testing.assert_close(dx, expected, **close)
    torch.testing.assert_close(grads[0], torch.stack([plain[0], plain[2]]), **close)
    if bias:
        torch.testing.assert_close(grads[1], torch.stack([plain[1], plain[3]]), **close)


@pytest.mark.parametrize("bias", [True, False])
def test_the_plain_product_is_a_linear_layer(bias):
    x, weight = draw(3, 70, 37, seed=1).requires_grad_(), draw(3, 45, 37, seed=2).requires_grad_()
    b = draw(3, 45, seed=3) if bias else None
    grads = torch.zeros_like(weight), torch.zeros_like(b) if bias else None
    y = gpu_kernels().PlainProduct.apply(x, weight, b, grads)
    up = draw(3, 70, 45, seed=4)
    (dx,) = torch.autograd.grad(y, x, up)
    close = {"rtol": 1e-3, "atol": 1e-3}
    torch.testing.assert_close(y, torch.bmm(x, weight.mT) + (b.unsqueeze(1) if bias else 0), **close)
    torch.testing.assert_close(dx, torch.bmm(up, weight), **close)
    torch.testing.assert_close(grads[0], torch.bmm(up.mT, x), **close)
    if bias:
        torch.testing.assert_close(grads[1], up.sum(1), **close)


@pytest.mark.parametrize("classes", [2, 10, 37])
def test_the_mean_nll_is_cross_entropy(classes):
    logits = draw(60, classes, seed=1).mul_(5).requires_grad_()
    labels = torch.arange(60, device="cuda") % classes
    found = gpu_kernels().MeanNLL.apply(logits, labels, 3)
    (grad,) = torch.autograd.grad(found.sum(), logits)
    each = torch.nn.functional.cross_entropy(logits, labels, reduction="none").view(3, 20).mean(1)
    (expected,) = torch.autograd.grad(each.sum(), logits)
    torch.testing.assert_close(found, each, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("std", [False, True])
@pytest.mark.parametrize("parts", [0, 1, 2])
def test_the_update_kernel_is_the_plain_update(std, parts):
    lr = torch.tensor([[1e-3], [1e-2], [0.1]], device="cuda")
    springs = [(draw(3, 501, seed=k).square(), draw(3, 501, seed=10 + k).square()) for k in range(parts)]
    springs = [*springs, *[None] * (2 - parts)][: 2 if std else 1]
    found = []
    for update in (gpu_kernels().update, fused_update):
        adam = Adam(draw(3, 501, seed=20), lr)
        variance = (2 * adam.weights).exp() if std else None
        for k in range(5):
            grad = draw(3, 501, seed=30 + k)
            adam.count += 1
            update(adam.weights, adam.first, adam.second, adam.count, lr, grad, variance, springs)
            assert not grad.any()
        found.append([adam.weights, adam.first, adam.second, *([variance] if std else [])])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def stream(method, replicas, device, epochs=30):
    source = torch.Generator().manual_seed(0)
    x = torch.randn(1, 600, 20, generator=source)
    y = ((x[..., 0] + x[..., 1]) > 0).long()
    settings = resolve(method, METHODS[method].known_settings, {"epochs": epochs, "lr": 3e-3})
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
    monkeypatch.setattr(GraphedSteps, "_capture", lambda self, size: captures.append(size) or capture(self, size))
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
    assert sorted(captures) == [24, 24, 64, 64]  # 600 examples in batches of 64, two tasks


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
    settings = [resolve(method.name, method.known_settings, {"epochs": 2, "lr": lr}) for lr in rates]
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
