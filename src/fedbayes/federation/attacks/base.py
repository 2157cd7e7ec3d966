"""What an attack is."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict

from fedbayes.contracts import AnyMethod, Federation, Report, RoundContext
from fedbayes.core.tensors import Samples, Tensors
from fedbayes.federation.attacks.shifts import changes, shifted


@dataclass(frozen=True)
class View:
    """What a malicious client sees in a round.

    Examples:
        >>> from fedbayes.federation.attacks import View
        >>> from fedbayes.methods import METHODS
        >>> View(METHODS["fedavg"](), server=None, at=None).hostile
        1
    """

    method: AnyMethod
    """The method of the run."""
    server: Any
    """The server's state, of which the client was sent a message."""
    at: RoundContext
    """The round and the client."""
    honest: list[Tensors] = field(default_factory=list)
    """Of each honest client of the round, what its report adds (as `changes`); empty unless the
    attack is one by `collusion`."""
    hostile: int = 1
    """Number of malicious clients in the round, if the attack is one by `collusion`."""

    @property
    def rng(self) -> torch.Generator:
        """Random numbers for what the client reports: the same whenever the round is run."""
        return self.at.rng("attack on reports")

    def changes(self, report: Report) -> Tensors:
        """The changes of a report relative to a client without training.

        Returns:
            By name of the report's tensors of real numbers, float64, in their dense shapes; NaN
            where the report says nothing, as at units that it leaves out.
        """
        return changes(self.method, report, self.server, self.at.run)

    def shifted(self, report: Report, wanted: Tensors) -> Report:
        """Return a report of the same form with these changes.

        Args:
            report: the report to start from; what it leaves out stays out.
            wanted: as from `changes`; tensors whose names are missing stay as they are.
        """
        return shifted(report, self.changes(report), wanted)


class Attack(BaseModel):
    """What a malicious client does; fields are its parameters, functions are pure.

    An attack on data overrides `poison`: the client then trains honestly on what it returns. An
    attack on reports overrides `report`, which gets the client's honest answer. One may do both.

        class Shrink(Attack):
            summary = "reports a part of its change"

            share: float = 0.1

            def report(self, report: Report, view: View) -> Report:
                changes = view.changes(report)
                return view.shifted(report, {n: self.share * t for n, t in changes.items()})

    It is used as `kind = "my_module:Shrink"` in the `[attack]` table, its fields in
    `[attack.arguments]`. The engine encodes and sends its report like any other, and the server may
    reject it.

    Examples:
        >>> from fedbayes.federation.attacks import Attack
        >>> class Shrink(Attack):
        ...     summary = "sends a part of its change"
        ...     share: float = 0.1
        ...
        ...     def report(self, report, view):
        ...         changes = view.changes(report)
        ...         return view.shifted(report, {n: self.share * t for n, t in changes.items()})
        >>> Shrink(share=0.5).share
        0.5
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    summary: ClassVar[str] = ""
    """One line for lists."""
    paper: ClassVar[str] = ""
    """Where it comes from."""
    collusion: ClassVar[bool] = False
    """Whether malicious clients know the honest reports of the round before they send their own:
    `View.honest`. The server's process then holds the reports of a whole round."""
    on_classes: ClassVar[bool] = False
    """Whether it is for targets that are classes alone."""

    def check(self, run: Federation, shape: tuple[int, ...]) -> None:
        """Reject runs that it cannot attack, before the first round.

        Args:
            run: what no round changes.
            shape: of one sample.

        Raises:
            ConfigError: says which setting, and what would do.
        """
        return None

    def remarks(self, clients: int, cohort: int) -> list[str]:
        """What a user should know before the first round, a sentence each.

        Args:
            clients: number of malicious clients.
            cohort: number of clients in a round.
        """
        return []

    def poison(self, samples: Samples, run: Federation, rng: torch.Generator) -> Samples:
        """Return the samples that a malicious client trains on, instead of its own.

        Args:
            samples: its own.
            run: what no round changes.
            rng: of this client in this round.
        """
        return samples

    def report(self, report: Report, view: View) -> Report:
        """Return the report of a malicious client."""
        return report

    def triggered(self, samples: Samples) -> Samples | None:
        """Test samples that the attack wants to be misclassified, with its target.

        Args:
            samples: as they are; those whose target stays the same do not count.

        Returns:
            The samples to try the global model on; None for an attack without such an aim.
        """
        return None

    @property
    def on_reports(self) -> bool:
        """Whether it changes reports."""
        return type(self).report is not Attack.report
