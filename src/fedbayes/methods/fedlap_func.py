"""FedLap in function space: clients tell predictions at inputs that a prior draws."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from fedbayes.contracts import (
    About,
    Federation,
    Info,
    Known,
    Loss,
    Method,
    Noise,
    Part,
    Problem,
    Report,
    Reports,
    RoundContext,
    Solved,
    Sum,
    Tree,
    adam,
    nll,
)
from fedbayes.contracts.changes import norm
from fedbayes.contracts.drawn import own_prior, weights_alone
from fedbayes.contracts.moments import implicit
from fedbayes.contracts.natural import KNOWN_STD, few_rounds
from fedbayes.contracts.parts import Retract
from fedbayes.core.fields import Chosen, Tuned
from fedbayes.core.messages import Message, dense
from fedbayes.core.tensors import Samples, Tensors, named, part
from fedbayes.errors import MessageError
from fedbayes.fusion.curvature import require_curvature
from fedbayes.fusion.rounds import check_inputs, draws_of_round, input_remarks
from fedbayes.inference.problem import Projection
from fedbayes.likelihoods import Classes, Parametric


@dataclass(frozen=True)
class Duals:
    """What a client reported so far, float64; at the server, the sums over clients.

    Without tensors before a client's first report.
    """

    shift: Tensors = field(default_factory=dict)
    """u_k by weight."""
    label: Tensors = field(default_factory=dict)
    """`means`, a_k times the predicted means [inputs, columns], and `rows`, a_k."""


@dataclass(frozen=True)
class FunctionServer:
    """The server's state."""

    weights: Tensors
    """w_g."""
    duals: Duals
    """Their sums."""


def _retracted(key: str) -> Retract:
    """Take back what did not arrive of a part of the duals."""

    def retract(client: Duals, missed: Tensors) -> Duals:
        kept: Tensors = getattr(client, key)
        after = {n: t - missed[n].to(t) if n in missed else t for n, t in kept.items()}
        return replace(client, **{key: after})

    return retract


def _typical_shift(method: "FedLapFunc", server: FunctionServer, run: Federation) -> float:
    """The norm of all shifts, or that a newcomer's data may well say."""
    began = norm(w.double() for w in run.network.initial.values())
    return max(norm(server.duals.shift.values()), KNOWN_STD**-2 * began)


def _typical_label(method: "FedLapFunc", server: FunctionServer, run: Federation) -> float:
    """The norm of all labels, or that of a client of a hundred rows."""
    each: float = method.strength * 100 / method.kl_weight * method.points**0.5
    return max(norm(server.duals.label.values()), each)


