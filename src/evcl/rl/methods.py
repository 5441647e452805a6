"""The methods for agents. Each is a `Method` of the library with the settings that it has in reinforcement learning.

What a method adds to the loss follows from its settings: `tempering` (a Bayesian one) brings the KL to the last
posterior, `strength` the elastic term, `distill` the distillation, `memory` the replay.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from evcl._core.errors import unknown
from evcl._core.settings import BAYESIAN, CORESET, ELASTIC, TRAINING, Setting, Settings, resolve
from evcl._core.summaries import AGENT_SUMMARIES, METHOD_SUMMARIES
from evcl.methods import Method

RL: dict[str, Setting] = {
    "algorithm": Setting(
        "ppo",
        "proximal policy optimisation (ppo), or a deep Q network (dqn), which explores by Thompson sampling if the "
        "method is Bayesian and otherwise takes random actions",
        choices=("ppo", "dqn"),
    ),
    "steps": Setting(50_000, "environment steps per task and seed, rounded down to whole rollouts", low=1, high=10**9),
    "envs": Setting(16, "environments that run side by side, per seed", low=1, high=10_000),
    "rollout": Setting(32, "steps of each environment between two rounds of updates", low=1, high=100_000),
    "passes": Setting(10, "passes over a rollout's steps in each round of updates", low=1, high=1000),
    "lr": Setting(0.001, "the learning rate, which falls linearly to 0 within a task", high=10.0, open_low=True),
    "batch_size": Setting(256, "environment steps per update", low=1, high=1_000_000),
    "discount": Setting(0.98, "gamma, the weight of the next step's reward", high=1.0),
    "gae_decay": Setting(0.9, "lambda of generalised advantage estimation", high=1.0),
    "clip": Setting(0.2, "epsilon, how far PPO lets the ratio of the policies move the loss", high=1.0, open_low=True),
    "entropy": Setting(0.01, "the weight of the policy's entropy in the loss", high=10.0),
    "episodes": Setting(20, "episodes per task that returns are measured on", low=1, high=10_000),
    "distill": Setting(
        0.0,
        "the weight of the divergence between the old policies and the new ones, on the new task's states",
        high=1e6,
    ),
    "fisher_examples": Setting(2048, "number of last states that are kept to measure the Fisher on", low=1, high=10**7),
}
"""The settings of every method for agents."""
DISTILL = replace(RL["distill"], default=0.3)
_UNUSED = dict.fromkeys((*TRAINING, *BAYESIAN, *CORESET))
_BAYESIAN = {
    "tempering": Setting(
        1.0, "beta, the weight of the KL term, which is divided by the task's steps", high=1e6, open_low=True
    ),
    "init_std": BAYESIAN["init_std"],
    "prior_std": BAYESIAN["prior_std"],
}
_ELASTIC = {
    "strength": replace(ELASTIC["strength"], default=1.0),
    "fisher_temperature": replace(ELASTIC["fisher_temperature"], default=1.0),
    "fisher_spread": ELASTIC["fisher_spread"],
    "fisher_decay": ELASTIC["fisher_decay"],
}
_CLEAR = {
    "memory": Setting(20_000, "environment steps that are kept, of all tasks together", low=1, high=10**9),
    "clone": Setting(0.1, "the weight of the divergence from the policy that acted, on replayed steps", high=1e6),
}


def _method(name: str, summary: str, bayesian: bool, own: dict[str, Setting], alone: bool = False) -> Method:
    return Method(name, summary, bayesian, settings={**_UNUSED, **RL, **own}, needs_task=alone)


METHODS: dict[str, Method] = {
    one.name: one
    for one in (
        _method("evcl", METHOD_SUMMARIES["evcl"], True, {**_BAYESIAN, **_ELASTIC, "distill": DISTILL}),
        _method("vcl", METHOD_SUMMARIES["vcl"], True, _BAYESIAN),
        _method("ewc", METHOD_SUMMARIES["ewc"], False, _ELASTIC),
        _method("clear", AGENT_SUMMARIES["clear"], False, _CLEAR),
        _method("naive", METHOD_SUMMARIES["naive"], False, {}),
        _method("separate", AGENT_SUMMARIES["separate"], False, {}, alone=True),
    )
}
"""The methods by name, in the order in which they are listed."""


TUNED: dict[str, dict[str, dict[str, float | int]]] = json.loads(Path(__file__).with_name("tuned.json").read_text())
"""Stream -> method, or "*" for all of them -> settings. `experiments/rl/agents.py` chooses them on validation seeds."""


def method(name: str, stream: str | None = None) -> Method:
    """The method of this name for agents; with a `stream`, its defaults are the settings that were chosen for it."""
    if name not in METHODS:
        raise unknown("method for agents", name, METHODS)
    found, tuned = METHODS[name], TUNED.get(stream or "", {})
    chosen = {**tuned.get("*", {}), **tuned.get(name, {})}
    known = found.known_settings
    settings = {**found.settings, **{key: replace(known[key], default=value) for key, value in chosen.items()}}
    return replace(found, settings=settings)


def configured(name: str | Method, given: Mapping[str, Any], stream: str) -> tuple[Method, Settings]:
    """A method, by its name for this stream or as it is, and its checked settings: those given, and its defaults."""
    found = method(name, stream) if isinstance(name, str) else name
    return found, given if isinstance(given, Settings) else resolve(found.name, found.known_settings, given)
