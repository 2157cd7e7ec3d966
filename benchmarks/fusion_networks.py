"""Networks of the fusion benchmark that are not built in: factories for `[model]`."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional


def fedfisher_cnn(*, shape, classes):
    """FedFisher's network for CIFAR-10, without biases."""
    return cnn(shape, classes, (32, 64), (512, 128), bias=False)


def fedlpa_cnn(*, shape, classes):
    """FedLPA's network."""
    return cnn(shape, classes, (6, 16), (120, 84), bias=True)


def cnn(shape, classes, filters, widths, bias):
    """Two layers of filters of 5 by 5, then dense layers."""
    channels, height, width = shape
    flat = filters[-1] * (((height - 4) // 2 - 4) // 2) * (((width - 4) // 2 - 4) // 2)
    layers: list[nn.Module] = []
    for before, after in pairwise((channels, *filters)):
        layers += [nn.Conv2d(before, after, 5, bias=bias), nn.ReLU(), nn.MaxPool2d(2)]
    layers.append(nn.Flatten())
    for before, after in pairwise((flat, *widths)):
        layers += [nn.Linear(before, after, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes, bias=bias))


class Block(nn.Module):
    """Two convolutions with batch normalization around a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut = nn.Sequential()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


class Augmentation(nn.Module):
    """Shifts by up to four pixels and reflections of each image while the network trains."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        images, channels, height, width = (torch.arange(size) for size in x.shape)
        shift = torch.randint(0, 9, (2, len(images), 1))
        reflected = torch.randint(0, 2, (len(images), 1)) == 1
        rows = shift[0] + height
        columns = shift[1] + torch.where(reflected, width.flip(0), width)
        whole = functional.pad(x, [4] * 4)
        each = images[:, None, None, None], channels[None, :, None, None]
        return whole[(*each, rows[:, None, :, None], columns[:, None, None, :])]


def residual(shape, classes, width, blocks, stages):
    """Layers of a residual network for small images."""
    layers: list[nn.Module] = [
        nn.Conv2d(shape[0], width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    ]
    before = width
    for stage in range(stages):
        for number in range(blocks):
            after = width * 2**stage
            layers.append(Block(before, after, 2 if stage and not number else 1))
            before = after
    return [*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes)]


def resnet18(*, shape, classes, width=64, blocks=2):
    """ResNet-18 with batch normalization; narrower or shallower as told."""
    return nn.Sequential(*residual(shape, classes, width, blocks, 4))


def resnet20(*, shape, classes):
    """ResNet-20 with batch normalization, which trains on augmented images."""
    return nn.Sequential(Augmentation(), *residual(shape, classes, 16, 3, 3))


def vgg11(*, shape, classes, width=0.25):
    """VGG-11 with one dense layer, without normalization; narrower as told."""
    layers: list[nn.Module] = []
    before = shape[0]
    for channels in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
        if not channels:
            layers.append(nn.MaxPool2d(2))
            continue
        after = int(width * channels)
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
        nn.init.kaiming_normal_(layers[-2].weight, nonlinearity="relu")  # or it hardly starts
        before = after
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(before, classes))
