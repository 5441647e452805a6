"""What the commands share: how they are parsed and listed, common options, the usage error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import partial
from importlib import import_module
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from evcl import experiments
from evcl._core.catalogue import AGENT_SUMMARIES, BENCHMARK_SUMMARIES, METHOD_SUMMARIES, ROW_SUMMARIES
from evcl._core.errors import EvclError

if TYPE_CHECKING:
    from evcl.tables.source import Dialect


def a_method(incomplete: str) -> list[str]:
    """What a shell completes the name of a method to."""
    return [name for name in METHOD_SUMMARIES | AGENT_SUMMARIES | ROW_SUMMARIES if name.startswith(incomplete)]


def a_benchmark(incomplete: str) -> list[str]:
    return [name for name in BENCHMARK_SUMMARIES if name.startswith(incomplete)]


Plugins = Annotated[
    list[str] | None, typer.Option(metavar="FILE", help="A Python file or module that registers methods or benchmarks.")
]
Preset = Annotated[str, "Where settings come from: tuned, default, paper or authors; see evcl list."]
Epochs = Annotated[int | None, "Passes over each task's data."]
GivenSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="A setting: strength=0.1; see evcl list settings. May be repeated."
    ),
]
DataDir = Annotated[Path | None, "A local folder with data files [EVCL_DATA]."]
Device = Annotated[str, "auto (cuda if there is one, else cpu), cpu, cuda or mps."]
OneDevice = Annotated[str, "cpu, cuda, mps, or auto: cuda if there is one, else cpu."]
Precision = Annotated[str | None, "Precision of matrix products: fp32 [CPU], tf32 [GPU] or bf16."]


def as_command(function: Callable[..., None]) -> Callable[..., None]:
    """The function as typer takes it. If it takes a dataclass, it has an option for each field, inherited ones last. A
    text beside a type is the help of an option; a flag has no opposite.
    """
    hints = get_type_hints(function, include_extras=True)
    kind: Any = next(iter(hints.values()))
    record = is_dataclass(kind)
    if record:
        hints = get_type_hints(kind, include_extras=True)
        own = sorted(fields(kind), key=lambda field: field.name not in kind.__annotations__)
        defaults = {field.name: Parameter.empty if field.default is MISSING else field.default for field in own}
    else:
        defaults = {name: parameter.default for name, parameter in signature(function).parameters.items()}
    annotations = {name: _option(name, hints[name]) for name in defaults}

    def call(**given: object) -> None:
        function(kind(**given)) if record else function(**given)

    call.__name__, call.__doc__, call.__annotations__ = function.__name__, function.__doc__, annotations
    parameters = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotations[name])
        for name, default in defaults.items()
    ]
    call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return call


def _option(name: str, hint: object) -> object:
    kind, *about = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    flag = [f"--{name.replace('_', '-')}"] if kind is bool else []
    return Annotated[(kind, *(typer.Option(*flag, help=one) if isinstance(one, str) else one for one in about))]


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Quiet = Annotated[bool, "Print nothing, except errors."]


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """The options of commands that read a user's files."""

    drop: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="Leave this column out. May be repeated.")
    ] = None
    separator: Annotated[str | None, "What separates columns: ; or tab or space [detected]."] = None
    decimal: Annotated[str | None, "The decimal sign, . or , [detected]."] = None
    missing: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="A text or number that means a missing value. May be repeated."),
    ] = None
    query: Annotated[str | None, "SQL that selects the rows, if the data is a DuckDB database."] = None
    as_json: AsJson = False
    quiet: Quiet = False

    def dialect(self) -> Dialect:
        """How texts of the file are written."""
        from evcl.tables.source import Dialect

        named = {"tab": "\t", "\\t": "\t", "space": " ", "comma": ","}
        separator = None if self.separator is None else named.get(self.separator, self.separator)
        if separator is not None and (len(separator) != 1 or separator.isalnum() or separator in '."\n'):
            raise Usage(f"--separator takes one character, tab or space, not {separator!r}")
        if self.decimal not in (None, ".", ","):
            raise Usage(f"--decimal must be . or , not {self.decimal!r}")
        return Dialect(separator, self.decimal, tuple(self.missing or ()), self.query)


