"""Time per round of the `workers` engine against pfl-research, side by side.

    python -m venv pfl && pfl/bin/pip install pfl
    python benchmarks/pfl_speed.py pfl/bin/python [mlp | lenet5 | cnn] ... [--rounds N]

Federated averaging with one epoch of SGD: MNIST with an MLP of 100 units (100 clients, 10 a round,
batches of 32), CIFAR-10 with LeNet-5 (likewise, batches of 64) and with the CNN of pfl's own
benchmarks (1,000 clients of 50 images, 50 a round, batches of 10). Both train as many clients on
the same samples with the same network. pfl has one process with as many threads as there are cores,
which is its way; `workers` has two processes with one thread each, and writes a checkpoint every
round. Neither evaluates anything. Both keep the samples of clients that they had before ready in
memory. Rounds of both alternate, so that a noisy machine disturbs them alike, and medians are
compared. Where other programs hold the cores, seconds say little: then the processor's time is what
to look at, of which `workers` uses two cores at once. Needs the data (FEDBAYES_DATA, or the hub).
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

CASES = {
    "mlp": {
        "data": {"name": "mnist", "clients": 100},
        "model": {"name": "mlp", "hidden": [100]},
        "cohort": 10,
        "batch_size": 32,
        "aims": {"float32": 0.60},
        "rounds": 30,
    },
    "lenet5": {
        "data": {"name": "cifar10", "clients": 100},
        "model": {"name": "lenet5"},
        "cohort": 10,
        "batch_size": 64,
        "aims": {"float32": 0.70, "bf16": 0.50},
        "rounds": 8,
    },
    "cnn": {
        "data": {"name": "cifar10", "clients": 1000},
        "model": {"name": "pfl_speed:cnn"},
        "cohort": 50,
        "batch_size": 10,
        "aims": {"float32": 0.75},
        "rounds": 4,
    },
}
RATE = 0.05


def cnn(shape, outputs):
    """The CNN of pfl's benchmarks on CIFAR-10."""
    pixels = ((shape[1] - 4) // 2) * ((shape[2] - 4) // 2)
    return nn.Sequential(
        nn.Conv2d(shape[0], 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * pixels, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, outputs),
    )


NETWORKS = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10)),
    "lenet5": lambda: nn.Sequential(
        nn.Conv2d(3, 20, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1250, 500),
        nn.ReLU(),
        nn.Linear(500, 10),
    ),
    "cnn": lambda: cnn((3, 32, 32), 10),
}
"""The same networks without fedbayes, which pfl's process has not."""


def federate(rounds, clients, network, begin, end):
    """pfl's side: calls `begin` before the first round, and `end` after every round until it is
    true. A client is its x and y, `rounds` a row of `CASES`.
    """
    import pfl.internal.ops.pytorch_ops  # noqa: F401  (chooses the framework)
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    network.loss = lambda x, y: nn.functional.cross_entropy(network.train()(x), y)
    network.metrics = lambda x, y: {}
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))

    def one(client):
        # In an order of its own in every round, as `workers` has them too.
        x, y = clients[client]
        order = torch.randperm(len(y))
        return PyTorchTensorDataset((x[order], y[order]), user_id=str(client))

    data = FederatedDataset(one, get_user_sampler("random", range(len(clients))))
    backend = SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()])
    parameters = NNAlgorithmParams(
        central_num_iterations=10**9,
        evaluation_frequency=10**9,
        train_cohort_size=rounds["cohort"],
        val_cohort_size=0,
    )
    training = NNTrainHyperParams(
        local_batch_size=rounds["batch_size"], local_num_epochs=1, local_learning_rate=RATE
    )

    class Turns(TrainingProcessCallback):
        def on_train_begin(self, *, model):
            begin()
            return Metrics()

        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            return end(), Metrics()

    FederatedAveraging().run(
        parameters, backend, model, training, callbacks=[Turns()], send_metrics_to_platform=False
    )


def serve(case, file):
    """pfl's side in a process of its own: a round for every line, answered by its seconds."""
    began = spent = 0.0

    def wait():
        nonlocal began, spent
        line = sys.stdin.readline()
        began, spent = time.perf_counter(), time.process_time()
        return not line

    def end():
        print(time.perf_counter() - began, time.process_time() - spent, flush=True)
        return wait()

    clients = torch.load(file)
    torch.manual_seed(0)
    federate(CASES[case], clients, NETWORKS[case](), wait, end)


def settings(case, precision, rounds):
    """Ours."""
    from fedbayes import Config

    return Config.published(
        rounds=rounds,
        cohort=CASES[case]["cohort"],
        engine="workers",
        workers=2,
        evaluate_every=0,
        evaluate_local_every=0,
        precision=precision,
        data_cache=512,
        training={"batch_size": CASES[case]["batch_size"], "lr": RATE},
        model=CASES[case]["model"],
        data={**CASES[case]["data"], "partition": "iid"},
    )


def race(python, case, precision, rounds, threads):
    """Seconds and processor seconds of the rounds of pfl and of ours, after one to warm up."""
    import psutil

    from fedbayes import Simulation

    with (
        tempfile.TemporaryDirectory() as folder,
        Simulation(settings(case, precision, rounds + 2), f"{folder}/run") as simulation,
    ):
        data = simulation.data
        torch.save([tuple(data.train(c)) for c in range(data.clients)], f"{folder}/clients")
        free = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "OMP_NUM_THREADS")}
        other = subprocess.Popen(
            [python, __file__, "--serve", case, f"{folder}/clients"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**free, "OMP_NUM_THREADS": str(threads)},
            text=True,
            bufsize=1,
        )
        steps, ours, theirs = iter(simulation), [], []
        processes = [psutil.Process(pid) for pid in simulation.engine.pids]
        for _ in range(rounds + 1):
            other.stdin.write("\n")
            theirs.append([float(text) for text in other.stdout.readline().split()])
            began, spent = time.perf_counter(), processor_seconds(processes)
            next(steps)
            ours.append([time.perf_counter() - began, processor_seconds(processes) - spent])
        other.stdin.close()
        other.wait()
    return theirs[1:], ours[1:]


def processor_seconds(processes):
    """What this process and others have used so far."""
    return time.process_time() + sum(sum(one.cpu_times()[:2]) for one in processes)


def main():
    """Race the cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python", help="of an environment with pfl")
    parser.add_argument("cases", nargs="*", help="which, of all")
    parser.add_argument("--rounds", type=int, help="in place of each case's own number")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of pfl's process")
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    for case in arguments.cases or CASES:
        for precision, aim in CASES[case]["aims"].items():
            rounds = arguments.rounds or CASES[case]["rounds"]
            theirs, ours = race(arguments.python, case, precision, rounds, arguments.threads)
            (there, spent_there), (here, spent_here) = (
                [statistics.median(column) * 1e3 for column in zip(*rows, strict=True)]
                for rows in (theirs, ours)
            )
            print(
                f"{case:7} {precision:8} pfl {there:7.1f} ms  workers {here:7.1f} ms"
                f"  ratio {here / there:.2f} (aim {aim:.2f}); of the processor pfl"
                f" {spent_there:7.1f} ms  workers {spent_here:7.1f} ms"
                f"  ratio {spent_here / spent_there:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
    else:
        main()
