"""Fusion in function space round after round, beside averaging: does it rise?

    python benchmarks/fusion_rounds.py digits --rounds 6
    python benchmarks/fusion_rounds.py cifar10-lenet --rounds 6     # hours

Every round all clients go on from the global network, and the server makes one of theirs:
`fedavg` (2 local epochs) averages; the others (8 local epochs) learn the clients' class-share
ensemble on drawn inputs, end to end, from the average of the clients' networks (`average`) or from
least squares (`least squares`); with the teacher's centred logits bounded by `BOUND` (`bounded`);
and with weights drawn half of the way back to the average after it (`halfway`). Printed are the
accuracies of the global network and of the ensemble that it learnt from, on all clients' test
samples. Needs nothing (digits), MNIST or CIFAR-10 (FEDBAYES_DATA, or the hub).
"""

import argparse
import tempfile

import torch
from torch.nn import functional

from fedbayes import Config, Simulation
from fedbayes.fusion.combining import combine
from fedbayes.fusion.distillation import distill
from fedbayes.fusion.draws import CachedInputs
from fedbayes.fusion.frozen import frozen
from fedbayes.fusion.function import FunctionSettings, fuse_functions, teacher_of
from fedbayes.fusion.seeking import Seeker
from fedbayes.fusion.settings import DistillationSettings, SeekingSettings
from fedbayes.fusion.teacher import Teacher
from fedbayes.inputs import Inputs, build_prior
from fedbayes.models.resize import with_weights

CASES = {
    "digits": ({"name": "digits"}, {"name": "mlp", "hidden": [100]}, 0.05),
    "mnist-mlp": ({"name": "mnist"}, {"name": "mlp", "hidden": [100, 100]}, 0.02),
    "cifar10-lenet": ({"name": "cifar10"}, {"name": "lenet5"}, 0.02),
}
WAYS = ("fedavg", "average", "least squares", "bounded", "halfway")
BOUND = 5.0
"""Of the teacher's centred logits, in nats."""


class Bounded(Teacher):
    """A teacher that is never surer than so many nats."""

    def of(self, outputs):
        """Its logits."""
        found = super().of(outputs)
        return (found - found.mean(-1, keepdim=True)).clamp(-BOUND, BOUND)


class FusionCase:
    """Clients of one case, who train from a network that they are sent."""

    def __init__(self, case, alpha, seed):
        data, model, self.lr = CASES[case]
        config = Config.published(
            data={**data, "clients": 10, "partition": "dirichlet", "alpha": alpha},
            model=model,
            seed=seed,
            rounds=1,
        )
        with tempfile.TemporaryDirectory() as folder, Simulation(config, folder) as simulation:
            self.like, found = simulation.network.module, simulation.data
            self.start = dict(simulation.network.initial)
            self.train = [found.train(client) for client in range(10)]
            self.test = found.test_union(0, found.test_total)
            self.counts, seen = found.counts(), found.preprocessing
        self.weights = (self.counts.sum(1) / self.counts.sum()).tolist()
        prior = build_prior("auto", seen.shape)
        self.draws = Inputs(prior, torch.tensor(seen.mean), torch.tensor(seen.std), seed)

    def local(self, weights, client, epochs, rng):
        """A client's network after so many epochs of SGD with momentum."""
        network = with_weights(self.like, weights).train()
        for parameter in network.parameters():
            parameter.requires_grad_(True)
        x, y = self.train[client]
        optimizer = torch.optim.SGD(network.parameters(), lr=self.lr, momentum=0.9)
        for _ in range(epochs):
            for rows in torch.randperm(len(y), generator=rng).split(32):
                optimizer.zero_grad()
                functional.cross_entropy(network(x[rows]), y[rows]).backward()
                optimizer.step()
        return network.eval()

    def accuracy(self, function):
        """On all clients' test samples."""
        with torch.no_grad():
            outputs = torch.cat([function(x) for x in self.test.x.split(1000)])
        return float((outputs.argmax(-1) == self.test.y).float().mean())

    def teacher(self, networks):
        """The ensemble of the clients' networks."""
        named = {str(client): network for client, network in enumerate(networks)}
        return teacher_of(named, self.counts, None)[0]

    def fused(self, way, networks, number, steps):
        """The global network of a round."""
        states = [dict(network.state_dict()) for network in networks]
        average = combine(states, self.weights)
        if way == "fedavg":
            return average
        settings = DistillationSettings(steps=steps, draws=8192)
        draws = Inputs(self.draws.prior, self.draws.mean, self.draws.std, 1000 * number)
        if way == "least squares":
            named = {str(client): network for client, network in enumerate(networks)}
            chosen = FunctionSettings(distillation=settings, seeking=SeekingSettings(share=0.7))
            fused = fuse_functions(named, self.like, draws, counts=self.counts, settings=chosen)
            return dict(fused.module.state_dict())
        teacher = self.teacher(networks)
        if way == "bounded":
            teacher = Bounded(networks, counts=self.counts)
        sought = CachedInputs(Seeker(CachedInputs(draws), teacher, SeekingSettings(share=0.7)))
        start = with_weights(self.like, average)
        learnt = dict(distill(start, teacher, sought, settings).module.state_dict())
        return combine([average, learnt], [0.5, 0.5]) if way == "halfway" else learnt


def main():
    """Print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--alpha", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=1500, help="of training end to end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    federation = FusionCase(given.case, given.alpha, given.seed)
    for way in given.ways:
        weights, rng = federation.start, torch.Generator().manual_seed(given.seed)
        told = []
        for number in range(1, given.rounds + 1):
            epochs = 2 if way == "fedavg" else 8
            networks = [federation.local(weights, client, epochs, rng) for client in range(10)]
            teacher = federation.teacher(networks)
            weights = federation.fused(way, networks, number, given.steps)
            globally = frozen(with_weights(federation.like, weights))
            told.append(f"{federation.accuracy(globally):.3f} ({federation.accuracy(teacher):.3f})")
        print(f"{way:14}", "  ".join(told), flush=True)


if __name__ == "__main__":
    main()
