"""A federation from its first round to its last, in memory: no folder, no process, no file."""

import secrets
import threading
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedbayes.config.config import Config
from fedbayes.config.given import objects, renamed
from fedbayes.contracts import AnyMethod, Federation, RoundContext
from fedbayes.contracts.returned import started
from fedbayes.core.by_client import ByClient
from fedbayes.core.lazy import in_memory, own, place_of
from fedbayes.core.tensors import PREDICTED, Tensors, pack, to, unpack
from fedbayes.data import FederatedData, Preprocessing
from fedbayes.errors import RunError, warn
from fedbayes.federation.engines.sequential import Sequential
from fedbayes.federation.ledger import ReportWeights
from fedbayes.federation.privacy import keys
from fedbayes.federation.privacy.noise import Secret
from fedbayes.federation.privacy.spending import Spending
from fedbayes.likelihoods.temperature import sampled_at
from fedbayes.runs.build import build_federation, build_likelihood, build_network, build_run
from fedbayes.runs.calibration import fitted
from fedbayes.runs.checks import check, remarks
from fedbayes.runs.lines import round_line
from fedbayes.runs.personal import keeps_own, none_kept, own_model
from fedbayes.runs.privacy import needs_secret, run_summary
from fedbayes.runs.rounds import Rounds
from fedbayes.storage.metrics_file import Metrics

_ONE_AT_A_TIME = threading.Lock()
"""PyTorch's global random state, which networks are built with, is the process's."""


class FittedClients:
    """The models of a federation, with their predictions.

    It can be pickled; the network is built again where it is loaded. Several threads may predict.
    """

    temperature: float | None = None
    """Of the global model, fitted on rows that clients held out; None where there is none."""

    def __init__(self, config: Config, data: FederatedData) -> None:
        """Run all rounds, on data that are all to train on.

        Raises:
            FedbayesError: a setting will not do, or no round had an update.
        """
        self.config = config
        self.preprocessing: Preprocessing = data.preprocessing
        self.clients, self.names = data.clients, data.names
        self.states: dict[int, bytes] = {}
        """Clients' private states, encoded."""
        self.lines: list[Metrics] = []
        """Of each round what `metrics.jsonl` would have."""
        self.privacy: Metrics = {}
        """ε and what belongs to it, where there was noise."""
        self._lock = threading.Lock()
        with _ONE_AT_A_TIME:
            server = self._rounds(data)
        self._server = to(pack(server), "cpu")
        self._constants: Tensors = dict(self.run.network.constants)

    def _rounds(self, data: FederatedData) -> Any:
        """The server's state after the last round."""
        self.config, runtime = build_federation(self.config, data, quiet=True, choosing=True)
        config = self.config
        run = self.__dict__["run"] = runtime.run
        method = runtime.method
        check(config, method, run, data)
        for remark in remarks(config, method, run, data):
            warn(remark)
        engine = Sequential(runtime)
        secret, start = _secret(config), started(method, method.init(run))
        weights = ReportWeights.of(method, config.aggregation.max_weight, ByClient())

        def step(number: int) -> None:
            began = time.perf_counter()
            result = rounds.run(number, engine, rounds.cohort(number))
            rounds.take(result)
            model = method.model(rounds.server, run)
            line = round_line(result, {}, model, run.network, time.perf_counter() - began)
            rounds.count(line)
            self.lines.append(line)

        rounds = Rounds(
            config, runtime, secret, start, self.states, weights, Spending.empty(), step
        )
        for _ in rounds:
            pass
        if all(line["skipped"] for line in self.lines):
            raise RunError(f"no round had an update: {_why(self.lines[-1])}")
        self.privacy = run_summary(config, rounds.privacy, len(self.lines))
        if runtime.held_out:
            model, most = method.model(rounds.server, run), config.aggregation.max_weight
            self.temperature = fitted(runtime, model, len(self.lines), engine, most).temperature
        return rounds.server

    @cached_property
    def run(self) -> Federation:
        """What no round changed; built again where it was loaded from a pickle."""
        with _ONE_AT_A_TIME:
            likelihood = build_likelihood(self.config, self.preprocessing.target, quiet=True)
            network = build_network(self.config, self.preprocessing.shape, likelihood)
            network.adopt(self._constants)
            return build_run(self.config, network, self.preprocessing, likelihood, self.clients)

    @cached_property
    def method(self) -> AnyMethod:
        """The method with its parameters."""
        return self.config.build_method()

    def __getstate__(self) -> dict[str, Any]:
        """Without what can be built again."""
        left_out = ("run", "method", "_lock")
        state = {name: value for name, value in vars(self).items() if name not in left_out}
        # What the config names of this process alone goes along.
        found = {place: own(place) for _, place in objects(self.config.model_dump(mode="json"))}
        return state | {"objects": found}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if found := state.pop("objects", {}):
            names = {place: place_of(thing) for place, thing in found.items()}
            settings = renamed(state["config"].model_dump(), names)
            if in_memory(settings["model"]["name"]):
                settings["model"]["weights"] = None  # it comes with those that it has
            state["config"] = Config.create(**settings)
        vars(self).update(state, _lock=threading.Lock())

    def model(self, client: int | None = None) -> Tensors:
        """The global model, or that of the client of this index.

        Raises:
            RunError: there is none.
        """
        method, run = self.method, self.run
        server: Any = unpack(method.server_state, self._server)
        if client is None:
            if not method.models.has_global:
                raise RunError(
                    f"under {method.name} only clients have models. Give the client whose model "
                    "predicts"
                )
            return method.model(server, run)
        if not keeps_own(method):
            raise RunError(f"clients have no own models: {none_kept(method)}")
        if client not in self.states:
            name = self.names[client] if self.names else client
            raise RunError(f"client {name} has no own model: it was in no round")
        own = own_model(
            method, server, self.states[client], RoundContext(run, len(self.lines) + 1, client)
        )
        if own is None:
            raise RunError(f"clients have no own models: {none_kept(method)}")
        return own

    @torch.no_grad()
    def predict(self, x: Any, ask: Callable[[Tensor], Tensor], client: int | None = None) -> Tensor:
        """Predictions of a model, for the global one with its temperature.

        Args:
            x: raw samples [n, ...], NaN for missing values.
            ask: makes of outputs [draws, n, width] what is wanted, [n, ...].
            client: index of the client whose model it is; None: the global one.

        Returns:
            float64, on the CPU.

        Raises:
            RunError: there is no such model.
        """
        with self._lock:
            run = self.run
            draw = self.method.draws(to(self.model(client), run.network.device), run)
            draw = sampled_at(run.likelihood, draw, self.temperature if client is None else None)
            pieces = [
                ask(draw(self.preprocessing.apply(part).to(run.network.device)).double()).cpu()
                for part in torch.split(torch.as_tensor(x), PREDICTED)
            ]
        return torch.cat(pieces)


def _secret(config: Config) -> Secret | None:
    """What noise and secret cohorts follow from; kept nowhere."""
    if not needs_secret(config):
        return None
    if config.privacy.repeatable or not config.privacy.noise:
        return keys.public(config.seed)
    return Secret(secrets.token_bytes(32))


def _why(line: Metrics) -> str:
    """Why a round had no update, in words."""
    reasons = {**line["refused"], **line["lost"]}
    if reasons:
        client, reason = next(iter(reasons.items()))
        return f"client {client}: {reason}"
    return str(line.get("undone") or "too few valid updates arrived")
