"""Bytes and seconds to an accuracy, of FedAvg and FedSparse, with messages compressed and not.

    python benchmarks/compression.py                 # digits
    python benchmarks/compression.py --data mnist    # needs MNIST

20 clients by a Dirichlet(0.5) split, 5 of them a round, a network of two hidden layers, three
seeds, which are printed. Both methods take Adam's steps at the server. Of every run it counts the
encoded bytes, both ways, up to the first round whose global model has the accuracy; a row has the
means over the seeds that came to it, and how many these are. The best accuracy and the bytes of all
rounds are means over all seeds. Seconds are those of a simulated clock: clients send over a slow
link, and receive over a faster one.
"""

import argparse
import warnings
from statistics import mean

from fedbayes import Config, Simulation
from fedbayes.errors import FedbayesWarning

SEEDS = (0, 1, 2)
DATA = {
    "digits": {"hidden": [100, 100], "rounds": 80, "limit": None, "accuracy": 0.9},
    "mnist": {"hidden": [200, 200], "rounds": 60, "limit": 12_000, "accuracy": 0.93},
}
CLOCK = {
    "speeds": "log-normal",
    "spread": 0.5,
    "download": "10 Mbit/s",
    "upload": "100 kbit/s",
    "rate_spread": 0.5,
}
METHODS = {
    "fedavg (Adam at the server)": {"name": "fedadam", "server_lr": 0.01},
    "fedsparse": {"name": "fedsparse", "server_lr": 0.01, "l0": 1e-3, "gate_lr": 0.01},
}
MESSAGES = {
    "none": {},
    "bf16": {"up": "bf16", "down": "bf16"},
    "int8": {"up": "int8", "down": "bf16"},
    "top-k, 5 %": {"up": "top-k", "share": 0.05, "down": "bf16"},
    "top-k, 1 %": {"up": "top-k", "share": 0.01, "down": "bf16"},
}


def run(data, method, messages, seed):
    """Rounds, bytes up and down and seconds to the accuracy, or None; the best accuracy, and bytes
    of all rounds.
    """
    given = DATA[data]
    config = Config.published(
        seed=seed,
        rounds=given["rounds"],
        cohort=5,
        data={
            "name": data,
            "clients": 20,
            "partition": "dirichlet",
            "alpha": 0.5,
            "limit": given["limit"],
        },
        model={"hidden": given["hidden"]},
        method=method,
        compression=messages,
        clock=CLOCK,
    )
    up = down = best = 0
    reached = None
    with Simulation(config) as simulation:
        for step in simulation:
            up, down = up + step.metrics["bytes_up"], down + step.metrics["bytes_down"]
            best = max(best, step.metrics["global_accuracy"])
            if reached is None and step.metrics["global_accuracy"] >= given["accuracy"]:
                reached = step.number, up, down, step.metrics["clock_seconds"]
    return reached, best, (up, down)


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", choices=DATA, default="digits")
    data = parser.parse_args().data
    given = DATA[data]
    warnings.simplefilter("ignore", FedbayesWarning)
    print(f"{data}, {given['rounds']} rounds, seeds {', '.join(map(str, SEEDS))}\n")
    wanted = f"to {given['accuracy']:.2f}"
    print(
        f"| method | compression | rounds {wanted} | MB up | MB down | seconds | of | best "
        "| MB in all |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, method in METHODS.items():
        for label, messages in MESSAGES.items():
            found = [run(data, method, messages, seed) for seed in SEEDS]
            there = [reached for reached, _, _ in found if reached is not None]
            cells = ["–", "–", "–", "–"]
            if there:
                rounds, up, down, took = (mean(column) for column in zip(*there, strict=True))
                cells = [f"{rounds:.0f}", f"{up / 1e6:.2f}", f"{down / 1e6:.2f}", f"{took:.0f}"]
            cells += [f"{len(there)}/{len(SEEDS)}", f"{mean(best for _, best, _ in found):.3f}"]
            cells.append(f"{mean(sum(whole) for _, _, whole in found) / 1e6:.2f}")
            print(f"| {name} | {label} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
