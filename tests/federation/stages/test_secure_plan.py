"""How a report becomes numbers that add, and back; `tests/flower` has the protocol."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedbayes.contracts import Report
from fedbayes.errors import EngineError
from fedbayes.federation.stages.secure import Plan

PLAN = Plan(3, 2, range=0.5, levels=100, max_weight=8.0, clip=0.0)
CENTRE = {"a": torch.zeros(2), "b": torch.ones(3, 2)}


@pytest.mark.parametrize(("weight", "exact"), [(2.0, False), (8.0, True)])
def test_a_vector_is_read_as_the_report_that_it_was_written_from(weight, exact):
    plan = replace(PLAN, exact=exact)
    sent = Report({n: t + 0.1 * torch.randn(t.shape) for n, t in CENTRE.items()}, weight)
    read = plan.read(plan.write(sent, CENTRE), CENTRE)
    assert read.weight == weight
    kind = torch.float64 if exact else torch.float32
    torch.testing.assert_close(read.tensors, {n: t.to(kind) for n, t in sent.tensors.items()})


def test_a_weight_above_the_largest_is_rejected():
    with pytest.raises(EngineError, match=r"its weight is 8\.5; secure\.max_weight is 8"):
        PLAN.write(Report(CENTRE, 8.5), CENTRE)


@pytest.mark.parametrize(("most", "samples"), [(0.0, 2.0), (8.0, 2.0), (8.0, 8.0)])
def test_the_error_is_that_of_a_mean_whose_entries_are_a_step_off(most, samples):
    plan = replace(PLAN, max_weight=most)
    share = samples / most if most else 1.0
    worst = np.array([plan.range * share - plan.step, plan.step])
    off = plan.read(worst, {"a": torch.zeros(1)}).tensors["a"]
    assert plan.error(samples) == pytest.approx(float(off), rel=1e-6)


def test_the_error_has_no_bound_where_the_weights_are_less_than_a_step():
    assert PLAN.error(samples=8 * PLAN.step / PLAN.range / 2) == math.inf
