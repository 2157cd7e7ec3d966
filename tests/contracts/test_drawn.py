"""Outputs under draws from a posterior: the same on every call, kept or drawn anew."""

import pytest
import torch

from fedbayes.contracts import drawn
from tests.helpers.places import network


@pytest.mark.parametrize("most", [0, drawn._KEPT])
def test_draws_are_the_same_on_every_call_next_to_another_sampler(monkeypatch, most):
    monkeypatch.setattr(drawn, "_KEPT", most)
    net = network()
    x = torch.randn(7, *next(iter(net.initial.values())).shape[1:])
    narrow, wide = (
        {n: torch.full_like(t, std) for n, t in net.initial.items()} for std in (0.1, 0.7)
    )
    one, other = (drawn.sampler_of(net.initial, std, net, 3) for std in (narrow, wide))
    for sampler, std in ((one, narrow), (other, wide), (one, narrow), (one, narrow)):
        each = drawn.draws_of(net.initial, std, 3)
        expected = torch.stack([net(weights, x) for weights in each])
        torch.testing.assert_close(sampler(x), expected, rtol=0, atol=0)


def test_a_second_call_draws_nothing_and_a_large_network_keeps_nothing(monkeypatch):
    net = network()
    std = {n: torch.ones_like(t) for n, t in net.initial.items()}
    calls = []
    move = drawn._move
    monkeypatch.setattr(drawn, "_move", lambda *given: calls.append(1) or move(*given))
    x = torch.randn(2, *next(iter(net.initial.values())).shape[1:])
    for most, wanted in ((drawn._KEPT, 3), (0, 6)):
        monkeypatch.setattr(drawn, "_KEPT", most)
        sampler = drawn.sampler_of(net.initial, std, net, 3)
        calls.clear()
        sampler(x)
        sampler(x)
        assert len(calls) == wanted
