"""Compressed messages: what arrives, what is kept, what is counted, and what is refused."""

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedbayes
from fedbayes import Config, Simulation, resume, run
from fedbayes.contracts import Report, RoundContext
from fedbayes.core.coding import places_bytes
from fedbayes.core.messages import Masked, decode, dense, encode
from fedbayes.core.tensors import named, pack
from fedbayes.errors import ConfigError, FedbayesWarning, MessageError
from fedbayes.federation.client_runtime import read_state
from fedbayes.federation.engines.sequential import Sequential
from fedbayes.federation.settings import Compression
from fedbayes.federation.stages.checks import encode_report
from fedbayes.federation.stages.report_codec import Compressor
from fedbayes.methods import METHODS
from fedbayes.methods.fedavg import FedAvg
from fedbayes.methods.fedsparse import FedSparse
from fedbayes.methods.scaffold import Scaffold
from fedbayes.testing import Tampering
from tests.helpers.own_layers import OWN
from tests.helpers.own_layers import settings as own_layers

UPS = ("bf16", "int8", "top-k", "random-k")


def asked(method="fedavg", rounds=2, **more):
    """A small federation: 4 clients, 3 in a round."""
    return Config.published(
        **{
            "rounds": rounds,
            "cohort": 3,
            "data": {"name": "digits", "partition": "iid", "limit": 400, "clients": 4},
            "model": {"hidden": [8]},
            "metrics": [],
            "method": {"name": method} if isinstance(method, str) else method,
            **more,
        }
    )


@pytest.fixture(scope="module")
def place():
    """A run, with a network of 64 × 300, 300, 10 × 300 and 10 weights."""
    with Simulation(asked(model={"hidden": [300]})) as simulation:
        return simulation.run


def passage(place, up="none", *, method=None, message=None, **more):
    method = method or FedAvg()
    message = message or method.message(method.init(place), RoundContext(place, 1))
    link = Compressor(Compression(up=up, **more), method, place)
    return link.codec(message, RoundContext(place, 1, 2))


def moved(weights, scale=0.01, seed=0):
    """Weights after some training."""
    rng = torch.Generator().manual_seed(seed)
    return {n: w + scale * torch.randn(w.shape, generator=rng) for n, w in weights.items()}


def sparse(place, seed=0):
    """A report of FedSparse: some units are left out of it."""
    method, rng = FedSparse(), torch.Generator().manual_seed(seed)
    weights = moved(place.network.initial)
    mask = torch.rand(300, generator=rng) < 0.7
    tensors = {n: Masked.keep(w, {(0,): mask}) if len(w) == 300 else w for n, w in weights.items()}
    return method, Report(tensors)


# What arrives


@pytest.mark.parametrize("down", ["none", "bf16"])
@pytest.mark.parametrize("up", [*UPS, "none"])
def test_a_report_arrives_as_what_the_server_has_and_the_change(place, up, down):
    """Tensors of few entries and weights arrive as they were said; the changes of others within
    what their code can err by, from the server's own weights.
    """
    if up == down == "none":
        return
    way = passage(place, up, down=down, share=0.1)
    said = Report(moved(way.received), 37.0)
    written = way.write(said, {})
    report, spared = way.read(written.data)
    assert report.weight == 37.0
    whole = len(encode_report(said))
    # Headers hold other names, so that it is right but for some hundred bytes.
    assert abs(len(written.data) + spared - whole) < 300
    for name, before in place.network.initial.items():
        wanted = said.tensors[name] - way.received[name]
        change = report.tensors[name] - before
        if before.numel() < 64:
            assert name not in way.names
            assert torch.equal(report.tensors[name], said.tensors[name])
            continue
        error = (change - wanted).abs()
        rounding = 1e-6 * before.abs().max()
        if up in ("top-k", "random-k"):
            sent = (change - wanted).abs() <= rounding
            assert (change[~sent] == 0).all()
            assert int((change != 0).sum()) == math.ceil(0.1 * before.numel())
        else:
            most = {"none": 0, "bf16": 2**-7, "int8": 1 / 127}[up]
            assert (error <= most * wanted.abs().max() + rounding).all()
            assert up == "none" or (error > rounding).any()


