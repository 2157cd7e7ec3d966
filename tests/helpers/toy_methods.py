"""Methods that lean on every part of the contract that the averaging family does not need."""

import time
from dataclasses import dataclass

import torch

from fedbayes.contracts import (
    About,
    Method,
    Part,
    PointEstimate,
    Problem,
    Report,
    ReportList,
    Reports,
    Sum,
    Weights,
)
from fedbayes.core.messages import Masked, dense
from fedbayes.core.tensors import Tensors
from fedbayes.methods.fedavg import FedAvg


class Median(Method[Weights, Weights, ReportList]):
    """Gathers: the coordinate-wise median of the clients' weights."""

    name = "median"
    about = About("needs all reports at once")
    server_state = Weights
    reports = Reports(reduce="set")

    def init(self, run):
        return Weights(run.network.initial)

    def message(self, server, at):
        return dict(server.weights)

    def problem(self, message, client, samples, at):
        return Problem(dense(message))

    def report(self, solved, problem, client, at):
        return Report(dict(solved.parameters)), client, solved.info

    def update(self, server, reports, at):
        stacks = {
            name: torch.stack([dense(r.tensors)[name] for r in reports.reports.values()])
            for name in server.weights
        }
        return Weights({name: s.median(dim=0).values for name, s in stacks.items()}), {}

    def model(self, server, run):
        return server.weights

    def personal_model(self, message, report, client, run):
        return None if report is None else dense(report.tensors)


@dataclass(frozen=True)
class GrowingServer:
    """An MLP of one hidden layer whose width changes from round to round."""

    weights: Tensors
    rounds: int


@dataclass(frozen=True)
class Visits:
    """How often a client took part, and a tensor of its own."""

    count: int
    own: torch.Tensor


class Growing(Method[GrowingServer, Visits, ReportList]):
    """Messages differ per client, reports have other shapes, the global model grows.

    Client s gets the hidden units s, s + 1 and s + 2 of the global network; the server appends the
    first unit of the first report to its own, every round.
    """

    name = "growing"
    about = About("the shapes of matching methods, without their mathematics")
    server_state = GrowingServer
    client_state = Visits
    reports = Reports(reduce="set")

    def init(self, run):
        return GrowingServer(run.network.initial, 0)

    def join(self, at):
        return Visits(0, torch.rand(2, generator=at.rng("own")))

    def message(self, server, at):
        return columns(server.weights, slice(at.client, at.client + 3))

    def problem(self, message, client, samples, at):
        return Problem(dense(message))

    def report(self, solved, problem, client, at):
        info = {**solved.info, "visits": client.count + 1.0}
        return Report(dict(solved.parameters)), Visits(client.count + 1, client.own + 1), info

    def update(self, server, reports, at):
        first = dense(reports.reports[min(reports.reports)].tensors)
        unit = columns(first, slice(0, 1))
        weights = {
            "1.weight": torch.cat([server.weights["1.weight"], unit["1.weight"]]),
            "1.bias": torch.cat([server.weights["1.bias"], unit["1.bias"]]),
            "3.weight": torch.cat([server.weights["3.weight"], unit["3.weight"]], dim=1),
            "3.bias": first["3.bias"],
        }
        return GrowingServer(weights, server.rounds + 1), {"width": float(len(weights["1.bias"]))}

    def model(self, server, run):
        return server.weights

    def personal_model(self, message, report, client, run):
        return None if report is None else dense(report.tensors)


def columns(weights, units):
    return {
        "1.weight": weights["1.weight"][units].clone(),
        "1.bias": weights["1.bias"][units].clone(),
        "3.weight": weights["3.weight"][:, units].clone(),
        "3.bias": weights["3.bias"],
    }


@dataclass(frozen=True)
class Controls:
    """Weights and the sum of the clients' control variates."""

    weights: Tensors
    control: Tensors


@dataclass(frozen=True)
class Control:
    """A client's control variate."""

    control: Tensors


