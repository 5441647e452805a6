"""A configuration in, a result out: one benchmark, one method, several seeds."""

from __future__ import annotations

import contextlib
import json
import math
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evcl import benchmarks, methods, metrics, nn
from evcl.errors import EvclError
from evcl.experiments.presets import preset as get_preset
from evcl.experiments.resume import owner, program_name
from evcl.files import check_regular, locked, parsed, read_text, write_atomically
from evcl.interrupts import deferred
from evcl.ranks import Ranks
from evcl.settings import SEED, VALIDATION, Settings, resolve
from evcl.training import Checkpoints, Progress, Run, Saver, StreamResult, learn_stream

SCHEMA = 1
RESULT = "result.json"
LOCK = ".evcl-run.lock"  # in the folder of a result, while a run is at work there
MOST_RESULT_BYTES = 2**28  # of a result, or of what a search found: 1,000 tasks of 15 seeds
MOST_SEEDS = 10_000  # of a run
_drawing = threading.Lock()  # there is one generator for all threads


@dataclass(frozen=True)
class Config:
    """Everything that decides a result, checked."""

    benchmark: str
    method: str
    preset: str
    seeds: tuple[int, ...]
    tasks: int
    settings: Settings  # the method's, and `validation`
    device: str = "cpu"
    precision: str = "fp32"

    @property
    def name(self) -> str:
        return f"{self.benchmark} {self.method}"


def configure(
    benchmark: str,
    method: str,
    preset: str = "tuned",
    seeds: Sequence[int] = (0, 1, 2),
    tasks: int | None = None,
    given: Mapping[str, Any] | None = None,
    device: str = "cpu",
    precision: str | None = None,
) -> Config:
    """A checked configuration: the preset's settings, with the `given` ones in their place.

    `precision` is that of the products: fp32 (a CPU's default), tf32 (a GPU's) or bf16; all state is float32.
    """
    entry, chosen = benchmarks.BENCHMARKS[benchmark], methods.get(method)
    known = {**chosen.known_settings, "validation": VALIDATION}
    count = benchmarks.check_tasks(entry, tasks)
    settings = resolve(method, known, {**get_preset(preset, benchmark, chosen, count), **(given or {})})
    if not 0 < len(seeds) <= MOST_SEEDS:
        raise EvclError(f"the number of seeds must be from 1 to {MOST_SEEDS}, not {len(seeds)}")
    seeds = tuple(int(SEED.check("seed", seed)) for seed in seeds)
    if len(set(seeds)) != len(seeds):
        raise EvclError(f"seeds must be different numbers, not {list(seeds)}")
    return Config(benchmark, method, preset, seeds, count, settings, *where(device, precision))


