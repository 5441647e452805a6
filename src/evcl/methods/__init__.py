"""What each method does, and what a method of your own is made of.

In: what a method kept of earlier tasks, and the rows of a round. Out: `Fit`s, which the engine runs, then `Learned`:
the posterior and the memory. `method.py` is the contract, `memory.py` the kinds of memory.
To change: a method can be added in one file. Every [R, P] tensor covers all weights, and `learn` is a function of
(seed, purpose, round) between two yields, so that it can be stopped and resumed. Fixed: golden numbers.
"""

from typing import TYPE_CHECKING

from evcl._core.lazy import lazily
from evcl._core.settings import ELASTIC, Setting
from evcl.methods.applied import LogitLoss, autograd_gradients, collapse
from evcl.methods.data import NO_HEAD, Minibatch, Reread, Sampler, TaskData, shuffled
from evcl.methods.memory import Model, examples, model, per_head, per_layer, per_task, per_weight
from evcl.methods.method import Fit, Fitted, Learned, Learning, Loss, Method, Round, Taught, Tracker
from evcl.methods.registry import METHODS, check_targets, for_settings, get, known_settings, register
from evcl.methods.terms import Gradients, Quadratic, Spring, Springs, Term

if TYPE_CHECKING:
    from evcl.methods.composed import with_film
    from evcl.methods.coreset import with_coreset
    from evcl.methods.elastic_memory import Elastic, elastic
    from evcl.methods.importance import fisher
    from evcl.methods.label_noise import tempering
    from evcl.methods.rehearsal import with_memory
    from evcl.methods.samplers import Interleaved, Mixed
    from evcl.methods.teacher import Distillation, teach
    from evcl.methods.vcl import KL
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "evcl.methods.coreset": "with_coreset",
            "evcl.methods.elastic_memory": "Elastic elastic",
            "evcl.methods.composed": "with_film",
            "evcl.methods.importance": "fisher",
            "evcl.methods.label_noise": "tempering",
            "evcl.methods.rehearsal": "with_memory",
            "evcl.methods.samplers": "Interleaved Mixed",
            "evcl.methods.teacher": "Distillation teach",
            "evcl.methods.vcl": "KL",
        },
    )

# Where each method is, imported when it is first used; in the order in which `evcl list` shows them.
for _name, _home in {
    "evcl": "evcl.methods.composed:EVCL",
    "evcl-film": "evcl.methods.composed:EVCL_FILM",
    "evcl-er": "evcl.methods.evcl_er:EVCL_ER",
    "kfac-evcl": "evcl.methods.composed:KFAC_EVCL",
    "evcl-dgr": "evcl.methods.evcl_dgr:EVCL_DGR",
    "vcl": "evcl.methods.composed:VCL",
    "vcl-random-coreset": "evcl.methods.coreset:VCL_RANDOM",
    "vcl-kcenter-coreset": "evcl.methods.coreset:VCL_KCENTER",
    "gvcl": "evcl.methods.gvcl:GVCL",
    "gvcl-film": "evcl.methods.gvcl:GVCL_FILM",
    "improved-vcl": "evcl.methods.improved_vcl:IMPROVED_VCL",
    "td-vcl": "evcl.methods.td_vcl:TD_VCL",
    "vogn": "evcl.methods.vogn:VOGN",
    "ivon": "evcl.methods.ivon:IVON",
    "noisy-kfac": "evcl.methods.noisy_kfac:NOISY_KFAC",
    "ekf": "evcl.methods.ekf:EKF",
    "ewc": "evcl.methods.composed:EWC",
    "ewc-offline": "evcl.methods.ewc_offline:EWC_OFFLINE",
    "kfac-ewc": "evcl.methods.composed:KFAC_EWC",
    "si": "evcl.methods.si:SI",
    "mas": "evcl.methods.mas:MAS",
    "imm-mean": "evcl.methods.imm:IMM_MEAN",
    "imm-mode": "evcl.methods.imm:IMM_MODE",
    "xdg": "evcl.methods.xdg:XDG",
    "progressive": "evcl.methods.progressive:PROGRESSIVE",
    "progress-compress": "evcl.methods.progress_compress:PROGRESS_COMPRESS",
    "lwf": "evcl.methods.lwf:LWF",
    "er": "evcl.methods.rehearsal:ER",
    "derpp": "evcl.methods.derpp:DERPP",
    "agem": "evcl.methods.agem:AGEM",
    "fromp": "evcl.methods.fromp:FROMP",
    "scommer": "evcl.methods.scommer:SCOMMER",
    "dgr": "evcl.methods.dgr:DGR",
    "generative-classifier": "evcl.methods.generative:GENERATIVE",
    "random-coreset": "evcl.methods.coreset:RANDOM",
    "kcenter-coreset": "evcl.methods.coreset:KCENTER",
    "naive": "evcl.methods.naive:NAIVE",
    "joint": "evcl.methods.joint:JOINT",
}.items():
    METHODS.add_later(_name, _home)

__all__ = [
    "ELASTIC",
    "KL",
    "METHODS",
    "NO_HEAD",
    "Distillation",
    "Elastic",
    "Fit",
    "Fitted",
    "Gradients",
    "Interleaved",
    "Learned",
    "Learning",
    "LogitLoss",
    "Loss",
    "Method",
    "Minibatch",
    "Mixed",
    "Model",
    "Quadratic",
    "Reread",
    "Round",
    "Sampler",
    "Setting",
    "Spring",
    "Springs",
    "TaskData",
    "Taught",
    "Term",
    "Tracker",
    "autograd_gradients",
    "check_targets",
    "collapse",
    "elastic",
    "examples",
    "fisher",
    "for_settings",
    "get",
    "known_settings",
    "model",
    "per_head",
    "per_layer",
    "per_task",
    "per_weight",
    "register",
    "shuffled",
    "teach",
    "tempering",
    "with_coreset",
    "with_film",
    "with_memory",
]