@dataclass(frozen=True, kw_only=True)
class ManyRuns:
    """The options of commands that make many runs: where they are made."""

    engine: Annotated[str, typer.Option("--engine", help="local (processes on this machine) or ray (a cluster).")] = (
        "local"
    )
    address: Annotated[str | None, "Address of the Ray cluster [start one here]."] = None
    workers: Annotated[int | None, "Number of parallel processes on a CPU [one per core]."] = None
    device: Device = "auto"
    precision: Precision = None
    plugin: Plugins = None

    def make_engine(self) -> tuple[experiments.MakeEngine, str, str]:
        """A factory of engines, and the device and the precision that their cells use."""
        if self.workers is not None and not 1 <= self.workers <= 4096:
            raise Usage(f"--workers must be a number from 1 to 4096, not {self.workers}")
        if self.engine not in ("local", "ray"):
            raise Usage(f"--engine must be local or ray, not {self.engine!r}")
        if self.engine == "local":
            if self.address is not None:
                raise Usage("--address needs --engine ray")
            with usage():
                device, precision = experiments.where(self.device, self.precision)
            return partial(experiments.local, device, precision, workers=self.workers), device, precision
        from evcl.experiments import ray_engine

        ray_engine.connect(self.address, self.workers)
        device = ray_engine.device_of_cluster() if self.device == "auto" else self.device
        with usage():
            device, precision = experiments.where(device, self.precision, elsewhere=True)
        return partial(ray_engine.Ray, device), device, precision


def checked_device(name: str) -> str:
    """The device with this name on this machine; raises if there is none."""
    return experiments.where(name, None)[0]


def one_thread() -> None:
    """Let torch use one thread: for small matrix products, two threads are slower than one."""
    import torch

    torch.set_num_threads(1)


class Usage(EvclError):
    """Wrong usage: exit status 2."""


@contextmanager
def usage() -> Iterator[None]:
    """Turn errors inside this block into `Usage` errors: the command is wrong, not the run."""
    try:
        yield
    except EvclError as error:
        raise Usage(str(error), setting=error.setting) from error


def settings(pairs: list[str]) -> dict[str, str]:
    values = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name or not value:
            raise Usage(f"--set takes name=value, not {pair!r}")
        if name in values:
            raise Usage(f"--set {name} is given twice")
        values[name] = value
    return values


def first_seeds(count: int) -> list[int]:
    if not 1 <= count <= experiments.MOST_SEEDS:
        raise Usage(f"--seeds must be a number from 1 to {experiments.MOST_SEEDS}, not {count}")
    return list(range(count))


def chosen_seeds(count: int | None, listed: str | None) -> list[int]:
    if listed is None:
        return first_seeds(3 if count is None else count)
    if count is not None:
        raise Usage("--seeds and --seed-list cannot be used together")
    try:
        return [int(seed) for seed in listed.split(",")]
    except ValueError:
        raise Usage(f"--seed-list takes whole numbers separated by commas, not {listed!r}") from None


HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
# The exception typer raises for wrong usage: click's class or, depending on typer's version, its own copy of it.
UsageError: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError")
Click = Any  # the types of click, of which some versions of typer have a copy of their own
GIVEN_KEY = "evcl.given"  # the key of a context's `meta` that holds the options as they were given
TYPE_WORDS = {"integer": "a whole number", "number": "a number", "float": "a number"}  # words of typer's messages
SECTIONS = {  # of evcl --help, in order: each command, and the file that it is in
    "Your own data": {
        "learn": "tables", "stream": "stream", "predict": "tables", "inspect": "models", "merge": "models",
        "export": "models",
    },
    "Benchmarks": {"demo": "run", "run": "run", "report": "run", "list": "lists", "data": "lists"},
    "Many runs": {"sweep": "sweep", "status": "sweep", "tune": "sweep", "reproduce": "sweep"},
}  # fmt: skip
HOMES = {name: home for commands in SECTIONS.values() for name, home in commands.items()}


