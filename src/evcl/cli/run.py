"""`evcl run`, `demo` and `report`: train on benchmarks, and report on the results."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evcl import experiments
from evcl._core.errors import Diverged, EvclError
from evcl._core.interrupts import Interrupted
from evcl._core.torchrun import world
from evcl.cli.options import (
    DataDir,
    Device,
    Epochs,
    GivenSettings,
    Plugins,
    Precision,
    Preset,
    Usage,
    a_benchmark,
    a_method,
    chosen_seeds,
    one_thread,
    settings,
    usage,
)
from evcl.cli.progress import print_line, print_tables, progress, write_report_of

if TYPE_CHECKING:
    from evcl._core.ranks import Ranks
    from evcl.experiments import Config, Result


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    benchmark: Annotated[
        str,
        typer.Argument(help="The benchmark, a stream of tasks or of rows; see evcl list.", autocompletion=a_benchmark),
    ]
    method: Annotated[
        str | None, typer.Option(help="The method; see evcl list [evcl; ekf for rows].", autocompletion=a_method)
    ] = None
    seeds: Annotated[int | None, "Number of seeds: 0, 1, ... [3]."] = None
    seed_list: Annotated[str | None, "Use exactly these seeds: 0,7,9."] = None
    epochs: Epochs = None
    preset: Preset = "tuned"
    set_: GivenSettings = None
    tasks: Annotated[int | None, "Number of tasks."] = None
    validation: Annotated[float | None, "Hold out this fraction of each training set, and measure on it."] = None
    scenario: Annotated[str | None, "What a prediction is told: task, domain or class [the benchmark's own]."] = None
    memory: Annotated[int | None, "Keep this many examples in all, and rehearse them [none; 200 for er, ...]."] = None
    network: Annotated[str | None, "Network in place of the benchmark's: 400x400, resnet18, ..."] = None
    out: Annotated[Path | None, "Folder for the result [runs/BENCHMARK/METHOD]."] = None
    overwrite: Annotated[bool, "Replace the folder's result."] = False
    plugin: Plugins = None
    resume: Annotated[bool, "Resume from the folder's checkpoint, if it has one."] = False
    checkpoint_seconds: Annotated[float, "Seconds between checkpoints; 0: only after each task."] = 60.0
    device: Device = "auto"
    precision: Precision = None
    data_dir: DataDir = None
    log: Annotated[str | None, "Write each epoch's metrics to a log in the folder: csv or tensorboard."] = None


def run(options: RunOptions) -> None:
    """Train one method on one benchmark.

    Writes result.json to the folder.
    """
    from evcl._core.ranks import check_batch, joined

    if options.resume and options.overwrite:
        raise Usage("--resume and --overwrite cannot be used together")
    if options.data_dir is not None:
        if not options.data_dir.is_dir():
            raise Usage(f"--data-dir: there is no folder {options.data_dir}")
        os.environ["EVCL_DATA"] = str(options.data_dir)
    experiments.load_plugins(options.plugin or [])
    with usage():
        config = _configured(options)
        experiments.SECONDS.check("--checkpoint-seconds", options.checkpoint_seconds)
        check_batch(config.settings.batch_size, world())
        folder = options.out or Path("runs") / options.benchmark / config.method
        if options.log is not None:
            from evcl.callbacks.logs import Log

            config = replace(config, log=Log.checked(options.log, folder / "log"))
    one_thread()
    with joined(config.device) as group:
        result = _found_or_made(config, folder, options, group)
    if result is None:
        return
    print_tables([result])
    print_line(f"result: {folder / experiments.RESULT}")


def _configured(options: RunOptions) -> Config:
    given: dict[str, object] = dict(settings(options.set_ or []))
    for name in ("epochs", "validation", "network", "scenario", "memory"):
        value = getattr(options, name)
        if value is not None:
            if name in given:
                raise Usage(f"--{name} and --set {name} cannot be used together")
            given[name] = value
    seeds = chosen_seeds(options.seeds, options.seed_list)
    where = (options.device, options.precision)
    return experiments.configure(options.benchmark, options.method, options.preset, seeds, options.tasks, given, *where)


def _found_or_made(config: Config, folder: Path, options: RunOptions, group: Ranks | None) -> Result | None:
    """Return a run's result, read from the folder or made now. If several processes share the run (`group`), only
    process 0 reads and writes the folder and gets the result; the others get None.
    """
    first = group is None or group.rank == 0
    resume, seconds = options.resume, options.checkpoint_seconds
    with experiments.claimed(folder) if first else contextlib.nullcontext():
        result = None
        if first:
            checkpoints = experiments.open_checkpoints(folder, config, seconds, resume, options.overwrite)
            replaces = options.overwrite or (checkpoints.resume and (folder / experiments.RESULT).exists())
            result = experiments.open_folder(folder, config, replaces)
        if result is not None if group is None else group.first(result is not None, config.device):
            if first:
                print_line(f"{folder} already holds this run; nothing to do (--overwrite runs it again)")
            return result
        if not first:  # process 0 has removed the old files by now
            checkpoints, replaces = experiments.open_checkpoints(folder, config, seconds, resume), False
        elif resume and not checkpoints.resume:
            print_line(f"{folder} holds no checkpoint: the run starts from the beginning")
        if first and config.log is not None and not checkpoints.resume:
            config.log.clear()  # the run starts over, and so does its log
        return _run_and_write(config, folder, checkpoints, replaces, group)


def _run_and_write(
    config: Config, folder: Path, checkpoints: experiments.Checkpoints, replaces: bool, group: Ranks | None
) -> Result | None:
    """Run, write the result (over an earlier one if `replaces`) and return it. Checkpoints are kept until then."""
    from evcl.experiments.run import execute_seeds

    again = f"it is saved in {checkpoints.folder}, and the same command with --resume continues from there"
    try:
        with progress([config]) as on_event:
            result = execute_seeds(config, partial(on_event, 0), ranks=group, checkpoints=checkpoints)
    except (Interrupted, experiments.Stopped):
        raise Interrupted(again if checkpoints.programs() else "there was nothing to save yet") from None
    except Diverged:  # if resumed, it would diverge again
        checkpoints.remove()
        raise
    except experiments.Died as error:
        raise EvclError(f"{error} {again}" if checkpoints.programs() else str(error)) from error
    if group is not None and group.rank > 0:
        return None
    try:
        experiments.write_result(folder, result, overwrite=replaces)
    except EvclError as error:
        print_tables([result])
        raise EvclError(f"{error}; the run is done: {again}" if checkpoints.programs() else str(error)) from error
    checkpoints.remove()
    return result


DEMO_METHODS = ("evcl", "vcl", "ewc", "naive")
DEMO_BENCHMARKS = ("permuted-digits", "split-digits")


def demo(
    out: Annotated[Path, "Folder for the results, figures and page."] = Path("evcl-demo"),
    epochs: Annotated[int | None, "Passes over each task's data; fewer is faster."] = None,
    overwrite: Annotated[bool, "Train again, ignoring earlier results."] = False,
) -> None:
    """Train four methods on the built-in data.

    Two streams of five tasks, three seeds each: a table, figures and a page.
    """
    from evcl.report import check_installed

    check_installed()
    given = {} if epochs is None else {"epochs": epochs}
    with usage():
        configs = [
            experiments.configure(b, m, "tuned", (0, 1, 2), None, given) for b in DEMO_BENCHMARKS for m in DEMO_METHODS
        ]
    folders = [out / config.benchmark / config.method for config in configs]
    with contextlib.ExitStack() as claims:
        for folder in folders:
            claims.enter_context(experiments.claimed(folder))
        there = 0 if overwrite else sum((folder / experiments.RESULT).exists() for folder in folders)
        if there:
            print_line(f"{there} of {len(configs)} results are already in {out} (--overwrite trains again)")
        with progress(configs) as on_event:
            made = experiments.reproduce(configs, out, lambda i, event, _: on_event(i, event), overwrite)
            results = [result for _, result in made]
    print_tables(results)
    write_report_of(out, "Four methods learn five tasks, one after another")


def report(folder: Annotated[Path, typer.Argument(help="A folder with results in it, at any depth.")]) -> None:
    """Write tables, figures and a page of a folder's results."""
    from evcl.report import find_results

    print_tables(find_results(folder))
    write_report_of(folder, "Continual learning with evcl")
