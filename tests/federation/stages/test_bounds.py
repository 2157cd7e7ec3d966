"""What is believed of a report: how long its change is, what it weighs; and undone updates."""

import math
import statistics
from dataclasses import replace
from itertools import cycle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbayes import Config, Simulation, resume, run
from fedbayes.contracts import (
    About,
    ChangeCoordinates,
    Part,
    Report,
    ReportList,
    Reports,
    RoundContext,
    Sum,
)
from fedbayes.contracts.reports import ReportRow, ReportRows
from fedbayes.core.by_client import ByClient
from fedbayes.core.messages import Masked
from fedbayes.core.tensors import pack
from fedbayes.errors import MessageError, RunError
from fedbayes.federation.engines.sequential import Sequential
from fedbayes.federation.ledger import Ledger, ReportWeights, SpillBuffer
from fedbayes.federation.stages.aggregation import Aggregation, Clipped, PlainReducer
from fedbayes.federation.stages.bounds import (
    Bounds,
    ChangeNorms,
    NormBound,
    median,
    norms_of,
    size_of,
)
from fedbayes.federation.stages.checks import encode_report, read_report
from fedbayes.federation.stages.stage import Arrival
from fedbayes.methods import METHODS
from fedbayes.methods.fedavg import FedAvg
from fedbayes.testing import Tampering, assert_identical
from tests.helpers.cases import cases
from tests.helpers.places import network, run_of

DATA = {"name": "digits", "clients": 5, "partition": "iid", "limit": 500}
TRAINED = [name for name in METHODS if name not in ("local", "global")]
SETTINGS = {
    "virtual": {"training": {"optimizer": "adam", "lr": 0.003}},
    "pvi": {"training": {"optimizer": "adam", "lr": 0.003}},
    "pfedbayes": {"training": {"optimizer": "adam", "lr": 0.003}},
    "fedgvi": {"training": {"optimizer": "adam", "lr": 0.003}},
    "pfnm": {"model": {"name": "mlp", "init": "normal", "hidden": [16]}},
    "gpi-fnm": {"model": {"name": "mlp", "init": "normal", "hidden": [16]}},
}


def filled(item, value):
    """A tensor of a report with one value everywhere, if it is of real numbers."""
    if isinstance(item, Masked):
        return replace(item, values=filled(item.values, value))
    return torch.full_like(item, value) if item.is_floating_point() else item


def lying(client, first=1, value=3e38, weight=None):
    """What makes the reports of a client hold one huge value, or weigh something else."""

    def tamper(task, outcome):
        if task.client != client or task.round < first:
            return outcome
        report = read_report(outcome.report)
        tensors = report.tensors
        if weight is None:
            tensors = {name: filled(item, value) for name, item in tensors.items()}
        lie = Report(tensors, weight or report.weight)
        return replace(outcome, report=encode_report(lie))

    return tamper


def attacked(config, tamper, folder=None):
    """The simulation of a run under attack, at its end, and its lines."""
    with Simulation(config, folder) as simulation:
        simulation._engine = Tampering(Sequential(simulation.runtime), tamper)
        lines = [step.metrics for step in simulation]
        return simulation, lines


def small(method="fedavg", **more):
    return Config.create(
        **{
            "rounds": 3,
            "data": DATA,
            "model": {"hidden": [16]},
            "metrics": [],
            "method": {"name": method},
            **SETTINGS.get(method, {}),
            **more,
        }
    )


def without_client(client):
    """What makes the reports of a client garbage: it counts as if it had not been there."""

    def tamper(task, outcome):
        return replace(outcome, report=b"no report") if task.client == client else outcome

    return tamper


@pytest.mark.parametrize(
    "method",
    cases(
        ["fedavg", "scaffold", "fedyogi", "virtual", "mixture", "pfnm", "fedsparse"],
        slow=("virtual", "mixture"),
    ),
)
@pytest.mark.filterwarnings("ignore::fedbayes.errors.FedbayesWarning")
def test_a_huge_report_counts_as_if_its_client_had_not_been_there(method):
    config = small(method)
    with_lies, lines = attacked(config, lying(1))
    without, _ = attacked(config, without_client(1))
    assert [list(line["refused"]) for line in lines] == [["1"]] * 3
    assert "max_change = 5" in lines[-1]["refused"]["1"]
    assert_identical(pack(with_lies.server), pack(without.server))
    assert with_lies.summary()["refused_clients"] == {"client-1": 3}


