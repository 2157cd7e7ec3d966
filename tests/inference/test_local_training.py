import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn
from torch.nn import functional

import fedbayes
from fedbayes.config.config import Config
from fedbayes.contracts import Problem, nll
from fedbayes.core.tensors import Samples
from fedbayes.inference.optimizers import Adam, OptimizerMoments, Sgd, step
from fedbayes.inference.settings import LocalTraining
from fedbayes.inference.solve import batches, solve
from fedbayes.models import MLP, Network
from fedbayes.runs.build import build_data, build_runtime
from tests.helpers.places import run_of


@pytest.fixture
def samples():
    torch.manual_seed(3)
    return Samples(torch.randn(50, 6), torch.randint(0, 3, (50,)))


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def same(purpose):
    """The same generator for every purpose."""
    return rng()


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.01, amsgrad=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.05, weight_decay=0.01),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_loop_is_the_plain_pytorch_loop(samples, optimizer):
    module = MLP(6, [4], 3)
    network = Network(module)
    settings = LocalTraining(
        optimizer=optimizer,
        momentum=0.9 if optimizer == "sgd" else 0.0,
        weight_decay=0.01,
        epochs=3,
        batch_size=16,
    )
    solved = solve(
        Problem(network.initial), nll(run_of(network)), samples, settings, lr=0.05, rng=same
    )
    found = solved.parameters

    plain = MLP(6, [4], 3)
    plain.load_state_dict(network.initial)
    own = OPTIMIZERS[optimizer](plain.parameters())
    order_rng, losses = rng(), []
    for _ in range(3):
        order = torch.randperm(50, generator=order_rng)
        for start in range(0, 50, 16):
            rows = order[start : start + 16]
            own.zero_grad()
            loss = functional.cross_entropy(plain(samples.x[rows]), samples.y[rows])
            loss.backward()
            own.step()
            losses.append(loss.item())
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)
    assert solved.loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert (solved.steps, solved.count) == (len(losses), 50)


def test_least_squares_reaches_the_closed_form():
    torch.manual_seed(0)
    x, w = torch.randn(200, 4), torch.randn(4)
    target = x @ w
    samples = Samples(torch.cat([x, target[:, None]], dim=1), torch.zeros(200, dtype=torch.int64))

    def loss(parameters, batch, given, noise):
        return (batch.x[:, :4] @ parameters["w"] - batch.x[:, 4]).square().mean()

    settings = LocalTraining(epochs=200, batch_size=20)
    solved = solve(Problem({"w": torch.zeros(4)}), loss, samples, settings, lr=0.05, rng=same)
    torch.testing.assert_close(solved.parameters["w"], w, rtol=1e-4, atol=1e-4)


def test_the_start_is_left_alone_and_buffers_have_no_gradients(samples):
    network = Network(MLP(6, [4], 3))
    before = {name: tensor.clone() for name, tensor in network.initial.items()}
    found = solve(
        Problem(network.initial),
        nll(run_of(network)),
        samples,
        LocalTraining(),
        lr=0.1,
        rng=same,
        buffers=frozenset({"1.bias"}),
    ).parameters
    for name, tensor in before.items():
        assert torch.equal(network.initial[name], tensor)
        assert not found[name].requires_grad
    assert torch.equal(found["1.bias"], before["1.bias"])
    assert not torch.equal(found["1.weight"], before["1.weight"])


def test_gradients_of_one_step_are_gone_before_those_of_the_next(samples):
    seen = []

    def loss(parameters, batch, given, noise):
        seen.append(parameters["w"].grad)
        return (batch.x @ parameters["w"]).square().mean()

    settings = LocalTraining(batch_size=10, epochs=2)
    solve(Problem({"w": torch.ones(6)}), loss, samples, settings, lr=0.01, rng=same)
    assert seen == [None] * 10


def test_running_statistics_move_without_gradients(samples):
    network = Network(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))
    found = solve(
        Problem(network.initial),
        nll(run_of(network)),
        samples,
        LocalTraining(batch_size=25),
        lr=0.1,
        rng=same,
        buffers=network.buffers,
    ).parameters
    assert not torch.equal(found["1.running_mean"], network.initial["1.running_mean"])
    assert int(found["1.num_batches_tracked"]) == 2


def test_an_epoch_sees_every_sample_once(samples):
    sizes = LocalTraining(batch_size=16).batch_sizes(len(samples.y))
    seen = torch.cat([batch.x for batch in batches(samples, sizes, 4, rng())])
    assert torch.equal(seen.sort(dim=0).values, samples.x.sort(dim=0).values)
    found = [len(batch.y) for batch in batches(samples, sizes, 6, rng())]
    assert found == [16, 16, 16, 2, 16, 16]


def test_steps_take_the_place_of_epochs():
    assert LocalTraining(epochs=3, batch_size=16).step_count(50) == 12
    assert LocalTraining(epochs=3, steps=5).step_count(50) == 5


