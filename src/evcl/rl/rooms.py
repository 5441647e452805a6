"""Rooms of MiniGrid: the same room for every task, and another thing to do in it.

A goal, a ball, a box and a key lie at random places. Each task wants one of them: to step on the goal, or to use the
ball, the box or the key. Only that ends the episode, with MiniGrid's reward: 1 - 0.9 * steps / longest episode. So the
way that is right in one task is wrong in the others.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evcl._core.errors import extra

THINGS = ("goal", "ball", "box", "key")
WIDTH, MAX_EPISODE_STEPS = 6, 40  # width of the room with its walls; steps of an episode
ACTIONS = 4  # turn left, turn right, go forward, use what is in front
FORWARD, USE = 2, 3
DIRECTIONS = ((1, 0), (0, 1), (-1, 0), (0, -1))  # of the agent: east, south, west, north
INSIDE = WIDTH - 2
OBSERVATION_INPUTS = 3 * len(THINGS) + 4


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
            super().__init__(mission_space=space, grid_size=WIDTH, max_steps=MAX_EPISODE_STEPS, render_mode="rgb_array")
            self.action_space = spaces.Discrete(ACTIONS)
            self.observation_space = spaces.Box(-1.0, 1.0, (OBSERVATION_INPUTS,), np.float32)

        def _gen_grid(self, width: int, height: int) -> None:
            self.grid = Grid(width, height)
            self.grid.wall_rect(0, 0, width, height)
            self.things = {"goal": Goal(), "ball": Ball("blue"), "box": Box("yellow"), "key": Key("red")}
            self.at = {name: tuple(self.place_obj(thing)) for name, thing in self.things.items()}
            self.place_agent()
            self.mission = wanted

        def gen_obs(self) -> NDArray[np.float32]:
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
