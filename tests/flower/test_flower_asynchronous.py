"""Asynchronous rounds over Flower: whose reply comes first, on a grid in this process."""

import pytest
import torch

from fedbayes import Config, Simulation
from fedbayes.errors import ConfigError, EngineError

pytest.importorskip("flwr")

from fedbayes.core.tensors import pack, unpack
from fedbayes.federation.engines.sequential import Sequential
from fedbayes.federation.ledger import ReportWeights
from fedbayes.federation.round import Rules, run_round
from fedbayes.federation.stages.stale import AsyncRound
from fedbayes.flower.apps import client_app, on_grid, state_store
from fedbayes.flower.asynchronous import AsynchronousFlower
from fedbayes.flower.node import Node
from fedbayes.flower.simulated import simulated_grid
from fedbayes.flower.wire import TRAIN, read_task
from fedbayes.runs.build import build_runtime
from fedbayes.testing import assert_identical

SETTINGS = {
    "seed": 5,
    "rounds": 6,
    "cohort": 4,
    "engine": "flower",
    "data": {"name": "digits", "clients": 5, "partition": "iid", "limit": 200},
    "model": {"hidden": [8]},
    "asynchronous": {"buffer": 2, "staleness": "constant"},
}


class Grid:
    """Nodes of a simulation in this process, of which one may be held up.

    Args:
        simulation: whose clients they are.
        held: client of whose answer nobody hears until it is None again.
    """

    def __init__(self, simulation, held=None):
        folder = simulation.folder.path / "nodes"
        # A network of their own: clients train while the server evaluates, in another thread.
        runtime = build_runtime(simulation.config, simulation.data, quiet=True)

        def node(context):
            client = int(context.node_config["partition-id"])
            store = state_store(simulation.config, folder / str(client))
            return Node(client, lambda: runtime, store)

        self._grid, self._close = simulated_grid(client_app(node), simulation.clients)
        self._held, self._clients = held, {}

    def __getattr__(self, name):
        return getattr(self._grid, name)

    def engine(self, simulation):
        engine = on_grid(simulation, lambda: self, self._close)
        engine.poll = 0.02
        if self._held is not None:
            pull = engine._pull

            def held_up(pending, done):
                pull({c: e for c, e in pending.items() if c != self._held}, done)
                for client in [c for c in pending if c in done]:
                    del pending[client]

            engine._pull = held_up
        return engine


def told(simulation):
    """Run the rounds; what came in each, and the server's states."""
    turns, states, ended = [], [simulation.server], simulation._turns.ended

    def note(planned, server, result):
        planned = ended(planned, server, result)
        turns.append(planned.turn)
        return planned

    simulation._turns.ended = note
    states += [step.server for step in simulation]
    return turns, states


def started(config, folder=None, held=None):
    return Simulation(config, folder, engine=lambda run: Grid(run, held).engine(run))


def assert_as_replayed(simulation, turns, states, first=0):
    """The same reports in the same order on the sequential engine come to the same bits."""
    run, method = simulation.run, simulation.method
    engine, private, server = Sequential(simulation.runtime), {}, states[0]
    before, weights = {}, ReportWeights.of(method, 1e6)
    for turn, wanted in zip(turns, states[1:], strict=True):
        before[turn.number] = server
        since = {e.client: e.since for e in turn.reports if e.since != turn.number}
        past = AsyncRound(simulation.config.asynchronous, since, before.get, turn.starts)
        result = run_round(
            run, method, server, engine, private, number=turn.number, cohort=turn.cohort,
            weights=weights, past=past, rules=Rules(compression=simulation.config.compression),
        )  # fmt: skip
        server = unpack(method.server_state, pack(result.server))
        assert_identical(pack(server), pack(wanted))


@pytest.mark.parametrize(
    ("method", "compression"),
    [("fedavg", {}), ("scaffold", {}), ("scaffold", {"up": "int8", "down": "bf16"})],
)
def test_rounds_are_those_of_the_reports_that_came(method, compression, tmp_path):
    config = Config.published(**SETTINGS, method={"name": method}, compression=compression)
    with started(config, tmp_path / "run") as simulation:
        turns, states = told(simulation)
        assert isinstance(simulation.engine, AsynchronousFlower)
        assert len(turns) == 6
        assert all(len(turn.reports) == 2 for turn in turns)
        assert max(s for turn in turns for s in turn.staleness) > 0
        for turn in turns:
            busy = [e.client for e in (*turn.reports, *turn.under_way)]
            assert len(set(busy)) == len(busy)
            assert len(turn.under_way) <= 4
        assert_as_replayed(simulation, turns, states)
        lines = simulation.folder.metrics()
    sent = sum(len(turn.starts) for turn in turns)
    each = lines[0]["bytes_down"] // len(turns[0].starts)
    assert sum(line["bytes_down"] for line in lines) == sent * each
    assert [line["asynchronous"]["started"] for line in lines] == [len(t.starts) for t in turns]


