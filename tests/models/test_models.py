import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import fedbayes
from fedbayes.errors import ModelError
from fedbayes.models import MLP, LeNet5, ModelSettings, Network, ResNet20, build, read_program
from fedbayes.models.layout import PORTION
from tests.helpers.architectures import ARCHITECTURES


def count(module):
    return sum(p.numel() for p in module.parameters())


def test_sizes_are_the_published_ones():
    assert count(MLP(784, [100], 10)) == 784 * 100 + 100 + 100 * 10 + 10
    assert count(LeNet5(1, 28, 28, 10)) == 431_080  # 20-50-500, as in Caffe's LeNet
    # He et al. 2016 give 0.27 M; weights of batch and group normalization are equally many.
    assert count(ResNet20(3, 10)) == 269_722


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (MLP(12, [5, 4], 3, dropout=0.2), (3, 4)),
        (LeNet5(3, 32, 32, 10), (3, 32, 32)),
        (ResNet20(3, 10), (3, 32, 32)),
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), (4,)),
    ],
    ids=["mlp", "lenet5", "resnet20", "batchnorm"],
)
def test_network_is_the_module_as_a_function(module, shape):
    torch.manual_seed(0)
    network = Network(module)
    weights = {
        n: 0.1 * torch.randn_like(t) if t.is_floating_point() else t
        for n, t in network.initial.items()
    }
    weights = {n: t.abs() if "var" in n else t for n, t in weights.items()}
    x = torch.randn(5, *shape)
    expected = functional_call(module.eval(), weights, (x,))
    torch.testing.assert_close(network(weights, x), expected, rtol=1e-5, atol=1e-5)


def test_shared_weights_are_one_tensor():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.second = self.first

        def forward(self, x):
            return self.second(self.first(x))

    network = Network(Tied())
    assert set(network.initial) == {"first.weight", "first.bias"}
    weights = {"first.weight": 2 * torch.eye(3), "first.bias": torch.zeros(3)}
    assert torch.equal(network(weights, torch.ones(1, 3)), 4 * torch.ones(1, 3))


def test_a_program_has_shared_weights_once(tmp_path):
    """`torch.export` gives a program a parameter for each of their names."""
    module, x = ARCHITECTURES["tied"][0](), torch.randn(4, 6)
    program, path = torch.export.export(module, (x,)), tmp_path / "m.pt2"
    torch.export.save(program, path)
    read, _ = read_program(path)
    assert {n: p.shape for n, p in read.named_parameters()} == {
        n: p.shape for n, p in module.named_parameters()
    }
    with torch.no_grad():
        for ours, theirs in zip(read.parameters(), module.parameters(), strict=True):
            ours.add_(1)
            theirs.add_(1)
        assert torch.equal(read(x), module(x))


def test_a_network_serves_models_of_other_widths():
    network, wide = Network(MLP(4, [3], 2)), MLP(4, [17], 2)
    x = torch.randn(6, 4)
    assert torch.equal(network(dict(wide.named_parameters()), x), wide(x))


def test_training_mode_reaches_the_layers():
    network = Network(nn.Sequential(nn.Dropout(0.5)))
    x = torch.ones(1000, 1)
    assert (network({}, x) == 1).all()
    assert (network({}, x, training=True) == 0).any()


def test_a_batch_of_one_sample_has_no_variance():
    network = Network(nn.BatchNorm1d(3))
    assert network(network.initial, torch.zeros(1, 3)).shape == (1, 3)
    with pytest.raises(ModelError, match=r"training batch of 1 sample.*training\.batch_size"):
        network(network.initial, torch.zeros(1, 3), training=True)


def test_bf16_rounds_and_returns_float32():
    torch.manual_seed(0)
    module = MLP(20, [30], 3)
    exact, half = Network(module), Network(module, precision="bf16")
    x = torch.randn(8, 20)
    a, b = exact(exact.initial, x), half(half.initial, x)
    assert b.dtype == torch.float32
    assert not torch.equal(a, b)
    torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