class Once(TyperCommand):
    """A command that refuses an option that is given twice, unless it may be repeated: the last one would win."""

    def parse_args(self, ctx: Click, args: list[str]) -> list[str]:
        single = {
            name: param
            for param in self.params
            if param.param_type_name == "option" and not getattr(param, "is_flag", False)
            for name in param.opts
        }
        given: dict[str, str] = {}
        rest = iter(args)
        for arg in rest:
            if arg == "--":
                break
            name, equals, value = arg.partition("=")
            if name not in single:
                continue
            if not equals:
                value = next(rest, "")  # it may look like an option
            if name in given and not single[name].multiple:
                raise UsageError(f"{name} is given twice, but takes one value", ctx)
            given[name] = value
        ctx.meta[GIVEN_KEY] = given
        remaining: list[str] = super().parse_args(ctx, args)
        return remaining


class ClosedPipe(Exception):
    """Whoever read the output has ended, as in evcl ... | head."""


INSTEAD = {  # names that a newcomer may try
    "evaluate": "evcl predict says the accuracy if the file has labels",
    "test": "evcl predict says the accuracy if the file has labels",
    "train": "evcl learn learns a file, and evcl run a benchmark",
    "fit": "evcl learn learns a file, and evcl run a benchmark",
    "compare": "evcl run or sweep trains the methods, and evcl report compares the results of a folder",
}


class Sections(TyperGroup):
    """The group of all commands, imported when they are used. Its help lists them by what they are for."""

    def list_commands(self, ctx: Click) -> list[str]:
        return list(HOMES)

    def get_command(self, ctx: Click, name: str) -> Click:
        if name in HOMES and name not in self.commands:
            command = getattr(import_module(f"evcl.cli.{HOMES[name]}"), "list_" if name == "list" else name)
            if not isinstance(command, typer.Typer):
                alone = typer.Typer(rich_markup_mode=None, add_completion=False)
                alone.command(name, cls=Once)(as_command(command))
                command = alone
            self.commands[name] = typer.main.get_command(command)
        return self.commands.get(name)

    def resolve_command(self, ctx: Click, args: list[str]) -> Click:
        if args and args[0] in INSTEAD:
            raise UsageError(f"No such command {args[0]!r}: {INSTEAD[args[0]]}", ctx)
        if args and args[0] not in HOMES:  # the message suggests one of all
            for name in HOMES:
                self.get_command(ctx, name)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Click) -> Click:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # a closed pipe shows here at the latest, not when Python ends
        except (BrokenPipeError, SystemExit) as error:  # rich and typer would exit with status 1
            if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
                raise
            raise ClosedPipe from error
        return result

    def format_commands(self, ctx: Click, formatter: Click) -> None:
        width = max(map(len, HOMES))
        for title, names in SECTIONS.items():
            rows = [(name.ljust(width), self.get_command(ctx, name)) for name in names]
            with formatter.section(title):
                formatter.write_dl([(name, one.get_short_help_str(formatter.width)) for name, one in rows])


def wrong(error: Exception) -> str:
    """One line about wrong usage: the option, what came, and which help to read."""
    ctx, param, text = getattr(error, "ctx", None), getattr(error, "param", None), str(error).rstrip(".")
    if param is not None:
        name = param.opts[-1] if param.param_type_name == "option" else str(param.metavar or param.name).upper()
        came = (ctx.meta.get(GIVEN_KEY, {}) if ctx else {}).get(name)
        kind = next((kind for word, kind in TYPE_WORDS.items() if word in text), None)
        if type(error).__name__ == "MissingParameter":
            text = f"{name} is missing"
        elif came is not None and kind is not None:
            text = f"{name} must be {kind}, not {came!r}"
        else:
            text = f"{name}: {getattr(error, 'message', text)}"
    words: list[str] = []
    while ctx is not None:
        words, ctx = [str(ctx.info_name), *words], ctx.parent
    return f"{text} (see {' '.join(words or ['evcl'])} --help)".replace("\n", " ")