@pytest.mark.parametrize("up", UPS)
def test_a_sparse_report_keeps_its_units(place, up):
    method, said = sparse(place)
    way = passage(place, up, method=method, share=0.1)
    written = way.write(said, {})
    report, _ = way.read(written.data)
    for name, item in said.tensors.items():
        arrived = report.tensors[name]
        assert isinstance(arrived, Masked) == isinstance(item, Masked)
        if isinstance(item, Masked):
            assert torch.equal(arrived.mask(), item.mask())
            lost = named("unsaid", written.memory).get(f"unsaid/{name}")
            if lost is not None:  # what is not kept in mind has arrived
                change = item.dense() - arrived.dense()
                torch.testing.assert_close(change, lost * item.mask(), rtol=0, atol=1e-6)
                assert (lost[~item.mask()] == 0).all()
    assert len(written.data) < 0.55 * len(encode_report(said))


def test_a_layer_of_which_nothing_is_left_arrives(place):
    weights = moved(place.network.initial)
    none = torch.zeros(300, dtype=torch.bool)
    said = Report(
        {n: Masked.keep(w, {(0,): none}) if len(w) == 300 else w for n, w in weights.items()}
    )
    for up in UPS:
        way = passage(place, up, method=FedSparse())
        report, _ = way.read(way.write(said, {}).data)
        first = next(n for n, item in said.tensors.items() if isinstance(item, Masked))
        assert not report.tensors[first].dense().any()


def test_a_client_that_learns_nothing_leaves_the_server_as_it_is(place):
    """Nothing that the broadcast lost is lost for good: rounding to bf16 is not a step."""
    for up in ("none", *UPS):
        way = passage(place, up, down="bf16")
        before = place.network.initial
        assert any(not torch.equal(way.received[n], w) for n, w in before.items())
        report, _ = way.read(way.write(Report(dict(way.received)), {}).data)
        assert all(torch.equal(report.tensors[n], w) for n, w in before.items())


# What is kept in mind


@pytest.mark.parametrize("up", ["top-k", "random-k"])
@given(seeds=st.lists(st.integers(0, 1000), min_size=1, max_size=4), masked=st.booleans())
@settings(max_examples=15, deadline=None)
def test_what_was_sent_and_what_is_kept_are_all_that_changed(place, up, seeds, masked):
    """To the bit, where sums of the changes are without rounding: these are whole numbers."""
    zeros = {n: torch.zeros_like(w) for n, w in place.network.initial.items()}
    way = passage(place, up, share=0.05, method=FedSparse(), message=zeros)
    memory, sent, changed = {}, dict(zeros), dict(zeros)
    for seed in seeds:
        rng = torch.Generator().manual_seed(seed)
        change = {
            n: torch.randint(-9, 10, w.shape, generator=rng).float() for n, w in zeros.items()
        }
        mask = torch.rand(300, generator=rng) < (0.5 if masked else 2.0)
        said = {
            n: Masked.keep(c, {(0,): mask}) if len(c) == 300 and masked else c
            for n, c in change.items()
        }
        written = way.write(Report(said), memory)
        memory = written.memory
        arrived = dense(way.read(written.data)[0].tensors)
        sent = {n: sent[n] + c for n, c in arrived.items()}
        changed = {n: changed[n] + c for n, c in dense(said).items()}
    for name in way.names:
        assert torch.equal(sent[name] + memory[name], changed[name])
    assert memory.keys() == set(way.names)


def test_eight_bits_with_feedback_err_once_not_in_every_round(place):
    """The sum of what arrives is off by less than a last step, however many rounds there are."""
    way, memory = passage(place, "int8"), {}
    name, sent, changed = way.names[0], 0.0, 0.0
    start = place.network.initial[name]
    for seed in range(30):
        said = moved(place.network.initial, seed=seed)
        written = way.write(Report(said), memory)
        memory = written.memory
        sent = sent + (way.read(written.data)[0].tensors[name] - start).double()
        changed = changed + (said[name] - start).double()
    step = 2 * float((said[name] - start).abs().max()) / 127
    torch.testing.assert_close(sent + memory[name], changed, rtol=0, atol=1e-5)
    assert (sent - changed).abs().max() < step
    without = passage(place, "int8", error_feedback=False)
    assert without.write(Report(said), {}).memory == {}


