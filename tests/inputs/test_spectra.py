"""Inputs with the mean and spectra of the clients' samples, against plain sums over samples."""

import json

import numpy as np
import pytest
import scipy.linalg
import torch

from fedbayes.errors import ConfigError, DataError
from fedbayes.inputs import InputPrior, build_prior
from fedbayes.inputs.spectra import (
    Filtered,
    Spectra,
    add_spectra,
    read_spectra,
    spectra_of,
    write_spectra,
)

SHAPES = [(1, 6, 5), (3, 4, 8), (2, 7), (1, 16)]


def samples(shape, count=40, seed=0):
    return np.random.default_rng(seed).uniform(0.0, 1.0, (count, *shape))


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_are_those_of_each_sample_in_turn(shape):
    x = samples(shape)
    found = spectra_of(x)
    axes = tuple(range(1, len(shape)))
    f = [np.fft.rfftn(one - x.mean(0), axes=axes) for one in x]
    by_hand = sum(np.einsum("c...,d...->...cd", one, one.conj()) for one in f) / len(x)
    np.testing.assert_allclose(found.covariance, by_hand, atol=1e-9)
    np.testing.assert_allclose(found.mean, x.mean(0))
    space = tuple(range(2, x.ndim))
    np.testing.assert_allclose(found.squares, (x**2).sum((0, *space)))
    assert found.within
    assert not spectra_of(3 * x).within
    assert not spectra_of(x - 0.5).within


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_mirror_images_are_counted_half(shape):
    x = samples(shape)
    both = spectra_of(np.concatenate([x, x[..., ::-1]]))
    found = spectra_of(x).mirrored()
    np.testing.assert_allclose(found.total, both.total / 2)
    np.testing.assert_allclose(found.power, both.power / 2, atol=1e-9)


class Plain(InputPrior):
    """White noise of unequal channels, in numbers of any size."""

    name, assumes = "plain", "nothing"

    def draw(self, count, rng):
        x = rng.standard_normal((count, *self.shape))
        x[:, 1:] += 0.5 * x[:, :1]
        return torch.from_numpy(x.astype(np.float32))


