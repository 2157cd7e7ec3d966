"""What the file of a model without a card says of its inputs."""

import json
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedbayes.core.files import parse_json
from fedbayes.core.targets import Target
from fedbayes.data import Preprocessing
from fedbayes.errors import ModelError, told_as
from fedbayes.storage.card import Card

TOLD = "fedbayes-inputs"
"""Key of `InputsTold` in the header of a file."""


class InputsTold(NamedTuple):
    """Classes and standardization of a model whose file has no card, as its owner stated them."""

    names: tuple[str, ...]
    """Of its target, such as classes in the order of its outputs."""
    mean: tuple[float, ...]
    """Subtracted from its inputs, images in [0, 1]; empty if nobody stated it."""
    std: tuple[float, ...]
    """What they are divided by then."""
    shape: tuple[int, ...] = ()
    """Of one input."""
    bounds: tuple[float, ...] = ()
    """0 and 1 of images whose values are in between; else empty."""

    @classmethod
    def of(cls, seen: Preprocessing, raw: Tensor, stated: bool) -> "InputsTold":
        """What there is to tell of a network.

        Args:
            seen: what it sees of samples.
            raw: samples of its client, [n, ...].
            stated: whether somebody stated their mean and standard deviation.
        """
        within = len(seen.shape) == 3 and bool(((raw >= 0) & (raw <= seen.scale)).all())
        bounds, names = (0.0, 1.0) if within else (), seen.target.names
        mean, std = (seen.mean, seen.std) if stated else ((), ())
        return cls(names, tuple(mean), tuple(std), seen.shape, bounds)

    @classmethod
    def read(cls, path: Path) -> "InputsTold | None":
        """What a file tells; None if nothing.

        Raises:
            ModelError: it is damaged.
        """
        text = header(path).get(TOLD)
        if text is None:
            return None
        with told_as(ModelError, f"{path} is damaged", ValueError, TypeError):
            return cls(*map(tuple, parse_json(text)))

    def dump(self) -> str:
        """As JSON."""
        return json.dumps(self)

    def card(self, method: str) -> Card:
        """The card of a classifier that such models were fused to, by this method."""
        target, bounds = Target("class", self.names), (0.0, 1.0) if self.bounds else None
        seen = Preprocessing(self.shape, 1.0, self.mean, self.std, target, bounds=bounds)
        return Card(seen, {}, {}, {}, 0).of_fused(method)


def header(path: Path) -> dict[str, str]:
    """The text in the header of a safetensors file, without its tensors; none of other files."""
    try:
        with safe_open(path, "pt") as file:
            return dict(file.metadata() or {})
    except (OSError, SafetensorError):
        return {}
