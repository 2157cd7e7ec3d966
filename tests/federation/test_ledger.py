"""What the server sends in a round, and its accounts of what came back."""

import math
from dataclasses import dataclass, replace

import pytest
import torch

from fedbayes import Config, Simulation
from fedbayes.contracts import Method, Report, RoundContext, Weights
from fedbayes.core.messages import decode, encode
from fedbayes.core.targets import Target
from fedbayes.errors import EngineError, MessageError
from fedbayes.federation.broadcast import ServerMessages
from fedbayes.federation.client_runtime import ClientFailure, ClientResult
from fedbayes.federation.ledger import Ledger
from fedbayes.federation.stages.checks import decode_report, encode_report, encode_reports
from fedbayes.likelihoods import build_likelihood, total
from fedbayes.methods.fedavg import FedAvg
from fedbayes.storage.scores import ClientScores
from fedbayes.testing import assert_identical

COHORT = [0, 1, 3]
ODD = {"loss": math.nan, "norm": math.inf}


@pytest.fixture(scope="module")
def run():
    config = Config.create(data={"clients": 4, "partition": "iid"}, model={"hidden": [4]})
    with Simulation(config) as simulation:
        return simulation.run


@pytest.fixture
def encoded(monkeypatch):
    """The messages that were encoded."""
    found = []

    def counted(message):
        found.append(message)
        return encode(message)

    monkeypatch.setattr("fedbayes.federation.broadcast.encode", counted)
    return found


class Uneven(FedAvg):
    """Sends client 1 something else, and expects an answer of its own from each client."""

    def message(self, server, at):
        return {"x": torch.full((3,), float(at.client == 1))} if at.client else server.weights

    def expected(self, message, run):
        return {"answer": torch.zeros(len(message))}

    def accept(self, server, report, run):
        if report.tensors["answer"][0] < 0:
            raise MessageError("its answer is below zero")


def broadcast(run, method=None, number=2):
    method = method or FedAvg()
    return ServerMessages(run, method, method.init(run), number)


def test_the_very_same_tensors_are_encoded_once(run, encoded):
    sent = broadcast(run)
    tasks = list(sent.tasks(COHORT, {1: b"state"}))
    assert len(encoded) == 1
    assert all(task.message is tasks[0].message for task in tasks)
    assert [(task.client, task.round, task.state) for task in tasks] == [
        (0, 2, None),
        (1, 2, b"state"),
        (3, 2, None),
    ]
    assert {task.constants for task in tasks} == {run.network.constants_digest}
    assert sent.sent == dict.fromkeys(COHORT, len(tasks[0].message))


def test_other_tensors_are_encoded_anew_even_if_they_are_equal(run, encoded):
    sent = broadcast(run, Uneven())
    tasks = list(sent.tasks([0, 1, 2, 3], {}))
    assert len(encoded) == 4
    for task in tasks:
        message = sent.message(task.client)
        assert decode(task.message).keys() == message.keys()
        assert sent.sent[task.client] == len(encode(message))


def test_the_pattern_of_an_answer_is_each_clients_own(run):
    sent = broadcast(run, Uneven())
    list(sent.tasks([0, 1], {}))
    assert sent.expected(0)["answer"].shape == (len(run.network.initial),)
    assert sent.expected(1)["answer"].shape == (1,)
    assert not sent._expected  # it is forgotten: memory does not grow with the cohort


def test_tasks_are_made_one_by_one(run, encoded):
    tasks = broadcast(run).tasks(COHORT, {})
    assert encoded == []
    next(tasks)
    assert len(encoded) == 1


@dataclass
class Books:
    """A broadcast that was sent to the cohort, and the ledger of its round."""

    sent: ServerMessages
    ledger: Ledger

    def enter(self, client, outcome):
        return self.ledger.record(client, outcome, self.sent, self.sent.method)


@pytest.fixture
def books(run):
    sent = broadcast(run)
    list(sent.tasks(COHORT, {}))
    return Books(sent, Ledger())


