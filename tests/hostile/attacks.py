"""One client of ten lies: every method ends near its honest accuracy, by default.

`huge` reports 3e38, `weight` a weight of 2^53: who counts as not there costs little. Who reverses
its change is out from 5 times the median on (`stretch:scale=95`). `stretch` is what is left to it,
which costs more where clients differ.
"""

import tempfile
import warnings
from pathlib import Path

from fedbayes.errors import FedbayesWarning
from fedbayes.methods import METHODS
from tests.helpers.reference import OTHERS

KINDS = {
    "huge": 0.03,
    "weight": 0.03,
    "sign-flip:scale=20": 0.1,
    "stretch:scale=95": 0.1,
    "stretch": 0.25,
}
"""Attacks, and the accuracy that each may cost."""
SETTINGS = (
    *("data.name=digits", "data.clients=10", "rounds=10"),
    *("training.lr=0.05", "training.epochs=10"),  # so long that a client less costs nothing
    *("attack.clients=1", "checkpoint_every=10"),
)
CASES = [
    name for name, kind in METHODS.items() if not kind.reports.pooled and name != "local"
]  # whose clients report something


def attack(count, seed):
    """Run so many of the methods, from that of this number, under every attack.

    Returns:
        How many were tried and survived, what failed, and the greatest loss.
    """
    from fedbayes.workflows.experiments.attack_grid import AttackGrid

    survived, failures, lost = 0, [], 0.0
    for number in range(seed, seed + count):
        method = CASES[number % len(CASES)]
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore", FedbayesWarning)
            settings = [*SETTINGS, *_flat(OTHERS.get(method, {}))]
            grid = AttackGrid(Path(folder), list(KINDS), [method], ["mean"], overrides=settings)
            honest, *attacked = grid.run()
        found = [why for one in attacked if (why := _harm(one, honest))]
        lost = max(lost, *(_loss(one, honest) for one in attacked))
        survived += not found
        failures += found
    return count, survived, failures, {"lost": lost}


def _loss(attacked, honest):
    """By how much worse an attacked run is than the honest one; 0 where one came to nothing."""
    if attacked.value is None or honest.value is None:
        return 0.0
    return (honest.value - attacked.value) * (1 if honest.higher_is_better else -1)


def _harm(attacked, honest):
    """What an attack did that it must not, in words; empty if nothing."""
    name = f"{attacked.cell.attack} on {attacked.cell.method}"
    if attacked.value is None or honest.value is None:
        return f"{name}: {attacked.trouble or honest.trouble:.200}"
    if _loss(attacked, honest) <= KINDS[attacked.cell.attack]:
        return ""
    return (
        f"{name}: {honest.headline} {attacked.value:.3f}, honest {honest.value:.3f} "
        f"{attacked.trouble:.100}"
    )


def _flat(settings, before=""):
    """Settings in tables as `table.key=value`."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}={value}"
