"""Contributions of clients: against brute force, axioms, and posteriors in closed form."""

import json
from dataclasses import replace
from itertools import permutations

import pytest
import torch

import fedbayes
from fedbayes.errors import RunError
from fedbayes.storage.contributions import read_contributions
from fedbayes.workflows.clients.contributions import contributions, left_out, shapley
from fedbayes.workflows.clients.forgetting import forget
from tests.helpers.command_line import command


def quiet(done, every):
    pass


def game(clients, rows=3, seed=0):
    """Values of all sets, at random."""
    rng = torch.Generator().manual_seed(seed)
    values = {}

    def value(there):
        if there not in values:
            values[there] = torch.randn(rows, generator=rng, dtype=torch.float64)
        return values[there]

    return value


def test_shapley_values_are_means_over_all_orders():
    clients, value = [0, 2, 3, 7], game(4)
    found = shapley(value, clients, 2, 0, quiet)
    for client in clients:
        added = []
        for order in permutations(clients):
            before = frozenset(order[: order.index(client)])
            added.append(value(before | {client}) - value(before))
        torch.testing.assert_close(found[client][0], torch.stack(added).mean(0))
        assert found[client][1] == 0.0


@pytest.mark.parametrize("count", [3, 11])
def test_they_sum_to_what_all_clients_add(count):
    """Exactly, however few orders are drawn."""
    clients, value = list(range(count)), game(count)
    found = shapley(value, clients, 3, 0, quiet)
    total = sum(mean for mean, _ in found.values())
    torch.testing.assert_close(total, value(frozenset(clients)) - value(frozenset()))


def test_drawn_orders_are_within_their_error():
    """A game whose Shapley values are known: |S|² times weights of clients, by symmetry."""
    clients = list(range(11))

    def value(there):
        return torch.tensor([float(len(there)) ** 2 + sum(there)], dtype=torch.float64)

    found = shapley(value, clients, 300, 1, quiet)
    far = []
    for client in clients:
        mean, error = found[client]
        assert error > 0
        far.append(abs(float(mean) - (11 + client)) / error)
    assert max(far) < 3.5


def test_leave_one_out():
    value = game(3)
    found = left_out(value, [0, 1, 2])
    assert torch.equal(found[1], value(frozenset({0, 1, 2})) - value(frozenset({0, 2})))


SETTINGS = {"clients": 3, "model": {"hidden": [8]}, "rounds": 3}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fedbayes.run(method="pvi", out=tmp_path_factory.mktemp("runs") / "a", **SETTINGS)


def test_leave_one_out_is_what_forgetting_costs(run, tmp_path):
    """On rows that the run is judged by: the same model, found by another way."""
    data = {"clients": 3, "validation": 0.25}
    settings = {key: value for key, value in SETTINGS.items() if key != "clients"}
    judged = fedbayes.run(method="pvi", data=data, out=tmp_path / "a", **settings)
    found = contributions(judged.folder)
    division = judged.folder.partition()
    assert found.rows == len(division.test)
    without = forget(judged, "client-1", out=tmp_path / "b", rounds=0)
    every, others = judged.draws(), without.draws()
    from fedbayes.runs.build import stored_data

    rows = stored_data(judged.config, judged.folder)
    x, y = rows.raw_test(0, found.rows), rows.test_labels()
    added = []
    for draws in (every, others):
        log_p = draws(x).log_softmax(-1).double().logsumexp(0) - torch.tensor(20.0).log()
        added.append(log_p[torch.arange(len(y)), torch.as_tensor(y)])
    difference = added[0] - added[1]
    one = found.clients["client-1"]
    assert one.left_out == pytest.approx(float(difference.mean()), rel=1e-4)
    error = float(difference.std()) / len(y) ** 0.5
    assert one.left_out_error == pytest.approx(error, rel=1e-3)
    assert found.everyone == pytest.approx(float(added[0].mean()), rel=1e-5)


def test_in_the_folder_on_the_page_and_on_the_command_line(run, tmp_path, capsys):
    found = contributions(run.folder)
    assert read_contributions(run.folder) == found
    gain = found.everyone - found.nobody
    above = any(one.left_out > gain for one in found.clients.values())
    assert ("worse than the untrained one" in found.note) == above
    assert ("trust leave-one-out" in found.note) != above
    assert "trust leave-one-out" in replace(found, everyone=found.nobody + 99).note
    total = sum(one.shapley for one in found.clients.values())
    assert total == pytest.approx(found.everyone - found.nobody)
    assert command("contributions", run.folder, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told["clients"]) == {"client-0", "client-1", "client-2"}
    assert command("report", run.folder, "-o", tmp_path / "page.html") == 0
    page = (tmp_path / "page.html").read_text()
    assert "What each client contributes" in page
    assert f"{found.clients['client-0'].shapley:.4f}" in page


def test_where_there_are_none(run, tmp_path):
    averaged = fedbayes.run(method="fedavg", out=tmp_path / "a", **SETTINGS)
    with pytest.raises(
        RunError, match="no factor per client, so contributions cannot be separated"
    ):
        contributions(averaged.folder)
    all_train = fedbayes.run(method="pvi", calibration="none", out=tmp_path / "b", **SETTINGS)
    with pytest.raises(RunError, match=r"no validation rows.*calibration = 'temperature'"):
        contributions(all_train.folder)
    numbers = fedbayes.run(method="pvi", rounds=1, data={"name": "diabetes", "clients": 2})
    with pytest.raises(RunError, match=r"no validation rows\. .* data\.validation = 0\.2$"):
        contributions(numbers.folder)


def test_a_client_that_is_alone_adds_all(tmp_path):
    alone = fedbayes.run(
        method="pvi", rounds=1, data={"name": "diabetes", "clients": 1, "validation": 0.2}
    )
    found = contributions(alone.folder)
    one = found.clients["client-0"]
    assert one.left_out == pytest.approx(one.shapley)
    assert one.left_out == pytest.approx(found.everyone - found.nobody)
    below = replace(found, nobody=found.everyone - one.left_out * (1 + 1e-14))
    assert "untrained one" not in below.note
