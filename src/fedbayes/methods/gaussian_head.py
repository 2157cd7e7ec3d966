"""A Gaussian head: discriminant analysis of frozen features, from sums of one round."""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from pydantic import Field

from fedbayes.contracts import (
    About,
    Federation,
    Info,
    Known,
    Method,
    Part,
    Report,
    Reports,
    RoundContext,
    Sampler,
    Stateless,
    Sum,
    single_draw,
)
from fedbayes.contracts.last_layer import FinalLayer, last_layer
from fedbayes.core.messages import Message, dense
from fedbayes.core.tensors import Samples, Tensors, named, pack, part, unpack
from fedbayes.core.wording import listed
from fedbayes.errors import ConfigError, MessageError, ModelError
from fedbayes.inference.gaussian_head import GaussianHead, Moments
from fedbayes.likelihoods import Classes
from fedbayes.likelihoods.temperature import has_temperature


@dataclass(frozen=True)
class HeadServer:
    """The network, and the sums that its head is of."""

    weights: Tensors
    """The network; once there are sums, with linear discriminants as its last layer."""
    head: Tensors = field(default_factory=dict)
    """`GaussianHead` by field."""
    sums: Tensors = field(default_factory=dict)
    """`Moments` by field, over all reports that counted."""
    reports: int = 0
    """How many these are."""
    stopped: str = ""
    """Why no further round is wanted."""


