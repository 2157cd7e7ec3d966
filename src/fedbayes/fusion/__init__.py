"""One-shot fusion of networks that were trained apart: models in, one model out."""

from typing import TYPE_CHECKING

from fedbayes.lazy import attributes

if TYPE_CHECKING:
    from fedbayes.fusion.dense import (
        Fusion,
        FusionMethod,
        FusionSettings,
        Layers,
        combination,
        coordinate_average,
        fuse,
        fuse_layers,
        fusion_settings,
    )

__all__ = [
    "Fusion",
    "FusionMethod",
    "FusionSettings",
    "Layers",
    "combination",
    "coordinate_average",
    "fuse",
    "fuse_layers",
    "fusion_settings",
]

__getattr__, __dir__ = attributes(__name__, dict.fromkeys(__all__, "fedbayes.fusion.dense"))
