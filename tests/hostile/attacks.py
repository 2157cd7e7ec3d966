"""One client of ten lies: every method ends near its honest accuracy, by default.

`huge` reports 3e38, `weight` a weight of 2^53.
"""

import tempfile
import warnings
from pathlib import Path

from fedbayes.errors import FedbayesWarning
from fedbayes.methods import METHODS
from tests.test_reference_models import OTHERS

KINDS = ("huge", "weight")
NEAR = 0.03
"""Accuracy that an attack may cost."""
SETTINGS = (
    *("data.name=digits", "data.clients=10", "rounds=10"),
    *("training.lr=0.05", "training.epochs=10"),  # so long that a client less costs nothing
    *("attack.clients=1", "checkpoint_every=10"),
)
CASES = [
    (name, kind) for name, kind_of in METHODS.items() if not kind_of.centralized for kind in KINDS
]


def attack(count, seed):
    """Run so many of the cases, from that of this number.

    Returns:
        How many were tried and survived, what failed, and the greatest loss.
    """
    from fedbayes.workflows.experiments.attack_grid import AttackGrid

    failures, lost = [], 0.0
    for number in range(seed, seed + count):
        method, kind = CASES[number % len(CASES)]
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore", FedbayesWarning)
            settings = [*SETTINGS, *_flat(OTHERS.get(method, {}))]
            grid = AttackGrid(Path(folder), [kind], [method], ["mean"], overrides=settings)
            honest, attacked = grid.run()
        if attacked.value is None or honest.value is None:
            failures.append(f"{kind} on {method}: {attacked.trouble or honest.trouble:.200}")
            continue
        loss = (honest.value - attacked.value) * (1 if honest.higher_is_better else -1)
        lost = max(lost, loss)
        if loss > NEAR:
            failures.append(
                f"{kind} on {method}: {honest.headline} {attacked.value:.3f}, "
                f"honest {honest.value:.3f} {attacked.trouble:.100}"
            )
    return count, count - len(failures), failures, {"lost": lost}


def _flat(settings, before=""):
    """Settings in tables as `table.key=value`."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}={value}"