def good(run, weight=7.0, **more):
    return ClientResult(
        encode_report(Report(run.network.initial, weight)), b"", {"loss": 0.5}, {}, **more
    )


def test_a_good_report_is_handed_on_and_weighed(books, run):
    outcome = good(run, link_down=30, link_up=20, trouble="it came late")
    assert books.enter(0, outcome).weight == 7
    ledger = books.ledger
    assert ledger.bytes_up == len(outcome.report)
    assert (ledger.link_down, ledger.link_up) == (30, 20)
    assert ledger.scores == {0: {}}
    assert ledger.troubles == {0: "it came late"}
    assert ledger.refused == ledger.lost == {}


def test_what_was_sent_in_place_of_a_report_is_what_counts(books, run):
    books.enter(0, good(run, sent=99))
    assert books.ledger.bytes_up == 99


def test_a_bad_report_is_refused_though_its_bytes_count(books, run):
    assert books.enter(0, ClientResult(b"nonsense", b"", {"loss": 0.1}, {})) is None
    assert books.enter(1, ClientResult(good(run).report, b"", {}, {"made up": 1.0})) is None
    assert list(books.ledger.refused) == [0, 1]
    assert "scores" in books.ledger.refused[1]
    assert books.ledger.bytes_up == 8 + len(good(run).report)
    assert books.ledger.info() == {}
    assert books.ledger.scores == {}


def group_of(run, **changes):
    """Results of clients that were trained at once; `changes` of the bias of a client."""
    networks = [
        {n: t + float(changes.get(f"client_{k}", 0)) for n, t in run.network.initial.items()}
        for k in range(3)
    ]
    weights = changes.get("weights", (1.0, 7.0, 0.5))
    data = encode_reports([Report(n, w) for n, w in zip(networks, weights, strict=True)])
    return [ClientResult(each, b"", {}, {}, group=tuple(data)) for each in data]


@pytest.mark.parametrize("weights", [(1.0, 7.0, 0.5), (1.0, 1.0, 1.0), (3.0, 3.0, 2.0)])
def test_reports_of_a_group_are_those_of_each_alone(run, weights):
    results = group_of(run, client_1=0.5, weights=weights)
    for outcomes in (results, results[::-1], [replace(one, group=()) for one in results]):
        sent, ledger = broadcast(run), Ledger()
        list(sent.tasks([0, 1, 2], {}))
        for outcome in outcomes:
            client = [one.report for one in results].index(outcome.report)
            report = ledger.record(client, outcome, sent, sent.method)
            alone = decode_report(outcome.report, sent.method.expected(sent.message(0), run))
            assert report.weight == alone.weight == weights[client]
            assert_identical(report.tensors, alone.tensors)
        assert ledger.refused == {}


@pytest.mark.parametrize("lie", [math.nan, math.inf])
def test_of_a_group_only_the_improper_report_is_refused(books, run, lie):
    results = group_of(run, client_1=lie)
    reports = [books.enter(k, one) for k, one in zip(COHORT, results, strict=True)]
    assert [report is None for report in reports] == [False, True, False]
    assert "NaN or infinite" in books.ledger.refused[1]


@pytest.mark.parametrize("weights", [(1.0, 2.0**60, 1.0), (2.0, 0.0, 2.0), (2.0, math.nan, 2.0)])
def test_of_a_group_only_the_impossible_weight_is_refused(books, run, weights):
    results = group_of(run, weights=weights)
    reports = [books.enter(k, one) for k, one in zip(COHORT, results, strict=True)]
    assert [report is None for report in reports] == [False, True, False]
    assert "its weight is" in books.ledger.refused[1]


def test_a_report_that_is_replaced_on_the_way_is_not_read_from_its_group(books, run):
    first, second, _ = group_of(run)
    other = encode_report(Report({n: t + 1 for n, t in run.network.initial.items()}, 2.0))
    found = books.enter(0, replace(first, report=other))
    assert found.weight == 2
    assert_identical(found.tensors, {n: t + 1 for n, t in run.network.initial.items()})
    assert books.enter(1, second).weight == 7