class Controlled(Method[Controls, Control, Sum]):
    """Private client state that must survive, and a report of two things that add."""

    name = "controlled"
    about = About("the state of SCAFFOLD")
    reports = Reports({"weights": Part(), "c": Part(origin="zero", tracked=True)})
    server_state = Controls
    client_state = Control

    def init(self, run):
        zeros = {name: torch.zeros_like(w) for name, w in run.network.initial.items()}
        return Controls(run.network.initial, zeros)

    def join(self, at):
        return Control({n: torch.zeros_like(w) for n, w in at.run.network.initial.items()})

    def message(self, server, at):
        controls = {f"c/{name}": c for name, c in server.control.items()}
        return {**server.weights, **controls}

    def problem(self, message, client, samples, at):
        return Problem({n: t for n, t in dense(message).items() if not n.startswith("c/")})

    def report(self, solved, problem, client, at):
        weights, start = solved.parameters, problem.start
        control = {n: client.control[n] + start[n] - weights[n] for n in weights}
        change = {f"c/{n}": control[n] - client.control[n] for n in control}
        return Report({**weights, **change}), Control(control), solved.info

    def update(self, server, reports, at):
        mean = reports.mean()
        weights = {name: mean[name] for name in server.weights}
        control = {
            name: c + reports.tensors[f"c/{name}"].float() for name, c in server.control.items()
        }
        return Controls(weights, control), {}

    def model(self, server, run):
        return server.weights

    def personal_model(self, message, report, client, run):
        if report is None:
            return None
        return {n: t for n, t in dense(report.tensors).items() if not n.startswith("c/")}


class HalfSilent(PointEstimate[Weights]):
    """Sparse both ways: half the hidden units are neither sent nor reported."""

    name = "half-silent"
    about = About("messages with masks")
    reports = Reports({"weights": Part(mask="sent")})
    server_state = Weights

    def init(self, run):
        return Weights(run.network.initial)

    def message(self, server, at):
        return halve(server.weights)

    def report(self, solved, problem, client, at):
        report, client, info = super().report(solved, problem, client, at)
        return Report(halve(dense(report.tensors)), report.weight), client, info

    def update(self, server, reports, at):
        return Weights(reports.mean()), {}


def halve(weights):
    keep = torch.arange(len(weights["1.bias"])) % 2 == 0
    return {
        "1.weight": Masked.keep(weights["1.weight"], {(0,): keep}),
        "1.bias": Masked.keep(weights["1.bias"], {(0,): keep}),
        "3.weight": Masked.keep(weights["3.weight"], {(1,): keep}),
        "3.bias": weights["3.bias"],
    }


class Straggler(FedAvg):
    """FedAvg of which one client takes its time in one round."""

    name = "straggler"
    about = About("one client is late")
    client: int = 2
    round: int = 1
    seconds: float = 60.0

    def local(self, message, client, samples, at):
        if (at.client, at.round) == (self.client, self.round):
            time.sleep(self.seconds)
        return super().local(message, client, samples, at)


class Capturing(FedAvg):
    """Its loss holds a tensor."""

    name = "capturing"

    def loss(self, run):
        likelihood, centre = super().loss(run), run.network.initial["1.weight"].clone()
        return lambda w, *rest: likelihood(w, *rest) + (w["1.weight"] - centre).square().sum()


class Remembering(FedAvg):
    """Its loss grows with every call."""

    name = "remembering"

    def loss(self, run):
        likelihood, calls = super().loss(run), []

        def loss(*arguments):
            calls.append(1)
            return likelihood(*arguments) + len(calls)

        return loss


class Meddling(FedAvg):
    """Its loss changes the parameters."""

    name = "meddling"

    def loss(self, run):
        likelihood = super().loss(run)

        def loss(parameters, *rest):
            value = likelihood(parameters, *rest)
            with torch.no_grad():
                parameters["1.bias"].add_(1)
            return value

        return loss


class Branching(FedAvg):
    """Its loss asks for the value of a tensor."""

    name = "branching"

    def loss(self, run):
        likelihood = super().loss(run)

        def loss(parameters, *rest):
            value = likelihood(parameters, *rest)
            return value if value > 0 else -value

        return loss


class Alone(Branching):
    """Solves by itself, one client after the other."""

    name = "alone"

    def local(self, message, client, samples, at):
        return super().local(message, client, samples, at)


class Curious(FedAvg):
    """Weights its report by a loss that it should only tell."""

    name = "curious"

    def report(self, solved, problem, client, at):
        report, client, info = super().report(solved, problem, client, at)
        return Report(report.tensors, 1 + abs(info["loss"])), client, info
