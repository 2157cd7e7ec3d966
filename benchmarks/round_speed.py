"""Time per round of the `workers` engine against a plain PyTorch loop, side by side.

    python benchmarks/round_speed.py [mnist-mlp | cifar10-lenet] ...

100 clients, 10 a round, one epoch of SGD; MNIST with an MLP of 100 units and batches of 32,
CIFAR-10 with LeNet-5 and batches of 64. Both sides train the same clients on the same samples
and try each client's model on its own test set; neither evaluates the global model. Rounds of
both alternate, so that a noisy machine disturbs them alike; the medians are compared. Needs the
data (FEDBAYES_DATA, or the hub).
"""

import copy
import statistics
import sys
import tempfile
import time

import torch
from torch.nn import functional

from fedbayes import Config, Simulation
from fedbayes.models import MLP, LeNet5
from fedbayes.runs.cohorts import sample_cohort

CASES = {
    "mnist-mlp": (
        {"data": {"name": "mnist"}, "model": {"name": "mlp", "hidden": [100]}},
        {"batch_size": 32, "lr": 0.05},
        {"float32": 0.70},
        15,
    ),
    "cifar10-lenet": (
        {"data": {"name": "cifar10"}, "model": {"name": "lenet5"}},
        {"batch_size": 64, "lr": 0.05},
        {"float32": 0.70, "bf16": 0.45},
        5,
    ),
}


def settings(case, precision, rounds):
    tables, training, _, _ = CASES[case]
    return Config.published(
        rounds=rounds,
        cohort=10,
        engine="workers",
        workers=2,
        evaluate_every=0,
        checkpoint_every=1,
        precision=precision,
        training=training,
        model=tables["model"],
        data={**tables["data"], "clients": 100, "partition": "iid"},
    )


class PlainLoop:
    """Federated averaging as one would write it in an afternoon, on all cores."""

    def __init__(self, simulation):
        config = simulation.config
        self.seed, self.training = config.seed, config.training
        convolutional = config.model.name == "lenet5"
        self.module = LeNet5(3, 32, 32, 10) if convolutional else MLP(784, [100], 10)
        self.module.load_state_dict(simulation.network.initial)
        data = simulation.data
        self.train = [data.train(client) for client in range(data.clients)]
        self.test = [data.test(client) for client in range(data.clients)]

    def round(self, number):
        total, samples = None, 0
        for client in sample_cohort(self.seed, number, len(self.train), 10):
            x, y = self.train[client]
            module = copy.deepcopy(self.module)
            optimizer = torch.optim.SGD(module.parameters(), lr=self.training.lr)
            order = torch.randperm(len(y))
            for start in range(0, len(y), self.training.batch_size):
                rows = order[start : start + self.training.batch_size]
                optimizer.zero_grad()
                functional.cross_entropy(module(x[rows]), y[rows]).backward()
                optimizer.step()
            with torch.no_grad():
                (module(self.test[client].x).argmax(1) == self.test[client].y).sum().item()
            weights = {name: t * len(y) for name, t in module.state_dict().items()}
            total = weights if total is None else {n: total[n] + t for n, t in weights.items()}
            samples += len(y)
        self.module.load_state_dict({name: t / samples for name, t in total.items()})


def timed(work):
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main(cases):
    cores = torch.get_num_threads()
    for case in cases:
        _, _, targets, rounds = CASES[case]
        for precision, target in targets.items():
            with (
                tempfile.TemporaryDirectory() as folder,
                Simulation(settings(case, precision, rounds + 2), f"{folder}/run") as simulation,
            ):
                torch.set_num_threads(cores)
                plain = PlainLoop(simulation)
                steps = iter(simulation)
                ours, theirs = [], []
                for number in range(1, rounds + 2):
                    torch.set_num_threads(cores)
                    theirs.append(timed(lambda: plain.round(number)))  # noqa: B023
                    torch.set_num_threads(1)
                    ours.append(timed(lambda: next(steps)))  # noqa: B023
                # The first round starts the workers and warms both sides up.
                here, there = statistics.median(ours[1:]), statistics.median(theirs[1:])
            print(
                f"{case:14} {precision:8} plain {there * 1e3:7.1f} ms  workers {here * 1e3:7.1f} ms"
                f"  ratio {here / there:.2f} (aim {target:.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:] or list(CASES))
