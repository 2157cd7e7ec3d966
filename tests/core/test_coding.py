"""Codes of numbers: right on average, off by no more than they say, and as long as their law."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbayes.core.coding import (
    Bf16,
    Coded,
    Int8,
    RandomK,
    TopK,
    places_bytes,
    read_places,
    write_places,
)
from fedbayes.errors import MessageError

CODES = (Bf16(), Int8(), TopK(0.1), RandomK(0.1, scaled=False), RandomK(0.1, scaled=True))


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def numbers(count=200, seed=1):
    """Numbers of many magnitudes and both signs, and zeros."""
    drawn = torch.randn(count, generator=rng(seed)) * torch.logspace(-6, 2, count)
    drawn[::17] = 0.0
    return drawn


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("values", [numbers(), torch.zeros(70), torch.tensor([2.0]), numbers(0)])
def test_what_is_read_is_what_the_writer_knows_to_arrive(code, values):
    coded, arrived = code.write(values, rng(3))
    assert coded.values.dtype == code.dtype
    assert len(coded.values) == code.sent(len(values))
    assert code.whole == (code.sent(1000) == 1000)
    assert (coded.step is not None) == code.steps
    assert (coded.places is not None) == code.places
    assert torch.equal(code.read(coded, len(values), rng(3)), arrived)


def spread(code, values, draws):
    """Many independent roundings of the same numbers, [draws, n]; a step is the same for all."""
    return code.write(values.repeat(draws), rng(5))[1].reshape(draws, -1).double()


def test_eight_bits_are_right_on_average_and_as_scattered_as_they_say():
    values, draws = numbers(), 4000
    found = spread(Int8(), values, draws)
    step = float(values.abs().max()) / 127
    fraction = (values.double() / step) % 1
    variance = step**2 * fraction * (1 - fraction)
    deviation = (found.mean(0) - values.double()).abs()
    # A bound of five deviations of the mean; and the rounding of float32 beside it.
    assert (deviation <= 5 * (variance / draws).sqrt() + 1e-6 * step).all()
    assert ((found - values.double()).abs() <= step * (1 + 1e-6)).all()
    seen = found.var(0, correction=0)
    clear = fraction * (1 - fraction) > 0.05
    assert clear.sum() > 10
    torch.testing.assert_close(seen[clear], variance[clear], rtol=0.2, atol=0.0)


def test_the_longest_number_keeps_its_sign_whatever_is_drawn(monkeypatch):
    """Steps are a little longer than its 127th where that is no number of 32 bits."""
    most = torch.nextafter(torch.tensor(1.0), torch.tensor(0.0))
    monkeypatch.setattr(torch, "rand", lambda shape, generator: most.expand(shape))
    for longest in torch.linspace(0.01, 1.01, 2000):
        coded, _ = Int8().write(torch.stack([longest, -longest]), rng())
        up, down = coded.values.tolist()
        assert up == 127
        assert down in (-127, -126)


def test_two_bytes_are_right_on_average_and_near():
    values, draws = numbers(), 4000
    found = spread(Bf16(), values, draws)
    exact = values.double()
    assert ((found - exact).abs() <= 2**-7 * exact.abs()).all()
    # One of two neighbours, at most 2⁻⁷ apart: the variance is a quarter of the square at most.
    assert ((found.mean(0) - exact).abs() <= 5 * 2**-8 * exact.abs() / math.sqrt(draws)).all()


def test_drawn_entries_are_right_on_average_and_as_scattered_as_they_say():
    values, code, draws = numbers(50), RandomK(0.2, scaled=True), 6000
    generator = rng(7)
    found = torch.stack([code.write(values, generator)[1] for _ in range(draws)]).double()
    exact = values.double()
    variance = (50 / 10 - 1) * exact.square()
    assert ((found.mean(0) - exact).abs() <= 5 * (variance / draws).sqrt() + 1e-9).all()
    squares = (found - exact).square().sum(1).mean()
    torch.testing.assert_close(squares, variance.sum(), rtol=0.1, atol=0.0)


def test_the_largest_are_the_largest():
    values = numbers()
    _, arrived = TopK(0.1).write(values, rng())
    chosen = arrived != 0
    assert torch.equal(arrived[chosen], values[chosen])
    assert int(chosen.sum()) == 20
    assert values[chosen].abs().min() >= values[~chosen].abs().max()


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_does_not_become_one(code, odd):
    values = numbers()
    values[:] = odd
    try:
        coded, _ = code.write(values, rng(3))
        found = code.read(coded, len(values), rng(3))
    except MessageError:
        return  # the length of the steps is not finite
    assert not found[found != 0].isfinite().any()
    assert (found != 0).any()


def test_the_largest_number_of_32_bits_stays_finite_in_two_bytes():
    extreme = torch.finfo(torch.float32).max * torch.tensor([1.0, -1.0])
    assert Bf16().write(extreme, rng())[1].isfinite().all()


@given(
    st.integers(1, 3000).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))),
    st.integers(0, 99),
)
@settings(deadline=None)
def test_places_come_back_in_as_many_bytes_as_their_law_says(sizes, seed):
    entries, count = sizes
    places = torch.randperm(entries, generator=rng(seed))[:count].sort().values
    data = write_places(places, entries)
    assert len(data) == places_bytes(count, entries) <= -(-entries // 8)
    assert torch.equal(read_places(data, count, entries), places)
    if count:
        bits = math.log2(entries / count) + 2
        assert len(data) <= count * bits / 8 + 2


@given(
    st.integers(1, 400).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))),
    st.binary(max_size=60),
    st.booleans(),
)
@settings(deadline=None)
def test_bytes_of_a_stranger_are_places_or_refused(sizes, data, fits):
    """Whatever is read is ascending, within, and as many as asked for."""
    entries, count = sizes
    if fits:
        length = places_bytes(count, entries)
        data = (data * length)[:length].ljust(length, b"\0")
    stored = torch.tensor(list(data), dtype=torch.uint8)
    try:
        found = read_places(stored, count, entries)
    except MessageError:
        return
    assert len(found) == count
    assert (found.diff() > 0).all()
    assert not count or (found[0] >= 0 and found[-1] < entries)
    assert torch.equal(write_places(found, entries), stored) or entries % 8


@pytest.mark.parametrize("step", [math.nan, math.inf, -1.0])
def test_a_length_of_steps_that_is_none_is_refused(step):
    with pytest.raises(MessageError, match="length of its steps"):
        Int8().read(Coded(torch.ones(3, dtype=torch.int8), torch.tensor(step)), 3, rng())
