"""What the programs of the laws share that compare methods: their options, each method's settings, and the output."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evcl.methods import METHODS

METHODS_COMPARED = ("vcl", "evcl")


def parser(about: str | None, seeds: int = 20) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--methods", nargs="+", default=METHODS_COMPARED, choices=METHODS, metavar="METHOD")
    made.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings, of the methods that have them"
    )
    made.add_argument("--seeds", type=int, default=seeds, help="how many, from 0")
    made.add_argument("--out", type=Path, help="JSON file to save every figure in")
    return made


def settings_of(method: str, words: Iterable[str], **defaults: Any) -> dict[str, Any]:
    """The settings NAME=VALUE that this method has, after `defaults`, of which the same holds."""
    given = {**defaults, **dict(word.split("=", 1) for word in words)}
    return {name: value for name, value in given.items() if name in METHODS[method].known_settings}


def parsed(made: argparse.ArgumentParser) -> argparse.Namespace:
    """The options, if each setting is one that some of the methods have. From here on there is one thread."""
    options = made.parse_args()
    known = {name for method in options.methods for name in METHODS[method].known_settings}
    for word in options.set:
        name, equals, _ = word.partition("=")
        if not equals or name not in known:
            made.error(f"{word!r} is not NAME=VALUE for a setting of {', '.join(options.methods)}")
    torch.set_num_threads(1)
    return options


def spread(values: Iterable[float], digits: int = 3) -> str:
    """Mean ± standard deviation over the seeds; NaN is left out, and nothing is a dash."""
    each = np.array(list(values))
    each = each[~np.isnan(each)]
    if not len(each):
        return "-"
    error = f" ± {each.std(ddof=1):.{digits}f}" if len(each) > 1 else ""
    return f"{each.mean():.{digits}f}{error}"


def paired(ours: Iterable[float], theirs: Iterable[float], digits: int = 4) -> str:
    """Mean difference ± its standard error over the pairs; a star if the mean is more than one standard error."""
    gap = np.array(list(ours)) - np.array(list(theirs))
    if len(gap) < 2:
        return f"{gap.mean():+.{digits}f}"
    error = gap.std(ddof=1) / np.sqrt(len(gap))
    return f"{gap.mean():+.{digits}f} ± {error:.{digits}f}{' *' if gap.mean() > error else ''}"


def header(*columns: str) -> None:
    print("| " + " | ".join(columns) + " |")
    print("| --- |" + " ---: |" * (len(columns) - 1))


def row(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


def save(options: argparse.Namespace, figures: Mapping[str, Any]) -> None:
    """Write every figure, and what was asked for, to --out."""
    if options.out:
        asked = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"options": asked, "figures": figures}, indent=1) + "\n", "utf-8")
