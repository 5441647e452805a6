"""One colour and one marker per method, the same in every figure, in print and on the page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

INK = {"light": "#1b1f24", "dark": "#e6edf3"}
BACK = {"light": "#ffffff", "dark": "#0f1318"}


@dataclass(frozen=True)
class Style:
    """How a method is drawn: its colour on a light and a dark background; its marker in figures and in text."""

    light: str
    dark: str
    marker: str
    sign: str

    @property
    def size(self) -> float:
        """The relative size of the marker: thin or pointed markers must be larger to look the same size."""
        return {"*": 1.9, "P": 1.5, "X": 1.5, "p": 1.25, "^": 1.2, "v": 1.2, "<": 1.2, ">": 1.2, "d": 1.3}.get(
            self.marker, 1.0
        )


# No two colours are close for readers with normal, protan, deutan or tritan vision (a distance of at least 8 in
# 100 x OKLab under Machado's simulation), and each stands out from its background (a contrast of 3:1). Markers repeat
# the distinction. Related methods have related colours: VCL and its coresets are orange to red. The order is that of
# the tables.
STYLES = {
    "evcl": Style("#0068B8", "#4B9EFC", "o", "●"),
    "vcl": Style("#CF811A", "#EBA346", "s", "■"),
    "vcl-random-coreset": Style("#C5430A", "#C7825A", "^", "▲"),
    "vcl-kcenter-coreset": Style("#8A1420", "#DC3700", "v", "▼"),
    "ewc": Style("#3DA37F", "#9BD3A4", "D", "◆"),
    "random-coreset": Style("#004C66", "#407B74", "P", "✚"),
    "kcenter-coreset": Style("#8C84E6", "#8857CC", "X", "✖"),
    "naive": Style("#8A6277", "#B794A5", "p", "⬟"),
    "joint": Style(INK["light"], INK["dark"], "*", "★"),
}
# The methods' names as in the paper.
NAMES = {
    "evcl": "EVCL",
    "vcl": "VCL",
    "vcl-random-coreset": "VCL + random coreset",
    "vcl-kcenter-coreset": "VCL + k-center coreset",
    "ewc": "EWC",
    "random-coreset": "random coreset only",
    "kcenter-coreset": "k-center coreset only",
    "ewc-offline": "offline EWC",
    "si": "SI",
    "mas": "MAS",
    "lwf": "LwF",
    "fromp": "FROMP",
    "scommer": "SCoMMER",
    "imm-mean": "mean-IMM",
    "imm-mode": "mode-IMM",
    "xdg": "XdG",
    "progressive": "progressive networks",
    "progress-compress": "Progress & Compress",
    "gvcl": "GVCL",
    "improved-vcl": "improved VCL",
    "td-vcl": "TD-VCL",
    "gvcl-film": "GVCL-F",
    "evcl-film": "EVCL + FiLM",
    "evcl-er": "EVCL + replay",
    "er": "ER",
    "derpp": "DER++",
    "agem": "A-GEM",
    "kfac-evcl": "K-FAC EVCL",
    "kfac-ewc": "K-FAC EWC",
    "vogn": "VOGN",
    "ivon": "IVON",
    "noisy-kfac": "noisy K-FAC",
    "ekf": "EKF",
    "mesu": "MESU",
    "dgr": "DGR",
    "evcl-dgr": "EVCL + DGR",
}
# For a user's own methods, and for a second result of a method above: they differ in marker if not in colour.
SPARE = (
    Style("#6B7F00", "#B5C545", "h", "⬢"),
    Style("#D0349B", "#FF7AC8", "<", "◀"),
    Style("#7A5230", "#C49A6C", ">", "▶"),
    Style("#5E6B7E", "#93A4BC", "d", "♦"),
    Style("#0A7F8C", "#4FC3D0", "H", "⬣"),
    Style("#8E44C4", "#C48CF0", "8", "◉"),
)


def assign(names: Iterable[tuple[str, str]]) -> dict[str, Style]:
    """A style for each label in (label, method): a method's first label gets its own style, the others a spare one."""
    found: dict[str, Style] = {}
    owners: set[str] = set()
    spared = 0
    for label, method in names:
        if label in found:
            continue
        if method in STYLES and method not in owners:
            owners.add(method)
            found[label] = STYLES[method]
        else:
            turns, place = divmod(spared, len(SPARE))
            mark = SPARE[(place + turns) % len(SPARE)]  # once all colours are used, repeat them with other markers
            found[label] = replace(SPARE[place], marker=mark.marker, sign=mark.sign)
            spared += 1
    return found
