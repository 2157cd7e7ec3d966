"""A dozen networks and more, of all the kinds whose units are traced, and some to be refused."""

import importlib
import math
import sys
import types

import torch
from torch import nn
from torch.nn import functional

from fedbayes.models.networks import CNN, MLP, LeNet5, ResNet20


def torchvision_models():
    """The models of torchvision.

    A torchvision for GPUs beside a PyTorch without them has no operators of its own, which its
    import wants to describe; none of the models here uses any.
    """
    name = "torchvision._meta_registrations"
    before = sys.modules.get(name)
    sys.modules.setdefault(name, types.ModuleType(name))
    try:
        return importlib.import_module("torchvision.models")
    finally:
        if before is None:
            sys.modules.pop(name, None)


class Convolutions(nn.Sequential):
    """Batch normalization, and a transition to dense layers over pixels."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 5, 3),
            nn.BatchNorm2d(5),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(5 * 36, 9),
            nn.BatchNorm1d(9),
            nn.Tanh(),
            nn.Linear(9, 4),
        )


class Vgg(nn.Sequential):
    """Strides in place of pools, and pooling over everything at the end."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 6, 3, 2),
            nn.LeakyReLU(0.1),
            nn.Conv2d(6, 8, 3, 2),
            nn.GELU(),
            nn.Conv2d(8, 8, 1),
            nn.ELU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(8, 4),
        )


class Slopes(nn.Sequential):
    """Slopes that are learnt, one for each channel."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 6, 3, 2),
            nn.PReLU(6),
            nn.Conv2d(6, 8, 3, 2, groups=2),
            nn.PReLU(8),
            nn.Flatten(),
            nn.Linear(8 * 9, 7),
            nn.PReLU(7),
            nn.Linear(7, 4),
        )


class Text(nn.Module):
    """Embedding and convolutions over a sequence."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.conv1, self.conv2 = nn.Conv1d(6, 7, 3, padding=1), nn.Conv1d(7, 5, 3)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        x = functional.relu(self.conv1(self.embedding(x).transpose(1, 2)))
        return self.head(functional.relu(self.conv2(x)).amax(dim=2))


class Transformer(nn.Module):
    """PyTorch's own encoder with positions that are learnt."""

    def __init__(self, norm_first):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.positions = nn.Parameter(torch.randn(1, 5, 8))
        layer = nn.TransformerEncoderLayer(
            8, 4, 12, dropout=0.1, batch_first=True, norm_first=norm_first, activation="gelu"
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.norm(self.encoder(self.embedding(x) + self.positions)).mean(dim=1))


