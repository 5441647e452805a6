"""Reinforcement learning: agents that learn a stream of environments, one after another."""

from evcl.rl.acting import frames, returns
from evcl.rl.advantages import Path, gae, vtrace
from evcl.rl.agent import Agent
from evcl.rl.cartpole import CartPole, Variant
from evcl.rl.environments import Environments, Gymnasium, Outcome
from evcl.rl.learning import StreamOutcome, learn
from evcl.rl.measures import average_return, forgetting, forward_transfer, normalised_return
from evcl.rl.methods import METHODS, method
from evcl.rl.sb3 import adopt, trunk_of
from evcl.rl.streams import STREAMS, Stream, Task, from_gymnasium, stream

__all__ = [
    "METHODS",
    "STREAMS",
    "Agent",
    "CartPole",
    "Environments",
    "Gymnasium",
    "Outcome",
    "Path",
    "Stream",
    "StreamOutcome",
    "Task",
    "Variant",
    "adopt",
    "average_return",
    "forgetting",
    "forward_transfer",
    "frames",
    "from_gymnasium",
    "gae",
    "learn",
    "method",
    "normalised_return",
    "returns",
    "stream",
    "trunk_of",
    "vtrace",
]
