"""Methods whose clients tell how many samples of each class they have."""

from typing import Literal

import torch
from pydantic import Field

from fedbayes.contracts.method import ClientState, Method, Reduced, ServerState, Stateless
from fedbayes.contracts.parts import Part, Reports
from fedbayes.contracts.reports import Report, ReportList
from fedbayes.contracts.run import Federation
from fedbayes.core.messages import dense
from fedbayes.core.tensors import Samples, Tensors
from fedbayes.errors import ConfigError, MessageError

COUNTS = "counts"
"""Name of the counts in a report."""


class CountsClasses(Method[ServerState, ClientState, Reduced]):
    """A method whose clients tell how many samples of each class they have.

    Examples:
        >>> from fedbayes.contracts import CountsClasses
        >>> from fedbayes.methods import METHODS
        >>> issubclass(METHODS["local"], CountsClasses)
        True
    """

    class_shares: Literal["auto"] | bool = Field(
        "auto",
        description="whether clients send their samples of each class, which weight their "
        "outputs. auto: if outputs are classes",
    )

    def check(self, run: Federation) -> None:
        """Shares need an output for each class."""
        super().check(run)
        if self.class_shares is True and not _by_class(run):
            raise ConfigError(
                f"{self.name} weights clients' outputs by their samples of each class, but the "
                f"likelihood {run.likelihood.name} has no output for each class. Set "
                "method.class_shares = false"
            )

    def counts_classes(self, run: Federation) -> bool:
        """Whether clients send their samples of each class."""
        return _by_class(run) if self.class_shares == "auto" else self.class_shares

    def count_pattern(self, run: Federation) -> Tensors:
        """Counts of the right form, all 0."""
        if not self.counts_classes(run):
            return {}
        classes = run.likelihood.target.classes
        return {COUNTS: torch.zeros(1, dtype=torch.int64).expand(classes)}

    def counted(self, samples: Samples, run: Federation) -> Tensors:
        """The counts of a client."""
        if not self.counts_classes(run):
            return {}
        classes = torch.arange(run.likelihood.target.classes, device=samples.y.device)
        return {COUNTS: (samples.y[:, None] == classes).sum(0)}


class ClassCountedMethod(CountsClasses[ServerState, Stateless, ReportList]):
    """A method that gathers reports, weighted by samples, of a network and `counts`, int64 [K].

    Examples:
        >>> from fedbayes.contracts import ClassCountedMethod
        >>> from fedbayes.methods import METHODS
        >>> issubclass(METHODS["fedfuse"], ClassCountedMethod)
        True
    """

    reports = Reports(
        {"weights": Part(compared="tensors")}, reduce="set", weighted=True, counts=(COUNTS,)
    )

    def accept(self, server: ServerState, report: Report, run: Federation) -> None:
        """Counts of classes are not negative, and those of its samples."""
        if not self.counts_classes(run):
            return
        counts = dense(report.tensors)[COUNTS]
        if bool((counts < 0).any()):
            raise MessageError("its counts of classes are negative")
        if (total := sum(counts.tolist())) > report.weight:
            raise MessageError(
                f"its counts of classes sum to {total}, and its weight is {report.weight:g}"
            )


def _by_class(run: Federation) -> bool:
    """Whether there is an output for each class."""
    return run.likelihood.outputs == run.likelihood.target.classes
