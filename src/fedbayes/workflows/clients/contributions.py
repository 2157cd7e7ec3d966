"""What each client contributes to a model: leave-one-out and Shapley values, from one run.

Where the posterior is a product of factors, the model of any set of clients is the product of
theirs (`Method.forget`), so no set is trained. The value v(S) of a set is the mean log-likelihood
of validation rows, in nats a row. Client i of K adds

    leave-one-out   v(all) − v(all without i)
    Shapley value   Σ_S |S|! (K − |S| − 1)!/K! · [v(S with i) − v(S)]   over all S without i

Shapley values sum to v(all) − v(none) (Shapley 1953). Up to `EXACT` clients they are computed from
all sets; of more from random orders (Castro et al. 2009). Both values are means over rows, and so
have standard errors.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbayes.contracts import AnyMethod, Federation, Method
from fedbayes.core import seeds
from fedbayes.core.tensors import Samples, to, unpack
from fedbayes.errors import ConfigError, RunError
from fedbayes.federation.client_runtime import read_state
from fedbayes.federation.engine_table import ENGINES
from fedbayes.likelihoods.temperature import has_temperature
from fedbayes.methods import METHODS
from fedbayes.runs.build import build_runtime
from fedbayes.storage.calibrations import calibrated_model
from fedbayes.storage.contributions import Contribution, Contributions, write_contributions
from fedbayes.storage.private_states import ClientStates
from fedbayes.workflows.calibrate.ended_run import EndedRun

EXACT = 10
"""Clients up to which every set is valued: 1,024 sets of ten."""
ORDERS = 200
"""Random orders of more clients, unless said otherwise."""
_BATCH = 1000
"""Rows that are predicted at a time."""

Told = Callable[[int, int], object]
"""Called with the number of sets that were valued, and the largest number."""


def contributions(
    folder: Path | str, orders: int = ORDERS, told: Told = lambda done, every: None
) -> Contributions:
    """Measure what each client of a run contributes, and write it into the run folder.

    Args:
        folder: of a run that has ended, of a method with factors, such as PVI.
        orders: random orders of clients, where there are more than ten.
        told: called with the progress.

    Raises:
        FedbayesError: the run has no such method, no validation rows, or no states of clients here.

    Examples:
        >>> import fedbayes
        >>> run = fedbayes.run(method="pvi", data={"name": "digits", "clients": 3}, rounds=1)
        >>> found = fedbayes.contributions(run.folder)
        >>> sorted(found.clients)
        ['client-0', 'client-1', 'client-2']
        >>> gain = sum(one.shapley for one in found.clients.values())
        >>> abs(gain - (found.everyone - found.nobody)) < 1e-9
        True
    """
    if orders < 2:
        raise ConfigError(f"orders is {orders}. Give 2 or more, for a standard error")
    ended = EndedRun.open(folder, personal=False)
    method, run = ended.method, ended.run
    if type(method).forget is Method.forget:
        able = [name for name, kind in METHODS.items() if kind.forget is not Method.forget]
        raise RunError(
            f"{ended.folder} used {method.name}, which has no factor per client, so contributions "
            f"cannot be separated. They work with {', '.join(able)}"
        )
    if ENGINES[ended.config.engine].states != "run" or ended.config.privacy.noise:
        raise RunError(
            f"{ended.folder} does not have its clients' factors: they are at the nodes, or noise "
            "was added to their sum"
        )
    rows = validation_rows(ended)
    if not len(rows.y):
        way = ", or calibration = 'temperature', which holds out a tenth of the training rows"
        fits = ended.config.calibration == "none" and has_temperature(run.likelihood)
        raise RunError(
            f"{ended.folder} has no validation rows. Run it with data.validation = 0.2"
            f"{way if fits else ''}"
        )
    progress = ended.folder.progress(ended.folder.best_round())
    assert progress is not None
    stored = ClientStates(ended.folder.clients, progress.states)
    device = torch.device("cpu")
    states = {client: read_state(stored[client], method, device)[0] for client in stored}
    server: Any = unpack(method.server_state, progress.server)
    value = Valued(method, run, server, states, to_device(rows, run))
    took_part = sorted(states)
    one = left_out(value, took_part)
    every = shapley(value, took_part, orders, run.seed, told)
    error = len(rows.y) ** -0.5
    names, sizes = ended.data.names, ended.data.train_sizes()
    none = Contribution(0, 0.0, 0.0, 0.0, 0.0)
    clients = dict.fromkeys(names[: run.clients], none)
    for client in range(run.clients):
        found = [0.0, 0.0, 0.0, 0.0]
        if client in states:
            own, (mean, chance) = one[client], every[client]
            spread = math.hypot(float(mean.std()) * error, chance)
            found = [float(own.mean()), float(own.std()) * error, float(mean.mean()), spread]
        clients[names[client]] = Contribution(int(sizes[client]), *found)
    made = Contributions(
        calibrated_model(ended.folder, personal=False),
        len(rows.y),
        float(value(frozenset(states)).mean()),
        float(value(frozenset()).mean()),
        0 if len(states) <= EXACT else orders,
        clients,
    )
    write_contributions(ended.folder, made)
    return made


def validation_rows(ended: EndedRun) -> Samples:
    """Rows of all clients that nobody trained on and that are no test rows: those that the run was
    judged on (`data.validation`), or those that were held out to calibrate; none without either.
    """
    data = ended.data
    if ended.config.data.validation:
        return data.test_union(0, data.test_total)
    runtime = build_runtime(ended.config, data, quiet=True)
    parts = [runtime.parts(client)[1] for client in range(data.clients)]
    return Samples(torch.cat([p.x for p in parts]), torch.cat([p.y for p in parts]))


def to_device(rows: Samples, run: Federation) -> Samples:
    """Rows on the device of the network."""
    moved = to({"x": rows.x, "y": rows.y}, run.network.device)
    return Samples(moved["x"], moved["y"])


class Valued:
    """The log-likelihood of rows under the model of a set of clients, float64 [n]; each set once.

    Args:
        method: of the run.
        run: with all clients.
        server: the server's state with all of them.
        states: private states of those that took part, by number.
        rows: to predict.
    """

    def __init__(
        self,
        method: AnyMethod,
        run: Federation,
        server: Any,
        states: Mapping[int, Any],
        rows: Samples,
    ) -> None:
        if run.likelihood.coupled:
            raise RunError(
                f"the likelihood {run.likelihood.name} uses all rows together. Contributions need "
                "a likelihood of single rows"
            )
        self.method, self.run, self.server = method, run, server
        self.states, self.rows = states, rows
        self._known: dict[frozenset[int], Tensor] = {}

    def __call__(self, clients: frozenset[int]) -> Tensor:
        """The value of each row."""
        if clients not in self._known:
            self._known[clients] = self._value(clients)
        return self._known[clients]

    def _value(self, clients: frozenset[int]) -> Tensor:
        server = self.server
        if not clients:
            server = self.method.init(self.run)
        for gone in self.states.keys() - clients if clients else ():
            server = self.method.forget(server, self.states[gone], self.run)
        model = to(self.method.model(server, self.run), self.run.network.device)
        draw, likelihood = self.method.draws(model, self.run), self.run.likelihood
        split = zip(torch.split(self.rows.x, _BATCH), torch.split(self.rows.y, _BATCH), strict=True)
        with torch.no_grad():
            pieces = [likelihood.log_predictive(draw(x), y) for x, y in split]
        return torch.cat(pieces).double().cpu()


Value = Callable[[frozenset[int]], Tensor]
"""A set of clients to the value of each row [n]."""


def left_out(value: Value, clients: Sequence[int]) -> dict[int, Tensor]:
    """Of each client, what leaving it out takes off each row [n]."""
    every = frozenset(clients)
    return {client: value(every) - value(every - {client}) for client in clients}


def shapley(
    value: Value, clients: Sequence[int], orders: int, seed: int, told: Told
) -> dict[int, tuple[Tensor, float]]:
    """Compute Shapley values.

    Args:
        value: of a set of clients.
        clients: all of them.
        orders: of clients that are drawn, where there are more than `EXACT`.
        seed: of these.
        told: called with the progress.

    Returns:
        Of each client its value on each row [n], and the standard error of the mean over rows that
        comes of drawing orders; 0 where all sets are valued.
    """
    if len(clients) <= EXACT:
        return {c: (v, 0.0) for c, v in _all_sets(value, clients, told).items()}
    rng = seeds.numpy_rng(seed, "contributions")
    total: dict[int, Tensor] = {}
    means: dict[int, list[float]] = {client: [] for client in clients}
    for done in range(orders):
        told(done, orders)
        before, there = value(frozenset()), frozenset[int]()
        for client in rng.permutation(clients).tolist():
            there |= {client}
            after = value(there)
            added, before = after - before, after
            total[client] = added + total[client] if client in total else added
            means[client].append(float(added.mean()))
    return {
        client: (total[client] / orders, float(np.std(each, ddof=1)) / math.sqrt(orders))
        for client, each in means.items()
    }


def _all_sets(value: Value, clients: Sequence[int], told: Told) -> dict[int, Tensor]:
    """Shapley values from the values of all sets."""
    count, done = len(clients), 0
    found: dict[int, Tensor] = {}
    for size in range(count + 1):
        for chosen in combinations(clients, size):
            told(done, 2**count)
            done += 1
            there = frozenset(chosen)
            worth = value(there)
            for client in clients:
                inside = client in there
                # v(S) counts for its members with what they added, and against all others.
                others = size - 1 if inside else size
                weight = 1 / (count * math.comb(count - 1, others))
                part = (weight if inside else -weight) * worth
                found[client] = part + found[client] if client in found else part
    return found
