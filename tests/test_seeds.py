import itertools

import torch

from fedbayes import seeds


def test_generators_depend_on_every_coordinate_and_on_nothing_else():
    draws = {}
    for seed, purpose, number, client in itertools.product(
        (0, 1), ("batches", "cohort"), (1, 2), (0, 3)
    ):
        rng = seeds.torch_rng(seed, purpose, round=number, client=client)
        draws[seed, purpose, number, client] = tuple(torch.rand(4, generator=rng).tolist())
        torch.rand(10)  # other randomness in between changes nothing
        again = seeds.torch_rng(seed, purpose, round=number, client=client)
        assert (
            tuple(torch.rand(4, generator=again).tolist()) == draws[seed, purpose, number, client]
        )
    assert len(set(draws.values())) == len(draws)


def test_integers_fit_a_signed_word():
    assert all(0 <= seeds.integer(s, "x") < 2**63 for s in range(100))
