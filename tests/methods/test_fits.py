"""What a method may ask of a fit: weights that stay, losses that see the network, terms with gradients, trackers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import small_runs
import torch
from small_runs import F64, INPUTS, TASKS, assert_springs, fitting, learned, round_of, run_of
from torch import Tensor, nn

import evcl
from evcl._core.settings import Settings
from evcl.methods import KL, METHODS, Elastic, Fit, Learned, Loss, Method, Tracker, collapse, tempering
from evcl.methods.terms import Spring
from evcl.nn import Gaussian
from evcl.nn.chain import find_chain
from evcl.training import Observer, Pool, Step, TaskData

N, OUT = 24, 6  # examples and features
NETWORKS = {
    "chain": lambda: evcl.nn.mlp(INPUTS, [OUT]),
    "autograd": lambda: nn.Sequential(nn.utils.skip_init(nn.Linear, INPUTS, OUT), nn.Tanh()),
}
networks = pytest.mark.parametrize("network", NETWORKS)
both_kinds = pytest.mark.parametrize("bayesian", [True, False])


def task(head=0, replicas=1, dtype=F64):
    source = torch.Generator().manual_seed(head)
    x = torch.randn(replicas, N, INPUTS, generator=source, dtype=F64).to(dtype)
    return TaskData(x, (x[..., head] > 0).long(), head)


def made(learn, network="chain", bayesian=True, dtype=F64, heads=1, **given):
    """Two replicas that follow a method which learns like this; what VCL remembers, if it is Bayesian."""
    method = replace(METHODS["vcl" if bayesian else "naive"], name="mine", learn=learn)
    usual = {"epochs": 2, "batch_size": 8, "lr": 0.01, "std_update": "adam"}
    features = {"network": NETWORKS[network](), "features": OUT, "heads": [2] * heads}
    return run_of(method, seeds=[3, 4], usual=usual, options={"dtype": dtype}, **features, **given)


# --- weights that stay -----------------------------------------------------------------------------------------------


@networks
@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("rule", [None, "adam", "natural"])
@pytest.mark.parametrize("shared", [True, False])
def test_only_the_weights_that_may_move_do(network, dtype, rule, shared):
    """The others stay to the last bit, in means and in sigmas; `moves` may be [R, P] or [P]."""
    masks, given = [], {} if rule is None else {"std_update": rule, "init_std": 0.1}

    def learn(memory, round_, s):
        source = torch.Generator().manual_seed(7)
        shape = round_.posterior.mean.shape
        masks.append(torch.rand(shape[1:] if shared else shape, generator=source) < 0.5)
        terms = [] if rule is None else [KL(memory.prior, tempering(s, round_) / round_.n)]
        fitted = yield Fit(round_.tasks, terms=terms, moves=masks[0])
        return Learned(fitted.q, memory)

    run = made(learn, network, rule is not None, dtype, **given)
    before = run.network.posterior.snapshot()
    run.learn([task(dtype=dtype)])
    after, moves = run.network.posterior, masks[0].expand_as(before.mean)
    for old, new in ((before.mean, after.mean), (before.log_std, after.log_std)):
        if old is not None:
            assert torch.equal(new[~moves], old[~moves])
            assert (new != old)[moves].double().mean() > 0.5


# --- losses that see the network -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Small(Loss):
    """The outputs of some heads are to be small, the more so the later a row is and where the label is 1."""

    heads: tuple[int, ...]
    strength: float = 1.0

    def __call__(self, network, batch):
        outputs = batch.logits(network, self.heads)
        return self.strength * ((batch.rows + batch.y).unsqueeze(2) * outputs.square()).mean((1, 2))


class Handed:
    """Noise that is a function of the replica and the example."""

    def normal_(self, out):
        return out.copy_(torch.linspace(-2, 2, out[..., 0].numel()).view(*out.shape[:2], 1))


class Still:
    """A rule that moves nothing, so that a step's gradient can be looked at."""

    def __init__(self, *_):
        self.count = torch.zeros(())

    def __call__(self):
        pass