@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name in TRAINED if name != "gaussian-head"])
@pytest.mark.parametrize("lie", [{"value": 3e38}, {"value": -1e30}, {"weight": 2.0**53}])
@pytest.mark.filterwarnings("ignore::fedbayes.errors.FedbayesWarning")
def test_every_method_ends_as_without_a_huge_liar(method, lie):
    if method == "fedpm" and "value" in lie:
        pytest.skip("its reports are bits, which cannot be huge")
    config = small(method, rounds=2)
    with_lies, lines = attacked(config, lying(2, first=2, **lie))
    assert [list(line["refused"]) for line in lines] == [[], ["2"]]
    without, _ = attacked(
        config, lambda task, o: without_client(2)(task, o) if task.round == 2 else o
    )
    assert_identical(pack(with_lies.server), pack(without.server))


@pytest.mark.slow
@pytest.mark.parametrize("method", TRAINED)
@pytest.mark.filterwarnings("ignore::fedbayes.errors.FedbayesWarning")
def test_honest_clients_of_a_heterogeneous_federation_are_hardly_ever_refused(method):
    data = {"name": "digits", "clients": 12, "partition": "dirichlet", "alpha": 0.1}
    lines = run(small(method, rounds=4, cohort=4, data=data)).metrics
    assert sum(len(line["refused"]) for line in lines) <= 1, "of 16 reports"
    assert not any(line["skipped"] for line in lines)


def test_a_lie_in_a_cohort_of_one_or_two_is_refused_too():
    for cohort in (1, 2):
        config = small(cohort=cohort, rounds=6, seed=1)
        simulation, lines = attacked(config, lying(0))
        came = [line for n, line in enumerate(lines, 1) if 0 in simulation.cohort_of(n)]
        assert came
        assert all("0" in line["refused"] for line in came)
        without, _ = attacked(config, without_client(0))
        assert_identical(pack(simulation.server), pack(without.server))


@pytest.mark.parametrize("method", ["pfnm", "scaffold"])
@pytest.mark.filterwarnings("ignore::fedbayes.errors.FedbayesWarning")
def test_in_a_round_of_one_a_huge_first_report_is_refused_where_nothing_is_ordinary(method):
    """Matching measures networks from zero; a control variate is zero at first."""
    config = small(method, cohort=1, rounds=4, stop_refused=0)
    simulation, lines = attacked(config, lambda task, o: lying(task.client, value=1e9)(task, o))
    assert all(len(line["refused"]) == 1 for line in lines)
    assert_identical(pack(simulation.server), pack(simulation.method.init(simulation.run)))


def test_a_network_of_zeros_measures_as_if_its_weights_were_one():
    weights = {"a": torch.zeros(3, 2), "b": torch.zeros(3), "steps": torch.tensor(9)}
    run = SimpleNamespace(network=SimpleNamespace(initial=weights))
    assert size_of(run) == 3.0
    weights["b"] += 2.0
    assert size_of(run) == pytest.approx(12**0.5)


def limit(lengths, most=5.0, own=0.0, alone=7.0):
    """The limit of a part, of changes of these lengths beside a server's own."""
    bounds = Bounds(most, {"a": own}, lambda: alone)
    for client, length in enumerate(lengths):
        bounds.within(client, {"a": length})
    return bounds.limits()["a"]


def test_what_is_too_long_is_a_multiple_of_the_median():
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(sigma=2, size=9)
    bounds = Bounds(3.0, {"a": 0.1})
    for client, length in enumerate(lengths):
        bounds.within(client, {"a": length})
    refused = {c for c in range(9) if bounds.excess(c, bounds.limits())}
    assert refused == {c for c in range(9) if lengths[c] > 3 * np.median(lengths)}
    assert 0 < len(refused) < 5


def test_the_servers_own_part_is_no_excuse_but_for_changes_a_hundred_times_shorter():
    assert limit([1.0, 2.0, 3.0, 4.0], own=100.0) == 10.0, "the lower median"
    assert limit([1.0, 2.0, 3.0], own=500.0) == 25.0, "a hundredth of the server's own"
    assert limit([0.0, 0.0, 3.0]) == 0.0
    assert limit([1.0, 2.0, 3.0], own=math.inf) == math.inf


