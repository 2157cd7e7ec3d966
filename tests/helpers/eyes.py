"""Networks of images for the command line, and photographs for them."""

import torch
from torch import nn
from torch.nn import functional


class Eyes(nn.Module):
    """A small network for images."""

    def __init__(self, shape, classes):
        super().__init__()
        self.see = nn.Conv2d(shape[0], 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.tell = nn.Linear(4 * 9, classes)

    def forward(self, x):
        x = functional.relu(self.norm(self.see(x)))
        return self.tell(functional.max_pool2d(x, 2).flatten(1))


def eyes(shape, classes):
    return Eyes(shape, classes)


OF_EYES = (
    "--model",
    "tests.helpers.eyes:eyes",
    "--shape",
    "3,8,8",
    "--classes",
    "4",
)


class Tied(nn.Module):
    """Two layers of one weight, and a layer under two names."""

    def __init__(self, classes):
        super().__init__()
        self.first, self.one, self.two = nn.Linear(6, 9), nn.Linear(9, 9), nn.Linear(9, 9)
        self.last = nn.Linear(9, classes)
        self.two.weight, self.again = self.one.weight, self.first

    def forward(self, x):
        x = self.one(torch.relu(self.first(x)))
        return self.last(torch.relu(self.two(torch.relu(x))))


def tied(shape, classes):
    return Tied(classes)
