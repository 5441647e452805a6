"""Steps that several processes share on GPUs: NCCL's sums are part of the captured graphs."""

from __future__ import annotations

import pytest
import ranked
import torch
import torch.distributed as dist
from calls import heard
from safetensors.torch import load_file
from test_ranks import close, torchrun

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not dist.is_nccl_available(), reason="needs an NVIDIA GPU and NCCL"
)


@pytest.fixture
def ranks(tmp_path):
    """A process group of NCCL whose only process is this one. It cannot end if graphs with its sums are left."""
    dist.init_process_group("nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield ranked.Counting()
    dist.destroy_process_group()


@pytest.fixture
def captures():
    """The size of the batch and the number of steps of each graph that is captured; all steps are."""
    found = []
    with (
        heard("GraphedSteps._capture", lambda given: found.append((given["batch"].size, given["steps"]))),
        heard("EagerSteps.epoch", lambda _: pytest.fail("a step was not captured")),
    ):
        yield found


@pytest.mark.parametrize("name", ranked.ON_GPU)
def test_captured_sums_of_one_process_change_nothing(name, ranks, captures):
    assert ranks.capturable
    shared = ranked.train(name, ranks, "cuda")
    graphs = captures.copy()
    captures.clear()
    alone = ranked.train(name, None, "cuda")
    assert graphs == captures
    assert (8, 1) in graphs
    for key, wanted in alone.items():
        assert close(shared[key], wanted), f"{key}: {(shared[key] - wanted).abs().max()}"


def test_sums_are_captured_once(ranks, captures):
    """More epochs replay them: the host only adds the sum of the epoch's NLL."""
    counts = []
    for epochs in (2, 6):
        ranks.sums.clear()
        ranked.train("ewc in float64", ranks, "cuda", epochs=epochs)
        counts.append(len(ranks.sums))
    assert counts[1] - counts[0] == 2 * 4  # two tasks, four more epochs
    assert len(captures) == 2 * 2 * 2  # twice two tasks: for a full batch, and for the last one


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
def test_two_gpus_end_where_one_does(tmp_path):
    status, _, err = torchrun(ranked.__file__, tmp_path, "cuda")
    assert status == 0, err
    for name in ranked.ON_GPU:
        alone = ranked.train(name, None, "cuda")
        both = [load_file(tmp_path / f"{name} {rank}.safetensors") for rank in range(2)]
        for key, wanted in alone.items():
            assert torch.equal(both[0][key], both[1][key]), f"{name}: {key} is not the same on both"
            assert close(both[0][key], wanted), f"{name}: {key}: {(both[0][key] - wanted).abs().max()}"
