"""How commands are parsed and listed: sections of evcl --help, options that count once, messages of wrong usage."""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
# The exception typer raises for wrong usage: click's class or, depending on typer's version, its own copy of it.
UsageError: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError")
GIVEN = "evcl.given"  # the key of a context's `meta` that holds the options as they were given
KINDS = {"integer": "a whole number", "number": "a number", "float": "a number"}  # words of typer's messages
SECTIONS = {  # of evcl --help, in order
    "Your own data": ("learn", "stream", "predict", "inspect", "merge", "export"),
    "Benchmarks": ("demo", "run", "report", "list", "data"),
    "Many runs": ("sweep", "status", "tune", "reproduce"),
}


class Once(TyperCommand):
    """A command that refuses an option that is given twice, unless it may be repeated: the last one would win."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
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
        ctx.meta[GIVEN] = given
        found: list[str] = super().parse_args(ctx, args)
        return found


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
    """The group of all commands. Its help lists them by what they are for."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in INSTEAD and args[0] not in self.commands:
            raise UsageError(f"No such command {args[0]!r}: {INSTEAD[args[0]]}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            found = super().invoke(ctx)
            sys.stdout.flush()  # a closed pipe shows here at the latest, not when Python ends
        except (BrokenPipeError, SystemExit) as error:  # rich and typer would exit with status 1
            if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
                raise
            raise ClosedPipe from error
        return found

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, self.commands))
        for title, names in SECTIONS.items():
            rows = [(name.ljust(width), self.commands[name]) for name in names if name in self.commands]
            with formatter.section(title):
                formatter.write_dl([(name, one.get_short_help_str(formatter.width)) for name, one in rows])


def wrong(error: Exception) -> str:
    """One line about wrong usage: the option, what came, and which help to read."""
    ctx, param, text = getattr(error, "ctx", None), getattr(error, "param", None), str(error).rstrip(".")
    if param is not None:
        name = param.opts[-1] if param.param_type_name == "option" else str(param.metavar or param.name).upper()
        came = (ctx.meta.get(GIVEN, {}) if ctx else {}).get(name)
        kind = next((kind for word, kind in KINDS.items() if word in text), None)
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
