"""PFNM and GPI-FNM over rounds: neurons are matched, and clients go on from their own."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field

from fedbayes.contracts import (
    About,
    ClassCountedMethod,
    ClientNote,
    Federation,
    Info,
    Known,
    Part,
    Problem,
    Report,
    ReportList,
    RoundContext,
    Solved,
    Stateless,
    Tree,
    adam,
)
from fedbayes.core import seeds
from fedbayes.core.fields import Chosen, idle
from fedbayes.core.messages import Message, dense
from fedbayes.core.tensors import Samples, Tensors
from fedbayes.errors import ConfigError, ModelError
from fedbayes.matching import Dense, MatchingSettings, match_networks
from fedbayes.matching.costs import Indices
from fedbayes.models import DenseLayer, dense_layers


@dataclass(frozen=True)
class MatchingServer:
    """The global network, what every client last reported, and where its neurons went."""

    weights: Tensors
    """The global network, in the network's names; its widths change from round to round."""
    latest: Tensors
    """Last report of each client that ever took part: `client/name`."""
    places: Tensors
    """Global neuron of each neuron of such a client, int64: `client/hidden layer`."""


class GpiFnm(MatchingSettings, ClassCountedMethod[MatchingServer]):
    """Global-posterior-incorporated federated neural matching over rounds (paper, section 4.3).

    A client of round 1 trains from an initialization of its own. The server matches the neurons
    of all clients and infers the global ones. A client of a later round starts from its own
    columns of the global network, w_sj = Σ_i A_ij θ_i, so that its size stays as it was while the
    global size is free. Clients that do not take part in a round are matched by what they
    reported last.

    The paper matches layers top down, from the beginning in every round, with settings chosen on
    data. With networks trained as in the paper, accuracy falls over rounds (see the results). A
    wide prior avoids that, with passes up and down the layers that start from the last assignments.
    """

    # Neurons of different networks are not measured from one another.
    reports = replace(
        ClassCountedMethod.reports, parts={"weights": Part(origin="zero", compared="tensors")}
    )
    name = "gpi-fnm"
    about = About(
        "matches neurons as pfnm does, and with the global posterior",
        "GPI-FNM, sections 4.2 and 4.3",
    )
    server_state = MatchingServer

    form: Annotated[Literal["published", "wide"], Chosen()] = Field(
        "published",
        description="defaults of sigma0, gamma, epsilon and alternations. published: 1, 1, 0.3 "
        "and 0. wide: 10, 45, 1 and 12. auto: wide if all hidden biases of the network start "
        "at one value other than 0, as in the paper (model.init)",
    )
    sigma0: float | None = Field(  # type: ignore[assignment]
        None,
        gt=0,
        description="standard deviation of global weights around their mean. none: by method.form",
    )
    gamma: float | None = Field(  # type: ignore[assignment]
        None,
        gt=0,
        description="mass of the process. A larger value gives more neurons. none: by method.form",
    )
    epsilon: float | None = Field(  # type: ignore[assignment]
        None, ge=0, description="weight of the KL term. 0: PFNM. none: by method.form"
    )
    alternations: int | None = Field(  # type: ignore[assignment]
        None,
        ge=0,
        description="largest number of passes up and down the layers. 0: top down once, as "
        "published. none: by method.form",
    )
    bias_mean: float | None = Field(  # type: ignore[assignment]
        None,
        description="mean of hidden biases. none: their initial value, or 0 if they have several",
    )
    warm: bool = Field(
        True,
        description="whether passes up and down (alternations) start from the matching of the "
        "last round. false, and for new clients: from top-down matchings",
    )

    def recommended(self, known: Known) -> dict[str, Any]:
        """Clients train until their neurons can be told apart, and so be matched."""
        trained = adam(known, steps=60)
        if "form" not in self.choosable():
            return trained
        try:
            wide = _common_bias(known.run) != 0
        except ModelError:  # which `check` is to say
            wide = False
        return {**trained, "method.form": "wide" if wide else "published"}

    def note(self, samples: int, run: Federation) -> ClientNote:
        """A note if few samples leave neurons near their start, where they match no others."""
        if samples >= FEWEST:
            return ClientNote()
        why = f"have fewer than {FEWEST} samples: few of their neurons match those of others"
        return ClientNote(falls_short=why)

    def remarks(self, run: Federation) -> list[str]:
        """Where no passes begin, it does not matter where."""
        settled = self.settled(run)
        notes = list(idle(settled, "method."))
        if not (self.warm or settled.alternations):
            notes.append(
                "method.warm has no effect: there are no passes (method.alternations is 0)"
            )
        return notes

    def check(self, run: Federation) -> None:
        """Fully connected networks with a hidden layer, all of it trained; shares need classes."""
        super().check(run)
        if run.network.constants:
            raise ModelError(
                f"{self.name} matches the neurons of whole networks, but some weights are frozen: "
                f"{', '.join(run.network.constants)}"
            )
        if run.likelihood.head() is not None:
            raise ConfigError(
                f"{self.name} matches neurons, and cannot combine learned noise. Set "
                f"task.likelihood = '{run.likelihood.name}', and task.noise to 'each' or a number"
            )
        _layers(run)

    def init(self, run: Federation) -> MatchingServer:
        """The network's initialization, and nobody heard."""
        return MatchingServer(run.network.initial, {}, {})

    def message(self, server: MatchingServer, at: RoundContext) -> Message:
        """The client's own columns; nothing to a newcomer, who starts from its own network."""
        if f"{at.client}/0" not in server.places:
            return {}
        layers = dense_layers(server.weights, "the global network")
        places = [server.places[f"{at.client}/{depth}"] for depth in range(len(layers) - 1)]
        columns: Message = {}
        for depth, layer in enumerate(layers):
            weight, bias = layer.weight, layer.bias
            if depth:
                weight = weight[:, places[depth - 1]]
            if depth < len(places):
                weight = weight[places[depth]]
                bias = None if bias is None else bias[places[depth]]
            columns[f"{depth}.weight"] = weight.contiguous()
            if bias is not None:
                columns[f"{depth}.bias"] = bias
        return columns

    def expected(self, message: Message, run: Federation) -> Message:
        """Weights of the client's widths, and its counts of classes."""
        pattern = _numbered(run.network.initial, _layers(run))
        return {**pattern, **self.count_pattern(run)}

    def problem(
        self, message: Message, client: Stateless, samples: Samples, at: RoundContext
    ) -> Problem:
        """Train from the own columns, or from an own initialization."""
        start = _named(dense(message), _layers(at.run)) if message else at.own_network().initial
        given: Tree = {**self.counted(samples, at.run)}
        return Problem(at.run.network.prepare(start), given=given)

    def report(
        self, solved: Solved, problem: Problem, client: Stateless, at: RoundContext
    ) -> tuple[Report, Stateless, Info]:
        """Report the weights, and the samples of each class."""
        report = _numbered(solved.parameters, _layers(at.run))
        if problem.given:
            report["counts"] = problem.given["counts"]
        return Report(report, float(solved.count)), client, solved.info

    def update(
        self, server: MatchingServer, reports: ReportList, at: RoundContext
    ) -> tuple[MatchingServer, Info]:
        """Match the last reports of all clients (Algorithms 1 and 2). Those of clients that are
        rejected are not matched, and they are newcomers.
        """
        server = _without(server, reports.refused)
        latest = dict(server.latest)
        for client, report in reports.reports.items():
            latest |= {f"{client}/{name}": t for name, t in dense(report.tensors).items()}
        clients = sorted({int(name.partition("/")[0]) for name in latest})
        layers = _layers(at.run)
        biased = any(layer.bias is not None for layer in layers)
        counts = None
        if self.counts_classes(at.run):
            counts = np.stack([latest[f"{client}/counts"].double().numpy() for client in clients])
        settings = self.settled(at.run)
        start = self._start(server, clients, len(layers) - 1, settings.alternations)
        matching = match_networks(
            [_plain(latest, client, len(layers), biased) for client in clients],
            settings,
            counts=counts,
            names=[f"client {client}" for client in clients],
            seed=seeds.integer(at.run.seed, "matching", round=at.round),
            start=start,
        )
        network = matching.network
        fused = {
            f"{index}.weight": torch.from_numpy(weight).float()
            for index, weight in enumerate(network.weights)
        }
        for index, bias in enumerate(network.biases or []):
            fused[f"{index}.bias"] = torch.from_numpy(bias).float()
        places = {
            f"{client}/{index}": torch.from_numpy(layer.assignments[row])
            for row, client in enumerate(clients)
            for index, layer in enumerate(matching.layers)
        }
        info = {f"neurons_{i}": float(x.size) for i, x in enumerate(matching.layers, start=1)}
        info |= {"objective": matching.objective[-1], "warm": float(start is not None)}
        return MatchingServer(_named(fused, layers), latest, places), info

    def settled(self, run: Federation) -> MatchingSettings:
        """The settings of the matching, those that are not set by the form and the network."""
        values = {name: getattr(self, name) for name in MatchingSettings.model_fields}
        filling = (WIDE if self.form == "wide" else {}) | {"bias_mean": _common_bias(run)}
        unset = [name for name, value in values.items() if value is None]
        chosen = {name: value for name, value in values.items() if value is not None}
        return MatchingSettings(**chosen, **{n: filling[n] for n in unset if n in filling})

    def _start(
        self, server: MatchingServer, clients: Sequence[int], hidden: int, passes: int
    ) -> list[list[Indices]] | None:
        """Where the neurons of every client were; None if passes do not begin there."""
        if not (self.warm and passes):
            return None
        if any(f"{client}/0" not in server.places for client in clients):
            return None
        return [
            [server.places[f"{client}/{depth}"].numpy() for depth in range(hidden)]
            for client in clients
        ]

    def personal_model(
        self, message: Message, report: Report | None, client: Stateless, run: Federation
    ) -> Tensors | None:
        """The network as the client reported it."""
        return None if report is None else _named(dense(report.tensors), _layers(run))