@pytest.mark.parametrize("up", UPS)
def test_the_federations_variate_stays_the_mean_of_the_clients(up):
    """Clients of SCAFFOLD keep what arrived of their variate's change."""
    config = asked("scaffold", rounds=3, compression={"up": up, "down": "bf16"})
    with Simulation(config) as simulation:
        list(simulation)
        kept = [
            read_state(simulation.states[c], Scaffold(), torch.device("cpu"))[0].control
            if c in simulation.states
            else {}
            for c in range(4)
        ]
        assert sum(map(bool, kept)) >= 3
        for name, common in simulation.server.control.items():
            own = sum(each[name].double() for each in kept if each) / 4
            torch.testing.assert_close(own, common.double(), rtol=1e-5, atol=1e-6)
            assert common.any()


@pytest.mark.parametrize(
    ("method", "up"),
    [
        *(({"name": "fedlap", "covariance": "none"}, up) for up in ("int8", "top-k")),
        *(({"name": "ivon-admm", "rate": 0.0, "rho": 0.3}, up) for up in ("bf16", "random-k")),
    ],
)
def test_duals_of_clients_with_fixed_precisions_add_to_the_servers(method, up):
    """Clients keep what arrived: the server's shifts are the sum of theirs."""
    config = asked(method, rounds=3, compression={"up": up})
    with Simulation(config) as simulation:
        steps = list(simulation)
        assert not any(step.metrics["refused"] for step in steps)
        assert sum(step.metrics["spared_up"] for step in steps)
        server, cpu = simulation.server, torch.device("cpu")
        kept = [
            read_state(simulation.states[c], simulation.method, cpu)[0]
            for c in range(4)
            if c in simulation.states
        ]
        assert len(kept) >= 3
        ivon = method["name"] == "ivon-admm"
        whole = server.dual.shift if ivon else server.posterior.shift
        for name, common in whole.items():
            parts = [(each.reported**0.3 if ivon else each.factor) for each in kept]
            own = sum(part.shift[name].double() for part in parts)
            torch.testing.assert_close(own, common, rtol=1e-5, atol=1e-6)
            assert common.any()


def test_compressed_duals_come_to_the_point_that_whole_ones_come_to():
    """FedLap without covariances on a linear network, whose fixed point is the pool's mode: errors
    shrink with the changes.
    """
    found = []
    for compression in ({}, {"up": "int8"}):
        config = asked(
            {"name": "fedlap", "covariance": "none", "prior_std": 0.3, "damping": 0.5},
            rounds=12,
            cohort=4,
            model={"hidden": []},
            training={"epochs": 3, "lr": 0.05},
            compression=compression,
        )
        with Simulation(config) as simulation:
            list(simulation)
            found.append(simulation.server.posterior.mean)
    for name, mean in found[0].items():
        assert (found[1][name] - mean).norm() < 0.02 * mean.norm()


def test_a_client_whose_report_is_refused_keeps_what_it_had_in_mind():
    config = asked(rounds=3, cohort=4, compression={"up": "top-k"})
    with Simulation(config) as simulation:
        spoilt = {2: 1}  # in the second round that of client 1

        def tamper(task, outcome):
            bad = spoilt.get(task.round) == task.client
            return replace(outcome, report=b"garbage") if bad else outcome

        simulation._engine = Tampering(Sequential(simulation.runtime), tamper)
        steps = iter(simulation)
        next(steps)
        before = {c: simulation.states[c] for c in range(4)}
        assert list(next(steps).metrics["refused"]) == ["1"]
        after = {c: simulation.states[c] for c in range(4)}
        assert [c for c in range(4) if before[c] == after[c]] == [1]


def test_models_that_clients_keep_are_read_beside_what_they_keep_in_mind(tmp_path):
    ended = run(asked("pfedbayes", cohort=4, compression={"up": "top-k"}), tmp_path)
    found = ended.trained(3).expectation(np.zeros((3, 1, 8, 8), np.float32))
    np.testing.assert_allclose(found.sum(1), 1.0, rtol=1e-5)


# What is counted


@pytest.mark.parametrize(
    ("up", "law"),
    [
        ("none", lambda n: 4 * n),
        ("bf16", lambda n: 2 * n),
        ("int8", lambda n: n),
        ("top-k", lambda n: 4 * math.ceil(0.01 * n) + places_bytes(math.ceil(0.01 * n), n)),
        ("random-k", lambda n: 4 * math.ceil(0.01 * n)),
    ],
)
def test_bytes_of_a_large_network_follow_their_law(up, law):
    """Within 1 %: biases, steps, names and shapes weigh no more."""
    with Simulation(asked(model={"hidden": [2000, 2000]})) as simulation:
        way = passage(simulation.run, up)
        data = way.write(Report(moved(simulation.run.network.initial)), {}).data
        wanted = sum(law(w.numel()) for w in simulation.run.network.initial.values())
    assert len(data) == pytest.approx(wanted, rel=0.01)


