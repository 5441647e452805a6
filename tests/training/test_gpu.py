"""What only a GPU can show: the learning of a CPU, replicas that are themselves alone, captures and waits counted."""

from __future__ import annotations

import contextlib
from dataclasses import replace as replace_method
from itertools import count

import pytest
import torch
from calls import heard
from checks import run_of
from msgspec.structs import replace
from strengths import STRENGTHS, check_strength

import evcl
from evcl.experiments import configure, engines, execute, execute_all
from evcl.experiments.engines import REPLICAS
from evcl.experiments.parallel import bundle
from evcl.experiments.run import execute_together
from evcl.methods import METHODS, Elastic, Fit, Learned
from evcl.methods.selection import kcenter
from evcl.training import Checkpoints, Stopped, TaskData, matmul_precision
from evcl.training.rules import gpu_kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def stream(method, replicas, device, epochs=30, batch_size=64):
    source = torch.Generator().manual_seed(0)
    x = torch.randn(1, 600, 20, generator=source)
    y = ((x[..., 0] + x[..., 1]) > 0).long()
    given = {"epochs": epochs, "batch_size": batch_size, "lr": 3e-3}
    run, head = run_of(method, evcl.nn.mlp(20, [50, 50]), given, range(replicas), (50, [2]), device=device), 0
    accuracy = []
    for labels in (y, (x[..., 2] > 0).long()):
        task = TaskData(x.to(device), labels.to(device), head)
        run.learn([task])
        accuracy.append((run.predict(task.x, head).argmax(2) == task.y).double().mean())
    return torch.stack(accuracy).cpu()


@pytest.mark.parametrize("method", ["evcl", "vcl", "ewc", "naive", "vcl-kcenter-coreset", "random-coreset"])
def test_a_gpu_learns_what_a_cpu_learns(method):
    torch.testing.assert_close(stream(method, 4, "cuda"), stream(method, 4, "cpu"), rtol=0, atol=0.03)


@pytest.mark.parametrize("method", STRENGTHS)
def test_a_methods_strength_changes_the_second_task(method):
    check_strength(method, "cuda")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch calls it a prototype
def test_one_capture_a_shape_and_no_wait_in_an_epoch():
    def waiting(mode):  # in all epochs but the first, a wait for the device is an error
        return lambda given: torch.cuda.set_sync_debug_mode(mode if given["epoch"] else "default")

    captures = []
    with (
        heard("GraphedSteps._capture", lambda given: captures.append((given["batch"].size, given["steps"]))),
        heard("GraphedSteps.epoch", waiting("error")),
        heard("GraphedSteps.epoch", waiting("default"), "return"),
    ):
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


def learned(device="cuda", **options):
    source = torch.Generator().manual_seed(0)
    x = torch.randn(1, 100, 20, generator=source).to(device)
    network = options.pop("network", lambda: evcl.nn.mlp(20, [50, 50]))()
    method = options.pop("method", METHODS["evcl"])
    rates = options.pop("rates", [1e-3] * 3)
    given = options.pop("given", {})
    each = [{"epochs": 2, "lr": lr, **given} for lr in rates]
    run = run_of(method, network, each, options.pop("seeds", range(3)), device=device, **options)
    for k in range(2):
        head = run.add_head(run.features(x[0, :1].to(run.network.posterior.mean)), 2)
        run.learn([TaskData(x.to(run.network.posterior.mean), (x[..., k] > 0).long(), head)])
    run.learn([TaskData(x.to(run.network.posterior.mean), (x[..., k] > 0).long(), k) for k in range(2)])  # jointly
    found = run.network.posterior
    assert found.mean.isfinite().all()
    return found


def posterior(**options):
    found = learned(**options)
    return found.mean if found.log_std is None else torch.cat([found.mean, found.log_std], 1)


CALM = {"epochs": 10, "batch_size": 200, "init_std": 1e-6, "std_update": "adam"}


def moves_as_on_a_cpu(most, parts=("mean", "log_std"), **options):
    """The weights of each replica end where a CPU's end, up to `most` times the distance that those have moved.

    A GPU has other batches and other noise. With all examples in each batch and little noise, they hardly matter.
    """
    method = options.get("method", METHODS["evcl"])
    options["given"] = {name: value for name, value in CALM.items() if name in method.known_settings}
    found = learned(**options)
    options.pop("precision", None)
    wanted, start = learned("cpu", **options), learned("cpu", **{**options, "rates": [1e-12] * 3})
    for part in parts:
        if getattr(wanted, part) is not None:
            ours, theirs, before = (getattr(q, part).double().cpu() for q in (found, wanted, start))
            apart, moved = (ours - theirs).norm(dim=1), (theirs - before).norm(dim=1)
            assert (apart < most * moved).all(), (part, apart / moved)


def convolutional(dropout=0.1):
    make = torch.nn.utils.skip_init
    return torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 4, 5)), make(torch.nn.Conv2d, 1, 3, 2), torch.nn.ReLU(), torch.nn.Dropout(dropout),
        torch.nn.Flatten(), make(torch.nn.Linear, 36, 8),
    )  # fmt: skip


