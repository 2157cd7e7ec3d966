"""Attacks: what malicious clients do to a federation, so that its defences can be measured.

One small class each (`Attack`), by name in `ATTACKS`; the `[attack]` table of a config chooses one.
The names are known without importing PyTorch.

A new attack is a class in the file of its kind and a line in `ATTACKS`; it knows neither methods
nor engines. An `Adversary` decides which clients are malicious and from which round on.
`ClientRuntime` poisons the samples that they train on. `AdversarialEngine`, an engine around any
other, rewrites their reports, from the change that a report adds (`contracts.changes`).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fedbayes.core.lazy import Catalogue, attributes, own_class, placed

if TYPE_CHECKING:
    from fedbayes.federation.attacks.base import Attack, View

__all__ = ["ATTACKS", "Attack", "View", "find_attack"]

__getattr__, __dir__ = attributes(__name__, {"fedbayes.federation.attacks.base": "Attack View"})

ATTACKS: Mapping[str, "type[Attack]"] = Catalogue(
    "fedbayes.federation.attacks",
    {
        "sign-flip": ("changes", "SignFlip"),
        "scaling": ("changes", "Scaling"),
        "gaussian": ("changes", "GaussianNoise"),
        "label-flip": ("poisoning", "LabelFlip"),
        "backdoor": ("poisoning", "Backdoor"),
        "little-is-enough": ("collusion", "LittleIsEnough"),
        "inner-product": ("collusion", "InnerProduct"),
        "stretch": ("collusion", "Stretch"),
        "nan": ("changes", "NotANumber"),
        "huge": ("changes", "Huge"),
        "weight": ("changes", "Weight"),
    },
)
"""Every built-in attack by its name."""


def find_attack(name: str) -> "type[Attack]":
    """The attack class of this name, or of `package.module:Class`.

    Raises:
        ConfigError: there is none.
    """
    place = placed("attack", name, ATTACKS)
    if place in ATTACKS:
        return ATTACKS[place]
    from fedbayes.federation.attacks.base import Attack

    kind: type[Attack] = own_class(place, Attack, "attack")
    return kind