def test_bytes_are_those_that_pass_and_the_summary_tells_what_is_left(tmp_path):
    config = asked(compression={"up": "int8", "down": "bf16"}, model={"hidden": [100]})
    with Simulation(config, tmp_path) as simulation:
        engine = Tampering(Sequential(simulation.runtime), lambda _, outcome: outcome)
        simulation._engine = engine
        lines = [step.metrics for step in simulation]
        summary = simulation.summary()
    assert sum(line["bytes_up"] for line in lines) == engine.up == summary["bytes_up"]
    assert sum(line["bytes_down"] for line in lines) == engine.down == summary["bytes_down"]
    plain = run(asked(model={"hidden": [100]}), tmp_path / "plain").summary
    assert "compressed" not in plain
    for way, about in (("up", 0.25), ("down", 0.5)):
        share = summary["compressed"][way]
        assert share == pytest.approx(summary[f"bytes_{way}"] / plain[f"bytes_{way}"], rel=0.01)
        assert share == pytest.approx(about, rel=0.1)


# Everywhere the same

MOST = {"up": "top-k", "share": 0.1, "down": "bf16"}


def assert_same(one, two):
    """Two runs ended with the same server, bit by bit."""
    first, second = pack(one.server()), pack(two.server())
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_an_interruption_changes_nothing(tmp_path):
    config = asked("scaffold-fedsparse", compression=MOST)
    whole = run(config, tmp_path / "whole")
    with Simulation(config, tmp_path / "broken") as broken:
        next(iter(broken))
    assert_same(whole, resume(tmp_path / "broken"))


def test_late_reports_are_measured_from_what_their_clients_got():
    """In asynchronous rounds whole weights and rounded ones end near each other, and what is not
    sent, of clients that are at work in between, stays with them.
    """
    more = {
        "rounds": 8,
        "clock": {"speeds": "log-normal"},
        "asynchronous": {"buffer": 2},
    }
    found = []
    for compression in ({}, {"up": "int8", "down": "bf16"}):
        with Simulation(asked(**more, compression=compression)) as simulation:
            steps = list(simulation)
            assert not any(step.metrics["refused"] for step in steps)
            found.append((simulation.server.weights, steps, simulation.network.initial))
    (plain, before, start), (near, after, _) = found
    assert max(step.metrics["asynchronous"]["staleness_max"] for step in before) > 0
    for name, weights in plain.items():
        moved = (weights - start[name]).norm()
        assert (near[name] - weights).norm() < 0.05 * moved
    for one, other in zip(before, after, strict=True):
        whole, spared = one.metrics["bytes_down"], other.metrics.get("spared_down", 0)
        assert abs(other.metrics["bytes_down"] + spared - whole) < 0.02 * whole + 1


@pytest.mark.slow
def test_worker_processes_come_to_the_same(tmp_path):
    config = asked("scaffold-fedsparse", compression=MOST)
    other = config.model_copy(update={"engine": "workers"})
    assert_same(run(config, tmp_path / "sequential"), run(other, tmp_path / "workers"))


def test_over_flower_it_is_the_same(tmp_path):
    pytest.importorskip("flwr")
    compression = {"up": "int8", "down": "bf16"}
    config = asked("scaffold", compression=compression)
    one = run(config, tmp_path / "sequential")
    two = run(config.model_copy(update={"engine": "flower-simulation"}), tmp_path / "flower")
    assert_same(one, two)
    assert one.summary["bytes_up"] == two.summary["bytes_up"]
    files = [f for f in (tmp_path / "flower" / "nodes" / "0").iterdir() if f.is_file()]
    memory = {n for f in files for n in decode(f.read_bytes()) if n.startswith("unsaid/")}
    assert memory  # it lies with the node, and the server has a ticket
    tickets = [path.read_bytes() for path in (tmp_path / "flower" / "clients").iterdir()]
    assert max(map(len, tickets)) < 200


