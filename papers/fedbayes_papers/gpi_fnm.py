"""The experiments of the GPI-FNM paper (section 5), on MNIST and CIFAR-10."""

import pandas as pd

from fedbayes_papers.experiment import Experiment, Request
from fedbayes_papers.finding import Claim, Finding, Scale
from fedbayes_papers.gpi_claims import (
    APART,
    AT_CHANCE,
    NO_DATA,
    ONE_START,
    STAYS,
    TOP_DOWN,
    ahead,
    choices_of_kl,
    fewer_neurons,
    finding_of,
    one_network,
    panels,
)
from fedbayes_papers.gpi_networks import (
    DEEP,
    FUNCTION_SPACE,
    NO_COUNTS,
    PARTITIONS,
    SPREADS,
    FusionCase,
    fill,
)
from fedbayes_papers.gpi_rounds import figure4


def one_shot(request: Request) -> Finding:
    """The figures of one federation: MNIST, 10 clients, Dirichlet 0.4, one and two layers."""
    federations = [
        FusionCase(name, "dirichlet", 10, layers, seed)
        for name in request.datasets
        for layers in (1, 2)
        for seed in request.repeats(3, 10)
    ]
    methods = ["locals", "average", "ensemble", "PFNM", "GPI-FNM"]
    methods += ["GPI-FNM, alternating", "GPI-FNM, alternating, small"]
    out = request.out
    grid = {
        "sigma": (1.0, 3.0),
        "sigma0": (1.0, 3.0, 10.0),
        "gamma": (1.0, 8.0, 30.0),
        "epsilon": (0.0, 0.1, 0.3, 1.0),
    }
    table = fill(request, federations, methods, grid)
    by = ("dataset", "layers")
    panels(table, "layers", "hidden layers", out / "figure.png", "One round, 10 clients")

    def claims(own: pd.DataFrame) -> list[Claim]:
        return [
            ahead(own, by, "GPI-FNM", "PFNM"),
            ahead(own, by, "GPI-FNM, alternating", "GPI-FNM", NO_DATA),
            ahead(own, by, "GPI-FNM, alternating", "ensemble", one_network(own)),
        ]

    return finding_of(request, table, by, claims)


def figure2(request: Request) -> Finding:
    """Fig. 2: one hidden layer, one round, more and more clients."""
    federations = [
        FusionCase(name, partition, clients, 1, seed)
        for name in request.datasets
        for partition in PARTITIONS
        for clients in _clients(name, request.scale)
        for seed in request.repeats(3, 10)
    ]
    epsilons: tuple[float, ...] = (0.0, 0.1, 0.3, 1.0)
    if not request.small:
        epsilons = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5)
    grid = {"sigma0": (1.0, 3.0), "gamma": (1.0, 8.0), "epsilon": epsilons}
    out = request.out
    methods = ["GPI-FNM", "PFNM", "FedAvg", "locals"]
    table = fill(request, federations, [*methods, FUNCTION_SPACE, NO_COUNTS], grid)
    panels(table, "clients", "clients", out / "figure.png", "One hidden layer, one round (Fig. 2)")
    by = ("dataset", "partition", "clients")

    def claims(own: pd.DataFrame) -> list[Claim]:
        far = own["dataset"].iloc[0] in SPREADS
        return [
            ahead(own, by, "GPI-FNM", "PFNM", choices_of_kl(own)),
            ahead(own, by, "GPI-FNM", "FedAvg", ONE_START if far else ""),
            ahead(own, by, "GPI-FNM", "locals", STAYS if far else ""),
            *(
                ahead(own, by, ours, other, fewer_neurons(own) if other == "GPI-FNM" else "")
                for ours in (FUNCTION_SPACE, NO_COUNTS)
                for other in ("GPI-FNM", "FedAvg")
            ),
        ]

    return finding_of(request, table, by, claims)


def _clients(dataset: str, scale: Scale) -> tuple[int, ...]:
    """Numbers of clients of Fig. 2."""
    if scale == "paper":
        return (5, 10, 15, 20, 25, 30)
    return (5, 10, 20) if dataset == "cifar10" else (5, 10, 20, 30)


def figure3(request: Request) -> Finding:
    """Fig. 3: one round, 10 clients, one to six hidden layers."""
    depths = (1, 2, 4, 6) if request.small else (1, 2, 3, 4, 5, 6)
    federations = [
        FusionCase(name, partition, 10, layers, seed)
        for name in request.datasets
        for partition in PARTITIONS
        for layers in depths
        for seed in request.repeats(3, 10)
    ]
    out = request.out
    methods = ["GPI-FNM", "GPI-FNM, alternating", "PFNM", "FedAvg", "locals"]
    table = fill(request, federations, methods, DEEP)
    panels(table, "layers", "hidden layers", out / "figure.png", "One round, 10 clients (Fig. 3)")
    by = ("dataset", "partition", "layers")

    def claims(own: pd.DataFrame) -> list[Claim]:
        far = own["dataset"].iloc[0] in SPREADS
        return [
            ahead(own, by, "GPI-FNM", "PFNM", AT_CHANCE),
            ahead(own, by, "GPI-FNM", "FedAvg", APART if far else TOP_DOWN),
            ahead(own, by, "GPI-FNM", "locals", APART if far else TOP_DOWN),
        ]

    return finding_of(request, table, by, claims)


DATASETS = ("mnist", "cifar10")
EXPERIMENTS = (
    Experiment(
        "gpi-fnm-one-shot",
        "10 clients, one and two hidden layers, one round",
        DATASETS[:1],
        one_shot,
    ),
    Experiment("gpi-fnm-fig2", "5 to 30 clients, one hidden layer, one round", DATASETS, figure2),
    Experiment("gpi-fnm-fig3", "one to six hidden layers, one round", DATASETS, figure3),
    Experiment("gpi-fnm-fig4", "15 clients, two hidden layers, many rounds", DATASETS, figure4),
)
"""In the order of the paper."""
