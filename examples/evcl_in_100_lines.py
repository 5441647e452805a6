"""EVCL, elastic variational continual learning (Batra and Clark, 2024), in plain PyTorch: the whole method on one page.

A network learns one task after another and never sees old data again. What it knows is a Gaussian over every weight,
q = N(mu, s2) with s2 = sigma^2. On task t, with N_t examples, Adam moves mu and log sigma to minimise

    L_t = mean NLL + beta/N_t KL(q_t || q_{t-1}) + lambda/2 sum_i F_i [(mu_i - mu*_i)^2 + (s2_i - s2*_i)^2]

The NLL is that of weights drawn from q_t. The KL keeps q_t near the prior q_{t-1}, the posterior of the last task; the
first prior is N(0, 1). The elastic term keeps each weight near its anchor, the mean mu* and variance s2* of q_{t-1}, in
proportion to its importance: F, the diagonal Fisher information of the last task (gamma = 1 sums those of all tasks).
Without this term (lambda = 0), this is VCL (Nguyen et al., 2018). `python examples/evcl_in_100_lines.py` compares both.
"""

import torch
from sklearn.datasets import load_digits
from torch import Generator, Tensor, nn


class Layer:
    """A linear layer with Gaussian weights [inputs + 1, outputs], the last row of which is the bias."""

    def __init__(self, inputs: int, outputs: int, rng: Generator, sigma: float = 0.02) -> None:
        shape, bound = (inputs + 1, outputs), (6 / inputs) ** 0.5  # He initialisation
        self.mu = torch.empty(shape).uniform_(-bound, bound, generator=rng).requires_grad_()
        self.log_sigma = torch.full(shape, sigma).log().requires_grad_()
        self.mu_star, self.log_sigma_star, self.fisher = torch.zeros(shape), torch.zeros(shape), torch.zeros(shape)

    def __call__(self, x: Tensor, rng: Generator | None = None) -> Tensor:
        """x mu_W + mu_b + eps sqrt(x^2 s2_W + s2_b), as if each example drew its own weights; eps = 0 without rng."""
        y = x @ self.mu[:-1] + self.mu[-1]
        if rng is None:
            return y
        eps, s2 = torch.randn(y.shape, generator=rng, dtype=y.dtype), (2 * self.log_sigma).exp()
        return y + eps * (x**2 @ s2[:-1] + s2[-1]).sqrt()


def logits(layers: list[Layer], x: Tensor, rng: Generator | None = None) -> Tensor:
    for layer in layers[:-1]:
        x = layer(x, rng).relu()
    return layers[-1](x, rng)


def objective(layers: list[Layer], x: Tensor, y: Tensor, n: int, lambda_: float, beta: float, rng: Generator) -> Tensor:
    """L_t, estimated from a batch x, y of the task's n examples."""
    nll, kl, elastic = nn.functional.cross_entropy(logits(layers, x, rng), y), torch.zeros(()), torch.zeros(())
    for q in layers:
        s2, s2_star, moved = (2 * q.log_sigma).exp(), (2 * q.log_sigma_star).exp(), (q.mu - q.mu_star) ** 2
        log_ratio = 2 * (q.log_sigma - q.log_sigma_star)  # exactly 0 at the prior: Adam amplifies rounding errors
        kl = kl + 0.5 * (log_ratio.exp() - 1 - log_ratio + moved / s2_star).sum()
        elastic = elastic + (q.fisher * (moved + (s2 - s2_star) ** 2)).sum()
    return nll + beta / n * kl + lambda_ / 2 * elastic


def fisher(layers: list[Layer], x: Tensor) -> list[Tensor]:
    """F_t = 1/n sum_n sum_c p(c|x_n) (d log p(c|x_n) / d mu)^2, at the mean weights."""
    mu, found = [q.mu for q in layers], [torch.zeros_like(q.mu) for q in layers]
    for x_n in x:  # one at a time, because the square is that of each example's own gradient
        for log_p in logits(layers, x_n).log_softmax(0):
            for f, g in zip(found, torch.autograd.grad(log_p, mu, retain_graph=True), strict=True):
                f += log_p.detach().exp() * g**2 / len(x)
    return found


def learn(
    layers: list[Layer], x: Tensor, y: Tensor, rng: Generator, lambda_: float, beta: float = 0.001, gamma: float = 0.0,
    lr: float = 0.01, epochs: int = 10, batch: int = 64,
) -> None:  # fmt: skip
    adam = torch.optim.Adam([parameter for q in layers for parameter in (q.mu, q.log_sigma)], lr)
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=rng).split(batch):
            adam.zero_grad()
            objective(layers, x[rows], y[rows], len(x), lambda_, beta, rng).backward()
            adam.step()
    for q, f_t in zip(layers, fisher(layers, x), strict=True):
        q.mu_star, q.log_sigma_star = q.mu.detach().clone(), q.log_sigma.detach().clone()  # next prior and anchor
        q.fisher = gamma * q.fisher + f_t


@torch.no_grad()
def predict(layers: list[Layer], x: Tensor, rng: Generator, draws: int = 8) -> Tensor:
    return torch.stack([logits(layers, x, rng).softmax(1) for _ in range(draws)]).mean(0)


def split_digits(lambda_: float, seed: int) -> Tensor:
    """Learn to tell 0 from 1, then 2 from 3, up to 8 from 9, a head per task; return their test accuracy at the end."""
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    x, y, task, test = images.float() / 16, labels % 2, labels // 2, torch.arange(len(labels)) % 5 == 0
    rng = Generator().manual_seed(seed)
    trunk, heads = [Layer(64, 50, rng), Layer(50, 50, rng)], [Layer(50, 2, rng) for _ in range(5)]
    for t, head in enumerate(heads):
        learn([*trunk, head], x[(task == t) & ~test], y[(task == t) & ~test], rng, lambda_)
    right = torch.stack([predict([*trunk, head], x, rng).argmax(1) == y for head in heads])  # [task, image]
    return torch.stack([right[t, (task == t) & test].float().mean() for t in range(5)])


if __name__ == "__main__":
    print("Test accuracy after the last task, mean over two seeds: 0/1, 2/3, 4/5, 6/7, 8/9")
    for name, lambda_ in (("EVCL", 100.0), ("VCL", 0.0)):
        accuracy = torch.stack([split_digits(lambda_, seed) for seed in range(2)]).mean(0)
        print(name, *(f"{a:.1%}" for a in accuracy), sep="\t")
