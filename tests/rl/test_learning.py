"""Agents learn a stream: what a method adds changes the outcome, seeds do not touch each other, runs resume."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from evcl import EvclError, rl
from evcl._core.catalogue import METHOD_SUMMARIES
from evcl.curvature import Sample, fisher
from evcl.methods import METHODS
from evcl.rl.acting import returns
from evcl.rl.agent import Agent
from evcl.rl.learning import ALGORITHMS
from evcl.rl.ppo import PPO
from evcl.training import Checkpoints, Stopped
from evcl.training.checkpoint import Writer

SMALL = {"steps": 256, "envs": 4, "rollout": 16, "batch_size": 64, "passes": 2, "episodes": 1}


def learned(method, seeds=(0,), tasks=2, saver=None, stream=None, on_progress=lambda *_: None, **given):
    stream = stream or rl.stream("cartpole-variants", tasks)
    return rl.learn(stream, method, {**SMALL, **given}, seeds, "cpu", on_progress, saver)


def test_ppo_learns_to_balance_the_pole():
    given = {"steps": 8192, "envs": 16, "rollout": 32, "batch_size": 256, "passes": 8, "episodes": 10, "lr": 0.006}
    found = learned("evcl", (0, 1), tasks=1, **given)
    before = Agent(rl.stream("cartpole-variants", 1), "evcl", given, [0, 1])
    assert float(returns(before, 0, 10).max()) < 40
    assert float(found.returns.mean()) > 100


@pytest.mark.full
@pytest.mark.parametrize("method", ["vcl", "naive"])
def test_a_q_network_learns_to_balance_the_pole(method):
    """By Thompson sampling, and by random actions."""
    given = {"steps": 12_288, "envs": 8, "rollout": 8, "batch_size": 64, "passes": 16, "episodes": 10, "lr": 0.002}
    assert float(learned(method, (0, 1), tasks=1, algorithm="dqn", **given).returns.mean()) > 100


@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
def test_every_seed_learns_as_if_it_were_alone(algorithm):
    both = learned("evcl", seeds=(3, 4), algorithm=algorithm)
    alone = learned("evcl", seeds=(4,), algorithm=algorithm)
    torch.testing.assert_close(both.returns[1], alone.returns[0])
    torch.testing.assert_close(both.agent.network.posterior.mean[1], alone.agent.network.posterior.mean[0])


def after_each_task(method, given, tasks=2):
    """The agent, and a copy of its weights after each task."""
    agent, kept = Agent(rl.stream("cartpole-variants", 2), method, {**SMALL, **given}, [0]), []
    for task in range(tasks):
        learning = PPO(agent, task)
        for i in range(learning.iterations):
            learning.iterate(i)
        learning.finish()
        kept.append(agent.network.posterior.mean.clone())
    return agent, kept


@pytest.mark.parametrize(
    ("method", "setting", "strong"),
    [
        ("ewc", "strength", 1e6),
        ("evcl", "strength", 1e6),
        ("evcl", "distill", 1e3),
        ("vcl", "tempering", 1e6),
        ("si", "strength", 1e6),
        ("mas", "strength", 1e6),
    ],
)
def test_a_strong_term_keeps_the_policy_of_the_first_task(method, setting, strong):
    """By how much it changes on states of the first task, with a weak term and with a strong one."""
    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 1.0, 0.1, 1.0])
    known, moved = rl.method(method).known_settings, []
    for value in (1e-6, strong):
        weak = {"distill": 0.0, "strength": 0.0, "tempering": 1e-3, setting: value}
        given = {name: v for name, v in weak.items() if name in known}
        agent, kept = after_each_task(method, {"lr": 0.003, "steps": 512, "rollout": 32, **given})
        said = [agent.outputs(mean, x, [0])[:, 0] for mean in kept]
        moved.append(float(agent.policy.divergence(*said).mean()))
    assert moved[1] < 0.3 * moved[0]


TAKEN = ("evcl", "evcl-paper", "vcl", "gvcl", "ewc", "ewc-offline", "si", "mas", "naive")


@pytest.mark.parametrize("name", TAKEN)
def test_an_agents_method_is_the_librarys(name):
    agent = Agent(rl.stream("cartpole-variants", 2), name, SMALL, [0])
    assert (agent.method.learn, agent.method.memory) == (METHODS[name].learn, METHODS[name].memory)


@pytest.mark.parametrize("name", [name for name in METHOD_SUMMARIES if name not in TAKEN])
def test_a_method_that_needs_more_than_terms_is_refused_at_once(name):
    with pytest.raises(EvclError, match=f"^{name} .*use evcl, vcl"):
        Agent(rl.stream("cartpole-variants", 2), name, SMALL, [0])


def test_the_terms_are_those_of_the_methods_own_learner():
    """beta / N KL(q || q_{t-1}), and lambda / 2 sum F (mu - mu*)^2 with the exact Fisher over actions of the states."""
    agent, _ = after_each_task("evcl", {"tempering": 2.0, "strength": 0.5, "fisher_spread": 0.0, "distill": 0.0}, 1)
    memory, network = agent.hosted.memory, agent.network
    PPO(agent, 1)
    kl, elastic = agent.hosted.terms
    q = network.posterior.map(lambda t: t + 0.01)
    torch.testing.assert_close(kl.loss(q), 2.0 / 256 * q.kl(network.posterior))
    moved = (q.mean - memory.prior.mean).square() + (q.variance() - memory.prior.variance()).square()
    torch.testing.assert_close(elastic.loss(q), 0.25 * (memory.importance / 256 * moved).sum(1))


def test_the_fisher_is_that_of_the_tasks_last_states():
    agent = Agent(rl.stream("cartpole-variants", 1), "ewc", {**SMALL, "fisher_examples": 96, "fisher_spread": 0.0}, [0])
    learning = PPO(agent, 0)
    for i in range(learning.iterations):
        learning.iterate(i)
    assert learning.states.shape == (1, 96, 9)  # with the context
    learning.finish()
    network = agent.network
    sample = Sample(network, network.posterior.mean, network.layout, [0], learning.states)
    wanted = 256 * fisher(sample, likelihood=agent.policy)
    torch.testing.assert_close(agent.hosted.memory.importance, wanted)


@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
@pytest.mark.parametrize("count", [10, 100])
def test_the_last_states_are_kept(algorithm, count):
    """Also if an iteration has more, or they are no multiple of an iteration's."""
    gymnasium = pytest.importorskip("gymnasium")

    class Counting(gymnasium.Env):
        observation_space, action_space = gymnasium.spaces.Box(0, 1e6, (1,)), gymnasium.spaces.Discrete(2)

        def reset(self, seed=None, options=None):
            self.steps = np.zeros(1, np.float32)
            return self.steps, {}

        def step(self, action):
            self.steps = self.steps + 1
            return self.steps, 0.0, False, False, {}

    given = {**SMALL, "envs": 1, "algorithm": algorithm, "fisher_examples": count}
    agent = Agent(rl.from_gymnasium("counting", {"one": Counting}), "naive", given, [0])
    learning = ALGORITHMS[algorithm](agent, 0)
    for i in range(learning.iterations):
        learning.iterate(i)
    assert sorted(learning.states.flatten().tolist()) == list(range(256 - count, 256))