def test_graphs_give_the_same_weights_twice():
    assert torch.equal(posterior(), posterior())


@pytest.mark.parametrize("method", ["vcl", "naive"])
@pytest.mark.parametrize("precision", ["fp32", "tf32 wide", "bf16"])
def test_a_replica_is_its_run_alone_to_the_last_bit(monkeypatch, method, precision):
    """Among replicas of its own seed and others, where no product is cuBLAS's."""
    kernels, (precision, _, name) = gpu_kernels(), precision.partition(" ")
    if name:
        monkeypatch.setattr(kernels, "way", lambda *_: kernels.WAYS[name])
    given = {"method": METHODS[method], "precision": precision, "given": {"batch_size": 32}}
    whole = posterior(rates=[1e-3] * 6, seeds=[4, 7, 9] * 2, **given)
    assert torch.equal(whole[:3], whole[3:])
    assert not torch.equal(whole[0], whole[1])
    for r, seed in ((0, 4), (1, 7)):
        assert torch.equal(whole[r], posterior(rates=[1e-3], seeds=[seed], **given)[0])


@pytest.mark.parametrize("method", ["vcl", "naive"])
def test_a_replica_of_cublas_products_is_its_run_alone_up_to_rounding(method):
    given = {"method": METHODS[method], "precision": "tf32", "given": {"batch_size": 32}}
    whole, alone = posterior(seeds=[4, 7, 9], **given), posterior(seeds=[7], rates=[1e-3], **given)
    assert (whole[1] - alone[0]).norm() < 1e-3 * alone[0].norm()


def test_a_replica_that_measures_a_fisher_is_its_run_alone():
    """Up to rounding: of torch's products of several replicas, and of rates of which there are several."""
    whole = posterior(seeds=[4, 7, 4], rates=[1e-3, 1e-3, 3e-3], given={"batch_size": 32})
    alone = posterior(seeds=[7], rates=[1e-3], given={"batch_size": 32})
    torch.testing.assert_close(whole[1], alone[0], rtol=1e-3, atol=1e-4)


def test_a_spread_fisher_is_a_cpus():
    """In a layout with padding, with a share of its own for each replica, of weights that hardly move."""
    x = torch.randn(1, 200, 20, generator=torch.Generator().manual_seed(0))
    y = (x[..., 0] > 0).long() + (x[..., 1] > 1).long()
    given = {"epochs": 1, "lr": 1e-12, "fisher_scale": "none", "fisher_temperature": 1.0}
    found = []
    for device in ("cpu", "cuda"):
        each = [{**given, "fisher_spread": s} for s in (0.1, 0.5)]
        run = run_of("evcl", evcl.nn.mlp(20, [50, 30]), each, [0, 1], device=device)
        run.learn([TaskData(x.to(device), y.to(device), run.add_head(30, 3))])
        found.append(run.memory.importance.cpu())
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["evcl", "vcl", "ewc", "naive", "huber"])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_everything_trains_in_every_precision(method, precision):
    most = {"fp32": 0.05, "tf32": 0.1, "bf16": 0.2}[precision]  # 23, 10 and 7 bits of mantissa
    moves_as_on_a_cpu(most, method=METHODS[method], precision=precision)


@pytest.mark.parametrize("method", ["evcl", "ewc", "huber"])
def test_other_layers_other_rates_and_float64(method):
    posterior(method=METHODS[method], network=convolutional)
    moves_as_on_a_cpu(0.05, method=METHODS[method], network=lambda: convolutional(dropout=0.0))
    moves_as_on_a_cpu(0.1, method=METHODS[method], rates=[1e-3, 1e-2, 1e-4])
    moves_as_on_a_cpu(0.05 if method == "evcl" else 1e-6, method=METHODS[method], dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_natural_steps_in_a_graph(dtype):
    """Sigmas depend on the noise, their mean hardly: other noise changes its logarithm by 0.03, and training by 0.3."""
    given = {"std_update": "natural", "epochs": 10}
    for network in (lambda: evcl.nn.mlp(20, [50, 50]), convolutional):
        found, wanted = (learned(device, given=given, network=network, dtype=dtype) for device in ("cuda", "cpu"))
        assert float(found.log_std.mean()) == pytest.approx(float(wanted.log_std.mean()), abs=0.1)


def test_a_stiffness_that_is_broadcast():
    def learn(memory, round_, s):
        fitted = yield Fit(round_.tasks, terms=[Elastic(memory.prior, torch.ones_like(memory.prior.mean[:1]))])
        return Learned(fitted.q, type(memory)(fitted.q))

    flat = replace_method(METHODS["vcl"], name="flat", learn=learn)
    moves_as_on_a_cpu(0.05, ["mean"], method=flat)  # sigmas begin at their optimum, and hardly move


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


@pytest.mark.parametrize(("at_a_time", "most"), [(1, 0.0), (6, 1e-3)])
def test_programs_that_run_at_a_time_are_the_programs_alone(at_a_time, most, monkeypatch):
    """Thirty of them, with more captures than torch has streams. One after the other they are the same to the last bit;
    at a time, but for rounding: cuBLAS promises the last bits only where one stream runs.
    """
    monkeypatch.setattr(engines, "PROGRAMS_AT_A_TIME", at_a_time)

    def config(method, seed):
        given = {"epochs": 3, "lr": 1e-3 + seed / 1e4}
        return configure("split-digits", method, seeds=[seed], tasks=3, device="cuda", given=given)

    methods = ("evcl", "ewc", "vcl-random-coreset", "naive")
    configs = [config(method, seed) for method in methods for seed in range(10)]
    found, groups = dict(execute_all(configs, lambda i, event: None)), bundle(configs, REPLICAS)
    assert [len(group) for group in groups] == 40 * [1]
    for group in groups:
        with matmul_precision(configs[0].precision):
            alone = execute_together([configs[i] for i in group], allow_divergence=True)
        for i, result in zip(group, alone, strict=True):
            assert found[i].accuracy == result.accuracy
            assert found[i].nll.per_seed == pytest.approx(result.nll.per_seed, rel=0, abs=most)


def made_up(n, seed):
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 20, generator=source)
    return x, ((x[:, 0] + torch.randn(n, generator=source)) > 0).long()


