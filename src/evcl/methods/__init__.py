"""What each method does, and what a method of your own is made of."""

from evcl._core.settings import ELASTIC, Setting
from evcl.methods.agem import AGEM
from evcl.methods.coreset import KCENTER, RANDOM, VCL_KCENTER, VCL_RANDOM, with_coreset
from evcl.methods.data import NO_HEAD, Interleaved, Minibatch, Mixed, Reread, Sampler, TaskData, shuffled
from evcl.methods.derpp import DERPP
from evcl.methods.dgr import DGR
from evcl.methods.ekf import EKF
from evcl.methods.elastic_memory import elastic
from evcl.methods.evcl import EVCL
from evcl.methods.evcl_dgr import EVCL_DGR
from evcl.methods.evcl_er import EVCL_ER
from evcl.methods.ewc import EWC
from evcl.methods.ewc_offline import EWC_OFFLINE
from evcl.methods.film import EVCL_FILM, GVCL_FILM, with_film
from evcl.methods.fromp import FROMP
from evcl.methods.generative import GENERATIVE
from evcl.methods.gvcl import GVCL
from evcl.methods.imm import IMM_MEAN, IMM_MODE
from evcl.methods.importance import fisher
from evcl.methods.improved_vcl import IMPROVED_VCL
from evcl.methods.ivon import IVON
from evcl.methods.joint import JOINT
from evcl.methods.kfac_evcl import KFAC_EVCL
from evcl.methods.kfac_ewc import KFAC_EWC
from evcl.methods.label_noise import tempering
from evcl.methods.lwf import LWF
from evcl.methods.mas import MAS
from evcl.methods.memory import Model, examples, model, per_layer, per_task, per_weight
from evcl.methods.method import (
    METHODS,
    Fit,
    Fitted,
    Learned,
    Learning,
    LogitLoss,
    Loss,
    Method,
    Round,
    Taught,
    Tracker,
    check_targets,
    get,
    register,
)
from evcl.methods.naive import NAIVE
from evcl.methods.noisy_kfac import NOISY_KFAC
from evcl.methods.progress_compress import PROGRESS_COMPRESS
from evcl.methods.progressive import PROGRESSIVE
from evcl.methods.rehearsal import ER, with_memory
from evcl.methods.scommer import SCOMMER
from evcl.methods.si import SI
from evcl.methods.td_vcl import TD_VCL
from evcl.methods.teacher import Distillation, teach
from evcl.methods.terms import (
    KL,
    Elastic,
    Gradients,
    Quadratic,
    Spring,
    Springs,
    Term,
    autograd_gradients,
    collapse,
)
from evcl.methods.variants import for_settings, known_settings
from evcl.methods.vcl import VCL
from evcl.methods.vogn import VOGN
from evcl.methods.xdg import XDG

# in the order in which `evcl list` shows them
for _method in (
    EVCL,
    EVCL_FILM,
    EVCL_ER,
    KFAC_EVCL,
    EVCL_DGR,
    VCL,
    VCL_RANDOM,
    VCL_KCENTER,
    GVCL,
    GVCL_FILM,
    IMPROVED_VCL,
    TD_VCL,
    VOGN,
    IVON,
    NOISY_KFAC,
    EKF,
    EWC,
    EWC_OFFLINE,
    KFAC_EWC,
    SI,
    MAS,
    IMM_MEAN,
    IMM_MODE,
    XDG,
    PROGRESSIVE,
    PROGRESS_COMPRESS,
    LWF,
    ER,
    DERPP,
    AGEM,
    FROMP,
    SCOMMER,
    DGR,
    GENERATIVE,
    RANDOM,
    KCENTER,
    NAIVE,
    JOINT,
):
    register(_method)

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