def where(device: str, precision: str | None, elsewhere: bool = False) -> tuple[str, str]:
    """The device and the precision of its products, checked; `auto` and None become what is meant.

    `elsewhere`: on other machines than this one, which need not have such a device.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not elsewhere and not torch.cuda.is_available():
        raise EvclError("device cuda cannot be used: torch finds no GPU here")
    known = {"cpu": ("fp32", "bf16"), "cuda": ("tf32", "fp32", "bf16")}
    if device not in known:
        raise EvclError(f"device must be auto, cpu or cuda, not {device!r}")
    precision = known[device][0] if precision is None else precision
    if precision not in known[device]:
        raise EvclError(f"precision on {device} must be one of {', '.join(known[device])}, not {precision!r}")
    return device, precision


@dataclass(frozen=True)
class Event:
    """Where a run stands: after an epoch, and with `accuracy` (the mean over the tasks seen) after a task.

    With a `note`, it stands where it stood, and there is something that a user should know.
    """

    seeds: tuple[int, ...]  # those that it is about
    task: int
    tasks: int
    done: float  # part of the whole run, from 0 to 1
    accuracy: float | None = None
    note: str | None = None


OnEvent = Callable[[Event], None]


def execute(
    config: Config,
    on_event: OnEvent | None = None,
    tolerant: bool = False,
    ranks: Ranks | None = None,
    checkpoints: Checkpoints | None = None,
) -> dict[str, Any]:
    """Run the configuration, its seeds side by side as replicas, and return the contents of `result.json`.

    A loss that is lost is an error or, if `tolerant`, a result without an accuracy. `checkpoints`: see
    `execute_together`.
    """
    return execute_together([config], lambda _, event: on_event and on_event(event), tolerant, ranks, checkpoints)[0]


def programs(configs: Sequence[Config], replicas: int) -> list[list[int]]:
    """Which configurations can share a program, of at most so many replicas: those that differ in real numbers only.

    Settings that one of the methods does not know do not matter: EVCL and VCL train side by side.
    """
    found: list[tuple[Any, dict[str, Any], list[int]]] = []
    for i, config in enumerate(configs):
        method = methods.get(config.method)
        where = (config.benchmark, config.tasks, config.seeds, config.device, config.precision)
        key = (*where, config.settings.validation, method.bayesian, method.joint, method.coreset_only)
        fixed = {name: value for name, value in config.settings.items() if not isinstance(value, float)}
        if fixed.get("coreset", "none") != "none":
            fixed["coreset"] = "some"  # which one is a replica's own
        for other, known, members in found:
            agree = all(known.get(name, value) == value for name, value in fixed.items())
            if other == key and agree and (len(members) + 1) * len(config.seeds) <= replicas:
                known.update(fixed)
                members.append(i)
                break
        else:
            found.append((key, fixed, [i]))
    return [members for _, _, members in found]


def execute_together(
    configs: Sequence[Config],
    on_event: Callable[[int, Event], object] = lambda _, event: None,
    tolerant: bool = False,
    ranks: Ranks | None = None,
    checkpoints: Checkpoints | None = None,
) -> list[dict[str, Any]]:
    """The results of configurations that share a program (see `programs`), each seed a replica; they share its time.

    A seed whose loss is lost is an error or, if `tolerant`, has no accuracy. `ranks`: the processes that train them
    together, each of which calls this. With `checkpoints` the program saves itself on the way, at Ctrl-C and at
    SIGTERM, in a folder of its own in theirs, and may go on from there. It is for the caller to remove them, once the
    results are where they should be.
    """
    lead, count = configs[0], len(configs[0].seeds)
    seeded = benchmarks.BENCHMARKS[lead.benchmark].seeded
    streams = [
        benchmarks.get(lead.benchmark, seed, lead.tasks, lead.settings.validation)
        for seed in (lead.seeds if seeded else lead.seeds[:1])
    ]
    followed = [methods.get(config.method) for config in configs for _ in lead.seeds]
    everything = {name: value for config in configs for name, value in config.settings.items()}
    settings = [Settings({**everything, **config.settings}) for config in configs for _ in lead.seeds]
    run = Run(
        network(streams[0]),
        methods.together(followed),
        settings,
        lead.seeds * len(configs),
        draw=True,
        device=lead.device,
        precision=lead.precision,
        tolerant=tolerant,
        ranks=ranks,
    )
    tasks = len(streams[0])
    now = Event(lead.seeds, 0, tasks, 0.0)

    def hear(i: int, event: Event) -> None:
        nonlocal now
        now = event
        on_event(i, event)

    def after_epoch(task: int, progress: Progress) -> None:
        done = progress.epoch / progress.epochs
        for i, config in enumerate(configs):
            hear(i, Event(config.seeds, task, tasks, done if run.method.joint else (task + done) / tasks))

    def after_task(task: int, accuracy: Tensor) -> None:
        for i, (config, part) in enumerate(zip(configs, accuracy.split(count), strict=True)):
            hear(i, Event(config.seeds, task, tasks, (task + 1) / tasks, float(part.mean())))

    def note(text: str) -> None:
        on_event(0, replace(now, seeds=lead.seeds, accuracy=None, note=text))

    if checkpoints is None:
        start = time.perf_counter()
        found = learn_stream(run, streams, after_epoch, after_task)
        seconds = time.perf_counter() - start
    else:
        with deferred() as asked:
            stop, own = checkpoints.stop or asked, checkpoints.of(program_name(configs))
            saver = Saver(replace(own, stop=stop), [owner(one) for one in configs], environment(lead.device), note)
            found = learn_stream(run, streams, after_epoch, after_task, saver)
            seconds = saver.seconds
    seconds /= len(configs)
    shape = {"tasks": tasks, **_trunk(streams[0]), "precision": lead.precision, "device": lead.device}
    return [
        {
            "schema": SCHEMA,
            **_identity(config),
            "config": {**config.settings, **shape},
            "seeds": list(config.seeds),
            **_measures(found, range(i * count, (i + 1) * count)),
            "seconds": round(seconds, 3),
            "environment": environment(config.device),
        }
        for i, config in enumerate(configs)
    ]


def network(stream: benchmarks.Benchmark) -> torch.nn.Module:
    """The trunk that learns a stream. One of the stream's own may draw from torch's generator, as torch's layers do:
    it always draws the same, and the generator is left as it was.
    """
    if stream.network is None:
        return nn.mlp(stream.inputs, stream.hidden)
    with _drawing, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return stream.network()


def _trunk(stream: benchmarks.Benchmark) -> dict[str, Any]:
    """What a result says of it."""
    if stream.network is None:
        return {"hidden": list(stream.hidden)}
    return {"network": getattr(stream.network, "__name__", type(stream.network).__name__)}


def merge(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The results of one configuration's seeds, run one by one, as one result."""
    whole = dict(results[0])
    whole["seeds"] = [seed for result in results for seed in result["seeds"]]
    whole["accuracy"] = [matrix for result in results for matrix in result["accuracy"]]
    whole["seconds"] = round(sum(result["seconds"] for result in results), 3)
    for name in MEASURES:
        each = [value for result in results for value in result[name]["per_seed"]]
        whole[name] = _summary([math.nan if value is None else value for value in each])
    return whole


