"""One-shot fusion of networks that were trained apart: models in, one model out."""

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
