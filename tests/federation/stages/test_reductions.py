"""Reductions of reports, to the last term: what the server sums, clips and picks."""

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbayes.contracts import ChangeCoordinates, Chart, Report, Reports
from fedbayes.federation.stages.aggregation import Clipped, Robust

CENTRE = {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor([[0.5]]), "steps": torch.tensor(3)}


def way_around(centre):
    """A way for reports of the tensors of `centre`: all real ones are one part."""

    network = SimpleNamespace(initial=centre, buffers=())
    return ChangeCoordinates(network, Reports(), [centre], Chart())


def moved(a, b, dtype=torch.float32):
    return {
        "a": (CENTRE["a"] + torch.tensor(a)).to(dtype),
        "b": (CENTRE["b"] + b).to(dtype),
        "steps": torch.tensor(7),
    }


def shortened(change, clip):
    change = np.asarray(change, dtype=float)
    return change * min(1.0, clip / np.linalg.norm(change))


def flat(tensors):
    return torch.cat([tensors["a"].flatten(), tensors["b"].flatten()]).double().numpy()


CHANGES = [(3.0, 0.0, 4.0), (0.3, 0.0, 0.4), (-6.0, 2.0, 3.0)]
REPORTS = [moved(c[:2], c[2]) for c in CHANGES]


def test_a_clipped_sum_is_around_the_centre():
    reduction = Clipped(way_around(CENTRE), 1.5)
    for client, report in enumerate(REPORTS):
        reduction.add(client, Report(report, client + 1.0))
    # What is bounded is weight times change.
    changes = np.array([shortened(c, 1.5 / n) for n, c in enumerate(CHANGES, 1)])
    wanted = flat(CENTRE) + np.average(changes, axis=0, weights=[1, 2, 3])
    np.testing.assert_allclose(flat(reduction.reduced().mean()), wanted, rtol=1e-6)


def test_robust_rules_see_clipped_reports():
    reduction = Robust(way_around(CENTRE), "median", 0, 1.5)
    for client, report in enumerate(REPORTS):
        reduction.add(client, Report(report))
    wanted = flat(CENTRE) + np.median([shortened(c, 1.5) for c in CHANGES], axis=0)
    np.testing.assert_allclose(flat(reduction.reduced().mean()), wanted, rtol=1e-6)


def test_the_median_of_one_report_is_the_report():
    reduction = Robust(way_around(CENTRE), "median", 0, None)
    reduction.add(0, Report(REPORTS[0]))
    assert torch.equal(reduction.reduced().mean()["a"], REPORTS[0]["a"])


def krum(points, hostile):
    """Multi-Krum by its definition, on rows."""
    count = len(points)
    distances = ((points[:, None] - points) ** 2).sum(-1)
    scores = [
        sum(sorted(np.delete(distances[one], one))[: count - hostile - 2]) for one in range(count)
    ]
    return np.argsort(scores, kind="stable")[: count - hostile]


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6), st.integers(5, 12), st.integers(1, 3))
def test_krum_is_its_definition_where_the_choice_is_close(seed, count, hostile):
    hostile = min(hostile, (count - 3) // 2)
    points = np.random.default_rng(seed).normal(size=(count, 2))
    reduction = Robust(way_around({}), "krum", hostile, None)
    for client, point in enumerate(points):
        reduction.add(client, Report({"w": torch.from_numpy(point)}))
    wanted = points[krum(points, hostile)].mean(0)
    np.testing.assert_allclose(reduction.reduced().mean()["w"], wanted, rtol=1e-9)


def test_krum_tells_near_reports_apart_far_from_zero():
    """Thirty reports that differ by thousandths around a million."""
    points = 1e6 + 1e-3 * np.random.default_rng(0).normal(size=(30, 3))
    reduction = Robust(way_around({}), "krum", 5, None)
    for client, point in enumerate(points):
        reduction.add(client, Report({"w": torch.from_numpy(point)}))
    wanted = points[krum(points, 5)].mean(0)
    np.testing.assert_allclose(
        reduction.reduced().mean()["w"] - 1e6, wanted - 1e6, rtol=0, atol=1e-8
    )