def test_own_layers_stay_own(tmp_path):
    """The client's variate is behind its own layers in its state, and follows what arrived."""
    asks = own_layers(method={"name": "scaffold"}, compression={"up": "int8"})
    config = Config.create(**asks)
    with Simulation(config, tmp_path) as simulation:
        list(simulation)
        method, cpu = simulation.method, torch.device("cpu")
        states = [read_state(simulation.states[c], method, cpu) for c in range(2)]
        for name, common in simulation.server.control.items():
            own = sum(state.inner.control[name].double() for state, _ in states) / 2
            torch.testing.assert_close(own, common.double(), rtol=1e-5, atol=1e-6)
        assert all(state.own.keys() == OWN and not OWN & memory.keys() for state, memory in states)


def test_a_bound_holds_for_what_arrives():
    """Numbers that are scaled up on the way are shortened as any: the sum moves by C at most."""
    config = asked(
        rounds=1,
        cohort=1,
        aggregation={"clip": 0.01},
        compression={"up": "random-k", "share": 0.1, "error_feedback": False},
    )
    with Simulation(config) as simulation:
        before = dict(simulation.server.weights)
        list(simulation)
        change = [simulation.server.weights[n].double() - w.double() for n, w in before.items()]
    length = math.sqrt(sum(float(c.square().sum()) for c in change))
    assert length == pytest.approx(0.01, rel=1e-3)


def test_a_lie_is_compressed_as_the_truth_is():
    """Of the only client, the sign of whose change is turned, the server hears the opposite."""
    found = []
    for attack in ({}, {"kind": "sign-flip", "clients": 1}):
        more = {"rounds": 1, "data": {"name": "digits", "clients": 1}, "cohort": 1}
        config = asked(compression={"up": "bf16"}, **more, **({"attack": attack} if attack else {}))
        with Simulation(config) as simulation:
            before = dict(simulation.server.weights)
            (step,) = list(simulation)
            assert not step.metrics["refused"]
            found.append(
                torch.cat([(simulation.server.weights[n] - w).flatten() for n, w in before.items()])
            )
    honest, lied = found
    cosine = torch.nn.functional.cosine_similarity(honest, lied, dim=0)
    assert float(cosine) == pytest.approx(-1.0, abs=1e-3)


# What is refused


def test_messages_of_strangers_are_refused(place):
    """What is no compressed report is refused in words, whatever is wrong with it."""

    def changed(up, method=None, said=None, **parts):
        way = passage(place, up, method=method, share=0.1)
        said = said or Report(moved(place.network.initial))
        sent = dict(decode(way.write(said, {}).data))
        for name, change in parts.items():
            key = next(n for n in sent if n.endswith(name.replace("__", ".")))
            if change is None:
                del sent[key]
            else:
                sent[key] = change(sent[key])
        way.read(encode(sent))

    def one(value):
        def put(tensor):
            tensor = tensor.clone()
            tensor[0] = value
            return tensor

        return put

    largest = next(n for n, w in place.network.initial.items() if w.numel() == 300 * 64)
    name = largest.replace(".", "__")
    bad = [
        ("int8", {"steps": one(math.nan)}, "length of its steps is nan"),
        ("int8", {"steps": one(math.inf)}, "length of its steps is inf"),
        ("int8", {"steps": one(-1.0)}, "length of its steps is -1"),
        ("int8", {"steps": one(3e38)}, "NaN or infinite"),
        ("int8", {"steps": lambda t: t[:-1]}, "'/steps' has shape"),
        ("int8", {"steps": lambda t: t.double()}, "'/steps' has type"),
        ("int8", {"steps": None}, "steps are missing"),
        ("int8", {name: lambda t: t.float()}, "has type"),
        ("int8", {name: lambda t: t[:-1]}, "has shape"),
        ("bf16", {name: lambda t: t.float()}, "has type"),
        ("bf16", {name: lambda t: t * math.nan}, "NaN or infinite"),
        ("top-k", {f"/places/{name}": None}, "positions of .* are missing"),
        ("top-k", {f"/places/{name}": lambda t: t[:-1]}, "are not 1,920 of 19,200"),
        ("top-k", {f"/places/{name}": torch.zeros_like}, "are not 1,920 of 19,200"),
        ("top-k", {f"/places/{name}": lambda t: torch.full_like(t, 255)}, "are not 1,920"),
        ("top-k", {f"/places/{name}": lambda t: t.int()}, "positions of .* are missing"),
        ("random-k", {name: lambda t: t[:-1]}, "has shape"),
    ]
    for up, parts, words in bad:
        with pytest.raises(MessageError, match=words):
            changed(up, **parts)
    for up in UPS:
        way = passage(place, up)
        sent = decode(way.write(Report(moved(place.network.initial)), {}).data)
        with pytest.raises(MessageError, match="extra '/extra'"):
            way.read(encode({**sent, "/extra": torch.zeros(2)}))
    method, said = sparse(place)
    for change in (lambda t: t[:-1], torch.zeros_like, lambda t: t.float(), lambda t: t | 255):
        with pytest.raises(MessageError):
            changed("top-k", method, said, **{f"/mask:0/{name}": change})
    with pytest.raises(MessageError, match="steps are missing"):
        passage(place, "int8").read(encode_report(Report(moved(place.network.initial))))