def step_of(run, network, loss_heads=(), **more):
    """A step on task 0, over the weights that it uses, and what it computes with."""
    pool = Pool([task(replicas=2)], run.classes, 2)
    whole = run.network
    part = whole.layout.part(whole.names_of(sorted({0, *loss_heads})) if loss_heads else whole.names_of([0]))
    q = whole.posterior.map(lambda t: whole.layout.gather(t, part), part)
    chain = find_chain(whole, pool.x)
    assert (chain is not None) == (network == "chain")
    return Step(whole, q, Fit([], rule=Still, **more), run.settings, pool, chain), pool, part, q


@networks
@both_kinds
@pytest.mark.parametrize("heads", [(0,), (1,), (0, 1)])
def test_a_losss_gradients_are_those_of_the_whole_objective(network, bayesian, heads):
    """Of its own head, and of one beside the data's."""
    run = made(METHODS["naive"].learn, network, bayesian, heads=2, **({"init_std": 0.3} if bayesian else {}))
    loss = Small(heads)
    step, pool, part, q = step_of(run, network, heads, losses=[loss])
    rows = torch.stack([torch.arange(8) * 3, torch.arange(8) + 2])
    nll = step(rows, Handed()).clone()

    run.network.bind(q.mean, q.variance(), part)
    leaves = run.network.leaves(part)
    run.network.weights.noise = Handed()
    data, more = pool.nll(run.network, rows), loss(run.network, pool.minibatch(rows))
    grads = torch.autograd.grad((data + more).sum(), leaves, materialize_grads=True)
    torch.testing.assert_close(nll, data.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(step.losses_now(), {"small": more.detach()}, rtol=1e-10, atol=1e-12)
    wanted = dict(zip(part.shapes, grads, strict=False))
    for name, grad in wanted.items():
        torch.testing.assert_close(step.grads.part(name), grad, rtol=1e-9, atol=1e-12)
    if bayesian:
        for name, grad in zip(part.shapes, grads[len(part.shapes) :], strict=True):
            found = part.view(step.grads.variance, name)
            torch.testing.assert_close(found, 2 * grad, rtol=1e-9, atol=1e-12)


@both_kinds
def test_a_loss_of_what_the_network_says_takes_no_pass_of_its_own(bayesian):
    run = made(METHODS["naive"].learn, "autograd", bayesian, heads=2)
    passes = []
    run.network.trunk.register_forward_hook(lambda *_: passes.append(1))
    for losses in ([], [Small((0, 1))]):
        step, *_ = step_of(run, "autograd", (0, 1), losses=losses)
        step(torch.arange(16).view(2, 8), Handed())
    assert len(passes) == 2


@networks
def test_a_head_that_only_a_loss_uses_is_trained(network):
    def moved(losses):
        values = []

        class Noted(Observer):
            def end_epoch(self, progress):
                values.append(progress.step.losses_now())

        run = made(fitting(losses=losses), network, bayesian=False, heads=2, epochs=20)
        before = run.network.posterior.mean.clone()
        run.learn([task()], observer=Noted())
        change = run.network.layout.views(run.network.posterior.mean - before)
        return {name: float(value.abs().max()) for name, value in change.items()}, values

    change, values = moved([Small((1,), 0.01)])
    assert min(change["head 0.weight"], change["head 1.weight"]) > 1e-3
    assert (values[-1]["small"] < values[0]["small"]).all()
    change, values = moved([])
    assert change["head 1.weight"] == 0
    assert values[-1] == {}


# --- terms that know their gradient ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fourth:
    """weight sum_p (mu_p - c_p)^4 + (log sigma_p)^2: by autograd."""

    centre: Tensor
    weight: float

    def loss(self, q):
        moved = (q.mean - self.centre) ** 4
        return self.weight * (moved if q.log_std is None else moved + q.log_std.square()).sum(1)


class Known(Fourth):
    """The same, with its gradient."""

    def add_gradient(self, q, grads):
        grads.mean.add_(4 * self.weight * (q.mean - self.centre) ** 3)
        if grads.variance is not None:
            grads.variance.add_(2 * self.weight * q.log_std / q.variance())


@networks
@both_kinds
def test_a_term_that_knows_its_gradient_is_the_same_by_autograd(network, bayesian):
    found = []
    for kind in (Fourth, Known):
        run = made(fitting(terms=[kind(torch.tensor(0.3, dtype=F64), 0.5)]), network, bayesian)
        run.learn([task()])
        step, *_ = step_of(run, network, terms=[kind(torch.zeros((), dtype=F64), 0.5)])
        step(torch.arange(8).expand(2, 8), Handed())
        q = run.network.posterior
        found.append([q.mean, *([] if q.log_std is None else [q.log_std]), step.grads.mean])
        found[-1] += [] if step.grads.variance is None else [step.grads.variance]
    for known, plain in zip(*found, strict=True):
        torch.testing.assert_close(known, plain, rtol=1e-9, atol=1e-11)


# --- trackers --------------------------------------------------------------------------------------------------------


class Hears(Tracker):
    """Keeps everything that it hears, and finds a 1 for each weight that it hears of."""

    def __init__(self):
        self.heard = []

    def begin(self, q, part):
        self.start, self.found = q.snapshot(), torch.ones_like(q.mean)

    def before(self, q, grads):
        variance = None if grads.variance is None else grads.variance.clone()
        self.heard.append((q.snapshot(), grads.mean.clone(), variance))

    def after(self, q):
        self.heard[-1] += (q.snapshot(),)

    def buffers(self):
        return [self.found]

    def result(self):
        return self.found


class Constant:
    """Noise that is the same for all examples, so that their order does not matter."""

    def normal_(self, out):
        return out.fill_(0.7)


@networks
@both_kinds
def test_a_tracker_hears_the_gradient_of_the_data_and_every_step(network, bayesian):
    """Strong terms are not in what it hears. What it found is over all weights: 0 for a head that is idle."""
    path, results, steps = Hears(), [], []

    class Began(Observer):
        def begin_fit(self, stage, step, *_):
            steps.append(step)

    def learn(memory, round_, s):
        anchor = round_.posterior.map(lambda t: t + 0.1)
        terms = [Elastic(anchor, torch.full_like(anchor.mean, 50.0)), Fourth(anchor.mean, 3.0)]
        fitted = yield Fit(round_.tasks, terms=terms, trackers=[path])
        results.extend(fitted.tracked)
        return Learned(fitted.q, memory)

    run = made(learn, network, bayesian, heads=2, batch_size=N, epochs=6)
    run.learn([task()], noise=Constant(), observer=Began())
    ((step,), (whole,)), rows = (steps, results), torch.arange(N).expand(2, N)
    layout = step.q.layout
    assert len(path.heard) == 6
    for k, (q, grad, variance, after) in enumerate(path.heard):
        earlier = path.heard[k - 1][3] if k else path.start
        assert torch.equal(q.mean, earlier.mean)
        chain = find_chain(run.network, step.pool.x)
        plain = Step(run.network, replace(q, layout=layout), Fit([], rule=Still), run.settings, step.pool, chain)
        plain(rows, Constant())
        torch.testing.assert_close(grad, plain.grads.mean, rtol=1e-9, atol=1e-12)
        if bayesian:
            torch.testing.assert_close(variance, plain.grads.variance, rtol=1e-9, atol=1e-12)
            assert torch.equal(q.log_std, earlier.log_std)
        assert not torch.equal(after.mean, q.mean)
    assert all(any(buffer is own for own in step.buffers()) for buffer in path.buffers())
    assert torch.equal(run.network.layout.gather(whole, layout), path.found)
    assert whole.sum() == path.found.sum() == whole.numel() - 2 * 2 * (OUT + 1)  # head 1 is idle


@networks
def test_a_tracker_narrows_what_covers_all_weights_and_changes_the_gradient(network):
    """A mask from a memory [R, P], in a fit that uses one of two heads: weights that it marks stand still."""

    class Masked(Tracker):
        def __init__(self, mask):
            self.mask = mask

        def begin(self, q, part):
            self.own = part.gather(self.mask)
            assert self.own.shape == q.mean.shape
            assert torch.equal(part.layout.view(self.own, "head 0.weight"), part.whole.view(self.mask, "head 0.weight"))

        def before(self, q, grads):
            grads.mean.mul_(self.own)

    found = []

    def learn(memory, round_, s):
        start = round_.posterior.mean
        mask = (torch.arange(start.shape[1]) % 3 > 0).to(start).expand_as(start)
        fitted = yield Fit(round_.tasks, trackers=[Masked(mask)])
        found.append((mask, fitted.used, fitted.q.mean - start))
        return Learned(fitted.q, memory)

    made(learn, network, bayesian=False, heads=2).learn([task()])
    ((mask, used, moved),) = found
    assert not moved[(mask == 0) | (used == 0)].any()
    assert (moved[(mask == 1) & (used == 1)] != 0).double().mean() > 0.5


def test_a_tracker_without_a_part_works_and_warns():
    class Old(Tracker):
        def begin(self, q):
            self.steps = torch.zeros_like(q.mean)

        def after(self, q):
            self.steps += 1

        def result(self):
            return self.steps

    steps = []

    def learn(memory, round_, s):
        fitted = yield Fit(round_.tasks, trackers=[Old()])
        steps.append(fitted.tracked[0].amax())
        return Learned(fitted.q, memory)

    with pytest.warns(DeprecationWarning, match=r"write Old.begin\(q, part\)"):
        made(learn, bayesian=False).learn([task()])
    assert steps == [2 * -(-N // 8)]


def test_a_term_that_is_no_dataclass_is_named():
    class Bare:
        def loss(self, q):
            return q.mean.sum(1)

    with pytest.raises(evcl.EvclError, match="a term must be a dataclass"):
        made(fitting(terms=[Bare()]), bayesian=False).learn([task()])


def test_a_start_of_ones_own_is_where_a_fit_begins():
    """And not where the posterior is, which stays as it was until the round ends."""
    path = Hears()

    def learn(memory, round_, s):
        zero = Gaussian(torch.zeros_like(round_.posterior.mean), None)
        fitted = yield Fit(round_.tasks, start=zero, trackers=[path])
        return Learned(fitted.q, memory)

    made(learn, bayesian=False).learn([task()])
    assert not path.start.mean.any()


def test_a_method_of_its_own_names_needs_no_more_than_learn():
    """The default memory, terms and predictor: plain training."""
    found = [learned(method, [task()]) for method in (Method("bare", "", bayesian=False), METHODS["naive"])]
    assert torch.equal(*(run.network.posterior.mean for run in found))


# --- terms and likelihoods -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Towards:
    """Pulls the weights that an earlier fit used to 0."""

    used: Tensor  # [P]

    def loss(self, q):
        return (self.used * q.mean.square()).sum(1)


@networks
def test_a_term_may_hold_a_value_per_weight_for_all_replicas(network):
    """The second task does not use the first one's head: the term is over the weights that it does use."""
    held = []

    def learn(memory, round_, s):
        fitted = yield Fit(round_.tasks, terms=[Towards(used) for used in held])
        held.append(fitted.used)
        return Learned(fitted.q, memory)

    run = made(learn, network, bayesian=False, heads=2)
    run.learn([task(0)])
    before = run.network.layout.views(run.network.posterior.mean.clone())
    run.learn([task(1)])
    after = run.network.layout.views(run.network.posterior.mean)
    assert torch.equal(after["head 0.weight"], before["head 0.weight"])
    assert not torch.equal(after["head 1.weight"], before["head 1.weight"])
    trunk = next(name for name in after if not name.startswith("head") and name.endswith("weight"))
    assert float(after[trunk].norm()) < float(before[trunk].norm())


class SquaredError:
    """Targets that are vectors."""

    compiled = False

    def nll(self, outputs, y, columns):
        return (outputs - y).square().sum(1)


@networks
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_likelihood_of_ones_own_may_have_vectors_as_targets(network, replicas):
    seen = []

    class Noted(Observer):
        def end_epoch(self, progress):
            seen.append(progress.nll.clone())

    run = made(fitting(likelihood=SquaredError()), network, bayesian=False, epochs=60)
    x = task(replicas=replicas).x
    run.learn([TaskData(x, torch.stack([x[..., 0], x[..., 1] - x[..., 2]], 2), 0)], observer=Noted())
    assert bool((seen[-1] < 0.2 * seen[0]).all())


# --- closed-form gradients -------------------------------------------------------------------------------------------


def terms_of(run, one, **given):
    """Those of the fit that the run's method asks for first, with these settings."""
    return next(run.method.learn(run.memory, round_of(run, [one]), Settings({**run.settings, **given}))).terms


@pytest.mark.parametrize("name", ["evcl", "vcl", "ewc"])
@pytest.mark.parametrize("per_replica", [False, True])
def test_the_closed_form_is_autograds(name, per_replica, generator):
    own = {"vcl": {}, "ewc": {"fisher_floor": 0.3}, "evcl": {"fisher_floor": 0.3, "posterior": "diagonal"}}[name]
    run = learned(name, TASKS[:1], replicas=3, **own)
    own = {"strength", "tempering", "fisher_floor"} & run.settings.keys() if per_replica else ()
    given = {setting: torch.tensor([[1.0], [10.0], [0.1]], dtype=F64) for setting in own}
    q = run.network.posterior.map(lambda t: t + torch.randn(t.shape, generator=generator, dtype=F64))
    assert_springs(terms_of(run, TASKS[1], **given), q, rtol=1e-9, atol=1e-12)


def test_a_weight_at_its_centre_feels_exactly_nothing():
    """In float32 too, however stiff the terms: a rounding error here would become a full step of Adam."""
    mean = torch.linspace(-3, 3, 101).unsqueeze(0)
    at = Gaussian(mean, torch.linspace(-9, 1, 101).unsqueeze(0))
    stiff = torch.logspace(-6, 7, 101).unsqueeze(0)
    pull, _ = collapse([KL(at, 1e-3), Elastic(at, stiff)])
    grads, scratch = [torch.zeros_like(mean) for _ in range(2)], [torch.empty_like(mean) for _ in range(2)]
    pull.add_mean_gradient(mean, grads[0], scratch[0])
    pull.add_log_std_gradient(at.variance(), grads[1], *scratch)
    assert all(torch.equal(grad, torch.zeros_like(mean)) for grad in grads)


def test_two_centres_meet_at_the_weighted_mean():
    one = Spring(torch.tensor([[3.0, 0.0]]), torch.tensor([[1.0, 5.0]]))
    two = Spring(torch.tensor([[1.0, 0.0]]), torch.tensor([[9.0, 7.0]]))
    both = one + two
    assert both.w.tolist() == [[4.0, 0.0]]
    assert both.c[0, 0].item() == 3.0
    assert both.c.isfinite().all()


# --- the elastic term is alive --------------------------------------------------------------------------------------


def test_without_strength_evcl_is_vcl_and_with_it_it_is_not():
    bare = {"posterior": "diagonal", "fisher_floor": 0.0, "distill": 0.0, "one_softmax": True}
    cases = ("vcl", {}), ("evcl", {**bare, "strength": 0.0}), ("evcl", {**bare, "strength": 1.0})
    vcl, none, some = (learned(method, TASKS, **given).network.posterior for method, given in cases)
    assert torch.equal(vcl.mean, none.mean)
    assert torch.equal(vcl.log_std, none.log_std)
    assert (vcl.mean - some.mean).abs().max() > 1e-3
    assert (vcl.log_std - some.log_std).abs().max() > 1e-5


@pytest.mark.parametrize("name", ["evcl", "ewc"])
def test_a_pull_over_the_examples_is_that_of_so_much_smaller_a_strength(name):
    """Both the Fisher's part and the floor's."""
    run = learned(name, TASKS[:1], **({"posterior": "diagonal"} if name == "evcl" else {}))

    def importance(n, **given):
        terms = terms_of(run, small_runs.task(1, 1, n), **{"fisher_scale": "task", **given})
        return next(term.importance for term in terms if isinstance(term, Elastic))

    divided = importance(250, strength=500.0, fisher_floor=50.0, strength_scale="examples")
    torch.testing.assert_close(divided, importance(250, strength=2.0, fisher_floor=0.2))
    torch.testing.assert_close(importance(7, strength=2.0), importance(250, strength=2.0))


@pytest.mark.parametrize("method", ["evcl", "vcl", "naive"])
def test_a_linear_model_is_fitted_by_a_few_rows(method):
    """One step an epoch is enough for least squares, also in a later task with a head of its own."""
    source = torch.Generator().manual_seed(1)
    learner = evcl.Learner(nn.Identity(), method, likelihood="gaussian")
    for name in ("first", "second"):
        x, unseen, w = (torch.randn(n, 4, generator=source, dtype=F64) for n in (20, 500, 1))
        y, true = x @ w[0] + 0.3 * torch.randn(20, generator=source, dtype=F64), unseen @ w[0]
        learner.learn((x.float(), y.float()), name)
        error = (torch.as_tensor(learner.predictions(unseen.float(), name).mean) - true).square().mean()
        least = (unseen @ torch.linalg.lstsq(x, y.unsqueeze(1)).solution[:, 0] - true).square().mean()
        assert error < least + 0.1 * true.var(), (name, error, least)
