"""The stream of noise against distributions, another implementation, and itself."""

import hashlib
import hmac
import os
import stat

import numpy as np
import pytest
from scipy.stats import binom, chisquare, kstest, norm

pytest.importorskip("cryptography")

from fedbayes.errors import RunError
from fedbayes.federation.privacy import keys, matrix
from fedbayes.federation.privacy.noise import Secret, Stream
from fedbayes.runs.cohorts import poisson_cohort

SECRET = Secret(b"k" * 32)


def test_the_stream_is_chacha20_as_published():
    """The key stream of RFC 8439, appendix A.1, test vector 1, and Python's own HMAC."""
    words = Stream(bytes(32)).words(8)
    assert words.tobytes().hex().startswith("76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1a")
    key = hmac.new(b"k" * 32, b"noise\0" + (7).to_bytes(8, "little") + b"n", hashlib.sha256)
    expected = Stream(key.digest()).words(5)
    assert np.array_equal(SECRET.stream("noise", 7, b"n").words(5), expected)


def test_noise_is_standard_normal():
    drawn = SECRET.stream("noise", 1).gaussian(400_001)
    assert kstest(drawn, "norm").pvalue > 1e-3
    for bound in (1, 2, 3, 4):
        expected = 2 * norm.sf(bound) * len(drawn)
        assert abs((np.abs(drawn) > bound).sum() - expected) < 5 * np.sqrt(expected)
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 0.01
    assert len(np.unique(drawn)) == len(drawn)


def test_noise_differs_by_key_purpose_round_and_nonce_and_by_nothing_else():
    streams = [
        Secret(key).stream(purpose, number, nonce)
        for key in (b"1" * 32, b"2" * 32)
        for purpose in ("noise", "count")
        for number in (1, 2)
        for nonce in (b"x", b"y")
    ]
    assert len({stream.words(4).tobytes() for stream in streams}) == len(streams)
    again = SECRET.stream("noise", 3, b"x").gaussian(70_000)
    assert np.array_equal(SECRET.stream("noise", 3, b"x").gaussian(70_000), again)


def test_poisson_cohorts_have_the_sizes_of_coins():
    sizes = np.array([len(poisson_cohort(SECRET, t, 50, 0.04)) for t in range(4000)])
    expected = np.append(4000 * binom.pmf(np.arange(5), 50, 0.04), 4000 * binom.sf(4, 50, 0.04))
    counts = np.append(np.bincount(sizes, minlength=5)[:5], (sizes > 4).sum())
    assert chisquare(counts, expected).pvalue > 1e-3
    assert (sizes == 0).any()
    each = np.bincount(np.concatenate([poisson_cohort(SECRET, t, 50, 0.5) for t in range(400)]))
    assert chisquare(each).pvalue > 1e-3
    assert poisson_cohort(SECRET, 1, 5, 1.0) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("bands", [0, 1, 4])
def test_noise_of_the_factor_is_that_of_its_inverse(bands):
    factor = matrix.strategy(9, bands)
    if not bands:
        np.testing.assert_allclose(factor @ factor, np.tril(np.ones((9, 9))), atol=1e-12)
    inverse = np.linalg.inv(factor)
    for number in range(1, 10):
        np.testing.assert_allclose(
            matrix.weights(number, bands), inverse[number - 1, :number], atol=1e-12
        )
    if bands == 1:
        assert np.array_equal(factor, np.eye(9))


def test_prefix_sums_have_far_less_noise_than_of_independent_draws():
    rounds = 256
    strategy = matrix.strategy(rounds)
    decoder = np.tril(np.ones((rounds, rounds))) @ np.linalg.inv(strategy)
    # One participation; as many rounds of independent noise have deviation sqrt(256) in the end.
    last = np.linalg.norm(decoder[-1]) * np.linalg.norm(strategy[:, 0])
    assert last < 4 < 16


def test_keys_are_the_users_alone_and_outside_of_run_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    old = os.umask(0)
    try:
        run = keys.new_id()
        secret = keys.secret(run)
    finally:
        os.umask(old)
    path = keys.key_file(run)
    assert tmp_path in path.parents
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert keys.secret(run) == secret
    assert keys.secret(keys.new_id()) != secret
    assert secret.fingerprint != keys.secret(keys.new_id()).fingerprint
    assert [p.name for p in path.parent.iterdir() if p.name.startswith(".")] == []
    path.write_bytes(b"short")
    with pytest.raises(RunError, match=r"damaged\. Remove it"):
        keys.secret(run)
    with pytest.raises(RunError, match="id of the run"):
        keys.key_file("../../etc/passwd")
