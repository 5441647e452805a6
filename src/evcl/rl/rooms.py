"""Rooms of MiniGrid: the same room for every task, and another thing to do in it.

A goal, a ball, a box and a key lie at random places. Each task wants one of them: to step on the goal, or to use the
ball, the box or the key. Only that ends the episode, with MiniGrid's reward: 1 - 0.9 * steps / longest episode. So the
way that is right in one task is wrong in the others.

`room` is such a room, and `Rooms` are many of them, which take a step at once: one at a time, they took a quarter of
the time of an agent with plain weights. The tests compare the two bit by bit.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evcl._core.errors import extra
from evcl.rl.environments import Episodes, Outcome

THINGS = ("goal", "ball", "box", "key")
SIZE, LONGEST = 6, 40  # width of the room with its walls; steps of an episode
ACTIONS = 4  # turn left, turn right, go forward, use what is in front
FORWARD, USE = 2, 3
DIRECTIONS = ((1, 0), (0, 1), (-1, 0), (0, -1))  # of the agent: east, south, west, north
TURNS = np.array([-1, 1, 0, 0])  # what each action adds to the agent's direction
INSIDE = SIZE - 2
INPUTS = 3 * len(THINGS) + 4


def room(wanted: str) -> Any:
    """The room in which this thing is wanted: a gymnasium environment.

    An observation says where each thing is, as the agent sees it: how many cells ahead, how many to the right, and
    whether it is just in front. Then it says how far the walls are: ahead, right, behind and left.
    """
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")  # minigrid imports pygame, which prints a line
    with extra("rl", "the rooms need minigrid and gymnasium"):
        from gymnasium import spaces
        from minigrid.core.grid import Grid
        from minigrid.core.mission import MissionSpace
        from minigrid.core.world_object import Ball, Box, Goal, Key
        from minigrid.minigrid_env import MiniGridEnv

    class Room(MiniGridEnv):
        def __init__(self) -> None:
            space = MissionSpace(mission_func=lambda: f"{wanted}")
            super().__init__(mission_space=space, grid_size=SIZE, max_steps=LONGEST, render_mode="rgb_array")
            self.action_space = spaces.Discrete(ACTIONS)
            self.observation_space = spaces.Box(-1.0, 1.0, (INPUTS,), np.float32)

        def _gen_grid(self, width: int, height: int) -> None:
            self.grid = Grid(width, height)
            self.grid.wall_rect(0, 0, width, height)
            self.things = {"goal": Goal(), "ball": Ball("blue"), "box": Box("yellow"), "key": Key("red")}
            self.at = {name: tuple(self.place_obj(thing)) for name, thing in self.things.items()}
            self.place_agent()
            self.mission = wanted

        def gen_obs(self) -> Any:
            """What the agent sees. MiniGrid's own view turns and hides cells one by one, and takes most of the time."""
            (x, y), (dx, dy) = self.agent_pos, DIRECTIONS[self.agent_dir]
            seen: list[float] = []
            for name in THINGS:
                far, down = self.at[name][0] - x, self.at[name][1] - y
                ahead, right = far * dx + down * dy, down * dx - far * dy
                seen += [ahead / INSIDE, right / INSIDE, float(ahead == 1 and right == 0)]
            free = [INSIDE - x, INSIDE - y, x - 1, y - 1]  # cells to the walls: east, south, west, north
            seen += [free[(self.agent_dir + turn) % 4] / INSIDE for turn in range(4)]
            return np.array(seen, np.float32)

        def step(self, action: int) -> Any:
            """One step. To use a thing that is not wanted does nothing, and the goal is then a place like any other."""
            front = self.grid.get(*self.front_pos)
            done = front is not None and front.type == wanted and action == (FORWARD if wanted == "goal" else USE)
            if action == USE:
                action = self.actions.done  # MiniGrid's action without effect: the episode ends anyway
            seen, _, _, truncated, info = super().step(action)
            return seen, self._reward() if done else 0.0, done, truncated and not done, info

    return Room()