def split(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The result of several seeds as one of each: what `merge` makes one of. They share its time."""
    count = len(result["seeds"])
    parts = []
    for k, seed in enumerate(result["seeds"]):
        part = {**result, "seeds": [seed], "accuracy": [result["accuracy"][k]]}
        part["seconds"] = round(result["seconds"] / count, 3)
        for name in MEASURES:
            value = result[name]["per_seed"][k]
            part[name] = _summary([math.nan if value is None else value])
        parts.append(part)
    return parts


def _identity(config: Config) -> dict[str, Any]:
    return {"benchmark": config.benchmark, "method": config.method, "preset": config.preset}


def environment(device: str) -> dict[str, Any]:
    from evcl import __version__

    return {
        "evcl": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
        "platform": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
    }


@cache
def _processor() -> str:
    """The CPU's name, as far as the platform tells it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "cpu"


MEASURES = ("average_accuracy", "forgetting", "backward_transfer", "nll", "ece")


def _measures(found: StreamResult, replicas: Sequence[int]) -> dict[str, Any]:
    matrices = found.accuracy[list(replicas)].numpy()
    tasks = list(zip(found.probabilities, found.labels, strict=True))

    def per_task(measure: Callable[[Any, Any], float], r: int) -> float:
        """The mean over tasks, after the last one, of a measure of replica r's predictions."""
        if bool(found.accuracy[r, -1].isnan().all()):  # lost: these are predictions of what was there before
            return math.nan
        return float(np.mean([measure(p[r].cpu(), y[r % len(y)].cpu()) for p, y in tasks]))

    values = (
        [metrics.average_accuracy(m) for m in matrices],
        [metrics.forgetting(m) for m in matrices],
        [metrics.backward_transfer(m) for m in matrices],
        [per_task(metrics.nll, r) for r in replicas],
        [per_task(metrics.expected_calibration_error, r) for r in replicas],
    )
    accuracy = [[[_number(v) for v in row] for row in matrix] for matrix in matrices.tolist()]
    return {"accuracy": accuracy, **{name: _summary(each) for name, each in zip(MEASURES, values, strict=True)}}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _summary(values: Sequence[float]) -> dict[str, Any]:
    """Mean, standard deviation (n - 1; null for one seed) and the seeds' own values; null where not measured."""
    if not all(math.isfinite(v) for v in values):
        return {"mean": None, "std": None, "per_seed": [_number(v) for v in values]}
    std = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return {"mean": float(np.mean(values)), "std": std, "per_seed": list(values)}


# --- on disk -------------------------------------------------------------------------------------------------------


def open_folder(folder: Path, config: Config, overwrite: bool = False, name: str = RESULT) -> dict[str, Any] | None:
    """Make sure that the folder can take this run's result; returns the result if it is there already."""
    found = None
    try:
        if (folder / name).exists():
            check_regular(folder / name)
            found = read_result(folder / name)
    except EvclError as error:
        if not overwrite:
            raise EvclError(f"{error}: pass --overwrite or another --out") from None
    except OSError as error:
        raise EvclError(f"cannot write {folder / name}: {error.strerror or error}") from error
    if found is not None and not overwrite:
        usual = {**found["config"], **config.settings, "tasks": config.tasks}
        usual |= {"precision": config.precision, "device": config.device}
        wanted = {**_identity(config), "config": usual, "seeds": list(config.seeds)}
        if wanted == {key: found[key] for key in wanted}:
            return found
        raise EvclError(
            f"{folder} holds another run ({found['benchmark']} {found['method']}): pass --overwrite or --out"
        )
    check_writable(folder)
    return None


def check_writable(folder: Path) -> None:
    """Make sure, before hours of training, that a result can be written there; nothing is left behind."""
    try:
        with _made(folder):
            probe = folder / ".evcl-writable"
            probe.touch()
            probe.unlink()
    except (OSError, ValueError) as error:
        raise EvclError(f"cannot write to {folder}: {getattr(error, 'strerror', None) or error}") from error


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[None]:
    """The folder is there for as long as this lasts, and if it was made for it, only then or with something in it."""
    made: list[Path] = []
    try:
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:  # a run that fails leaves nothing behind; `write_result` makes them again
        for path in made:
            with contextlib.suppress(OSError, ValueError):
                path.rmdir()


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """One run at a time in the folder of a result: a second is refused, so that neither is lost."""
    with contextlib.ExitStack() as stack:
        # Where nothing can be written, `open_folder` says so if it matters; some file systems have no locks.
        with contextlib.suppress(OSError, NotImplementedError):
            stack.enter_context(_made(folder))
            stack.enter_context(locked(folder / LOCK, f"{folder}: another evcl is at work on it"))
        yield


def write_result(folder: Path, result: Mapping[str, Any], name: str = RESULT, overwrite: bool = False) -> Path:
    """Write `result.json`, whole or not at all. One that came there since `open_folder` looked is not replaced, unless
    with `overwrite`: if it is of the same run it is as good, and if of another this is an error.
    """
    path, text = folder / name, json.dumps(result, indent=1, allow_nan=False) + "\n"
    if path.exists() and not overwrite:
        found, own = read_result(path), parsed(text)
        if any(found[key] != own[key] for key in ("benchmark", "method", "preset", "config", "seeds")):
            other = f"{found['benchmark']} {found['method']}"
            raise EvclError(f"{path} is the result of another run ({other}) that ended meanwhile: move it away")
        return path

    def write(temporary: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, "utf-8")

    write_atomically(path, write)
    return path


def read_result(path: Path) -> dict[str, Any]:
    """A result file, checked to be one."""
    try:
        found = parsed(read_text(path, MOST_RESULT_BYTES))
        for key, kind in _KINDS.items():
            if not isinstance(found[key], kind):
                raise ValueError(f"{key} is {type(found[key]).__name__}")
        if found["schema"] != SCHEMA:
            raise ValueError(f"schema {found['schema']}")
        found["config"]["tasks"], found["environment"]["device"], found["environment"]["platform"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EvclError(f"{path} is not a result of evcl ({type(error).__name__} {error})") from error
    return dict(found)


_KINDS: dict[str, type | tuple[type, ...]] = {
    "schema": int, "benchmark": str, "method": str, "preset": str, "config": dict, "seeds": list, "accuracy": list,
    "average_accuracy": dict, "forgetting": dict, "nll": dict, "ece": dict, "seconds": (int, float),
    "environment": dict,
}  # fmt: skip
