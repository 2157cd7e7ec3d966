"""The `[aggregation]`, `[secure]` and `[compression]` tables of a config."""

from typing import Annotated, Literal

from pydantic import Field

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
    """The `[aggregation]` table of a config: bounds of updates, and how they are combined.

    Examples:
        >>> from fedbayes.federation.settings import Aggregation
        >>> Aggregation(rule="trimmed-mean").rule
        'trimmed-mean'
    """

    rule: Rule = Field(
        "mean",
        description="how updates are aggregated. mean. median: of each weight. trimmed-mean: of "
        "each weight, without the `hostile` largest and smallest values. krum: the mean of the "
        "updates nearest to their neighbours",
    )
    hostile: Annotated[int, Only("rule", "trimmed-mean", "krum")] = Field(
        0,
        ge=0,
        description="number of malicious clients that the rule withstands (trimmed-mean, "
        "krum). median: always half of the clients",
    )
    clip: float | None = Field(
        None,
        gt=0,
        description="largest L2 norm of a client's change; larger changes are scaled down",
    )

    max_change: float = Field(
        5.0,
        ge=0,
        description="largest norm of each part of a client's change, as a multiple of the round's "
        "median. Larger updates are rejected. 0: no limit",
    )
    max_weight: float = Field(
        1_000_000.0,
        gt=0,
        description="largest weight of an update, if weights are numbers of samples. Updates with "
        "a larger weight are rejected",
    )

    outliers: Literal["name", "leave-out"] = Field(
        "name",
        description="outlier networks of a round, for methods that match or combine networks, and "
        "control variates of scaffold. name: report them. leave-out: "
        "also leave them out",
    )

    @property
    def weighs(self) -> bool:
        """Whether the bound applies to weight times change."""
        return self.rule == "mean" and self.clip is not None

    @property
    def plain(self) -> bool:
        """Whether updates are used unchanged."""
        return self.rule == "mean" and self.clip is None


class Secure(Settings):
    """The `[secure]` table of a config, for methods whose reports are summed whole.

    Examples:
        >>> from fedbayes.federation.settings import Secure
        >>> Secure(enabled=True, threshold=3).threshold
        3
    """

    enabled: bool = Field(
        False, description="whether the server sees only the sum of the updates (flower engines)"
    )
    threshold: Annotated[int | None, Only("enabled", True)] = Field(
        None,
        ge=2,
        description="number of share holders that must stay until the sum is revealed. Default: "
        "more than half",
    )
    shares: Annotated[int | None, Only("enabled", True)] = Field(
        None,
        ge=3,
        description="number of clients that hold shares of a client's keys (odd). Default: the "
        "whole cohort",
    )
    range: Annotated[float | None, Only("enabled", True)] = Field(
        None,
        gt=0,
        description="largest change of a number. Default: aggregation.clip, else what the method "
        "declares: 8 for weights, 65536 for natural parameters",
    )
    levels: Annotated[int | None, Only("enabled", True)] = Field(
        None,
        ge=2,
        le=MOST_LEVELS,
        description="number of quantization levels from -range to range. Default: the most that "
        "fit (2**29 for 4 clients)",
    )
    max_weight: Annotated[float, Only("enabled", True)] = Field(
        100_000.0,
        gt=0,
        description="largest weight of an update, if weights are numbers of samples",
    )


class Compression(Settings):
    """The `[compression]` table of a config: in how many bytes numbers of messages are sent, for
    methods whose reports add.

    Examples:
        >>> from fedbayes.federation.settings import Compression
        >>> Compression(up="int8").up
        'int8'
    """

    up: Literal["none", "bf16", "int8", "top-k", "random-k"] = Field(
        "none",
        description="compression of updates. none: 4 bytes a number. bf16: 2 bytes a number. int8: "
        "1 byte a number. top-k: the `share` of numbers that changed most, with their positions. "
        "random-k: a random share, given by the seed",
    )
    down: Literal["none", "bf16"] = Field(
        "none",
        description="compression of the server's weights. none: 4 bytes a number. bf16: 2 bytes a "
        "number; the server keeps the full precision",
    )
    share: Annotated[float, Only("up", "top-k", "random-k")] = Field(
        0.01, gt=0, lt=1, description="share of the numbers of a tensor to send (top-k, random-k)"
    )
    error_feedback: Annotated[bool, Only("up", "int8", "top-k", "random-k")] = Field(
        True,
        description="whether a client stores the compression error in its private state and adds "
        "it to its next change",
    )

    @property
    def active(self) -> bool:
        """Whether anything is compressed."""
        return self.up != "none" or self.down != "none"

    @property
    def remembers(self) -> bool:
        """Whether clients store their compression error."""
        return self.error_feedback and self.up in ("int8", "top-k", "random-k")


AS_IT_IS = Compression()
"""Nothing is compressed."""
