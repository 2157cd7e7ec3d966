"""Bayesian nonparametric matching of neurons, on plain arrays (PFNM and GPI-FNM).

`costs.py` has the objective and `layer.py` matches one layer; nothing here knows networks of
PyTorch. Make it faster freely. Tests compare its numbers with a brute-force search and with
reference models, and they must stay. Matching of other networks is in `fusion/graph_matching.py`.
"""

from fedbayes.matching.costs import Objective, cost_matrix
from fedbayes.matching.layer import LayerMatching, assign, match_layer
from fedbayes.matching.network import Dense, NetworkMatching, match_networks
from fedbayes.matching.settings import MatchingSettings

__all__ = [
    "Dense",
    "LayerMatching",
    "MatchingSettings",
    "NetworkMatching",
    "Objective",
    "assign",
    "cost_matrix",
    "match_layer",
    "match_networks",
]
