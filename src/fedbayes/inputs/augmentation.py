"""Changes after which an image is as likely as before, of each image its own."""

import torch
from torch import Tensor
from torch.nn import functional


def turned(x: Tensor, rng: torch.Generator) -> Tensor:
    """Images [n, C, H, W], mirrored and turned by quarters, each of the eight ways as often.

    Those that are no squares are turned by halves.
    """
    for axis in (-1, -2):
        x = mirrored(x, rng, axis)
    return torch.where(_coin(x, rng), x.mT, x) if x.shape[-1] == x.shape[-2] else x


def mirrored(x: Tensor, rng: torch.Generator, axis: int = -1) -> Tensor:
    """Images [n, C, H, W], each as often as it is or mirrored along an axis."""
    return torch.where(_coin(x, rng), x.flip(axis), x)


def shifted(x: Tensor, rng: torch.Generator, most: int) -> Tensor:
    """Images [n, C, H, W] moved by up to `most` pixels along both axes, each way as often.

    Pixels beyond an edge are reflections of those inside.
    """
    n, channels, height, width = x.shape
    most = min(most, height - 1, width - 1)
    offsets = torch.randint(2 * most + 1, (2, n, 1), generator=rng, device=rng.device).to(x.device)
    rows, columns = (
        offset + torch.arange(size, device=x.device)
        for offset, size in zip(offsets, (height, width), strict=True)
    )
    wide = functional.pad(x, (most,) * 4, mode="reflect")
    cut = wide.gather(2, rows[:, None, :, None].expand(-1, channels, -1, wide.shape[3]))
    return cut.gather(3, columns[:, None, None].expand(-1, channels, height, -1))


def recoloured(x: Tensor, rng: torch.Generator) -> Tensor:
    """Images [n, C, H, W] with their channels in another order, each order as often."""
    order = torch.rand(x.shape[:2], generator=rng, device=rng.device).argsort(1).to(x.device)
    return x[torch.arange(len(x), device=x.device)[:, None], order]


def _coin(x: Tensor, rng: torch.Generator) -> Tensor:
    """Heads or tails for each image."""
    return (torch.rand(len(x), 1, 1, 1, generator=rng, device=rng.device) < 0.5).to(x.device)
