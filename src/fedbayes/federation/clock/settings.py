"""The `[asynchronous]` and `[clock]` tables of a config."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from fedbayes.core.brief import Settings
from fedbayes.core.fields import Only
from fedbayes.federation.clock.rates import FROM_FILE, rate

WIDEST = 10.0
"""Largest standard deviation of a logarithm: beyond, times are no numbers any more."""
_TICKING = Only("speeds", "equal", "log-normal", "file")


class Asynchronous(Settings):
    """The `[asynchronous]` table of a config: rounds that wait for no single client (FedBuff)."""

    buffer: int | None = Field(
        None,
        ge=1,
        description="number of updates that the server waits for in an asynchronous round, while "
        "clients_per_round clients work at any time. Unset: it waits for all clients of the round",
    )
    staleness: Annotated[Literal["polynomial", "constant"], Only("buffer")] = Field(
        "polynomial",
        description="weight of an update that started from the server's state s rounds ago. "
        "polynomial: 1 / (1 + s)^exponent. constant: 1",
    )
    exponent: Annotated[float, Only("buffer"), Only("staleness", "polynomial")] = Field(
        0.5, ge=0, description="exponent of the polynomial staleness weight"
    )
    longest: Annotated[int | None, Only("buffer")] = Field(
        None, ge=0, description="largest accepted staleness in rounds. Unset: no limit"
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

    speeds: Literal["none", "equal", "log-normal", "file"] = Field(
        "none",
        description="simulated time of clients per round. equal: the same for all. log-normal: "
        "over clients. file: from clock.file. none: no simulated time",
    )
    seconds: Annotated[float, Only("speeds", "equal", "log-normal")] = Field(
        1.0, gt=0, description="seconds of a client per round; with log-normal, the median"
    )
    spread: Annotated[float, Only("speeds", "log-normal")] = Field(
        1.0,
        ge=0,
        le=WIDEST,
        description="standard deviation of the logarithm of the clients' seconds",
    )
    file: Annotated[Path | None, Only("speeds", "file")] = Field(
        None,
        description="CSV file with the columns client (its name) and seconds, one row per client; "
        "also the rates, if download or upload is file",
    )
    by_samples: Annotated[bool, _TICKING] = Field(
        False,
        description="whether a client's seconds are proportional to its number of training "
        "samples; clock.seconds is then for the mean number",
    )
    jitter: Annotated[float, _TICKING] = Field(
        0.0,
        ge=0,
        le=WIDEST,
        description="standard deviation of the logarithm of a client's seconds over rounds",
    )
    download: Annotated[float | str | None, _TICKING] = Field(
        None,
        description="download rate of a client in bytes per second: a number, text such as 20 MB/s "
        "or 8 Mbit/s, or file (the column download of clock.file). Unset: downloads take no time",
        examples=["20 MB/s", FROM_FILE],
    )
    upload: Annotated[float | str | None, _TICKING] = Field(
        None,
        description="upload rate of a client, as clock.download. With clock.rate_spread both rates "
        "are medians",
        examples=["1 MB/s", FROM_FILE],
    )
    rate_spread: Annotated[float, _TICKING] = Field(
        0.0,
        ge=0,
        le=WIDEST,
        description="standard deviation of the logarithm of the clients' rates",
    )
    availability: Annotated[Literal["always", "share", "file"], _TICKING] = Field(
        "always",
        description="when clients are available. always. share: once in each period. file: at the "
        "times in clock.spells",
    )
    available: Annotated[float, Only("availability", "share")] = Field(
        0.5, gt=0, le=1, description="share of the period in which a client is available"
    )
    wave: Annotated[float, Only("availability", "share")] = Field(
        0.0,
        ge=0,
        le=1,
        description="synchrony of the clients' availability. 0: spread evenly over the period. 1: "
        "all clients at the same time, as by day and night",
    )
    period: Annotated[float, Only("availability", "share", "file")] = Field(
        86400.0, gt=0, description="length of the period in seconds"
    )
    spells: Annotated[Path | None, Only("availability", "file")] = Field(
        None,
        description="CSV file with the columns client (its name), start and stop, in seconds of "
        "the period; at least one row per client",
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
                f"{key} = 'file' needs clock.file, which has a column for it and one for seconds. "
                "Set clock.speeds = 'file', or give a rate such as '20 MB/s'"
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
