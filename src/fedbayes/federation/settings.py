"""The `[aggregation]`, `[secure]` and `[compression]` tables of a config."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from fedbayes.core.brief import Settings
from fedbayes.core.fields import Only

MODULUS = 2**32
"""Masked numbers are known up to multiples of it."""
FEWEST = 3
"""Clients in a cohort: of two, each knows the other's report from the sum."""
MOST_LEVELS = 2**30
"""Flower rounds to 32-bit integers."""


Rule = Literal["mean", "median", "trimmed-mean", "krum"]
"""What stands for the reports of a round."""


class Aggregation(Settings):
    """The `[aggregation]` table of a config: what is believed of reports, and how they are put
    together.

    Examples:
        >>> from fedbayes.federation.settings import Aggregation
        >>> Aggregation(rule="trimmed-mean").rule
        'trimmed-mean'
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    rule: Rule = Field(
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

    max_change: float = Field(
        5.0,
        ge=0,
        description="longest change, by part of a report, as a multiple of the round's median; a "
        "longer one is refused; 0: no bound",
    )
    max_weight: float = Field(
        1_000_000.0,
        gt=0,
        description="largest weight of a report, where weights are numbers of samples; a report "
        "with a larger one is refused",
    )

    outliers: Literal["name", "leave-out"] = Field(
        "name",
        description="what is done with networks that are unlike the others of a round, under "
        "methods that match or combine whole ones, and with control variates of scaffold: name "
        "them, or leave them out too",
    )

    @property
    def weighs(self) -> bool:
        """Whether weight times change is what is bounded."""
        return self.rule == "mean" and self.clip is not None

    @property
    def plain(self) -> bool:
        """Whether reports are taken as they are."""
        return self.rule == "mean" and self.clip is None


class Secure(Settings):
    """The `[secure]` table of a config, for methods whose reports are summed whole.

    Examples:
        >>> from fedbayes.federation.settings import Secure
        >>> Secure(enabled=True, threshold=3).threshold
        3
    """

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
        description="largest change of a weight; aggregation.clip by default, or 8 (of natural "
        "parameters 65536)",
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


class Compression(Settings):
    """The `[compression]` table of a config: in how many bytes numbers of messages are sent, for
    methods whose reports add.

    Examples:
        >>> from fedbayes.federation.settings import Compression
        >>> Compression(up="int8").up
        'int8'
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    up: Literal["none", "bf16", "int8", "top-k", "random-k"] = Field(
        "none",
        description="how clients send what they changed: none: whole weights, as they are; bf16: "
        "2 bytes a number; int8: 1 byte; top-k: the `share` of numbers that changed most, with "
        "their places; random-k: a share drawn by the seed",
    )
    down: Literal["none", "bf16"] = Field(
        "none",
        description="how the server sends weights: none: as they are; bf16: 2 bytes a number, "
        "while it keeps them as they are",
    )
    share: Annotated[float, Only("up", "top-k", "random-k")] = Field(
        0.01, gt=0, lt=1, description="share of a tensor's numbers that are sent (top-k, random-k)"
    )
    error_feedback: Annotated[bool, Only("up", "int8", "top-k", "random-k")] = Field(
        True,
        description="whether a client keeps what it could not say, in its private state, and adds "
        "it to its next change",
    )

    @property
    def active(self) -> bool:
        """Whether anything is compressed."""
        return self.up != "none" or self.down != "none"

    @property
    def remembers(self) -> bool:
        """Whether clients keep what they could not say."""
        return self.error_feedback and self.up in ("int8", "top-k", "random-k")


AS_IT_IS = Compression()
"""Nothing is compressed."""
