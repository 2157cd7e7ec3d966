"""What a training step costs under a method, in ratio to the plain one, timed side by side.

- FedSparse: a step on LeNet-5 (batch 64, CIFAR-10's shape) over FedAvg's step.
- VIRTUAL: a step of the server's network with 20 Monte-Carlo samples (two layers of 100, MNIST's
  shape, batch 64, flipout) over a deterministic step on a batch 20 times as large; and the same
  with the client's network and its lateral connections beside the server's.
- Mean-field posteriors (PVI, FedGVI, Bayesian ADMM): a step with one Monte-Carlo sample over a
  plain step, with the draw of its noise, on an MLP with a hidden layer of 200 (MNIST's shape) and
  on LeNet-5 (MNIST's and CIFAR-10's shapes), batch 256.
- Adam and AMSGrad as clients take them over PyTorch's plain loop, in a step of MLPs of two shapes.
- Prediction of 1,000 images, some at a time as networks do it, over all at once.
- Predictions under 20 draws from a posterior over one forward pass, for 1 and 1,000 rows.

    python benchmarks/step_speed.py
"""

import argparse
from collections.abc import Callable
from time import process_time

import torch
from torch import Tensor, nn

from fedbayes.contracts import AnyMethod, Federation, RoundContext
from fedbayes.contracts.drawn import sampler_of
from fedbayes.core.devices import choose_device
from fedbayes.core.targets import Target
from fedbayes.core.tensors import Samples
from fedbayes.data.preprocessing import Preprocessing
from fedbayes.inference.optimizers import Adam
from fedbayes.inference.settings import LocalTraining
from fedbayes.likelihoods import build_likelihood
from fedbayes.methods.fedavg import FedAvg
from fedbayes.methods.fedgvi import FedGvi
from fedbayes.methods.fedsparse import FedSparse
from fedbayes.methods.ivon_admm import IvonAdmm
from fedbayes.methods.pvi import Pvi
from fedbayes.methods.virtual import Virtual
from fedbayes.models import MLP, LeNet5, Network, ResNet20

DIGITS = build_likelihood("auto", Target("class", tuple("0123456789")))


def step(method: AnyMethod, network: Network, batch: Samples) -> Callable[[], None]:
    """One forward and backward pass of a client's first problem, its noise included."""
    shape = tuple(batch.x.shape[1:])
    seen = Preprocessing(shape, 1.0, (0.0,) * shape[0], (1.0,) * shape[0], DIGITS.target)
    settings = {"clients": 10, "cohort": 10, "rounds": 1, "seed": 0}
    run = Federation(network, seen, DIGITS, LocalTraining(), **settings)
    at = RoundContext(run, 1, 0, own_network=lambda: network)
    method.check(run)
    message = method.message(method.init(run), at)
    message = {name: item.to(network.device) for name, item in message.items()}
    problem, loss = method.problem(message, method.join(at), batch, at), method.loss(run)
    noise, rng = problem.noise, at.rng("noise")
    leaves = {n: t.clone().requires_grad_() for n, t in problem.start.items()}

    def once() -> None:
        drawn = noise.draw(rng, batch) if noise else {}
        value = loss(leaves, batch, problem.given, drawn)
        torch.autograd.grad(value, list(leaves.values()), allow_unused=True)

    return once


def samples(count: int, *shape: int) -> Samples:
    """Noise of this shape."""
    return Samples(torch.randn(count, *shape), torch.randint(10, (count,)))


def race(one: Callable[[], object], two: Callable[[], object], repeats: int) -> float:
    """Median over turns of the time of the processor that `one` takes over that of `two`."""
    ratios = []
    for _ in range(repeats + 2):
        times = []
        for run in (one, two):
            began = process_time()
            run()
            times.append(process_time() - began)
        ratios.append(times[0] / times[1])
    return float(torch.tensor(ratios[2:]).median())


def fedsparse(repeats: int) -> float:
    """FedSparse over FedAvg."""
    network = Network(LeNet5(3, 32, 32, 10), shape=(3, 32, 32))
    batch = samples(64, 3, 32, 32)
    return race(step(FedSparse(), network, batch), step(FedAvg(), network, batch), repeats)