class GaussianHeadMethod(Method[HeadServer, Stateless, Sum]):
    """Features of class k are N(μ_k, Σ); the server has the posterior of μ_k and Σ from sums.

    Features h are what the last layer reads, of the network as it starts. No layer is trained. Of
    its n rows a client reports the shares of classes, and means of h and h hᵀ,

        n_k / n,   Σ_{i of class k} h_i / n,   Σ_i h_i h_iᵀ / n,

    with weight n, so that weighted sums over clients are sums over all rows. From these the server
    has the posterior under a normal-inverse-Wishart prior, whose strength maximizes the evidence of
    the sums (`fedbayes.inference.gaussian_head`). It does not depend on the partition. `student`
    predicts by the posterior predictive, Student t; `lda` by linear discriminants at the posterior
    mean, which are the last layer of the network; `qda` by the posterior predictive with a Σ_k of
    each class, whose prior is around the common Σ.

    One round of all clients is enough, after which the run stops. Where not all are in a round,
    sums of rounds are added, and scaled to one report of each client.
    """

    name = "gaussian-head"
    about = About(
        "discriminant analysis of frozen features, by sums",
        "Fisher 1936; Murphy 2007",
        unused=dict.fromkeys(
            ("optimizer", "lr", "epochs", "steps", "batch_size", "class_weights", "focal"),
            "trains no layer",
        ),
    )
    server_state = HeadServer
    reports = Reports(
        {
            "counts": Part(origin="zero", exact=True, range=4096.0),
            "sums": Part(origin="zero", exact=True, range=4096.0),
            "products": Part(
                origin="zero",
                exact=True,
                range=4096.0,
                joint="an entrywise median of covariance matrices is not a covariance matrix",
                uncompressed="its covariances are differences of sums, which must be exact",
            ),
        },
        weighted=True,
    )

    head: Literal["student", "lda", "qda"] = Field(
        "student",
        description="student: one covariance, predictions by the posterior. lda: predictions by "
        "its mean, as a last layer of the network. qda: as student, with a covariance for "
        "each class",
    )
    prior_rows: float | None = Field(
        None,
        gt=0,
        description="strength of the prior of covariances, in rows. A larger number shrinks them "
        "more. none: the number with the highest marginal likelihood",
    )
    mean_rows: float = Field(
        0.01, gt=0, description="strength of the prior of the means of classes, in rows"
    )

    def recommended(self, known: Known) -> dict[str, Any]:
        """Nothing: no training."""
        return {}

    def check(self, run: Federation) -> None:
        """Targets are classes; the last layer is linear, and sums are not too large."""
        super().check(run)
        kind = run.likelihood
        if not (isinstance(kind, Classes) and has_temperature(kind)):
            raise ConfigError(
                f"gaussian-head predicts classes, but the likelihood is {kind.name}. Choose "
                "another method.name"
            )
        layer = self._layer(run)
        if self.head == "lda" and layer.bias is None:
            raise ConfigError(
                "linear discriminants need a bias, but the last layer of this network has none. "
                "Set method.head = 'student'"
            )
        numbers = self._groups(run) * _columns(layer) ** 2
        if numbers > _MOST:
            raise ModelError(
                f"a client would send {numbers:,} numbers, for {_columns(layer):,} features. "
                "Choose a narrower last hidden layer"
                + (", or method.head = 'student'" if self.head == "qda" else "")
            )

    def remarks(self, run: Federation) -> list[str]:
        """What is not trained, and who is in the sums."""
        layer, notes = self._layer(run), super().remarks(run)
        below = [n for n in run.network.split()[0] if n not in layer.names]
        if below:
            notes.append(
                f"gaussian-head does not train {listed(below, 3)}, so features are random. Use a "
                "pretrained network with model.trains = 'head'"
            )
        if run.cohort < run.clients:
            notes.append(
                f"a round has the sums of {run.cohort} of {run.clients} clients, and clients that "
                "are sampled more often weigh more. Leave clients_per_round out to use all in "
                "one round"
            )
        return notes

    def expected(self, message: Message, run: Federation) -> Message:
        """Means over a client's rows."""
        columns, zero = _columns(self._layer(run)), torch.zeros((), dtype=torch.float64)
        classes = run.likelihood.target.classes
        return {
            "counts/rows": zero.expand(classes),
            "sums/features": zero.expand(classes, columns),
            "products/features": zero.expand(self._groups(run), columns, columns),
        }

    def local(
        self, message: Message, client: Stateless, samples: Samples, at: RoundContext
    ) -> tuple[Report, Stateless, Info]:
        """Sum over the client's rows."""
        run, rows = at.run, float(len(samples.y))
        layer, classes = self._layer(run), run.likelihood.target.classes
        parts = []
        for x, y in samples.batches(_BATCH):
            h = layer.features(dense(message), x, run)[0][:, : _columns(layer)]
            parts.append(Moments.of(h, y.cpu(), classes, each=self.head == "qda"))
        found = Moments.added(parts)
        tensors: Message = {
            "counts/rows": found.counts / rows,
            "sums/features": found.sums / rows,
            "products/features": found.products / rows,
        }
        return Report(tensors, rows), client, {}

    def accept(self, server: HeadServer, report: Report, run: Federation) -> None:
        """They are means of some rows."""
        if trouble := _moments(dense(report.tensors)).trouble(1.0):
            raise MessageError(f"its sums are impossible: {trouble}")

    def update(self, server: HeadServer, reports: Sum, at: RoundContext) -> tuple[HeadServer, Info]:
        """Take the posterior given all sums."""
        run, count = at.run, reports.clients
        fresh = _moments(reports.tensors)
        whole = count == run.clients
        sums = fresh
        if not whole and server.sums:
            sums, count = (
                Moments.added([unpack(Moments, server.sums), fresh]),
                count + server.reports,
            )
        once = sums.times(min(1.0, run.clients / count))
        pooled = GaussianHead.fit([once.shared], self.prior_rows, self.mean_rows)
        head = pooled
        if self.head == "qda":
            head = GaussianHead.fit([once], self.prior_rows, self.mean_rows)
        layer, weights = self._layer(run), dict(server.weights)
        if layer.bias is not None:
            weight, bias = pooled.linear()
            table = torch.cat([weight, bias[:, None]], dim=1)
            if layer.outputs == 1:  # the logit of the second class
                table = table[1:] - table[:1]
            weights |= layer.tensors(table.flatten(), run.network.dtype)
        stopped = "one round has the sums of all clients" if whole else ""
        info = {"rows": float(once.counts.sum()), "prior_rows": pooled.prior_rows}
        after = HeadServer(weights, pack(head), pack(sums), count, stopped)
        return after, info

    def model(self, server: HeadServer, run: Federation) -> Tensors:
        """The network; with the posterior, unless linear discriminants predict."""
        exact = {} if self.head == "lda" else named("head", server.head)
        return {**server.weights, **exact}

    def personal_model(
        self, message: Message, report: Report | None, client: Stateless, run: Federation
    ) -> None:
        """None, because a client has no own head."""
        return

    def draws(self, model: Tensors, run: Federation) -> Sampler:
        """Outputs of the network, or of the posterior predictive."""
        if not (told := part(model, "head")):
            return single_draw(model, run.network)
        head, layer, kind = unpack(GaussianHead, told), self._layer(run), run.likelihood
        assert isinstance(kind, Classes)

        def outputs(x: torch.Tensor) -> torch.Tensor:
            h = layer.features(model, x, run)[0][:, : _columns(layer)]
            return kind.outputs_of(head.scores(h)).float().to(x.device)[None]

        return outputs

    def _layer(self, run: Federation) -> FinalLayer:
        return last_layer(run, self.name, "fedavg")

    def _groups(self, run: Federation) -> int:
        """Matrices of products."""
        return run.likelihood.target.classes if self.head == "qda" else 1


def _columns(layer: FinalLayer) -> int:
    """D, the number of features."""
    return layer.inputs - (layer.bias is not None)


def _moments(told: Tensors) -> Moments:
    """The sums in a report, or in the sum of reports."""
    return Moments(told["counts/rows"], told["sums/features"], told["products/features"])


_MOST = 2**26
"""Numbers in the products that a client sends, half a gigabyte."""
_BATCH = 1000
"""Rows of which features are held at a time."""
