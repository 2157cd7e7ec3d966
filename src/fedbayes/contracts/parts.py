"""What the parts of a report say, and what may therefore be done with them.

A report is a record of parts: trained weights are the part `weights`, other real tensors of the
network `buffers`, integers `counters`, and tensors named `part/name` the part of that name. A
method declares them once. Secure sums, compression, robust rules, noise, staleness and masks follow
from the declaration: no method names any of them.

    class Scaffold(Method[...]):
        reports = Reports(
            {
                "weights": Part(),
                "control": Part(origin="zero", tracked=True, retract=retracted),
                "norms": Part(origin="zero", exact=True),
            }
        )

A value that depends on settings is a function of the method: `typical`, `Reports.remedy`, and
`unless`, which names a property. `Reports.of(method)` has the declaration under its settings.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Self

from fedbayes.contracts.reports import ReportList, Sum
from fedbayes.core.tensors import Tensors, part
from fedbayes.errors import ConfigError

Retract = Callable[[Any, Tensors], Any]
"""From a client's private state, and what of a part did not arrive by name, to the state in which
the client has reported only what did arrive."""

Typical = Callable[[Any, Any, Any], float]
"""From a method, its server's state and the `Federation` to a norm."""


@dataclass(frozen=True)
class Part:
    """What the numbers of one part of a report are.

    Examples:
        >>> from fedbayes.contracts import Part
        >>> Part(origin="zero", tracked=True).origin
        'zero'
    """

    origin: Literal["server", "zero"] = "server"
    """What a change is measured from: what the server has under the same name, or zero."""
    mask: Literal["none", "sent", "chosen"] = "none"
    """Which entries may be missing: none; those that the server left out of its message; or those
    that the client chooses."""
    missing: Literal["unknown", "zero", "unchanged"] = "unknown"
    """What a missing entry says: nothing; that it is zero; or that it is as the server has it."""
    exact: bool = False
    """Whether its numbers must arrive as they were sent, as those that have to be positive. What
    compression leaves of the other parts is right on average."""
    tracked: bool = False
    """Whether clients keep the sum of what they reported. They then shorten a report to the
    server's bounds themselves, and a report counts whole or not at all."""
    retract: Retract | None = None
    """How a tracked part takes back what compression lost. Without it, the part is not
    compressed."""
    linear: bool = True
    """Whether half a change is what half the learning would have reported."""
    joint: str = ""
    """Why its entries mean something only together, so that no middle can be taken entry by entry.
    In words; empty if they mean something one by one."""
    compared: Literal["no", "tensors", "whole"] = "no"
    """Whether norms are compared over a round, so that outlying reports are named: of each tensor,
    or of the whole part. For reports that are not averaged, which no robust rule protects."""
    range: float = 8.0
    """Largest change of an entry under secure aggregation, where the user sets none."""
    typical: Typical | float | None = None
    """The L2 norm that a change of the part is measured by where a cohort tells little
    (`aggregation.max_change`); infinity: it needs no bound. None: that of what the server has of
    it (`Method.origin`)."""
    squared: bool = False
    """Whether its numbers are squares of distances, as second moments are. Its norm is then the
    root of the L2 norm, as honest distances differ by less than their squares."""
    uncompressed: str = ""
    """Why it may not arrive with an error that is right on average, in words; then no part may.
    Empty: it may."""
    unless: str = ""
    """Name of a property of the method: where that is true, reports have no such part."""
    optional: bool = False
    """Whether reports may never have it, or never leave out entries, as where a setting or the
    likelihood decides. The contract tests miss other parts that no report has."""


FEATURES = ("secure sums", "compression", "robust rules", "noise", "asynchronous rounds")
"""What a round can do with reports, as far as these are such that it can."""
NETWORK: Mapping[str, Part] = {
    "buffers": Part(mask="sent", exact=True),
    "counters": Part(mask="sent", exact=True),
}
"""Parts that a network brings, which no method declares."""