class Lateral(nn.Module):
    """The server's and the client's network of VIRTUAL (Eq. 4), with single weights."""

    def __init__(self, server: MLP, own: MLP) -> None:
        super().__init__()
        self.server, self.own = server, own
        widths = [len(layer.weight) for layer in own if isinstance(layer, nn.Linear)]
        self.inner = nn.ModuleList(nn.Linear(width, width) for width in widths)
        self.outer = nn.ModuleList(nn.Linear(width, width, bias=False) for width in widths)
        self.gates = nn.ParameterList(0.1 * torch.rand(width) for width in widths)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the client."""
        h = a = x.flatten(1)
        pairs = [(s, c) for s, c in zip(self.server, self.own, strict=True) if hasattr(s, "weight")]
        for depth, (server, own) in enumerate(pairs):
            act = torch.relu if depth < len(pairs) - 1 else nn.Identity()
            h = act(server(h))
            side = self.outer[depth](act(self.inner[depth](h)))
            a = act(own(a) + self.gates[depth] * side)
        return a


def virtual(repeats: int, *, lateral: bool) -> float:
    """VIRTUAL over a deterministic step of the same networks on as many rows."""
    network = Network(MLP(784, [100, 100], 10))
    bayes = step(Virtual(samples=20, lateral=lateral), network, samples(64, 784))
    if lateral:
        network = Network(Lateral(MLP(784, [100, 100], 10), MLP(784, [100, 100], 10)))
    plain = step(FedAvg(), network, samples(64 * 20, 784))
    return race(bayes, plain, repeats)


MEAN_FIELD: dict[str, AnyMethod] = {
    "PVI": Pvi(),
    "PVI, Rényi": Pvi(divergence="renyi"),
    "FedGVI, gce": FedGvi(),
    "FedGVI, beta, Rényi": FedGvi(data_loss="beta", divergence="renyi"),
    "Bayesian ADMM": IvonAdmm(),
}


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP": (lambda: MLP(784, [200], 10), (784,)),
    "LeNet-5 of MNIST": (lambda: LeNet5(1, 28, 28, 10), (1, 28, 28)),
    "LeNet-5 of CIFAR-10": (lambda: LeNet5(3, 32, 32, 10), (3, 32, 32)),
}
"""How to make a network, and the shape of a sample."""


def mean_field(method: AnyMethod, repeats: int) -> list[float]:
    """A method with a Gaussian for each weight over FedAvg, on every network of `NETWORKS`."""
    ratios = []
    for make, shape in NETWORKS.values():
        network, batch = Network(make(), shape=shape), samples(256, *shape)
        plain = step(FedAvg(), network, batch)
        ratios.append(race(step(method, network, batch), plain, repeats))
    return ratios


def adam(sizes: list[int], *, amsgrad: bool, repeats: int) -> float:
    """A step of an MLP with the clients' Adam over one with PyTorch's, batch 32."""
    batch = samples(32, sizes[0])
    steps = []
    for fused in (True, False):
        module = MLP(sizes[0], sizes[1:], 10)
        leaves = list(module.parameters())
        optimizer = (
            Adam(leaves, 1e-3, 0.0, amsgrad)
            if fused
            else torch.optim.Adam(leaves, 1e-3, amsgrad=amsgrad, foreach=False)
        )

        def one(module=module, leaves=leaves, optimizer=optimizer) -> None:
            loss = nn.functional.cross_entropy(module(batch.x), batch.y)
            for leaf, gradient in zip(leaves, torch.autograd.grad(loss, leaves), strict=True):
                leaf.grad = gradient
            optimizer.step()

        steps.append(one)
    return race(steps[0], steps[1], repeats)


def prediction(module: nn.Module, repeats: int) -> float:
    """Images in portions over all at once."""
    network, x = Network(module.eval()), samples(1000, 3, 32, 32).x
    inputs = x.contiguous(memory_format=torch.channels_last)

    @torch.no_grad()
    def portions() -> None:
        network(network.initial, x)

    @torch.no_grad()
    def at_once() -> None:
        network.module(inputs)

    return race(portions, at_once, repeats)


def drawn(network: Network, shape: tuple[int, ...], rows: int, repeats: int) -> float:
    """Outputs under 20 draws over those of the mean."""
    mean = network.prepare(network.initial)
    std = {name: torch.full_like(tensor, 0.03) for name, tensor in mean.items()}
    sampler, x = sampler_of(mean, std, network, 20), samples(rows, *shape).x
    with torch.no_grad():
        return race(lambda: sampler(x), lambda: network(mean, x), repeats)


def main() -> None:
    """Time both and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=40)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    choose_device("cpu")  # with the allocator as every run has it
    print(f"FedSparse step / FedAvg step, LeNet-5: {fedsparse(repeats):.2f}")
    print(f"step of one Monte-Carlo sample / FedAvg step, {', '.join(NETWORKS)}:")
    for name, method in MEAN_FIELD.items():
        ratios = ", ".join(f"{ratio:.2f}" for ratio in mean_field(method, repeats))
        print(f"  {name}: {ratios} (aim 2.2)")
    print("step of Adam, of AMSGrad / PyTorch's plain loop:")
    for sizes in ([3072, 100, 100], [784, 100]):
        ratios = [adam(sizes, amsgrad=amsgrad, repeats=5 * repeats) for amsgrad in (False, True)]
        print(f"  MLP {'-'.join(map(str, sizes))}-10: {ratios[0]:.2f}, {ratios[1]:.2f}")
    few = max(1, repeats // 8)
    print("prediction of 1,000 images, some at a time / all at once:")
    print(f"  LeNet-5: {prediction(LeNet5(3, 32, 32, 10), few):.2f}")
    print(f"  ResNet-20: {prediction(ResNet20(3, 10), few):.2f}")
    print("prediction under 20 draws / one forward pass, 1 and 1,000 rows:")
    for name, (make, shape) in NETWORKS.items():
        network = Network(make(), shape=shape)
        one, many = (drawn(network, shape, rows, few) for rows in (1, 1000))
        print(f"  {name}: {one:.1f}, {many:.1f}")
    print("VIRTUAL step of 20 samples / step of the same on 20 times the batch:")
    print(f"  the server's network: {virtual(repeats, lateral=False):.2f} (aim 3)")
    print(f"  with the client's beside it: {virtual(repeats, lateral=True):.2f} (aim 3)")


if __name__ == "__main__":
    main()
