"""One-shot fusion of networks that were trained apart: models in, one model out.

This is the mathematics: matching (`dense.py`, `graph_matching.py`), averages by posteriors
(`posteriors.py`) or in one order of units (`permutation.py`), and least squares in function space
(`function.py`). A new way to fuse is a file here and a row in `workflows/fuse/methods.py`.
Model files, options and reports belong to `workflows/fuse/`.
"""

from typing import TYPE_CHECKING

from fedbayes.core.lazy import attributes

if TYPE_CHECKING:
    from fedbayes.fusion.curvature import posterior
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
    from fedbayes.fusion.function import FunctionFusion, fuse_functions
    from fedbayes.fusion.graph_matching import GraphMatching, match_graph
    from fedbayes.fusion.posteriors import Posterior, fisher, kfac, regmean
    from fedbayes.fusion.settings import FunctionSettings

__all__ = [
    "FunctionFusion",
    "FunctionSettings",
    "Fusion",
    "FusionMethod",
    "FusionSettings",
    "GraphMatching",
    "Layers",
    "Posterior",
    "combination",
    "coordinate_average",
    "fisher",
    "fuse",
    "fuse_functions",
    "fuse_layers",
    "fusion_settings",
    "kfac",
    "match_graph",
    "posterior",
    "regmean",
]

__getattr__, __dir__ = attributes(
    __name__,
    {
        "fedbayes.fusion.curvature": "posterior",
        "fedbayes.fusion.dense": (
            "Fusion FusionMethod FusionSettings Layers combination coordinate_average fuse "
            "fuse_layers fusion_settings"
        ),
        "fedbayes.fusion.function": "FunctionFusion fuse_functions",
        "fedbayes.fusion.graph_matching": "GraphMatching match_graph",
        "fedbayes.fusion.posteriors": "Posterior fisher kfac regmean",
        "fedbayes.fusion.settings": "FunctionSettings",
    },
)