class Pfnm(GpiFnm):
    """Probabilistic federated neural matching over rounds: GPI-FNM with ε = 0.

    Matched top down, as published. Without the KL term a wide prior shares hardly any neuron, and
    loses accuracy over rounds.
    """

    name = "pfnm"
    about = About(
        "matches neurons with a Bayesian nonparametric model",
        "Yurochkin et al. 2019; GPI-FNM, Prop. 1",
    )

    epsilon: float = Field(0.0, ge=0, le=0, description="0. For another value use gpi-fnm")
    form: Literal["published", "wide"] = Field(
        "published",
        description="defaults of sigma0, gamma and alternations. published: 1, 1 and 0. wide: "
        "10, 45 and 12",
    )


FEWEST = 40
"""Training samples of a client whose neurons can be told apart after 20 epochs."""
WIDE: dict[str, float] = {"sigma0": 10.0, "gamma": 45.0, "epsilon": 1.0, "alternations": 12}
"""Of the form `wide`. More mass leaves more neurons to single clients: under 45 the fused network
has hardly half of all of them, and learns steadily in every federation tried; under 100 nearly all.
"""


def _without(server: MatchingServer, clients: Collection[int]) -> MatchingServer:
    """The server's state without what some clients reported."""

    def kept(tensors: Tensors) -> Tensors:
        return {n: t for n, t in tensors.items() if int(n.partition("/")[0]) not in clients}

    return MatchingServer(server.weights, kept(server.latest), kept(server.places))


