"""For each method: its paper, what it keeps of earlier tasks, and its measured cost. Without torch, for `evcl list`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

COSTS = Path(__file__).with_name("costs.json")  # written by perf/methods.py
SHOWN = "784-256-256"  # the network whose costs `evcl list methods` shows


class Facts(NamedTuple):
    """`keeps`: the numbers stored besides the plain weights, except single numbers of a task or head; and examples."""

    year: int  # 0: no paper
    authors: str
    keeps: str


METHOD_FACTS = {
    "evcl": Facts(2024, "Batra and Clark", "3 per weight, class statistics"),
    "evcl-film": Facts(0, "this library", "3 per weight, 2 per unit and task"),
    "evcl-er": Facts(0, "this library", "3 per weight, class statistics, 200 examples in all"),
    "kfac-evcl": Facts(0, "this library", "3 per weight, 2 matrices per layer, class statistics"),
    "evcl-dgr": Facts(0, "this library", "4 per weight, a VAE"),
    "vcl": Facts(2018, "Nguyen et al.", "1 per weight"),
    "vcl-random-coreset": Facts(2018, "Nguyen et al.", "3 per weight, 200 examples per task"),
    "vcl-kcenter-coreset": Facts(2018, "Nguyen et al.", "3 per weight, 200 examples per task"),
    "gvcl": Facts(2021, "Loo et al.", "1 per weight"),
    "gvcl-film": Facts(2021, "Loo et al.", "1 per weight, 2 per unit and task"),
    "improved-vcl": Facts(2019, "Swaroop et al.", "1 per weight"),
    "td-vcl": Facts(2024, "Melo et al.", "14 per weight, 200 examples of 4 tasks"),
    "vogn": Facts(2019, "Osawa et al.", "1 per weight"),
    "ivon": Facts(2024, "Shen et al.", "1 per weight"),
    "noisy-kfac": Facts(2018, "Zhang et al.", "2 per weight, 2 matrices per layer"),
    "ekf": Facts(2018, "Ollivier", "1 per weight"),
    "ewc": Facts(2017, "Kirkpatrick et al.", "2 per weight"),
    "ewc-offline": Facts(2017, "Kirkpatrick et al.", "2 per weight and task"),
    "kfac-ewc": Facts(2018, "Ritter et al.", "2 per weight, 2 matrices per layer"),
    "si": Facts(2017, "Zenke et al.", "1 per weight"),
    "mas": Facts(2018, "Aljundi et al.", "1 per weight"),
    "imm-mean": Facts(2017, "Lee et al.", "2 per weight"),
    "imm-mode": Facts(2017, "Lee et al.", "2 per weight"),
    "xdg": Facts(2018, "Masse et al.", "2 per weight, 1 per unit and task"),
    "progressive": Facts(2016, "Rusu et al.", "a network per task, laterals between all of them"),
    "progress-compress": Facts(2018, "Schwarz et al.", "2 per weight, a second network"),
    "lwf": Facts(2016, "Li and Hoiem", "nothing"),
    "er": Facts(2019, "Chaudhry et al.", "200 examples in all"),
    "derpp": Facts(2020, "Buzzega et al.", "200 examples in all, with outputs"),
    "agem": Facts(2019, "Chaudhry et al.", "200 examples in all"),
    "fromp": Facts(2020, "Pan et al.", "1 per weight, 200 examples in all"),
    "scommer": Facts(2023, "Sarfraz et al.", "1 per weight, 200 examples in all, 1 per unit and class"),
    "dgr": Facts(2017, "Shin et al.", "a VAE"),
    "generative-classifier": Facts(2021, "van de Ven et al.", "class statistics"),
    "random-coreset": Facts(2018, "Nguyen et al.", "1 per weight, 200 examples per task"),
    "kcenter-coreset": Facts(2018, "Nguyen et al.", "1 per weight, 200 examples per task"),
    "naive": Facts(0, "-", "nothing"),
    "joint": Facts(0, "-", "all examples"),
}
AGENT_FACTS = {  # of the methods that only agents have
    "clear": Facts(2019, "Rolnick et al.", "20,000 steps in all, a value function per task"),
    "separate": Facts(0, "-", "a network per task"),
}


def measured() -> dict[str, Any]:
    """`costs`: network -> method -> `step`, in steps of naive, and `task`, in epochs of naive; `where`: the machine."""
    found: dict[str, Any] = json.loads(COSTS.read_text("utf-8"))
    return found
