"""Input priors: what they draw has the shape, range, spectrum and moments that they claim."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import multivariate_normal, norm

from fedbayes.core.targets import Target
from fedbayes.data import Preprocessing
from fedbayes.data.tables.columns import Column
from fedbayes.errors import ConfigError, DataError, RunError
from fedbayes.inputs import (
    Inputs,
    Sums,
    add_sums,
    build_prior,
    plot_inputs,
    read_sums,
    sums_of,
    tones,
    write_sums,
)
from fedbayes.inputs.augmentation import recoloured, shifted, turned
from fedbayes.inputs.gaussian import GaussianInputs, latent_correlation
from fedbayes.inputs.leaves import LARGEST, POWER, SMALLEST, _radii
from fedbayes.inputs.noise import power_law_noise
from fedbayes.inputs.samples import RealSamples
from tests import ROOT

IMAGES = [("leaves", (3, 32, 32)), ("strokes", (1, 28, 28)), ("noise", (3, 32, 32))]
ODD = [(1, 1, 1), (1, 7, 5), (2, 3, 11), (5, 16, 9)]


def drawn(name, shape, count=16, seed=0, **options):
    return build_prior(name, shape, **options).draw(count, np.random.default_rng(seed))


@pytest.mark.parametrize(("name", "shape"), IMAGES)
@pytest.mark.parametrize("other", [None, *ODD])
def test_images_have_their_shape_and_range(name, shape, other):
    shape = other or shape
    x = drawn(name, shape)
    assert x.shape == (16, *shape)
    assert x.dtype == torch.float32
    assert 0 <= x.min() <= x.max() <= 1
    if other is None:
        assert (x.flatten(1).std(1) > 0.01).all(), "an image is blank"


@pytest.mark.parametrize("shape", [(50,), (2, 40), (1, 9)])
def test_noise_is_of_signals_too(shape):
    x = drawn("noise", shape)
    assert x.shape == (16, *shape)
    assert 0 <= x.min() < x.max() <= 1


@pytest.mark.parametrize(("name", "shape"), [*IMAGES, ("tones", (64,)), ("gaussian", (7,))])
def test_a_batch_is_the_same_for_its_seed_and_number_alone(name, shape):
    def inputs(seed):
        return Inputs(build_prior(name, shape), torch.tensor(0.5), torch.tensor(0.25), seed)

    one, again = inputs(0), inputs(0)
    again.batch(3, 5)
    assert torch.equal(one.batch(1, 8), again.batch(1, 8))
    others = [one.batch(2, 8), one.batch(-1, 8), inputs(1).batch(1, 8)]
    assert not any(torch.equal(one.batch(1, 8), other) for other in others)


def test_inputs_are_scaled_and_augmented_in_the_clients_units():
    mean, std = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.3, 0.4])
    inputs = Inputs(build_prior("leaves", (3, 8, 8)), mean, std)
    x = inputs.batch(0, 64)
    back = x * std.reshape(3, 1, 1) + mean.reshape(3, 1, 1)
    assert -1e-6 < back.min() < back.max() < 1 + 1e-6
    y = inputs.augmented(x, torch.Generator().manual_seed(0))
    raw = y * std.reshape(3, 1, 1) + mean.reshape(3, 1, 1)
    # Pixels and colours change places, so an image's sorted values stay as they were.
    sorted_raw = raw.flatten(1).sort(1).values
    torch.testing.assert_close(sorted_raw, back.flatten(1).sort(1).values, atol=1e-5, rtol=0)
    assert not torch.allclose(raw, back)


def test_squares_are_turned_in_eight_ways_as_often():
    """The eight images of a pattern without symmetry, counted."""
    pattern = torch.arange(4.0).reshape(1, 1, 2, 2)
    ways = {
        tuple(turned.flatten().tolist())
        for mirrored in (pattern, pattern.flip(-1))
        for turned in (mirrored.rot90(quarter, (-2, -1)) for quarter in range(4))
    }
    assert len(ways) == 8
    found = turned(pattern.expand(8000, -1, -1, -1), torch.Generator().manual_seed(0))
    rows, counts = found.flatten(1).unique(dim=0, return_counts=True)
    assert {tuple(row) for row in rows.tolist()} == ways
    assert (abs(counts - 1000) < 5 * np.sqrt(1000)).all()


def test_oblong_images_keep_their_shape():
    x = torch.arange(6.0).reshape(1, 1, 2, 3).expand(400, -1, -1, -1)
    found = turned(x, torch.Generator().manual_seed(0))
    assert found.shape == x.shape
    assert len(found.flatten(1).unique(dim=0)) == 4


def test_images_are_shifted_each_way_as_often():
    """Against windows of what NumPy reflects at the edges."""
    x = torch.arange(24.0).reshape(1, 2, 3, 4)
    wide = np.pad(x[0].numpy(), ((0, 0), (1, 1), (1, 1)), "reflect")
    ways = {tuple(wide[:, i : i + 3, j : j + 4].ravel()) for i in range(3) for j in range(3)}
    found = shifted(x.expand(9000, -1, -1, -1), torch.Generator().manual_seed(0), 1)
    rows, counts = found.flatten(1).unique(dim=0, return_counts=True)
    assert {tuple(row) for row in rows.tolist()} == ways
    assert (abs(counts - 1000) < 5 * np.sqrt(1000)).all()


def test_shifts_are_smaller_than_images():
    x = torch.rand(4, 1, 1, 3)
    assert shifted(x, torch.Generator().manual_seed(0), 2).shape == x.shape


def test_colours_are_permuted_in_every_order():
    x = torch.arange(3.0).reshape(1, 3, 1, 1).expand(600, -1, 1, 1)
    rows, counts = (
        recoloured(x, torch.Generator().manual_seed(0)).flatten(1).unique(dim=0, return_counts=True)
    )
    assert sorted(map(tuple, rows.tolist())) == [
        (0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)
    ]  # fmt: skip
    assert (abs(counts - 100) < 50).all()


@pytest.mark.parametrize("name", ["strokes", "gaussian"])
def test_what_has_a_direction_is_not_turned(name):
    prior = build_prior(name, (1, 9, 9) if name == "strokes" else (5,))
    x = prior.draw(4, np.random.default_rng(0))
    assert prior.augmented(x, torch.Generator()) is x


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("shape", [(1, 64, 64), (1, 4096)])
def test_noise_has_its_spectrum(exponent, shape):
    """The slope of the logarithm of the mean periodogram, fitted by least squares."""
    rng = np.random.default_rng(0)
    x = power_law_noise((200, *shape), np.full(200, exponent), rng)
    axes = tuple(range(2, x.ndim))
    power = (abs(np.fft.fftn(x, axes=axes)) ** 2).mean((0, 1))
    frequency = np.sqrt(
        sum(f**2 for f in np.meshgrid(*(np.fft.fftfreq(n) for n in shape[1:]), indexing="ij"))
    )
    used = frequency > 0
    slope = np.polyfit(np.log(frequency[used]), np.log(power[used]), 1)[0]
    assert slope == pytest.approx(-exponent, abs=0.05)
    np.testing.assert_allclose(x.mean(axes), 0, atol=1e-5)
    np.testing.assert_allclose(x.std(axes), 1, atol=1e-4)


def test_channels_of_noise_have_a_share_in_common():
    x = power_law_noise((4000, 2, 8, 8), np.zeros(4000), np.random.default_rng(0), common=0.6)
    assert np.corrcoef(x[:, 0].ravel(), x[:, 1].ravel())[0, 1] == pytest.approx(0.6, abs=0.01)


@pytest.mark.parametrize("shape", [(1024,), (2, 300), (1, 1)])
def test_tones_are_standardized(shape):
    x = drawn("tones", shape, 1100)
    assert x.shape == (1100, *shape)
    assert x.dtype == torch.float32
    torch.testing.assert_close(x.mean(-1), torch.zeros(x.shape[:-1]), atol=1e-5, rtol=0)
    if shape[-1] > 1:
        torch.testing.assert_close(x.std(-1, correction=0), torch.ones(x.shape[:-1]))
    turned_over = build_prior("tones", shape).augmented(x, torch.Generator().manual_seed(0))
    assert torch.equal(turned_over.abs(), x.abs())
    assert not torch.equal(turned_over, x) or shape[-1] == 1


def test_tones_are_harmonics_of_one_pitch(monkeypatch):
    """All that is left of them after least squares on sines and cosines of the pitch is rounding.

    Those of an octave above leave something, and no pitch is out of its range.
    """
    monkeypatch.setattr(tones, "GLIDE", 0.0)
    length, count = 1024, 50
    x = tones._tones(count, length, np.random.default_rng(3)).astype(float)
    pitch = np.exp(np.random.default_rng(3).uniform(np.log(1 / 512), np.log(1 / 8), count))

    def left(row, pitch):
        turns = 2 * np.pi * pitch * np.outer(np.arange(length), np.arange(1, 17))
        turns = turns[:, np.arange(1, 17) * pitch < 0.5]
        waves = np.hstack([np.sin(turns), np.cos(turns)])
        rest = row - waves @ np.linalg.lstsq(waves, row, rcond=None)[0]
        return rest.std() / row.std()

    assert max(left(row, own) for row, own in zip(x, pitch, strict=True)) < 1e-4
    assert np.median([left(row, 2 * own) for row, own in zip(x, pitch, strict=True)]) > 0.3
    assert 1 / 512 <= pitch.min() < 1 / 300 < 1 / 12 < pitch.max() <= 1 / 8


def test_standard_draws_are_as_networks_see_them():
    """Whatever the unit of the clients' signals is."""
    prior = build_prior("tones", (2, 64))
    by = Preprocessing((2, 64), 1.0, (300.0, -5.0), (40.0, 2.0), Target("class", ("a", "b")))
    x = Inputs.seen(prior, by).batch(0, 8)
    torch.testing.assert_close(x.mean(-1), torch.zeros(8, 2), atol=1e-5, rtol=0)
    torch.testing.assert_close(x.std(-1, correction=0), torch.ones(8, 2))


