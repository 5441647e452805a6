"""Checkpoints of runs and agents, models of streams, models without labels: what writes a good one, and reads it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.torch import save_file

import evcl
from evcl.experiments import Checkpoints, Config, Event, configure, execute
from evcl.streams import table as stream_table
from evcl.streams.commands import learn_files
from evcl.streams.files import Asked
from evcl.training.checkpoint import DESCRIPTION, DIGEST, digest

CELL = configure("split-digits", "evcl", "paper", [0], 2, {"epochs": 1, "fisher_examples": 20, "predict_samples": 1})
SMALL = {"steps": 128, "envs": 2, "rollout": 32, "episodes": 1, "passes": 1}
AGENTS = configure("cartpole-variants", "evcl", "tuned", [0], 2, SMALL)
ROWS = np.random.default_rng(0).normal(size=(40, 3))
IMAGES = np.random.default_rng(0).uniform(size=(20, 16)).astype(np.float32)


def checkpoint(config: Config) -> Callable[[Path], Path]:
    """The checkpoint of a run that was stopped after its first task."""

    def make(folder: Path) -> Path:
        def stop(event: Event) -> None:
            if event.task == 1:
                raise KeyboardInterrupt

        with contextlib.suppress(KeyboardInterrupt):
            execute(config, stop, checkpoints=Checkpoints(folder))
        oldest, *more = sorted(folder.rglob("*.safetensors"), reverse=True)
        for path in more:
            path.unlink()
        return oldest

    return make


def use_checkpoint(config: Config) -> Callable[[Path], None]:
    """Go on from it, with a digest that fits, as whoever means harm would make it."""

    def read(path: Path) -> None:
        for other in path.parent.glob("*.safetensors"):  # of the last time
            if other != path:
                other.unlink()
        with contextlib.suppress(Exception), safe_open(path, framework="pt") as file:
            tensors, text = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()[DESCRIPTION]  # noqa: SIM118
            save_file(tensors, path, {DESCRIPTION: text, DIGEST: digest(text, tensors)})
        execute(config, checkpoints=Checkpoints(path.parents[1], resume=True))

    return read


def stream(folder: Path) -> Path:
    found = evcl.Stream(memories=[20, np.inf])
    found.learn(ROWS, np.arange(40) % 3)
    found.save(folder / "stream.safetensors")
    return folder / "stream.safetensors"


def use_stream(path: Path) -> None:
    found = evcl.Stream.load(path)
    found.predict_proba(ROWS)
    found.learn(ROWS[:4], np.zeros(4, int))


def files(folder: Path) -> Path:
    lines = [f"{a:.3f},{'red' if b > 0 else 'green'},{i % 2}" for i, (a, b, _) in enumerate(ROWS)]
    (folder / "rows.csv").write_text("\n".join(["one,colour,class", *lines]) + "\n")
    return folder / "rows.csv"


def table_stream(folder: Path) -> Path:
    learn_files([files(folder)], Asked("class"), folder / "rows.safetensors")
    return folder / "rows.safetensors"


def use_table_stream(path: Path) -> None:
    """As `evcl stream --out` does if it goes on: all rows are there, and the file is not written again."""
    stream_table.load(path)
    good = path.read_bytes()
    try:
        learn_files([path.with_name("rows.csv")], Asked("class"), path)
    finally:
        path.write_bytes(good)


def generative(folder: Path) -> Path:
    found = evcl.EVCL(network(), likelihood="bound", epochs=1)
    for _ in range(2):
        found.learn(IMAGES)
    found.save(folder / "generative.safetensors")
    return folder / "generative.safetensors"


def network() -> evcl.nn.VAE:
    return evcl.nn.task_vae(16, width=6, latents=2, encoder_layers=1)


def use_generative(path: Path) -> None:
    found = evcl.load(path, network())
    found.sample("0", 2)
    found.log_likelihood(IMAGES[:2], "0", draws=4)
