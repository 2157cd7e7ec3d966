"""Networks of one's own, as a user would bring them."""

from math import prod

import torch
from torch import nn

from fedbayes.models.networks import ResidualBlock


def residual(shape, classes):
    """A little convolutional network with group normalization and one residual block."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)) if len(shape) == 1 else nn.Identity(),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        ResidualBlock(4, 8, 2, 2),
        nn.Conv2d(8, 6, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24, 10),
        nn.ReLU(),
        nn.Linear(10, classes),
    )


def normalized(shape, classes):
    """A layer with running statistics."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(prod(shape), 10),
        nn.BatchNorm1d(10),
        nn.ReLU(),
        nn.Linear(10, classes),
    )


def stack(shape, classes):
    """A little convolutional stack with dropout."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)) if len(shape) == 1 else nn.Identity(),
        nn.Conv2d(1, 3, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(48, classes),
    )


def pretrained(shape, classes):
    """A network whose first layer is frozen."""
    module = nn.Sequential(
        nn.Flatten(),
        nn.Linear(prod(shape), 40),
        nn.ReLU(),
        nn.Linear(40, 20),
        nn.ReLU(),
        nn.Linear(20, classes),
    )
    module[1].requires_grad_(False)
    return module


class HeadFirst(nn.Module):
    """A network whose outputs are registered first."""

    def __init__(self, inputs, classes):
        super().__init__()
        self.head, self.body = nn.Linear(12, classes), nn.Linear(inputs, 12)

    def forward(self, x):
        return self.head(torch.relu(self.body(x.flatten(1))))


def head_first(shape, classes):
    """A network whose outputs are registered first."""
    return HeadFirst(prod(shape), classes)


def sequence(shape, classes):
    """A convolution over a sequence."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Unflatten(1, (1, prod(shape))),
        nn.Conv1d(1, 4, 5),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * (prod(shape) - 4), classes),
    )


class Fixed(nn.Module):
    """A network whose code has a width in it."""

    def __init__(self, inputs, classes):
        super().__init__()
        self.body, self.hidden = nn.Linear(inputs, 12), nn.Linear(12, 8)
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        x = torch.relu(self.body(x.flatten(1))).view(-1, 12)
        return self.head(torch.relu(self.hidden(x)))


def fixed(shape, classes):
    """A network whose code has a width in it."""
    return Fixed(prod(shape), classes)


class Auxiliary(nn.Module):
    """A network that counts on a width in training alone."""

    def __init__(self, inputs, classes):
        super().__init__()
        self.body, self.head = nn.Linear(inputs, 12), nn.Linear(12, classes)
        self.side = nn.Linear(12, classes)

    def forward(self, x):
        x = torch.relu(self.body(x.flatten(1)))
        return self.head(x) + self.side(x) if self.training else self.head(x)


def auxiliary(shape, classes):
    """A network that counts on a width in training alone."""
    return Auxiliary(prod(shape), classes)


class Rolled(nn.Module):
    """A network whose units change places, which no trace follows."""

    def __init__(self, inputs, classes):
        super().__init__()
        self.body, self.head = nn.Linear(inputs, 12), nn.Linear(12, classes)

    def forward(self, x):
        return self.head(torch.relu(self.body(x.flatten(1))).roll(1, dims=1))


def rolled(shape, classes):
    """A network whose units change places."""
    return Rolled(prod(shape), classes)


def stone(shape, classes):
    """A network that nothing trains."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), classes)).requires_grad_(False)