@pytest.mark.parametrize("lengths", [[0.1], [0.1, 1e9]])
def test_of_one_report_or_two_the_servers_own_part_is_the_measure(lengths):
    assert limit(lengths, own=9.0) == 900.0
    assert limit(lengths, own=2.0) == 700.0, "or the network, where there is little yet"
    assert limit(lengths, most=1000.0, own=9.0) == 9000.0, "a wider bound holds here too"


def test_what_is_good_whatever_others_report_is_within_every_limit():
    for own, others in ((3.0, []), (3.0, [1e-9]), (3.0, [1e-9, 1e-9]), (0.0, [1.0, 1.0])):
        bounds = Bounds(5.0, {"a": own})
        lengths = [0.049 * own, *others]
        sure = [bounds.within(c, {"a": length}) for c, length in enumerate(lengths)]
        assert sure[0]
        assert not any(good and bounds.excess(c, bounds.limits()) for c, good in enumerate(sure))


@pytest.mark.parametrize("method", ["fedavg", "mixture"])
@pytest.mark.filterwarnings("ignore::fedbayes.errors.FedbayesWarning")
def test_one_of_ten_that_turns_its_change_around_is_refused_and_the_others_learn(method):
    data = {"name": "digits", "clients": 10, "partition": "iid", "limit": 1000}
    table = {"data": data, "rounds": 3, "training": {"lr": 0.2, "epochs": 4}}
    attack = {"kind": "sign-flip", "scale": 20}
    honest = run(small(method, **table)).summary
    lied = run(small(method, **table, attack=attack)).summary
    believed = run(small(method, **table, attack=attack, aggregation={"max_change": 100})).summary
    accuracy = honest["global_accuracy"]
    assert lied["global_accuracy"] > accuracy - 0.1
    assert believed["global_accuracy"] < accuracy - 0.05, "the bound is what keeps it"
    (liar,) = lied["attack"]["clients"]
    assert lied["refused_clients"] == {f"client-{liar}": 3}


@pytest.mark.parametrize("method", ["pfnm", "gpi-fnm"])
@pytest.mark.filterwarnings("ignore::fedbayes.errors.FedbayesWarning")
def test_of_a_client_that_is_refused_no_earlier_network_is_matched(method):
    """Its lie of round 1 was within bounds; that of round 2 is not."""

    def tamper(task, outcome):
        return lying(1, value=0.1 if task.round == 1 else 1e9)(task, outcome)

    with Simulation(small(method, rounds=2)) as simulation:
        simulation._engine = Tampering(Sequential(simulation.runtime), tamper)
        first, second = simulation
    clients = [{n.partition("/")[0] for n in step.server.latest} for step in (first, second)]
    assert clients == [set("01234"), set("0234")]
    newcomer = RoundContext(simulation.run, 3, 1)
    assert simulation.method.message(second.server, newcomer) == {}
    kept = {n: t for n, t in first.server.latest.items() if n[0] != "1"}
    reports = {
        client: Report({n[2:]: t for n, t in second.server.latest.items() if n[0] == str(client)})
        for client in (0, 2, 3, 4)
    }
    alone, _ = simulation.method.update(
        replace(first.server, latest=kept), ReportList(reports), RoundContext(simulation.run, 2)
    )
    assert_identical(alone.weights, second.server.weights)


def test_norms_do_not_overflow_and_what_is_not_said_is_no_change():
    changes = {
        "a": {"x": torch.tensor([3e38, -4e38], dtype=torch.float64)},
        "b": {"y": torch.tensor([float("nan"), 3.0]).double(), "z": torch.tensor([4.0]).double()},
    }
    declared = Reports({"a": Part(squared=True), "b": Part()})
    assert norms_of(changes, Reports({"a": Part(), "b": Part()})) == pytest.approx(
        {"a": 5e38, "b": 5.0}
    )
    assert norms_of(changes, declared) == pytest.approx({"a": 5e38**0.5, "b": 5.0})


