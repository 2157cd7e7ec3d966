"""Secure aggregation: the sum is right, nothing else is seen, and drop-outs cost what they must."""

import math
import re
import warnings
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from fedbayes import Config, Simulation, resume, run
from fedbayes.contracts import Report
from fedbayes.core.messages import Masked
from fedbayes.core.tensors import pack
from fedbayes.errors import ConfigError, EngineError, MessageError
from fedbayes.federation.privacy.settings import Privacy
from fedbayes.federation.stages.aggregation import Aggregation
from fedbayes.federation.stages.secure import MODULUS, Plan, Secure
from fedbayes.federation.stages.secure import plan as make_plan
from fedbayes.methods.fedavg import FedAvg
from fedbayes.runs.rules import _of_secure
from fedbayes.workflows.running import Result
from tests.helpers.deployment import Deployment, at_work, start, wait_for
from tests.helpers.flower_runs import same, without
from tests.helpers.secure_sums import CLIENTS, close, open_sum, plan_of, settings

pytest.importorskip("flwr")

from flwr.common import bytes_to_ndarray
from flwr.common.constant import PARTITION_ID_KEY
from flwr.common.secure_aggregation.quantization import dequantize, quantize
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage

from fedbayes.flower import apps, secagg_node, secagg_steps, simulated
from fedbayes.flower.node import Node
from fedbayes.flower.poller import LinkError
from fedbayes.flower.wire import HELLO


def largest_error(config, before, after, weights):
    """The closed form of how far a round's mean may be off, entry by entry.

    The sum is exact, so it is that of rounding: less than a step in the mean of the changes times
    n / N and in that of R n / N, of which the change Δ is R times the quotient; and then float32.
    """
    plan = plan_of(config)
    share = np.mean(weights) / plan.max_weight if plan.max_weight else 1.0
    off = plan.step / plan.range if plan.max_weight else 0.0
    change = (after.double() - before.double()).abs()
    return (plan.step + change * off) / (share - off) + 2.0**-22 * after.abs()


UNIFORM = {"name": "fedavg", "weighting": "uniform"}


COARSE = {"levels": 2**16, "range": 2, "shares": 3}


@pytest.mark.parametrize(
    ("method", "secure"),
    [("fedavg", {}), (UNIFORM, {}), (UNIFORM, COARSE), ("fedavg", COARSE), ("scaffold", {})],
)
def test_the_mean_is_that_of_the_open_round_up_to_rounding(method, secure):
    config = settings(method, secure)
    with Simulation(config) as simulation:
        before = simulation.method.model(simulation.server, simulation.run)
        sizes = simulation.data.train_sizes()
        (step,) = simulation
        hidden = simulation.method.model(simulation.server, simulation.run)
    weights = sizes if config.closed().method.get("weighting") == "samples" else 1
    shown = run(open_sum(config)).model
    off = [(hidden[name] - shown[name]).abs() for name in shown]
    for name, difference in zip(shown, off, strict=True):
        assert (difference <= largest_error(config, before[name], shown[name], weights)).all()
    assert secure == {} or max(float(d.max()) for d in off) > 0
    assert step.metrics["lost"] == step.metrics["refused"] == {}


@pytest.mark.parametrize(
    "method",
    [
        pytest.param("pvi", marks=pytest.mark.slow),
        pytest.param("ivon-admm", marks=pytest.mark.slow),
        {"name": "fedlap", "covariance": "none"},
        {"name": "fedlap", "covariance": "kronecker"},
    ],
)
def test_natural_parameters_add_up_to_those_of_the_open_round(method):
    """Sums of rounded changes: less than a step off for each client of a round."""
    config = settings(method, model={"hidden": [4]})
    plan, sums = plan_of(config), []
    assert plan.range == 65536
    for one in (config, open_sum(config)):
        with Simulation(one) as simulation:
            (step,) = simulation
            server = pack(simulation.server)
        assert step.metrics["lost"] == step.metrics["refused"] == {}
        sums.append({n: t for n, t in server.items() if n.startswith(("posterior/", "pool/"))})
    hidden, shown = sums
    for name, wanted in shown.items():
        most = CLIENTS * plan.step + 2.0**-22 * wanted.abs()
        assert ((hidden[name] - wanted).abs() <= most).all(), name
    assert any((hidden[name] != wanted).any() for name, wanted in shown.items())