def test_sizes_of_leaves_follow_their_power_law():
    """Of each image, the distribution function between its exponents' two."""
    radii = _radii((3000, 50, 1), np.random.default_rng(0)).ravel()
    assert SMALLEST <= radii.min() < radii.max() <= LARGEST

    def below(r, power):
        q = 1 - power
        return (SMALLEST**q - r**q) / (SMALLEST**q - LARGEST**q)

    powers = np.linspace(*POWER, 201)
    for r in (0.06, 0.1, 0.2, 0.4):
        expected = np.mean([below(r, power) for power in powers])
        assert np.mean(radii < r) == pytest.approx(expected, abs=0.01)


def test_leaves_are_like_photographs():
    """Their spectrum falls about as frequency to -2 or -3, channels agree, edges are sparse."""
    x = drawn("leaves", (3, 32, 32), 500).numpy()
    grey = x.mean(1) - x.mean((1, 2, 3))[:, None, None]
    power = (abs(np.fft.fft2(grey * np.outer(np.hanning(32), np.hanning(32)))) ** 2).mean(0)
    f = np.hypot(*np.meshgrid(np.fft.fftfreq(32), np.fft.fftfreq(32)))
    used = (f > 0.06) & (f < 0.45)
    slope = np.polyfit(np.log(f[used]), np.log(power[used]), 1)[0]
    assert -3.8 < slope < -2.5
    channels = np.corrcoef(x.transpose(1, 0, 2, 3).reshape(3, -1))
    assert (channels > 0.7).all()
    steps = np.diff(x, axis=-1)
    assert (steps**4).mean() / (steps**2).mean() ** 2 > 6, "as smooth as a Gaussian"


