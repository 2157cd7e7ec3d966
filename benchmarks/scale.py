"""What a round costs at the clients and at the server, by clients, numbers and reports, with fits.

    python benchmarks/scale.py [--engine sequential]

Networks are MLPs of digits with two layers of 16 to 1,600 units. Of every width it measures the
processor time of a client's work (one epoch of 40 rows in 2 batches) and of a report at the server,
at cohorts of 4 and 32, and the bytes of a report. `time = fixed + slope × parameters` is fitted by
least squares on relative errors. Then it computes, with the fits and measured bytes,

- a round of 1,000 of a million clients with the smallest network, on one core,
- a round of 100 reports of adapters with ten million parameters (of a network of 1 B, whose own
  passes are not in it), and
- the reports a second that one server takes from 100 nodes.

Nothing needs to be there beforehand. Times are of an idle machine only if it is idle.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from fedbayes import Config, Simulation
from fedbayes.federation.client_runtime import ClientRuntime

WIDTHS = (16, 64, 200, 600, 1600)
COHORTS = (4, 32)
ROUNDS = 6


def measured(width, cohort, engine):
    """Parameters, seconds of a client, seconds of a report at the server, bytes of a report."""
    spent = []
    train = {name: getattr(ClientRuntime, name) for name in ("train", "train_stacked")}

    def timed(name):
        def call(self, work):
            began = time.process_time()
            outcome = train[name](self, work)
            spent.append(time.process_time() - began)
            return outcome

        return call

    name = "train_stacked" if engine == "stacked" else "train"
    config = Config.published(
        rounds=10**6,
        engine=engine,
        cohort=cohort,
        evaluate_every=0,
        evaluate_local_every=0,
        checkpoint_every=10**6,
        training={"batch_size": 20},
        model={"hidden": [width, width]},
        data={"name": "digits", "clients": 32, "partition": "iid", "limit": 32 * 50},
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        Simulation(config, Path(folder) / "run") as simulation,
    ):
        setattr(ClientRuntime, name, timed(name))
        try:
            steps = iter(simulation)
            next(steps)
            clients, server = [], []
            for _ in range(ROUNDS):
                spent.clear()
                began = time.process_time()
                line = next(steps).metrics
                whole = time.process_time() - began
                clients.append(sum(spent) / cohort)
                server.append((whole - sum(spent)) / cohort)
        finally:
            setattr(ClientRuntime, name, train[name])
        numbers = sum(tensor.numel() for tensor in simulation.network.initial.values())
        return numbers, np.median(clients), np.median(server), line["bytes_up"] / cohort


def fitted(numbers, seconds):
    """Fixed seconds, seconds a parameter, and the largest relative error of the fit."""
    design = np.stack([np.ones(len(numbers)), numbers], 1) / seconds[:, None]
    (fixed, slope), *_ = np.linalg.lstsq(design, np.ones(len(numbers)), rcond=None)
    return fixed, slope, np.abs((fixed + slope * numbers) / seconds - 1).max()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engine", default="sequential", choices=("sequential", "stacked"))
    engine = parser.parse_args().engine
    print("parameters  cohort  client, ms  report at the server, ms  bytes of a report")
    fits = {}
    for cohort in COHORTS:
        rows = np.array([measured(width, cohort, engine) for width in WIDTHS])
        for numbers, client, server, sent in rows:
            print(
                f"{numbers:10,.0f} {cohort:7} {1e3 * client:11.2f} {1e3 * server:25.2f} "
                f"{sent:18,.0f}",
                flush=True,
            )
        fits[cohort] = [fitted(rows[:, 0], rows[:, column]) for column in (1, 2)]
        for what, (fixed, slope, error) in zip(("client", "report"), fits[cohort], strict=True):
            print(
                f"cohort {cohort}, {what}: {1e3 * fixed:.2f} ms + {1e9 * slope:.2f} ns a "
                f"parameter, at most {error:.0%} off"
            )
    (client, per_client, _), (report, per_report, _) = fits[max(COHORTS)]
    small = rows[0, 0]
    whole = 1000 * (client + report + small * (per_client + per_report))
    print(f"1,000 of a million clients, {small:,.0f} parameters, one core: {whole:.1f} s a round")
    adapters = report + 1e7 * per_report
    print(f"100 reports of 10,000,000 parameters: {100 * adapters:.1f} s and {4e9:.0e} bytes")
    print(f"reports a second from 100 nodes, {small:,.0f} parameters: {1 / report:.0f}")
    print(f"reports a second from 100 nodes, 10,000,000 parameters: {1 / adapters:.1f}")


if __name__ == "__main__":
    main()
