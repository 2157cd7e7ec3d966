"""One private round: what enters the sum, and what comes out."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import beta, kstest

pytest.importorskip("dp_accounting")

from fedbayes.contracts import Report, Reports
from fedbayes.contracts.changes import changes_of, shortened
from fedbayes.errors import ConfigError
from fedbayes.federation.privacy.accounting import ADD_REMOVE, REPLACE, epsilons
from fedbayes.federation.privacy.matrix import strategy
from fedbayes.federation.privacy.mechanism import Mechanism, multipliers
from fedbayes.federation.privacy.noise import Secret
from fedbayes.federation.privacy.settings import Privacy
from fedbayes.federation.privacy.spending import Spending
from fedbayes.federation.stages.secure import Plan

SECRET = Secret(b"s" * 32)


def way_around(centre, parts=None):
    """A way for reports of these tensors, by part: all real ones are `weights` by default."""

    network = SimpleNamespace(initial=centre, buffers=())

    def changes(report):
        every = changes_of(report, centre, network, Reports())
        found = {n: t for each in every.values() for n, t in each.items()}
        real = [n for n in found if report.tensors[n].is_floating_point()]
        grouped = {}
        for name in real:
            grouped.setdefault((parts or {}).get(name, "weights"), {})[name] = found[name]
        whole = {n: t for n, t in found.items() if n not in real}
        return {**grouped, **({"counters": whole} if whole else {})}

    return SimpleNamespace(changes=changes, resummed=lambda total: total.whole(centre))


def folded(centre, reports, parts=None, record=None, number=1, secret=SECRET, size=None, **given):
    """A private fold of these reports, with the noise on: the sum and what is on record."""
    clip = given.pop("clip", 1.0)
    mechanism = Mechanism(
        Privacy(**{"noise": 1.0, **given}),
        clip,
        secret,
        record or Spending.empty(),
        number,
        size or len(reports),
        members=tuple(range(len(reports))),
    )
    private = mechanism.begin(way_around(centre, parts), dict(centre))
    for client, report in enumerate(reports):
        private.add(client, report)
    return private.reduced(), private.record


TYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(TYPES),
    st.integers(-30, 30),
    st.integers(-30, 30),
    st.floats(1e-6, 1e6),
    st.integers(0, 2**32),
    st.integers(1, 400),
)
def test_what_enters_the_sum_is_no_longer_than_the_bound(kind, large, small, clip, seed, size):
    """Weights and changes of any type and magnitude: today 1.56 C in bfloat16."""
    rng = torch.Generator().manual_seed(seed)
    limit = torch.finfo(kind).max / 4
    centre = {"a": (torch.randn(size, generator=rng).double() * 2.0**large).clamp(-limit, limit)}
    moved = (centre["a"] + torch.randn(size, generator=rng).double() * 2.0**small).to(kind)
    centre["a"] = centre["a"].to(kind)
    mechanism = Mechanism(Privacy(noise=1.0), clip, SECRET, Spending.empty(), 1, 1)
    private = mechanism.begin(way_around(centre), dict(centre))
    private.add(0, Report({"a": moved.clamp(-limit, limit)}, 2.0**53))
    entered = private._sums["weights"]["a"]
    assert entered.dtype == torch.float64
    assert float(np.linalg.norm(entered.numpy().astype(np.longdouble))) <= clip * (1 + 1e-12)
    change = moved.clamp(-limit, limit).double() - centre["a"].double()
    if float(change.norm()) <= clip * (1 - 1e-12):
        assert torch.equal(entered, change)


FLOATS = st.floats(-1e308, 1e308, allow_nan=False)


@settings(max_examples=150, deadline=None)
@given(arrays(np.float64, st.integers(1, 30), elements=FLOATS), st.floats(1e-300, 1e300))
def test_clipping_holds_for_every_float64(values, bound):
    found = shortened({"a": torch.from_numpy(values)}, bound)["a"]
    exact = np.sqrt(np.square(found.numpy().astype(np.longdouble)).sum())
    assert exact <= np.longdouble(bound) * (1 + 1e-12)
    assert bool((found * torch.from_numpy(values) >= 0).all())


def test_what_is_infinite_is_left_for_who_refuses_it():
    odd = {"a": torch.tensor([1.0, torch.inf, torch.nan], dtype=torch.float64)}
    assert shortened(odd, 2.0) is odd


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(TYPES[2:]),
    st.integers(-20, 20),
    st.integers(0, 2**32),
    st.sampled_from([64, 2**20, 2**30]),
)
def test_what_a_client_of_secure_aggregation_sends_is_no_longer(kind, power, seed, levels):
    rng = torch.Generator().manual_seed(seed)
    centre = {"a": 2.0**power * torch.randn(50, generator=rng).to(kind)}
    moved = {"a": centre["a"] + torch.randn(50, generator=rng).to(kind)}
    plan = Plan(3, 2, range=0.5, levels=levels, max_weight=0.0, clip=0.5, exact=True)
    vector = plan.write(Report(moved), centre)[1:]
    slack = plan.step * math.sqrt(len(vector))  # of rounding up or down in every entry
    assert np.linalg.norm(vector) + slack <= max(0.5, slack) * (1 + 1e-12)
    read = plan.read(np.concatenate([[0.5], vector]), centre).tensors["a"]
    assert read.dtype == torch.float64
    np.testing.assert_allclose(
        (read - centre["a"].double()).numpy(), vector, atol=1e-9 * 2.0**power
    )


def test_a_private_sum_is_its_formula_and_its_noise_has_the_deviation_that_is_claimed():
    """w + (Σ clip(φ_s − w) + z C n) / B over six reports of ten: the divisor tells nobody how many
    reported; what is no real number stays as it was."""
    big = {"a": torch.zeros(40_000), "steps": torch.tensor(3)}
    reports = [
        Report({"a": torch.full((40_000,), 1.0), "steps": torch.tensor(7)}, 1e9) for _ in range(6)
    ]
    summed, record = folded(big, reports, size=10, clip=2.0, noise=1.5)
    mean = summed.mean()["a"].double()
    assert float(mean.mean()) == pytest.approx(6 * 2 / 200 / 10, abs=4 * 0.3 / 200)
    assert float(mean.std()) == pytest.approx(1.5 * 2.0 / 10, rel=0.02)
    assert summed.mean()["steps"] == 3
    assert (summed.weight, summed.clients) == (10.0, 10)
    drawn = SECRET.stream("noise", 1, bytes(record.nonces[0].tolist())).gaussian(40_000)
    expected = (6 * 2 / 200 + 3.0 * drawn) / 10
    np.testing.assert_allclose(mean.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert record.spent(1)[0].noise == 1.5
    assert float(record.clips["weights"][0]) == 2.0


def test_nobody_reports_and_there_is_noise_as_ever():
    centre = {"a": torch.full((20_000,), 0.25)}
    summed, record = folded(centre, [], size=5, noise=2.0)
    mean = (summed.mean()["a"] - 0.25).double()
    assert kstest((mean * 5 / 2).numpy(), "norm").pvalue > 1e-3
    assert record.rounds == 1


def test_noise_is_never_drawn_twice_unless_it_is_to_be_repeated():
    centre, reports = {"a": torch.zeros(5)}, [Report({"a": torch.ones(5)})]
    first, second = (folded(centre, reports)[0].mean()["a"] for _ in range(2))
    assert not torch.equal(first, second)
    once, again = (folded(centre, reports, repeatable=True)[0].mean()["a"] for _ in range(2))
    assert torch.equal(once, again)


def test_each_part_has_a_bound_of_its_own_and_noise_for_all_of_them():
    """Parts within C_p each are together within √P in units of the bounds."""
    centre = {"a": torch.zeros(20_000), "b": torch.zeros(20_000)}
    parts = {"a": "weights", "b": "shift"}
    far = [Report({"a": torch.ones(20_000), "b": 7 * torch.ones(20_000)})]
    summed, record = folded(centre, far, parts, clip=1.0, clips={"shift": 100.0}, noise=0.5)
    mean = {n: t.double() for n, t in summed.mean().items()}
    for name, bound in (("a", 1.0), ("b", 100.0)):
        expected = bound / math.sqrt(20_000)
        deviation = 0.5 * math.sqrt(2) * bound
        assert float(mean[name].std()) == pytest.approx(deviation, rel=0.03)
        assert float(mean[name].mean()) == pytest.approx(expected, abs=4 * deviation / 141)
    assert record.spent(1)[0].noise == 0.5  # jointly, since there is √2 as much on each


def test_correlated_noise_has_the_covariance_of_the_inverse_factor():
    """Rounds one after another, each from its own process: only the record and the secret stay."""
    rounds, entries, z = 5, 60_000, 2.0
    centre = {"a": torch.zeros(entries, dtype=torch.float64)}
    record, noise = Spending.empty(), []
    for number in range(1, rounds + 1):
        summed, record = folded(
            centre, [], record=record, number=number, size=1, noise=z, mechanism="matrix"
        )
        noise.append(summed.mean()["a"].numpy())
    inverse = np.linalg.inv(strategy(rounds))
    np.testing.assert_allclose(np.cov(noise), z**2 * inverse @ inverse.T, atol=0.15)
    whitened = strategy(rounds) @ np.stack(noise) / z
    np.testing.assert_allclose(np.cov(whitened), np.eye(rounds), atol=0.03)
    spent = record.spent(rounds)
    assert [s.begins for s in spent] == [True] + [False] * 4


@pytest.mark.parametrize("change", ["secret", "bands", "size"])
def test_where_noise_cannot_be_taken_up_a_sequence_begins(change):
    centre = {"a": torch.zeros(7)}
    _, record = folded(centre, [], size=1, mechanism="matrix")
    more = {
        "secret": {"secret": Secret(b"t" * 32)},
        "bands": {"bands": 2},
        "size": {"centre": {"a": torch.zeros(8)}},
    }[change]
    place = more.pop("centre", centre)
    _, record = folded(place, [], record=record, number=2, size=1, mechanism="matrix", **more)
    assert [s.begins for s in record.spent(2)] == [True, True]


def test_bounds_follow_a_quantile_of_the_norms():
    """From far above and far below to the median of norms that are known."""
    centre, rng = {"a": torch.zeros(10)}, np.random.default_rng(0)
    norms = rng.lognormal(1.0, 0.5, size=60)
    axis = torch.eye(10)[0]
    for start in (0.3, 30.0):
        record = Spending.empty()
        reports = [Report({"a": float(n) * axis}) for n in norms]
        for number in range(1, 61):
            _, record = folded(
                centre, reports, record=record, number=number, clip=start, quantile=0.5, noise=0.5
            )
        assert float(record.bounds["weights"]) == pytest.approx(np.median(norms), rel=0.15)
        assert float(record.clips["weights"][0]) == start
        spent = record.spent(60)
        assert epsilons(spent, 1e-5)[REPLACE] == pytest.approx(
            epsilons([type(spent[0])(0.5, members=(0,))] * 60, 1e-5)[REPLACE], rel=1e-9
        )


def test_a_step_of_the_bound_is_that_of_the_paper():
    """Andrew et al. 2021, Algorithm 1: C exp(−η (b̃ − γ)), b̃ a noisy share."""
    centre = {"a": torch.zeros(3)}
    reports = [Report({"a": torch.full((3,), x)}) for x in (0.1, 0.2, 5.0, 9.0)]
    _, record = folded(
        centre, reports, clip=1.0, quantile=0.3, quantile_rate=0.4, noise=0.2, count_noise=1.0
    )
    drawn = SECRET.stream("counts", 1, bytes(record.nonces[0].tolist())).gaussian(1)[0]
    share = min(max((2 + drawn) / 4, 0), 1)
    assert float(record.bounds["weights"]) == pytest.approx(math.exp(-0.4 * (share - 0.3)))


def test_counts_cannot_cost_more_than_there_is():
    assert multipliers(Privacy(noise=2.0), 3, 10) == (2.0, math.inf)
    with pytest.raises(ConfigError, match="too small for the counts"):
        multipliers(Privacy(noise=2.0, quantile=0.5), 1, 10)
    split, counts = multipliers(Privacy(noise=2.0, quantile=0.5, count_noise=8.0), 4, 10)
    assert split**-2 + counts**-2 == pytest.approx(2.0**-2)
    assert counts == 8.0  # 2 σ_b / √4


@pytest.mark.parametrize("kind", [REPLACE, ADD_REMOVE])
def test_an_auditor_finds_no_more_than_epsilon_and_not_much_less(kind):
    """The round run on two neighbours many times, and who decides between them by a threshold: a
    lower bound of ε, with confidence (Clopper and Pearson), from the two kinds of errors."""
    tries, z, delta = 100_000, 1.0, 1e-3

    def outcomes(value, secret):
        """As many rounds of one entry as a round has entries: their noise is independent."""
        alone = {"a": torch.zeros(1, dtype=torch.float64)}
        mechanism = Mechanism(Privacy(noise=z), 1.0, SECRET, Spending.empty(), 1, 1)
        private = mechanism.begin(way_around(alone), dict(alone))
        if value:
            private.add(0, Report({"a": torch.tensor([value], dtype=torch.float64)}))
        centre = {"a": torch.zeros(tries, dtype=torch.float64)}
        noise = folded(centre, [], size=1, noise=z, secret=Secret(secret * 32))[0].mean()["a"]
        return float(private._sums["weights"]["a"]) + noise.numpy()

    here, there = outcomes(1e9, b"a"), outcomes(-1e9 if kind == REPLACE else None, b"b")
    _, record = folded({"a": torch.zeros(1)}, [Report({"a": torch.zeros(1)})], noise=z)
    claimed = epsilons(record.spent(1), delta)[kind]
    found = 0.0
    for threshold in np.linspace(-2, 3, 41):
        right, wrong = (here > threshold).sum(), (there > threshold).sum()
        n = len(here)
        least = beta.ppf(0.0005, right, n - right + 1)
        most = beta.ppf(0.9995, wrong + 1, n - wrong)
        if least > delta:
            found = max(found, math.log((least - delta) / most))
    assert 0.5 * claimed < found <= claimed
