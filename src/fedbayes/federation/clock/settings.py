"""The `[asynchronous]` and `[clock]` tables of a config."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from fedbayes.core.brief import Settings
from fedbayes.core.fields import Only
from fedbayes.federation.clock.rates import FROM_FILE, rate

WIDEST = 10.0
"""Largest standard deviation of a logarithm: beyond, times are no numbers any more."""
_TICKING = Only("speeds", "equal", "log-normal", "file")


class Asynchronous(Settings):
    """The `[asynchronous]` table of a config: rounds that wait for no single client (FedBuff)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    buffer: int | None = Field(
        None,
        ge=1,
        description="reports that an update takes, whoever's come first, while `cohort` clients "
        "are at work at any time; none: the server waits for all of its cohort",
    )
    staleness: Annotated[Literal["polynomial", "constant"], Only("buffer")] = Field(
        "polynomial",
        description="what a change counts that was learnt from the server's state s rounds ago: "
        "polynomial: 1 / (1 + s)^exponent; constant: 1",
    )
    exponent: Annotated[float, Only("buffer"), Only("staleness", "polynomial")] = Field(
        0.5, ge=0, description="of the polynomial staleness weight"
    )
    longest: Annotated[int | None, Only("buffer")] = Field(
        None, ge=0, description="largest staleness whose report is taken, in rounds; none: any"
    )

    @property
    def active(self) -> bool:
        """Whether rounds are asynchronous."""
        return self.buffer is not None

    def weight(self, staleness: int) -> float:
        """What a change of this staleness counts, above 0 and at most 1."""
        if self.staleness == "constant" or not staleness:
            return 1.0
        return float((1.0 + staleness) ** -self.exponent)


class ClockSettings(Settings):
    """The `[clock]` table of a config: simulated time."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    speeds: Literal["none", "equal", "log-normal", "file"] = Field(
        "none",
        description="seconds that clients take for a round: equal; log-normal over clients; file: "
        "those in clock.file; none: no time is simulated",
    )
    seconds: Annotated[float, Only("speeds", "equal", "log-normal")] = Field(
        1.0, gt=0, description="seconds of a client for a round; of log-normal ones, the median"
    )
    spread: Annotated[float, Only("speeds", "log-normal")] = Field(
        1.0,
        ge=0,
        le=WIDEST,
        description="standard deviation over clients of the logarithm of their seconds",
    )
    file: Annotated[Path | None, Only("speeds", "file")] = Field(
        None,
        description="CSV of columns client (its name) and seconds, and of rates where download or "
        "upload is file; a row for every client",
    )
    by_samples: Annotated[bool, _TICKING] = Field(
        False,
        description="whether seconds are those of a client with the mean number of training "
        "samples, and others take as much longer as they have more",
    )
    jitter: Annotated[float, _TICKING] = Field(
        0.0,
        ge=0,
        le=WIDEST,
        description="standard deviation of the logarithm of a client's seconds from round to round",
    )
    download: Annotated[float | str | None, _TICKING] = Field(
        None,
        description="bytes a second that a client receives: a number, text such as 20 MB/s or 8 "
        "Mbit/s, or file: the column download of clock.file; unset: receiving takes no time",
        examples=["20 MB/s", FROM_FILE],
    )
    upload: Annotated[float | str | None, _TICKING] = Field(
        None,
        description="bytes a second that a client sends, as clock.download; of rates that are "
        "spread, both are medians",
        examples=["1 MB/s", FROM_FILE],
    )
    rate_spread: Annotated[float, _TICKING] = Field(
        0.0,
        ge=0,
        le=WIDEST,
        description="standard deviation over clients of the logarithm of their rates, down and up "
        "alike",
    )
    availability: Annotated[Literal["always", "share", "file"], _TICKING] = Field(
        "always",
        description="when clients can start and work: always; share: for one spell in every "
        "period; file: in the spells of clock.spells",
    )
    available: Annotated[float, Only("availability", "share")] = Field(
        0.5, gt=0, le=1, description="length of a client's spell, as a share of the period"
    )
    wave: Annotated[float, Only("availability", "share")] = Field(
        0.0,
        ge=0,
        le=1,
        description="how far spells coincide: 0: as many clients are there at any time; 1: all "
        "come and go together, as by day and night",
    )
    period: Annotated[float, Only("availability", "share", "file")] = Field(
        86400.0, gt=0, description="seconds after which spells come again"
    )
    spells: Annotated[Path | None, Only("availability", "file")] = Field(
        None,
        description="CSV of columns client (its name), start and stop, in seconds of the period; "
        "a row for every spell, and at least one for every client",
    )

    @field_validator("download", "upload", mode="before")
    @classmethod
    def _read_rate(cls, value: Any) -> float | str | None:
        return value if value is None or value == FROM_FILE else rate(value)

    @model_validator(mode="after")
    def _check_rates(self) -> Self:
        told = {"download": self.download, "upload": self.upload}
        if FROM_FILE in told.values() and self.speeds != "file":
            key = next(key for key, value in told.items() if value == FROM_FILE)
            raise ValueError(
                f"{key} = 'file' is a column of clock.file, beside that of seconds: set "
                "clock.speeds = 'file', or give a rate such as '20 MB/s'"
            )
        return self

    @property
    def ticks(self) -> bool:
        """Whether time is simulated."""
        return self.speeds != "none"

    @property
    def carries(self) -> bool:
        """Whether messages take time."""
        return self.ticks and (self.download is not None or self.upload is not None)
