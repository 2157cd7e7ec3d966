"""The built-in networks. Each maps inputs [n, ...] to logits [n, classes]."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional


class MLP(nn.Sequential):
    """Fully connected network with ReLU between layers; inputs are flattened.

    Args:
        inputs: number of input features.
        hidden: widths of the hidden layers, any number of them (none: logistic regression).
        classes: number of outputs.
        bias: whether layers have biases.
        dropout: probability of dropping an input of a layer in training.
        batch_norm: whether hidden layers have batch normalization before their ReLU.
    """

    def __init__(
        self,
        inputs: int,
        hidden: Sequence[int],
        classes: int,
        bias: bool = True,
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        widths = [inputs, *hidden, classes]
        layers: list[nn.Module] = [nn.Flatten()]
        for depth, (before, after) in enumerate(pairwise(widths)):
            if depth:
                if batch_norm:
                    layers.append(nn.BatchNorm1d(before))
                layers.append(nn.ReLU())
            if dropout:
                layers.append(nn.Dropout(dropout))
            layers.append(nn.Linear(before, after, bias=bias))
        super().__init__(*layers)


class LeNet5(nn.Sequential):
    """LeNet-5 with 20 and 50 filters of 5 by 5 and 500 units (EM paper, appendix A).

    Inputs are images [n, channels, height, width] of at least 4 by 4 pixels. Convolutions pad
    images of less than 16 by 16 pixels, such as those of digits, so that they keep their size.
    Dropout, if there is any, is before the dense layers.
    """

    def __init__(
        self, channels: int, height: int, width: int, classes: int, dropout: float = 0.0
    ) -> None:
        # Each its own: a module that stands in two places is listed once.
        first, second = ([nn.Dropout(dropout)] if dropout else [] for _ in range(2))
        padding = 2 if min(height, width) < 16 else 0
        lost = 4 - 2 * padding
        high, wide = (((side - lost) // 2 - lost) // 2 for side in (height, width))
        super().__init__(
            nn.Conv2d(channels, 20, 5, padding=padding),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(20, 50, 5, padding=padding),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            *first,
            nn.Linear(50 * high * wide, 500),
            nn.ReLU(),
            *second,
            nn.Linear(500, classes),
        )


class CNN(nn.Sequential):
    """Two 3 by 3 convolutions of 32 and 64 filters, each with pooling, and 622 units.

    On MNIST it has 1,020,868 parameters, about as many as the network of the Combined Learning
    paper (1,020,554), which gives no further details. Inputs are images
    [n, channels, height, width].
    """

    def __init__(self, channels: int, height: int, width: int, classes: int) -> None:
        flat = 64 * (((height - 2) // 2 - 2) // 2) * (((width - 2) // 2 - 2) // 2)
        super().__init__(
            nn.Conv2d(channels, 32, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(flat, 622),
            nn.ReLU(),
            nn.Linear(622, classes),
        )


class ResidualBlock(nn.Module):
    """Two 3 by 3 convolutions with group normalization around a shortcut.

    Where the size changes, the shortcut takes every second pixel and fills the new channels
    with zeros, so that it has no weights (option A of the residual networks for CIFAR).
    """

    def __init__(self, before: int, after: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, after)
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """[n, before, h, w] to [n, after, h / stride, w / stride]."""
        out = functional.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        extra = out.shape[1] - shortcut.shape[1]  # of a smaller network's own channels
        if extra:
            shortcut = functional.pad(shortcut, (0, 0, 0, 0, 0, extra))
        return functional.relu(out + shortcut)


class ResNet20(nn.Sequential):
    """ResNet-20 for small images, with group instead of batch normalization.

    Batch statistics of one client mislead the others; groups of channels have none.
    """

    def __init__(self, channels: int, classes: int, groups: int = 2) -> None:
        blocks: list[nn.Module] = [
            nn.Conv2d(channels, 16, 3, padding=1, bias=False),
            nn.GroupNorm(groups, 16),
            nn.ReLU(),
        ]
        before = 16
        for after in (16, 32, 64):
            for index in range(3):
                stride = 2 if index == 0 and after != 16 else 1
                blocks.append(ResidualBlock(before, after, stride, groups))
                before = after
        super().__init__(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))
