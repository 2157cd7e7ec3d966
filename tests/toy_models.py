"""Networks of one's own, as a user would bring them."""

from math import prod

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
