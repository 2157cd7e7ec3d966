"""QLSD: Langevin dynamics of the server, by gradients of clients in one byte a number."""

from typing import Any

import torch
from torch import Tensor

from fedbayes.contracts import (
    About,
    Federation,
    Info,
    Known,
    Method,
    Part,
    Problem,
    Report,
    ReportList,
    Reports,
    RoundContext,
    Solved,
    Stateless,
    sgd,
)
from fedbayes.contracts.chain import Chain, ChainServer
from fedbayes.contracts.needs import langevin, own_prior, weights_alone
from fedbayes.core.coding import STEPS, Coded, Int8
from fedbayes.core.fields import unused
from fedbayes.core.messages import Message, dense
from fedbayes.core.tensors import Samples, Tensors
from fedbayes.errors import MessageError
from fedbayes.inference.sampling import Langevin


def _typical(method: "Qlsd", server: ChainServer, run: Federation) -> float:
    """Steps of tensors whose largest slopes are `_SLOPE`."""
    return float(_SLOPE / STEPS * len(server.weights) ** 0.5)


class Qlsd(Chain, Method[ChainServer, Stateless, ReportList]):
    """Quantized Langevin stochastic dynamics (Vono et al. 2022, Algorithm 1).

    In a round client k sends the gradient g_k of its mean loss over all its rows, each number
    rounded at random to whole steps of max |g|/127: right on average (QSGD, Alistarh et al. 2017).
    The server takes a step

        w ← w − η [Σ r_k ĝ_k + w/(s² N)] + N(0, 2 η T/N),   r_k = n_k/Σ n_k,

    with N rows of all clients and η = `training.lr`: Langevin dynamics of the posterior under the
    prior N(0, s²), at the temperature T. A round is one step, so draws need hundreds of rounds.
    """

    name = "qlsd"
    about = About(
        "Langevin steps at the server with one-byte gradients",
        "Vono et al. 2022",
        needs=(langevin, own_prior, weights_alone),
    )
    server_state = ChainServer
    reports = Reports(
        {
            "code": Part(origin="zero", exact=True),
            "step": Part(origin="zero", exact=True, typical=_typical),
        },
        reduce="set",
        weighted=True,
    )

    def recommended(self, known: Known) -> dict[str, Any]:
        """A long step, and a temperature that lets the model fit the data."""
        return {
            **sgd(known, lr=0.7),
            "training.epochs": 1,
            "method.temperature": known.tempered(0.2),
        }

    def remarks(self, run: Federation) -> list[str]:
        """Settings of local steps, which there are none of."""
        why = f"a client of {self.name} sends one gradient of all its rows in a round"
        return unused(run.training, ("epochs", "steps"), why, "training.")

    def expected(self, message: Message, run: Federation) -> Message:
        """Whole numbers of steps, and the length of a step, by tensor."""
        sent = dense(message)
        codes: Message = {f"code/{n}": t.to(torch.int8) for n, t in sent.items()}
        return {**codes, **{f"step/{n}": torch.zeros(()) for n in sent}}

    def accept(self, server: ChainServer, report: Report, run: Federation) -> None:
        """Reject lengths below zero."""
        for name, t in dense(report.tensors).items():
            if name.startswith("step/") and float(t) < 0:
                raise MessageError(f"{name!r} is negative")

    def local(
        self, message: Message, client: Stateless, samples: Samples, at: RoundContext
    ) -> tuple[Report, Stateless, Info]:
        """Compute the gradient, and round it."""
        problem, loss = self.problem(message, client, samples, at), self.loss(at.run)
        start = {n: t.detach().clone().requires_grad_() for n, t in problem.start.items()}
        slopes = {n: torch.zeros_like(t) for n, t in problem.start.items()}
        total, count = 0.0, len(samples.y)
        for batch in samples.batches(at.run.training.batch_size):
            value = loss(start, batch, problem.given, {})
            share = len(batch.y) / count
            found = torch.autograd.grad(value, list(start.values()), allow_unused=True)
            for name, slope in zip(start, found, strict=True):
                if slope is not None:
                    slopes[name] += share * slope
            total += share * float(value.detach())
        return self.report(Solved(slopes, 1, total, count), problem, client, at)

    def report(
        self, solved: Solved, problem: Problem, client: Stateless, at: RoundContext
    ) -> tuple[Report, Stateless, Info]:
        """Report a gradient, which `solved` has as its parameters, in whole steps."""
        rng, tensors = at.rng("quantization"), Message()
        for name, slope in solved.parameters.items():
            coded, _ = Int8().write(slope.float().cpu().flatten(), rng)
            assert coded.step is not None
            tensors[f"code/{name}"] = coded.values.reshape(slope.shape)
            tensors[f"step/{name}"] = coded.step
        return Report(tensors, self.weight(solved)), client, solved.info

    def update(
        self, server: ChainServer, reports: ReportList, at: RoundContext
    ) -> tuple[ChainServer, Info]:
        """A step of Langevin dynamics, and a draw after burn-in."""
        found = [(dense(report.tensors), report.weight) for report in reports.reports.values()]
        rows = sum(weight for _, weight in found)
        whole = rows * at.run.clients / len(found)
        weights: Tensors = {}
        for name, w in server.weights.items():
            slope = sum(n / rows * _read(tensors, name) for tensors, n in found)
            slope = slope + w.double() / (self.prior_std**2 * whole)
            weights[name] = (w.double() - at.lr * slope).to(w.dtype)
        noise = Langevin(at.rng("langevin"), max(1, round(whole)), self.temperature)
        noise.add(weights, list(weights), at.lr)
        return self.kept(server, weights, at)

    def personal_model(
        self, message: Message, report: Report | None, client: Stateless, run: Federation
    ) -> Tensors | None:
        """None: clients train no network."""
        return None


def _read(tensors: Tensors, name: str) -> Tensor:
    """A gradient as it was sent, float64."""
    coded = Coded(tensors[f"code/{name}"].flatten(), tensors[f"step/{name}"].cpu())
    like = tensors[f"code/{name}"].shape
    return Int8().read(coded, coded.values.numel(), torch.Generator()).reshape(like).double()


_SLOPE = 20.0
"""Largest entry of a gradient by which steps are bounded where a cohort tells little."""