class FedLapFunc(Method[FunctionServer, Duals, Sum]):
    """FedLap with terms in function space (Swaroop, Khan and Doshi-Velez 2025, FedLap-Func).

    The others know a client's loss, tempered by T, up to a constant as

        −u_kᵀw + a_k mean_j D(μ_k(x_j) ‖ μ_w(x_j)),   a_k = τ n_k/T,

    with soft labels μ_k, its predicted means at inputs x_j. The paper has rows of clients there.
    Here a prior draws them, by a seed that all share. D is the KL divergence of classes and labels,
    of numbers the squared error over twice the variance at w_g. Sums of a_k μ_k and of a_k say all
    that others need. A round is

        w_k = argmin ℓ_k(w)/T + δ/2 ‖w‖² − (U − u_k)ᵀw + the others' terms D,

    u_k ← that gradient without ℓ_k's at w_k, plus u_k, μ_k ← μ(w_k), both damped by ρ, and

        w_g = argmin δ/2 ‖w‖² − Uᵀw + Σ_k a_k mean_j D(μ_k ‖ μ_w),   U = Σ u_k.

    Where all agree, terms D have no gradient: δ w_g = −Σ ∇ℓ_k(w_g)/T, whatever inputs and τ are.
    With τ = 0 this is FedLap without covariances. The server's weights tell U, as their gradient
    is 0.
    """

    name = "fedlap-func"
    about = About(
        "FedLap with predictions at synthetic inputs",
        "Swaroop, Khan and Doshi 2025",
        needs=(weights_alone, own_prior),
    )
    server_state = FunctionServer
    client_state = Duals
    reports = Reports(
        {
            "shift": Part(
                origin="zero",
                tracked=True,
                retract=_retracted("shift"),
                range=65536.0,
                typical=_typical_shift,
            ),
            "label": Part(
                origin="zero",
                tracked=True,
                retract=_retracted("label"),
                range=65536.0,
                typical=_typical_label,
            ),
        }
    )

    prior_std: Annotated[float, Chosen()] = Field(
        1.0, gt=0, description="standard deviation of the prior, δ^(−1/2)"
    )
    kl_weight: Annotated[float, Chosen(), Tuned(times=30)] = Field(
        1.0,
        gt=0,
        description="T of the tempered likelihood p(D_k | w)^(1/T). 1: the posterior. A smaller "
        "value gives the data more weight",
    )
    damping: float | None = Field(
        None,
        gt=0,
        le=1,
        description="ρ, share of a change that a round applies. none: 1 / number of clients of "
        "the round",
    )
    inputs: str = Field(
        "auto",
        description="inputs that predictions are told at: auto (synthetic, by their shape), "
        "leaves, strokes, noise, gaussian, package.module:function, or a folder or file of public "
        "samples that the server and all clients have",
    )
    points: int = Field(200, ge=1, description="number of inputs that predictions are told at")
    strength: Annotated[float, Tuned(times=10)] = Field(
        1.0, ge=0, description="τ, weight of a client's predictions, relative to that of its rows"
    )

    def recommended(self, known: Known) -> dict[str, Any]:
        """As for FedLap."""
        return {**adam(known, lr=0.003), "method.kl_weight": known.tempered(0.06)}

    def check(self, run: Federation) -> None:
        """Predictions have a distribution, and inputs can be drawn.

        Raises:
            ConfigError: they have none, or inputs cannot.
        """
        require_curvature(run.likelihood)
        check_inputs(self.name, self.inputs, run)

    def remarks(self, run: Federation) -> list[str]:
        """What inputs are taken for, and a note if clients take part in few rounds."""
        return [*few_rounds(self.name, run), *input_remarks(self.name, self.inputs, run)]

    @property
    def delta(self) -> float:
        """δ, the prior's precision."""
        return self.prior_std**-2

    def init(self, run: Federation) -> FunctionServer:
        """The mode of the prior; nobody told anything."""
        zero = {n: torch.zeros_like(w, dtype=torch.float64) for n, w in run.network.initial.items()}
        columns = run.likelihood.mean(run.network(run.network.initial, self._x(run)[:1])[None])
        means = torch.zeros(self.points, columns.shape[1], dtype=torch.float64)
        rows = torch.zeros((), dtype=torch.float64)
        return FunctionServer(zero, Duals(zero, {"means": means, "rows": rows}))

    def message(self, server: FunctionServer, at: RoundContext) -> Message:
        """The weights, and the sum of the labels; the same to all."""
        found = named("mean", server.weights) | named("label", server.duals.label)
        return {name: t.float() for name, t in found.items()}

    def expected(self, message: Message, run: Federation) -> Message:
        """Changes of the client's duals."""
        return {**named("shift", part(message, "mean")), **named("label", part(message, "label"))}

    def _x(self, run: Federation) -> Tensor:
        """The inputs, [points, *shape], the same everywhere and in all rounds."""
        return draws_of_round(self.inputs, RoundContext(run, 0)).batch(0, self.points)

    def problem(
        self, message: Message, client: Duals, samples: Samples, at: RoundContext
    ) -> Problem:
        """Descend the loss and what the others told, from w_g."""
        run, device = at.run, at.run.network.device
        came = {name: t.to(device) for name, t in dense(message).items()}
        w, sums = part(came, "mean"), part(came, "label")
        sums = {name: t.double() for name, t in sums.items()}
        learnt = bool(sums["rows"] > 0) or any(bool(t.any()) for t in w.values())
        initial = run.network.initial
        start = {n: t.to(initial[n].dtype) for n, t in w.items()} if learnt else initial
        start = run.network.prepare(start)
        others = {n: t - client.label[n].to(t) if client.label else t for n, t in sums.items()}
        place = self._place(start, run)
        slope = _slope(_terms(sums, place, run), start, run)
        shift = {n: self.delta * t.double() + slope[n] for n, t in w.items()}
        rest = {n: t - client.shift[n].to(t) if client.shift else t for n, t in shift.items()}
        terms = _terms(others, place, run)
        given: Tree = {
            "centre": {n: (t / self.delta).to(start[n]) for n, t in rest.items()},
            "count": torch.tensor(len(samples.y), device=device),
            "terms": terms,
            "shift": shift,
        }
        size = min(self.points, run.training.batch_size)
        noise = Noise(
            "points",
            lambda rng, batch: {
                "points": torch.randint(self.points, (size,), generator=rng).to(device)
            },
        )
        project = self._pulled(run.training.momentum) if implicit(run) else None
        return Problem(start, given=given, noise=noise, project=project)

    def _place(self, weights: Tensors, run: Federation) -> Tree:
        """Inputs, and there the variance of numbers under these weights, [points, columns]."""
        x, likelihood = self._x(run).to(run.network.device), run.likelihood
        if not isinstance(likelihood, Parametric):
            return {"x": x, "variance": torch.ones(len(x), 1, device=x.device)}
        with torch.no_grad():
            return {"x": x, "variance": likelihood.moments(run.network(weights, x))[1]}

    def _pulled(self, momentum: float) -> Projection:
        """What follows a step of SGD: an implicit one along the quadratic, stable at any rate."""

        def project(parameters: Tensors, given: Tree, lr: float) -> None:
            a = lr / (1 - momentum) * self.kl_weight / given["count"] * self.delta
            for name, centre in given["centre"].items():
                parameters[name].add_(a * centre).div_(1 + a)

        return project

    def loss(self, run: Federation) -> Loss:
        """The energy per sample, times T; under SGD without the quadratic, whose steps follow."""
        likelihood, apart = nll(run), implicit(run)

        def loss(parameters: Tensors, batch: Samples, given: Tree, noise: Tree) -> Tensor:
            energy = _energy(given["terms"], parameters, run, noise["points"])
            if not apart:
                centre = given["centre"]
                squares = [(parameters[n] - c).square().sum() for n, c in centre.items()]
                energy = energy + self.delta / 2 * torch.stack(squares).sum()
            fit = likelihood(parameters, batch, given, noise)
            total: Tensor = fit + self.kl_weight / given["count"] * energy.to(fit)
            return total

        return loss

    def report(
        self, solved: Solved, problem: Problem, client: Duals, at: RoundContext
    ) -> tuple[Report, Duals, Info]:
        """Report the damped change of the duals; keep the duals with that change."""
        run, given, w = at.run, problem.given, solved.parameters
        rho = self.damping or 1 / run.cohort
        slope = _slope(given["terms"], w, run)
        change = {
            n: rho * (self.delta * w[n].double() + slope[n] - t) for n, t in given["shift"].items()
        }
        with torch.no_grad():
            means = run.likelihood.mean(run.network(w, given["terms"]["x"])[None]).double()
        rows = torch.full_like(means[0, 0], self.strength * float(given["count"]) / self.kl_weight)
        own = {"means": rows * means, "rows": rows}
        label = {
            n: rho * (t - client.label[n].to(t) if client.label else t) for n, t in own.items()
        }
        told = {"shift": named("shift", change), "label": named("label", label)}
        sent: Message = {}
        for key, tensors in told.items():
            sent |= run.clips.shortened(key, {n: t.float() for n, t in tensors.items()})
        after = {
            key: {
                n: t.double() + (getattr(client, key)[n].to(t.device) if client.shift else 0.0)
                for n, t in part(dense(sent), key).items()
            }
            for key in told
        }
        return Report(sent), Duals(**after), solved.info

    def accept(self, server: FunctionServer, report: Report, run: Federation) -> None:
        """What is added leaves the weight of all labels positive.

        Raises:
            MessageError: it does not.
        """
        before, change = server.duals.label["rows"], dense(report.tensors)["label/rows"]
        if float(before + change) < -1e-4 * (1 + float(before)):
            raise MessageError("it takes more weight off the labels than they have")

    def update(
        self, server: FunctionServer, reports: Sum, at: RoundContext
    ) -> tuple[FunctionServer, Info]:
        """Add to the duals, and find the weights that fit them."""
        duals = _added(server.duals, reports.tensors, 1.0)
        return self._fitted(server, duals, at.run)

    def forget(self, server: FunctionServer, client: Duals, run: Federation) -> FunctionServer:
        """Subtract the client's duals, and find the weights that fit the others'."""
        told = {**named("shift", client.shift), **named("label", client.label)}
        return self._fitted(server, _added(server.duals, told, -1.0), run)[0]

    def _fitted(
        self, server: FunctionServer, duals: Duals, run: Federation
    ) -> tuple[FunctionServer, Info]:
        """The least δ/2 ‖w‖² − Uᵀw + Σ a_k mean_j D(μ_k ‖ μ_w), from the weights before."""
        network, device = run.network, run.network.device
        free = {n: t / self.delta for n, t in duals.shift.items()}  # without labels
        heard = bool(server.duals.label["rows"] > 0)
        like = network.initial
        start = {n: t.to(like[n].dtype) for n, t in (server.weights if heard else free).items()}
        start = network.prepare(start)
        terms = _terms(
            {n: t.to(device) for n, t in duals.label.items()}, self._place(start, run), run
        )
        if not float(terms["rows"]) > 0:
            return FunctionServer(free, duals), {}
        centre = {n: t.to(device) for n, t in free.items()}
        w = {n: t.clone().requires_grad_() for n, t in start.items()}
        optimizer = torch.optim.LBFGS(
            list(w.values()),
            max_iter=_STEPS,
            history_size=20,
            line_search_fn="strong_wolfe",
            tolerance_grad=1e-9,
            tolerance_change=1e-12,
        )
        scale = 1 / (self.delta + float(terms["rows"]))

        def closure() -> Tensor:
            optimizer.zero_grad()
            apart = [(t.double() - centre[n]).square().sum() for n, t in w.items()]
            energy = scale * (_energy(terms, w, run) + self.delta / 2 * torch.stack(apart).sum())
            energy.backward()
            return energy

        optimizer.step(closure)
        found = {n: t.detach().cpu().double() for n, t in w.items()}
        return FunctionServer(found, duals), {"label_weight": float(duals.label["rows"])}

    def model(self, server: FunctionServer, run: Federation) -> Tensors:
        """The weights; the initialization before anybody told anything."""
        if not any(bool(t.any()) for t in server.weights.values()):
            return run.network.initial
        return {n: t.to(run.network.initial[n].dtype) for n, t in server.weights.items()}

    def personal_model(
        self, message: Message, report: Report | None, client: Duals, run: Federation
    ) -> None:
        """Clients have none."""


