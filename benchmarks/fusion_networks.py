"""Networks of the fusion benchmark that are not built in: factories for `[model]`."""

from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional


def fedfisher_cnn(*, shape, classes):
    """FedFisher's network for CIFAR-10: filters of 5 by 5, then dense layers, without biases."""
    channels, height, width = shape
    flat = 64 * (((height - 4) // 2 - 4) // 2) * (((width - 4) // 2 - 4) // 2)
    layers: list[nn.Module] = []
    for before, after in pairwise((channels, 32, 64)):
        layers += [nn.Conv2d(before, after, 5, bias=False), nn.ReLU(), nn.MaxPool2d(2)]
    layers.append(nn.Flatten())
    for before, after in pairwise((flat, 512, 128)):
        layers += [nn.Linear(before, after, bias=False), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(128, classes, bias=False))


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


def resnet18(*, shape, classes, width=64, blocks=2):
    """ResNet-18 for small images, with batch normalization; narrower or shallower as told."""
    layers: list[nn.Module] = [
        nn.Conv2d(shape[0], width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    ]
    before = width
    for stage in range(4):
        for number in range(blocks):
            after = width * 2**stage
            layers.append(Block(before, after, 2 if stage and not number else 1))
            before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))
