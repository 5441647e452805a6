"""Rooms of MiniGrid: the same room for every task, and another thing to do in it.

A goal, a ball, a box and a key lie at random places. Each task wants one of them: to step on the goal, to pick up the
ball, to open the box, or to pick up the key. Touching anything else ends the episode without a reward, so that what is
right in one task is wrong in the others. The reward is MiniGrid's: 1 - 0.9 * steps / longest episode.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from evcl._core.errors import extra

THINGS = ("goal", "ball", "box", "key")
SIZE, LONGEST = 5, 40  # width of the room with its walls; steps of an episode
ACTIONS = 6  # MiniGrid's, except `done`, which does nothing
INSIDE = SIZE - 2
INPUTS = INSIDE * INSIDE * (len(THINGS) + 4)


def room(wanted: str) -> Any:
    """The room in which this thing is wanted: a gymnasium environment.

    An observation has, for every cell inside the walls, one number for each thing and for each direction of the agent.
    """
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")  # minigrid imports pygame, which prints a line
    with extra("rl", "the rooms need minigrid and gymnasium"):
        from gymnasium import spaces
        from minigrid.core.grid import Grid
        from minigrid.core.mission import MissionSpace
        from minigrid.core.world_object import Ball, Box, Goal, Key
        from minigrid.minigrid_env import MiniGridEnv

    class Room(MiniGridEnv):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            space = MissionSpace(mission_func=lambda: f"{wanted}")
            super().__init__(mission_space=space, grid_size=SIZE, max_steps=LONGEST, render_mode="rgb_array")
            self.action_space = spaces.Discrete(ACTIONS)
            self.observation_space = spaces.Box(0.0, 1.0, (INPUTS,), np.float32)

        def _gen_grid(self, width: int, height: int) -> None:
            self.grid = Grid(width, height)
            self.grid.wall_rect(0, 0, width, height)
            self.things = {"goal": Goal(), "ball": Ball("blue"), "box": Box("yellow"), "key": Key("red")}
            self.at = {name: tuple(self.place_obj(thing)) for name, thing in self.things.items()}
            self.place_agent()
            self.mission = wanted

        def gen_obs(self) -> Any:
            """All of the room. MiniGrid's own view turns and hides cells, one by one, and takes most of the time."""
            seen = np.zeros((INSIDE, INSIDE, len(THINGS) + 4), np.float32)
            for i, name in enumerate(THINGS):
                x, y = self.at[name]
                seen[x - 1, y - 1, i] = 1
            x, y = self.agent_pos
            seen[x - 1, y - 1, len(THINGS) + self.agent_dir] = 1
            return seen.reshape(-1)

        def step(self, action: int) -> Any:
            """One step. The episode ends with the first thing that is touched."""
            front = self.grid.get(*self.front_pos)
            touched = None if front is None or front.type == "wall" else front.type
            acts = {"goal": self.actions.forward, "box": self.actions.toggle}
            if touched is not None and action != acts.get(touched, self.actions.pickup):
                touched = None
            seen, _, _, truncated, info = super().step(action)
            reward = self._reward() if touched == wanted else 0.0
            return seen, reward, touched is not None, truncated and touched is None, info

    return Room()
