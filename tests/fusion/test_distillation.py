"""Distillation against least squares, PyTorch's own schedule, and itself broken off."""

import itertools
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import nn

from fedbayes.core.targets import Target
from fedbayes.errors import ModelError, RunError
from fedbayes.fusion.class_counts import class_shares
from fedbayes.fusion.distillation import (
    LR,
    LR_NORMALIZED,
    STATISTICS,
    _DistillationRun,
    cycle,
    distill,
    recompute,
)
from fedbayes.fusion.draws import CHUNK, Augmented, CachedInputs
from fedbayes.fusion.frozen import ChannelsLast
from fedbayes.fusion.settings import DistillationSettings
from fedbayes.fusion.teacher import Teacher
from fedbayes.fusion.temperature import temperature
from fedbayes.likelihoods import build_likelihood
from tests.helpers.toy_inputs import Gauss, inputs

CLASSES = build_likelihood("categorical", Target("class", ("a", "b", "c")))


class Correlated(Gauss):
    """Normal rows whose columns say something of one another."""

    mix = torch.tensor([[1.0, 0.5, 0.0, 0.3], [0, 1, 0.5, 0], [0, 0, 1, -0.4], [0, 0, 0, 1]])

    def draw(self, count, rng):
        return super().draw(count, rng) @ self.mix


class First(nn.Linear):
    """Sees the first two columns alone."""

    def forward(self, x):
        return super().forward(x[:, :2])


def linear_teacher():
    torch.manual_seed(0)
    clients = [nn.Linear(4, 3) for _ in range(2)]
    return Teacher(clients, class_shares([[3, 1, 2], [1, 4, 2]]))


def taught(teacher):
    """The linear network that says what a teacher of linear ones says."""
    student = nn.Linear(4, 3)
    with torch.no_grad():
        for name in ("weight", "bias"):
            both = torch.stack([getattr(c.module, name) for c in teacher.clients])
            shares = teacher.shares if name == "bias" else teacher.shares[..., None]
            getattr(student, name).copy_((shares * (both - both.mean(1, keepdim=True))).sum(0))
    return student


def settings(**chosen):
    plain = {"steps": 60, "draws": 256, "held_out": 128, "checks": 6, "augment": False}
    return DistillationSettings(**{**plain, **chosen})


def centred(f):
    return f - f.mean(-1, keepdim=True)


def test_a_linear_network_becomes_the_least_squares_solution():
    teacher, draws = linear_teacher(), inputs(Correlated((4,)))
    chosen = settings(steps=700, lr=0.03, draws=8192, batch_size=128)
    torch.manual_seed(1)
    found = distill(First(2, 3), teacher, draws, chosen)
    x = draws.batch(99, 50_000)
    with torch.no_grad():
        said, answers = teacher(x), centred(found.module(x))
    rows = torch.cat([x[:, :2], torch.ones(len(x), 1)], 1).double().numpy()
    best = np.linalg.lstsq(rows, centred(said).double().numpy(), rcond=None)[0]
    np.testing.assert_allclose(answers.numpy(), rows @ best, atol=0.05)


def test_predictions_of_real_targets_become_the_mixtures():
    """The least divergence of a linear network with noise of its own: least squares for the mean,
    and what it leaves beside the mixture's variance for the noise.
    """
    kind = build_likelihood("gaussian", Target("real", ("y",), (0.0,), (1.0,)))
    torch.manual_seed(0)
    clients = [nn.Sequential(nn.Linear(4, 1), kind.head()) for _ in range(2)]
    teacher, draws = Teacher(clients, likelihood=kind), inputs(Correlated((4,)))
    student = nn.Sequential(First(2, 1), kind.head())
    found = distill(
        student, teacher, draws, settings(steps=700, lr=0.03, draws=8192, batch_size=128)
    )
    x = draws.batch(99, 50_000)
    with torch.no_grad():
        mean, variance = kind.moments(teacher(x))
        own_mean, own_variance = kind.moments(found.module(x))
    rows = torch.cat([x[:, :2], torch.ones(len(x), 1)], 1)
    best = torch.linalg.lstsq(rows, mean).solution
    torch.testing.assert_close(own_mean, rows @ best, atol=0.05, rtol=0)
    left = (variance + (mean - rows @ best).square()).mean()
    assert float(own_variance[0, 0]) == pytest.approx(float(left), rel=0.03)


