"""How learning rates change over rounds, at the clients and at the server."""

import math
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, BaseModel, Field
from pydantic.json_schema import WithJsonSchema
from pydantic_core import PydanticCustomError

from fedbayes.core.fields import Only
from fedbayes.core.lazy import named, raised
from fedbayes.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

SCHEDULES = ("constant", "exponential", "step", "cosine")
"""Those that a config may name without code of its own."""


def _known(name: str) -> str:
    if name not in SCHEDULES and ":" not in name:
        known = ", ".join(SCHEDULES)
        text = "it must be one of {known}, or package.module:function"
        raise PydanticCustomError("one_of", text, {"known": known})
    return name


Schedule = Annotated[
    str, AfterValidator(_known), WithJsonSchema({"type": "string", "examples": list(SCHEDULES)})
]
"""The name of a schedule, or `package.module:function`: of a round, from 1, and the number of
rounds to the factor of the learning rate, above 0."""


def factor(schedule: str, decay: float, decay_every: int, round: int, rounds: int) -> float:
    """What a learning rate is multiplied by in a round.

    Args:
        schedule: its name, or `package.module:function`.
        decay: factor per round (exponential) or per `decay_every` rounds (step).
        decay_every: rounds between decays (step).
        round: from 1.
        rounds: of the run.

    Raises:
        ConfigError: the user's own function is not to be found, raises, or gives no number above 0.
    """
    past = round - 1
    match schedule:
        case "constant":
            return 1.0
        case "exponential":
            return decay**past
        case "step":
            return decay ** (past // decay_every)
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * past / max(rounds, 1)))
    return _own_factor(schedule, round, rounds)


def _own_factor(place: str, round: int, rounds: int) -> float:
    """The factor that a user's own function gives."""
    function: Callable[[int, int], object] = named(place, "schedule")
    try:
        found = float(function(round, rounds))  # type: ignore[arg-type]
    except Exception as error:
        raise ConfigError(
            f"the schedule {place} fails in round {round} of {rounds}: {raised(error, place)}"
        ) from error
    if not (math.isfinite(found) and found > 0):
        raise ConfigError(
            f"the schedule {place} returns {found:g} in round {round} of {rounds}. Return a "
            "finite number above 0"
        )
    return found


class ServerSchedule(BaseModel):
    """The hyperparameters of a method whose server's learning rate may change over rounds."""

    server_schedule: Schedule = Field(
        "constant",
        description="schedule of the server's learning rate over rounds: constant, exponential, "
        "step, cosine, or package.module:function of a round and the number of rounds",
        examples=list(SCHEDULES),
    )
    server_decay: Annotated[float, Only("server_schedule", "exponential", "step")] = Field(
        0.99, gt=0, le=1, description="factor per round, or per server_decay_every (step)"
    )
    server_decay_every: Annotated[int, Only("server_schedule", "step")] = Field(
        10, ge=1, description="rounds between decays (step)"
    )

    def server_factor(self, round: int, rounds: int) -> float:
        """What the server's learning rate is multiplied by in round `round` (from 1) of `rounds`.

        Raises:
            ConfigError: as for `factor`.
        """
        settings = self.server_schedule, self.server_decay, self.server_decay_every
        return factor(*settings, round, rounds)