def test_rows_are_measured_as_each_report_alone():
    """Also rows that were changed since, reports with other tensors, and 0 or 1 axes."""
    net = network(hidden=[4])
    run, method = run_of(net), FedAvg()
    way = ChangeCoordinates.of(method, method.init(run), run)
    way = replace(way, declared=Reports({"weights": Part(), "control": Part(squared=True)}))
    norms, first = ChangeNorms(way), net.initial
    real = {n: torch.randn(5, *t.shape) for n, t in first.items()} | {"control/a": torch.randn(5)}
    mixed = {"control/b": torch.randn(5, 0), "control/c": torch.arange(10).reshape(5, 2)}

    def check(report):
        plain = Report(dict(report.tensors), report.weight)
        wanted = norms_of(way.changes(report), way.declared)
        for each in (report, plain):
            assert norms.of(each) == pytest.approx(wanted, rel=1e-6)

    for stacked in (real, real | mixed):
        rows = ReportRows.of(stacked)
        assert (rows.entries is None) == (stacked is not real)
        reports = [ReportRow.of(rows, place, 1.0) for place in range(5)]
        for place in (0, 3, 4, 1):
            check(reports[place])
        rows.stacked["control/a"].mul_(3)
        name = next(iter(first))
        reports[2].tensors[name].add_(1.0)
        for place in (1, 2):
            check(reports[place])
        check(replace(reports[3], tensors={**reports[3].tensors, name: first[name] + 7}))
        reports[4].tensors[name] = first[name] - 7
        check(reports[4])
    huge = ReportRow.of(ReportRows.of({name: torch.full((2, *first[name].shape), 3e30)}), 1, 1.0)
    check(huge)


@pytest.mark.parametrize("types", [(torch.float32,), (torch.float32, torch.float64)])
def test_rows_are_added_as_each_report_alone_to_the_bit(types):
    draw = torch.Generator().manual_seed(2)
    shapes = {"a": (3, 5), "b": (), "c": (70,), "d": (2, 0)}

    def group(order):
        kinds = dict(zip(shapes, cycle(types), strict=False))
        return {n: torch.randn(4, *shapes[n], generator=draw).to(kinds[n]) for n in order}

    weights = [0.3, 1.0, 7.7, 2.0]
    groups = [
        ReportRows.of(group(shapes)),
        ReportRows.of(group(shapes)),
        ReportRows.of(group([*shapes][::-1])),
    ]
    reports = [ReportRow.of(rows, k, weight) for rows in groups for k, weight in enumerate(weights)]
    reports[2].tensors["a"].mul_(2)
    reports[5].tensors["a"] = torch.ones(3, 5, dtype=types[0])
    reports[6] = replace(reports[6], tensors={n: t + 1 for n, t in reports[6].tensors.items()})
    reports.append(Report({n: t.clone() for n, t in reports[0].tensors.items()}, 0.1))
    for first in (0, 6):  # a row, and a report with tensors of its own
        together, alone = Sum(), Sum()
        for report in [*reports[first:], *reports[:first]]:
            together.add(0, report)
            alone.add(0, Report(dict(report.tensors), report.weight))
        assert_identical(together.tensors, alone.tensors)
        assert_identical(together.mean(), alone.mean())
        assert (together.weight, together.clients) == (alone.weight, alone.clients)
        assert together.dtypes == alone.dtypes


def test_without_a_bound_everything_is_folded_in_at_once():
    _, lines = attacked(small(aggregation={"max_change": 0}, rounds=1), lying(1))
    assert lines[0]["refused"] == {}


def test_bytes_are_kept_in_memory_and_then_in_a_file():
    kept = SpillBuffer(bytes, bytes, memory=10)
    data = {3: b"x" * 6, 1: b"y" * 6, 2: b"", 7: b"z" * 100}
    for client, each in data.items():
        kept.add(client, each, len(each))
    assert list(kept) == list(data)
    assert {client: kept.pop(client) for client in kept} == data
    kept.close()


def folded(aggregation, found, weighted=True, memory=None):
    """The total of some reports {"x": …} of changes from zero, and who was refused."""
    reference = {"x": torch.zeros(3)}
    way = SimpleNamespace(
        changes=lambda report: {"weights": {n: t.double() for n, t in report.tensors.items()}},
        resummed=lambda total: total.whole(reference),
    )
    fold = PlainReducer(Sum) if aggregation.plain else Clipped(way, aggregation.clip)

    class Method(FedAvg):
        reports = Reports({"weights": Part(typical=0.0)})

        def origin(self, server, run):
            return {}

    method = Method(weighting="samples" if weighted else "uniform")
    bound, ledger = NormBound(aggregation, method, None, run_of(network())), Ledger()
    arrivals = (Arrival(client, report, None) for client, report in enumerate(found))
    for arrival in bound(arrivals, ledger):
        fold.add(arrival.client, arrival.report)
    return fold, ledger.refused