def _common_bias(run: Federation) -> float:
    """The value that all hidden biases start at; 0 where they differ or there are none."""
    hidden = [layer.bias for layer in _layers(run)[:-1] if layer.bias is not None]
    started = set(torch.cat(hidden).tolist()) if hidden else {0.0}
    return started.pop() if len(started) == 1 else 0.0


def _layers(run: Federation) -> list[DenseLayer]:
    """The layers of every client's network."""
    return dense_layers(run.network.initial, "the network")


def _named(numbered: Tensors, layers: Sequence[DenseLayer]) -> Tensors:
    """Tensors by depth (`0.weight`, `0.bias`, …) under the names of the network."""
    named = {}
    for depth, layer in enumerate(layers):
        named[layer.name] = numbered[f"{depth}.weight"]
        if f"{depth}.bias" in numbered:
            named[layer.bias_name] = numbered[f"{depth}.bias"]
    return named


def _numbered(named: Tensors, layers: Sequence[DenseLayer]) -> Message:
    """The inverse of `_named`."""
    numbered: Message = {}
    for depth, layer in enumerate(layers):
        numbered[f"{depth}.weight"] = named[layer.name]
        if layer.bias is not None:
            numbered[f"{depth}.bias"] = named[layer.bias_name]
    return numbered


def _plain(latest: Tensors, client: int, depth: int, bias: bool) -> Dense:
    def arrays(kind: str) -> list[np.ndarray[tuple[int, ...], np.dtype[np.float64]]]:
        return [latest[f"{client}/{index}.{kind}"].double().numpy() for index in range(depth)]

    return Dense(arrays("weight"), arrays("bias") if bias else None)
