"""Two more figures of a benchmark: a reliability diagram, and the score against what a method keeps in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evcl.report.figures import GREY, TEXT_WIDTH, Draw, Sheet, key, said, settled, style
from evcl.report.results import Group, Line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
FEW_NAMED = 6  # with more points, the page names only some
MIN_BIN_SHARE = 0.002  # bins with a smaller share of the predictions are left out: they say little


class Reliability(NamedTuple):
    """Of each bin of the probability of the predicted class: its share of the predictions, their mean probability,
    and the fraction of them that is right; means over the seeds, weighted by the shares.
    """

    share: Floats
    confidence: Floats
    accuracy: Floats


def reliability(line: Line) -> Reliability | None:
    """The bins of a result; None if it has none."""
    if line.result.reliability is None:
        return None
    share, confidence, accuracy = np.moveaxis(np.array(line.result.reliability, dtype=np.float64), 2, 0)
    whole = share.sum(0)
    weights = share / np.maximum(whole, 1e-12)
    kept = share.mean(0) >= MIN_BIN_SHARE
    bins = (share.mean(0), (weights * confidence).sum(0), (weights * accuracy).sum(0))
    return Reliability(*(values[kept] for values in bins))


def has_reliability(group: Group) -> bool:
    return any(line.result.reliability is not None for line in group.lines)


def size(line: Line) -> float | None:
    """What the method keeps, in MB."""
    memory = line.result.memory_bytes
    return None if not memory else memory / 1e6


def has_memory(group: Group) -> bool:
    """Whether at least two results differ in their size, so that there is something to compare."""
    sizes = {size(line) for line in group.lines} - {None}
    return not group.is_stream and len(sizes) > 1


def reliability_figure(group: Group, page: bool = False) -> Figure | None:
    """How often predictions are right, against how sure they are; None if no result has it. Points on the page are as
    large as their share of the predictions.
    """
    if not has_reliability(group):
        return None
    with style(page):
        sheet = Sheet((0.75 * TEXT_WIDTH, 3.0), page=page)
        (axes,) = sheet.panels
        axes.plot([0, 100], [0, 100], color=GREY, linewidth=0.8, linestyle=(0, (3, 2)), zorder=1)
        for line in group.lines:
            bins = reliability(line)
            if bins is not None:
                x, y, share = 100 * bins.confidence, 100 * bins.accuracy, 100 * bins.share
                texts = [
                    f"{line.label}\n{p:.1f} % sure: {right:.1f} % right\n{part:.1f} % of the predictions"
                    for p, right, part in zip(x, y, share, strict=True)
                ]
                (curve,) = axes.plot(x, y, linewidth=1.1, **{**sheet.look(line, 4), **({"marker": ""} if page else {})})
                sheet.mark(curve, line)
                if page:
                    sizes, color = (line.style.size * (4 + np.sqrt(share))) ** 2, line.style.light
                    points = axes.scatter(x, y, sizes, color, marker=line.style.marker, ec="w", lw=0.5, zorder=3)
                    sheet.mark(points, line, texts, extra=True)
        axes.set_xlabel("probability of the predicted class (%)")
        axes.set_ylabel("right predictions (%)")
        axes.set_xlim(*confidence_range(group))
        axes.set_ylim(0, 102)
        sheet.title(group)
        key(sheet, group, below=False)
        return settled(sheet.figure)


def confidence_range(group: Group) -> tuple[float, float]:
    """The probabilities that occur, in per cent: they start at one divided by the number of classes."""
    least = [one.confidence.min() for one in map(reliability, group.lines) if one is not None and len(one.confidence)]
    return max(0.0, 100 * float(min(least, default=0.0)) - 3), 102


def memory_figure(group: Group, page: bool = False) -> Figure | None:
    """The score after the last task against what the method keeps; None if there is nothing to compare. The page names
    the methods that no other beats in both.
    """
    if not has_memory(group):
        return None
    points = [
        (kept, group.score.scale * mean, group.score.scale * (score.std or 0), line)
        for line in group.lines
        if (kept := size(line)) is not None
        and (mean := (score := line.result.measure(line.result.score)).mean) is not None
    ]
    with style(page):
        sheet = Sheet((0.75 * TEXT_WIDTH, 2.8), page=page)
        (axes,) = sheet.panels
        for kept, mean, spread, line in points:
            bar = [mean - spread, mean, mean + spread]
            (drawn,) = axes.plot([kept] * 3, bar, linewidth=1.0, markevery=[1], **sheet.look(line, 5))
            text = f"{line.label}\n{said(mean, spread or None, 2)}\n{kept:.3g} MB"
            sheet.mark(drawn, line, [text])
            beaten = any(one[0] <= kept and one[1] >= mean and one[3] is not line for one in points)
            if page and (len(points) <= FEW_NAMED or not beaten):
                name = axes.annotate(line.label, (kept, mean), (7, 0), textcoords="offset points", va="center")
                sheet.mark(name, line, extra=True)
        axes.set_xscale("log")
        axes.minorticks_off()
        axes.margins(x=0.12)
        ticks = size_ticks([kept for kept, *_ in points])
        axes.set_xticks(
            ticks, [f"{tick:g}" for tick in ticks]
        )  # matplotlib's own labels need its mathtext, which is off
        axes.set_xlabel("kept after the last task (MB, logarithmic)")
        axes.set_ylabel(group.score.title)
        sheet.title(group)
        key(sheet, group, below=False)
        return settled(sheet.figure)


def size_ticks(sizes: Sequence[float]) -> list[float]:
    """Where a logarithmic axis has ticks: at 1, 2, 5, 10, ... within the sizes or, without two of these, at the
    smallest and the largest size.
    """
    low, high = min(sizes), max(sizes)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [first * 10.0**power for power in powers for first in (1, 2, 5) if low <= first * 10.0**power <= high]
    return ticks if len(ticks) > 1 else sorted({float(f"{one:.2g}") for one in (low, high)})


DIAGNOSTICS: dict[str, Draw] = {"-reliability": reliability_figure, "-memory": memory_figure}