def test_strokes_are_in_the_middle_of_a_dark_ground():
    x = drawn("strokes", (1, 28, 28), 500).numpy()[:, 0]
    assert 0.6 < (x < 0.02).mean() < 0.9
    assert x[:, [0, -1]].max() == x[:, :, [0, -1]].max() == 0
    assert (x.max((1, 2)) > 0.9).all()
    rows, columns = (x.max(axis) > 0.5 for axis in (2, 1))
    for used in (rows, columns):
        first, last = used.argmax(1), 27 - used[:, ::-1].argmax(1)
        assert (abs(first + last - 27) <= 2).all(), "the writing is off the middle"


def test_a_stroke_does_not_break():
    """What is inked is one piece where there is one stroke, at any size."""
    from scipy.ndimage import label

    from fedbayes.inputs import strokes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strokes, "STROKES", (1, 1))
        for size in (28, 96):
            x = drawn("strokes", (1, size, size), 60).numpy()[:, 0]
            assert all(label(one > 0.3, np.ones((3, 3)))[1] == 1 for one in x)


# --- tables


def test_without_sums_rows_are_standard_normal():
    x = drawn("gaussian", (3,), 40_000).double()
    torch.testing.assert_close(x.mean(0), torch.zeros(3).double(), atol=0.03, rtol=0)
    torch.testing.assert_close(x.T.cov(), torch.eye(3).double(), atol=0.03, rtol=0)


