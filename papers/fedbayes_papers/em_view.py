"""The experiments of the EM paper: FedSparse and its rivals, bytes on the wire as the measure.

All methods of a comparison see the same clients, the same cohorts and the same start. As in the
paper's appendix A, the server of every method takes Adam's steps along the difference of
weights. The Dirichlet concentration is not printed there; 1 gives FedAvg its accuracies.
"""

from collections.abc import Sequence
from dataclasses import replace

from fedbayes_papers.em_claims import (
    Claims,
    budget_claims,
    priors_claims,
    pruning_claims,
    rounds_claims,
    scaffold_claims,
    settles_claims,
    shift_claims,
    tables_claims,
)
from fedbayes_papers.em_runs import (
    ACCURACIES,
    FOLDER,
    NOTES,
    OVER_ROUNDS,
    SHIFTS,
    SPARSE,
    SPARSITY,
    Compared,
    Comparison,
    Panel,
    Table,
    compare,
    draw,
    ends,
    over_bytes,
    over_rounds,
)
from fedbayes_papers.experiment import Experiment, Request, Row
from fedbayes_papers.finding import Finding, Part, markdown

ROUNDS = {"digits": 40, "cifar10": 1000, "cifar100": 6000, "femnist": 6000}
"""The paper's number of rounds."""
SMALL_ROUNDS = 120
"""At small scale: sparsity settles within 50."""
PRIORS_ROUNDS = 50
"""At small scale, of the methods beside FedAvg in the comparison of priors."""


def _run(
    request: Request,
    title: str,
    comparisons: dict[str, Comparison],
    claims: Claims,
    panels: Sequence[Panel] = (*ACCURACIES, SPARSITY, SHIFTS[0]),
    table: Table = ends,
) -> Finding:
    """Run what is missing; a figure, a table and the claims of each data set."""
    parts = []
    for dataset, comparison in comparisons.items():
        found = compare(comparison, request.folder / FOLDER, dataset, request.watch)
        draw(found, request.out / f"figure-{dataset}.png", f"{title}, {dataset}", panels)
        compared = Compared(dataset, found, min(comparison.rounds.values()))
        parts.append(
            Part(
                heading=f"{dataset}, after {compared.until} rounds",
                table=markdown(table(compared)),
                claims=tuple(claims(compared)),
                dataset=dataset,
            )
        )
    return request.found(
        parts,
        min(c.seeds for c in comparisons.values()),
        NOTES.get(table, "Mean ± std over seeds."),
    )


def _federation(dataset: str) -> Row:
    """The clients of appendix A; digits stand in, smaller.

    CIFAR-10: 100 clients split as Hsu et al. CIFAR-100: 500 clients, by Dirichlet shares (the
    paper's split is Pachinko's, over coarse and fine labels). FEMNIST: the writers.
    """
    small = dataset == "digits"
    data: Row = {"name": dataset, "partition": "dirichlet-equal", "alpha": 1.0, "clients": 100}
    match dataset:
        case "digits":
            data["clients"] = 20
        case "cifar100":
            data["clients"] = 500
        case "femnist":
            data = {"name": dataset, "partition": "natural"}
    model: Row = {"name": "resnet20"} if dataset == "cifar100" else {"name": "lenet5"}
    return {
        "cohort": 5 if small else 10,
        "evaluate_every": 10,
        "checkpoint_every": 10,
        "precision": "float32" if small else "bf16",
        "data": data,
        "model": {"hidden": [100]} if small else model,
        "training": {
            "optimizer": "sgd",
            "lr": 0.05,
            "epochs": 1,
            "batch_size": 64 if dataset == "cifar10" else 20,
        },
    }


CHANGES: dict[str, Row] = {
    "cifar100": {
        "FedDrop": {"dense_rate": 0.0},
        **{method: {"output_gates": False} for method in SPARSE},
    },
    "femnist": {"FedDrop": {"conv_rate": 0.2, "dense_rate": 0.4}, "FedL1": {"l1": 1e-3}},
}
"""What appendix A has otherwise than on CIFAR-10."""


def comparison_of(request: Request, dataset: str, rows: Sequence[str]) -> Comparison:
    """Methods on the federation of a data set."""
    small = request.small and dataset != "digits"
    rounds = dict.fromkeys(rows, SMALL_ROUNDS if small else ROUNDS[dataset])
    seeds = len(request.repeats(3, 3))
    changes = CHANGES.get(dataset, {})
    return Comparison("mixed", _federation(dataset), rounds, seeds, changes)


ROWS = ("FedAvg", "FedDrop", "FedL1", *SPARSE)


