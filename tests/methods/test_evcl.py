"""What EVCL is without its parts: VCL without the elastic term, and the paper's method without anything else."""

from __future__ import annotations

import torch

import evcl
from evcl.experiments import configure
from evcl.methods import METHODS

TASKS = list(evcl.benchmarks.get("split-digits", 0, 3))


def learned(method, tasks=TASKS, **settings):
    learner = evcl.Learner(evcl.nn.mlp(64, [20]), method, seed=3, **settings)
    for task in tasks:
        learner.learn(task)
    return learner


def same(one, other):
    """The posteriors are equal, to the bit."""
    return all(
        torch.equal(getattr(one.state.run.network.posterior, part), getattr(other.state.run.network.posterior, part))
        for part in ("mean", "log_std")
    )


def test_without_elastic_term_and_distillation_it_is_vcl_to_the_bit():
    given = {"epochs": 4, "tempering": 0.1}
    plain = {"posterior": "diagonal", "distill": 0.0, "one_softmax": True, **given}
    assert same(learned("evcl", strength=0.0, **plain), learned("vcl", **given))
    assert not same(learned("evcl", **plain), learned("vcl", **given))


def test_shared_heads_without_them_are_vcl_too():
    tasks, given = list(evcl.benchmarks.get("permuted-digits", 0, 2)), {"epochs": 2, "tempering": 0.1}
    plain = {"posterior": "diagonal", "strength": 0.0, "distill": 0.0, "one_softmax": True}
    one = learned("evcl", tasks, **plain, **given)
    assert same(one, learned("vcl", tasks, **given))


def test_evcl_paper_is_the_preset_paper():
    preset = configure("permuted-mnist", "evcl", "paper").settings
    own = configure("permuted-mnist", "evcl-paper", "default").settings
    assert {name: preset[name] for name in own} == dict(own)
    assert not {"distill", "one_softmax"} & METHODS["evcl-paper"].known_settings.keys()
    given = {**configure("split-digits", "evcl", "paper").settings, "epochs": 3}
    del given["validation"]
    assert same(learned("evcl", **given), learned("evcl-paper", batch_size=given["batch_size"], epochs=3))