def test_schedules():
    rate = LocalTraining(lr=0.4, schedule="exponential", decay=0.5).learning_rate
    assert [rate(r, 10) for r in (1, 2, 3)] == pytest.approx([0.4, 0.2, 0.1])
    rate = LocalTraining(lr=0.4, schedule="step", decay=0.5, decay_every=2).learning_rate
    assert [rate(r, 10) for r in (1, 2, 3, 4, 5)] == pytest.approx([0.4, 0.4, 0.2, 0.2, 0.1])
    rate = LocalTraining(lr=0.4, schedule="cosine").learning_rate
    expected = [0.4 * (1 + math.cos(math.pi * t / 10)) / 2 for t in range(10)]
    assert [rate(r, 10) for r in range(1, 11)] == pytest.approx(expected)
    assert LocalTraining(lr=0.4).learning_rate(7, 10) == 0.4


def test_settings_that_make_no_sense():
    with pytest.raises(ValidationError, match="momentum works only with"):
        LocalTraining(optimizer="adam", momentum=0.5)
    with pytest.raises(ValidationError):
        LocalTraining(lr=0)


@pytest.mark.parametrize(
    "build",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.9, 0.99), eps=1e-3),
        lambda p: torch.optim.Adamax(p, lr=0.1),
        lambda p: OptimizerMoments(p, lr=0.1),
    ],
    ids=["sgd", "momentum", "adam", "adamax", "yogi"],
)
def test_pure_steps_are_the_optimizers_steps(build):
    torch.manual_seed(1)
    weights = {"a": torch.randn(3, 2), "b": torch.randn(4)}
    leaves = [t.clone() for t in weights.values()]
    optimizer, state = build(leaves), {}
    for _ in range(5):
        gradients = {name: torch.randn_like(t) for name, t in weights.items()}
        for leaf, gradient in zip(leaves, gradients.values(), strict=True):
            leaf.grad = gradient.clone()
        optimizer.step()
        weights, state = step(build, weights, gradients, state)
        for leaf, tensor in zip(leaves, weights.values(), strict=True):
            assert torch.equal(leaf, tensor)


def test_yogi_by_its_formula_in_plain_numbers():
    theta, m, v = 1.5, 0.0, 1e-6
    leaf = torch.tensor([theta], dtype=torch.float64)
    optimizer = OptimizerMoments([leaf], lr=0.1, betas=(0.9, 0.99), eps=1e-3)
    for g in (0.3, -1.2, 0.05, 2.0):
        leaf.grad = torch.tensor([g], dtype=torch.float64)
        optimizer.step()
        m = 0.9 * m + 0.1 * g
        v = v - 0.01 * math.copysign(1, v - g * g) * g * g
        theta = theta - 0.1 * m / (math.sqrt(v) + 1e-3)
        assert leaf.item() == pytest.approx(theta, rel=1e-12)


def scalar_loss(parameters, batch, given, noise):
    return ((parameters["w"] - batch.x) ** 2).mean()


def test_patience_ends_training_on_a_plateau():
    data = Samples(torch.zeros(10, 1), torch.zeros(10, dtype=torch.int64))
    settings = LocalTraining(epochs=50, batch_size=4, patience=3)
    # At the minimum nothing improves after the first epoch.
    start = Problem({"w": torch.zeros(1)})
    solved = solve(start, scalar_loss, data, settings, lr=0.1, rng=same)
    assert solved.steps == 4 * 3
    # While every epoch improves, all are done.
    start = Problem({"w": torch.full((1,), 8.0)})
    slow = LocalTraining(epochs=7, batch_size=4, patience=1)
    solved = solve(start, scalar_loss, data, slow, lr=0.01, rng=same)
    assert solved.steps == 7 * 3
    demanding = LocalTraining(epochs=7, batch_size=4, patience=1, min_improvement=100.0)
    solved = solve(start, scalar_loss, data, demanding, lr=0.01, rng=same)
    assert solved.steps == 2 * 3


def test_patience_returns_what_was_best_on_samples_held_out():
    """From 0 towards 1, while the samples held out lie at 0.5."""
    data = Samples(torch.ones(8, 1), torch.zeros(8, dtype=torch.int64))
    held_out = Samples(torch.full((6, 1), 0.5), torch.zeros(6, dtype=torch.int64))
    settings = LocalTraining(epochs=100, batch_size=8, patience=5, validation=0.4)
    solved = solve(
        Problem({"w": torch.zeros(1)}),
        scalar_loss,
        data,
        settings,
        lr=0.02,
        rng=same,
        held_out=held_out,
    )
    path = [1 - 0.96**step for step in range(1, 101)]
    best = min(range(100), key=lambda step: abs(path[step] - 0.5))
    assert solved.steps == best + 1
    assert float(solved.parameters["w"]) == pytest.approx(path[best], abs=1e-5)