def _table(name: str, title: str, home: str) -> Experiment:
    """Tables 1 to 3: all methods on one data set."""

    def run(request: Request) -> Finding:
        comparisons = {}
        for dataset in request.datasets:
            rows = (*ROWS, "FedSparse, logits") if dataset in ("cifar10", "digits") else ROWS
            comparisons[dataset] = comparison_of(request, dataset, rows)
        return _run(request, f"FedSparse ({title})", comparisons, tables_claims)

    what = f"{title}: FedAvg, FedDrop, FedL1, FedSparse; accuracy, bytes, sparsity"
    return Experiment(name, what, (home,), run)


def _figure(
    name: str,
    title: str,
    rows: Sequence[str],
    panels: Sequence[Panel],
    claims: Claims,
    table: Table,
    datasets: tuple[str, ...] = ("cifar10", "cifar100", "femnist"),
) -> Experiment:
    """A figure from runs of the tables."""

    def run(request: Request) -> Finding:
        comparisons = {d: comparison_of(request, d, rows) for d in request.datasets}
        return _run(request, title, comparisons, claims, panels, table)

    return Experiment(name, title, datasets, run)


PRIORS = (
    "FedAvg",
    "SCAFFOLD, damped",
    "SCAFFOLD, bounded",
    "Laplace",
    "Laplace, cured",
    "mixture, K = 3",
    "mixture, cured",
)


def priors(request: Request) -> Finding:
    """Other priors of appendix J and SCAFFOLD on the federation of Table 1.

    Control variates are damped, as the paper had to do on networks, or bounded; without either
    they diverge. FedAvg's runs are those of Table 1, which go on for longer.
    """
    comparisons = {}
    for dataset in request.datasets:
        own = comparison_of(request, dataset, PRIORS)
        if request.small and dataset != "digits":
            own = replace(own, rounds=own.rounds | dict.fromkeys(PRIORS[1:], PRIORS_ROUNDS))
        comparisons[dataset] = own
    panels = (*OVER_ROUNDS, *ACCURACIES)
    return _run(request, "Priors of the EM view", comparisons, priors_claims, panels)


def figure8(request: Request) -> Finding:
    """Fig. 8: logistic regression, 100 clients of one class each; SCAFFOLD with FedSparse."""
    comparisons = {}
    for dataset in request.datasets:
        settings = {
            "cohort": 10,
            "evaluate_every": 5,
            "checkpoint_every": 20,
            "data": {
                "name": dataset,
                "clients": 20 if dataset == "digits" else 100,
                "partition": "shards",
                "shards_per_client": 1,
            },
            "model": {"hidden": []},
            "training": {"optimizer": "sgd", "lr": 0.05, "epochs": 1, "batch_size": 64},
        }
        rows = ["FedAvg", "SCAFFOLD", "FedSparse, mid", "SCAFFOLD, FedSparse"]
        rounds = dict.fromkeys(rows, 40 if dataset == "digits" else 400)
        seeds = len(request.repeats(3, 3))
        comparisons[dataset] = Comparison("one-class", settings, rounds, seeds)
    return _run(request, "SCAFFOLD and FedSparse (Fig. 8)", comparisons, scaffold_claims)


EXPERIMENTS = (
    _table("fedsparse-table1", "Table 1, LeNet-5 on 100 clients", "cifar10"),
    _table("fedsparse-table2", "Table 2, ResNet-20 on 500 clients", "cifar100"),
    _table("fedsparse-table3", "Table 3, LeNet-5 on writers", "femnist"),
    _figure(
        "fedsparse-fig3",
        "Fig. 3: accuracy over bytes",
        ROWS,
        ACCURACIES,
        budget_claims,
        over_bytes,
    ),
    _figure(
        "fedsparse-fig4",
        "Fig. 4: sparsity over rounds",
        ("FedAvg", "FedL1", *SPARSE),
        (SPARSITY,),
        settles_claims,
        over_rounds(SPARSITY.key),
    ),
    _figure(
        "fedsparse-fig5",
        "Fig. 5: clients' gates against the server's",
        ("FedAvg", *SPARSE),
        SHIFTS,
        shift_claims,
        over_rounds(SHIFTS[0].key),
    ),
    _figure(
        "fedsparse-fig6",
        "Fig. 6: accuracy over rounds",
        (*ROWS, "FedSparse, logits"),
        OVER_ROUNDS,
        rounds_claims,
        over_rounds("global_accuracy"),
    ),
    _figure(
        "fedsparse-fig7",
        "Fig. 7: FedSparse with and without pruning at the server",
        ("FedAvg", "FedSparse, mid", "FedSparse, mid, unpruned"),
        OVER_ROUNDS,
        pruning_claims,
        ends,
        ("cifar10",),
    ),
    Experiment(
        "fedsparse-fig8",
        "Fig. 8: SCAFFOLD and FedSparse, clients of one class",
        ("mnist",),
        figure8,
    ),
    Experiment(
        "em-priors", "SCAFFOLD, Laplace and mixture on the clients of Table 1", ("cifar10",), priors
    ),
)
"""In the order of the paper."""
