"""What clients' factors and variates become, against the arithmetic written out."""

import pytest
import torch

from fedbayes.contracts import Report, Sum
from fedbayes.contracts.natural import NaturalGaussian, retracting
from fedbayes.core.tensors import named
from fedbayes.methods.dsvgd import Dsvgd
from fedbayes.methods.fedlap import FedLap
from fedbayes.methods.pvi import Pvi
from fedbayes.methods.scaffold import Scaffold
from tests.helpers.places import at, network, run_of, samples


@pytest.mark.parametrize("left", [1, 2, 3])
def test_a_factor_has_its_share_of_the_prior_among_those_who_are_left(left):
    """Precisions add: that of p(θ)^(1/left) / p(θ)^(1/4) more, and no shift, for p has mean 0."""
    method, run = Pvi(prior_std=2.0), run_of(network(), clients=4)
    factor = NaturalGaussian({"w": torch.tensor([3.0])}, {"w": torch.tensor([1.0])})
    found = method.remaining(method.client_state(factor), run, left).factor
    assert found.precision["w"].item() == pytest.approx(3 + (1 / left - 1 / 4) / 2.0**2)
    assert found.shift["w"].item() == 1


def test_what_is_taken_back_is_of_the_shift_alone():
    def take_back(*arguments):
        return arguments

    for declared in (Pvi.reports, FedLap.reports):
        found = retracting(declared, take_back, "with a way out")
        assert found.parts.keys() == declared.parts.keys() == {"precision", "shift"}
        assert found.parts["shift"].retract is take_back
        assert found.parts["precision"].retract is declared.parts["precision"].retract
        assert found.parts["precision"].uncompressed.endswith("with a way out")


def test_a_report_of_particles_has_the_names_and_shapes_that_are_expected():
    place = at(network(), steps=1, batch_size=6, optimizer="adam", lr=0.01)
    method = Dsvgd(particles=3)
    message = method.message(method.init(place.run), place)
    report, _, _ = method.local(message, method.join(place), samples(6), place)
    expected = method.expected(message, place.run)
    assert report.tensors.keys() == expected.keys()
    assert {n: t.shape for n, t in report.tensors.items()} == {
        n: t.shape for n, t in expected.items()
    }


def test_weights_that_were_heard_are_counted_beyond_the_digits_of_float32():
    run, method = run_of(network(), clients=4), Scaffold()
    server, reports = method.init(run), Sum()
    reports.add(0, Report(named("control", server.control), 2.0**24 + 1))
    _, heard = method.control_after(server, reports, run)
    assert heard.tolist() == [2.0**24 + 1, 1.0]
