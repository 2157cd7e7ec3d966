"""Hierarchical: a learned Gaussian population of clients, and a posterior for each of them."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

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
    Models,
    Part,
    Problem,
    Report,
    Reports,
    RoundContext,
    Sampler,
    Solved,
    Sum,
    nll,
    sgd,
)
from fedbayes.contracts.last_layer import FinalLayer, last_layer
from fedbayes.contracts.needs import own_prior
from fedbayes.contracts.personal import PersonalTensors, beside_fixed
from fedbayes.core.fields import Chosen, Only
from fedbayes.core.messages import Message, dense
from fedbayes.core.tensors import Samples, Tensors, named, part
from fedbayes.errors import ConfigError, MessageError, ModelError
from fedbayes.fusion.laplace import expected as probit
from fedbayes.likelihoods.noise import LIMIT, LearntNoise
from fedbayes.likelihoods.numeric import unbounded


@dataclass(frozen=True)
class PopulationServer:
    """The shared tensors, and the Gaussian population of the clients' weights."""

    shared: Tensors
    """The layers below the last one, and the noise."""
    mean: Tensor
    """μ [d], float64."""
    spread: Tensors = field(default_factory=dict)
    """Σ, float64: `covariance` [d, d]; `variance` [d]; or `variance` and `factor` [d, rank]."""


@dataclass(frozen=True)
class _RandomLayer(FinalLayer):
    """The last layer of a network, whose weights are random."""

    noise: str | None = None
    """Name of the log std of the Gaussian noise behind it, where that is learned."""


