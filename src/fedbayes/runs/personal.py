"""Clients' own models between rounds, as the run folder has them."""

from collections.abc import Iterator
from typing import Any

from fedbayes.contracts import AnyMethod, Federation, Models, RoundContext
from fedbayes.contracts.returned import answered
from fedbayes.core import seeds
from fedbayes.core.messages import decode_file
from fedbayes.core.tensors import Samples, Tensors, unpack
from fedbayes.core.wording import listed
from fedbayes.errors import MessageError, RunError, told_as
from fedbayes.federation.client_runtime import read_state
from fedbayes.federation.engine_table import ENGINES
from fedbayes.methods import METHODS
from fedbayes.runs.build import build_network
from fedbayes.storage.calibrations import read_temperature
from fedbayes.storage.folder import NO_UPDATE, RunFolder
from fedbayes.storage.private_states import ClientStates
from fedbayes.storage.progress import Progress
from fedbayes.storage.state_store import StateStore


def own_models(
    folder: RunFolder,
    method: AnyMethod,
    run: Federation,
    client: int | None = None,
    number: int | None = None,
) -> Iterator[tuple[int, Tensors]]:
    """Clients that keep a model, and the model, as `Method.draws` takes it.

    Where the best round's checkpoint is kept, all is as it was after that round.

    Args:
        folder: the run folder.
        method: of the run.
        run: what no round changed.
        client: this one alone, instead of all.
        number: the round that its private state is of, instead of the one that counts; only of
            a client.

    Raises:
        RunError: there is no checkpoint, the states are elsewhere or damaged, or the client has
            no model of its own.
    """
    progress = _progress(folder, client, number)
    place = ENGINES[folder.config().engine].states
    if place == "remote":
        raise RunError(
            f"the clients' own models of {folder.path} are at their nodes. A client can train one "
            "again with a copy of this folder: fedbayes predict RUN NEW.csv --adapt ITS-ROWS.csv"
        )
    server: Any = unpack(method.server_state, progress.server)
    states = ClientStates(folder.clients, progress.states)
    if client is not None and client not in states:
        raise RunError(
            f"client {folder.client_names()[client]} of {folder.path} has no own model: "
            f"{'it was in no round' if len(states) else none_kept(method)}"
        )
    any_model = False
    for number in states if client is None else [client]:
        state = _state(folder, states, number)
        damaged = f"the private state of client {number} in {folder.path} is damaged"
        with told_as(RunError, damaged, MessageError):
            model = own_model(method, server, state, RoundContext(run, progress.round + 1, number))
        if model is not None:
            any_model = True
            yield number, model
    if not any_model:
        raise RunError(f"{folder.path} has no own models of clients: {none_kept(method)}")


def _progress(folder: RunFolder, client: int | None, number: int | None) -> Progress:
    """The checkpoint that names a client's state of a round; the one that counts by default."""
    progress = folder.progress(folder.best_round())
    if progress is None:
        raise RunError(f"{folder.path} has no checkpoint")
    if number is not None and client is not None:
        row = progress.states.row(client)
        if row is None or int(progress.states.columns["round"][row]) != number:
            progress = folder.progress(number)
            assert progress is not None
    return progress


def _state(folder: RunFolder, states: ClientStates, client: int) -> bytes:
    """The private state of a client, from where its engine keeps it."""
    state = states[client]
    if ENGINES[folder.config().engine].states == "nodes":
        return StateStore(folder.path / "nodes" / str(client)).load(state, client)
    return state


def temperature_of(
    folder: RunFolder, client: int | None, number: int | None = None
) -> float | None:
    """The temperature of the global model of a run, or of a client's own; None where there is none.

    That of `fedbayes calibrate` comes first. A client's own is the field `temperature` of its
    private state, 0 where it has none (see `RoundContext.temperature`).

    Args:
        folder: the run folder.
        client: whose model it is of; None for the global one.
        number: the round that its private state is of, instead of the one that counts.

    Raises:
        RunError: a file is damaged.
    """
    found = read_temperature(folder, personal=client is not None)
    if found is not None or client is None:
        return found
    told = _told(folder, client, number).get("temperature")
    return None if told is None or told.numel() > 1 else float(told) or None


