"""Parts in the open: composed, switched, set, and named in results, cards and tables."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import evcl
from evcl.experiments import configure, execute, read_result, write_result
from evcl.learner.persist import read_card
from evcl.methods import METHODS, Method
from evcl.methods.parts import Part, Rules, compose, constants, rule
from evcl.report.results import by_benchmark

SOURCE = Path(evcl.__file__).parent
REASONS = ("derived", "ablated", "published", "fixed", "bound")
# Files in which every number at the top bounds time or memory, or is a limit on what a file may hold
BOUNDS = ("_core/bounds.py", "_core/files.py", "_core/inputs.py", "_core/ranks.py", "nn/sizes.py", "nn/network.py")
BOUNDS += ("benchmarks/", "data/", "learner/packing.py", "learner/persist.py", "learner/rereading.py", "nn/passes.py")
BOUNDS += ("training/checkpoint.py", "training/checkpointer.py", "training/graphed.py", "training/predict.py")
# Other numbers at the top of a module, and why they are not in the list of constants
ALLOWED = {
    "no weight and no prediction depends on it": {
        *("MAX_DIRECTIONS", "MIN_DIRECTION_NUMBERS", "SKETCH_ROWS", "PSEUDO_ROWS", "LEAST_SHRINK", "LEAST_DOUBT"),
        *("FULLY_DOUBTED", "CONSTANT_COLUMN_STD", "MOST_COLUMNS", "NAMED", "ROWS_PER_CLASS", "MAX_MEAN_DEVIATIONS"),
        *("SKETCH", "MAX_TASKS", "MEASURED_OUTPUTS", "MIN_ROWS", "APART", "ELBO_DRAWS"),  # of the account
        *("MIN_INPUT_SIZE", "SCALE_ROWS", "ENTROPY_ROWS", "FAR_RANGES", "MIN_RANGE_ROWS", "KEPT_SAMPLES"),
    },
    "a sample of rows, heads, classes, domains or draws bounds time": {
        *("AGREEMENT_ROWS", "TEACHER_DRAWS", "MAX_DISTILLED_HEADS", "COMPARED_ROWS", "FOLDS", "MAX_HELD"),
        *("MAX_RIVALS", "MIN_TRIAL_ROWS", "MAX_ROWS_TESTED", "MOST_DOMAINS", "CHUNK_NUMBERS", "CHUNK_ROWS"),
        *("NOISE_ROWS", "SETTLING_EXAMPLES", "MAX_ITERATIONS", "MAX_ROWS_ALL_TRIED", "MAX_TRIAL_ROWS"),
    },
    "memory": {
        *(
            "MIN_FEATURES",
            "MAX_FEATURES",
            "PER_WEIGHT",
            "ROWS_AT_ONCE",
            "OUTPUTS_AT_ONCE",
            "COLUMNS_AT_ONCE",
            "VALUES_AT_ONCE",
        ),
        *("EXAMPLE_GRADIENT_NUMBERS", "MORE_ON_GPU", "MOST_NUMBERS"),
    },
    "the default or the bounds of a setting, or whether it is on": {
        *(
            "TEMPERING",
            "FORGETTING",
            "EVCL_DISTILL",
            "DISTILL",
            "EWC",
            "EVCL_FILM",
            "PAPER",
            "KFAC_EVCL",
            "KFAC_EWC",
            "ADDED_INPUTS",
            "ACCUMULATE",
        ),
        *("WINDOW", "PATIENCE_SETTING", "COUNT", "DRAWS"),
    },
    "a guard against overflow, division by 0 or an infinite density": {
        *("TINY", "EPSILON", "FLOAT32_ERROR", "MAX_TARGET", "MAX_LOG_RATE", "LEAST_LOG_VARIANCE"),
        *("MIN_NOISE_VARIANCE", "MIN_EXCESS", "NORMAL_FROM", "MAX_SUMMED_COUNT", "VAGUE_RATIO"),
    },
    "a key, an index, a seed or a version": {
        *(
            "HEAD",
            "NO_HEAD",
            "JUDGED_HEAD",
            "TRUNK_KEY",
            "ALL_LAYERS",
            "QUERY",
            "KEY",
            "VALUE",
            "FIT_SEED_STRIDE",
            "ALIGNED",
            "_log_factorial",
        ),
    },
    "not used by default: importance, optimizer, augment, film, a network that grows": {
        *("XI", "SGD_STEP", "PAD", "FILM_RATE_FACTOR", "MAX_FIRST_ALPHA"),
    },
    "a quantile": {"NORMAL_975"},
    "derived from another constant": {"MIN_IMAGE_SIDE", "NEWEST"},
}
FORGET, NOISE = {"forget.significance": 2.0, "forget.ridge": 0.1}, {"tempering.noise": 0.1}


def default_evcl():
    """The modules that learning and predicting two tasks of digits by the defaults needs."""
    code = """if True:
        import sys, evcl
        learner = evcl.EVCL(evcl.nn.mlp(64, [8]), epochs=1)
        for task in evcl.benchmarks.get("split-digits", seed=0, tasks=2):
            learner.learn(task)
        learner.evaluate(evcl.benchmarks.get("split-digits", seed=0, tasks=2))
        files = [getattr(one, "__file__", None) or "" for name, one in sys.modules.items() if name.startswith("evcl.")]
        print("\\n".join(files))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [Path(line) for line in done.stdout.split() if line]