@pytest.mark.parametrize("shape", [(3, 4, 8), (2, 7)])
def test_draws_have_the_mean_and_spectra_of_the_samples(shape):
    rng = np.random.default_rng(1)
    smooth = rng.standard_normal((4000, *shape)).cumsum(-1) @ np.diag(np.ones(shape[-1]))
    smooth += 10 * np.arange(shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    wanted = spectra_of(smooth)
    prior = Filtered(Plain(shape), wanted)
    drawn = spectra_of(prior.draw(20_000, np.random.default_rng(2)).numpy())
    wanted = wanted.mirrored() if len(shape) == 3 else wanted
    np.testing.assert_allclose(drawn.mean, wanted.mean, atol=0.15)
    scale = np.abs(wanted.covariance).max()
    np.testing.assert_allclose(drawn.covariance, wanted.covariance, atol=0.05 * scale)
    assert prior.assumes == "nothing, with the mean and spectra of 4,000 samples"


def test_the_filter_is_the_optimal_transport_map_of_gaussians():
    wanted = spectra_of(samples((3, 4, 4), 500) * np.array([1.0, 2.0, 0.5])[:, None, None])
    prior = Filtered(Plain((3, 4, 4)), wanted)
    a, b = prior._own().covariance[1, 1], wanted.mirrored().covariance[1, 1]
    root = scipy.linalg.sqrtm(a)
    inverse = np.linalg.inv(root)
    expected = inverse @ scipy.linalg.sqrtm(root @ b @ root) @ inverse
    np.testing.assert_allclose(prior._filter[1, 1], expected, rtol=1e-6, atol=1e-9)


def test_images_stay_between_0_and_1_and_signals_do_not():
    pictures = Filtered(build_prior("strokes", (1, 8, 8)), spectra_of(samples((1, 8, 8))))
    x = pictures.draw(300, np.random.default_rng(0))
    assert 0 <= x.min() < x.max() <= 1
    signals = Filtered(build_prior("noise", (2, 32)), spectra_of(50 * samples((2, 32)) - 100))
    x = signals.draw(300, np.random.default_rng(0))
    assert x.min() < -90
    assert x.mean() == pytest.approx(-75, abs=1)
    torch.testing.assert_close(signals.augmented(x, torch.Generator()), x)
    x = torch.arange(640.0).reshape(10, 1, 8, 8)
    turned = pictures.augmented(x, torch.Generator().manual_seed(0))
    same = [bool((one == own).all()) for one, own in zip(turned, x, strict=True)]
    other = [bool((one == own).all()) for one, own in zip(turned, x.flip(-1), strict=True)]
    assert any(same)
    assert any(other)
    assert all(one != two for one, two in zip(same, other, strict=True))


@pytest.mark.parametrize(("name", "channels"), [("leaves", 1), ("strokes", 3), ("noise", 1)])
def test_auto_takes_the_prior_of_which_the_samples_are(name, channels):
    drawn = build_prior(name, (channels, 16, 16)).draw(1000, np.random.default_rng(5)).numpy()
    spectra = spectra_of(drawn / 2)
    prior = build_prior("auto", (channels, 16, 16), sums=spectra)
    assert prior.name == name
    assert "nearest to the clients'" in prior.notes[0]
    named = build_prior(name, (channels, 16, 16), sums=spectra)
    assert named.notes == ()
    assert named.distance < 0.1
    rows = np.random.default_rng(3).integers(0, 100, 5)
    np.testing.assert_array_equal(
        named.draw(100, np.random.default_rng(1))[rows],
        prior.draw(100, np.random.default_rng(1))[rows],
    )


def test_a_file_holds_what_was_summed(tmp_path):
    spectra = spectra_of(samples((3, 4, 5)))
    write_spectra(spectra, tmp_path / "a.json")
    found = read_spectra(tmp_path / "a.json")
    assert found.count == 40
    np.testing.assert_allclose(found.total, spectra.total, rtol=1e-8)
    np.testing.assert_allclose(found.power, spectra.power, rtol=1e-7, atol=1e-7)


def _less(content):
    content["real"] = [-value for value in content["real"]]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda c: c.update(format="fedbayes-sums-1"), "its format is 'fedbayes-sums-1'"),
        (lambda c: c.update(count=0), "does not contain sums of images or signals"),
        (lambda c: c.update(shape=[16]), "channels"),
        (lambda c: c["sum"].pop(), "sum has 31 numbers instead of 32"),
        (lambda c: c["real"].append(1.0), "real has 49 numbers instead of 48"),
        (_less, "a variance below 0"),
        (lambda c: c["imaginary"].__setitem__(1, 1e9), "not Hermitian"),
        (lambda c: c["sum"].__setitem__(0, 1e200), "too large"),
        (lambda c: c["sum"].__setitem__(0, 1e5), "a variance below 0"),
    ],
)
def test_files_of_no_samples_are_rejected(tmp_path, spoil, said):
    path = tmp_path / "a.json"
    write_spectra(spectra_of(samples((2, 4, 4))), path)
    content = json.loads(path.read_text())
    spoil(content)
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=said):
        read_spectra(path)


def test_a_client_of_another_unit_or_shape_is_named():
    several = [spectra_of(samples((1, 4, 4), seed=seed)) for seed in range(4)]
    together = add_spectra(several, list("abcd"))
    everything = np.concatenate([samples((1, 4, 4), seed=seed) for seed in range(4)])
    np.testing.assert_allclose(together.power, spectra_of(everything).power)
    with pytest.raises(DataError, match="d: the column 'channel 0'"):
        add_spectra([*several[:3], spectra_of(255 * samples((1, 4, 4)))], list("abcd"))
    with pytest.raises(DataError, match="sums of b are of samples of 1 x 4 x 6"):
        add_spectra([several[0], spectra_of(samples((1, 4, 6)))], ["a", "b"])


def test_what_has_no_spectra_is_an_error():
    with pytest.raises(DataError, match="channels and space"):
        spectra_of(np.zeros((20, 5)))
    with pytest.raises(DataError, match="missing or infinite"):
        spectra_of(np.full((3, 1, 4), np.nan))
    with pytest.raises(DataError, match="the limit is 4,000,000"):
        spectra_of(np.zeros((1, 64, 10_000)))
    spectra = spectra_of(samples((1, 4, 4)))
    with pytest.raises(ConfigError, match="no effect on 'gaussian'"):
        build_prior("gaussian", (1, 4, 4), sums=spectra)
    with pytest.raises(DataError, match="an input is 1 x 8 x 8"):
        build_prior("strokes", (1, 8, 8), sums=spectra)
    assert isinstance(spectra, Spectra)
