"""SCAFFOLD: control variates that take the clients' drift out of their gradients."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedbayes.contracts import (
    UNIFORM,
    About,
    Federation,
    Info,
    Loss,
    Problem,
    Report,
    RoundContext,
    Solved,
    Sum,
    Tree,
    nll,
)
from fedbayes.contracts.needs import sum_of_gradients, where
from fedbayes.contracts.variates import Control, ControlVariateMethod, nobody
from fedbayes.core.messages import Message, dense
from fedbayes.core.tensors import Samples, Tensors, named, part
from fedbayes.inference.controls import (
    NORMS,
    along_path,
    bounded,
    corrected,
    mean_gradient,
    no_norms,
    zeros,
)
from fedbayes.inference.optimizers import ServerOptimizer


@dataclass(frozen=True)
class ScaffoldServer:
    """The weights, the federation's control variate, and the optimizer state."""

    weights: Tensors
    buffers: Tensors
    control: Tensors
    """c, like the weights."""
    optimizer: Tensors
    """State of the server's optimizer."""
    norms: Tensor = field(default_factory=no_norms)
    """Distribution function of the norms of the last round's variates; zeros where unknown."""
    heard: Tensor = field(default_factory=nobody)
    """Of all reports so far, the sum of their weights and their number, float64 [2]."""


class Scaffold(ServerOptimizer, ControlVariateMethod[ScaffoldServer]):
    """Stochastic controlled averaging.

    A client adds c − c_s to every gradient, a linear term ⟨c − c_s, φ⟩ of its loss, and then
    renews c_s: by the mean of its gradients on the way (`path`, option II of the paper) or by
    its gradient at the server's weights (`gradient`, option I). The server moves w by the mean
    of the clients' changes, and c by their share of all clients, Σ n_s Δc_s / Σ n_s, so that c
    remains the mean of the c_s. Twice the bytes of FedAvg. In the papers all clients weigh alike
    (`weighting = "uniform"`).

    On deep networks c_s is a whole gradient of long ago, and the correction can blow up, one client
    first: such clients are named. With `variate_bound` a client shortens its c_s to a multiple of
    the median norm of the last round's, which is not in the papers.
    """

    name = "scaffold"
    about = About(
        "gradients corrected by control variates",
        "Karimireddy et al. 2020; Louizos et al. 2021, appendix E",
        published=UNIFORM,
        needs=(where("control", "path", need=sum_of_gradients),),
    )
    server_state = ScaffoldServer

    control: Literal["path", "gradient"] = Field(
        "path", description="update of c_s: path (option II, plain SGD) or gradient (option I)"
    )

    def init(self, run: Federation) -> ScaffoldServer:
        """The network's initialization, with a control variate of zero."""
        weights, buffers = run.network.split()
        return ScaffoldServer(weights, buffers, zeros(weights), {})

    def message(self, server: ScaffoldServer, at: RoundContext) -> Message:
        """Weights, buffers and the control variate, the same to all."""
        norms = {} if self.variate_bound is None else {NORMS: server.norms}
        return {**server.weights, **server.buffers, **named("control", server.control), **norms}

    def loss(self, run: Federation) -> Loss:
        """The negative log-likelihood plus ⟨c − c_s, φ⟩."""
        return corrected(nll(run))

    def problem(
        self, message: Message, client: Control, samples: Samples, at: RoundContext
    ) -> Problem:
        """Train from the server's weights with corrected gradients."""
        run, sent = at.run, dense(message)
        common = part(sent, "control")
        start = run.network.prepare({n: t for n, t in sent.items() if n in run.network.initial})
        correction = {n: self.damping * (common[n] - own) for n, own in client.control.items()}
        given: Tree = {"correction": run.network.prepare(correction)}
        if self.variate_bound is not None:
            given["norms"] = sent[NORMS]
        if self.control == "gradient":
            sizes = run.training.batch_sizes(len(samples.y), all_samples=True)
            given["gradient"] = mean_gradient(start, nll(run), samples, sizes, list(common))
        return Problem(start, given=given)

    def report(
        self, solved: Solved, problem: Problem, client: Control, at: RoundContext
    ) -> tuple[Report, Control, Info]:
        """Report the weights and the change of c_s."""
        if self.control == "path":
            own = along_path(problem, solved, lr=at.lr)
        else:
            own = problem.given["gradient"]
        norms, info = Tensors(), dict(solved.info)
        if self.variate_bound is not None:
            own, found, said = bounded(own, self.variate_bound, problem.given["norms"])
            norms, info = {NORMS: found}, info | said
        change = {n: own[n] - client.control[n] for n in own}
        if at.run.clips:  # what is kept is what the server adds: c remains the mean of the c_s
            change = at.run.clips.shortened("control", change)
            own = {n: c + change[n] for n, c in client.control.items()}
        return (
            Report({**solved.parameters, **named("control", change), **norms}, self.weight(solved)),
            Control(own),
            info,
        )

    def update(
        self, server: ScaffoldServer, reports: Sum, at: RoundContext
    ) -> tuple[ScaffoldServer, Info]:
        """A step of the server's optimizer on w; c moves by the clients' changes of c_s."""
        mean = reports.mean()
        drift = {name: w - mean[name] for name, w in server.weights.items()}
        factor = self.server_factor(at.round, at.run.rounds)
        weights, optimizer = self.server_step(server.weights, drift, server.optimizer, factor)
        control, heard = self.control_after(server, reports, at.run)
        buffers = {name: mean[name] for name in server.buffers}
        length = torch.stack([c.norm() for c in control.values()]).norm()
        norms = mean.get(NORMS, server.norms)
        after = ScaffoldServer(weights, buffers, control, optimizer, norms, heard)
        return after, {"control_norm": float(length)}