def counts_of(folder: RunFolder, client: int, number: int | None = None) -> tuple[int, ...] | None:
    """A client's training samples of each class, where its private state tells them; else None.

    Args:
        folder: the run folder.
        client: whose they are.
        number: the round that its private state is of, instead of the one that counts.

    Raises:
        RunError: a file is damaged.
    """
    told = _told(folder, client, number).get("counts")
    return None if told is None or told.ndim != 1 or not told.any() else tuple(told.tolist())


def _told(folder: RunFolder, client: int, number: int | None) -> Tensors:
    """What a client's private state says next to its model; nothing where its node has it."""
    states = ClientStates(folder.clients, _progress(folder, client, number).states)
    if client not in states or ENGINES[folder.config().engine].states == "remote":
        return {}
    return decode_file(_state(folder, states, client))


def own_model(method: AnyMethod, server: Any, state: bytes, at: RoundContext) -> Tensors | None:
    """The model that a client keeps between rounds, as `Method.draws` takes it; None if none. `at`
    is in the round that would follow, and `state` is encoded.

    Raises:
        MessageError: the private state is damaged.
    """
    device = at.run.network.device
    message = {name: t.to(device) for name, t in method.message(server, at).items()}
    own, _ = read_state(state, method, device)
    return method.personal_model(message, None, own, at.run)


def adapted_model(
    folder: RunFolder, method: AnyMethod, run: Federation, samples: Samples
) -> Tensors:
    """The model of a new client, which took no part, adapted to some of its rows.

    It trains as the others did, against the last state of the server, and sends nothing: as many
    times as a client took part on average.

    Args:
        folder: the run folder.
        method: of the run.
        run: what no round changed.
        samples: rows of the client, standardized, on the network's device.

    Returns:
        The model, as `Method.draws` takes it.

    Raises:
        RunError: clients keep no models of their own under this method, or there is no checkpoint.
    """
    progress = folder.progress(folder.best_round())
    if progress is None:
        raise RunError(f"{folder.path} has no checkpoint")
    if not keeps_own(method):
        raise RunError(f"{folder.path} cannot be adapted to a new client: {none_kept(method)}")
    server: Any = unpack(method.server_state, progress.server)
    config, shape, likelihood = folder.config(), tuple(samples.x.shape[1:]), run.likelihood
    at = RoundContext(
        run,
        progress.round + 1,
        run.clients,
        own_network=lambda: build_network(config, shape, likelihood, run.clients),
    )
    message = {n: t.to(run.network.device) for n, t in method.message(server, at).items()}
    state = method.join(at)
    place = {"round": at.round, "client": run.clients}
    with seeds.global_rng(run.seed, "layers", **place, device=run.network.device):
        for _ in range(max(1, round(progress.round * run.cohort / run.clients))):
            _, state, _ = answered(method, method.local(message, state, samples, at))
    model = method.personal_model(message, None, state, run)
    if model is None:
        raise RunError(f"{folder.path} cannot be adapted to a new client: {none_kept(method)}")
    return model


def none_kept(method: AnyMethod) -> str:
    """A message why clients have no own models, with the methods that have them."""
    if keeps_own(method):
        return f"no layer of this network stays with the clients under {method.name}"
    keepers = [name for name, kind in METHODS.items() if keeps_own(kind())]
    return (
        f"clients keep no model between rounds under {method.name}, but under {listed(keepers, 20)}"
    )


def keeps_own(method: AnyMethod) -> bool:
    """Whether clients of a method keep their own models between rounds."""
    return method.models in (Models.PERSONAL, Models.BOTH)


def own_weights(
    folder: RunFolder, method: AnyMethod, run: Federation, client: int, number: int | None = None
) -> Tensors:
    """A client's own network, as weights; arguments as for `own_models`.

    Raises:
        RunError: it has none, or none that single weights say.
    """
    ((_, model),) = own_models(folder, method, run, client, number)
    if model.keys() != run.network.initial.keys() | run.network.own.keys():
        raise RunError(
            f"clients keep no own weights between rounds under {method.name}. Leave --client out "
            "for the global model"
        )
    return model


def require_global(run: RunFolder, method: AnyMethod, *, of_all: bool = False) -> None:
    """See that a run has a trained global model, or raise a RunError that names others."""
    if run.summary().get("stopped_reason") == NO_UPDATE:
        raise RunError(f"the model of {run.path} is the untrained start: {NO_UPDATE}")
    if not method.models.has_global:
        way = f"Choose one with --client: {listed(run.client_names())}"
        raise RunError(
            f"{run.path} has no global model: under {method.name} only clients have models. "
            + ("Add --personal for these" if of_all else way)
        )