def test_initializations():
    def first(init, **more):
        settings = ModelSettings(name="mlp", hidden=(400,), init=init, **more)
        return build(settings, (784,), 10, seed=0).initial

    normal = first("normal")
    assert float(normal["1.weight"].var()) == pytest.approx(0.01, rel=0.02)
    assert (normal["1.bias"] == 0.1).all()
    kaiming = first("kaiming", init_bias=0.0)
    assert float(kaiming["1.weight"].var()) == pytest.approx(2 / 784, rel=0.02)
    assert (kaiming["1.bias"] == 0).all()
    xavier = first("xavier")
    assert float(xavier["1.weight"].var()) == pytest.approx(2 / (784 + 400), rel=0.02)
    assert not torch.equal(first("default")["1.weight"], xavier["1.weight"])


def test_the_seed_decides_and_clients_may_start_apart():
    settings = ModelSettings(hidden=(5,))
    same = [build(settings, (4,), 2, seed=1).initial["1.weight"] for _ in range(2)]
    assert torch.equal(*same)
    own = [build(settings, (4,), 2, seed=1, client=c).initial["1.weight"] for c in (0, 1)]
    assert not torch.equal(*own)
    assert not torch.equal(own[0], same[0])
    before = torch.get_rng_state()
    build(settings, (4,), 2, seed=1)
    assert torch.equal(before, torch.get_rng_state())


def factory(shape, classes, width=3):
    return MLP(shape[0], [width], classes)


def nonsense(shape, classes):
    return "a network"


def test_your_own_factory():
    settings = ModelSettings(name=f"{__name__}:factory", arguments={"width": 6})
    assert build(settings, (4,), 2, seed=0).initial["1.weight"].shape == (6, 4)


@pytest.mark.parametrize(
    ("settings", "shape", "words"),
    [
        ({"name": "lenet5"}, (64,), "4 by 4"),
        ({"name": "resnet20"}, (1, 8, 8), "16 by 16"),
        ({"name": "resnet20", "groups": 3}, (3, 32, 32), "divide 16"),
        ({"hidden": (0,)}, (4,), "at least 1"),
        ({"name": "no.such:thing"}, (4,), "cannot find"),
        ({"name": f"{__name__}:nonsense"}, (4,), "not a torch.nn.Module"),
        ({"name": f"{__name__}:factory", "arguments": {"depth": 1}}, (4,), "depth"),
    ],
)
def test_misfits_are_told(settings, shape, words):
    with pytest.raises(ModelError, match=words):
        build(ModelSettings(**settings), shape, 2, seed=0)


def test_a_wrong_number_of_outputs_is_told():
    settings = ModelSettings(name=f"{__name__}:fixed")
    with pytest.raises(
        ModelError, match=r"but the likelihood needs \(2, 2\) \(such as a logit per class"
    ):
        build(settings, (4,), 2, seed=0)


def fixed(shape, classes):
    return MLP(shape[0], [3], 7)


def test_a_call_leaves_the_module_as_it_was():
    """Also where it fails."""
    module = MLP(4, [3], 2)
    network, before = Network(module), dict(module.named_parameters())
    network({name: tensor + 1 for name, tensor in network.initial.items()}, torch.randn(5, 4))
    with pytest.raises(RuntimeError):
        network({name: tensor[:1] for name, tensor in network.initial.items()}, torch.randn(5, 4))
    after = dict(module.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)


