"""Bayesian nonparametric matching of neurons, on plain arrays (PFNM and GPI-FNM)."""

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
