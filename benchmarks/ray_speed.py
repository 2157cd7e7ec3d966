"""Time per round of the `ray` engine beside `workers`, on one machine and on two local nodes.

    python benchmarks/ray_speed.py [mnist-mlp | cifar10-lenet] ...

The cases are those of `round_speed.py`: 100 clients, 10 a round, one epoch. Two workers, and two
actors: of a Ray of the run's own, then one on each of two nodes of a cluster, whose processes are
all on this machine. Rounds of both sides alternate, so that a noisy machine disturbs them alike;
medians are compared. How busy the machine was with other work is told too. Needs the data
(FEDBAYES_DATA, or the hub).
"""

import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.round_speed import CASES, settings, timed
from tests.ray_nodes import PATIENCE, Nodes

from fedbayes import Simulation

AIMS = {"one machine": 1.15, "two nodes": 1.2}


def compare(case, place):
    rounds = CASES[case][3]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        table = {"actors": 2, "address": "local", "start_timeout": PATIENCE}
        if place == "two nodes":
            nodes = stack.enter_context(Nodes(cpus=1))
            nodes.add(cpus=1)
            os.environ |= nodes.variables
            table["address"] = nodes.address
        config = settings(case, "float32", rounds + 2)
        on_ray = type(config).create(**{**config.model_dump(), "engine": "ray", "ray": table})
        sides = [
            iter(stack.enter_context(Simulation(one, Path(folder) / one.engine)))
            for one in (config, on_ray)
        ]
        times = [[timed(lambda: next(side)) for side in sides] for _ in range(rounds + 1)]  # noqa: B023
    # The first round starts processes and warms both sides up.
    workers, actors = (statistics.median(one) for one in zip(*times[1:], strict=True))
    print(
        f"{case:14} {place:12} workers {workers * 1e3:7.1f} ms  ray {actors * 1e3:7.1f} ms"
        f"  ratio {actors / workers:.2f} (aim {AIMS[place]:.2f})  load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        for place in AIMS:
            compare(case, place)
