"""The variants of CartPole, the rooms, and environments that begin again where they were."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from evcl import EvclError, rl
from evcl.rl.environments import Gymnasium
from evcl.rl.rooms import FORWARD, THINGS, USE, room
from evcl.rl.streams import CARTPOLES

CPU = torch.device("cpu")
gymnasium = pytest.importorskip("gymnasium")


@pytest.mark.parametrize("name", CARTPOLES)
def test_a_variant_moves_as_its_numbers_say(name):
    """One step, by the equations of Barto, Sutton and Anderson (1983)."""
    variant = CARTPOLES[name]
    envs = variant.make([3], 2, "test", CPU)
    x, speed, angle, turning = envs.observations.double().unbind(1)
    force = variant.force * torch.tensor([-1.0, 1.0], dtype=torch.float64)
    cos, sin = angle.cos(), angle.sin()
    push = (force + 0.1 * variant.length * turning.square() * sin) / 1.1
    turn = (variant.gravity * sin - cos * push) / (variant.length * (4 / 3 - 0.1 * cos.square() / 1.1))
    pull = push - 0.1 * variant.length * turn * cos / 1.1
    wanted = torch.stack([x + 0.02 * speed, speed + 0.02 * pull, angle + 0.02 * turning, turning + 0.02 * turn], 1)
    torch.testing.assert_close(envs.step(torch.tensor([0, 1])).last, wanted.float(), rtol=1e-4, atol=1e-6)


def test_an_episode_is_cut_off_after_500_steps():
    envs = rl.Variant(gravity=-9.8, force=0.0).make([0], 1, "test", CPU)
    for _ in range(500):
        outcome = envs.step(torch.tensor([0]))
        assert not bool(outcome.terminated)
    assert bool(outcome.truncated)
    assert int(envs.tensors()["episode"][0]) == 1


def test_replicas_start_their_episodes_from_their_own_seeds():
    both, alone = (rl.Variant().make(seeds, 2, "test", CPU) for seeds in ([5, 6], [6]))
    assert torch.equal(both.observations[2:], alone.observations)
    assert not torch.equal(both.observations[:2], alone.observations)


@pytest.mark.parametrize("wanted", THINGS)
def test_only_the_wanted_thing_ends_an_episode(wanted):
    pytest.importorskip("minigrid")
    env = room(wanted)
    for thing in THINGS:
        env.reset(seed=1)
        x, y = env.at[thing]
        place = next(
            (a, b, d)
            for a, b, d in ((x - 1, y, 0), (x, y - 1, 1), (x + 1, y, 2), (x, y + 1, 3))
            if 1 <= a <= 4 and 1 <= b <= 4 and (a, b) not in env.at.values()
        )
        env.agent_pos, env.agent_dir = np.array(place[:2]), place[2]
        assert env.gen_obs()[3 * THINGS.index(thing) + 2] == 1  # it is just in front
        seen, reward, terminated, truncated, _ = env.step(FORWARD if thing == "goal" else USE)
        assert terminated == (thing == wanted)
        assert not truncated
        assert reward == pytest.approx(1 - 0.9 / 40 if thing == wanted else 0)
        assert seen.shape == env.observation_space.shape


def test_what_a_room_shows_turns_with_the_agent():
    pytest.importorskip("minigrid")
    env = room("ball")
    env.reset(seed=0)
    for _ in range(4):
        before = env.gen_obs()
        env.step(1)  # right: what was to the right is now ahead
        after = env.gen_obs()
        for i in range(len(THINGS)):
            ahead, right = before[3 * i : 3 * i + 2]
            np.testing.assert_allclose(after[3 * i : 3 * i + 2], [right, -ahead], atol=1e-6)
        np.testing.assert_allclose(after[-4:], np.roll(before[-4:], -1))


def test_environments_begin_again_where_they_were():
    pytest.importorskip("minigrid")

    def make():
        return Gymnasium(lambda: room("goal"), [0, 1], 2, "test", CPU)

    one, actions = make(), torch.randint(4, (60, 4), generator=torch.Generator().manual_seed(0))
    for some in actions[:50]:
        one.step(some)
    kept = {name: tensor.clone() for name, tensor in one.tensors().items()}
    other = make()
    other.load(kept)
    assert torch.equal(one.observations, other.observations)
    for some in actions[50:]:
        for a, b in zip(one.step(some), other.step(some), strict=True):
            assert torch.equal(a, b)


def test_numbers_as_actions_are_clipped_to_their_space():
    taken = []

    class Line(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1, 1, (1,))
        action_space = gymnasium.spaces.Box(-2, 3, (1,))

        def reset(self, seed=None, options=None):
            return np.zeros(1, np.float32), {}

        def step(self, action):
            taken.append(float(action[0]))
            return np.zeros(1, np.float32), 0.0, False, False, {}

    one, other = (Gymnasium(Line, [0], 1, "test", CPU) for _ in range(2))
    for action in (-9.0, 1.0, 9.0):
        one.step(torch.tensor([[action]]))
    other.load(one.tensors())
    assert taken == [-2, 1, 3] * 2


def test_a_stream_of_ones_own_environments():
    made = rl.from_gymnasium(
        "poles",
        {"first": lambda: gymnasium.make("CartPole-v1"), "second": lambda: gymnasium.make("CartPole-v1")},
    )
    assert (made.inputs, made.actions, made.continuous, len(made)) == ((4,), 2, False, 2)
    with pytest.raises(EvclError, match="same observations and actions"):
        rl.from_gymnasium(
            "mixed", {"a": lambda: gymnasium.make("CartPole-v1"), "b": lambda: gymnasium.make("MountainCar-v0")}
        )
    with pytest.raises(EvclError, match="from 1 to 5, not 6"):
        rl.stream("cartpole-variants", 6)
