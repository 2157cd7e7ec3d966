"""Clients' own models between rounds, as the run folder has them."""

from collections.abc import Iterator
from math import log
from typing import Any

import torch

from fedbayes.contracts import AnyMethod
from fedbayes.data.wording import listed
from fedbayes.errors import MessageError, RunError
from fedbayes.federation.engine_table import ENGINES
from fedbayes.federation.state_store import StateStore
from fedbayes.messages import Message, decode, dense
from fedbayes.metrics import Predictor, Sampler
from fedbayes.models import Network
from fedbayes.runs.folder import NO_UPDATE, ClientStates, RunFolder
from fedbayes.tensors import Tensors, to, unpack


def own_states(
    run: RunFolder, method: AnyMethod, device: torch.device, client: int | None = None
) -> Iterator[tuple[int, Message, Any]]:
    """Clients with a private state, what the server would send each now, and the state.

    Where the best round's checkpoint is kept, all is as it was after that round.

    Args:
        run: the run folder.
        method: of the run.
        device: where the tensors go.
        client: this one alone, in place of all.

    Raises:
        RunError: there is no checkpoint, the states are elsewhere or damaged, or the client has
            none.
    """
    progress = run.progress(run.best_round())
    if progress is None:
        raise RunError(f"{run.path} has no checkpoint")
    place = ENGINES[run.config().engine].states
    if place == "remote":
        raise RunError(f"the clients' own models of {run.path} are with their nodes")
    server: Any = unpack(method.server_state, progress.server)
    states = ClientStates(run.clients, progress.stored)
    if client is not None and client not in states:
        raise RunError(
            f"client {run.client_names()[client]} of {run.path} has no model of its own: "
            f"{'it was in no round' if len(states) else _none(method)}"
        )
    for number in states if client is None else [client]:
        message = {name: item.to(device) for name, item in method.message(server, number).items()}
        state = states[number]
        if place == "nodes":
            state = _with_its_node(run, number, state)
        try:
            own: Any = unpack(method.client_state, to(dense(decode(state)), device))
        except MessageError as error:
            raise RunError(
                f"the private state of client {number} in {run.path} is damaged: {error}"
            ) from None
        yield number, message, own


def _with_its_node(run: RunFolder, client: int, ticket: bytes) -> bytes:
    return StateStore(run.path / "nodes" / str(client)).load(ticket, client)


def _none(method: AnyMethod) -> str:
    return f"clients under {method.name} keep none between rounds; virtual and local do"


def own_weights(run: RunFolder, method: AnyMethod, client: int) -> Tensors:
    """A client's own network, as weights.

    Raises:
        RunError: it has none, or none that single weights say.
    """
    ((_, _, state),) = own_states(run, method, torch.device("cpu"), client)
    weights = method.personal_model(state)
    if weights is None:
        raise RunError(
            f"clients under {method.name} keep no network of their own as weights between rounds; "
            "leave --client out for the global model"
        )
    return weights


def own_samplers(
    run: RunFolder, method: AnyMethod, network: Network, client: int | None = None
) -> Iterator[tuple[int, Sampler]]:
    """Clients that keep a model, and the draws behind its predictions.

    Raises:
        RunError: there are none.
    """
    found = False
    for number, message, state in own_states(run, method, network.device, client):
        draw = method.personal_sampler(message, state, network)
        if draw is not None:
            found = True
            yield number, draw
    if not found:
        raise RunError(f"{run.path} has no models of single clients: {_none(method)}")


def own_predictor(run: RunFolder, method: AnyMethod, network: Network, client: int) -> Predictor:
    """Prediction by a client's own model: log-probabilities, the mean over its draws."""
    ((_, draw),) = own_samplers(run, method, network, client)

    def predict(x: torch.Tensor) -> torch.Tensor:
        each = draw(x)
        return torch.logsumexp(each, dim=0) - log(len(each))

    return predict


def require_global(run: RunFolder, method: AnyMethod) -> None:
    """See that a run has a global model that learnt something.

    Raises:
        RunError: only its clients have models (says whose), or no round had an update.
    """
    if run.summary().get("stopped_reason") == NO_UPDATE:
        raise RunError(f"the model of {run.path} is the untrained start: {NO_UPDATE}")
    if not method.has_global_model:
        raise RunError(
            f"{run.path} has no global model: under {method.name} only clients have models. Name "
            f"one with --client: {listed(run.client_names())}"
        )
