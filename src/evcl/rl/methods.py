"""Methods for agents: those of the library, with the settings that they have in reinforcement learning, and two more.

A method adds its terms on the policy's weights, as in any other loop (see `methods/hosted.py`). What needs more than
terms is the agent's own, and is asked for by settings: `distill` the distillation of earlier policies, `clone` replay.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from evcl._core.catalogue import AGENT_SUMMARIES
from evcl._core.errors import unknown
from evcl._core.settings import BAYESIAN, CORESET, TRAINING, Setting, Settings, resolve
from evcl.methods import METHODS, Method, check_targets
from evcl.methods.composed import EVCL
from evcl.methods.hosted import Host
from evcl.methods.kronecker_posterior import DIAGONAL
from evcl.rl.policies import DISCRETE

HOST = Host("an agent", "use evcl, vcl, ewc, si or mas", trackers=True)
RL_SETTINGS: dict[str, Setting] = {
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
    "fisher_examples": Setting(
        2048, "number of last states that are kept, for a method to measure a task on", low=1, high=10**7
    ),
}
"""The settings of every method for agents."""
BAYESIAN_SETTINGS = {
    "tempering": Setting(
        1.0, "beta, the weight of the KL term, which is divided by the task's steps", high=1e6, open_low=True
    ),
    "init_std": BAYESIAN["init_std"],
    "prior_std": BAYESIAN["prior_std"],
}
DEFAULTS = {"strength": 1.0, "fisher_temperature": 1.0}  # of the elastic term: that of Laplace's approximation
DISTILL_DEFAULT = 0.3  # default of `distill` for methods of which distillation is a part
PARTS = {name: one for name, one in EVCL.known_settings.items() if "." in name or name in ("distill", "forget")}
NOT_OURS = {**TRAINING, **BAYESIAN, **CORESET, **PARTS}
NOT_OURS["one_softmax"] = replace(EVCL.known_settings["one_softmax"], default=True)
AGENT_METHODS = {
    "clear": Method(
        "clear",
        AGENT_SUMMARIES["clear"],
        settings={
            "memory": Setting(20_000, "environment steps that are kept, of all tasks together", low=1, high=10**9),
            "clone": Setting(
                0.1, "the weight of the divergence from the policy that acted, on replayed steps", high=1e6
            ),
        },
    ),
    "separate": Method("separate", AGENT_SUMMARIES["separate"], needs_task=True),
}
"""The methods that only agents have."""
TUNED: dict[str, dict[str, dict[str, float | int]]] = json.loads(Path(__file__).with_name("tuned.json").read_text())
"""Stream -> method, or "*" for all of them -> settings. `experiments/rl/agents.py` chooses them on validation seeds."""


def method(name: str | Method, stream: str | None = None) -> Method:
    """A method, one of the library, of your own, `clear` or `separate`, as agents have it: with their settings. With a
    `stream`, the defaults are the settings that were chosen for it. Raises if an agent cannot have this method.
    """
    if isinstance(name, str) and name not in AGENT_METHODS and name not in METHODS:
        raise unknown("method for agents", name, {**dict.fromkeys(METHODS), **AGENT_METHODS})
    base = name if isinstance(name, Method) else AGENT_METHODS.get(name) or METHODS[name]
    if "algorithm" not in base.known_settings:
        base = _for_agents(base)
    tuned = TUNED.get(stream or "", {})
    known, chosen = base.known_settings, {**tuned.get("*", {}), **tuned.get(base.name, {})}
    return replace(base, settings={**base.settings, **{k: replace(known[k], default=v) for k, v in chosen.items()}})


def _for_agents(found: Method) -> Method:
    known = found.known_settings
    HOST.check(found, Settings({name: setting.default for name, setting in known.items()}))
    if found.only_classes:
        raise HOST.refusal(found, "learns classes only")
    if "posterior" in known and known["posterior"].default == "kronecker":
        raise HOST.refusal(found, "has a matrix for each layer")
    own: dict[str, Setting | None] = {n: known[n] for n in known if n not in NOT_OURS}
    own |= {name: setting for name, setting in DIAGONAL.items() if name in known}
    if "fisher_scale" in known:
        own |= {name: replace((DIAGONAL | known)[name], default=value) for name, value in DEFAULTS.items()}
    taught = "distill" in known and known["distill"].default
    distill = replace(RL_SETTINGS["distill"], default=DISTILL_DEFAULT if taught else 0.0)
    bayes = BAYESIAN_SETTINGS if found.bayesian else {}
    settings = {**dict.fromkeys(NOT_OURS), **own, **bayes, **RL_SETTINGS, "distill": distill}
    return replace(found, settings=settings, parts=())


def configured(name: str | Method, given: Mapping[str, object], stream: str) -> tuple[Method, Settings]:
    """A method as agents have it, and its checked settings: those given, and the defaults for this stream."""
    chosen = method(name, stream if isinstance(name, str) else None)
    s = given if isinstance(given, Settings) else resolve(chosen.name, chosen.known_settings, given)
    if chosen.name not in AGENT_METHODS:
        check_targets(chosen, s, DISCRETE)
    return chosen, s


def of_terms(s: Settings) -> Settings:
    """The settings with which a method makes its terms: its own, and defaults of those that agents do not have."""
    return Settings({**{name: setting.default for name, setting in NOT_OURS.items()}, **s, "distill": 0.0})
