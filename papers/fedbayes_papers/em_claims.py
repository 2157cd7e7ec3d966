"""What the EM paper claims of its tables and figures: judged by runs, and why it is not seen."""

from collections.abc import Callable, Sequence

import numpy as np

from fedbayes_papers.em_runs import PAPER, SETTLED, SPARSE, Compared, accuracy_at
from fedbayes_papers.finding import Claim

Claims = Callable[[Compared], list[Claim]]
"""Claims of the paper on the runs of one data set."""

UNGOVERNED = (
    "on the paper's scale λ0 does not govern: a gate starts .0046 from its threshold and one step "
    "of the server is .0044, so that the first rounds decide; in logits it does (fedsparse-l0)"
)
"""Why FedSparse's sparsity is not the paper's."""
YOUNG = (
    "it is not the draws of the gates, without which clients come to the same (fedsparse-local); "
    "the sparser networks are behind globally too, as long as all of them still learn"
)
"""Why the best local models are others'."""
NO_UNITS = "the paper gates weights; gates here are of units, and the one layer has but its outputs"
"""Why nothing is pruned in a logistic regression."""
EARLY = (
    "FedDrop's messages are short from the first round on; FedSparse's are once it has pruned, and "
    "until then it falls behind in accuracy"
)
"""Why FedSparse is not ahead of federated dropout at small budgets."""
AT_ONCE = "it prunes before the global model is first evaluated"
"""Why it cannot be told how FedSparse learns until then."""
NOT_YET = "its lasso has left nothing out yet (fedsparse-fig4)"
"""Why FedL1 has not yet lost more than sparser models."""
NEAR = 0.05
"""Of the paper's sparsity, or of none."""
LEVEL = 0.03
"""Of FedAvg's accuracy."""
LEARNT = 0.1
"""How far behind FedAvg's accuracy a model may be for anything to be seen in it."""
TIMES_CHANCE = 3.0
"""How many times chance its accuracy must be."""
CLASSES = {"cifar100": 100, "femnist": 62}
"""Of data sets that have not ten."""


def floor_of(dataset: str, average: float) -> float:
    """The accuracy below which a model has not learnt enough for a claim about it to be seen: it
    can be as sparse as you like, or better than another that predicts nothing either.

    Args:
        dataset: its name.
        average: FedAvg's accuracy.
    """
    return max(average - LEARNT, TIMES_CHANCE / CLASSES.get(dataset, 10))


def learnt(compared: Compared, claim: Claim, *methods: str) -> Claim:
    """The claim, which is not seen where the global model of a method has not learnt.

    Args:
        compared: the runs.
        claim: what was judged.
        methods: whose models it is about.
    """
    floor = floor_of(compared.dataset, compared.level("FedAvg", "global"))
    failed = {m: level for m in methods if (level := compared.level(m, "global")) < floor}
    if not (claim.seen and failed):
        return claim
    levels = ", ".join(f"{method} {level:.3f}" for method, level in failed.items())
    measured = f"{claim.measured}; but global accuracy is below {floor:.3f}: {levels}"
    cause = "models that do not predict show nothing"
    return claim.model_copy(update={"seen": False, "measured": measured, "cause": cause})


def tables_claims(compared: Compared) -> list[Claim]:
    """More sparsity, fewer bytes; at equal bytes ahead of FedAvg; the best local models."""
    bytes_ = {method: compared.level(method, "bytes") for method in compared.found}
    ordered = [bytes_[method] for method in ("FedAvg", *SPARSE)]
    gains = []
    for method in SPARSE:
        equal = [accuracy_at(metrics, bytes_[method]) for metrics in compared.found["FedAvg"]]
        gains.append(compared.level(method, "global") - float(np.mean(equal)))
    local = {method: compared.level(method, "local") for method in compared.found}
    best = max(local, key=lambda method: local[method])
    claims = [
        Claim(
            text="bytes fall from FedAvg over low and mid to high",
            seen=ordered == sorted(ordered, reverse=True),
            measured=", ".join(f"{value / ordered[0]:.2f}" for value in ordered),
        ),
        *(
            Claim(
                text=f"at as many bytes the global model of {method} is ahead of FedAvg's",
                seen=gain > 0,
                measured=f"{gain:+.3f}",
            )
            for method, gain in zip(SPARSE, gains, strict=True)
        ),
        Claim(
            text="the best local models are FedSparse's",
            seen=best in SPARSE,
            measured=f"{best} {local[best]:.3f}, FedAvg {local['FedAvg']:.3f}, "
            + ", ".join(f"{local[method]:.3f}" for method in SPARSE)
            + " for low, mid, high",
            cause=YOUNG,
        ),
    ]
    paper = PAPER.get(compared.dataset)
    if paper is not None:
        wanted = [paper[method][3] for method in SPARSE]
        own = [compared.level(method, "sparsity") for method in SPARSE]
        pairs = [f"{one:.2f} ({other:.2f})" for one, other in zip(own, wanted, strict=True)]
        claims.append(
            Claim(
                text=f"low, mid and high prune what they do in the paper, within {NEAR}",
                seen=bool(np.abs(np.subtract(own, wanted)).max() <= NEAR),
                measured=", ".join(pairs),
                cause=UNGOVERNED,
            )
        )
    return [learnt(compared, claim, *SPARSE) for claim in claims]


