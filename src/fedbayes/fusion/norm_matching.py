"""Inputs moved until batch normalization sees the statistics of the clients' data in them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from fedbayes.core import seeds
from fedbayes.data.progress import progress
from fedbayes.fusion.draws import CHUNK, CachedInputs, Derived, Draws
from fedbayes.fusion.frozen import ChannelsLast, Function
from fedbayes.fusion.seeking import moved
from fedbayes.fusion.settings import FunctionSettings
from fedbayes.fusion.teacher import Teacher
from fedbayes.inputs.augmentation import mirrored, shifted
from fedbayes.likelihoods import Classes

SIZE, WEIGHT = 0.1, 0.3
"""Length of the first step, root mean square in standard deviations of the images; the last is near
0. And weight of the classes. Chosen on images that no client has (case zipit of
`benchmarks/fusion.py --validation`)."""
SHIFT = 2
"""Most pixels by which such images are shifted. Otherwise the network learns them by heart: case
zipit of `benchmarks/fusion.py --validation 40000` has .696, and .704 with shifts."""
FEWEST = 64
"""Images that have the statistics of one client together, at least."""
STEPS, LARGEST = 5, 64 * 64
"""Default number of steps, and the most pixels of an image for which there are any: larger images
take hours on a CPU. In training of five minutes there are none either: case resnet18-small of
`benchmarks/fusion.py --validation` has .535 with them and .543 without."""


class NormMatched(Derived):
    """Draws in which clients' batch normalization sees what it saw in their data.

    Running means m and variances v of a layer are those of a client's data. Images are moved down
    the gradient of (Yin et al. 2020, DeepInversion)

        Σ_layers mean_channels KL(N(μ, σ²) ‖ N(m, v)) − `WEIGHT` mean_images log p(class | x),

    with means μ and variances σ² over a piece of a batch. Clients have pieces by their shares of
    the samples, and the class of an image is drawn by the client's counts of classes.

    Args:
        draws: images.
        clients: networks with batch normalization of images.
        counts: samples of each client and class [S, K]; of each client [S, 1]: without classes.
        kind: of classes, what outputs mean.
        steps: down the gradient.
    """

    def __init__(
        self,
        draws: Draws,
        clients: Sequence[Function],
        counts: Tensor,
        kind: Classes | None,
        steps: int,
    ) -> None:
        super().__init__(draws)
        self.clients, self.counts, self.kind, self.steps = clients, counts, kind, steps

    def batch(self, number: int, count: int) -> Tensor:
        """As `Draws.batch`: the same for the same number."""
        purpose = "normalization" if number >= 0 else "normalization held out"
        rng = seeds.torch_rng(self.seed, purpose, round=abs(number))
        many = max(1, min(2 * len(self.clients), count // FEWEST))
        pieces = torch.tensor_split(self.draws.batch(number, count), many)
        # Every batch has pieces of all clients, as far as it can: one of a single client would
        # have its classes alone, and normalization of a network in training sees a batch.
        ends = self.counts.sum(1).cumsum(0)
        places = (torch.rand(1, generator=rng) + torch.arange(many)) / many * ends[-1]
        asked = torch.searchsorted(ends, places, right=True).clamp(max=len(ends) - 1)
        found = []
        with progress("matching images to the clients' statistics", len(pieces)) as advance:
            for x, client in zip(pieces, asked.tolist(), strict=True):
                classes = torch.multinomial(self.counts[client], len(x), True, generator=rng)
                found.append(self.matched(x, self.clients[client], classes.to(x.device)))
                advance(1)
        return torch.cat(found)

    def augmented(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """Images shifted, and mirrored if that keeps their class: turned or in other colours they
        would not have the statistics.
        """
        return shifted(mirrored(x, rng) if self.mirrors else x, rng, SHIFT)

    def matched(self, x: Tensor, client: Function, classes: Tensor) -> Tensor:
        """Images [n, C, H, W] moved toward the statistics of a client, and toward classes [n]."""

        def slope(x: Tensor) -> Tensor:
            leaf = x.detach().requires_grad_()
            with torch.enable_grad():
                gap, outputs = statistics_gap(client, leaf)
                if self.kind is not None:
                    gap = gap - WEIGHT * self.kind.log_prob(outputs, classes).mean()
                return -torch.autograd.grad(gap, leaf)[0]

        size = SIZE * float(x.std())
        return moved(x, slope, [size * (1 - step / self.steps) for step in range(self.steps)])


def statistics_gap(client: Function, x: Tensor) -> tuple[Tensor, Tensor]:
    """How far images are from the statistics of a network.

    Args:
        client: a network with batch normalization.
        x: images [n, C, H, W].

    Returns:
        Σ_layers mean_channels KL(N(μ, σ²) ‖ N(m, v)) in nats, and its outputs [n, K].
    """
    gaps: list[Tensor] = []

    def compare(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, nn.BatchNorm2d)
        assert layer.running_mean is not None
        assert layer.running_var is not None
        var, mean = torch.var_mean(inputs[0], (0, 2, 3), correction=0)
        known = layer.running_var + layer.eps
        ratio = (var + layer.eps) / known
        off = (mean - layer.running_mean).square() / known
        gaps.append((ratio + off - 1 - ratio.log()).mean() / 2)

    with ExitStack() as hooks:
        for layer in normalizations(client):
            hooks.callback(layer.register_forward_pre_hook(compare).remove)
        outputs = client(x)
    return torch.stack([x.new_zeros(()), *gaps]).sum(), outputs


def normalizations(client: Function) -> list[nn.BatchNorm2d]:
    """Layers of a network that keep statistics of its images; none of other functions."""
    if not isinstance(client, ChannelsLast):
        return []
    layers = client.module.modules()
    return [x for x in layers if isinstance(x, nn.BatchNorm2d) and x.track_running_stats]


def norm_matched(
    teacher: Teacher, draws: Draws, samples: Sequence[float] | None, settings: FunctionSettings
) -> CachedInputs:
    """Invented images, with the statistics of clients that tell them; other inputs as they are.

    Args:
        teacher: the clients.
        draws: inputs, as networks see them.
        samples: of each client; equal ones by default.
        settings: of the fusion.
    """
    kept = CachedInputs(draws)
    if not any(map(normalizations, teacher.clients)) or not draws.movable:
        return kept
    few = kept.batch(-1, CHUNK)[:2]
    steps = settings.matched
    if steps is None:
        # In limited time more steps of training are worth more than such images.
        long = settings.distillation is not None and settings.distillation.minutes is None
        steps = STEPS if long and few[0, 0].numel() <= LARGEST else 0
    if not steps:
        return kept
    with torch.no_grad():
        kind = teacher.likelihood(teacher(few).shape[-1])
    of_classes = kind if isinstance(kind, Classes) and teacher.counts is not None else None
    counts = torch.tensor(samples or [1.0] * len(teacher.clients))[:, None]
    if of_classes is not None and teacher.counts is not None:
        counts = teacher.counts
    own = [i for i, c in enumerate(teacher.clients) if counts[i].sum() > 0 and _has_slope(c, few)]
    if not own:
        return kept
    clients = [teacher.clients[i] for i in own]
    return CachedInputs(NormMatched(kept, clients, counts[own].float(), of_classes, steps))


def _has_slope(client: Function, x: Tensor) -> bool:
    """Whether a network has statistics, with a gradient at images."""
    with torch.enable_grad():
        return statistics_gap(client, x.detach().requires_grad_())[0].requires_grad


def norm_notes(draws: CachedInputs) -> Iterator[str]:
    """What a user should know of such inputs."""
    if isinstance(draws.draws, NormMatched):
        yield (
            "synthetic images were moved to the statistics of the models' batch normalization, "
            "and to their classes if counts are known"
        )
