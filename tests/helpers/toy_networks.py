"""Networks of people who know PyTorch less well, or very well; and rows for them."""

import random
from math import prod

import numpy as np
import torch
from torch import nn

ROWS = (40, 33, 37)


def rows(sizes=ROWS, test=10, features=6):
    """Three clients' rows of three classes; training and test part are given."""
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(3, features)) * 2
    found = {}
    for number, size in enumerate(sizes):
        y = rng.integers(0, 3, size + test)
        x = (centers[y] + rng.normal(size=(size + test, features))).astype("float32")
        found[f"site {number}"] = {"train": (x[:size], y[:size]), "test": (x[size:], y[size:])}
    return found


class Head(nn.Module):
    """A last layer behind something that a test puts there."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.fc = nn.Linear(inputs, outputs)

    def features(self, x):
        return x

    def forward(self, x):
        return self.fc(self.features(x.flatten(1)))


class InList(Head):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.layers = [nn.Linear(inputs, inputs)]

    def features(self, x):
        return self.layers[0](x)


class InDict(Head):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.layers = {"first": nn.Linear(inputs, inputs)}

    def features(self, x):
        return self.layers["first"](x)


class InNested(Head):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.blocks = [([nn.Linear(inputs, inputs)], {"a": (nn.Linear(inputs, inputs),)})]

    def features(self, x):
        return self.blocks[0][1]["a"][0](self.blocks[0][0][0](x))


class _Holder:
    def __init__(self, tensor):
        self.tensor = tensor


class InObject(Head):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.holder = _Holder(torch.randn(inputs, inputs))

    def features(self, x):
        return x @ self.holder.tensor


class _Projection(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.matrix = torch.randn(inputs, inputs)

    def forward(self, x):
        return x @ self.matrix


class InSubmodule(Head):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.body = nn.Sequential(_Projection(inputs), nn.ReLU())

    def features(self, x):
        return self.body(x)


class NotPersistent(Head):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.register_buffer("matrix", torch.randn(inputs, inputs), persistent=False)

    def features(self, x):
        return x @ self.matrix


class Unseeded(Head):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.matrix = np.random.default_rng().normal(size=(inputs, inputs)).astype("float32")

    def features(self, x):
        return x @ torch.from_numpy(self.matrix)


class Late(Head):
    """Makes a tensor when it is called for the first time."""

    def features(self, x):
        if not hasattr(self, "matrix"):
            self.matrix = torch.randn(x.shape[1], x.shape[1])
        return x @ self.matrix


class Scaled(Head):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.scale = random.random()

    def features(self, x):
        return x * self.scale


class Remembers(Head):
    """Keeps a running mean as a plain attribute."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.center = torch.zeros(inputs)

    def features(self, x):
        if self.training:
            self.center = 0.9 * self.center + 0.1 * x.detach().mean(0)
        return x - self.center


class OwnGenerator(Head):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.rng = torch.Generator().manual_seed(0)

    def features(self, x):
        return x + torch.randn(x.shape, generator=self.rng) if self.training else x


_ANYWHERE = []


class Global(Head):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.number = len(_ANYWHERE)
        _ANYWHERE.append(torch.randn(inputs, inputs))

    def features(self, x):
        return x @ _ANYWHERE[self.number]


class Closure(Head):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        matrix = torch.randn(inputs, inputs)
        self.turn = lambda x: x @ matrix

    def features(self, x):
        return self.turn(x)


class Untrained(Head):
    """The same numbers in every build, but they were to be trained."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.scales = [torch.ones(inputs, requires_grad=True)]

    def features(self, x):
        return x * self.scales[0]


class Fine(Head):
    """Attributes and buffers that follow from the code, and lists of what is registered."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.body = nn.Linear(inputs, inputs)
        self.order = [self.body, self.fc]
        self.window = torch.linspace(0, 1, inputs)
        self.calls = 0
        self.register_buffer("ones", torch.ones(inputs), persistent=False)

    def features(self, x):
        self.calls += 1
        return self.order[0](x) * self.window * self.ones


class WithBuffers(Head):
    """What transformers and others keep beside their weights; none of it changes."""

    def __init__(self, inputs, outputs, persistent=True):
        super().__init__(inputs, outputs)
        full = torch.full((inputs, inputs), float("-inf"))
        tensors = {
            "causal": torch.ones(inputs, inputs, dtype=torch.bool).tril(),
            "added": full.triu(1),
            "turns": torch.polar(torch.ones(inputs), torch.arange(inputs) * 0.1),
            "index": torch.arange(inputs),
            "places": torch.linspace(0, 1, inputs),
        }
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=persistent)

    def features(self, x):
        spread = torch.softmax(self.added + self.causal, -1)
        return (x[:, self.index] * self.turns).real @ spread.T + self.places