class Hierarchical(Method[PopulationServer, PersonalTensors, Sum]):
    """A mixed model: the last layer of client k has weights φ_k ~ N(μ, Σ), learned by EM.

    E-step (Laplace; exact for Gaussian noise): with H_k the curvature of −log p(D_k | φ) at φ̂_k,

        φ̂_k = argmin −log p(D_k | φ) + ½ (φ − μ)ᵀ Σ⁻¹ (φ − μ),   S_k = (H_k + Σ⁻¹)⁻¹.

    A client reports φ̂_k − μ and C_k = S_k + (φ̂_k − μ)(φ̂_k − μ)ᵀ, or what a smaller Σ needs of it.

    M-step: μ ← mean φ̂_k and Σ ← mean C_k − (mean φ̂_k − μ)(…)ᵀ, as a whole (`full`) or its
    diagonal. `low-rank` is Σ = D + UUᵀ by EM of factor analysis (Rubin and Thayer 1982), which
    needs C_k Bᵀ with B = (I + Uᵀ D⁻¹ U)⁻¹ Uᵀ D⁻¹. The noise of Gaussian targets goes to its mean
    squared residual under the posteriors. Where only B of K clients report, each of these goes a
    share B/K of the way.

    With a network of one layer that is the EM algorithm of mixed models (Laird and Ware 1982),
    whose fixed point is the maximum of the pooled marginal likelihood. Layers below the last are
    trained for fixed φ̂_k and averaged, as in FedRep. Clients predict by draws from N(φ̂_k, S_k),
    or for classes by their probit-corrected mean; clients that never took part by N(μ, Σ), which
    `adapted` updates with a few of their rows. All clients weigh alike.
    """

    name = "hierarchical"
    about = About(
        "a mixed model: a learned population of clients' last layers",
        "Laird and Ware 1982; MacKay 1992",
        needs=(own_prior,),
    )
    server_state = PopulationServer
    client_state = PersonalTensors
    models = Models.BOTH
    reports = Reports(
        {
            "weights": Part(),
            "mean": Part(origin="zero", linear=False),
            "spread": Part(
                origin="zero",
                exact=True,
                linear=False,
                range=65536.0,
                squared=True,
                joint="an entrywise median of covariance matrices is not a covariance matrix. "
                "Set method.covariance = 'diagonal'",
            ),
            "noise": Part(
                origin="zero",
                exact=True,
                linear=False,
                range=65536.0,
                squared=True,
                optional=True,
            ),
        }
    )

    covariance: Annotated[Literal["full", "diagonal", "low-rank"], Chosen()] = Field(
        "full", description="form of Σ, the covariance of the population"
    )
    rank: Annotated[int, Only("covariance", "low-rank")] = Field(
        5, ge=1, description="number of columns of U in Σ = D + UUᵀ"
    )
    prior_std: Annotated[float, Chosen()] = Field(
        1.0, gt=0, description="standard deviation of the population before the first round"
    )
    predictions: int = Field(
        100, ge=2, description="number of samples of a prediction, if targets are not classes"
    )
    largest: int = Field(
        3000,
        ge=1,
        description="largest number of weights of the last layer. A client stores its square",
    )

    def recommended(self, known: Known) -> dict[str, Any]:
        """A full covariance for few weights, else a diagonal; small initial outputs."""
        layer = _last(known.run)
        return {
            **sgd(known),
            "method.covariance": "full" if layer.size <= _FULL else "diagonal",
            "method.prior_std": float(f"{min(1.0, 2 / layer.inputs**0.5):.2g}"),
        }

    def check(self, run: Federation) -> None:
        """The last layer is linear, and not too large; its targets have a curvature."""
        super().check(run)
        layer = _last(run)
        if layer.size > self.largest:
            raise ModelError(
                f"hierarchical stores the covariance of all {layer.size:,} weights of the last "
                f"layer, {layer.size:,}² numbers. Choose a narrower last hidden layer, or "
                "increase method.largest"
            )
        if self.covariance == "low-rank" and self.rank >= layer.size:
            raise ConfigError(
                f"method.rank is {self.rank}, but the last layer has {layer.size} weights. Set a "
                "smaller method.rank, or method.covariance = 'full'"
            )

    def init(self, run: Federation) -> PopulationServer:
        """Start around the network's initialization."""
        layer, initial = _last(run), run.network.initial
        size, variance = layer.size, self.prior_std**2
        spread: Tensors = {"variance": torch.full((size,), variance, dtype=torch.float64)}
        if self.covariance == "full":
            spread = {"covariance": torch.diag(spread["variance"])}
        elif self.covariance == "low-rank":
            rng = torch.Generator().manual_seed(run.seed)
            factor = torch.randn(size, self.rank, generator=rng, dtype=torch.float64)
            spread["factor"] = 0.5 * self.prior_std * factor
        shared = {n: t for n, t in initial.items() if n not in layer.names}
        return PopulationServer(shared, layer.flat(initial), spread)

    def message(self, server: PopulationServer, at: RoundContext) -> Message:
        """Send the shared tensors and the population, the same to all."""
        return {**server.shared, "mean/weights": server.mean, **named("spread", server.spread)}

    def expected(self, message: Message, run: Federation) -> Message:
        """The shared tensors, moments of the weights, and squared residuals."""
        found, noise = dict(message), _last(run).noise
        if noise is not None:
            columns = dense({noise: found.pop(noise)})[noise]
            found["noise/squares"] = torch.zeros(len(columns), dtype=torch.float64)
            found["noise/count"] = torch.zeros((), dtype=torch.float64)
        return found

    def loss(self, run: Federation) -> Loss:
        """The negative log-likelihood under a fixed last layer."""
        return nll(run, weights=beside_fixed)

    def validation(self, run: Federation) -> Loss:
        """The same, without dropout."""
        return nll(run, training=False, weights=beside_fixed)

    def problem(
        self, message: Message, client: PersonalTensors, samples: Samples, at: RoundContext
    ) -> Problem:
        """Train the layers below a fixed last layer: the client's own, or the population's mean."""
        network, layer, sent = at.run.network, _last(at.run), dense(message)
        flat = client.tensors.get("mean", sent["mean/weights"])
        fixed = layer.tensors(flat, network.dtype)
        if layer.noise is not None:
            fixed[layer.noise] = sent[layer.noise]
        start = {n: t for n, t in sent.items() if n in network.initial and n not in fixed}
        return Problem(network.prepare(start), given={"fixed": network.prepare(fixed)})

    def local(
        self, message: Message, client: PersonalTensors, samples: Samples, at: RoundContext
    ) -> tuple[Report, PersonalTensors, Info]:
        """Infer the last layer by Newton steps, and then train the layers below it."""
        own, population, statistics = self._inferred(
            dense(message), samples, at.run, client.tensors.get("mean")
        )
        client = PersonalTensors(own)
        problem = self.problem(message, client, samples, at)
        trained = at.run.network.split()[0].keys() & problem.start.keys()
        solved = Solved(problem.start, 0, float(statistics["loss"]), len(samples.y))
        if trained:
            loss, validation = self.loss(at.run), self.validation(at.run)
            solved = at.solve(problem, loss, samples, validation=validation)
        report, client, info = self.report(solved, problem, client, at)
        moments: Message = {
            "mean/weights": own["mean"] - population.mean,
            **named("spread", self._terms(own, population)),
            **part(statistics, "send"),
        }
        return Report({**report.tensors, **moments}), client, info

    def report(
        self, solved: Solved, problem: Problem, client: PersonalTensors, at: RoundContext
    ) -> tuple[Report, PersonalTensors, Info]:
        """Report the layers below where training ended."""
        return Report(dict(solved.parameters)), client, solved.info

    def _terms(self, own: Tensors, population: "_Population") -> Tensors:
        """What Σ needs of a client's C_k."""
        apart = own["mean"] - population.mean
        second = own["covariance"] + torch.outer(apart, apart)
        match self.covariance:
            case "full":
                return {"covariance": second}
            case "diagonal":
                return {"variance": second.diagonal().clone()}
            case _:
                factor = second @ population.loadings().T
                return {"variance": second.diagonal().clone(), "factor": factor}

    def _inferred(
        self, sent: Tensors, samples: Samples, run: Federation, begin: Tensor | None = None
    ) -> tuple[Tensors, "_Population", Tensors]:
        """The last layer's posterior given samples, the population as sent, and loss and noise."""
        layer = _last(run)
        population = _Population(sent["mean/weights"].cpu(), _cpu(part(sent, "spread")))
        features, more = layer.features(sent, samples.x, run)
        mean, covariance, loss = _posterior(
            layer, features, more, samples.y, population, run, begin
        )
        said: Tensors = {"loss": torch.tensor(loss)}
        if layer.noise is not None:
            f = features @ mean.reshape(layer.outputs, -1).T
            target = run.likelihood.target
            centre, scale = (torch.tensor(t).double() for t in (target.center, target.scale))
            squares = ((samples.y.cpu().double() - centre) / scale - f).square().sum(dim=0)
            variance = _variances(layer, features, covariance)
            squares += variance.diagonal(dim1=1, dim2=2).sum(dim=0)
            said["send/noise/squares"] = squares
            said["send/noise/count"] = torch.tensor(float(len(f)), dtype=torch.float64)
        return {"mean": mean, "covariance": covariance}, population, said

    def accept(self, server: PopulationServer, report: Report, run: Federation) -> None:
        """Variances, squares and counts are not negative."""
        tensors = dense(report.tensors)
        spread = part(tensors, "spread")
        variance = spread.get("variance")
        if variance is None:
            variance = spread["covariance"].diagonal()
        if bool((variance < 0).any()) or any(
            bool((t < 0).any()) for t in part(tensors, "noise").values()
        ):
            raise MessageError("a variance, a squared residual or a count is negative")

    def update(
        self, server: PopulationServer, reports: Sum, at: RoundContext
    ) -> tuple[PopulationServer, Info]:
        """Re-estimate the population and the noise from the means of the reports."""
        run, found = at.run, {n: t / reports.weight for n, t in reports.tensors.items()}
        share = reports.clients / run.clients
        moved = found.pop("mean/weights")
        fresh = self._spread(part(found, "spread"), moved, _Population(server.mean, server.spread))
        spread = {n: (1 - share) * old + share * fresh[n] for n, old in server.spread.items()}
        layer, mean = _last(run), reports.mean()
        shared = {n: mean[n] for n in server.shared if n != layer.noise}
        if layer.noise is not None:
            log_std = _log_std(found["noise/squares"], found["noise/count"])
            before = server.shared[layer.noise]
            shared[layer.noise] = before.lerp(log_std.to(before), share)
        after = PopulationServer(shared, server.mean + share * moved, spread)
        std = _Population(after.mean, spread).variance().sqrt()
        return after, {"population_std": float(std.mean())}

    def _spread(self, found: Tensors, moved: Tensor, before: "_Population") -> Tensors:
        """Σ from the mean of the clients' terms; what noise made indefinite is floored."""
        square = moved.square()
        match self.covariance:
            case "full":
                whole = found["covariance"] - torch.outer(moved, moved)
                return {"covariance": _floored((whole + whole.T) / 2)}
            case "diagonal":
                return {"variance": (found["variance"] - square).clamp_min(_LEAST)}
            case _:
                loadings = before.loadings()
                across = found["factor"] - torch.outer(moved, loadings @ moved)
                rank = len(loadings)
                scores = torch.eye(rank).double() - loadings @ before.spread["factor"]
                scores = _floored(_even(scores + loadings @ across))
                factor = torch.linalg.solve(scores, across.T).T
                rest = found["variance"] - square - (factor * across).sum(dim=1)
                return {"variance": rest.clamp_min(_LEAST), "factor": factor}

    def model(self, server: PopulationServer, run: Federation) -> Tensors:
        """Return the shared tensors with μ and Σ: the model of a client that never took part."""
        population = _Population(server.mean, server.spread)
        covariance = population.covariance()
        return {**server.shared, "last/mean": server.mean, "last/covariance": covariance}

    def personal_model(
        self, message: Message, report: Report | None, client: PersonalTensors, run: Federation
    ) -> Tensors | None:
        """Return the shared tensors with the client's posterior; the population's before it."""
        sent, layer = dense(message), _last(run)
        shared = {n: t for n, t in sent.items() if n in run.network.initial}
        if report is not None:
            trained = dense(report.tensors)
            shared = {n: trained.get(n, t) for n, t in shared.items()}
        if not client.tensors:
            population = _Population(sent["mean/weights"].cpu(), _cpu(part(sent, "spread")))
            own = {"mean": population.mean, "covariance": population.covariance()}
        else:
            own = client.tensors
        assert layer.size == len(own["mean"])
        return {**shared, **named("last", own)}

    def draws(self, model: Tensors, run: Federation) -> Sampler:
        """Outputs under N(φ̂, S): for classes one, probit-corrected, or else draws of weights."""
        layer, mean, covariance = _last(run), model["last/mean"], model["last/covariance"]
        target = run.likelihood.target
        classes = target.kind == "class" and target.classes == layer.outputs
        matrix = mean.cpu().reshape(layer.outputs, -1)
        moves: list[Tensor] = []
        if not classes:
            rng = torch.Generator().manual_seed(0)
            half = self.predictions // 2
            noise = torch.randn(half, layer.size, generator=rng, dtype=torch.float64)
            drawn = noise @ torch.linalg.cholesky(_floored(covariance.cpu())).T
            moves = [m.reshape(matrix.shape) for m in torch.cat([drawn, -drawn])]

        def outputs(x: Tensor) -> Tensor:
            features, more = layer.features(model, x, run)
            f = features @ matrix.T
            if classes:
                found = torch.cat(
                    [
                        probit(g, _variances(layer, h, covariance.cpu()))
                        for g, h in zip(
                            *(torch.split(t, _PIECE) for t in (f, features)), strict=True
                        )
                    ]
                )[None]
            else:
                found = torch.stack([f + features @ move.T for move in moves])
            found = torch.cat([found, more.expand(len(found), *more.shape)], dim=-1)
            return found.to(x.device, torch.promote_types(run.network.dtype, torch.float32))

        return outputs