def test_clear_replays_earlier_tasks():
    """What is kept is of both tasks, and cloning holds on to the first one."""
    found = learned("clear", memory=1024).agent.kept
    assert int(found["seen"]) == 2 * 256 // 16
    assert found["task"].unique().tolist() == [0, 1]
    few = learned("clear", memory=128).agent.kept  # a reservoir: 8 of 32 fragments, of both tasks
    assert len(few["task"][0]) == 8
    assert few["task"].unique().tolist() == [0, 1]


def test_one_agent_per_task_starts_anew_each_time():
    found = learned("separate").returns[0]
    assert torch.equal(found[1, 0], found[0, 0])
    assert torch.isnan(found[0, 1])
    alone = learned("naive", tasks=1).returns[0]
    assert found[0, 0] == alone[0, 0]


def test_memory_counts_each_number_once():
    sizes = {}
    for method in ("naive", "vcl", "ewc", "evcl", "separate"):
        agent = learned(method, (0, 1), tasks=3, steps=64, passes=1).agent
        sizes[method] = agent.memory_bytes() / (4 * agent.network.layout.size)
    assert {m: round(size, 1) for m, size in sizes.items()} == {
        "naive": 1,
        "vcl": 2,
        "ewc": 3,  # the Fisher, and which weights were used
        "evcl": 4,
        "separate": 3,
    }


