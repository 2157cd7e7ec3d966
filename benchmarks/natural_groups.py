"""A mixed model of sensors that each see other data: `hierarchical` on the vehicle sensor network.

    python benchmarks/natural_groups.py

Two tables of logistic models over three splits of each sensor's rows into training and test: all
sensors, whose own posteriors predict; and sensors that took no part, a fifth at a time, with 0, 5
and 20 of their own rows. Metrics are over all test rows; inputs are standardized by the training
rows of all sensors. It needs `vehicle/vehicle.json` in the folder FEDBAYES_DATA.
"""

import argparse
import warnings
from dataclasses import replace

import torch

from fedbayes import Config, Simulation
from fedbayes.contracts import RoundContext, Sum
from fedbayes.core.tensors import Samples

OWN_ROWS = (0, 5, 20)
FOLDS = 5


def fitted(simulation, clients, rounds):
    """The population after rounds of these clients, and their private states."""
    method, run = simulation.method, replace(simulation.run, clients=len(clients))
    server = method.init(run)
    states = {k: method.join(RoundContext(run, 1, k)) for k in clients}
    for number in range(1, rounds + 1):
        reports = Sum()
        for client in clients:
            at = RoundContext(run, number, client)
            message, samples = method.message(server, at), simulation.data.train(client)
            report, states[client], _ = method.local(message, states[client], samples, at)
            reports.add(client, report)
        server, _ = method.update(server, reports, RoundContext(run, number))
    return server, states


def scores(simulation, models):
    """Accuracy and NLL over the test rows of all clients, each predicted by its own model."""
    run, right, nll, rows = simulation.run, 0.0, 0.0, 0
    for client, model in models.items():
        test = simulation.data.test(client)
        draws = simulation.method.draws(model, run)(test.x)
        predicted = run.likelihood.log_probabilities(draws)
        right += float((predicted.argmax(dim=1) == test.y).sum())
        nll -= float(predicted[torch.arange(len(test.y)), test.y].sum())
        rows += len(test.y)
    return right / rows, nll / rows


def everybody(simulation, rounds):
    """Scores of the sensors that took part."""
    method, run = simulation.method, simulation.run
    clients = range(simulation.data.clients)
    server, states = fitted(simulation, clients, rounds)
    message = method.message(server, RoundContext(run, rounds))
    models = {k: method.personal_model(message, None, states[k], run) for k in clients}
    return scores(simulation, models)


def newcomers(simulation, rounds):
    """Scores of sensors that took no part, by how many of their rows adapt the population."""
    method, run = simulation.method, simulation.run
    models = {own: {} for own in OWN_ROWS}
    for fold in range(FOLDS):
        held = range(fold, simulation.data.clients, FOLDS)
        others = [k for k in range(simulation.data.clients) if k not in held]
        server, _ = fitted(simulation, others, rounds)
        at = RoundContext(run, rounds + 1, len(others))
        message = method.message(server, at)
        for client in held:
            samples = simulation.data.train(client)
            for own in OWN_ROWS:
                rows = Samples(samples.x[:own], samples.y[:own])
                state = method.join(at)
                if own:
                    _, state, _ = method.local(message, state, rows, at)
                models[own][client] = method.personal_model(message, None, state, run)
    return {own: scores(simulation, found) for own, found in models.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--covariance", default="full", choices=["full", "diagonal", "low-rank"])
    parser.add_argument("--prior-std", type=float, default=0.3)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    found = {}
    for seed in given.seeds:
        config = Config.create(
            data={"name": "vehicle", "clients": 23},
            model={"hidden": []},
            method={
                "name": "hierarchical",
                "covariance": given.covariance,
                "prior_std": given.prior_std,
            },
            seed=seed,
        )
        with Simulation(config) as simulation:
            found.setdefault("took part", []).append(everybody(simulation, given.rounds))
            for own, score in newcomers(simulation, given.rounds).items():
                found.setdefault(f"new, {own} own rows", []).append(score)
    print("| sensors | accuracy | NLL |\n|---|---|---|")
    for name, values in found.items():
        accuracy, nll = (sum(column) / len(values) for column in zip(*values, strict=True))
        print(f"| {name} | {accuracy:.3f} | {nll:.3f} |", flush=True)


if __name__ == "__main__":
    main()
