"""What each method does, and what a method of your own is made of.

In: what a method kept of earlier tasks, and the rows of a round. Out: `Fit`s, which the engine runs, then `Learned`:
the posterior and the memory. `method.py` is the contract, `memory.py` the kinds of memory.
To change: a method can be added in one file. Every [R, P] tensor covers all weights, and `learn` is a function of
(seed, purpose, round) between two yields, so that it can be stopped and resumed. Fixed: golden numbers.
"""

from typing import TYPE_CHECKING

from evcl._core.catalogue import METHOD_SUMMARIES
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
    from evcl.methods.distillation import Distillation, teach
    from evcl.methods.elastic_memory import Elastic, elastic
    from evcl.methods.importance import fisher
    from evcl.methods.kl import KL
    from evcl.methods.label_noise import tempering
    from evcl.methods.parts import Part, Rules, compose, rule
    from evcl.methods.rehearsal import with_memory
    from evcl.methods.samplers import Interleaved, Mixed
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "evcl.methods.coreset": "with_coreset",
            "evcl.methods.elastic_memory": "Elastic elastic",
            "evcl.methods.composed": "with_film",
            "evcl.methods.importance": "fisher",
            "evcl.methods.label_noise": "tempering",
            "evcl.methods.parts": "Part Rules compose rule",
            "evcl.methods.rehearsal": "with_memory",
            "evcl.methods.samplers": "Interleaved Mixed",
            "evcl.methods.distillation": "Distillation teach",
            "evcl.methods.kl": "KL",
        },
    )

# A method is in the file of its name, or else in the file where it is composed or where a relative of it is
_HOMES = {
    "composed": "evcl evcl-film evcl-paper kfac-evcl vcl ewc kfac-ewc",
    "coreset": "vcl-random-coreset vcl-kcenter-coreset random-coreset kcenter-coreset",
    "generative": "generative-classifier",
    "gvcl": "gvcl-film",
    "imm": "imm-mean imm-mode",
    "rehearsal": "er",
}
_home = {name: file for file, names in _HOMES.items() for name in names.split()}
for _name in METHOD_SUMMARIES:  # imported when it is first used
    _constant = _name.upper().replace("-", "_")
    METHODS.add_later(_name, f"evcl.methods.{_home.get(_name, _constant.lower())}:{_constant}")

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
    "Part",
    "Quadratic",
    "Reread",
    "Round",
    "Rules",
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
    "compose",
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
    "rule",
    "shuffled",
    "teach",
    "tempering",
    "with_coreset",
    "with_film",
    "with_memory",
]