class Attention(nn.Module):
    """Attention written out, with a causal mask, as small language models have it."""

    def __init__(self, width=8, heads=2):
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(11, width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.norm = nn.RMSNorm(width)
        self.gate, self.up, self.down = nn.Linear(8, 10), nn.Linear(8, 10), nn.Linear(10, 8)
        self.head = nn.Linear(width, 3)
        self.register_buffer("mask", torch.ones(5, 5).tril().bool())

    def forward(self, x):
        x = self.embedding(x)
        n, t, c = x.shape
        size = c // self.heads
        normed = self.norm(x)
        q, k, v = (
            part(normed).view(n, t, self.heads, -1).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(size)
        scores = scores.masked_fill(~self.mask, float("-inf")).softmax(dim=-1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(n, t, -1))
        x = x + self.down(functional.silu(self.gate(x)) * self.up(x))
        return self.head(x[:, -1])


class Mixer(nn.Module):
    """Layers across tokens, channel by channel, and across channels, with one norm for both."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Conv2d(3, 6, 8, 8), nn.LayerNorm(6)
        self.token, self.back = nn.Linear(4, 5), nn.Linear(5, 4)
        self.up, self.down, self.head = nn.Linear(6, 9), nn.Linear(9, 6), nn.Linear(6, 4)

    def forward(self, x):
        x = self.embed(x).flatten(2)
        mixed = self.token(self.norm(x.transpose(1, 2)).transpose(1, 2))
        x = (x + self.back(functional.gelu(mixed))).transpose(1, 2)
        x = x + self.down(functional.gelu(self.up(self.norm(x))))
        return self.head(x.mean(dim=1))


class CrossAttention(nn.Module):
    """Attention to what has another width, whose layers share one tensor of biases."""

    def __init__(self):
        super().__init__()
        self.embedding, self.memory = nn.Embedding(11, 8), nn.Embedding(11, 6)
        self.attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=6, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        memory = self.memory(x)
        found, _ = self.attention(self.embedding(x), memory, memory, need_weights=False)
        return self.head(found.mean(dim=1))


class UNet(nn.Module):
    """Down, up, and a skip that is concatenated, with a normalization over both."""

    def __init__(self):
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, 2, 1)
        self.up = nn.ConvTranspose2d(6, 5, 2, 2)
        self.norm = nn.BatchNorm2d(9)
        self.last, self.head = nn.Conv2d(9, 6, 3, padding=1), nn.Linear(6, 4)

    def forward(self, x):
        one = functional.relu(self.first(x))
        two = functional.relu(self.down(one))
        joined = functional.relu(self.norm(torch.cat([one, self.up(two)], dim=1)))
        return self.head(functional.relu(self.last(joined)).mean(dim=(2, 3)))


class SqueezeExcite(nn.Module):
    """Channels multiplied by what a bottleneck makes of their means."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.squeeze, self.excite = nn.Conv2d(8, 3, 1), nn.Conv2d(3, 8, 1)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = functional.relu(self.norm(self.stem(x)))
        scale = functional.adaptive_avg_pool2d(x, 1)
        scale = torch.sigmoid(self.excite(functional.relu(self.squeeze(scale))))
        return self.head((x * scale).mean(dim=(2, 3)))


class Shared(nn.Module):
    """One layer used twice, between two that are used once."""

    def __init__(self):
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(6, 7), nn.Linear(7, 7), nn.Linear(7, 3)

    def forward(self, x):
        x = self.twice(torch.relu(self.first(x)))
        return self.last(torch.relu(self.twice(torch.relu(x))))


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self):
        super().__init__()
        self.first, self.one, self.two = nn.Linear(6, 7), nn.Linear(7, 7), nn.Linear(7, 7)
        self.last = nn.Linear(7, 3)
        self.two.weight = self.one.weight

    def forward(self, x):
        x = self.one(torch.relu(self.first(x)))
        return self.last(torch.relu(self.two(torch.relu(x))))


class Parallel(nn.Module):
    """Two heads over one body, added."""

    def __init__(self):
        super().__init__()
        self.head, self.body = nn.Linear(8, 4), nn.Linear(6, 8)  # outputs are registered first
        self.side, self.other = nn.Linear(8, 5), nn.Linear(5, 4, bias=False)

    def forward(self, x):
        x = functional.relu(self.body(x))
        return self.head(x) + self.other(functional.hardswish(self.side(x)))


class Depthwise(nn.Module):
    """Filters of single channels, two for each, and a group normalization after a stream."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.deep = nn.Conv2d(8, 16, 3, padding=1, groups=8)
        self.point, self.head = nn.Conv2d(16, 8, 1), nn.Linear(8, 4)

    def forward(self, x):
        x = self.norm(self.stem(x))
        x = x + self.point(functional.relu(self.deep(functional.relu(x))))
        return self.head(x.flatten(2).mean(dim=2))


class Shuffle(nn.Module):
    """Channels in halves, one of them treated and both shuffled together, as in ShuffleNet."""

    def __init__(self):
        super().__init__()
        self.stem, self.part = nn.Conv2d(3, 8, 3), nn.Conv2d(4, 4, 1)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        one, two = functional.relu(self.stem(x)).chunk(2, dim=1)
        x = torch.cat([one, functional.relu(self.part(two))], dim=1)
        n, c, h, w = x.shape
        x = x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
        return self.head(x.mean(dim=(2, 3)))


class Separable(nn.Sequential):
    """Depthwise filters with strides, then points, as in MobileNet."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 8, 3, 2, 1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU6(),
            nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU6(),
            nn.Conv2d(8, 10, 1, bias=False),
            nn.BatchNorm2d(10),
            nn.ReLU6(),
            nn.Conv2d(10, 10, 3, 2, 1, groups=10),
            nn.ReLU6(),
            nn.Conv2d(10, 12, 1),
            nn.ReLU6(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(12, 4),
        )


class Decoder(nn.Module):
    """Transposed convolutions: in groups, of single channels, and of all."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.groups = nn.ConvTranspose2d(8, 12, 3, 2, 1, output_padding=1, groups=4)
        self.deep = nn.ConvTranspose2d(12, 24, 2, groups=12)
        self.all, self.head = nn.ConvTranspose2d(24, 6, 3, 2, 1, dilation=2), nn.Linear(6, 4)

    def forward(self, x):
        for layer in (self.stem, self.groups, self.deep, self.all):
            x = functional.leaky_relu(layer(x))
        return self.head(x.mean(dim=(2, 3)))


class ChannelShuffle(nn.Module):
    """Points in groups whose channels are shuffled between, as in ShuffleNet."""

    def __init__(self):
        super().__init__()
        self.stem, self.one = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 1, groups=2)
        self.deep = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.two, self.head = nn.Conv2d(16, 8, 1, groups=2), nn.Linear(8, 4)

    def forward(self, x):
        x = functional.relu(self.stem(x))
        y = functional.relu(self.one(x))
        n, c, h, w = y.shape
        y = y.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
        return self.head(functional.relu(x + self.two(self.deep(y))).mean(dim=(2, 3)))


class Grouped(nn.Module):
    """Filters in groups, between layers of all channels."""

    def __init__(self):
        super().__init__()
        self.stem, self.groups = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=2)
        self.after, self.head = nn.Conv2d(8, 6, 1), nn.Linear(6, 4)

    def forward(self, x):
        x = functional.relu(self.groups(functional.relu(self.stem(x))))
        return self.head(functional.relu(self.after(x)).mean(dim=(2, 3)))


class Recurrent(nn.Module):
    """An LSTM between an embedding and dense layers."""

    def __init__(self):
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(11, 6), nn.LSTM(6, 5, batch_first=True)
        self.dense, self.head = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x):
        x, _ = self.lstm(self.embedding(x))
        return self.head(torch.relu(self.dense(x[:, -1])))


class Odd(nn.Module):
    """A body whose units pass through a function that somebody wrote."""

    def __init__(self, function, width=8, after=8):
        super().__init__()
        self.one, self.two, self.function = nn.Linear(6, width), nn.Linear(after, 4), function
        self.side = nn.Linear(6, 5)
        self.last = nn.Linear(5, 4)
        self.scale = nn.Parameter(torch.rand(width) + 0.5)
        self.register_buffer("place", torch.arange(float(width)), persistent=False)

    def forward(self, x):
        hidden = self.function(self, torch.relu(self.one(x)))
        return self.two(hidden) + self.last(torch.relu(self.side(x)))


def _swapped(module, x):
    """The two entries of the first pair change places, those of the others do not."""
    pairs = x.view(-1, 4, 2)
    y = torch.cat([x[:, 1:2], x[:, :1], x[:, 2:]], dim=1)
    return y * pairs.sum(dim=2).repeat_interleave(2, dim=1)


def _shuffled(module, x):
    """Every unit is added to another one, in a circle of three or by itself."""
    return x + 2 * x.view(-1, 2, 4).transpose(1, 2).reshape(-1, 8)


def _in_place(module, x):
    y = x.view(-1, 2, 4)
    x += 1.0
    return y.flatten(1)


def _branch(module, x):
    return x if x.sum() > 0 else -x


ODD = {
    "sigmoid": lambda m, x: torch.sigmoid(x),
    "roll": lambda m, x: x.roll(1, dims=1),
    "flip added": lambda m, x: x + x.flip(1),
    "sort": lambda m, x: x.sort(dim=1).values,
    "cumulative": lambda m, x: x.cumsum(dim=1),
    "positions": lambda m, x: x * m.place,
    "scaled": lambda m, x: x * m.scale,
    "scale and half": lambda m, x: x * m.scale + 0.5,
    "one slope": lambda m, x: functional.prelu(x - 0.5, torch.tensor([0.2])),
    "halves": lambda m, x: torch.cat([x[:, :4].tanh(), x[:, 4:].relu()], dim=1),
    "halves added": lambda m, x: torch.cat([x[:, :4] + x[:, 4:], x[:, 4:]], dim=1),
    "shifted": lambda m, x: functional.pad(x[:, 1:] + x[:, :-1], (0, 1)),
    "padded": lambda m, x: functional.pad(x[:, :6], (1, 1)),
    "normalized": lambda m, x: functional.layer_norm(x, (8,)),
    "softmax": lambda m, x: x.softmax(dim=1),
    "largest": lambda m, x: x / (1 + x.amax(dim=1, keepdim=True)),
    "first": lambda m, x: x * x[:, :1],
    "picked": lambda m, x: x * x[:, 0].unsqueeze(1),
    "gathered": lambda m, x: x[:, [1, 0, 2, 3, 4, 5, 6, 7]],
    "swapped": _swapped,
    "shuffled": _shuffled,
    "in place": _in_place,
    "branch": _branch,
    "transform": lambda m, x: torch.fft.rfft(x, dim=1).abs()[:, :4].repeat(1, 2),
    "square": lambda m, x: x @ (x.transpose(0, 1) @ x) / 10,
    "pairs": lambda m, x: torch.einsum("ni,nj->nij", x, x).sum(dim=2),
    "groups": lambda m, x: functional.conv1d(x[:, :, None], m.one.weight[:, :2, None], groups=4)[
        :, :, 0
    ],
}
"""Functions between layers, from [n, 8] to the same."""


def image(n=2, side=16):
    return torch.zeros(n, 3, side, side)


def flat(n=2):
    return torch.zeros(n, 6)


def words(n=2):
    return torch.zeros(n, 5, dtype=torch.int64)


ARCHITECTURES = {
    "mlp": (lambda: MLP(6, [9, 7], 4), flat),
    "lenet": (lambda: LeNet5(3, 16, 16, 4), image),
    "cnn": (lambda: CNN(3, 16, 16, 4), image),
    "batch norm": (Convolutions, image),
    "resnet20": (lambda: ResNet20(3, 4), image),
    "resnet18": (lambda: torchvision_models().resnet18(num_classes=4), lambda: image(side=32)),
    "mobilenet": (
        lambda: torchvision_models().mobilenet_v2(num_classes=4, width_mult=0.25),
        lambda: image(side=32),
    ),
    "vgg": (Vgg, image),
    "slopes": (Slopes, image),
    "text": (Text, words),
    "pre-norm transformer": (lambda: Transformer(True), words),
    "post-norm transformer": (lambda: Transformer(False), words),
    "attention": (Attention, words),
    "mixer": (Mixer, image),
    "cross attention": (CrossAttention, words),
    "u-net": (UNet, image),
    "squeeze and excite": (SqueezeExcite, image),
    "shared": (Shared, flat),
    "tied": (Tied, flat),
    "parallel": (Parallel, flat),
    "depthwise": (Depthwise, image),
    "shuffle": (Shuffle, image),
    "grouped": (Grouped, image),
    "separable": (Separable, image),
    "decoder": (Decoder, image),
    "channel shuffle": (ChannelShuffle, image),
    "recurrent": (Recurrent, words),
    **{
        f"odd: {name}": (lambda function=function: Odd(function), flat)
        for name, function in ODD.items()
    },
}