def test_rows_have_the_mean_and_covariance_of_the_sums():
    rng = np.random.default_rng(1)
    covariance = np.array([[4.0, 1.0, -1.2], [1.0, 1.0, 0.3], [-1.2, 0.3, 2.0]])
    rows = rng.multivariate_normal([10, -3, 1000], covariance, 500)
    x = drawn("gaussian", (3,), 60_000, sums=sums_of(rows)).double().numpy()
    np.testing.assert_allclose(x.mean(0), rows.mean(0), atol=0.05)
    np.testing.assert_allclose(np.cov(x.T), np.cov(rows.T, bias=True), atol=0.08)


tables = arrays(np.float64, (12, 3), elements=st.floats(-100, 100, width=32))


@settings(deadline=None, max_examples=30)
@given(tables, st.integers(1, 11))
def test_sums_of_parts_add_to_those_of_the_whole(rows, cut):
    rows[:, 0] = np.round(rows[:, 0] / 50)
    whole = sums_of(rows, categories=["0"])
    both = add_sums([sums_of(part, categories=["0"]) for part in (rows[:cut], rows[cut:])])
    assert both.count == whole.count
    assert both.categories == whole.categories
    np.testing.assert_allclose(both.total, whole.total, atol=1e-9)
    np.testing.assert_allclose(both.products, whole.products, atol=1e-6)
    np.testing.assert_allclose(whole.mean, rows.mean(0), atol=1e-9)
    np.testing.assert_allclose(whole.covariance, np.cov(rows.T, bias=True), atol=1e-6)


@settings(deadline=None, max_examples=30)
@given(tables)
def test_a_file_of_sums_says_all(tmp_path_factory, rows):
    rows[:, 2] = np.sign(rows[:, 2])
    path = tmp_path_factory.mktemp("sums") / "sums.json"
    sums = sums_of(rows, ["age", "dose", "side"], ["side"])
    write_sums(sums, path)
    found = read_sums(path)
    assert (found.count, found.features, found.categories) == (
        sums.count,
        sums.features,
        sums.categories,
    )
    np.testing.assert_array_equal(found.total, sums.total)
    np.testing.assert_array_equal(found.products, sums.products)
    x = GaussianInputs((3,), found).draw(50, np.random.default_rng(0))
    assert torch.isfinite(x).all()
    assert set(x[:, 2].tolist()) <= set(rows[:, 2].tolist())


def mixed_rows(count=40_000):
    """Two measurements, a grade of three values and a rare flag, of one latent Gaussian."""
    latent = np.array(
        [[1, 0.6, 0.5, 0.2], [0.6, 1, 0.3, -0.4], [0.5, 0.3, 1, 0.1], [0.2, -0.4, 0.1, 1]]
    )
    z = np.random.default_rng(0).multivariate_normal(np.zeros(4), latent, count)
    columns = [40 + 10 * z[:, 0], np.digitize(z[:, 1], [-0.5, 1.0]), z[:, 2] > 1.2, 5 + 3 * z[:, 3]]
    return np.stack(columns, 1).astype(float), latent


def test_a_copula_is_recovered_from_its_sums():
    rows, latent = mixed_rows()
    sums = sums_of(rows, ["age", "grade", "ill", "dose"], ["grade", "ill"])
    prior = GaussianInputs((4,), sums)
    np.testing.assert_allclose(latent_correlation(sums, prior._steps), latent, atol=0.03)
    x = prior.draw(100_000, np.random.default_rng(1)).double().numpy()
    assert set(x[:, 1]) == {0, 1, 2}
    assert set(x[:, 2]) == {0, 1}
    for column, value in [(1, 0), (1, 1), (1, 2), (2, 1)]:
        share = np.mean(rows[:, column] == value)
        assert np.mean(x[:, column] == value) == pytest.approx(share, abs=0.006)
    np.testing.assert_allclose(np.corrcoef(x.T), np.corrcoef(rows.T), atol=0.015)
    assert prior.notes == ()
    assert "grade" in prior.assumes