def test_a_run_needs_a_seed():
    with pytest.raises(EvclError, match="at least one seed"):
        learned("naive", seeds=[])


def test_a_rollout_of_one_step_can_be_learned():
    assert learned("naive", tasks=1, envs=1, rollout=1, steps=2).returns.isfinite().all()


class Killed(BaseException):
    pass


class Ends:
    """Ends a run after some iterations, before their checkpoint is written."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, *progress: object) -> None:
        self.left -= 1
        if not self.left:
            raise Killed


@pytest.mark.parametrize(
    ("method", "given"),
    [("evcl", {}), ("si", {}), ("clear", {"memory": 128}), ("evcl", {"algorithm": "dqn"}), ("separate", {})],
    ids=["ppo", "si", "clear", "dqn", "separate"],
)
def test_a_killed_run_resumes_to_the_same_bits(tmp_path, method, given):
    whole = learned(method, seeds=(0, 1), **given)
    for after in (3, 5, None):
        checkpoints = Checkpoints(tmp_path, seconds=1e-9, resume=after != 3)
        saver = Writer(checkpoints, [{"a": 1}], {})
        if after is None:
            found = learned(method, seeds=(0, 1), saver=saver, **given)
            break
        with pytest.raises(Killed):
            learned(method, seeds=(0, 1), saver=saver, on_progress=Ends(after), **given)
    assert torch.equal(found.returns.nan_to_num(-1), whole.returns.nan_to_num(-1))
    for name, tensor in whole.agent.tensors().items():
        assert torch.equal(tensor, found.agent.tensors()[name]), name
    for a, b in zip(whole.curves, found.curves, strict=True):
        assert torch.equal(a.nan_to_num(-1), b.nan_to_num(-1))


def test_an_agent_that_goes_on_with_a_later_task_resumes_too(tmp_path):
    stream = rl.stream("cartpole-variants", 3)

    def gone_on(saver=None, on_progress=lambda *_: None):
        agent = Agent(stream, "evcl", SMALL, [0])
        learning = PPO(agent, 0)
        learning.iterate(0)
        learning.finish()
        return rl.learn(stream, "evcl", agent.s, on_progress=on_progress, saver=saver, agent=agent, first=1)

    whole = gone_on()
    for after in (3, 7):  # in the second task, and in the third
        with pytest.raises(Killed):
            gone_on(Writer(Checkpoints(tmp_path, seconds=1e-9, resume=after != 3), [{}], {}), Ends(after))
    found = gone_on(Writer(Checkpoints(tmp_path, seconds=1e-9, resume=True), [{}], {}))
    assert torch.equal(found.returns.nan_to_num(-1), whole.returns.nan_to_num(-1))
    assert torch.equal(found.agent.network.posterior.mean, whole.agent.network.posterior.mean)
    assert len(found.curves) == len(whole.curves) == 2


def test_a_checkpoint_that_does_not_fit_is_an_error(tmp_path):
    stop = Checkpoints(tmp_path, seconds=1e-9, stop=lambda: True)
    with pytest.raises(Stopped):  # it was asked to stop, and saves itself
        learned("naive", saver=Writer(stop, [{"a": 1}], {}))
    with pytest.raises(EvclError, match="another run"):
        Writer(replace(stop, resume=True), [{"a": 2}], {})
    other = replace(stop, resume=True, stop=None)
    with pytest.raises(EvclError, match="does not fit the run"):
        learned("naive", seeds=(0, 1), saver=Writer(other, [{"a": 1}], {}))
    with pytest.raises(EvclError, match="--resume"):
        Writer(replace(stop, resume=False), [{"a": 1}], {})


def test_rooms_and_numbers_as_actions():
    """Streams of gymnasium, with discrete actions, and with numbers through a head per task."""
    gymnasium = pytest.importorskip("gymnasium")
    pytest.importorskip("minigrid")
    assert learned("evcl", tasks=2, stream=rl.stream("minigrid-rooms", 2)).returns.shape == (1, 2, 2)
    swing = rl.from_gymnasium("swing", {name: lambda: gymnasium.make("Pendulum-v1") for name in ("one", "two")})
    found = learned("ewc", stream=swing, steps=256)
    assert found.returns[0, [0, 1, 1], [0, 0, 1]].isfinite().all()
    assert found.returns[0, 0, 1].isnan()  # it has no head yet
    assert found.agent.hosted.memory.importance.sum() > 0
    assert found.agent.network.layout.shapes["head 1.weight"] == (2, 64)
    assert rl.frames(Agent(rl.stream("minigrid-rooms"), "naive", {}, [0]), 0, 2)[0].ndim == 3
    with pytest.raises(EvclError, match="actions that are numbers"):
        learned("ewc", stream=swing, algorithm="dqn")
    with pytest.raises(EvclError, match="clear, which replays"):
        learned("clear", algorithm="dqn")


class Policy(nn.Module):
    """What `adopt` reads of a PPO model of Stable-Baselines3."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp_extractor = nn.Module()
        self.mlp_extractor.policy_net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.action_net = nn.Linear(8, 2)