def _terms(label: Tensors, place: Tree, run: Federation) -> Tree:
    """What labels say: inputs, their `means` and `variance`, and the weight `rows` of all."""
    rows, sums = label["rows"].clamp_min(0), label["means"]
    if isinstance(run.likelihood, Classes):
        sums = sums.clamp_min(0)
        means = sums / sums.sum(dim=1, keepdim=True).clamp_min(_LEAST)
    else:
        means = sums / rows.clamp_min(_LEAST)
        if not isinstance(run.likelihood, Parametric):
            means = means.clamp(0, 1)
    return {**place, "means": means, "rows": rows}


def _energy(terms: Tree, weights: Tensors, run: Federation, points: Tensor | None = None) -> Tensor:
    """`rows` times the mean over inputs of D, float64; over some of them, by number."""
    x, means, variance = terms["x"], terms["means"], terms["variance"]
    if points is not None:
        x, means, variance = x[points], means[points], variance[points]
    f, likelihood = run.network(weights, x).double(), run.likelihood
    if isinstance(likelihood, Parametric):
        d = (likelihood.moments(f)[0] - means).square() / (2 * variance)
    elif isinstance(likelihood, Classes):
        d = torch.special.xlogy(means, means) - means * likelihood.normalized(f)
    else:
        d = -likelihood.log_prob(f, means)[..., None]
    energy: Tensor = terms["rows"] * d.sum(dim=-1).mean()
    return energy


def _slope(terms: Tree, weights: Tensors, run: Federation) -> Tensors:
    """The gradient of `_energy`, float64."""
    found = torch.func.grad(lambda w: _energy(terms, w, run))(weights)
    return {n: t.double() for n, t in found.items()}


def _added(duals: Duals, told: Tensors, sign: float) -> Duals:
    """Duals and a multiple of what was told, `part/name`, on the CPU."""
    return Duals(
        *(
            {
                n: t + sign * told[f"{key}/{n}"].to("cpu", torch.float64) if told else t
                for n, t in kept.items()
            }
            for key, kept in (("shift", duals.shift), ("label", duals.label))
        )
    )


_LEAST = 1e-12
"""Weight of labels below which there are none."""
_STEPS = 100
"""Most steps of the server's quasi-Newton method in a round."""