@settings(deadline=None, max_examples=30)
@given(st.floats(-0.95, 0.95), st.floats(-1.5, 1.5), st.floats(-1.5, 1.5))
def test_two_flags_have_their_fourfold_table(rho, first, second):
    """P(z1 > a, z2 > b) by the bivariate normal distribution function, at ρ and at what is found.

    Rare flags that exclude each other have the same table at many ρ, so tables are compared.
    """

    def together(correlation):
        both = multivariate_normal(cov=[[1, correlation], [correlation, 1]])
        return both.cdf([-first, -second])

    both = together(rho)
    one, two = norm.sf(first), norm.sf(second)
    n = 10**9
    counts = {
        index: {0.0: n - round(n * share), 1.0: round(n * share)}
        for index, share in enumerate((one, two))
    }
    products = n * np.array([[one, both], [both, two]])
    sums = Sums(n, n * np.array([one, two]), products, ("a", "b"), counts)
    prior = GaussianInputs((2,), sums)
    found = latent_correlation(sums, prior._steps)[0, 1]
    assert together(found) == pytest.approx(both, abs=1e-4)
    if min(both, one - both, two - both, 1 - one - two + both) > 0.02:
        assert found == pytest.approx(rho, abs=0.01)


def test_sums_that_no_gaussian_has_are_said():
    """Three flags of which exactly one holds: correlations are -1/2, latent ones less."""
    rows = np.eye(3)[np.arange(300) % 3]
    prior = build_prior("gaussian", (3,), sums=sums_of(rows, categories=["0", "1", "2"]))
    assert "nearest" in prior.notes[0]
    x = prior.draw(20_000, np.random.default_rng(0))
    torch.testing.assert_close(x.mean(0), torch.full((3,), 1 / 3), atol=0.02, rtol=0)


def test_a_constant_feature_stays_constant():
    rows = np.stack([np.arange(10.0), np.full(10, 1e6)], 1)
    x = drawn("gaussian", (2,), 100, sums=sums_of(rows))
    assert (x[:, 1] == 1e6).all()


GOOD = {
    "format": "fedbayes-sums-1",
    "count": 2,
    "features": ["age", "ill"],
    "sum": [3.0, 1.0],
    "products": [[5.0, 2.0], [2.0, 1.0]],
    "categories": {"ill": {"0": 1, "1": 1}},
}