@pytest.mark.parametrize("name", METHODS)
def test_methods_take_part_or_say_why_not(name):
    """Those whose reports add number by number take part; the others are refused by name."""
    able = {
        *("fedavg", "fedprox", "reptile", "fedavgm", "fedadam", "fedyogi", "fedpa", "pfedbayes"),
        *("scaffold", "fedsparse", "scaffold-fedsparse", "feddrop", "fedl1"),
        *("feddyn", "fednova", "qfedavg", "moon", "ditto", "apfl", "pfedme", "perfedavg"),
        *("fedper", "fedrep", "fedbn", "hierarchical", "fald", "fedivon"),
    }
    config = asked(name, compression={"up": "int8"})
    if name in able:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FedbayesWarning)
            Simulation(config).close()
        return
    with pytest.raises(
        ConfigError, match=f"compression does not work with {name}: .*It works with fedavg"
    ):
        Simulation(config)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            {
                "engine": "flower-simulation",
                "secure": {"enabled": True},
                "compression": {"down": "bf16"},
            },
            "compression needs .* but secure.enabled adds",
        ),
        (
            {"aggregation": {"rule": "median"}, "compression": {"up": "top-k"}},
            "values for each entry",
        ),
        (
            {
                "method": {"name": "scaffold"},
                "aggregation": {"clip": 1.0},
                "compression": {"up": "int8"},
            },
            "scaffold needs .* but aggregation.clip after compression.up",
        ),
        (
            {"method": {"name": "fedlap"}, "compression": {"up": "bf16"}},
            "with method.covariance = 'none' there is no precision",
        ),
        (
            {
                "method": {"name": "fedlap", "covariance": "none"},
                "compression": {"up": "bf16", "down": "bf16"},
            },
            "compression.down does not work with fedlap",
        ),
        ({"compression": {"up": "zip"}}, "compression.up is 'zip'"),
        ({"compression": {"up": "top-k", "share": 0}}, "compression.share is 0"),
    ],
)
def test_what_does_not_go_together_is_refused(more, words):
    with pytest.raises(ConfigError, match=words):
        Simulation(asked(**more))


def test_settings_without_effect_are_said(tmp_path):
    with pytest.warns(FedbayesWarning, match="compression.share has no effect"):
        Simulation(asked(compression={"up": "int8", "share": 0.2})).close()
    with pytest.warns(FedbayesWarning, match="biased"):
        Simulation(asked(compression={"up": "top-k", "error_feedback": False})).close()
    again = {"method": {"name": "fedlap", "covariance": "none"}}
    with pytest.warns(FedbayesWarning, match="compression.error_feedback has no effect"):
        Simulation(asked(**again, compression={"up": "int8", "error_feedback": False})).close()
    np.savez(tmp_path / "own.npz", x=np.eye(40, 6), y=np.arange(40) % 2)
    own = {"path": tmp_path / "own.npz", "clients": 4, "partition": "iid"}
    with pytest.warns(FedbayesWarning, match="it needs tensors of 64 real numbers or more"):
        Simulation(asked(data=own, compression={"down": "bf16"})).close()


def test_a_run_on_few_entries_learns(tmp_path):
    """A tenth of the entries and feedback come near to what whole weights come to."""
    more = {"rounds": 15, "data": {"name": "digits", "clients": 4, "partition": "iid"}}
    scores = [
        fedbayes.run(asked(**more, compression=c), tmp_path / str(i)).summary["global_accuracy"]
        for i, c in enumerate(({}, {"up": "top-k", "share": 0.1}, {"up": "int8", "down": "bf16"}))
    ]
    assert scores[0] > 0.8
    assert scores[1] > scores[0] - 0.1
    assert scores[2] > scores[0] - 0.03