def budget_claims(compared: Compared) -> list[Claim]:
    """Small budgets are the sparse models', larger ones federated dropout's (section 5)."""
    sparse = SPARSE[1:]
    largest = min(compared.level(method, "bytes") for method in (*sparse, "FedDrop"))

    def level(method: str, budget: float) -> float:
        return float(np.mean(compared.at_bytes(method, budget)))

    def told(methods: Sequence[str], budget: float) -> str:
        return ", ".join(f"{method} {level(method, budget):.3f}" for method in methods)

    small, others = largest / 2, ("FedAvg", "FedDrop", "FedL1")
    claims = []
    for method in sparse:
        ahead = all(level(method, small) > level(other, small) for other in others)
        claims.append(
            Claim(
                text=f"{method} is ahead of all others at a small budget",
                seen=ahead,
                measured=f"{told((method, *others), small)} at {small / 1e9:.1f} GB",
                cause=EARLY if level("FedDrop", small) > level(method, small) else "",
            )
        )
    drop = level("FedDrop", largest)
    claims.append(
        Claim(
            text="at a larger budget FedDrop is ahead of them",
            seen=all(drop > level(method, largest) for method in sparse),
            measured=f"{told(('FedDrop', *sparse), largest)} at {largest / 1e9:.1f} GB",
        )
    )
    return claims


def rounds_claims(compared: Compared) -> list[Claim]:
    """Gates do not slow learning before they prune; the lasso costs accuracy (appendix D)."""

    def mean(method: str, key: str, number: int) -> float:
        return float(np.mean(compared.curve(method, key, number)))

    first, told, behind = compared.marks[0], [], []
    for method in (m for m in compared.found if m.startswith("FedSparse")):
        whole = [n for n in compared.marks if mean(method, "sparsity", n) < NEAR]
        if not whole:
            told.append(f"{method} has lost {mean(method, 'sparsity', first):.2f} by round {first}")
            continue
        own, plain = (mean(m, "global_accuracy", whole[-1]) for m in (method, "FedAvg"))
        told.append(f"{method} {own:.3f} in round {whole[-1]}, FedAvg {plain:.3f}")
        if method in SPARSE:  # the others are not the paper's
            behind.append(plain - own)
    last = {method: compared.level(method, "global") for method in compared.found}
    rest = {method: value for method, value in last.items() if method != "FedL1"}
    worst = min(rest, key=lambda method: rest[method])
    claims = [
        Claim(
            text=f"until it prunes FedSparse learns like FedAvg, within {LEVEL}",
            seen=bool(behind) and max(behind) <= LEVEL,
            measured="; ".join(told),
            cause="" if behind else AT_ONCE,
        ),
        Claim(
            text="FedL1 is worse than all others",
            seen=last["FedL1"] < rest[worst],
            measured=f"{last['FedL1']:.3f} after {compared.until} rounds, {worst} "
            f"{rest[worst]:.3f}",
            cause=NOT_YET,
        ),
    ]
    return [learnt(compared, claim, "FedAvg") for claim in claims]


def settles_claims(compared: Compared) -> list[Claim]:
    """FedSparse is as sparse as it will be before round 100, FedL1 much later (appendix B)."""
    claims = []
    for method in SPARSE:
        when = compared.rounds_until(method, 0.95)
        text = f"{method} has its final sparsity before round 100"
        claims.append(Claim(text=text, seen=when < 100, measured=f"95 % of it in round {when:.0f}"))
    late = compared.level("FedL1", "sparsity")
    claims.append(
        Claim(
            text="FedL1 gets sparse much later",
            seen=late < compared.level("FedSparse, low", "sparsity") / 2,
            measured=f"{late:.3f} after {compared.until} rounds",
        )
    )
    return [learnt(compared, claim, "FedL1", *SPARSE) for claim in claims]