def test_the_example_is_good(tmp_path):
    path = tmp_path / "sums.json"
    path.write_text(json.dumps(GOOD))
    np.testing.assert_allclose(read_sums(path).covariance, [[0.25, 0.25], [0.25, 0.25]])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "x"}, "its format is 'x'"),
        ({"count": 0}, "count"),
        ({"count": 2.5}, "count"),
        ({"count": 10**400}, "count"),
        ({"sum": [1e200, 1.0], "products": [[1e300, 2.0], [2.0, 1.0]]}, "'age' a variance below 0"),
        ({"categories": {"ill": {"0": 1, "nan": 1}}}, "'nan' of 'ill' is not a number"),
        ({"sum": [3.0]}, "there are 2 features"),
        ({"products": [[5.0, 2.0]]}, "there are 2 features"),
        ({"products": [[5.0, 2.0], [1.0, 1.0]]}, "not symmetric"),
        ({"products": [[4.0, 2.0], [2.0, 1.0]]}, "give 'age' a variance below 0"),
        ({"products": [[5.0, 4.0], [4.0, 1.0]]}, "not positive"),
        ({"features": ["age", "age"]}, "two features are called 'age'"),
        ({"features": []}, "0 features"),
        ({"categories": {"il": {"0": 2}}}, "did you mean 'ill'"),
        ({"categories": {"ill": {"no": 1, "yes": 1}}}, "'no' of 'ill' is not a number"),
        ({"categories": {"ill": {"0": 1}}}, "to 1 rows, and count is 2"),
        ({"categories": {"ill": {"0": 2}}}, "the mean of 'ill'"),
        ({"weights": 1}, "weights"),
    ],
)
def test_sums_of_no_rows_are_refused(tmp_path, change, said):
    path = tmp_path / "sums.json"
    path.write_text(json.dumps(GOOD | change))
    with pytest.raises(DataError, match=said) as error:
        read_sums(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("text", ["", "[1]", "{", "\x00", '{"count": NaN}'])
def test_a_file_of_no_sums_is_refused(tmp_path, text):
    path = tmp_path / "sums.json"
    path.write_text(text)
    with pytest.raises(DataError, match="does not contain sums") as error:
        read_sums(path)
    assert "_File" not in str(error.value)
    with pytest.raises(DataError, match="cannot read"):
        read_sums(tmp_path / "none.json")


def test_rows_without_sums_are_refused():
    with pytest.raises(DataError, match="b has a value that is missing"):
        sums_of([[1.0, np.nan]], ["a", "b"])
    with pytest.raises(DataError, match="did you mean 'dose'"):
        sums_of([[1.0]], ["dose"], ["does"])
    with pytest.raises(DataError, match=r"are allowed for a category\. Leave it out of categories"):
        sums_of(np.arange(2000.0)[:, None], ["age"], ["age"])
    with pytest.raises(DataError, match="too large"):
        sums_of([[1e200]])
    with pytest.raises(DataError, match="got shape"):
        sums_of([1.0, 2.0])


def test_sums_of_unlike_tables_are_not_added():
    one = sums_of([[1.0, 0.0], [2.0, 1.0]], ["age", "ill"], ["ill"])
    with pytest.raises(DataError, match="sums of north have the features age, sick"):
        add_sums([one, sums_of([[1.0, 0.0]], ["age", "sick"])], ["south", "north"])
    with pytest.raises(DataError, match="'ill' is a category"):
        add_sums([one, sums_of([[1.0, 0.0]], ["age", "ill"])])
    with pytest.raises(DataError, match="no sums"):
        add_sums([])


# --- by name


@pytest.mark.parametrize(
    ("shape", "name", "why"),
    [
        ((3, 32, 32), "leaves", "photograph"),
        ((4, 8, 8), "leaves", "4 channels"),
        ((1, 28, 28), "strokes", "for grey photographs choose leaves"),
        ((30,), "gaussian", "row of 30 values"),
        ((6, 128), "noise", "signal"),
    ],
)
def test_the_shape_decides_and_it_is_said(shape, name, why):
    prior = build_prior("auto", shape)
    assert prior.name == name
    assert repr(name) in prior.notes[0]
    assert why in prior.notes[0]
    assert build_prior(name, shape).notes == ()


def test_sums_decide_for_gaussian():
    sums = sums_of(np.eye(3))
    assert "sent sums" in build_prior("auto", (3,), sums=sums).notes[0]
    with pytest.raises(ConfigError, match="no effect on 'noise'"):
        build_prior("noise", (3,), sums=sums)
    with pytest.raises(DataError, match="have 3 features"):
        build_prior("gaussian", (4,), sums=sums)


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("leafs", (3, 8, 8), "did you mean 'leaves'"),
        ("zebra", (3, 8, 8), "Choose auto, leaves, strokes"),
        ("leaves", (10,), "Give the shape as channels, height and width"),
        ("gaussian", (3, 8, 8), "gives rows of a table"),
        ("noise", (2, 3, 8, 8), "'noise' gives"),
        ("auto", (2, 3, 8, 8), "no input prior is known"),
        ("leaves", (3, 0, 8), "All lengths must be 1 or more"),
        ("leaves", (), "All lengths must be 1 or more"),
        ("no_such_module:draw", (3,), "cannot find the input prior"),
        ("json:nothing", (3,), "cannot find the input prior"),
        ("json:JSONEncoder", (3,), "is not a function"),
    ],
)
def test_what_there_is_not_is_refused(name, shape, said):
    with pytest.raises(ConfigError, match=said):
        build_prior(name, shape)


def test_absent_files_are_refused():
    with pytest.raises(DataError, match="file or folder of samples not found: photos"):
        build_prior("photos/all.npz", (3, 8, 8))


# --- of one's own


def ramps(count, rng, *, shape):
    return np.broadcast_to(rng.random((count, *(1 for _ in shape))), (count, *shape))


ANSWERS = {
    "a list": (lambda count, shape: [["a"] * 4] * count, "not an array of numbers"),
    "integers": (lambda count, shape: np.zeros((count, *shape), np.uint8), "images divided by 255"),
    "too few": (lambda count, shape: np.zeros((count - 1, *shape)), "are needed"),
    "holes": (lambda count, shape: np.full((count, *shape), np.nan), "not finite"),
    "scaled": (
        lambda count, shape: np.full((count, *shape), -1.5),
        "images with values from -1.5 to -1.5",
    ),
    "failure": (lambda count, shape: 1 / 0, "ZeroDivisionError"),
}


def answer(count, rng, *, shape):
    return ANSWERS[answer.which][0](count, shape)


