"""The methods that are made of several parts: a plain method, and what is added to it.

    with_measures       the setting `importance`: other measures than the Fisher, among them Kronecker factors
    with_film           scales and shifts for each task by default; its name ends with film

and, as parts (parts.py), each with its equation and its rules in a file of its own:

    tempering           beta below 1, chosen from the labels' noise (label_noise.py)
    distillation        the setting `distill`: a distillation loss on the outputs, beside penalties on the weights
    forgetting          the setting `forget`: new rows that are about what old ones were take over from these
    task inference      a softmax for each group of classes and each domain; `one_softmax` is without it

`memory` and `coreset` are settings of any method that can have them: see registry.py.

`kfac-evcl`, whose default strength is Laplace's, 1: the default of EVCL makes up for what a diagonal misses. EVCL's
`fisher_spread` is, to first order, a damping of the factors. `kfac-ewc` is Laplace's approximation, task after task
(Ritter, Botev and Barber, 2018).

`evcl-paper` is EVCL as in the paper, without any part: by default, it has the settings of the preset `paper`.

`evcl-film`: each distilled head needs a pass through the trunk with the scales and shifts of its own task, and on
validation data of the digits the results are no worse without (5 permuted tasks, 4 seeds: 96.8 ± 1.1, with `distill`
0.15 96.5 ± 0.4; split, 6 seeds: 99.9 ± 0.3 and 99.3 ± 0.0; both at the same learning rate of the scales and shifts).
"""

from __future__ import annotations

from dataclasses import replace

from evcl._core.settings import Value
from evcl.methods import evcl, ewc, vcl
from evcl.methods.distillation import EVCL_DISTILL, distillation
from evcl.methods.forgetting import FORGETTING
from evcl.methods.kronecker import with_measures
from evcl.methods.kronecker_posterior import diagonal_only
from evcl.methods.label_noise import Tempering
from evcl.methods.method import Method
from evcl.methods.parts import Part, compose
from evcl.methods.task_inference import task_inference, trusted


def with_defaults(method: Method, name: str, **defaults: Value) -> Method:
    """The method with another name, and with other defaults of its settings."""
    own = {key: replace(method.known_settings[key], default=value) for key, value in defaults.items()}
    return replace(method, name=name, summary="", settings={**method.settings, **own})


def with_film(method: Method, **defaults: float) -> Method:
    """The method NAME with FiLM and these other defaults, as `NAME-film`."""
    return with_defaults(method, f"{method.name}-film", **defaults, film=True)


TEMPERING = Part(
    "tempering",
    "beta / N_t KL(q_t || q_{t-1}) with beta below 1: the labels count 1 / beta times",
    {"tempering": 1.0},
    rules=Tempering(),
)
DISTILLATION = distillation()
EWC = compose(with_measures(ewc.EWC), DISTILLATION, FORGETTING)
VCL = compose(vcl.VCL, TEMPERING, DISTILLATION, FORGETTING)
DISTILLED = compose(
    with_measures(evcl.EVCL),
    TEMPERING,
    distillation(EVCL_DISTILL, trusted),
    FORGETTING,
)
EVCL = compose(DISTILLED, task_inference(), kept_as="evidence")
EVCL_FILM = with_film(EVCL, distill=0.0)
PAPER: dict[str, Value] = {
    "lr": 1e-3, "lr_schedule": "constant", "batch_size": 256, "epochs": 100, "tempering": 1.0, "init_std": 1e-4,
    "prior_std": 1.0, "std_lr_scale": 1.0, "std_update": "adam", "std_rate": 0.01, "predict_samples": 8,
    "strength": 100.0, "fisher_decay": 0.0, "fisher_scale": "none", "fisher_temperature": 1.0, "fisher_spread": 0.0,
}  # fmt: skip
EVCL_PAPER = with_defaults(diagonal_only(evcl.EVCL), "evcl-paper", **PAPER)
KFAC_EVCL = with_defaults(EVCL, "kfac-evcl", posterior="kronecker")
KFAC_EWC = with_defaults(EWC, "kfac-ewc", importance="kfac", strength=1.0)