@dataclass(frozen=True)
class _Population:
    """N(μ, Σ), in the form in which Σ is kept."""

    mean: Tensor
    spread: Tensors

    def variance(self) -> Tensor:
        """The diagonal of Σ [d]."""
        if "covariance" in self.spread:
            return self.spread["covariance"].diagonal()
        factor = self.spread.get("factor")
        own = self.spread["variance"]
        return own if factor is None else own + factor.square().sum(dim=1)

    def covariance(self) -> Tensor:
        """Σ [d, d]."""
        if "covariance" in self.spread:
            return self.spread["covariance"]
        whole = torch.diag(self.spread["variance"])
        factor = self.spread.get("factor")
        return whole if factor is None else whole + factor @ factor.T

    def precision(self) -> Tensor:
        """Σ⁻¹ [d, d]."""
        if self.spread.keys() == {"variance"}:
            return torch.diag(1 / self.spread["variance"])
        return torch.cholesky_inverse(torch.linalg.cholesky(_floored(self.covariance())))

    def loadings(self) -> Tensor:
        """B = (I + Uᵀ D⁻¹ U)⁻¹ Uᵀ D⁻¹ [rank, d]."""
        factor = self.spread["factor"]
        scaled = factor.T / self.spread["variance"]
        even = torch.eye(len(scaled), dtype=torch.float64) + scaled @ factor
        return torch.cholesky_solve(scaled, torch.linalg.cholesky(even))