@pytest.mark.parametrize("network", [lambda: evcl.nn.mlp(20, [50]), lambda: torch.nn.Sequential(torch.nn.Tanh())])
@pytest.mark.parametrize("weight", [None, {1: 4.0}])
def test_early_stopping_keeps_the_best_epoch(network, weight):
    """By kernels and by autograd: what is predicted at the end is what the best epoch was worth."""
    train, held = made_up(100, 0), made_up(400, 1)
    learner = evcl.EVCL(network(), epochs=100, lr=0.03, device="cuda")
    learner.learn(train, validation=held, patience=5, class_weight=weight)
    nll = [epoch.validation_nll for epoch in learner.history["0"]]
    assert len(nll) == min(100, nll.index(min(nll)) + 6)
    p = learner.predict_proba(held[0]).gather(1, held[1][:, None]).log()
    counts = torch.where(held[1] == 1, 4.0 if weight else 1.0, 1.0)
    assert -(p[:, 0] * counts).sum() / counts.sum() == pytest.approx(min(nll), rel=1e-4)


def test_losses_and_class_weights_are_those_of_a_cpu():
    """After many epochs with little noise, so that the draws, which differ, do not matter."""
    x, y = made_up(300, 0)
    last = []
    for device in ("cpu", "cuda"):
        given = {"epochs": 60, "lr": 0.003, "init_std": 1e-4, "std_update": "adam", "std_lr_scale": 0.1}
        learner = evcl.EVCL(evcl.nn.mlp(20, [30]), device=device, **given)
        for task in ("a", "b"):
            learner.learn((x, y), task, class_weight={1: 5.0})
        last.append((learner.history["b"][-1], float((learner.predict(x, "b") == 1).double().mean())))
    (cpu, found), (gpu, found_there) = last
    for name in ("nll", "kl", "elastic"):
        assert getattr(gpu, name) == pytest.approx(getattr(cpu, name), rel=0.1, abs=0.02), name
    assert found_there == pytest.approx(found, abs=0.05)


@pytest.mark.parametrize("method", ["evcl", "ewc", "vcl-random-coreset"])
def test_a_run_that_is_stopped_goes_on_to_the_same_bits(method, tmp_path):
    """It saves itself at the ends of epochs."""
    config = configure("split-digits", method, seeds=(0, 1), tasks=2, given={"epochs": 3}, device="cuda")
    wanted = execute(config)
    for polls in (1, 2, 1, 3, 100):
        numbers = count(1)
        kept = Checkpoints(tmp_path, 1e6, resume=True, stop=lambda n=polls, numbers=numbers: next(numbers) >= n)
        with contextlib.suppress(Stopped):
            found = execute(config, checkpoints=kept)
    assert replace(found, seconds=0.0) == replace(wanted, seconds=0.0)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("method", ["naive", "evcl"])
def test_augmented_images_and_convolutions_are_captured(method, precision):
    """With other crops and flips in every step: the same twice, and not what the images teach as they are."""

    def weights(augment):
        x = torch.randn(1, 100, 3, 12, 12, generator=torch.Generator().manual_seed(0)).cuda()
        given = {"epochs": 2, "batch_size": 16, "augment": augment}
        with torch.random.fork_rng():
            network = evcl.benchmarks.networks.ResNet18(4, 3, "batch")
        run = run_of(method, network, given, (0, 1), device="cuda", precision=precision)
        for k in range(2):
            head = run.add_head(32, 2)
            run.learn([TaskData(x, (x[:, :, k, 6, 6] > 0).long(), head, task=k)])
        return run.network.posterior.mean

    found = weights(True)
    assert found.isfinite().all()
    assert (found - weights(True)).norm() < 0.5 * (found - weights(False)).norm()  # convolutions round as they like