def shift_claims(compared: Compared) -> list[Claim]:
    """Clients and server soon agree on the gates (appendix C)."""
    claims = []
    for method in SPARSE:
        late = compared.late(method, "gate_shift_mean")
        largest = compared.late(method, "gate_shift_max")
        claims.append(
            Claim(
                text=f"{method}: the mean distance of the clients' gates from the server's becomes "
                "almost zero",
                seen=late < 0.01,
                measured=f"{late:.4f} in the last {SETTLED} rounds, the largest {largest:.3f}",
            )
        )
    return [learnt(compared, c, method) for c, method in zip(claims, SPARSE, strict=True)]


def pruning_claims(compared: Compared) -> list[Claim]:
    """Pruning at the server does no harm (appendix D)."""
    claims = []
    for key in ("global", "local"):
        pruned = compared.level("FedSparse, mid", key)
        whole = compared.level("FedSparse, mid, unpruned", key)
        claims.append(
            Claim(
                text=f"pruning at the server does not harm the {key} accuracy",
                seen=pruned > whole - 0.01,
                measured=f"{pruned:.3f} with, {whole:.3f} without",
            )
        )
    pair = ("FedSparse, mid", "FedSparse, mid, unpruned")
    return [learnt(compared, claim, *pair) for claim in claims]


def scaffold_claims(compared: Compared) -> list[Claim]:
    """SCAFFOLD helps the global model of a convex problem, alone and with FedSparse."""
    claims = []
    for better, worse, key in (
        ("SCAFFOLD", "FedAvg", "global"),
        ("FedAvg", "SCAFFOLD", "local"),
        ("SCAFFOLD, FedSparse", "FedSparse, mid", "global"),
    ):
        high, low = compared.level(better, key), compared.level(worse, key)
        text = f"{better} has a better {key} accuracy than {worse}"
        claim = Claim(text=text, seen=high > low, measured=f"{high:.3f} against {low:.3f}")
        claims.append(learnt(compared, claim, better))
    both = compared.level("SCAFFOLD, FedSparse", "sparsity")
    alone = compared.level("FedSparse, mid", "sparsity")
    text = "FedSparse prunes with SCAFFOLD too (the paper: 35 % with, 47 % without)"
    measured = f"{both:.0%} with, {alone:.0%} without"
    claim = Claim(text=text, seen=both > 0.1, measured=measured, cause=NO_UNITS)
    return [*claims, learnt(compared, claim, "SCAFFOLD, FedSparse")]


def priors_claims(compared: Compared) -> list[Claim]:
    """On deep networks damped control variates bring nothing (appendix E); what other priors lose
    against FedAvg, and what they do not once they are cured.
    """
    plain = compared.level("FedAvg", "global")
    damped = compared.level("SCAFFOLD, damped", "global")
    bounded = compared.level("SCAFFOLD, bounded", "global")
    claims = [
        Claim(
            text="on a deep network damped SCAFFOLD brings no benefit",
            seen=damped <= plain + 0.01,
            measured=f"{damped:.3f}, FedAvg {plain:.3f}",
        ),
        Claim(
            text="undamped SCAFFOLD trains where no variate is longer than the median",
            seen=bounded >= plain - LEVEL,
            measured=f"{bounded:.3f}, FedAvg {plain:.3f}",
        ),
    ]
    third = float(np.mean(compared.at_bytes("FedAvg", compared.level("FedAvg", "bytes") / 3)))
    thirds = (
        "each of its components sees a third of the updates; after a third of the rounds FedAvg "
        f"has {third:.3f}"
    )
    for method, cured, cause in (
        ("Laplace", "Laplace, cured", ""),
        ("mixture, K = 3", "mixture, cured", thirds),
    ):
        own, now = compared.level(method, "global"), compared.level(cured, "global")
        claims.append(
            Claim(
                text=f"{cured}: within {LEVEL} of FedAvg at as many updates",
                seen=now >= plain - LEVEL,
                measured=f"{now:.3f}, as published {own:.3f}, FedAvg {plain:.3f}",
                cause=cause,
            )
        )
    about = ("SCAFFOLD, damped", "SCAFFOLD, bounded", "Laplace, cured", "mixture, cured")
    return [learnt(compared, claim, method) for claim, method in zip(claims, about, strict=True)]
