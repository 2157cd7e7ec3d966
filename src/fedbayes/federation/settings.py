"""The `[aggregation]` and `[secure]` tables of a config."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from fedbayes.errors import ConfigError
from fedbayes.fields import Only

if TYPE_CHECKING:
    from fedbayes.contracts import AnyMethod, Sum
    from fedbayes.federation.aggregation import Noise
    from fedbayes.federation.secure import Plan
    from fedbayes.messages import Message
    from fedbayes.models import Network
    from fedbayes.tensors import Tensors

MODULUS = 2**32
"""Masked numbers are known up to multiples of it."""
FEWEST = 3
"""Clients in a cohort: of two, each knows the other's report from the sum."""
MOST_LEVELS = 2**30
"""Flower rounds to 32-bit integers."""


class Aggregation(BaseModel):
    """The `[aggregation]` table of a config, for methods that average weights."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    rule: Literal["mean", "median", "trimmed-mean", "krum"] = Field(
        "mean",
        description="mean; median: of every weight; trimmed-mean: of every weight, without the "
        "`hostile` largest and smallest; krum: mean of the reports nearest to their neighbours",
    )
    hostile: Annotated[int, Only("rule", "trimmed-mean", "krum")] = Field(
        0, ge=0, description="clients that may be hostile (trimmed-mean, krum); median: half"
    )
    clip: float | None = Field(
        None, gt=0, description="largest L2 norm of what a client changes; a longer change shrinks"
    )
    noise: float = Field(
        0.0,
        ge=0,
        description="noise multiplier z: Gaussian noise of deviation z · clip on the sum of the "
        "changes (central differential privacy)",
    )
    delta: Annotated[float, Only("noise")] = Field(
        1e-5, gt=0, lt=1, description="δ of differential privacy"
    )

    @property
    def plain(self) -> bool:
        """Whether reports are taken as they are."""
        return self.rule == "mean" and self.clip is None

    def check(
        self, method: "AnyMethod", network: "Network", min_reports: int, checkpoint_every: int
    ) -> None:
        """See that the settings go together, and with the rest.

        Raises:
            ConfigError: they do not; the text says what would.
        """
        from fedbayes.contracts import PointEstimate

        if self.noise and (self.clip is None or self.rule != "mean"):
            raise ConfigError("aggregation.noise needs aggregation.clip and rule = 'mean'")
        if self.noise and checkpoint_every > 1:
            raise ConfigError(
                "aggregation.noise needs checkpoint_every = 1: rounds that were run again after "
                "a kill would tell more than ε says"
            )
        running = [n for n in sorted(network.buffers) if network.initial[n].is_floating_point()]
        if self.noise and running:
            raise ConfigError(
                f"aggregation.noise would go on running statistics too ({running[0]!r}), and might "
                "make a variance negative; use GroupNorm or LayerNorm in place of BatchNorm"
            )
        if self.plain:
            return
        if not isinstance(method, PointEstimate) or method.pooled:
            raise ConfigError(
                f"[aggregation] is for methods that average weights (fedavg, fedprox, reptile, "
                f"fedavgm, fedadam, fedyogi); {method.name} does not"
            )
        least = {"trimmed-mean": 2 * self.hostile + 1, "krum": 2 * self.hostile + 3}
        if min_reports < least.get(self.rule, 1):
            raise ConfigError(
                f"aggregation.rule = {self.rule!r} with hostile = {self.hostile} needs "
                f"min_reports of at least {least[self.rule]}; it is {min_reports}"
            )

    def reduction(self, broadcast: "Message", cohort: int, noise: "Noise") -> "Sum":
        """What folds the reports of one round.

        Args:
            broadcast: what the server sent to all.
            cohort: number of clients that it was sent to.
            noise: where noise comes from.
        """
        from fedbayes.federation.aggregation import Clipped, Private, Robust
        from fedbayes.messages import dense

        centre = dense(broadcast)
        if self.noise:
            return Private(centre, float(self.clip or 0), self.noise, cohort, noise)
        if self.rule == "mean":
            return Clipped(centre, float(self.clip or 0))
        return Robust(self.rule, self.hostile, centre, self.clip)


class Secure(BaseModel):
    """The `[secure]` table of a config, for methods whose reports are summed whole."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    enabled: bool = Field(
        False, description="whether the server sees the sum of the reports alone (flower engines)"
    )
    threshold: Annotated[int | None, Only("enabled", True)] = Field(
        None,
        ge=2,
        description="clients (of those that hold shares) who must stay until the sum is open; "
        "more than half by default",
    )
    shares: Annotated[int | None, Only("enabled", True)] = Field(
        None,
        ge=3,
        description="shares of a client's keys, one for each of so many clients (odd); the whole "
        "cohort by default",
    )
    range: Annotated[float | None, Only("enabled", True)] = Field(
        None,
        gt=0,
        description="largest change of a weight; aggregation.clip by default, or 8",
    )
    levels: Annotated[int | None, Only("enabled", True)] = Field(
        None,
        ge=2,
        le=MOST_LEVELS,
        description="steps from -range to range; as many as fit by default (2**29 for 4 clients)",
    )
    max_weight: Annotated[float, Only("enabled", True)] = Field(
        100_000.0,
        gt=0,
        description="largest weight of a report, where weights are numbers of samples",
    )

    def check(
        self,
        method: "AnyMethod",
        aggregation: Aggregation,
        initial: "Tensors",
        *,
        engine: str,
        cohort: int,
    ) -> None:
        """See that what is asked for can be done.

        Args:
            method: the method of the run.
            aggregation: what else is done with reports.
            initial: the network's weights and buffers.
            engine: name of the engine.
            cohort: number of clients in a round.

        Raises:
            ConfigError: it cannot; the text says what could.
        """
        if not self.enabled:
            return
        if engine not in ("flower", "flower-simulation"):
            raise ConfigError(
                "secure.enabled needs Flower's protocol: engine = 'flower-simulation', or "
                f"`fedbayes federate`; engine is {engine!r}"
            )
        if not method.summable or method.pooled:
            raise ConfigError(
                "secure.enabled is for methods whose reports are summed whole (fedavg, fedprox, "
                f"reptile, fedavgm, fedadam, fedyogi, scaffold); {method.name} needs to see single "
                "reports, or reports are sparse"
            )
        if aggregation.rule != "mean":
            raise ConfigError(
                f"aggregation.rule = {aggregation.rule!r} needs to see single reports, which "
                "secure.enabled hides; have one or the other"
            )
        whole = sorted(name for name, t in initial.items() if not t.is_floating_point())
        if whole:
            raise ConfigError(
                f"secure.enabled adds real numbers alone; {whole[0]!r} of this model holds "
                f"{initial[whole[0]].dtype}"
            )
        self._check_sizes(cohort)

    def _check_sizes(self, cohort: int) -> None:
        if cohort < FEWEST:
            raise ConfigError(
                f"secure.enabled needs a cohort of at least {FEWEST} clients; it is {cohort}"
            )
        shares = cohort if self.shares is None else self.shares
        if shares > cohort or (shares < cohort and shares % 2 == 0):
            raise ConfigError(
                f"secure.shares is {shares}; it must be odd and at most the cohort of {cohort}"
            )
        most = shares if shares == cohort else shares - 1
        if self.threshold is not None and self.threshold > most:
            raise ConfigError(
                f"secure.threshold is {self.threshold}; with {shares} shares and a cohort of "
                f"{cohort} it is at most {most}"
            )
        if self.levels is not None and self.levels * cohort >= MODULUS:
            raise ConfigError(
                f"secure.levels is {self.levels}; with a cohort of {cohort} a sum can hold at most "
                f"{(MODULUS - 1) // cohort}"
            )

    def plan(self, method: "AnyMethod", aggregation: Aggregation, cohort: int) -> "Plan | None":
        """What server and clients go by; None without secure aggregation."""
        from fedbayes.federation.secure import Plan

        if not self.enabled:
            return None
        shares = cohort if self.shares is None else self.shares
        # Half of what a sum can hold: one that comes out above was tampered with.
        most = 2 ** ((MODULUS // 2 // cohort).bit_length() - 1)
        weighted = getattr(method, "weighting", "uniform") == "samples" and not aggregation.noise
        return Plan(
            shares=shares,
            threshold=self.threshold or shares // 2 + 1,
            range=self.range or aggregation.clip or 8.0,
            levels=self.levels or min(most, MOST_LEVELS),
            max_weight=self.max_weight if weighted else 0.0,
            clip=aggregation.clip or 0.0,
        )