class Views(nn.Module):
    """Says `view` behind a convolution, as many tutorials do."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 3, 3), nn.Linear(3 * 6 * 6, 4)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)).view(len(x), -1))


def test_a_view_behind_a_convolution_is_the_module():
    module, x = Views(), torch.randn(5, 2, 8, 8)
    with torch.no_grad():
        wanted = module(x)
    network = Network(module, shape=(2, 8, 8))
    weights = network.prepare(network.initial)
    torch.testing.assert_close(network(weights, x), wanted)
    assert [group.layer for group in network.groups] == ["first", "last"]


def test_images_can_be_mapped_over_networks():
    """Three networks at once on images of their own, and what a plain loop gives."""
    network = Network(LeNet5(1, 16, 16, 4))
    x = torch.randn(3, 5, 1, 16, 16)
    weights = {n: t + 0.1 * torch.randn(3, *t.shape) for n, t in network.initial.items()}
    mapped = torch.func.vmap(network)(weights, x)
    for row in range(3):
        own = network.prepare({name: tensor[row] for name, tensor in weights.items()})
        torch.testing.assert_close(mapped[row], network(own, x[row]), rtol=1e-4, atol=1e-5)


def test_the_client_whose_samples_leave_one_over_is_named():
    """Of 338, 337, 337 and 337 samples, batches of 337 leave one over."""
    with pytest.raises(ModelError, match="a batch of one sample"):
        fedbayes.run(
            data={"name": "digits", "clients": 4, "partition": "iid"},
            model={"name": "tests.helpers.toy_models:normalized"},
            calibration="none",
            training={"batch_size": 337},
            rounds=1,
        )


class Noted(TorchDispatchMode):
    """Notes something of the arguments of every call of an operation."""

    def __init__(self, operation, note):
        super().__init__()
        self.operation, self.note, self.found = operation, note, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is self.operation:
            self.found.append(self.note(*args))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("groups", "first"), [(1, 1), (3, 3)])
def test_filters_of_one_channel_count_as_channels_last(groups, first):
    """Whatever the strides of the weights, as PyTorch is slower with the others."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(first, 6, 3, groups=groups), nn.Flatten(), nn.Linear(216, 5))
    network = Network(module, shape=(first, 8, 8))
    x = torch.randn(4, first, 8, 8)
    weights = {name: tensor.contiguous() for name, tensor in network.initial.items()}
    weights["0.weight"] = weights["0.weight"].reshape(-1).view(6, 1, 3, 3)
    assert weights["0.weight"].stride() == (9, 9, 3, 1)
    convolution = torch.ops.aten.convolution.default
    with Noted(convolution, lambda x, filters, *others: filters.stride()) as seen:
        found = network(weights, x)
    assert seen.found == [(9, 1, 3, 1)]
    torch.testing.assert_close(found, module(x))


def test_pooling_goes_back_through_gradients_laid_out_as_its_images_are():
    """Before a layer that flattens too, with the gradients of the plain module, alone and mapped
    over samples; and the module is left as it was.
    """
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5)
    )
    x, y = torch.randn(6, 3, 8, 8), torch.randint(5, (6,))
    functional.cross_entropy(module(x), y).backward()
    network = Network(module, shape=(3, 8, 8))

    def loss(weights, x, y):
        return functional.cross_entropy(network(weights, x, training=True), y)

    weights = {name: tensor.clone() for name, tensor in network.initial.items()}
    leaves = {name: tensor.requires_grad_() for name, tensor in network.prepare(weights).items()}
    backward = torch.ops.aten.max_pool2d_with_indices_backward.default
    last = torch.channels_last
    with Noted(backward, lambda x, *others: x.is_contiguous(memory_format=last)) as seen:
        found = torch.autograd.grad(loss(leaves, x, y), list(leaves.values()))
    assert seen.found == [True]
    weights = {name: tensor.detach() for name, tensor in weights.items()}
    each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weights, x[:, None], y[:, None])
    for gradient, (name, parameter) in zip(found, module.named_parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)
        torch.testing.assert_close(each[name].mean(0), parameter.grad)
    assert not module[2]._forward_hooks


@pytest.mark.parametrize("module", [LeNet5(3, 20, 20, 4), ResNet20(3, 4)])
def test_many_images_are_predicted_in_portions(module):
    x, sizes = torch.randn(2 * PORTION + 3, 3, 20, 20), []
    network = Network(module)
    module[0].register_forward_hook(lambda layer, inputs, output: sizes.append(len(output)))
    with torch.no_grad():
        outputs = network(network.initial, x)
        expected = module.eval()(x)
    assert sizes == [PORTION, PORTION, 3, len(x)]
    assert torch.allclose(outputs, expected, atol=1e-5)


def test_training_sees_its_batch_at_once():
    x = torch.randn(PORTION + 1, 3, 20, 20)
    network = Network(nn.Sequential(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2), nn.Flatten()))
    with torch.no_grad():
        outputs = network(network.initial, x, training=True).unflatten(1, (2, -1))
    assert torch.allclose(outputs.mean((0, 2)), torch.zeros(2), atol=1e-5)
