"""The `[attack]` table of a config."""

from collections.abc import Collection
from math import isnan
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from fedbayes.core.brief import Settings
from fedbayes.core.fields import Arguments, Only
from fedbayes.core.lazy import placed
from fedbayes.federation.attacks import ATTACKS


class AttackSettings(Settings):
    """The `[attack]` table of a config: what malicious clients do instead of honest training.

    Settings that are unset are as the attack has them (`fedbayes.federation.attacks`).

    Examples:
        >>> from fedbayes.federation.attacks.settings import AttackSettings
        >>> AttackSettings(kind="sign-flip", clients=2).kind
        'sign-flip'
    """

    kind: str = Field(
        "none",
        description=f"attack of the malicious clients: none, {', '.join(ATTACKS)}, or "
        "package.module:Class",
        examples=["none", *ATTACKS],
    )
    clients: int = Field(
        1,
        ge=0,
        description="number of malicious clients; the seed chooses them, the same ones in each "
        "round",
    )
    start: int = Field(1, ge=1, description="first round of the attack")
    scale: Annotated[
        float | None,
        Only(
            "kind",
            *("sign-flip", "scaling", "weight", "inner-product", "stretch"),
            *("label-flip", "backdoor"),
        ),
    ] = Field(
        None,
        description="factor of the malicious change. Default: 10 for scaling, 0.5 of the honest "
        "mean for inner-product, 4.99 of the honest median norm for stretch, 1 for the others. A "
        "negative factor reverses it",
    )
    std: Annotated[float | None, Only("kind", "gaussian")] = Field(
        None,
        gt=0,
        description="standard deviation of the noise that replaces the change. Default: 1",
    )
    z: Annotated[float | None, Only("kind", "little-is-enough")] = Field(
        None,
        description="distance from the honest mean in standard deviations. Default: as in the "
        "paper, from the numbers of clients and malicious clients of the round",
    )
    share: Annotated[float | None, Only("kind", "label-flip", "backdoor")] = Field(
        None,
        gt=0,
        le=1,
        description="share of a malicious client's samples that it poisons. Default: 1 for "
        "label-flip, 0.5 for backdoor",
    )
    target: Annotated[int | None, Only("kind", "backdoor")] = Field(
        None, ge=0, description="target class of the backdoor pattern, counted from 0. Default: 0"
    )
    size: Annotated[int | None, Only("kind", "backdoor")] = Field(
        None,
        ge=1,
        description="side of the pattern, a bright square in the lower right corner; for tables, "
        "the number of last features that it sets. Default: 3",
    )
    level: Annotated[float | None, Only("kind", "backdoor")] = Field(
        None, description="value of the pattern, in standard deviations above the mean. Default: 3"
    )
    arguments: Arguments = Field({}, description="fields of your own attack (package.module:Class)")

    @field_validator("kind", mode="before")
    @classmethod
    def _no_number(cls, kind: Any) -> Any:
        """`nan` without quotes is a number in TOML."""
        return "nan" if isinstance(kind, float) and isnan(kind) else kind

    @field_validator("kind")
    @classmethod
    def _known(cls, kind: str) -> str:
        """The name alone: what it stands for imports PyTorch, and may be a user's own code."""
        return placed("attack", kind, ("none", *ATTACKS))

    @model_validator(mode="after")
    def _own_arguments(self) -> Self:
        if self.arguments and ":" not in self.kind:
            raise ValueError(
                "attack.arguments works only with your own attack, kind = "
                f"'package.module:Class'. Set those of {self.kind} in [attack] itself, such as "
                "attack.scale"
            )
        return self

    @property
    def active(self) -> bool:
        """Whether there is any attack."""
        return self.kind != "none" and self.clients > 0

    def fields(self, known: Collection[str]) -> dict[str, Any]:
        """Fields of the attack's class that are set, by name.

        Args:
            known: fields of the class; other fields that are set have no effect.
        """
        if ":" in self.kind:
            return self.arguments
        own = self.model_dump(exclude_none=True)
        return {name: own[name] for name in known if name in own}