def test_a_function_of_ones_own():
    prior = build_prior("tests.inputs.test_inputs:ramps", (3, 4, 4))
    x = prior.draw(5, np.random.default_rng(0))
    expected = np.random.default_rng(0).random((5, 1, 1, 1))
    np.testing.assert_allclose(x.numpy(), np.broadcast_to(expected, x.shape), rtol=1e-6)
    assert prior.assumes == "as tests.inputs.test_inputs:ramps returns them"


@pytest.mark.parametrize("which", ANSWERS)
def test_what_a_function_must_not_return(which):
    prior = build_prior("tests.inputs.test_inputs:answer", (1, 2, 4))
    answer.which = which
    with pytest.raises(DataError, match=ANSWERS[which][1]) as error:
        prior.draw(3, np.random.default_rng(0))
    assert "tests.inputs.test_inputs:answer" in str(error.value)


# --- real samples


def pictures(count=6, height=10, width=14):
    from PIL import Image

    rng = np.random.default_rng(0)
    return [
        Image.fromarray(rng.integers(256, size=(height, width, 3), dtype=np.uint8))
        for _ in range(count)
    ]


def test_a_folder_of_pictures(tmp_path):
    for index, picture in enumerate(pictures()):
        (tmp_path / "deep").mkdir(exist_ok=True)
        picture.save(tmp_path / "deep" / f"{index}.png")
    prior = build_prior(str(tmp_path), (3, 10, 14))
    x = prior.draw(6, np.random.default_rng(0))
    expected = np.stack([np.asarray(p).transpose(2, 0, 1) for p in pictures()]) / 255
    found = sorted(x.flatten(1).tolist())
    np.testing.assert_allclose(found, sorted(expected.reshape(6, -1).tolist()), atol=1e-6)
    assert prior.draw(20, np.random.default_rng(0)).shape == (20, 3, 10, 14)
    assert build_prior(str(tmp_path), (1, 8, 8)).draw(2, np.random.default_rng(0)).max() <= 1
    with pytest.raises(DataError, match="pictures with 1 or 3 channels"):
        build_prior(str(tmp_path), (30,))
    (tmp_path / "7.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"7\.png"):
        build_prior(str(tmp_path), (3, 10, 14))


def test_pictures_are_read_as_in_training(tmp_path):
    """Upright, and of 8 bits."""
    from PIL import Image

    bright = np.zeros((8, 8, 3), np.uint8)
    bright[0] = 255
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter to the right
    Image.fromarray(bright).save(tmp_path / "a.png", exif=turned)
    x = build_prior(str(tmp_path), (3, 8, 8)).draw(1, np.random.default_rng(0))[0]
    assert (x[:, :, -1] == 1).all()
    assert not x[:, :, :-1].any()
    Image.fromarray(np.full((8, 8), 40_000, np.uint16)).save(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"a\.png has more than 8 bits per pixel"):
        build_prior(str(tmp_path), (1, 8, 8))


def test_pictures_in_parquet(tmp_path):
    import io

    import pandas as pd

    cells = []
    for picture in pictures():
        picture.save(data := io.BytesIO(), format="png")
        cells.append({"bytes": data.getvalue(), "path": None})
    file = tmp_path / "train.parquet"
    pd.DataFrame({"image": cells, "label": range(6)}).to_parquet(file)
    for place in (file, tmp_path):
        x = build_prior(str(place), (3, 10, 14)).draw(6, np.random.default_rng(0))
        expected = np.sort(np.stack([np.asarray(p) for p in pictures()]).ravel()) / 255
        np.testing.assert_allclose(x.flatten().sort().values, expected, atol=1e-6)


@pytest.mark.parametrize(
    "stored", [np.uint8, np.float32], ids=["8 bits, channels last", "real numbers"]
)
def test_arrays(tmp_path, stored):
    rng = np.random.default_rng(0)
    x = rng.integers(256, size=(5, 4, 6, 3), dtype=np.uint8)
    kept = x if stored == np.uint8 else (x.transpose(0, 3, 1, 2) / 255).astype(np.float32)
    np.savez(tmp_path / "a.npz", x=kept, y=np.zeros(5))
    np.savez(tmp_path / "b.npz", photos=kept)
    for name in "ab":
        drawn = build_prior(str(tmp_path / f"{name}.npz"), (3, 4, 6)).draw(
            5, np.random.default_rng(0)
        )
        order = np.random.default_rng(0).choice(5, 5, replace=False)
        np.testing.assert_allclose(drawn, x[order].transpose(0, 3, 1, 2) / 255, atol=1e-6)


def test_a_table_of_samples(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("age,dose,label\n1,2,0\n3,,1\n5,6,0\n")
    prior = build_prior(str(file), (2,))
    assert sorted(prior.draw(2, np.random.default_rng(0)).tolist()) == [[1, 2], [5, 6]]
    assert any("'label' is left out" in note for note in prior.notes)
    assert any("1 of 3 samples are left out" in note for note in prior.notes)
    chosen = build_prior(str(file), (2,), features=["label", "age"])
    assert [1, 3] in chosen.draw(3, np.random.default_rng(0)).tolist()
    with pytest.raises(DataError, match="did you mean 'dose'"):
        build_prior(str(file), (2,), features=["does", "age"])
    with pytest.raises(DataError, match="3 columns, but an input has 5 values"):
        build_prior(str(file), (5,))


def test_samples_that_are_none(tmp_path):
    np.savez(tmp_path / "two.npz", a=np.zeros((2, 3)), b=np.zeros((2, 3)))
    np.savez(tmp_path / "scaled.npz", x=np.full((2, 1, 3, 3), -0.4))
    np.savez(tmp_path / "words.npz", x=np.array([["a"], ["b"]]))
    np.savez(tmp_path / "other.npz", x=np.zeros((2, 1, 4, 4)))
    np.savez(tmp_path / "holes.npz", x=np.full((2, 1, 3, 3), np.nan))
    (tmp_path / "broken.npz").write_bytes(b"PK")
    (tmp_path / "text.txt").write_text("no")
    for name, said in {
        "two.npz": "has no array x",
        "scaled.npz": "Give unscaled images",
        "words.npz": "must be numbers",
        "other.npz": "2 samples of 1 x 4 x 4, but an input is 1 x 3 x 3",
        "holes.npz": "every sample has a value that is missing",
        "broken.npz": "cannot read",
        "text.txt": "cannot be read",
    }.items():
        with pytest.raises(DataError, match=said):
            build_prior(str(tmp_path / name), (1, 3, 3))


# --- pictures


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("leaves", (3, 8, 8)),
        ("strokes", (1, 9, 7)),
        ("noise", (2, 30)),
        ("tones", (30,)),
        ("gaussian", (30,)),
    ],
)
def test_a_picture_of_draws(tmp_path, name, shape):
    from PIL import Image

    path = tmp_path / "inputs.png"
    plot_inputs(build_prior(name, shape), path)
    pixels = np.asarray(Image.open(path).convert("L"))
    assert min(pixels.shape) > 300
    assert 0.005 < (pixels < 128).mean() < 0.995
    with pytest.raises(RunError, match="unknown format"):
        plot_inputs(build_prior(name, shape), tmp_path / "inputs.txt")


