"""Time per round of the `ray` engine beside `workers`, on one machine and on two local nodes.

    python benchmarks/ray_speed.py [mnist-mlp | cifar10-lenet] ...

The cases are those of `round_speed.py`: 100 clients, 10 a round, one epoch. Two workers, and two
actors: of a Ray of the run's own, then one on each of two nodes of a cluster, whose processes are
all on this machine. Rounds of both sides alternate, so that a noisy machine disturbs them alike;
medians are compared, by the clock and in seconds of processors, which tell more where others hold
these. How busy the machine was with other work is told too. Needs the data (FEDBAYES_DATA, or the
hub).
"""

import os
import statistics
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import psutil
from benchmarks.round_speed import CASES, settings, timed
from tests.helpers.ray_nodes import PATIENCE, Nodes

from fedbayes import Simulation

AIMS = {"one machine": 1.15, "two nodes": 1.2}


def processor():
    """Seconds of processors that this process and all that it started have had."""
    total, me = 0.0, psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def spent(side):
    """Seconds of a round, by the clock and of the processors."""
    before = processor()
    seconds = timed(lambda: next(side))
    return seconds, processor() - before


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
        both = [[spent(side) for side in sides] for _ in range(rounds + 1)]
    # The first round starts processes and warms both sides up.
    for number, what in enumerate(("seconds", "processor seconds")):
        workers, actors = (
            statistics.median(spent[number] for spent in side)
            for side in zip(*both[1:], strict=True)
        )
        print(
            f"{case:14} {place:12} {what:18} workers {workers:6.3f}  ray {actors:6.3f}"
            f"  ratio {actors / workers:.2f} (aim {AIMS[place]:.2f})"
            f"  load {os.getloadavg()[0]:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        for place in AIMS:
            compare(case, place)