def test_two_runs_are_the_same_bit_for_bit_though_masks_are_not():
    config = settings("scaffold", rounds=2)
    assert same(run(config).model, run(config).model)


def test_rounding_keeps_numpys_own_rng():
    np.random.seed(5)  # noqa: NPY002
    expected = np.random.rand(3)  # noqa: NPY002
    np.random.seed(5)  # noqa: NPY002
    run(settings())
    # The thread of the simulation shares it.
    assert (np.random.rand(3) == expected).all()  # noqa: NPY002


@pytest.fixture
def seen(monkeypatch):
    """What the server saw of masked reports and what the clients had written, in their order."""
    found = {"answers": [], "vectors": []}
    write, check = Plan.write, secagg_steps.CHECKS[Stage.COLLECT_MASKED_VECTORS]

    def writes(plan, report, *place):
        vector = write(plan, report, *place)
        found["vectors"].append(vector)
        return vector

    def checks(answer, asked, entries):
        found["answers"].append(answer)
        check(answer, asked, entries)

    monkeypatch.setattr(Plan, "write", writes)
    monkeypatch.setitem(secagg_steps.CHECKS, Stage.COLLECT_MASKED_VECTORS, checks)
    return found


def masked_numbers(answer):
    data = answer.content.config_records[RECORD_KEY_CONFIGS][Key.MASKED_PARAMETERS]
    return [bytes_to_ndarray(array) for array in data]