@pytest.mark.parametrize(
    ("layers", "asked", "wanted"),
    [
        ([], None, LR),
        ([nn.BatchNorm1d(3)], None, LR_NORMALIZED),
        ([nn.GroupNorm(1, 3)], None, LR_NORMALIZED),
        ([nn.LayerNorm(3)], None, LR),
        ([nn.BatchNorm1d(3)], 0.01, 0.01),
    ],
)
def test_networks_with_normalization_learn_at_a_larger_rate(layers, asked, wanted, monkeypatch):
    rates = []
    step = torch.optim.Adam.step

    def noted(self):
        rates.append(self.param_groups[0]["lr"])
        step(self)

    monkeypatch.setattr(torch.optim.Adam, "step", noted)
    student = nn.Sequential(nn.Linear(4, 3), *layers)
    distill(student, linear_teacher(), inputs(Gauss((4,))), settings(lr=asked))
    assert len(rates) == 60
    assert 0.99 * wanted < max(rates) <= wanted


class Small(nn.Sequential):
    """All that has a state of its own: filters, batch normalization, dropout."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Dropout(),
            nn.Flatten(),
            nn.Linear(144, 3),
        )


class Training(nn.Module):
    """What a network's own code does in training: dropout, and an answer of another form."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        x = nn.functional.dropout(x, 0.5, self.training)[:, None]
        found = self.last(self.attention(x, x, x, need_weights=False)[0][:, 0])
        return (found, x) if self.training else found


class Evaluation(Training):
    """The same without any of it."""

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))[:, None]
        self.attention.dropout = 0.0
        return self.last(self.attention(x, x, x, need_weights=False)[0][:, 0])


def test_what_networks_do_in_training_alone_is_left_out():
    found = []
    for kind in (Training, Evaluation):
        torch.manual_seed(3)
        student = kind()
        found.append(distill(student, linear_teacher(), inputs(Gauss((4,))), settings(lr=0.02)))
    assert found[0].divergence == found[1].divergence < found[0].checks[0].divergence
    for name, tensor in found[0].module.state_dict().items():
        assert torch.equal(tensor, found[1].module.state_dict()[name]), name


def small():
    torch.manual_seed(0)
    teacher = Teacher([Small().eval() for _ in range(2)])
    torch.manual_seed(5)
    return Small(), teacher, inputs(Gauss((3, 8, 8)))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_what_was_broken_off_ends_as_if_it_had_not_been(tmp_path, precision):
    student, teacher, draws = small()
    before = {name: t.clone() for name, t in student.state_dict().items()}
    chosen = settings(augment=True, precision=precision, draws=700, repeats=2)
    whole = distill(student, teacher, draws, chosen)
    state = tmp_path / "state"
    for stop in (25, 41):  # between checks

        def breaking(progress, stop=stop):
            if progress.step == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            distill(student, teacher, draws, chosen, state=state, watch=breaking)
    steps = []
    found = distill(
        student, teacher, draws, chosen, state=state, watch=lambda p: steps.append(p.step)
    )
    assert steps == list(range(41, 61))
    assert found.ended == whole.ended == "all steps done"
    assert [c[:2] for c in found.checks] == [c[:2] for c in whole.checks]
    assert (found.step, found.divergence, found.temperature) == (
        whole.step,
        whole.divergence,
        whole.temperature,
    )
    for name, tensor in whole.module.state_dict().items():
        assert torch.equal(tensor, found.module.state_dict()[name]), name
    again = distill(student, teacher, draws, chosen, state=state)
    assert again.divergence == whole.divergence
    assert all(torch.equal(before[name], t) for name, t in student.state_dict().items())


@pytest.mark.parametrize("by_class", [True, False])
def test_logits_count_where_they_are_added_up_and_else_predictions(by_class):
    """Without shares of classes the teacher is the mixture, whose logits have no lower end."""
    torch.manual_seed(0)
    clients = [nn.Linear(4, 3) for _ in range(2)]
    shares = class_shares([[3, 1, 2], [1, 4, 2]]) if by_class else None
    run = _DistillationRun(
        nn.Linear(4, 3), Teacher(clients, shares), inputs(Gauss((4,))), settings()
    )
    outputs, said = torch.randn(5, 3), torch.randn(5, 3)
    p = said.softmax(1)
    wanted = (p * (p.log() - outputs.softmax(1).log())).sum(1).mean()
    if by_class:
        taught = torch.cat([centred(f) for _, f in run.held_out])
        wanted = (centred(outputs) - centred(said)).square().mean() / taught.square().mean()
    assert float(run.loss(outputs, said)) == pytest.approx(float(wanted), rel=1e-5)


