"""What governs FedSparse's sparsity: thresholds as in the paper, or in logits, over λ0.

    python -m benchmarks.gate_scales [--rounds 150] [--seeds 3]

All λ0 and seeds are trained side by side as one stack of networks, written from the equations
alone (the sums of `fedbayes.methods.fedsparse`, on fully connected networks with one hidden layer
of 100), on scikit-learn's digits: ten clients of Dirichlet shares with concentration 1, five in a
round, one epoch of batches of 20, learning rate .05, Adam with rate .01 at the server. Columns are
the sparsity of hidden units, global accuracy, and the mean accuracy of the models that clients
last reported: with their gates drawn, and with those open that are likelier open than not.
"""

import argparse
from dataclasses import dataclass, field
from math import log

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid, softplus

from fedbayes.inference import gates

CLIENTS, COHORT, HIDDEN, TRAIN, TEST, BATCH = 10, 5, 100, 143, 36, 20
RELAXATION, BETA, START = 2 / 3, 1e-4, log(0.99 / 0.01)
PRICES = (0.0, 1e-6, 1e-5, 1e-4, 4e-4, 1e-3, 1e-2)
HEAT = {"paper": 1e-3, "logits": 0.05}


def clients(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test samples of each client, [clients, n, ...]."""
    digits, rng = load_digits(), np.random.default_rng(seed)
    pools = [list(rng.permutation(np.flatnonzero(digits.target == k))) for k in range(10)]
    found = []
    for _ in range(CLIENTS):
        shares, own = rng.dirichlet(np.ones(10)), []
        while len(own) < TRAIN + TEST:
            left = np.array([len(pool) > 0 for pool in pools]) * (shares + 1e-9)
            own.append(pools[rng.choice(10, p=left / left.sum())].pop())
        found.append(rng.permutation(own))
    x = torch.tensor((digits.data - digits.data.mean()) / digits.data.std(), dtype=torch.float32)
    y, index = torch.tensor(digits.target), torch.tensor(np.stack(found))
    return x[index[:, :TRAIN]], y[index[:, :TRAIN]], x[index[:, TRAIN:]], y[index[:, TRAIN:]]


class Adam:
    """Adam or Adamax on a list of tensors, rates in place."""

    def __init__(self, rate: float, eps: float, largest: bool = False) -> None:
        self.rate, self.eps, self.largest, self.steps = rate, eps, largest, 0
        self.first: list[Tensor] = []
        self.second: list[Tensor] = []

    def step(self, values: list[Tensor], slopes: list[Tensor]) -> list[Tensor]:
        """The values after a step down the slopes."""
        if not self.steps:
            self.first = [torch.zeros_like(v) for v in values]
            self.second = [torch.zeros_like(v) for v in values]
        self.steps += 1
        found = []
        for i, (value, slope) in enumerate(zip(values, slopes, strict=True)):
            self.first[i] = 0.9 * self.first[i] + 0.1 * slope
            rate = self.rate / (1 - 0.9**self.steps)
            if self.largest:
                self.second[i] = torch.maximum(0.999 * self.second[i], slope.abs() + self.eps)
                scale = self.second[i]
            else:
                self.second[i] = 0.999 * self.second[i] + 0.001 * slope.square()
                scale = (self.second[i] / (1 - 0.999**self.steps)).sqrt() + self.eps
            found.append(value - rate * self.first[i] / scale)
        return found


@dataclass
class Seen:
    """What came of it, by λ0, [seeds, prices] each; and of each tenth round."""

    sparsity: Tensor
    accuracy: Tensor
    drawn: Tensor
    likely: Tensor
    curve: list[Tensor] = field(default_factory=list)


def outputs(weights: list[Tensor], x: Tensor, z: Tensor) -> Tensor:
    """Of networks [..., hidden] whose hidden units have the gates z."""
    hidden = (x @ weights[0].mT + weights[1][..., None, :]).relu() * z[..., None, :]
    return hidden @ weights[2].mT + weights[3][..., None, :]


def run(scale: str, prices: tuple[float, ...], seeds: int, rounds: int, times: float = 1.0) -> Seen:
    """FedSparse with all prices and seeds; `none`: FedAvg. λ0 is multiplied midway."""
    data = [torch.stack(parts) for parts in zip(*map(clients, range(seeds)), strict=True)]
    x, y, test_x, test_y = data
    count, heat, gated = len(prices), HEAT.get(scale, 1.0), scale != "none"
    rng = torch.Generator().manual_seed(1)

    def each(t: Tensor) -> Tensor:
        return t.repeat_interleave(count, 0)

    def uniform(*shape: int, inputs: int) -> Tensor:
        return each((2 * torch.rand(seeds, *shape, generator=rng) - 1) / inputs**0.5)

    size = x.shape[-1]
    weights = [uniform(HIDDEN, size, inputs=size), uniform(HIDDEN, inputs=size)]
    weights += [uniform(10, HIDDEN, inputs=HIDDEN), uniform(10, inputs=HIDDEN)]
    price = torch.tensor(prices * seeds)[:, None, None]
    alive = torch.ones(len(price), HIDDEN, dtype=torch.bool)
    server, gate_server = Adam(1e-2, 1e-8), Adam(1e-2, 1e-8, largest=True)

    def level(norms: Tensor, v: Tensor) -> Tensor:
        return norms / heat - v if scale == "logits" else (norms - softplus(v)) / heat

    def threshold(norms: Tensor, logits: Tensor) -> Tensor:
        logits = torch.as_tensor(logits, dtype=norms.dtype)
        return norms / heat - logits if scale == "logits" else gates.thresholds(norms, logits, heat)

    v = threshold(weights[0].norm(dim=-1), torch.full(alive.shape, START))
    last: dict[tuple[int, int], tuple[list[Tensor], Tensor, Tensor]] = {}
    curve = []
    for number in range(1, rounds + 1):
        if number == rounds // 2:
            price = price * times
        cohort = torch.stack(
            [torch.randperm(CLIENTS, generator=rng)[:COHORT] for _ in range(seeds)]
        )
        own_x = torch.stack([x[i, cohort[i]] for i in range(seeds)])
        own_y = torch.stack([y[i, cohort[i]] for i in range(seeds)])
        own = [w[:, None].expand(-1, COHORT, *w.shape[1:]).clone() for w in weights]
        own_v = v[:, None].expand(-1, COHORT, -1).clone()
        at_server = level(weights[0].norm(dim=-1), v)[:, None]
        slope = 0.01 if scale == "logits" else 1e-8
        moving = Adam(1.0 if scale == "logits" else 1e-3, slope, largest=True)
        order = torch.rand(seeds, COHORT, TRAIN, generator=rng).argsort(-1)
        for batch in order.split(BATCH, dim=-1):
            bx = each(own_x.gather(2, batch[..., None].expand(-1, -1, -1, size)))
            by = each(own_y.gather(2, batch))
            noise = each(torch.rand(seeds, COHORT, HIDDEN, generator=rng))
            leaves = [w.requires_grad_() for w in (*own, own_v)]
            logits = level(own[0].detach().norm(dim=-1), own_v)
            z = gates.relaxed(logits, noise, RELAXATION) if gated else torch.ones_like(logits)
            z = z * alive[:, None]
            found = outputs(own, bx, z).flatten(0, 2)
            loss = cross_entropy(found, by.flatten(), reduction="sum") / batch.shape[-1]
            if gated:
                p = gates.open_probability(logits, RELAXATION) * alive[:, None]
                cross = -(p * logsigmoid(at_server) + (1 - p) * logsigmoid(-at_server))
                loss = loss + (price * (size + 1) * p + BETA * cross).sum()
            else:
                loss = loss + 0 * own_v.sum()
            slopes = torch.autograd.grad(loss, leaves)
            own = [(w - 0.05 * g).detach() for w, g in zip(own, slopes[:-1], strict=True)]
            (own_v,) = moving.step([own_v.detach()], [slopes[-1]])
        logits = level(own[0].norm(dim=-1), own_v)
        pi = torch.sigmoid(logits) * alive[:, None] if gated else torch.ones_like(logits)
        z = (torch.rand(pi.shape, generator=rng) < pi).float()
        for i in range(seeds):
            for place, client in enumerate(cohort[i].tolist()):
                rows = slice(i * count, (i + 1) * count)
                model = [w[rows, place] for w in own]
                last[i, client] = model, z[rows, place], (pi[rows, place] > 0.5).float()
        drift = [w[:, None] - o for w, o in zip(weights, own, strict=True)]
        drift[0], drift[1] = drift[0] * z[..., None], drift[1] * z
        weights = server.step(weights, [d.mean(1) for d in drift])
        weights[0], weights[1] = weights[0] * alive[..., None], weights[1] * alive
        if gated:
            theta, opened = torch.sigmoid(at_server[:, 0]), z.mean(1)
            norms = weights[0].norm(dim=-1)
            if scale == "logits":
                mean = torch.logit(theta + 0.2 * (opened - theta), eps=1e-6)
                v = threshold(norms, mean.clamp_max(START))
            else:
                down = (opened - theta) * torch.sigmoid(v) / heat
                (v,) = gate_server.step([v], [down])
            alive = alive & (torch.sigmoid(level(norms, v)) > 0.1)
            weights[0], weights[1] = weights[0] * alive[..., None], weights[1] * alive
            weights[2] = weights[2] * alive[:, None]
        if number % 10 == 0:
            curve.append(1 - alive.float().mean(1).view(seeds, count))

    def share(found: Tensor, right: Tensor) -> Tensor:
        return (found.argmax(-1) == right).float().mean(-1)

    union = outputs(weights, each(test_x.flatten(1, 2)), alive.float())
    accuracy = share(union, each(test_y.flatten(1))).view(seeds, count)
    local = torch.zeros(2, seeds, count)
    for (i, client), (model, *kinds) in last.items():
        heard = sum(1 for seed, _ in last if seed == i)
        for kind, z in enumerate(kinds):
            found = outputs(model, test_x[i, client], z)
            local[kind, i] += share(found, test_y[i, client]) / heard
    return Seen(curve[-1], accuracy, local[0], local[1], curve)


def said(values: Tensor) -> str:
    """Mean and deviation over seeds, by price."""
    deviations = values.std(0) if len(values) > 1 else torch.zeros(values.shape[1])
    pairs = zip(values.mean(0).tolist(), deviations.tolist(), strict=True)
    return " | ".join(f"{mean:.3f} ± {deviation:.3f}" for mean, deviation in pairs)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    average = run("none", (0.0,), options.seeds, options.rounds)
    print(f"FedAvg: global {said(average.accuracy)}, local {said(average.drawn)}", flush=True)
    for scale in HEAT:
        found = run(scale, PRICES, options.seeds, options.rounds)
        print(f"\n| {scale}, λ0 | " + " | ".join(f"{price:g}" for price in PRICES) + " |")
        print("| --- |" + " --- |" * len(PRICES))
        for name in ("sparsity", "accuracy", "drawn", "likely"):
            print(f"| {name} | {said(getattr(found, name))} |", flush=True)
        third = len(found.curve) // 3 - 1
        print(f"| sparsity after a third | {said(found.curve[third])} |", flush=True)
    for scale in HEAT:
        plain, raised = (run(scale, (1e-4,), options.seeds, options.rounds, t) for t in (1.0, 10.0))
        print(f"\n{scale}: λ0 = 1e-4 sparsity {said(plain.sparsity)}", end="; ")
        print(f"tenfold from midway {said(raised.sparsity)}", flush=True)


if __name__ == "__main__":
    main()