def test_what_the_server_sees_of_one_client_is_uniform_and_not_its_report(seen):
    config = settings()
    run(config)
    plan = plan_of(config)
    assert len(seen["answers"]) == len(seen["vectors"]) == CLIENTS
    for answer in seen["answers"]:
        weight, numbers = masked_numbers(answer)
        for vector in seen["vectors"]:
            (plain,) = quantize([vector], plan.range, plan.levels)
            # Without masks the two would be within a step of each other.
            apart = (numbers - plain) % MODULUS
            assert np.minimum(apart, MODULUS - apart).mean() > MODULUS / 5
            assert abs(np.corrcoef(numbers, vector)[0, 1]) < 6 / math.sqrt(len(vector))
        for values in (numbers, numbers % 2**16 * 2**16):  # high and low bits
            assert chisquare(np.bincount(values * 64 // MODULUS, minlength=64)).pvalue > 1e-7
        assert weight != plan.levels
    exact = sum(quantize([v], plan.range, plan.levels)[0].astype(np.int64) for v in seen["vectors"])
    together = sum(masked_numbers(answer)[1] for answer in seen["answers"]) % MODULUS
    # Pairwise masks cancel; those of single clients are still on, until they open them.
    assert (np.abs(together - exact) > CLIENTS).mean() > 0.99


def test_a_reply_holds_nothing_else_of_a_client(seen):
    run(settings())
    for answer in seen["answers"]:
        content = answer.content
        assert all(len(record) == 0 for record in content.array_records.values())
        assert [dict(r) for r in content.metric_records.values()] == [{"num_examples": 1}]
        assert dict(content.config_records["fitres.metrics"]) == {"ticket": b""}
        assert content.config_records.keys() == {
            "fitres.metrics",
            "fitres.status",
            RECORD_KEY_CONFIGS,
        }


def test_figures_of_single_clients_are_not_told():
    ended = run(settings("scaffold"))
    (line,) = ended.metrics
    assert line["local_accuracy"] is None
    assert "loss" not in line.get("reported", {})
    assert "loss" in run(open_sum(settings("scaffold"))).metrics[0]["reported"]


def test_bytes_are_those_of_masked_vectors_and_the_link_has_the_keys_on_top():
    ended = run(settings())
    shown = run(open_sum(settings()))
    entries = 1 + sum(t.numel() for t in ended.model.values())
    # Two arrays of 64-bit integers with NumPy's header of 128 bytes.
    assert ended.summary["bytes_up"] == CLIENTS * (8 * (1 + entries) + 2 * 128)
    assert ended.summary["bytes_down"] == shown.summary["bytes_down"]
    assert ended.summary["link_up"] > ended.summary["bytes_up"] + CLIENTS * 1000
    assert ended.summary["link_down"] > shown.summary["link_down"]


@pytest.fixture
def failing(monkeypatch):
    """Makes clients fail at a step of the protocol, in one round."""

    def fail(clients, stage, number=1, how=None):
        mod, rounds = secagg_node.secaggplus_mod, {}

        def failing_mod(message, context, call_next):
            client = context.node_config[PARTITION_ID_KEY]
            step = message.content.config_records[RECORD_KEY_CONFIGS][Key.STAGE]
            if step == Stage.SETUP:
                rounds[client] = int(message.metadata.group_id)
            hit = client in clients and step == stage and rounds[client] == number
            if hit and how is None:
                raise EngineError("the ward is on fire")
            answer = mod(message, context, call_next)
            if hit:
                how(answer.content.config_records[RECORD_KEY_CONFIGS])
            return answer

        monkeypatch.setattr(secagg_node, "secaggplus_mod", failing_mod)

    return fail


def rounds(config):
    """The lines of the rounds, also of a run in which no round had an update."""
    with Simulation(config) as simulation:
        return [step.metrics for step in simulation]


@pytest.mark.parametrize("stage", Stage.all())
def test_without_a_client_that_drops_out_it_is_the_sum_of_the_others(stage, failing):
    config = settings("scaffold", rounds=2)
    failing({1}, stage, number=2)
    ended = run(config)
    losses = ended.summary["losses"]
    if stage == Stage.UNMASK:  # its masked report was there; the others' shares open it
        assert losses == []
    else:
        (loss,) = losses
        assert (loss["round"], loss["client"]) == (2, 1)
        assert loss["reason"] == "its node says: the ward is on fire"
    assert not any(line["skipped"] for line in ended.metrics)
    assert close(ended.model, without(open_sum(config), losses))
    assert not close(ended.model, without(open_sum(config), [{"round": 1, "client": 1}]))


@pytest.mark.parametrize("stage", Stage.all())
def test_a_round_that_too_many_leave_is_lost_in_plain_words_and_the_run_goes_on(stage, failing):
    config = settings("scaffold", rounds=3)
    failing({1, 2}, stage, number=2)
    ended = run(config)
    assert [line["skipped"] for line in ended.metrics] == [False, True, False]
    lost = ended.metrics[1]["lost"]
    assert {lost["1"], lost["2"]} == {"its node says: the ward is on fire"}
    assert lost["0"] == lost["3"]
    assert lost["0"].startswith("secure aggregation failed:")
    assert lost["0"].endswith("3 are needed")
    assert ended.metrics[1]["bytes_up"] == 0
    skipped = open_sum(config).model_copy(update={"min_reports": 3})
    losses = [{"round": 2, "client": client} for client in (1, 2)]
    assert close(ended.model, without(skipped, losses))


def test_a_threshold_that_all_must_meet(failing):
    failing({1}, Stage.COLLECT_MASKED_VECTORS)
    (line,) = rounds(settings(secure={"threshold": CLIENTS}))
    assert line["skipped"]


def changed(key, value):
    def change(record):
        record[key] = value(record[key]) if callable(value) else value

    return change


def halved(arrays):
    return [arrays[0], arrays[1][: len(arrays[1]) // 2]]


@pytest.mark.parametrize(
    ("stage", "how", "words"),
    [
        (Stage.SETUP, changed(Key.PUBLIC_KEY_1, b"none"), "no valid keys"),
        (Stage.SETUP, changed(Key.PUBLIC_KEY_2, 5), "no valid keys"),
        (Stage.SHARE_KEYS, changed(Key.DESTINATION_LIST, [1, 2, 3]), "no valid key shares"),
        (Stage.SHARE_KEYS, changed(Key.CIPHERTEXT_LIST, []), "no valid key shares"),
        (Stage.COLLECT_MASKED_VECTORS, changed(Key.MASKED_PARAMETERS, []), "masked report"),
        (Stage.COLLECT_MASKED_VECTORS, changed(Key.MASKED_PARAMETERS, halved), "masked report"),
        (
            Stage.COLLECT_MASKED_VECTORS,
            changed(Key.MASKED_PARAMETERS, lambda arrays: arrays[::-1]),
            "masked report: shape",
        ),
        (
            Stage.COLLECT_MASKED_VECTORS,
            changed(Key.MASKED_PARAMETERS, lambda arrays: [arrays[0], arrays[1] * 9]),
            "masked report: it is too long",
        ),
    ],
)
def test_what_is_no_answer_is_refused_and_the_round_goes_on(stage, how, words, failing):
    failing({1}, stage, how=how)
    ended = run(settings())
    (line,) = ended.metrics
    assert list(line["refused"]) == ["1"]
    assert words in line["refused"]["1"]
    assert line["lost"] == {}
    assert close(ended.model, without(open_sum(settings()), ended.summary["losses"]))


@pytest.mark.parametrize(
    "shares", [lambda shares: [s[:4] + b"x" * (len(s) - 4) for s in shares], lambda shares: []]
)
def test_false_shares_cost_at_most_the_round(shares, failing):
    failing({1}, Stage.UNMASK, how=changed(Key.SHARE_LIST, shares))
    (line,) = rounds(settings())
    assert line["skipped"] == bool(line["lost"])
    assert all("failed" in reason for reason in line["lost"].values())


def test_a_spoilt_sum_is_told_and_changes_nothing(failing):
    def garbage(arrays):
        numbers = np.random.default_rng(1).integers(0, MODULUS, len(bytes_to_ndarray(arrays[1])))
        return [arrays[0], secagg_node.ndarray_to_bytes(numbers)]

    failing({1}, Stage.COLLECT_MASKED_VECTORS, how=changed(Key.MASKED_PARAMETERS, garbage))
    (line,) = rounds(settings())
    assert line["skipped"]
    assert set(line["lost"].values()) == {
        "secure aggregation failed: the sum is impossible for honest updates: a client sent "
        "invalid numbers"
    }


def test_each_part_has_the_range_that_its_method_declares():
    """Normalized averaging sends steps, far larger than weights, which must not coarsen these."""
    config = settings("fednova", rounds=2)
    hidden, shown = run(config), run(open_sum(config))
    assert plan_of(config).range == 65536
    assert close(hidden.model, shown.model, 1e-3)  # with one range for both it is off by 0.6


def test_weights_and_changes_that_do_not_fit_are_named(monkeypatch):
    config = settings(secure={"max_weight": 10})
    with pytest.raises(EngineError, match=r"its weight is \d+; secure.max_weight is 10"):
        run(config)
    with pytest.raises(EngineError, match=r"more than secure\.range = 1e-06"):
        run(settings(UNIFORM, secure={"range": 1e-6}))


CENTRE = {"a": torch.zeros(30, 3), "b": torch.ones(5)}


def report(seed=0, weight=1.0):
    rng = torch.Generator().manual_seed(seed)
    return Report({n: t + torch.randn(t.shape, generator=rng) for n, t in CENTRE.items()}, weight)


def test_reports_become_vectors_and_back():
    plan = make_plan(Secure(enabled=True), FedAvg(), Aggregation(), 5)
    found = [report(seed, 100.0 * (1 + seed)) for seed in range(5)]
    mean = np.mean([plan.write(r, CENTRE) for r in found], 0)
    read = plan.read(mean, CENTRE)
    assert read.weight == pytest.approx(300)
    for name in CENTRE:
        expected = sum(r.tensors[name].double() * r.weight for r in found) / 1500
        assert torch.allclose(read.tensors[name], expected.float(), atol=1e-6)
    with pytest.raises(MessageError, match="impossible for honest updates"):
        plan.read(mean + 20, CENTRE)
    with pytest.raises(MessageError, match="impossible for honest updates"):
        plan.read(mean * math.nan, CENTRE)
    sparse = Masked.keep(CENTRE["a"], {(0,): torch.ones(30, dtype=torch.bool)})
    with pytest.raises(EngineError, match="sparse"):
        plan.write(Report({**CENTRE, "a": sparse}), CENTRE)
    with pytest.raises(EngineError, match="other tensors"):
        plan.write(Report({"a": CENTRE["a"]}), CENTRE)


@pytest.mark.parametrize("levels", [16, 64, 2**20])
def test_a_clipped_change_is_not_longer_when_it_was_rounded(levels):
    plan = make_plan(
        Secure(enabled=True, levels=levels), FedAvg(), Aggregation(clip=0.5), 5, private=True
    )
    assert plan.range == 0.5
    for seed in range(20):
        (numbers,) = quantize([plan.write(report(seed), CENTRE)], plan.range, plan.levels)
        (vector,) = dequantize([numbers], plan.range, plan.levels)
        assert np.linalg.norm(vector[1:]) <= 0.5 * (1 + 1e-6)


def test_clipping_is_done_by_the_clients(seen):
    config = settings(UNIFORM, aggregation={"clip": 0.1})
    hidden, shown = run(config), run(open_sum(config))
    assert close(hidden.model, shown.model)
    for vector in seen["vectors"]:
        assert np.linalg.norm(vector[1:]) <= 0.1 * (1 + 1e-6)


def test_noise_goes_on_the_sum_with_the_same_epsilon():
    pytest.importorskip("dp_accounting")
    config = settings(UNIFORM, aggregation={"clip": 0.5}, privacy={"noise": 0.2})
    hidden, shown = run(config), run(open_sum(config))
    assert hidden.summary["epsilon"] == shown.summary["epsilon"]
    quiet = run(open_sum(config).model_copy(update={"privacy": Privacy()})).model
    noise = torch.cat([(hidden.model[name] - quiet[name]).flatten() for name in quiet])
    assert float(noise.std()) == pytest.approx(0.2 * 0.5 / CLIENTS, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine": "sequential"}, "got engine 'sequential'"),
        (
            {"engine": "workers"},
            "needs engine = 'flower-simulation' or `fedbayes federate`, got engine 'workers'",
        ),
        (
            {"method": {"name": "gpi-fnm"}},
            "not work with gpi-fnm: the server needs the update of each client",
        ),
        (
            {"method": {"name": "fedsparse"}},
            "not work with fedsparse: clients leave out entries",
        ),
        ({"method": {"name": "laplace"}}, "does not work with laplace"),
        (
            {"method": {"name": "pvi"}, "aggregation": {"clip": 3.0}},
            "pvi needs clients.* but aggregation.clip under secure.enabled",
        ),
        ({"method": {"name": "global"}}, "not work with global: it pools all data"),
        ({"method": {"name": "local"}}, "not work with local"),
        ({"aggregation": {"rule": "median"}}, "aggregation.rule = 'median' needs single updates"),
        ({"cohort": 2}, "cohort of at least 3 clients, got 2"),
        ({"secure": {"shares": 5}}, "secure.shares is 5; give an odd number, at most the cohort"),
        ({"secure": {"shares": 3, "threshold": 3}}, "secure.threshold is 3"),
        ({"secure": {"threshold": 5}}, "secure.threshold is 5"),
        ({"secure": {"threshold": 1}}, "secure.threshold is 1"),
        ({"secure": {"levels": 2**30}}, "the limit is 1073741823"),
        ({"secure": {"range": -1}}, "secure.range is -1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(changes, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        run(settings(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_integers_of_a_model_are_refused():
    initial = {"weight": torch.zeros(3), "batches": torch.tensor(3)}
    config = Config.create(engine="flower-simulation", secure={"enabled": True})
    (found,) = _of_secure(
        config, SimpleNamespace(network=SimpleNamespace(initial=initial), cohort=4)
    )
    assert "'batches' of this model has torch.int64" in found


@pytest.mark.parametrize("cohort", [3, 4, 5, 10, 100, 1000])
def test_defaults_follow_the_cohort(cohort):
    plan = make_plan(Secure(enabled=True), FedAvg(), Aggregation(), cohort)
    assert plan.shares == cohort
    assert cohort / 2 < plan.threshold <= cohort / 2 + 1
    assert MODULUS / 8 < plan.levels * cohort <= MODULUS / 2 or plan.levels == 2**30


def test_the_answer_of_a_node_that_has_no_data_is_in_plain_words(monkeypatch):
    def work(self, task, runtime):
        if self.client == 2:
            raise EngineError("its disk is full")
        return honest(self, task, runtime)

    honest = Node.work
    monkeypatch.setattr(Node, "work", work)
    (line,) = rounds(settings())
    assert line["lost"] == {"2": "its node says: its disk is full"}


@pytest.mark.slow
def test_who_is_not_there_for_the_keys_is_lost_and_its_node_named(monkeypatch):
    def answer(self, message):
        if self.client == 3 and message.metadata.message_type == HELLO:
            raise EngineError("no data here")
        return honest(self, message)

    honest = Node.answer
    monkeypatch.setattr(Node, "answer", answer)
    config = settings(round_timeout=16)
    ended = run(config)
    lost = ended.metrics[0]["lost"]
    assert list(lost) == ["3"]
    assert lost["3"].startswith("it was not connected for the keys of the round; node")
    assert lost["3"].endswith("no data here")
    assert close(ended.model, without(open_sum(config), ended.summary["losses"]))


@pytest.mark.slow
def test_a_link_that_breaks_in_a_round_ends_the_run_which_can_be_resumed(monkeypatch, tmp_path):
    def push(self, message):
        if message.metadata.group_id == "2" and len(self.down) == CLIENTS:
            raise LinkError("connection refused")
        return honest(self, message)

    honest = secagg_steps.SecaggSteps._push
    config = settings("scaffold", rounds=3)
    with monkeypatch.context() as broken:
        broken.setattr(secagg_steps.SecaggSteps, "_push", push)
        with pytest.raises(EngineError, match="the SuperLink was lost: connection refused"):
            run(config, tmp_path / "run")
    assert same(resume(tmp_path / "run").model, run(config).model)


@pytest.mark.slow
def test_a_federation_of_processes_ends_with_the_model_of_the_simulation(tmp_path):
    config = settings("scaffold", rounds=2, round_timeout=200)
    with Deployment(tmp_path) as deployment:
        for client in range(CLIENTS):
            deployment.start_node(client)
        process = start(deployment, config)
        assert process.wait(timeout=400) == 0, deployment.log("federate")
        ended = Result(tmp_path / "run")
    assert ended.summary["losses"] == []
    assert same(ended.model, run(config).model)


@pytest.mark.slow
def test_a_killed_node_is_left_out_of_the_sum(tmp_path):
    config = settings("scaffold", rounds=2, round_timeout=200)
    with Deployment(tmp_path) as deployment:
        for client in range(CLIENTS):
            deployment.start_node(client)
        process = start(deployment, config)
        wait_for(lambda: at_work(deployment, 1, 2), 200, "second round at node 1")
        deployment.kill(deployment.nodes[1])
        assert process.wait(timeout=400) == 0, deployment.log("federate")
        ended = Result(tmp_path / "run")
    losses = [(loss["round"], loss["client"]) for loss in ended.summary["losses"]]
    assert losses == [(2, 1)], ended.summary["losses"]
    assert close(ended.model, without(open_sum(config), ended.summary["losses"]))


@pytest.mark.parametrize("most", [1e6, 50.0])
def test_a_grid_that_is_coarse_beside_the_weights_is_told(most):
    """The error that the note promises is that of a round, and would be less as it says."""
    config = settings(secure={"max_weight": most, "levels": 2**24}, data={**SMALL, "clients": 4})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        simulation = Simulation(config)
    told = [str(w.message) for w in said if "secure.max_weight" in str(w.message)]
    with simulation:
        before = simulation.method.model(simulation.server, simulation.run)
        list(simulation)
        after = simulation.method.model(simulation.server, simulation.run)
        sizes = simulation.data.train_sizes()
    shown = run(open_sum(config)).model
    error = max(float((after[n] - shown[n]).abs().max()) for n in before)
    if most < 10 * sizes.max():
        assert not told
        assert error < 1e-4
        return
    (found,) = re.findall(r"be off by (\S+) in a round; with max_weight = 38 by (\S+)", *told)
    assert sizes.max() == 38
    assert 1e-4 < error < 1.1 * float(found[0])
    assert float(found[1]) < 1e-5


@pytest.mark.parametrize("most", [1e6, 50.0])
def test_a_coarse_grid_is_told_behind_a_round_where_data_are_elsewhere(most, monkeypatch):
    """Nobody knows their sizes before, and all that is seen of them is the mean."""
    monkeypatch.setattr(
        simulated, "flower", lambda config, cohort: partial(apps.flower(config, cohort), apart=True)
    )
    config = settings(
        secure={"max_weight": most, "levels": 2**24}, data={**SMALL, "clients": 4}, rounds=2
    )
    with warnings.catch_warnings(record=True):
        simulation = Simulation(config)
    with simulation, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        list(simulation)
        sizes = simulation.data.train_sizes()
    told = [str(w.message) for w in said if "secure.max_weight" in str(w.message)]
    if most < 10 * sizes.max():
        assert not told
        return
    ((samples, off),) = re.findall(r"have (\S+) training .* be off by (\S+) in a round", *told)
    assert float(samples) == pytest.approx(sizes.mean(), abs=1)
    step = 2 * plan_of(config).range / 2**24
    assert float(off) == pytest.approx(step * most / sizes.mean(), rel=0.2)


SMALL = {"name": "digits", "partition": "iid", "limit": 200}