class Rooms:
    """Rooms in which one thing is wanted, side by side. MiniGrid places the things and the agent of each episode.

    `at` [B, 2] and `facing` [B] are the agents' cells and directions, and `things` [B, 4, 2] the cells of the things.
    """

    def __init__(self, wanted: str, seeds: Sequence[int], envs: int, purpose: str, device: torch.device) -> None:
        self.wanted, self.episodes, self.device = THINGS.index(wanted), Episodes(seeds, envs, purpose), device
        self.laid_out, rows = room(wanted), len(seeds) * envs
        self.at, self.facing, self.age = np.zeros((rows, 2), int), np.zeros(rows, int), np.zeros(rows, int)
        self.things = np.zeros((rows, len(THINGS), 2), int)
        self._begin(range(rows))
        self.observations = self._seen()

    def step(self, actions: Tensor) -> Outcome:
        taken = actions.cpu().numpy()
        self.age += 1
        front = self.at + np.array(DIRECTIONS)[self.facing]
        there = (self.things == front[:, None]).all(2)  # [B, 4]: which thing is just in front
        done = there[:, self.wanted] & (taken == (FORWARD if THINGS[self.wanted] == "goal" else USE))
        wall = ((front < 1) | (front > INSIDE)).any(1)
        free = (
            (taken == FORWARD) & ~wall & ~there[:, 1:].any(1)
        )  # the agent can step on the goal, and on no other thing
        self.at[free] = front[free]
        self.facing = (self.facing + TURNS[taken]) % 4
        cut = (self.age >= LONGEST) & ~done
        rewards = np.where(done, 1 - 0.9 * (self.age / LONGEST), 0.0)
        last = self.observations = self._seen()
        ended = (done | cut).nonzero()[0].tolist()
        if ended:
            self.episodes.number[ended] += 1
            self._begin(ended)
            self.observations = self._seen()
        return Outcome(self._tensor(rewards), self._tensor(done), self._tensor(cut), last)

    def frame(self, row: int) -> Any:
        self._laid_out(row)
        self.laid_out.agent_pos, self.laid_out.agent_dir = tuple(self.at[row].tolist()), int(self.facing[row])
        return np.asarray(self.laid_out.render())

    def tensors(self) -> dict[str, Tensor]:
        own = {"at": self.at, "facing": self.facing, "age": self.age}
        return {"episode": self.episodes.number, **{name: torch.from_numpy(one.copy()) for name, one in own.items()}}

    def load(self, tensors: dict[str, Tensor]) -> None:
        self.episodes.number.copy_(tensors["episode"])
        self._begin(range(len(self.at)))  # where the things are
        for name, own in (("at", self.at), ("facing", self.facing), ("age", self.age)):
            own[:] = tensors[name].cpu().numpy()
        self.observations = self._seen()

    def _begin(self, rows: Sequence[int]) -> None:
        for row in rows:
            env = self._laid_out(row)
            self.at[row], self.facing[row], self.age[row] = env.agent_pos, env.agent_dir, 0
            self.things[row] = [env.at[name] for name in THINGS]

    def _laid_out(self, row: int) -> Any:
        """MiniGrid's room, at the start of the present episode of a row."""
        self.laid_out.reset(seed=self.episodes.start(row))
        return self.laid_out

    def _seen(self) -> Tensor:
        """What all agents see; see `room`."""
        (x, y), (dx, dy) = self.at.T, np.array(DIRECTIONS)[self.facing].T[:, :, None]
        far, down = (self.things - self.at[:, None]).transpose(2, 0, 1)  # [B, 4] each
        ahead, right = far * dx + down * dy, down * dx - far * dy
        things = np.stack([ahead / INSIDE, right / INSIDE, (ahead == 1) & (right == 0)], 2)
        walls = np.stack([INSIDE - x, INSIDE - y, x - 1, y - 1], 1) / INSIDE
        turned = np.take_along_axis(walls, (self.facing[:, None] + np.arange(4)) % 4, 1)
        return self._tensor(np.concatenate([things.reshape(len(x), -1), turned], 1))

    def _tensor(self, numbers: Any) -> Tensor:
        return torch.from_numpy(numbers.astype(np.float32)).to(self.device)
