import ast
import itertools
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
import torch

import fedbayes
from fedbayes.core import seeds

COLLIDED = [("gates", 11, 15), ("gates", 594, 14)]
"""Of seed 0: the same 32 bits, which are all that PyTorch's own seeding takes."""


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


def test_streams_that_share_32_bits_of_a_seed_differ():
    one, two = (seeds.integer(0, p, round=r, client=c) for p, r, c in COLLIDED)
    assert one != two
    assert one % 2**32 == two % 2**32
    seeded = [torch.Generator().manual_seed(seed) for seed in (one, two)]
    assert torch.equal(*(torch.rand(8, generator=rng) for rng in seeded))  # why it matters
    ours = [seeds.torch_rng(0, p, round=r, client=c) for p, r, c in COLLIDED]
    assert not torch.equal(*(torch.rand(8, generator=rng) for rng in ours))
    drawn = []
    for purpose, number, client in COLLIDED:
        with seeds.global_rng(0, purpose, round=number, client=client):
            drawn.append(torch.rand(8))
    assert not torch.equal(*drawn)


def test_many_streams_are_all_different():
    """By their first words: 128 bits of each, of which two in 2^32 would be the same ones."""
    streams = {
        seeds.sequence(0, "gates", round=number, client=client).generate_state(4).tobytes()
        for number in range(100)
        for client in range(250)
    }
    integers = {
        seeds.integer(0, "gates", round=n, client=c) for n in range(100) for c in range(250)
    }
    assert len(streams) == len(integers) == 25_000


def test_the_words_of_the_twister_are_those_that_numpy_draws():
    """PyTorch's numbers are those of NumPy's Mersenne Twister of the same words."""
    rng = seeds.torch_rng(3, "batches", round=2, client=1)
    entropy = seeds.sequence(3, "batches", round=2, client=1)
    words = np.random.PCG64(entropy).random_raw(312).astype("<u8").view("<u4")
    twister = np.random.MT19937()
    twister.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": 624}}
    wanted = (twister.random_raw(1000) % 2**24).astype(np.float32) / np.float32(2**24)
    assert torch.equal(torch.rand(1000, generator=rng), torch.from_numpy(wanted))


def test_the_global_generator_is_as_it_was_afterwards():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with seeds.global_rng(0, "layers", client=2):
        inside = torch.rand(6)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(inside, torch.rand(6, generator=seeds.torch_rng(0, "layers", client=2)))


def drawn_from_all():
    return torch.rand(1).item(), np.random.randn(), random.random()  # noqa: NPY002


def states():
    numpy = np.random.get_state()  # noqa: NPY002
    return [np.asarray(each).tolist() for each in numpy], random.getstate()


def test_what_several_clients_draw_is_put_back_once_and_what_one_nests_at_once():
    """The same numbers as one by one, and the generators of whoever called as they were."""

    def drawn(client):
        with seeds.global_rng(0, "layers", client=client):
            first = drawn_from_all()
            with seeds.global_rng(0, "evaluation", client=client):
                inside = drawn_from_all()
            return first, inside, drawn_from_all()

    drawn_from_all()  # NumPy now has a second normal number ready
    before = states()
    alone = [drawn(client) for client in range(3)]
    with seeds.kept():
        assert [drawn(client) for client in range(3)] == alone
        assert states() != before
    assert states() == before
    assert [drawn(client) for client in range(3)] == alone
    assert states() == before


def test_threads_draw_from_the_global_generators_in_turn():
    """What one thread draws does not depend on what others draw meanwhile."""

    def drawn(client):
        with seeds.global_rng(0, "layers", client=client):
            values = []
            for _ in range(20):
                values.append((torch.rand(1).item(), np.random.rand(), random.random()))  # noqa: NPY002
                time.sleep(0.001)  # others would draw now
        return values

    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(drawn, range(4)))
    assert together == [drawn(client) for client in range(4)]


def test_where_the_layout_is_another_generators_are_seeded(monkeypatch):
    monkeypatch.setattr(seeds, "_known_layout", lambda: False)
    rng = seeds.torch_rng(0, "gates", round=1)
    seeded = torch.Generator().manual_seed(seeds.integer(0, "gates", round=1))
    assert torch.equal(torch.rand(5, generator=rng), torch.rand(5, generator=seeded))


@pytest.mark.parametrize("known", [True, False])
def test_generators_that_are_made_at_once_are_those_of_each_alone(known, monkeypatch):
    monkeypatch.setattr(seeds, "_known_layout", lambda: known)
    draw = np.random.default_rng(0)
    for seed in (0, 7, 2**32 - 1, 2**32, 2**63 - 1):
        places = [(1, 0), (2**32 - 1, 2**32 - 1), *draw.integers(2**31, size=(20, 2)).tolist()]
        found = seeds.torch_rngs(seed, "batches", places)
        for rng, (number, client) in zip(found, places, strict=True):
            alone = seeds.torch_rng(seed, "batches", round=number, client=client)
            assert torch.equal(rng.get_state(), alone.get_state())
    assert seeds.torch_rngs(0, "batches", []) == []


def test_this_version_of_pytorch_has_the_known_layout():
    assert seeds._known_layout()


@pytest.mark.parametrize("damage", ["short", "other"])
def test_another_layout_is_noticed(damage, monkeypatch):
    state = torch.Generator().manual_seed(0).get_state()
    other = state[:600] if damage == "short" else state.flip(0)
    monkeypatch.setattr(seeds, "_seeded", lambda: other)
    assert not seeds._known_layout.__wrapped__()


def test_no_two_purposes_are_the_same_number():
    """A purpose is 32 bits of a generator's entropy: the words that we use are all different."""
    calls = {"sequence", "numpy_rng", "integer", "torch_rng", "global_rng", "rng"}
    words = set()
    for path in Path(fedbayes.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in calls:
                words |= {
                    a.value
                    for a in node.args[:2]
                    if isinstance(a, ast.Constant) and isinstance(a.value, str)
                }
    assert len(words) > 10
    assert len({crc32(word.encode()) for word in words}) == len(words)
