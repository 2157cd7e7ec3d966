"""fedbayes with the engine that the command line names."""

import sys
import tempfile

from side import Workload

from fedbayes import Config, Simulation


def settings(work, engine, rounds):
    own = {"workers": {"workers": 2}, "ray": {"ray": {"actors": 2}}}.get(engine, {})
    return Config.published(
        rounds=rounds,
        cohort=work.cohort,
        engine=engine,
        evaluate_every=0,
        evaluate_local_every=0,
        data_cache=512,
        training={"batch_size": work.batch_size, "lr": work.rate},
        model=work.model,
        data={**work.data, "partition": "iid"},
        **own,
    )


if __name__ == "__main__":
    work = Workload()
    with (
        tempfile.TemporaryDirectory() as folder,
        Simulation(settings(work, sys.argv[2], 10**6), f"{folder}/run") as simulation,
    ):
        names = list(simulation.network.initial)
        for step in simulation:
            weights, told = step.server.weights, step.metrics
            sent = told["bytes_down"] + told["bytes_up"]
            work.ended(lambda: [weights[name] for name in names], sent)  # noqa: B023
