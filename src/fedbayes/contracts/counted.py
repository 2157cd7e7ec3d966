"""Methods whose clients report networks and how many samples of each class they have."""

import torch
from pydantic import Field

from fedbayes.contracts.method import Method, Nothing, ServerState
from fedbayes.contracts.reports import Gathered, Report
from fedbayes.contracts.run import Run
from fedbayes.errors import ConfigError, MessageError
from fedbayes.messages import Message, dense
from fedbayes.tensors import Samples, Tensors

COUNTS = "counts"
"""Name of the counts in a report."""


class Counted(Method[ServerState, Nothing, Gathered]):
    """Reports are gathered, weighted by samples, and hold `counts`, int64 [K], beside networks."""

    reduction = Gathered

    class_shares: bool = Field(
        True, description="clients tell their samples of each class, which weights their outputs"
    )

    @property
    def weighted(self) -> bool:
        """By numbers of samples, which counts of classes add up to."""
        return True

    def check(self, run: Run) -> None:
        """Shares need an output for each class, and networks all that predicts.

        Raises:
            ConfigError: the target has no classes whose shares clients could tell, or noise is
                learnt behind the network.
        """
        if run.likelihood.head() is not None:
            raise ConfigError(
                f"{self.name} has no place for noise that is learnt behind the network; set "
                f"task.likelihood = '{run.likelihood.name}', and task.noise = 'each', or to a "
                "number"
            )
        if self.class_shares and run.likelihood.outputs != run.likelihood.target.classes:
            raise ConfigError(
                f"{self.name} weights clients' outputs by their samples of each class, and under "
                f"the likelihood {run.likelihood.name} there is no output for each class; set "
                "method.class_shares = false"
            )

    def count_pattern(self, run: Run) -> Message:
        """What a proper report holds of counts."""
        if not self.class_shares:
            return {}
        classes = run.likelihood.target.classes
        return {COUNTS: torch.zeros(1, dtype=torch.int64).expand(classes)}

    def counted(self, samples: Samples, run: Run) -> Tensors:
        """The counts of a client."""
        if not self.class_shares:
            return {}
        classes = run.likelihood.target.classes
        return {COUNTS: torch.bincount(samples.y.cpu(), minlength=classes)}

    def accept(self, server: ServerState, report: Report, run: Run) -> None:
        """Counts of classes are not negative, and those of its samples."""
        if not self.class_shares:
            return
        counts = dense(report.tensors)[COUNTS]
        if bool((counts < 0).any()):
            raise MessageError("its counts of classes are negative")
        if (total := sum(counts.tolist())) > report.weight:
            raise MessageError(
                f"its counts of classes come to {total}, and its weight is {report.weight:g}"
            )

    def reweighted(self, report: Report, weight: float) -> Report:
        """Counts of classes are lowered in proportion."""
        tensors = dict(report.tensors)
        if self.class_shares:
            counts = dense(report.tensors)[COUNTS].double()
            tensors[COUNTS] = (counts * (weight / report.weight)).to(torch.int64)
        return Report(tensors, weight)

    def compared(self, report: Report, run: Run) -> Tensors:
        """The network."""
        return {n: t for n, t in dense(report.tensors).items() if n != COUNTS}
