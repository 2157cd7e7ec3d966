"""Changes after which an image is as likely as before, of each image its own."""

import torch
from torch import Tensor


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


def recoloured(x: Tensor, rng: torch.Generator) -> Tensor:
    """Images [n, C, H, W] with their channels in another order, each order as often."""
    order = torch.rand(x.shape[:2], generator=rng, device=rng.device).argsort(1).to(x.device)
    return x[torch.arange(len(x), device=x.device)[:, None], order]


def _coin(x: Tensor, rng: torch.Generator) -> Tensor:
    """Heads or tails for each image."""
    return (torch.rand(len(x), 1, 1, 1, generator=rng, device=rng.device) < 0.5).to(x.device)