def test_a_policy_of_stable_baselines_is_taken_as_it_is():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        policy = Policy()
    tasks = [rl.Task(name, variant.make) for name, variant in (("a", rl.Variant()), ("b", rl.Variant(gravity=20.0)))]
    stream = rl.Stream("poles", tasks, (4,), 2, rl.trunk_of(policy))
    agent = Agent(stream, "evcl", SMALL, [0, 1])
    rl.adopt(agent, policy)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    said = agent.outputs(agent.network.posterior.mean, x, [0])[:, 0]
    with torch.no_grad():
        wanted = policy.action_net(policy.mlp_extractor.policy_net(x))
    torch.testing.assert_close(said, wanted)
    assert agent.hosted.memory.importance.sum() > 0
    before = returns(agent, 0, agent.s.episodes)
    found = rl.learn(stream, "evcl", agent.s, agent=agent, first=1)
    assert found.returns[:, 1].isfinite().all()
    assert torch.equal(found.returns[:, 0, 0], before)
    for method, given in (("naive", {"algorithm": "dqn"}), ("clear", {}), ("separate", {})):
        with pytest.raises(EvclError, match="cannot go on with a policy of Stable-Baselines3"):
            rl.adopt(Agent(stream, method, {**SMALL, **given}, [0]), policy)
    with pytest.raises(EvclError, match="MlpPolicy"):
        rl.adopt(agent, nn.Identity())


def test_measures_of_returns():
    a, ceiling = [[10.0, 0.0], [5.0, 8.0]], [10.0, 16.0]
    assert rl.average_return(a) == 6.5
    assert rl.normalised_return(a, ceiling) == 0.5
    assert rl.forgetting(a) == 5.0
    assert rl.forward_transfer(a, ceiling) == -0.5


def test_less_is_worse_for_returns_below_0_too():
    a, ceiling = [[-200.0, -300.0], [-150.0, -150.0]], [-100.0, -100.0]
    assert rl.normalised_return(a, ceiling) == 0.5
    assert rl.forward_transfer(a, ceiling) == -0.5
    better = [[-50.0, -300.0], [-50.0, -50.0]]
    assert rl.normalised_return(better, ceiling) == 1.5
    assert rl.forward_transfer(better, ceiling) == 0.5
    assert math.isnan(rl.normalised_return(a, [0.0, -100.0]))