@dataclass(frozen=True)
class Reports:
    """What a method's reports are made of, and how the server reduces them.

    Examples:
        >>> from fedbayes.contracts import Part, Reports
        >>> Reports().stale, Reports({"weights": Part(mask="chosen")}).stale
        ('weighed', 'refused')
    """

    parts: Mapping[str, Part] = field(default_factory=lambda: {"weights": Part()})
    """By name; `buffers` and `counters` need no declaration."""
    reduce: Literal["mean", "middle", "set"] = "mean"
    """What the update gets: the weighted sum of the reports, which are forgotten one by one; all
    of them, of which it takes `ReportList.middle`; or all of them."""
    weighted: bool = False
    """Whether a report weighs the samples that its client trained on, whatever the settings. Where
    it is false, a field `weighting` of the method says it; without one, every report weighs 1."""
    counts: tuple[str, ...] = ()
    """Names of tensors that count samples: a report that counts with less weight than it came with
    has less of these, too."""
    pooled: bool = False
    """Whether the one report of a round is of all clients' data, which lie in one place: a
    baseline, not a federation, in which nothing is sent."""
    remedy: Callable[[Any, Any], str] | None = None
    """From the method and the `Federation` to words on which settings of the method make changes
    smaller, where one is longer than it may be."""

    @classmethod
    def of(cls, method: Any) -> Self:
        """The declaration of a method under its settings."""
        declared: Self = method.reports
        if not declared.weighted and getattr(method, "weighting", "uniform") == "samples":
            declared = declared._weighing
        if not declared._conditional:
            return declared
        parts = {
            name: p
            for name, p in declared.parts.items()
            if not (p.unless and getattr(method, p.unless))
        }
        return replace(declared, parts=parts)

    @cached_property
    def _weighing(self) -> Self:
        """The same, of reports that weigh; asked for once for every report of a round."""
        return replace(self, weighted=True)

    @cached_property
    def _conditional(self) -> bool:
        """Whether there are parts under some settings only."""
        return any(p.unless for p in self.parts.values())

    def part(self, name: str) -> Part:
        """The declaration of a part.

        Raises:
            ConfigError: there is none.
        """
        found = self.parts.get(name) or NETWORK.get(name)
        if name == "buffers" and "weights" in self.parts:  # a network is compared whole
            return replace(NETWORK[name], compared=self.parts["weights"].compared)
        if found is None:
            raise ConfigError(
                f"reports have a part {name!r} that the method does not declare. Add it to "
                f"`reports`, which declares {', '.join(self.parts)}"
            )
        return found

    def starts_at_server(self, name: str) -> bool:
        """Whether changes of a part are measured from the server's state."""
        found = self.parts.get(name) or NETWORK.get(name)
        return found is not None and found.origin == "server"

    @property
    def reduction(self) -> type[Sum] | type[ReportList]:
        """What reports are collected in for the update."""
        return Sum if self.reduce == "mean" else ReportList

    @property
    def compared(self) -> bool:
        """Whether norms of some part are compared over a round."""
        return any(p.compared != "no" for p in self.parts.values())

    @property
    def tracked(self) -> bool:
        """Whether clients keep the sum of what they reported of some part."""
        return any(p.tracked for p in self.parts.values())

    @property
    def refusals(self) -> Mapping[str, str]:
        """Why each feature of a round does not support such reports; empty if it does.

        Examples:
            >>> from fedbayes.contracts import Reports
            >>> {name for name, why in Reports(reduce="middle").refusals.items() if not why}
            {'robust rules'}
        """
        adds, parts = self.reduce == "mean", self.parts
        if self.pooled:
            return dict.fromkeys(FEATURES, "it pools all data, and sends nothing")
        sparse = next((name for name, p in parts.items() if p.mask != "none"), "")
        chosen = any(p.mask == "chosen" for p in parts.values())
        single = "" if adds else "the server needs the update of each client, not only their sum"
        lost = "its clients store what they sent, and do not know what compression changed"
        kept = any(p.tracked and p.retract is None for p in parts.values())
        return {
            "secure sums": single or (sparse and f"clients leave out entries of the {sparse}"),
            "compression": next((p.uncompressed for p in parts.values() if p.uncompressed), "")
            or (
                ""
                if adds
                else "its updates are not added, so compression errors do not average out"
            )
            or (lost if kept else ""),
            "robust rules": "" if self.reduce != "set" else self._instead,
            "noise": single,
            "asynchronous rounds": "an update cannot be added to a later state of the server"
            if chosen or not adds
            else "",
        }

    @property
    def _instead(self) -> str:
        """Why robust rules are not for reports that are all needed, and what is in their place."""
        if any(p.missing == "unchanged" for p in self.parts.values()):
            return "the server uses the median or the mean sign of the updates, not their sum"
        return "its updates are not averaged" + (
            "; aggregation.outliers = 'leave-out' rejects outlier networks" if self.compared else ""
        )

    @property
    def stale(self) -> Literal["weighed", "whole", "refused"]:
        """What a report is worth that was learnt from an older state of the server.

        `weighed`: its change adds to the state of today, and may count less. `whole`: it adds, but
        only as it is. `refused`: it says nothing any more.
        """
        if self.refusals["asynchronous rounds"]:
            return "refused"
        return "whole" if any(p.tracked or not p.linear for p in self.parts.values()) else "weighed"

    @property
    def joint(self) -> str:
        """A message why there is no entrywise median; empty if there is one."""
        return next((p.joint for p in self.parts.values() if p.joint), "")

    @property
    def range(self) -> float:
        """Largest change of an entry under secure aggregation, where the user sets none."""
        return max((p.range for p in self.parts.values()), default=0.0)

    def retracted(self, client: Any, missed: Tensors) -> Any:
        """The private state of a client of whose report not all arrived.

        Args:
            client: its state after the report.
            missed: what it reported less what arrived, by `part/name`.
        """
        for name, declared in self.parts.items():
            if declared.retract is not None and (lost := part(missed, name)):
                client = declared.retract(client, lost)
        return client

    def in_states(self, wrapped: Callable[[Retract], Retract]) -> "Reports":
        """The same where private states hold the method's own: `wrapped` acts on these."""
        return replace(
            self,
            parts={
                name: replace(p, retract=wrapped(p.retract)) if p.retract else p
                for name, p in self.parts.items()
            },
        )
