"""Everything that reads a file or a line of words: what writes a good one, and what reads it and uses what it found.

One entry point more is a line in TARGETS. `mutated.py` changes these files at random.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.torch import save_file

sys.path[:0] = [str(Path(__file__).parents[1] / part) for part in ("data", "report", "safety", "soak")]
import attacks  # noqa: E402
import made_up  # noqa: E402
import made_up_streams  # noqa: E402
import tiny  # noqa: E402

import evcl  # noqa: E402
from evcl._core.bounds import MOST_PIXELS  # noqa: E402
from evcl._core.errors import EvclError  # noqa: E402
from evcl.data import cache, formats  # noqa: E402
from evcl.experiments import (  # noqa: E402
    Checkpoints,
    Config,
    Event,
    Result,
    Store,
    configure,
    execute,
    read_result,
    read_search,
    read_sweep,
    standing,
)  # fmt: skip
from evcl.experiments.search import read_found  # noqa: E402
from evcl.experiments.store import Claim  # noqa: E402
from evcl.report import by_benchmark, find_results, tables_markdown  # noqa: E402
from evcl.report.html_page import page  # noqa: E402
from evcl.streams import table as stream_table  # noqa: E402
from evcl.streams.commands import learn_files  # noqa: E402
from evcl.streams.files import Asked  # noqa: E402
from evcl.tables import Learning  # noqa: E402
from evcl.tables.commands import open_source  # noqa: E402
from evcl.tables.creating import create  # noqa: E402
from evcl.tables.model import load_model  # noqa: E402
from evcl.training.checkpoint import DESCRIPTION, DIGEST, digest  # noqa: E402

CELL = configure("split-digits", "evcl", "paper", [0], 2, {"epochs": 1, "fisher_examples": 20, "predict_samples": 1})
SMALL = {"steps": 128, "envs": 2, "rollout": 32, "episodes": 1, "passes": 1}
AGENTS = configure("cartpole-variants", "evcl", "tuned", [0], 2, SMALL)
ROWS = np.random.default_rng(0).normal(size=(40, 3))
IMAGES = np.random.default_rng(0).uniform(size=(20, 16)).astype(np.float32)
Make, Read = Callable[[Path], Path], Callable[[Path], object]


# --- good files ----------------------------------------------------------------------------------------------------


def numbers(seed: int = 0, rows: int = 40) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(seed).normal(size=(rows, 3))
    return x, np.arange(rows) % 2


def learner(folder: Path) -> Path:
    found = evcl.EVCL(evcl.nn.mlp(3, [4]), epochs=1, coreset="random", coreset_size=3)
    for task in range(2):
        found.learn(numbers(task))
    found.save(folder / "model.safetensors")
    return folder / "model.safetensors"


def use_learner(path: Path) -> None:
    found = evcl.load(path)
    if found.tasks:
        found.predictions(numbers()[0], 0)
        found.described()


def table_model(folder: Path) -> Path:
    from evcl.tables import learn

    learn(folder / "table.safetensors", table(folder), "class", epochs=1, hidden=(4,))
    (folder / "table.csv").unlink()
    return folder / "table.safetensors"


def table(folder: Path) -> Path:
    x, y = numbers()
    lines = [f'{a:.3f},{"" if i % 7 == 0 else f"{b:.3f}"},"{"red" if c > 0 else "gr, een"}",{k}'
             for i, ((a, b, c), k) in enumerate(zip(x, y, strict=True))]  # fmt: skip
    (folder / "table.csv").write_text("\n".join(["one,two,colour,class", *lines]) + "\n", "utf-8")
    return folder / "table.csv"


def table_in(kind: str) -> Make:
    """A table in another format."""

    def make(folder: Path) -> Path:
        x, y = numbers()
        columns = {"one": x[:, 0], "word": ["a" if k else None for k in y], "class": y}
        if kind.startswith("np"):
            columns["word"] = np.array(["a", "b"])[y]
        if kind == "npz":
            columns["pixels"] = np.zeros((len(x), 2, 2), np.uint8)
        return attacks.table(folder / f"table.{kind}", **columns)

    return make


def use_table(path: Path) -> None:
    source = open_source(path)
    target = next((name for name in ("class", "y") if name in source.shapes), None)
    made, rows = create(source, Learning(target, hidden=(4,)))
    made.examples(source, rows, rows.targets(sorted(rows.names)), Learning())


def use_images(path: Path) -> None:
    use_table(path.parents[1])


def image(kind: str) -> Make:
    def make(folder: Path) -> Path:
        from PIL import Image

        for place in "ab":
            (folder / place).mkdir()
            pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / place / f"one.{kind}")
        return folder / "a" / f"one.{kind}"

    return make


def result(*some: Result) -> Make:
    def make(folder: Path) -> Path:
        made_up.write(folder, *some)
        return folder / "0" / "result.json"

    return make


def use_result(path: Path) -> None:
    read_result(path)
    groups = by_benchmark(find_results(path.parents[1]))
    tables_markdown(groups.values(), "fuzz")
    page(groups, "fuzz")


SEARCH = """benchmarks = ["split-digits", "permuted-digits:3"]
validation = 0.1
seeds = [100, 101]
trials = 4
refine = 2
preset = "paper"
confirm = 1
confirm_seeds = [7]

