"""Random crops and flips: each image as a loop would cut it, anew in every step, and the same when a run resumes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from small_runs import run_of
from torch import nn

import evcl
from evcl._core.randomness import GeneratorNoise, PartNoise, generator
from evcl.methods import TaskData
from evcl.methods.augment import PAD, augmented
from evcl.training.data import Pool

SHAPE = (3, 10, 12)  # not square, so that height and width cannot be confused


def sources(*seeds):
    return GeneratorNoise([generator(seed, "augment") for seed in seeds])


def images(*leading, seed=0):
    return torch.randn(*leading, *SHAPE, generator=torch.Generator().manual_seed(seed))


def by_hand(x, drawn):
    """Each image on its own: pad, cut out, flip."""
    found = torch.empty_like(x)
    _, height, width = x.shape[2:]
    for r in range(len(x)):
        for b in range(x.shape[1]):
            down, across, turn = drawn[r, b].tolist()
            top, left = int(down * (2 * PAD + 1)), int(across * (2 * PAD + 1))
            cut = F.pad(x[r, b], (PAD,) * 4)[:, top : top + height, left : left + width]
            found[r, b] = cut if turn < 0.5 else cut.flip(2)
    return found


def test_it_is_a_loop_over_the_images():
    x = images(2, 60)
    drawn = sources(3, 4).uniform_(torch.empty(2, 60, 3))
    assert torch.equal(augmented(x, sources(3, 4)), by_hand(x, drawn))


def test_every_place_and_both_directions_are_equally_likely():
    marked = torch.zeros(1, 4000, 1, 9, 9)
    marked[..., 4, 4] = 1
    marked[..., 4, 5] = 2  # to the right of it, unless flipped
    found = augmented(marked, sources(0))[0, :, 0]
    places = (found == 1).flatten(1).int().argmax(1)
    counts = places.bincount(minlength=81).double()
    expected = 4000 / 81
    assert ((counts - expected).square() / expected).sum() < 125  # chi-square of 80 degrees, 0.1%
    seen = (found == 2).flatten(1).any(1)
    right = (found == 2).flatten(1).int().argmax(1)[seen] > places[seen]
    assert abs(float(right.double().mean()) - 0.5) < 0.03


def test_a_replica_is_itself_alone_and_a_part_is_a_part_of_the_whole():
    x = images(2, 7)
    both = augmented(x, sources(3, 4))
    assert torch.equal(both[1:], augmented(x[1:], sources(4)))
    part = slice(2, 5)
    assert torch.equal(both[:, part], augmented(x[:, part], PartNoise(sources(3, 4), part, 7)))
    assert not torch.equal(both[0], augmented(x[:1], sources(5))[0])


def task(n=24):
    return TaskData(images(1, n), (torch.arange(n) % 2).unsqueeze(0), 0)


def test_a_pool_keeps_its_images_and_gives_others_in_every_step():
    data, rows = task(), torch.arange(6).unsqueeze(0)
    pool, noise = Pool([data], lambda k: 2, augment=True), sources(0)
    first, second = (pool.minibatch(rows, noise) for _ in range(2))
    assert not torch.equal(first.x, second.x)
    assert torch.equal(first.y, data.y[:, :6])
    assert torch.equal(pool.minibatch(rows).x, data.x[:, :6])  # without noise, as they are
    assert torch.equal(data.x, task().x)
    assert torch.equal(Pool([data], lambda k: 2).minibatch(rows, noise).x, data.x[:, :6])


def network():
    convolution = nn.utils.skip_init(nn.Conv2d, 3, 4, 3)  # a run draws its weights
    return nn.Sequential(convolution, nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())


def learned(method, seeds=(0, 1), make=network, **given):
    usual = {"epochs": 2, "batch_size": 8, "augment": True}
    width = 16 if make is network else 5
    run, x = run_of(method, seeds=seeds, network=make(), features=width, usual=usual, **given), task().x.double()
    for head in range(2):
        run.learn([TaskData(x, task().y, head, task=head)])
    return run


@pytest.mark.parametrize("method", ["naive", "lwf", "ewc", "evcl", "vogn", "ekf", "noisy-kfac", "vcl-random-coreset"])
def test_it_changes_what_is_learned_and_replicas_are_themselves_alone(method):
    given = {"coreset_size": 4} if "coreset" in method else {}
    both = learned(method, **given)
    mean = both.network.posterior.mean
    assert mean.isfinite().all()
    assert not torch.equal(mean, learned(method, augment=False, **given).network.posterior.mean)
    torch.testing.assert_close(learned(method, (1,), **given).network.posterior.mean, mean[1:], rtol=1e-3, atol=1e-5)
    for kept in both.kept_examples():  # as they are
        whole = {image.numpy().tobytes() for image in task().x[0].double()}
        assert {image.numpy().tobytes() for image in kept.x.flatten(0, 1)} <= whole


def test_a_perceptron_on_images_is_augmented_too():
    def make():
        return evcl.nn.mlp(360, [5])

    with_it, without = (learned("evcl", make=make, augment=on).network.posterior.mean for on in (True, False))
    assert not torch.equal(with_it, without)


def test_examples_that_are_no_images_are_refused():
    learner = evcl.Naive(evcl.nn.mlp(6, [4]), augment=True, epochs=1)
    with pytest.raises(evcl.EvclError, match=r"augment=true needs images .*an example has the shape \[6\]"):
        learner.learn((torch.ones(4, 6), torch.tensor([0, 1, 0, 1])))