def test_it_learns_and_the_best_is_kept():
    student, teacher, draws = small()
    found = distill(student, teacher, draws, settings(steps=200, lr=0.01, draws=2048))
    lowest = min(check.divergence for check in found.checks)
    assert found.divergence <= lowest < 0.5 * found.checks[0].divergence
    x = torch.cat([draws.batch(-1, 128)])
    with torch.no_grad():
        found_now = CLASSES.divergence(teacher(x), found.module(x)).mean()
    assert float(found_now) == pytest.approx(found.divergence, rel=1e-4)


class Half(Gauss):
    """Rows whose last two columns are zero, and that are turned until none of them is."""

    def draw(self, count, rng):
        return super().draw(count, rng) * torch.tensor([1.0, 1.0, 0.0, 0.0])

    def augmented(self, x, rng):
        order = torch.rand(x.shape, generator=rng).argsort(1)
        return x.gather(1, order)


def test_what_is_held_out_is_augmented_as_what_is_learnt_from():
    """A start that is right on the draws as they are is wrong on those that are learnt from."""
    teacher = linear_teacher()
    student = taught(teacher)
    with torch.no_grad():
        student.weight[:, 2:] = 0
    draws = inputs(Half((4,)))
    plain = distill(student, teacher, draws, settings(lr=0.01))
    assert plain.checks[0].divergence < 1e-7
    found = distill(student, teacher, draws, settings(lr=0.01, steps=400, augment=True))
    assert found.checks[0].divergence > 0.01
    assert found.divergence < 0.1 * found.checks[0].divergence
    x = torch.randn(1000, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        far = [CLASSES.divergence(teacher(x), f(x)).mean() for f in (student, found.module)]
    assert far[1] < 0.1 * far[0]


def test_running_statistics_are_of_augmented_draws():
    torch.manual_seed(1)
    student = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    chosen = settings(lr=0.01, steps=200, augment=True)
    found = distill(student, linear_teacher(), inputs(Half((4,))), chosen)
    assert found.step > 0
    torch.testing.assert_close(found.module[0].running_var, torch.full((4,), 0.5), atol=0.1, rtol=0)


def test_augmented_draws_are_the_same_for_the_same_number():
    draws = Augmented(inputs(Half((4,))))
    assert torch.equal(draws.batch(3, 64), draws.batch(3, 64))
    raw = draws.draws.batch(3, 64)
    assert torch.equal(draws.batch(3, 64).sort(1).values, raw.sort(1).values)
    moved = draws.batch(3, 64) != raw
    assert moved.any(0).all()
    orders = [(draws.batch(n, 64) == 0)[:, 2:] for n in (-3, 3, 4)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(orders, 2))


def test_it_ends_where_nothing_improves_and_gives_the_start():
    teacher = linear_teacher()
    student = taught(teacher)
    chosen = settings(steps=1000, checks=100, patience=3, lr=1.0)
    found = distill(student, teacher, inputs(Gauss((4,))), chosen)
    assert found.ended == "no improvement in 3 checks"
    assert found.checks[-1].step < 500
    assert found.step == 0
    assert found.divergence < 1e-7
    assert torch.equal(found.module.weight, student.weight)


def test_a_cycle_is_as_long_as_there_is_time():
    shares, seconds, left = [], [], []

    def watch(progress):
        shares.append(progress.share)
        seconds.append(progress.seconds)
        left.append(progress.left)

    chosen = settings(steps=10**7, minutes=0.02, patience=None)
    found = distill(nn.Linear(4, 3), linear_teacher(), inputs(Gauss((4,))), chosen, watch=watch)
    assert found.ended in ("all steps done", "time limit reached")
    assert shares[-1] > 0.8
    assert all(a <= b for a, b in itertools.pairwise(shares))
    assert 0.9 < seconds[-1] < 10
    assert 0 <= max(left) <= 1.2, "however long all steps would take"


@pytest.mark.parametrize("minutes", [0.02, None])
def test_slow_draws_leave_most_of_limited_time_to_training(minutes):
    """Some then come again; all are drawn where there is no limit."""
    asked = []

    class Slow(CachedInputs):
        def batch(self, number, count):
            if number >= 0 and number not in asked:
                asked.append(number)
                time.sleep(0.05 if minutes else 0)
            return super().batch(number, count)

    draws = Slow(inputs(Gauss((4,))))
    steps = 10**7 if minutes else 20 * CHUNK // 64
    chosen = settings(
        steps=steps, minutes=minutes, draws=20 * CHUNK, batch_size=64, repeats=1, patience=None
    )
    distill(nn.Linear(4, 3), linear_teacher(), draws, chosen)
    # However slow the machine is: none is drawn once those before took a fifth of the time.
    assert len(asked) <= 0.2 * 60 * minutes / 0.05 + 1 if minutes else len(asked) == 20


def test_what_had_no_more_time_goes_on_when_it_is_given_some(tmp_path):
    teacher, draws, state = linear_teacher(), inputs(Gauss((4,))), tmp_path / "state"
    student = nn.Linear(4, 3)
    late = distill(student, teacher, draws, settings(minutes=1e-6), state=state)
    assert late.ended == "time limit reached"
    again = distill(student, teacher, draws, settings(minutes=1e-6), state=state)
    assert len(again.checks) == len(late.checks)
    found = distill(student, teacher, draws, settings(minutes=1), state=state)
    assert found.ended == "all steps done"
    assert found.checks[: len(late.checks)] == late.checks


def test_running_statistics_are_of_whole_batches_of_draws():
    """Though images are predicted some at a time."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2), nn.Flatten())
    drawn = torch.randn(STATISTICS // CHUNK, CHUNK, 3, 6, 6)
    draws = SimpleNamespace(batch=lambda number, count: drawn[number])
    recompute(ChannelsLast(module), draws, torch.device("cpu"))
    with torch.no_grad():
        seen = [module[0](x) for x in drawn]
    var = torch.stack([x.transpose(0, 1).flatten(1).var(1) for x in seen]).mean(0)
    torch.testing.assert_close(module[1].running_var, var, rtol=1e-6, atol=0)
    assert module[1].num_batches_tracked == len(drawn)


def test_running_statistics_are_those_of_the_draws():
    teacher, draws = linear_teacher(), inputs(Correlated((4,)))
    student = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    found = distill(student, teacher, draws, settings(draws=CHUNK))
    x = torch.cat([draws.batch(number, CHUNK) for number in range(8)])
    layer = found.module[0]
    assert not found.module.training
    torch.testing.assert_close(layer.running_mean, x.mean(0), atol=1e-4, rtol=0)
    torch.testing.assert_close(layer.running_var, x.var(0), rtol=0.02, atol=0)
    assert layer.momentum == 0.1


def test_the_rate_is_that_of_one_cycle():
    steps = 50
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1.0, steps + 1, pct_start=21 / 51, final_div_factor=1e12, cycle_momentum=False
    )
    for step in range(steps + 1):
        assert cycle(step / steps, 0.4) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-6)
        optimizer.step()
        schedule.step()


def test_every_draw_comes_once_before_one_comes_twice():
    draws = inputs(Gauss((4,)))
    run = _DistillationRun(
        nn.Linear(4, 3), linear_teacher(), draws, settings(draws=2 * CHUNK, batch_size=64)
    )
    steps = 2 * CHUNK // 64
    seen = [torch.cat([run.inputs(e * steps + i) for i in range(steps)]) for e in range(2)]
    assert len(seen[0].unique(dim=0)) == 2 * CHUNK
    torch.testing.assert_close(seen[0].sort(0).values, seen[1].sort(0).values)
    assert not torch.equal(seen[0], seen[1])


def test_kept_draws_are_those_that_were_drawn():
    class Counted(Gauss):
        drawn = 0

        def draw(self, count, rng):
            self.drawn += 1
            return super().draw(count, rng)

    prior = Counted((4,))
    kept = CachedInputs(inputs(prior), memory=2 * 10 * 4 * 4)
    for number in (0, 1, 2, 2, 3, 0, 1, 2):
        assert torch.equal(kept.batch(number, 10), inputs(Gauss((4,))).batch(number, 10))
    assert prior.drawn == 5  # the third has no room, but that of the latest


def test_what_does_not_fit_is_refused(tmp_path):
    teacher, draws = linear_teacher(), inputs(Gauss((4,)))
    with pytest.raises(ModelError, match=r"returns \(128, 5\) and the teacher \(128, 3\)"):
        distill(nn.Linear(4, 5), teacher, draws, settings())
    with pytest.raises(ModelError, match=r"no trainable weights\. Set requires_grad"):
        distill(nn.Linear(4, 3).requires_grad_(False), teacher, draws, settings())
    spoilt = nn.Linear(4, 3)
    spoilt.weight.data[0, 0] = torch.inf
    with pytest.raises(ModelError, match="start from has outputs that are not finite"):
        distill(spoilt, teacher, draws, settings())


@pytest.mark.parametrize(
    ("steps", "minutes", "lessons"), [(60, None, 20), (9000, None, 1000), (9000, 5.0, 64)]
)
def test_a_batch_comes_again_when_many_others_have_come(steps, minutes, lessons):
    """And the teacher is not asked again."""
    asked = []
    teacher, draws = linear_teacher(), inputs(Gauss((4,)))
    run = _DistillationRun(
        nn.Linear(4, 3), teacher, draws, settings(steps=steps, minutes=minutes, batch_size=4)
    )
    first, *others = teacher.clients
    teacher.clients = (lambda x: asked.append(x) or first(x), *others)
    three = [[run.lesson(use * lessons + i) for i in range(lessons)] for use in range(3)]
    for again in three[1:]:
        for before, now in zip(three[0], again, strict=True):
            assert all(map(torch.equal, before, now))
    assert len(asked) == lessons
    assert not run.told
    run.lesson(3 * lessons)
    assert len(asked) == lessons + 1


def test_states_of_others_and_damaged_ones_are_refused(tmp_path):
    teacher, draws, state = linear_teacher(), inputs(Gauss((4,))), tmp_path / "state"
    student = nn.Linear(4, 3)
    distill(student, teacher, draws, settings(), state=state)
    other = Teacher(teacher.clients[:1])
    for given in (
        (student, other, draws, settings()),
        (student, teacher, inputs(Gauss((4,)), seed=1), settings()),
        (student, teacher, draws, settings(lr=0.5)),
        (nn.Sequential(student), teacher, draws, settings()),
        (nn.Linear(4, 3), teacher, draws, settings()),
    ):
        with pytest.raises(RunError, match="belongs to another distillation"):
            distill(*given, state=state)
    data = bytearray(state.read_bytes())
    data[-3] ^= 1
    state.write_bytes(bytes(data))
    with pytest.raises(RunError, match="cannot be read"):
        distill(student, teacher, draws, settings(), state=state)


def test_a_rate_that_is_too_high_leaves_the_best():
    teacher, draws = linear_teacher(), inputs(Gauss((4,)))
    student = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    found = distill(student, teacher, draws, settings(lr=1e30))
    assert "no longer finite" in found.ended
    assert found.step == 0
    assert np.isfinite(found.divergence)


@pytest.mark.parametrize("scale", [0.3, 1.0, 2.5])
def test_the_temperature_is_the_scale_of_the_logits(scale):
    f = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    assert temperature(scale * f, f, CLASSES) == pytest.approx(scale, rel=1e-5)


def test_the_temperature_has_the_least_cross_entropy():
    rng = torch.Generator().manual_seed(0)
    f, said = torch.randn(2, 80, 3, generator=rng)
    f = f + said

    def entropy(t):
        return float(-(said.softmax(1) * (f / t).log_softmax(1)).sum(1).mean())

    wanted = minimize_scalar(entropy, bounds=(0.1, 10), method="bounded", options={"xatol": 1e-7})
    assert temperature(f, said, CLASSES) == pytest.approx(wanted.x, rel=1e-3)
    with pytest.raises(ModelError, match="not all finite"):
        temperature(f * torch.nan, said, CLASSES)
    with pytest.raises(ModelError, match="the same"):
        temperature(f[:3], said, CLASSES)
