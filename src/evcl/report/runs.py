"""How a result was made: seeds, machine, settings, and the command that reproduces it."""

from __future__ import annotations

import shlex

from evcl.experiments import SUMMARIES, Result, preset
from evcl.experiments.known import KnownMethod, known_benchmark, known_method
from evcl.experiments.trunk import is_text

# entries of a configuration that are not settings
SHAPE_KEYS = ("tasks", "scenario", "hidden", "network", "precision", "device")
UNUSED = ("validation", 0.0)


def seeds(result: Result) -> str:
    """'0-4', or '0, 7, 9'."""
    numbers = result.seeds
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers))


def machine(result: Result) -> str:
    """The hardware, and the precision of matrix products if it is not fp32."""
    env, precision = result.environment, result.config.get("precision", "fp32")
    return f"{env.device}{'' if precision == 'fp32' else f' ({precision})'}, {env.platform}"


def software(result: Result) -> str:
    env = result.environment
    return f"evcl {env.evcl}, torch {env.torch}, {env.threads} thread{'s' * (env.threads != 1)}"


def settings(result: Result) -> dict[str, str]:
    """Every setting as text, and the hidden layers or the network."""
    return {name: _text(value) for name, value in result.config.items() if name not in ("precision", "device")}


def command(result: Result) -> str:
    """The command that reproduces this result. It names only the settings that differ from the preset's."""
    config, benchmark, method = result.config, result.benchmark, result.method
    words = ["evcl", "run", benchmark, "--method", method, "--preset", result.preset]
    count = len(result.seeds)
    if result.seeds == list(range(count)):
        words += ["--seeds", str(count)]
    else:
        words += ["--seed-list", ",".join(map(str, result.seeds))]
    known = known_benchmark(benchmark)
    if known is None or known.tasks != result.tasks:
        words += ["--tasks", str(result.tasks)]
    if "scenario" in config:
        words += ["--scenario", config["scenario"]]
    if is_text(config.get("network")):
        words += ["--network", config["network"]]
    given = _given(result)
    for name in ("epochs", "validation"):
        if name in given:
            words += [f"--{name}", _text(given.pop(name))]
    for name, value in given.items():
        words += ["--set", f"{name}={_text(value)}"]
    for name in ("device", "precision"):
        if name in config:
            words += [f"--{name}", str(config[name])]
    if _method(result) is None:
        words += ["--plugin", "FILE.py"]
    return shlex.join(words)


def _given(result: Result) -> dict[str, object]:
    """The settings that differ from the preset's; all settings if the method is not registered here."""
    named = {name: value for name, value in result.config.items() if name not in SHAPE_KEYS and (name, value) != UNUSED}
    method = _method(result)
    if result.preset not in SUMMARIES or method is None:
        return named
    usual = {name: setting.default for name, setting in method.known_settings.items()}
    usual |= preset(result.preset, result.benchmark, method)
    return {name: value for name, value in named.items() if name not in usual or usual[name] != value}


def _method(result: Result) -> KnownMethod | None:
    """The method; None if it or the benchmark is not registered here."""
    known = known_benchmark(result.benchmark)
    return None if known is None else known_method(result.benchmark, result.method)


def _text(value: object) -> str:
    """A value exactly as `--set` reads it."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    return repr(value) if isinstance(value, float) else str(value)