def numbers(path):
    """The names at the top of a module whose values have a number in them."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            inside = [one.value for one in ast.walk(node.value) if isinstance(one, ast.Constant)]
            if any(isinstance(one, int | float) and not isinstance(one, bool) for one in inside):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                yield from (one.id for one in ast.walk(target) if isinstance(one, ast.Name))


def test_every_number_that_changes_a_result_is_listed():
    listed = {one.name for one in constants(METHODS["evcl"])}
    allowed = {name for names in ALLOWED.values() for name in names}
    missing, files = [], {path.relative_to(SOURCE).as_posix(): path for path in default_evcl()}
    for name, path in files.items():
        if not name.startswith(BOUNDS):
            first = {}
            for one in numbers(path):
                first.setdefault(one, name)
            missing += [f"{name}: {one}" for one in first if one not in listed | allowed]
    assert not missing


def test_a_constant_has_a_reason_and_a_value_that_is_the_codes():
    found = {one.name: one for one in constants(METHODS["evcl"])}
    assert all(one.why.startswith(REASONS) and one.meaning for one in found.values())
    assert found["distill.temperature"].value == METHODS["evcl"].known_settings["distill.temperature"].default
    assert {one.name for one in constants(METHODS["naive"])} < found.keys()


# --- settings ---------------------------------------------------------------------------------------------------------


def test_a_rule_is_checked_as_settings_are():
    with pytest.raises(evcl.EvclError, match=r"did you mean 'distill\.temperature'"):
        evcl.EVCL(evcl.nn.mlp(4, [5]), **{"distill.temprature": 3})
    with pytest.raises(evcl.EvclError, match=r"infer\.known must be"):
        evcl.EVCL(evcl.nn.mlp(4, [5]), **{"infer.known": -1})
    learner = evcl.EVCL(evcl.nn.mlp(4, [5]), **{"distill.temperature": 3})
    assert learner.settings["distill.temperature"] == 3


def test_an_old_name_still_works_and_says_what_to_use():
    with pytest.warns(DeprecationWarning, match="distill.temperature"):
        learner = evcl.EVCL(evcl.nn.mlp(4, [5]), distill_temperature=3)
    assert learner.settings["distill.temperature"] == learner.settings["distill_temperature"] == 3


def learned(second=0.0, **settings):
    """The means after rows were learned, and again with labels that depend on the second input too."""
    learner = evcl.EVCL(evcl.nn.mlp(4, [8]), epochs=20, **settings)
    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    for name, w in (("one", 0.0), ("two", second)):
        learner.learn((x, (x[:, 0] + w * x[:, 1] > 0).long()), name, "new" if name == "one" else "one")
    return learner.state.run.network.posterior.mean


def test_a_rule_changes_what_is_learned():
    usual = learned()
    assert not torch.equal(usual, learned(**{"distill.temperature": 8.0}))
    assert not torch.equal(learned(0.3), learned(0.3, forget=False))


# --- what is said of parts --------------------------------------------------------------------------------------------


def named(method="evcl", **settings):
    config = configure("split-digits", method, "default", [0], tasks=2, given={"epochs": 1, **settings})
    return execute(config)


def test_a_result_names_the_parts_and_rules_in_force(tmp_path):
    found = read_result(write_result(tmp_path, named(**{"distill.temperature": 3.0})))
    assert found.parts == ["tempering", "distillation", "forgetting", "task inference"]
    assert found.rules == {"distill.temperature": 3.0, **FORGET, "infer.varied": 0.1, "infer.known": 0.5, **NOISE}
    alone = json.loads(write_result(tmp_path / "alone", named(distill=0, one_softmax=True, tempering=1)).read_text())
    assert not alone.keys() & {"parts", "rules"}


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"memory": 20}, ["tempering", "task inference", "rehearsal"]),
        ({"coreset": "random"}, ["tempering", "distillation", "forgetting", "coreset"]),
        ({"forget": False}, ["tempering", "distillation", "task inference"]),
        ({"film": True}, ["tempering", "distillation", "forgetting"]),
    ],
)
def test_parts_follow_from_the_settings(settings, parts):
    learner = evcl.EVCL(evcl.nn.mlp(64, [8]), epochs=1, **settings)
    assert learner.card()["parts"] == parts


def test_a_label_says_what_is_beside_the_posterior():
    usual, alone = named(), named(distill=0, one_softmax=True)
    (group,) = by_benchmark([usual, alone]).values()
    labels = [line.label for line in group.lines]
    assert any(label.startswith("EVCL + distillation + task inference") for label in labels)
    assert any(label.startswith("EVCL (") for label in labels)


def test_the_card_of_a_model_file_has_them(tmp_path):
    learner = evcl.EVCL(evcl.nn.mlp(4, [5]), epochs=1, one_softmax=True)
    learner.learn((torch.eye(4).repeat(5, 1), torch.arange(20) % 2))
    learner.save(tmp_path / "m")
    card = read_card(tmp_path / "m")
    assert card["parts"] == ["tempering", "distillation", "forgetting"]
    assert card["rules"] == {"distill.temperature": 2.0, **FORGET, **NOISE}


# --- a part of one's own ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shrink(Rules):
    prefix: ClassVar[str] = "shrink"
    factor: float = rule(0.5, "what the means are multiplied by", "derived: half", low=0.0, high=1.0)


def shrinking(rules):
    def wrap(method):
        def learn(memory, round_, s):
            learned = yield from method.learn(memory, round_, s)
            q = learned.posterior
            return replace(learned, posterior=replace(q, mean=q.mean * Shrink.of(s).factor))

        return replace(method, learn=learn)

    return Part("shrinking", "mu <- factor mu", {"shrink.factor": 1.0}, wrap, rules)


def test_a_part_of_ones_own_wraps_a_method_and_is_set_by_its_name():
    method = compose(Method("shrunk", "a test"), shrinking(Shrink(0.25)))
    assert method.known_settings["shrink.factor"].default == 0.25
    x, y = torch.eye(4).repeat(5, 1), torch.arange(20) % 2
    norms = {}
    for factor in (1.0, 0.5):
        learner = evcl.Learner(evcl.nn.mlp(4, [5]), method, epochs=2, **{"shrink.factor": factor})
        learner.learn((x, y))
        norms[factor] = float(learner.state.run.network.posterior.mean.norm())
        assert (learner.card()["parts"] == ["shrinking"]) == (factor < 1)
    assert norms[0.5] == pytest.approx(norms[1.0] / 2)