def test_what_is_held_out_counts_by_samples_and_not_by_batches():
    """Seven samples in pieces of 3, 3 and 1: the last one's loss weighs a seventh.

    The weight is 0 after the first epoch and 1 after the second. The mean over samples falls from
    6/7 to 1/7, that over pieces only from 2/3 to 1/3: with 0.5 for an improvement they decide
    differently.
    """
    data = Samples(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))
    held_out = Samples(
        torch.tensor([1.0, 1, 1, 1, 1, 1, 0])[:, None], torch.zeros(7, dtype=torch.int64)
    )

    def pull(parameters, batch, given, noise):
        return -parameters["w"].sum()

    def watched(parameters, batch, given, noise):
        return (batch.x[:, 0] != parameters["w"]).float().mean()

    settings = LocalTraining(
        epochs=2, batch_size=3, patience=1, validation=0.4, min_improvement=0.5
    )
    solved = solve(
        Problem({"w": torch.full((1,), -1.0)}),
        pull,
        data,
        settings,
        lr=1.0,
        rng=same,
        held_out=held_out,
        validation=watched,
    )
    assert solved.steps == 2
    assert float(solved.parameters["w"]) == 1.0


@pytest.mark.parametrize(
    "settings", [{"patience": 2, "steps": 10}, {"validation": 0.2}, {"patience": 0}]
)
def test_patience_that_makes_no_sense(settings):
    with pytest.raises(ValidationError):
        LocalTraining(**settings)


def test_samples_are_set_aside_once_and_for_all(tmp_path):
    config = Config.create(
        data={"name": "digits", "clients": 5, "partition": "iid"},
        training={"patience": 2, "validation": 0.25, "epochs": 4},
        rounds=2,
    )
    runtime = build_runtime(config, build_data(config))
    samples = runtime.data.train(3)
    kept, watched = runtime._set_aside(samples, 3)
    assert len(watched.y) == round(0.25 * len(samples.y))
    both = torch.cat([kept.x, watched.x]).flatten(1)
    order = np.lexsort(both.T.numpy())
    expected = samples.x.flatten(1)
    assert torch.equal(both[order], expected[np.lexsort(expected.T.numpy())])
    again, _ = runtime._set_aside(samples, 3)
    assert torch.equal(kept.x, again.x)
    one = Samples(samples.x[:1], samples.y[:1])
    assert runtime._set_aside(one, 3)[1] is None
    run = fedbayes.run(config, tmp_path / "run")
    assert run.metrics[0]["reported"]["steps"] <= 4 * 8


@given(
    st.lists(st.booleans(), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.9]),
    st.sampled_from([0.0, 0.01]),
    st.integers(0, 99),
)
def test_lean_sgd_takes_the_steps_of_pytorchs(missing, momentum, decay, seed):
    """Bit for bit, whichever leaves have gradients in a step."""
    torch.manual_seed(seed)
    ours = [torch.randn(3, 2) for _ in missing]
    theirs = [leaf.clone() for leaf in ours]
    lean = Sgd(ours, 0.05, momentum, decay)
    whole = torch.optim.SGD(theirs, lr=0.05, momentum=momentum, weight_decay=decay)
    for number in range(3):
        for one, other, absent in zip(ours, theirs, missing, strict=True):
            one.grad = None if absent and number != 1 else torch.randn(3, 2)
            other.grad = one.grad
        lean.step()
        whole.step()
    assert all(one.equal(other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_adam_in_one_pass_takes_the_steps_of_pytorchs_whatever_the_layout(amsgrad, kind):
    """Gradients lie in memory as their leaves do, transposed, or channels last; one is absent."""
    torch.manual_seed(0)
    last = torch.channels_last
    ours = [torch.randn(5, 7, dtype=kind), torch.randn(4, 3, 3, 3, dtype=kind)]
    ours += [ours[1].clone(memory_format=last), torch.tensor(0.5, dtype=kind)]
    theirs = [leaf.clone() for leaf in ours]
    fused = Adam(ours, 0.05, 0.01, amsgrad)
    plain = torch.optim.Adam(theirs, lr=0.05, weight_decay=0.01, amsgrad=amsgrad, foreach=False)
    assert fused.defaults["fused"]
    for number in range(5):
        for one, other in zip(ours, theirs, strict=True):
            gradient = torch.randn_like(one) * 10.0**number
            one.grad = other.grad = gradient
        ours[0].grad = ours[0].grad.T.contiguous().T
        ours[1].grad = ours[1].grad.contiguous(memory_format=last)
        ours[2].grad = ours[2].grad.contiguous()
        if number == 2:
            ours[3].grad = theirs[3].grad = None
        fused.step()
        plain.step()
    close = {torch.float32: 1e-5, torch.float64: 1e-12}[kind]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=close, atol=close)