[methods.evcl]
strength = {low = 1.0, high = 1e5}
epochs = {choices = [2, 5]}
std_update = "natural"

[[methods.other]]
method = "vcl"
lr = 1e-3
"""


def search(folder: Path) -> Path:
    (folder / "search.toml").write_text(SEARCH, "utf-8")
    return folder / "search.toml"


def found(folder: Path) -> Path:
    from evcl.experiments.search import _asked

    asked = _asked(read_search(search(folder)))
    (folder / "found.json").write_text(json.dumps({"benchmark": "split-digits", "tried": {}, **asked}, indent=1))
    return folder / "found.json"


def data_set(kind: str, packed: bool = False) -> tuple[Make, Read]:
    arrays = tiny.arrays(kind)
    form, entry = tiny.FORMS[kind], tiny.entry(arrays)

    def make(folder: Path) -> Path:
        files = getattr(tiny, kind)(arrays)
        if packed:
            return tiny.put(folder, {"tiny.tgz": tiny.tar(files)}) / "tiny.tgz"
        files = tiny.gzipped(files) if kind == "idx" else files
        return tiny.put(folder, files) / next(iter(files))

    def read(path: Path) -> None:
        place = path if packed else path.parents[1] if kind == "letters" else path.parent
        found = formats.read(place, form, entry)
        if found is not None:
            cache.check(entry, found)

    return make, read


def cached(folder: Path) -> Path:
    np.save(folder / "train_images.npy", np.zeros((5, 4), np.uint8))
    return folder / "train_images.npy"


def cached_source(folder: Path) -> Path:
    (folder / "source.json").write_text('{"data set": "tiny", "source": "somewhere"}')
    return folder / "source.json"


def sweep(folder: Path) -> Path:
    text = 'benchmarks = ["split-digits:2"]\nseeds = 2\ndraws = 2\n[settings]\nepochs = 1\n'
    text += "[methods.evcl]\nstrength = [1, 10]\nlr = {low = 1e-4, high = 1e-2}\n[methods.naive]\n"
    (folder / "sweep.toml").write_text(text)
    return folder / "sweep.toml"


def store(kind: str) -> Make:
    """A store with one cell that is claimed; one of its files."""

    def make(folder: Path) -> Path:
        made = Store(folder)
        made.declare([CELL])
        assert isinstance(made.take(CELL), Claim)
        return next(folder.glob(kind))

    return make


def use_store(path: Path) -> None:
    folder = next(place for place in path.parents if (place / "sweeps").is_dir())
    for later in folder.glob("cells/*/claim-2.json"):  # of the last time
        later.unlink()
    standing(folder)
    Store(folder).take(CELL)


def adapters(folder: Path) -> Path:
    """Adapters beside a base model, which is not in the file."""
    found = evcl.EVCL(base(), epochs=1, adapters=evcl.nn.LoRA(rank=2), only=[])
    found.learn(numbers())
    found.save(folder / "adapters.safetensors")
    return folder / "adapters.safetensors"


def base() -> evcl.nn.MLP:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return evcl.nn.mlp(3, [4])


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


def rows_file(folder: Path) -> Path:
    lines = [f"{a:.3f},{'red' if b > 0 else 'green'},{i % 2}" for i, (a, b, _) in enumerate(ROWS)]
    (folder / "rows.csv").write_text("\n".join(["one,colour,class", *lines]) + "\n")
    return folder / "rows.csv"


def table_stream(folder: Path) -> Path:
    learn_files([rows_file(folder)], Asked("class"), folder / "rows.safetensors")
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
    found = evcl.EVCL(generator(), likelihood="bound", epochs=1)
    for _ in range(2):
        found.learn(IMAGES)
    found.save(folder / "generative.safetensors")
    return folder / "generative.safetensors"


def generator() -> evcl.nn.VAE:
    return evcl.nn.task_vae(16, width=6, latents=2, encoder_layers=1)


def use_generative(path: Path) -> None:
    found = evcl.load(path, generator())
    found.sample("0", 2)
    found.log_likelihood(IMAGES[:2], "0", draws=4)


# A command on each line. What would train raises instead: the words are tried here, not the training.
COMMANDS = """learn --model new.safetensors --data table.csv --target class --epochs 1 --hidden 4,4 --set lr=0.01
learn --model model.safetensors --data table.csv --task two --keep 20 --validation 0.2 --missing NA --unknown error
stream table.csv --target class --out stream.safetensors --delay 3 --batch 4 --false-alarms 0.001 --kind class --seed 1
predict --model model.safetensors --data table.csv --out out.csv --task table --drop one --key colour
inspect model.safetensors --json
run split-digits --method evcl --seeds 2 --tasks 2 --epochs 1 --preset paper --set strength=0.5 --out runs --device cpu
run permuted-digits --seed-list 1,2 --validation 0.1 --network 20x20 --memory 50 --scenario domain --precision fp32
sweep sweep.toml --out sweep --workers 1
tune search.toml --out tune --benchmark split-digits
reproduce split-digits --method vcl --seeds 1 --epochs 1 --out again --quick
report runs
status sweep
list settings
data list
merge model.safetensors model.safetensors --out merged.safetensors
export model.safetensors --out model.pt2
"""


def command_lines(folder: Path) -> Path:
    table_model(folder).rename(folder / "model.safetensors")
    table(folder), search(folder), sweep(folder)
    (folder / "words.txt").write_text(COMMANDS)
    return folder / "words.txt"


def use_command(path: Path) -> None:
    """Run the line that was changed, as the command evcl does, in the folder of the file."""
    from unittest.mock import patch

    from evcl import experiments
    from evcl.cli import main
    from evcl.cli.progress import console
    from evcl.tables.model import Model

    def begins(*_: object, **__: object) -> object:
        raise EvclError("here the work would begin")

    good = set(COMMANDS.splitlines())
    lines = [line for line in path.read_text("utf-8", "replace").splitlines() if line not in good] or ["list"]
    words = ["evcl", *(word for word in lines[0].split()[:60] if word not in ("--plugin", "--debug"))]
    out, err = io.StringIO(), io.StringIO()
    console.cache_clear()
    with (
        contextlib.chdir(path.parent),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        patch.object(sys, "argv", words),
        patch("evcl.experiments.run.execute_seeds", begins),
        patch.object(experiments, "work", begins),
        patch.object(experiments, "reproduce", begins),
        patch.object(experiments, "tune", begins),
        patch.object(Model, "learn", begins),
        patch("evcl.streams.commands.learn_files", begins),
        patch("evcl.tables.commands.export_learner", begins),
        patch("signal.signal"),
    ):
        try:
            main()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 0
    told = err.getvalue()
    if status and ("--debug" in told or told.count("\n") != 1 or status not in (1, 2)):
        raise AssertionError(f"status {status}: {told!r} for {words}")
    if any(ord(letter) < 32 and letter not in "\n\t" for letter in out.getvalue() + told):
        raise AssertionError(f"control characters: {told!r} for {words}")


@dataclass(frozen=True)
class Target:
    make: Make
    read: Read
    most: int = 0  # bytes that the reader lets a file unpack to, where those are more than the file's


TARGETS: dict[str, Target] = {
    "model": Target(learner, use_learner),
    "table model": Target(table_model, load_model),
    "result": Target(result(made_up.result(), made_up.result("vcl")), use_result),
    "result of a stream": Target(result(made_up_streams.stream()), use_result),
    "result of agents": Target(result(made_up.generative(score="average_return")), use_result),
    "result without labels": Target(result(made_up.generative()), use_result),
    "search": Target(search, read_search),
    "found": Target(found, lambda path: read_found(path, read_search(path.with_name("search.toml")))),
    "sweep": Target(sweep, read_sweep),
    "claim": Target(store("cells/*/claim-1.json"), use_store),
    "owner": Target(store("owners/*.json"), use_store),
    "cells": Target(store("sweeps/*.json"), use_store),
    "checkpoint": Target(checkpoint(CELL), use_checkpoint(CELL)),
    "checkpoint of agents": Target(checkpoint(AGENTS), use_checkpoint(AGENTS)),
    "stream": Target(stream, use_stream),
    "table stream": Target(table_stream, use_table_stream),
    "generative model": Target(generative, use_generative),
    "command line": Target(command_lines, use_command),
    "adapters": Target(adapters, lambda path: evcl.load(path, base())),
    "csv": Target(table, use_table),
    **{kind: Target(table_in(kind), use_table) for kind in ("csv.gz", "feather", "npy", "xlsx", "npz", "parquet")},
    **{kind: Target(image(kind), use_images, 3 * MOST_PIXELS) for kind in ("png", "jpeg", "bmp", "gif", "webp")},
    **{f"data set, {kind}": Target(*data_set(kind), 2**20) for kind in ("idx", "cifar", "sheets", "letters", "npz")},
    "archive": Target(*data_set("letters", packed=True), 2**20),
    "cached array": Target(cached, lambda path: cache.load(path, (5, 4))),
    "cached source": Target(cached_source, cache.read_json),
}  # fmt: skip
