"""FedL1 for longer than the EM paper trains: which units it has left out by when.

    python -m benchmarks.fedl1_long [--rounds 1500] [--cohort 2] [--seed 0]

LeNet-5 and the 100 clients of the paper's Table 1 on CIFAR-10, two clients a round in place of ten:
a unit without a gradient loses as much of its norm a round with two as with ten. Printed are the
units that each layer has lost, with the accuracy of the global model on the clients' test samples.
"""

import argparse
from pathlib import Path

import torch

from fedbayes.config.config import Config
from fedbayes.core.tensors import Tensors
from fedbayes.runs.simulation import Simulation
from fedbayes_papers.em_view import comparison_of
from fedbayes_papers.experiment import Request


def config(rounds: int, cohort: int, seed: int) -> Config:
    """FedL1's run of Table 1, with fewer clients a round and more rounds."""
    request = Request("fedl1-long", Path(), "small", ["cifar10"])
    own = comparison_of(request, "cifar10", ["FedL1"]).config("FedL1", seed)
    table = own.model_dump() | {"rounds": rounds, "cohort": cohort, "evaluate_every": rounds // 5}
    return Config.published(**table)


def lost(weights: Tensors) -> list[str]:
    """Of each layer how many of its units have no weight left, and of how many."""
    layers = [w for w in weights.values() if w.ndim > 1]
    gone = [int((w.flatten(1).norm(dim=1) == 0).sum()) for w in layers]
    return [f"{count} of {len(w)}" for count, w in zip(gone, layers, strict=True)]


def main() -> None:
    """Print a line each fifth of the rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--cohort", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.rounds < 5:
        parser.error("a line is printed each fifth of the rounds: --rounds is 5 at least")
    torch.set_num_threads(1)
    settings = config(given.rounds, given.cohort, given.seed)
    print("| round | global accuracy | sparsity | filters | filters | units | outputs |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with Simulation(settings) as simulation:
        for step in simulation:
            if step.number % (given.rounds // 5):
                continue
            model = simulation.method.model(step.server, simulation.run)
            metrics = step.metrics["metrics"]["global"]
            cells = [f"{metrics['accuracy']:.3f}", f"{step.metrics['sparsity']:.3f}", *lost(model)]
            print(f"| {step.number} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
