"""What clients weigh, what they send of what is gone, and when a coordinator may judge."""

import numpy as np
import pytest
import torch

from fedbayes.contracts import Report, ReportList, Stateless, Sum
from fedbayes.contracts.product import PosteriorServer as Server
from fedbayes.contracts.returned import stopped
from fedbayes.core.messages import Masked, dense
from fedbayes.core.tensors import named
from fedbayes.inference import gates
from fedbayes.inference.gaussian import NaturalGaussian
from fedbayes.methods.combined import Combined
from fedbayes.methods.fedsparse import Controlled, ScaffoldFedSparse
from fedbayes.methods.mixture import Mixture
from fedbayes.methods.virtual import Virtual
from fedbayes.models import units
from tests.helpers.places import at, network, run_of, samples


def test_clients_of_a_mixture_weigh_as_many_samples_as_they_have():
    """Eq. 52 with each client counted once for each of its samples."""
    method, net = Mixture(components=2, precision=0.2, weighting="samples"), network()
    server = method.init(run_of(net))
    place = at(net, epochs=1)
    message = method.message(server, place)
    reports = ReportList()
    for client, count in enumerate((5, 17)):
        report, _, _ = method.local(message, Stateless(), samples(n=count, seed=client), place)
        assert report.weight == count
        reports.add(client, report)
    following, _ = method.update(server, reports, place)
    flat = [
        torch.cat([dense(r.tensors)[n].flatten() for n in net.initial]).double()
        for r in reports.reports.values()
    ]
    copies = torch.stack([flat[0]] * 5 + [flat[1]] * 17)
    centres = [
        torch.cat([server.components[f"{k}/{n}"].flatten() for n in net.initial]).double()
        for k in range(2)
    ]
    raw = torch.stack([(-0.1 * (copies - c).square().sum(1)).exp() for c in centres], dim=1)
    shares = raw / raw.sum(1, keepdim=True)
    for k in range(2):
        got = torch.cat([following.components[f"{k}/{n}"].flatten() for n in net.initial])
        wanted = (shares[:, k, None] * copies).sum(0) / shares[:, k].sum()
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [2, 4])
def test_a_plateau_is_seen_as_soon_as_the_window_is_full(window):
    method, net = Combined(alpha="mean", tolerance=0.0, window=window), network([3])
    place = at(net)
    server = method.init(place.run)
    for number in range(1, window + 1):
        reports = ReportList()
        told = {"metric": 0.5, "loss": 1.0, "overflowed": 0.0}
        numbers = named("received", {n: torch.tensor(x).double() for n, x in told.items()})
        reports.add(0, Report({**net.initial, **numbers}, 3.0))
        server, _ = method.update(server, reports, place)
        assert bool(stopped(server)) == (number == window)


def test_control_variates_come_back_for_the_units_that_are_left_and_no_others():
    method, net = ScaffoldFedSparse(temperature=0.05), network([6])
    server = method.init(run_of(net))
    (group, *_) = method._gated(run_of(net))
    gone = torch.tensor([True, False, True, False, False, False])
    weights = units.zero(server.weights, units.masks([group], {group.layer: ~gone}))
    norms = units.row_norms(weights, group)
    opened = {group.layer: gates.thresholds(norms, torch.tensor(5.0), method.temperature)}
    server = Controlled(**{**vars(server), "weights": weights, "thresholds": opened})
    place = at(net, epochs=2)
    client = method.join(place)
    message = method.message(server, place)
    report, after, _ = method.local(message, client, samples(), place)
    for name in net.initial:
        item = report.tensors[f"control/{name}"]
        change = after.control[name] - client.control[name]
        if name.startswith(f"{group.layer}."):
            assert isinstance(item, Masked)
            assert torch.equal(item.masks[(0,)], ~gone)
            shape = [-1] + [1] * (change.ndim - 1)
            change = torch.where(gone.reshape(shape), 0.0, change)
        sent = item.dense() if isinstance(item, Masked) else item
        kept = item.mask() if isinstance(item, Masked) else torch.ones_like(sent, dtype=torch.bool)
        assert torch.equal(sent[kept], change[kept])
        assert not sent[~kept].any()


def test_the_mean_precision_is_told():
    rng = np.random.default_rng(0)
    precision = {n: torch.from_numpy(rng.uniform(1, 3, s)) for n, s in (("a", (2, 3)), ("b", 4))}
    changes = {n: torch.from_numpy(rng.uniform(0, 1, p.shape)) for n, p in precision.items()}
    nothing = {n: torch.zeros_like(p) for n, p in precision.items()}
    reports = Sum()
    reports.add(0, Report(named("precision", changes) | named("shift", nothing)))
    _, info = Virtual().update(Server(NaturalGaussian(precision, nothing)), reports, at(network()))
    every = np.concatenate([(precision[n] + changes[n]).numpy().ravel() for n in precision])
    assert info == {"mean_precision": pytest.approx(every.mean())}
