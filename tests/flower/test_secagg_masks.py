"""The masks of secure aggregation: by a stream cipher, from 256 bits of key, on both sides."""

import hmac
import os
from base64 import urlsafe_b64decode
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import pairwise
from types import ModuleType

import numpy as np
import pytest
from scipy.stats import chisquare

pytest.importorskip("flwr")

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ConfigRecord
from flwr.common import FitIns, Parameters
from flwr.common.secure_aggregation import secaggplus_utils
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage

from fedbayes import run
from fedbayes.errors import EngineError
from fedbayes.federation.client_runtime import Task
from fedbayes.federation.stages.secure import Plan
from fedbayes.flower import secagg, secagg_node, simulated
from fedbayes.flower.engine import Flower
from fedbayes.flower.secagg import SecureFlower
from fedbayes.flower.secagg_masks import draw, with_masks
from tests.helpers.secure_sums import close, open_sum, plan_of, settings

MODULUS = 2**32
THEIRS = [
    import_module("flwr.client.mod.secure_aggregation.secaggplus_mod"),
    import_module("flwr.server.workflow.secure_aggregation.secaggplus_workflow"),
    secaggplus_utils,
]


def chacha20(key, length):
    """The first words of ChaCha20 from its definition (RFC 8439), with a nonce of zeros."""

    def rotated(x, by):
        return ((x << by) | (x >> (32 - by))) & 0xFFFFFFFF

    def quarter(s, a, b, c, d):
        for x, y, z, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            s[x] = (s[x] + s[y]) & 0xFFFFFFFF
            s[z] = rotated(s[z] ^ s[x], by)

    words = []
    for block in range(-(-length // 16)):
        start = [0x61707865, 0x3320646E, 0x79622D32, 0x6B206574]
        start += [*np.frombuffer(key, "<u4").tolist(), block, 0, 0, 0]
        state = list(start)
        for _ in range(10):
            for i in range(4):
                quarter(state, i, 4 + i, 8 + i, 12 + i)
            for i in range(4):
                quarter(state, i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
        words += [(x + y) & 0xFFFFFFFF for x, y in zip(state, start, strict=True)]
    return np.array(words[:length])


def hkdf(seed, info):
    """HKDF-SHA256 of one block, from its definition (RFC 5869)."""
    extracted = hmac.digest(bytes(32), seed, "sha256")
    return hmac.digest(extracted, info + b"\x01", "sha256")


def test_a_mask_is_the_stream_of_chacha20_under_the_whole_key():
    seed = bytes(range(32))
    weight, numbers = draw(seed, MODULUS, [(1,), (7, 9)])
    stream = chacha20(hkdf(seed, b"fedbayes SecAgg+ mask"), 64)
    assert [weight.shape, numbers.shape] == [(1,), (7, 9)]
    assert weight.dtype == numbers.dtype == np.int64
    assert (np.concatenate([weight, numbers.ravel()]) == stream).all()


def test_seeds_that_flower_takes_for_the_same_have_masks_of_their_own():
    # Flower folds the words of a seed into one of 32 bits by XOR: these two fold to the same.
    one = os.urandom(32)
    other = one[4:8] + one[:4] + one[8:]
    theirs = [secaggplus_utils.pseudo_rand_gen(s, MODULUS, [(1000,)])[0] for s in (one, other)]
    assert (theirs[0] == theirs[1]).all()
    ours = [draw(s, MODULUS, [(1000,)])[0] for s in (one, other)]
    assert (ours[0] == ours[1]).mean() < 0.01


def test_every_bit_of_a_seed_counts():
    seed = bytearray(os.urandom(32))
    masks = [draw(bytes(seed), MODULUS, [(64,)])[0]]
    for bit in range(256):
        seed[bit // 8] ^= 1 << bit % 8
        masks.append(draw(bytes(seed), MODULUS, [(64,)])[0])
    # Half of the bits change with each.
    changed = [np.bitwise_count(a ^ b).mean() / 32 for a, b in pairwise(masks)]
    assert 0.35 < min(changed) <= max(changed) < 0.65


def test_a_shared_key_is_256_bits_and_the_same_for_both():
    one, other = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    key = generate_shared_key(one, other.public_key())
    assert key == generate_shared_key(other, one.public_key())
    assert len(urlsafe_b64decode(key)) == 32
    masks = [draw(key, MODULUS, [(50,)])[0] for _ in range(2)]
    assert (masks[0] == masks[1]).all()


def test_masks_are_uniform():
    (numbers,) = draw(b"0" * 32, MODULUS, [(200_000,)])
    for values in (numbers, numbers % 2**16 * 2**16):
        assert chisquare(np.bincount(values * 64 // MODULUS, minlength=64)).pvalue > 1e-4
    with pytest.raises(EngineError, match="modulo"):
        draw(b"0" * 32, 2**20, [(3,)])


def test_no_mask_of_a_round_is_flowers_whose_modules_stay_as_they_are(monkeypatch):
    def never(seed, num_range, dimensions_list):
        raise AssertionError("a mask of 32 bits")

    for module in THEIRS:
        monkeypatch.setattr(module, "pseudo_rand_gen", never)
    config = settings()
    ended = run(config)
    assert ended.summary["lost_reports"] == 0
    assert close(ended.model, run(open_sum(config)).model)
    assert all(module.pseudo_rand_gen is never for module in THEIRS)
    assert secagg_node._flower().pseudo_rand_gen is draw
    assert secagg._flower().pseudo_rand_gen is draw


def test_a_flower_that_masks_otherwise_is_refused(monkeypatch):
    name = THEIRS[0].__name__
    with monkeypatch.context() as other:
        # What the copy imports by name is another function.
        other.setattr(secaggplus_utils, "pseudo_rand_gen", lambda key, shape: [])
        with pytest.raises(
            EngineError,
            match=r"creates masks differently .*flwr>=1\.41,<1\.43",
        ):
            with_masks(name)
    with pytest.raises(EngineError, match="version creates masks differently"):
        with_masks("flwr.common.secure_aggregation.secaggplus_utils")  # defines it, never calls it
    assert isinstance(with_masks(name), ModuleType)


@pytest.mark.parametrize("masks", [None, "mersenne"])
def test_a_server_with_other_masks_gets_no_report(masks):
    plan = plan_of(settings())
    fit = secagg_node.write_secure_task(Task(0, 1, b"", None, ""), plan)
    about = {key: value for key, value in fit.config.items() if key != "masks"}
    if masks is not None:
        about["masks"] = masks
    with pytest.raises(EngineError, match="same version of fedbayes"):
        secagg_node.read_secure_task(FitIns(Parameters([b""], "fedbayes"), about))
    task, about = secagg_node.read_secure_task(fit)
    assert (task.client, Plan(**about)) == (0, plan)


def test_a_server_that_wants_both_secrets_of_a_client_gets_none():
    def asked(stayed, left, stage=Stage.UNMASK):
        record = {Key.STAGE: stage, Key.ACTIVE_NODE_ID_LIST: stayed, Key.DEAD_NODE_ID_LIST: left}
        secagg_node._refuse_to_unmask_one(ConfigRecord(record))

    asked([1, 2, 3], [4])
    with pytest.raises(EngineError, match="would reveal its update"):
        asked([1, 2, 3], [4, 3])


def test_a_client_in_a_federation_refuses_to_open_one_report(monkeypatch):
    workflow = secagg._flower().SecAggPlusWorkflow
    honest = workflow.unmask_stage

    def greedy(self, grid, context, state):
        victim, send = min(state.sampled_node_ids), grid.send_and_receive

        def ask(messages, *, timeout=None):
            messages = list(messages)
            for message in messages:
                asked = message.content.config_records[RECORD_KEY_CONFIGS]
                asked[Key.DEAD_NODE_ID_LIST] = [victim]
            return send(messages, timeout=timeout)

        monkeypatch.setattr(grid, "send_and_receive", ask)
        return honest(self, grid, context, state)

    monkeypatch.setattr(workflow, "unmask_stage", greedy)
    words = "client 3: its node says: the server requested both secrets of a client"
    with pytest.raises(EngineError, match=words):
        run(settings())


def test_a_node_of_a_secure_federation_sends_no_report_without_masks(monkeypatch):
    monkeypatch.setattr(simulated, "flower", lambda config, cohort: Flower)
    with pytest.raises(EngineError, match="its node says: it needs secure aggregation"):
        run(settings())


@pytest.mark.parametrize("change", [{"levels": 2**8}, {"range": 1e6}, {"max_weight": 1.0}])
def test_a_node_reports_by_the_numbers_of_its_own_settings(change, monkeypatch):
    other = replace(plan_of(settings()), **change)
    monkeypatch.setattr(simulated, "flower", lambda config, cohort: partial(SecureFlower, other))
    with pytest.raises(EngineError, match="differ from the federation's, so"):
        run(settings())


def test_keys_that_fewer_can_open_are_noticed_before_a_report(monkeypatch):
    workflow = secagg._flower().SecAggPlusWorkflow
    honest = workflow.setup_stage

    def lowered(self, grid, context, state):
        self.reconstruction_threshold = 2
        return honest(self, grid, context, state)

    monkeypatch.setattr(workflow, "setup_stage", lowered)
    assert plan_of(settings()).threshold > 2
    with pytest.raises(EngineError, match="differ from the federation's, so"):
        run(settings())


def test_an_update_that_is_too_long_when_it_is_masked_is_said_by_the_client():
    """Flower sends it in one piece, which our SuperLink takes up to a length."""
    secagg_node.require_short(np.broadcast_to(0.0, 2**26 - 2**13))
    with pytest.raises(
        EngineError, match=r"536,870,920 bytes; the limit is .*smaller model"
    ) as said:
        secagg_node.require_short(np.broadcast_to(0.0, 2**26 + 1))
    assert len(str(said.value)) < 200