def _last(run: Federation) -> _RandomLayer:
    """The last layer of the network."""
    modules = run.network.module.named_modules()
    noise = next((f"{n}.log_std" for n, m in modules if isinstance(m, LearntNoise)), None)
    if run.likelihood.name != "gaussian":
        noise = None  # its scale is trained like the layers below
    return _RandomLayer(**vars(last_layer(run, "hierarchical", "fedrep")), noise=noise)


def _posterior(
    layer: _RandomLayer,
    features: Tensor,
    more: Tensor,
    y: Tensor,
    population: _Population,
    run: Federation,
    begin: Tensor | None,
) -> tuple[Tensor, Tensor, float]:
    """The Laplace approximation by Newton steps: φ̂ [d], S [d, d], and the mean loss there."""
    prior, precision, y = population.mean, population.precision(), y.cpu()
    likelihood = run.likelihood

    def energy(flat: Tensor) -> float:
        f = torch.cat([features @ flat.reshape(layer.outputs, -1).T, more], dim=1)
        apart = flat - prior
        return float(-likelihood.log_prob(f, y).sum() + 0.5 * apart @ precision @ apart)

    def curves(f: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients [n, K] and Hessians [n, K, K] of each sample's −log p."""
        f = f.requires_grad_()
        loss = -likelihood.log_prob(torch.cat([f, more], dim=1), y).sum()
        (slope,) = torch.autograd.grad(loss, f, create_graph=True)
        rows = [torch.autograd.grad(slope[:, k].sum(), f, retain_graph=True)[0] for k in outputs]
        return slope.detach(), torch.stack(rows, dim=1)

    outputs = range(layer.outputs)
    flat = prior.clone() if begin is None else begin.cpu()
    value = energy(flat)
    for _ in range(_NEWTON):
        f = features @ flat.reshape(layer.outputs, -1).T
        slope, outer = curves(f)
        gradient = (slope.T @ features).reshape(-1) + precision @ (flat - prior)
        hessian = _curvature(layer, features, outer) + precision
        root = torch.linalg.cholesky(hessian)
        step = torch.cholesky_solve(gradient[:, None], root)[:, 0]
        gain, length = float(gradient @ step), 1.0
        if gain < 1e-10 * (1 + abs(value)):
            break
        while length > 1e-6:
            trial = energy(flat - length * step)
            if trial <= value - 1e-4 * length * gain:
                break
            length /= 2
        else:
            break
        flat, value = flat - length * step, trial
    covariance = torch.cholesky_inverse(root)
    f = torch.cat([features @ flat.reshape(layer.outputs, -1).T, more], dim=1)
    return flat, covariance, float(-likelihood.log_prob(f, y).mean())


def _curvature(layer: _RandomLayer, features: Tensor, outer: Tensor) -> Tensor:
    """Σ_i Λ_i ⊗ h_i h_iᵀ [d, d], where negative curvature of outputs counts as none."""
    outer = _even(outer)
    if bool((torch.linalg.eigvalsh(outer) < -1e-9).any()):
        values, vectors = torch.linalg.eigh(outer)
        outer = (vectors * values.clamp_min(0)[:, None]) @ vectors.mT
    width, inputs = layer.outputs, layer.inputs
    whole = torch.empty(width, inputs, width, inputs, dtype=torch.float64)
    for a in range(width):
        for b in range(a, width):
            block = features.T @ (features * outer[:, a, b, None])
            whole[a, :, b], whole[b, :, a] = block, block.T
    return whole.reshape(layer.size, layer.size)


def _variances(layer: _RandomLayer, features: Tensor, covariance: Tensor) -> Tensor:
    """Covariances of the outputs of each sample [n, K, K]."""
    width, inputs = layer.outputs, layer.inputs
    blocks = covariance.reshape(width, inputs, width, inputs).permute(1, 0, 2, 3)
    along = (features @ blocks.reshape(inputs, -1)).reshape(-1, width, width, inputs)
    return torch.einsum("nkle,ne->nkl", along, features)


def _log_std(squares: Tensor, count: Tensor) -> Tensor:
    """The parameter of noise whose variance is the mean square."""
    mean = squares / count.clamp_min(1e-12)
    return unbounded(0.5 * mean.clamp_min(1e-12).log(), LIMIT)


def _even(matrix: Tensor) -> Tensor:
    """The symmetric part."""
    return (matrix + matrix.mT) / 2


def _floored(matrix: Tensor) -> Tensor:
    """The matrix, with eigenvalues of at least a tiny share of its largest."""
    scale = float(matrix.diagonal().max())
    if bool(torch.linalg.cholesky_ex(matrix - _TINY * scale * torch.eye(len(matrix)))[1] == 0):
        return matrix
    values, vectors = torch.linalg.eigh(_even(matrix))
    least = max(_TINY * float(values.max()), _LEAST)
    return _even((vectors * values.clamp_min(least)) @ vectors.T)


def _cpu(tensors: Tensors) -> Tensors:
    """The tensors on the CPU."""
    return {name: tensor.cpu() for name, tensor in tensors.items()}


_FULL = 300
"""Most weights of the last layer for which a full covariance is recommended."""
_NEWTON = 50
"""Most Newton steps of a client."""
_PIECE = 256
"""Samples whose output covariances are computed at a time."""
_LEAST = 1e-12
"""Least variance of a weight."""
_TINY = 1e-12
"""Least eigenvalue of a covariance, as a share of its largest."""
