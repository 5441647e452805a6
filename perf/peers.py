"""Time of a step of other libraries relative to one EVCL step, on one core. Prints a table of ratios.

Every other library does the work of a VCL step in a second task: the same network and batch, one draw, the KL to the
last posterior, Adam; it has no elastic term, and receives its batch ready made. Each is configured for the highest
speed that its documentation allows (no validation, torch's fused Adam, updates in place). It is timed only if its loss
falls.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import BATCH, NETWORKS, medians, plain_network
from step import step

LR, STD, EXAMPLES = 1e-3, 0.01, 60_000  # Adam's learning rate; sigma of the last posterior; examples of the task
Make = Callable[[nn.Sequential, Tensor, Tensor], Callable[[], Any]]  # a network with the last posterior's means, x, y


def pyro_step(network: nn.Sequential, x: Tensor, y: Tensor) -> Callable[[], Any]:
    """Pyro's AutoNormal and TraceMeanField_ELBO with activations drawn instead of weights, as TyXe does it.

    A linear layer is an effect: a handler looks up the guide's distribution of the weights, and draws the layer's
    output from the distribution that they imply. The guide draws from its Normal directly, not through a Delta as
    AutoNormal does, so that the KL has its closed form.
    """
    import pyro
    from pyro.distributions import Categorical, Normal
    from pyro.infer import TraceMeanField_ELBO
    from pyro.infer.autoguide import AutoNormal, init_to_value
    from pyro.poutine import replay, trace
    from pyro.poutine.messenger import Messenger
    from pyro.poutine.runtime import effectful

    pyro.enable_validation(False)
    pyro.settings.set(module_local_params=True)
    linear = effectful(F.linear, type="linear")
    means = {name.replace(".", "_"): w.detach().clone() for name, w in network.named_parameters()}
    layers = [name.removesuffix("_weight") for name in means if name.endswith("_weight")]
    prior = {name: Normal(mean, torch.full_like(mean, STD)).to_event(mean.dim()) for name, mean in means.items()}

    def model(x: Tensor, y: Tensor) -> Tensor:
        for i, layer in enumerate(layers):
            weight, bias = (pyro.sample(name, prior[name]) for name in (f"{layer}_weight", f"{layer}_bias"))
            x = linear(x if i == 0 else x.relu(), weight, bias)
        with pyro.plate("examples", EXAMPLES, subsample_size=len(x)):
            pyro.sample("y", Categorical(logits=x), obs=y)
        return x

    class Guide(AutoNormal):
        def forward(self, x: Tensor, y: Tensor) -> None:
            if self.prototype_trace is None:
                self._setup_prototype(x, y)
            for name, mean in means.items():
                pyro.sample(name, Normal(*self._get_loc_and_scale(name)).to_event(mean.dim()))

    class DrawActivations(Messenger):
        def __enter__(self) -> Any:
            self.drawn: dict[int, tuple[Tensor, Any]] = {}  # by id; keeping the tensor prevents reuse of its id
            return super().__enter__()

        def _pyro_post_sample(self, message: dict[str, Any]) -> None:
            """The guide runs first; the model then replays the same tensor under its prior."""
            self.drawn.setdefault(id(message["value"]), (message["value"], message["fn"]))

        def _pyro_linear(self, message: dict[str, Any]) -> None:
            x, *parameters = message["args"]
            weight, bias = (self.drawn[id(w)][1].base_dist for w in parameters)
            variance = F.linear(x.square(), weight.scale.square(), bias.scale.square())
            message["value"] = Normal(F.linear(x, weight.loc, bias.loc), variance.sqrt()).rsample()
            message["done"] = True

    guide, elbo = Guide(model, init_loc_fn=init_to_value(values=means), init_scale=STD), TraceMeanField_ELBO()
    with DrawActivations():
        same = x[:1].expand_as(x)
        logits = replay(model, trace=trace(guide).get_trace(same, y))(same, y)
    if torch.equal(logits[0], logits[1]):
        raise RuntimeError("Pyro drew weights, not activations")
    adam = torch.optim.Adam(guide.parameters(), LR, fused=True)

    def one() -> Tensor:
        with DrawActivations():
            loss: Tensor = elbo.differentiable_loss(model, guide, x, y) / EXAMPLES
        return descend(loss, adam)

    return one


def posteriors_step(network: nn.Sequential, x: Tensor, y: Tensor) -> Callable[[], Any]:
    """Variational inference of `posteriors`: one draw of the weights per batch, and a KL estimated from it."""
    import torchopt

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # a score of them, from one of its dependencies
        from posteriors import diag_normal_log_prob, vi

    means = {name: w.detach().clone() for name, w in network.named_parameters()}
    stds = {name: torch.full_like(mean, STD) for name, mean in means.items()}

    def log_posterior(weights: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        logits = torch.func.functional_call(network, weights, batch[0])
        log_prior = diag_normal_log_prob(weights, mean=means, sd_diag=stds)
        return log_prior / EXAMPLES - F.cross_entropy(logits, batch[1]), torch.tensor([])

    log_stds = {name: std.log() for name, std in stds.items()}
    adam = torchopt.adam(LR, use_accelerated_op=True)
    method = vi.diag.build(log_posterior, adam, temperature=1 / EXAMPLES, init_log_sds=log_stds)
    state = method.init({name: mean.clone() for name, mean in means.items()})

    def one() -> Any:
        nonlocal state
        state, _ = method.update(state, (x, y), inplace=True)
        return state.nelbo

    return one


def bayesian_torch_step(kind: str) -> Make:
    """bayesian-torch's layers: `Reparameterization` draws weights per batch, `Flipout` flips signs per example.

    Their KL is the mean over a layer's weights, not the sum; it takes the same time.
    """

    def make(network: nn.Sequential, x: Tensor, y: Tensor) -> Callable[[], Any]:
        from bayesian_torch import layers as available

        layers = []
        for plain in network:
            if isinstance(plain, nn.Linear):
                layer = getattr(available, f"Linear{kind}")(plain.in_features, plain.out_features)
                layers.append(layer)
                for name, mean in plain.named_parameters():
                    std = torch.full_like(mean, STD)
                    getattr(layer, f"mu_{name}").data.copy_(mean)
                    getattr(layer, f"rho_{name}").data.copy_(std.expm1().log())  # sigma = log(1 + exp(rho))
                    getattr(layer, f"prior_{name}_mu").copy_(mean.detach())
                    getattr(layer, f"prior_{name}_sigma").copy_(std)
        adam = torch.optim.Adam([w for layer in layers for w in layer.parameters()], LR, fused=True)

        def one() -> Tensor:
            h, kl = x, torch.zeros(())
            for i, layer in enumerate(layers):
                h, more = layer(h if i == 0 else h.relu())
                kl = kl + more
            return descend(F.cross_entropy(h, y) + kl / EXAMPLES, adam)

        return one

    return make


def descend(loss: Tensor, optimiser: torch.optim.Optimizer) -> Tensor:
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    return loss.detach()


PEERS: dict[str, tuple[str, Make]] = {  # with the name of the package for pip
    "Pyro, as TyXe": ("pyro-ppl", pyro_step),
    "posteriors": ("posteriors", posteriors_step),
    "bayesian-torch": ("--no-deps bayesian-torch", bayesian_torch_step("Reparameterization")),
    "bayesian-torch, flipout": ("--no-deps bayesian-torch", bayesian_torch_step("Flipout")),
}


def check_learns(name: str, run: Callable[[], Any]) -> None:
    losses = [float(run()) for _ in range(100)]
    first, last = fmean(losses[:10]), fmean(losses[-10:])
    if not last < 0.95 * first:
        raise RuntimeError(f"{name} is not worth timing: its loss goes from {first:.3f} to {last:.3f}")


def main() -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, batch {BATCH}; milliseconds per step, median of 15 rounds")
    for network_name, (hidden, classes) in NETWORKS.items():
        torch.manual_seed(0)
        x, y = torch.rand(BATCH, 784), torch.randint(classes, (BATCH,))
        found = {f"EVCL, {precision}": step("evcl", hidden, classes, precision) for precision in ("fp32", "bf16")}
        missing = {}
        for name, (package, make) in PEERS.items():
            try:
                found[name] = make(plain_network([784, *hidden, classes]), x, y)
                check_learns(name, found[name])
            except ImportError as error:
                missing[name] = f"not installed: pip install {package} ({error})"
        times = medians(list(found.values()), 15, 10)
        fp32, bf16 = times[:2]
        print(f"\n{network_name:<26}{'ms':>7}{'/ EVCL fp32':>13}{'/ EVCL bf16':>13}")
        for name, seconds in zip(found, times, strict=True):
            print(f"{name:<26}{1e3 * seconds:>7.2f}{seconds / fp32:>13.2f}{seconds / bf16:>13.2f}")
        for name, why in missing.items():
            print(f"{name:<26}{why}")


if __name__ == "__main__":
    main()