def test_a_slow_client_reports_in_a_later_round(tmp_path):
    """Client 2 is not heard of for five rounds; then its report counts, as late as it is."""
    config = Config.published(**{**SETTINGS, "cohort": 5, "rounds": 8})
    grid = []

    def engine(run):
        grid.append(Grid(run, held=2))
        return grid[0].engine(run)

    with Simulation(config, tmp_path / "run", engine=engine) as simulation:
        turns, states, ended = [], [simulation.server], simulation._turns.ended

        def note(planned, server, result):
            planned = ended(planned, server, result)
            turns.append(planned.turn)
            if turns[-1].number == 5:
                grid[0]._held = None
            return planned

        simulation._turns.ended = note
        states += [step.server for step in simulation]
        assert all(2 not in turn.cohort for turn in turns[:5])
        assert_as_replayed(simulation, turns, states)
        since = next(turn.number for turn in turns if 2 in turn.starts)
        assert since < 4  # asked early, and never heard of again until the fifth round is over
        assert next(e.since for turn in turns for e in turn.reports if e.client == 2) == since
        assert {e.since for e in turns[4].under_way if e.client == 2} == {since}


def test_bytes_are_those_of_the_messages_that_were_sent(tmp_path):
    """The way to client 2 takes no task, whose bytes are of no round therefore."""
    sent = {}

    def engine(run):
        grid = Grid(run)

        def push(messages):
            reached = []
            for message in messages:
                if message.metadata.message_type == TRAIN:
                    task = read_task(message.content)
                    if task.client == 2:
                        continue
                    sent[task.client, task.round] = len(task.message)
                reached.append(message)
            return grid._grid.push_messages(reached)

        grid.push_messages = push
        return grid.engine(run)

    config = Config.published(**{**SETTINGS, "cohort": 5})
    with Simulation(config, tmp_path / "run", engine=engine) as simulation:
        turns, _ = told(simulation)
        lines = simulation.folder.metrics()
    assert any(2 in turn.starts for turn in turns)
    assert {client for client, _ in sent} == {0, 1, 3, 4}
    assert sum(line["bytes_down"] for line in lines) == sum(sent.values())


def test_who_was_at_work_is_asked_again_after_a_resume(tmp_path):
    config = Config.published(**SETTINGS, method={"name": "scaffold"})
    with started(config, tmp_path / "run") as simulation:
        for _ in simulation:
            if simulation.progress.round == 3:
                simulation.stop = True
    left = simulation.progress.timing.under_way
    assert left
    again = Simulation(None, tmp_path / "run", engine=lambda run: Grid(run).engine(run))
    with again:
        turns, _ = told(again)
    assert [turn.number for turn in turns] == [4, 5, 6]
    taken = [e for turn in turns for e in turn.reports]
    assert {(e.client, e.since) for e in left} & {(e.client, e.since) for e in taken}
    assert torch.isfinite(torch.cat([t.flatten() for t in again.folder.model().values()])).all()


def test_where_nobody_reports_the_run_ends_and_can_go_on(tmp_path):
    config = Config.published(
        **{**SETTINGS, "cohort": 1, "data": {**SETTINGS["data"], "clients": 2}},
        round_timeout=3,
    )
    both = {"buffer": 1, "longest": 0}
    config = config.model_copy(update={"asynchronous": config.asynchronous.model_copy(update=both)})
    with (
        Simulation(config, tmp_path / "run", engine=lambda run: _Silent(run)) as simulation,
        pytest.raises(EngineError, match="no client reported in round 1"),
    ):
        next(iter(simulation))


class _Silent:
    """Nobody is connected."""

    def __init__(self, run):
        pass

    def arrivals(self, reports, more, sent):
        assert list(more(set())) == []
        return iter(())

    def at_hand(self):
        return set()

    def forget(self, clients):
        pass

    def close(self):
        pass


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"evaluate_at": "clients"}, "evaluate_at = 'clients' needs clients that wait"),
        ({"attack": {"kind": "sign-flip", "clients": 1}}, "attack"),
        ({"secure": {"enabled": True}}, "whose masks cancel"),
    ],
)
def test_what_needs_clients_that_wait_is_refused(more, words):
    with pytest.raises(ConfigError, match=words):
        Simulation(Config.published(**{**SETTINGS, **more}))