class Flagged(Head):
    """A flag that says whether scales were found in the first batch; and a counter."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.register_buffer("started", torch.tensor(False))
        self.register_buffer("center", torch.zeros(inputs))
        self.register_buffer("calls", torch.tensor(0))

    def features(self, x):
        if self.training:
            self.started.fill_(True)
            self.calls += 1
            self.center.copy_(x.detach().mean(0))
        return x - self.center


class ComplexWeights(Head):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.spectrum = nn.Parameter(torch.ones(inputs, dtype=torch.complex64))

    def features(self, x):
        return torch.fft.ifft(torch.fft.fft(x) * self.spectrum).real


class ComplexState(Head):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.register_buffer("mean", torch.zeros(inputs, dtype=torch.complex64))

    def features(self, x):
        if self.training:
            self.mean.copy_(torch.fft.fft(x.detach()).mean(0))
        return x


class Extremes(Head):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.register_buffer("largest", torch.full((inputs,), float("-inf")))

    def features(self, x):
        if self.training:
            self.largest.copy_(torch.maximum(self.largest, x.detach().amax(0)))
        return x


class Sometimes(Head):
    """Writes to a buffer for some batches alone."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.register_buffer("seen", torch.zeros(inputs))

    def features(self, x):
        if self.training and len(x) == 7:
            self.seen += 1
        return x


class Fails(Head):
    """Raises an error for training batches of seven."""

    def features(self, x):
        if self.training and len(x) == 7:
            raise KeyError("seven")
        return x


class InPlace(Head):
    """Has no gradient for training batches of seven."""

    def features(self, x):
        scale = self.fc.weight.mean().exp()
        scaled = x * scale
        if self.training and len(x) == 7:
            scale += 1
        return scaled


class Squeezed(Head):
    def forward(self, x):
        return super().forward(x).squeeze()


class SqueezedWithin(Head):
    def features(self, x):
        return x[:, :, None].squeeze()


class NeedsTwo(Head):
    """Takes no sample alone."""

    def features(self, x):
        if len(x) == 1:
            raise ValueError("two at least")
        return x


class Normalized(Head):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.norm = nn.BatchNorm1d(inputs)

    def features(self, x):
        return self.norm(x)


class NormalizedMaps(Head):
    """A convolution whose maps are of one pixel."""

    def __init__(self, inputs, outputs):
        super().__init__(4, outputs)
        self.conv, self.norm = nn.Conv2d(1, 4, (1, inputs)), nn.BatchNorm2d(4)

    def features(self, x):
        return self.norm(self.conv(x[:, None, None])).flatten(1)


class Instances(Head):
    """Normalized over one sample's pixels, so that one sample is enough."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.norm = nn.InstanceNorm1d(1, affine=True, track_running_stats=True)

    def features(self, x):
        return self.norm(x[:, None]).flatten(1)


class Noisy(Head):
    def features(self, x):
        return nn.functional.dropout(x, 0.3)


class Softmaxed(Head):
    def forward(self, x):
        return torch.softmax(super().forward(x), 1)


class Lazy(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.fc = nn.LazyLinear(outputs)

    def forward(self, x):
        return self.fc(x.flatten(1))


def _factory(kind):
    def build(shape, outputs, **arguments):
        return kind(prod(shape), outputs, **arguments)

    return build


def doubled(shape, outputs):
    return Head(prod(shape), outputs).double()


def faint(shape, outputs):
    """A head whose outputs are near 0.5, as those of a sigmoid are."""
    network = Head(prod(shape), outputs)
    nn.init.normal_(network.fc.weight, std=1e-4)
    nn.init.constant_(network.fc.bias, 0.5)
    return network


def halved(shape, outputs):
    return Head(prod(shape), outputs).bfloat16()


def other_each_time(shape, outputs):
    width = random.randint(1, 10**9) % 7 + 2
    return nn.Sequential(nn.Linear(prod(shape), width), nn.Linear(width, outputs))


def by_numpy(shape, outputs):
    """Weights drawn from the global generators of NumPy and Python."""
    module = Head(prod(shape), outputs)
    with torch.no_grad():
        module.fc.weight.copy_(torch.tensor(np.random.normal(size=module.fc.weight.shape)))  # noqa: NPY002
        module.fc.bias.fill_(random.random())
    return module


for _kind in list(vars().values()):
    if isinstance(_kind, type) and issubclass(_kind, nn.Module) and _kind.__name__[0] != "_":
        globals()[f"make_{_kind.__name__}"] = _factory(_kind)
