"""CartPole beside gymnasium's, the rooms, and environments that begin again where they were."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from evcl import EvclError, rl
from evcl.rl.cartpole import LONGEST, moved
from evcl.rl.environments import Gymnasium
from evcl.rl.rooms import FORWARD, THINGS, USE, Rooms, room
from evcl.rl.streams import CARTPOLES

CPU = torch.device("cpu")
gymnasium = pytest.importorskip("gymnasium")


@pytest.mark.parametrize("name", CARTPOLES)
def test_our_cartpole_is_gymnasiums(name):
    """Every state until the pole falls, of all variants."""
    variant = CARTPOLES[name]
    theirs = gymnasium.make("CartPole-v1").unwrapped
    theirs.gravity, theirs.length, theirs.force_mag = variant
    theirs.polemass_length = theirs.masspole * theirs.length
    ours, source = variant.make([3], 1, "test", CPU), np.random.default_rng(0)
    ended = 0
    while ended < 5:
        theirs.reset(seed=0)
        theirs.state = ours.state[0].numpy().copy()
        over = False
        while not over:
            action = int(source.integers(2))
            expected = torch.from_numpy(theirs.step(action)[0])
            outcome = ours.step(torch.tensor([action]))
            torch.testing.assert_close(outcome.last[0], expected, rtol=1e-6, atol=1e-7)
            over = bool(outcome.ended)
        x, _, angle, _ = theirs.state
        assert bool(outcome.terminated) == (abs(x) > 2.4 or abs(angle) > 12 * 2 * np.pi / 360)
        ended += 1


def test_an_episode_is_cut_off_after_500_steps():
    envs = rl.Variant(gravity=0.0, force=0.0).make([0], 1, "test", CPU)
    envs.state.zero_()
    for step in range(LONGEST):
        outcome = envs.step(torch.tensor([step % 2]))
    assert bool(outcome.truncated)
    assert not bool(outcome.terminated)
    assert int(envs.episodes.number[0]) == 1


def test_a_step_of_all_environments_is_a_step_of_each():
    state = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    actions = torch.tensor([0, 1, 0, 1, 1, 0])
    whole = moved(state, actions, rl.Variant())
    for row in range(6):
        assert torch.equal(whole[row], moved(state[row : row + 1], actions[row : row + 1], rl.Variant())[0])


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


@pytest.mark.parametrize("wanted", THINGS)
def test_rooms_side_by_side_are_those_one_at_a_time(wanted):
    """Over many episodes, bit by bit, with actions that often go ahead."""
    pytest.importorskip("minigrid")
    many, each = Rooms(wanted, [0, 1], 3, "test", CPU), Gymnasium(lambda: room(wanted), [0, 1], 3, "test", CPU)
    for actions in torch.tensor([0, 1, 2, 2, 2, 3])[
        torch.randint(6, (150, 6), generator=torch.Generator().manual_seed(0))
    ]:
        assert torch.equal(many.observations, each.observations)
        for a, b in zip(many.step(actions), each.step(actions), strict=True):
            assert torch.equal(a, b)
    assert torch.equal(many.episodes.number, each.episodes.number)
    assert int(many.episodes.number.sum()) > 20
    assert np.array_equal(many.frame(4), each.frame(4))


@pytest.mark.parametrize(
    "kind", [lambda *given: Gymnasium(lambda: room("goal"), *given), lambda *given: Rooms("goal", *given)]
)
def test_environments_begin_again_where_they_were(kind):
    pytest.importorskip("minigrid")
    make = lambda: kind([0, 1], 2, "test", CPU)  # noqa: E731
    one, g = make(), torch.Generator().manual_seed(0)
    actions = torch.randint(4, (60, 4), generator=g)
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