numbers = st.floats(-1e6, 1e6, width=32)
weights = st.floats(1e-3, 1e6)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.tuples(numbers, numbers, numbers), weights), min_size=2, max_size=8),
    st.tuples(numbers, numbers, numbers),
)
def test_with_clipping_a_client_moves_the_sum_by_no_more_than_the_bound(found, lie):
    """Whatever it reports, and whatever it says that it weighs."""
    clip = 0.5
    aggregation = Aggregation(clip=clip, max_change=0)
    reports = [Report({"x": torch.tensor(x)}, weight) for x, weight in found]
    fold, _ = folded(aggregation, reports)
    honest = fold._total.changes["weights"]["x"]
    assert float(honest.norm()) <= clip * len(found) * (1 + 1e-9)
    other = [*reports[:-1], Report({"x": torch.tensor(lie)}, found[-1][1])]
    fold, _ = folded(aggregation, other)
    moved = fold._total.changes["weights"]["x"] - honest
    assert float(moved.norm()) <= 2 * clip * (1 + 1e-9)
    usual = sorted(weight for _, weight in found)[(len(found) - 1) // 2]
    wanted = sum(min(weight / usual, 10.0) for _, weight in found)
    assert fold._total.weight == pytest.approx(wanted)


def test_what_waits_in_a_file_is_folded_in_as_what_waits_in_memory(monkeypatch):
    found = [Report({"x": torch.randn(3), "a": torch.randn(2)}, float(n + 1)) for n in range(6)]
    aggregation = Aggregation(max_change=1000)
    wanted, _ = folded(aggregation, found)
    monkeypatch.setattr("fedbayes.federation.stages.bounds.MEMORY", 0)
    from_file, _ = folded(aggregation, found)
    assert_identical(from_file.reduced().tensors, wanted.reduced().tensors)
    assert list(from_file.reduced().tensors) == ["x", "a"]


def test_weights_are_one_where_a_method_does_not_weight():
    weights = ReportWeights.of(FedAvg(weighting="uniform"))
    report = Report({}, 1.0)
    assert weights.believed(0, report) == (1.0, "")
    with pytest.raises(MessageError, match="weight is 7; with this method all updates have"):
        weights.believed(0, Report({}, 7.0))


def test_a_weight_is_at_most_what_is_believed_and_what_it_was_at_first():
    weights = ReportWeights.of(FedAvg(), 100.0, ByClient())
    with pytest.raises(MessageError, match=r"the limit is 100 \(aggregation\.max_weight\)"):
        weights.believed(1, Report({}, 101.0))
    assert weights.believed(1, Report({}, 40.0)) == (40.0, "")
    weights.counted(1, 40.0)
    weight, why = weights.believed(1, Report({}, 50.0))
    assert weight == 40
    assert "is 50, but was 40 in its first update" in why
    assert weights.believed(1, Report({}, 30.0)) == (30.0, "")
    weights.counted(1, 30.0)
    assert weights.first.clients.tolist() == [1]
    assert weights.first.columns["weight"].tolist() == [40]


def test_a_client_cannot_grow_and_a_resume_remembers(tmp_path):
    config = small(rounds=3)
    sizes = {}

    def tamper(task, outcome):
        report = read_report(outcome.report)
        sizes[task.client] = report.weight
        return lying(1, first=2, weight=1e6)(task, outcome)

    with Simulation(config, tmp_path / "cut") as simulation:
        simulation._engine = Tampering(Sequential(simulation.runtime), tamper)
        next(iter(simulation))
        weights = simulation.progress.weights
        assert weights.clients.tolist() == [*range(5)]
        assert weights.columns["weight"].tolist() == [sizes[c] for c in range(5)]
    with Simulation(None, tmp_path / "cut") as simulation:
        simulation._engine = Tampering(Sequential(simulation.runtime), tamper)
        lines = [step.metrics for step in simulation]
    assert all("is used" in line["troubles"]["1"] for line in lines)
    honest = run(config)
    assert_identical(pack(simulation.server), pack(honest.server()))


def test_a_uniform_mean_is_not_moved_by_a_weight():
    config = small(method="fedavg", rounds=1)
    config = config.model_copy(update={"method": {"name": "fedavg", "weighting": "uniform"}})
    _, lines = attacked(config, lying(1, weight=50.0))
    assert "all updates have weight 1" in lines[0]["refused"]["1"]


class Unsound(FedAvg):
    """An update that ends at infinity in one round."""

    name = "unsound"
    about = About("an update that ends at infinity")
    bad: int = 2

    def update(self, server, reports, at):
        after, _ = super().update(server, reports, at)
        if at.round == self.bad or self.bad < 0:
            after = replace(after, weights={n: t / 0 for n, t in after.weights.items()})
        return after, {"ours": 1.0}


class UnsoundScaffold(METHODS["scaffold"]):
    """The same, with private states at the clients."""

    name = "unsound-scaffold"

    def update(self, server, reports, at):
        after, info = super().update(server, reports, at)
        if at.round == 2:
            after = replace(after, control={n: t * torch.inf for n, t in after.control.items()})
        return after, info


@pytest.mark.parametrize("method", ["Unsound", "UnsoundScaffold"])
def test_an_update_that_is_not_sound_is_undone(method):
    config = small(f"tests.federation.stages.test_bounds:{method}", rounds=2)
    with Simulation(config) as simulation:
        steps = iter(simulation)
        next(steps)
        server, states = pack(simulation.server), dict(simulation.states)
        line = next(steps).metrics
        assert line["skipped"]
        assert "NaN or infinite values" in line["undone"]
        assert_identical(pack(simulation.server), server)
        assert dict(simulation.states) == states
        assert bool(states) == (method == "UnsoundScaffold")


def test_a_round_without_an_update_counts_no_scores():
    """States of clients stay as they were: what was scored are models that are not kept."""
    config = small(rounds=1, min_reports=5, stop_refused=0)
    _, lines = attacked(config, without_client(1))
    assert lines[0]["skipped"]
    assert lines[0]["local_clients"] == 0


def test_rounds_that_all_come_to_nothing_end_the_run_and_a_resume_tries_again(tmp_path):
    config = small("tests.federation.stages.test_bounds:Unsound", rounds=9, stop_refused=3)
    config = config.model_copy(update={"method": {**config.method, "bad": -1}})
    with pytest.raises(
        RunError,
        match=r"in 3 consecutive rounds .*stop_refused = 0",
    ):
        run(config, tmp_path)
    with Simulation(None, tmp_path) as simulation:
        assert simulation.progress.round == 3
    with pytest.raises(RunError, match="in 3 consecutive rounds all updates were"):
        resume(tmp_path)
    with Simulation(None, tmp_path) as simulation:
        assert simulation.progress.round == 6


def test_a_run_of_refused_reports_ends_with_an_error():
    def all_lie(task, outcome):
        return lying(task.client, first=2)(task, outcome)

    with pytest.raises(RunError, match="in 5 consecutive rounds all updates were rejected"):
        attacked(small(rounds=9, cohort=1), all_lie)


def test_the_median_is_the_lower_one():
    values = [3.0, 1.0, 2.0, 9.0]
    assert median(values) == statistics.median_low(values)


def test_masks_of_the_server_are_kept():
    """FedDrop chooses the units; a client that reports others is refused."""

    def tamper(task, outcome):
        if task.client != 1:
            return outcome
        report = read_report(outcome.report)
        whole = {
            n: item.dense() if isinstance(item, Masked) else item
            for n, item in report.tensors.items()
        }
        return replace(outcome, report=encode_report(Report(whole)))

    _, lines = attacked(small("feddrop", rounds=1), tamper)
    assert "other entries of" in lines[0]["refused"]["1"]


def test_a_run_that_was_given_up_goes_on_whatever_comes_if_that_is_asked_for(tmp_path):
    config = small("tests.federation.stages.test_bounds:Unsound", rounds=4, stop_refused=2)
    config = config.model_copy(update={"method": {**config.method, "bad": -1}})
    with pytest.raises(RunError, match="stop_refused = 0"):
        run(config, tmp_path)
    file = tmp_path / "config.toml"
    file.write_text(file.read_text().replace("stop_refused = 2", "stop_refused = 0"))
    with Simulation(None, tmp_path) as simulation:
        assert [step.number for step in simulation] == [3, 4]