def test_no_picture_of_films():
    with pytest.raises(ConfigError, match="inputs of 2 x 2 x 2 x 2"):
        plot_inputs(build_prior("tests.inputs.test_inputs:ramps", (2, 2, 2, 2)), None)


# --- the page of the documentation


def test_the_page_does_what_it_says(tmp_path, monkeypatch, capsys):
    """Its code runs, its example of a file is one, and it names every prior."""
    import re

    from fedbayes.inputs import PRIORS

    whole = (ROOT / "docs" / "howto" / "fuse.md").read_text()
    page = whole[whole.index("## Input priors") :]
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for language, code in re.findall(r"^```(\w+)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        if language == "python":
            exec(compile(code, "fuse.md", "exec"), names)
        elif language == "json":
            (tmp_path / "example.json").write_text(code)
    assert capsys.readouterr().out.splitlines() == [
        "(\"inputs are sampled from 'leaves': an image of 3 channels is read as a photograph\",)",
        "a Gaussian copula, from sums of 400 rows; categories: grade",
    ]
    assert (tmp_path / "leaves.png").stat().st_size > 10_000
    assert read_sums(tmp_path / "example.json").features == ("age", "grade")
    assert all(f"| `{name}` |" in page for name in PRIORS)


def test_categories_that_no_training_row_had_are_told(tmp_path):
    table = tmp_path / "new.csv"
    table.write_text("age,sex\n" + "30,x\n" * 20 + "40,f\n" * 10)
    columns = (Column("age"), Column("sex", "category", ("f", "m")))
    found = RealSamples(table, (3,), columns=columns)
    (told,) = [note for note in found.notes if "sex" in note]
    assert "has a category, unlike all training rows, in 20 rows" in told
