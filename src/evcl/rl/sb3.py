"""Go on with a policy of Stable-Baselines3. Only its modules are used, so that the package need not be installed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from evcl._core.errors import EvclError
from evcl.nn import copied, head_names
from evcl.rl.agent import Agent
from evcl.rl.ppo import PPO


def trunk_of(model: object) -> Callable[[], nn.Module]:
    """What makes a trunk like the policy network of a PPO or A2C model of Stable-Baselines3, for `Stream.network`."""
    extractor, _ = _parts(model)
    return lambda: nn.Sequential(nn.Flatten(), *copied(extractor).children())


def adopt(agent: Agent, model: object) -> None:
    """Give all replicas the policy of a PPO or A2C model as their first task, which is then protected like any other.

    The agent's stream must have a head per task (no contexts), and `trunk_of(model)` as its network. It is measured
    on rollouts in the environments of the first task. Go on with `learn(..., agent=agent, first=1)`.
    """
    extractor, last = _parts(model)
    if agent.s.algorithm != "ppo" or "clone" in agent.s or agent.method.needs_task:
        what = agent.s.algorithm if agent.s.algorithm != "ppo" else agent.method.name
        raise EvclError(f"{what} cannot go on with a policy of Stable-Baselines3: use ppo with evcl, vcl, ewc or naive")
    if agent.shared:
        raise EvclError("a policy of Stable-Baselines3 sees no context: use a stream whose tasks have none")
    layout, mean = agent.network.layout, agent.network.posterior.mean
    trunk = nn.Sequential(nn.Flatten(), *extractor.children())
    given = dict(trunk.named_parameters()) | {head_names(0)[key]: p for key, p in last.named_parameters()}
    wanted = {name: layout.shapes[name] for name in agent.network.names_of([0])}
    if {name: tuple(p.shape) for name, p in given.items()} != wanted:
        raise EvclError("the agent has other layers than the model: give its stream network=trunk_of(model)")
    with torch.no_grad():
        for name, p in given.items():
            layout.view(mean, name).copy_(p.detach().to(mean))
    learning = PPO(agent, 0)
    for i in range(-(-learning.states.shape[1] // learning.size)):
        learning.rollout(i)
    learning.finish()


def _parts(model: object) -> tuple[nn.Module, nn.Module]:
    """The hidden layers of the policy, and its last layer."""
    policy = getattr(model, "policy", model)
    extractor = getattr(getattr(policy, "mlp_extractor", None), "policy_net", None)
    last = getattr(policy, "action_net", None)
    if not isinstance(extractor, nn.Sequential) or not isinstance(last, nn.Linear):
        raise EvclError("expected a PPO or A2C model with an MlpPolicy: one with policy.mlp_extractor and action_net")
    if list(getattr(policy, "features_extractor", nn.Flatten()).parameters()):
        raise EvclError("its features extractor has weights of its own: only an MlpPolicy can be taken over")
    if getattr(policy, "log_std", None) is not None:
        raise EvclError(
            "its standard deviations are no outputs of the network: only discrete actions can be taken over"
        )
    return extractor, last