def test_values_that_the_method_does_not_accept_are_refused(run):
    sent = broadcast(run, Uneven())
    list(sent.tasks([1], {}))
    ledger = Ledger()
    outcome = ClientResult(encode({"answer": torch.tensor([-1.0])}), b"", {}, {})
    assert ledger.record(1, outcome, sent, sent.method) is None
    assert ledger.refused == {1: "its answer is below zero"}


def test_a_lost_clients_bytes_count_if_they_got_there(books):
    size = books.sent.sent[0]
    assert books.enter(0, ClientFailure("gone")) is None
    assert books.enter(1, ClientFailure("gone halfway", link_down=size + 9)) is None
    assert books.enter(3, ClientFailure("odd", size + 9, 5, refused=True)) is None
    assert books.sent.sent == {0: 0, 1: size, 3: size}
    assert books.ledger.bytes_up == 0
    assert (books.ledger.link_down, books.ledger.link_up) == (2 * size + 18, 5)
    assert books.ledger.lost == {0: "gone", 1: "gone halfway"}
    assert books.ledger.refused == {3: "odd"}


def test_without_any_client_there_is_no_round(books):
    for client in COHORT:
        books.ledger.require_someone(2, COHORT)
        books.enter(client, ClientFailure(f"reason {client}"))
    with pytest.raises(EngineError, match=r"no client reported in round 2\. client 0: reason 0;"):
        books.ledger.require_someone(2, COHORT)


@pytest.mark.parametrize("how", [{"refused": True}, {"blocked_by_others": True}])
def test_a_client_that_was_there_makes_it_a_round(books, how):
    for client in COHORT:
        books.enter(client, ClientFailure("x", **(how if client == 3 else {})))
    books.ledger.require_someone(2, COHORT)


def test_metrics_are_means_over_the_clients_that_gave_finite_ones(books, run):
    report = good(run).report
    for client, info in zip(COHORT, [{"loss": 1.0}, {"loss": 2.0, "norm": 5.0}, ODD], strict=True):
        books.enter(client, ClientResult(report, b"", info, {}))
    assert books.ledger.info() == {"loss": 1.5, "norm": 5.0}


def test_the_place_of_a_message_is_the_rounds(run):
    """Messages may depend on the round and the client."""
    seen = []

    class Noting(FedAvg):
        def message(self, server: Weights, at: RoundContext):
            seen.append((at.round, at.client))
            return super().message(server, at)

    assert issubclass(Noting, Method)
    list(broadcast(run, Noting(), number=5).tasks(COHORT, {}))
    assert seen == [(5, client) for client in COHORT]


def test_a_client_without_test_samples_is_in_no_mean():
    likelihood = build_likelihood("categorical", Target("class", ("ant", "bee")))
    scores = {"count": 4.0, "correct": 3.0, "nll": 2.0, "confidence": 2.0}
    clients = ClientScores().after({0: {}, 2: scores})
    assert clients.tested == 1
    assert clients.means(likelihood) == {"accuracy": 0.75, "nll": 0.5}
    assert ClientScores().after({0: {}}).means(likelihood) == {}


def test_a_metric_that_some_clients_cannot_have_is_the_mean_of_the_others():
    """A single test sample has no R²."""
    likelihood = build_likelihood("gaussian", Target("real", ("kg",), (0.0,), (1.0,)))

    def scores(true, predicted):
        draws = torch.tensor([[[one, 0.0] for one in predicted]])
        terms = likelihood.terms(draws, torch.tensor(true)[:, None])
        return {name: float(value) for name, value in total(terms).items()}

    one, two = scores([1.0], [2.0]), scores([0.0, 4.0], [1.0, 1.0])
    means = ClientScores().after({0: one, 1: two}).means(likelihood)
    assert means["mae"] == pytest.approx((1 + (1 + 3) / 2) / 2)
    assert means["r2"] == pytest.approx(1 - (1 + 9) / (4 + 4))  # of the second alone
    assert math.isnan(ClientScores().after({0: one}).means(likelihood)["r2"])
