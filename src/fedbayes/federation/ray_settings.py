"""The `[ray]` table of a config. This file imports no PyTorch, and no Ray."""

from pydantic import Field, field_validator

from fedbayes.core.brief import Settings


class RaySettings(Settings):
    """The `[ray]` table of a config: where engine `ray` finds its actors, and what each gets."""

    address: str | None = Field(
        None,
        description="local: start Ray on this machine. auto: the cluster of this machine. "
        "HOST:PORT: the head of a cluster. Unset: the environment variable RAY_ADDRESS, else local",
        examples=["local", "auto"],
    )
    actors: int | None = Field(
        None,
        ge=1,
        description="number of actors. Unset: as many as fit, at most one per client of a round",
    )
    cpus: float | None = Field(
        None,
        gt=0,
        description="CPUs that Ray reserves for each actor. Unset: the number of threads",
    )
    gpus: float = Field(
        0.0,
        ge=0,
        le=1,
        description="GPUs for each actor. 0.25: four actors share one GPU. 0: actors compute on "
        "the CPU",
    )
    resources: dict[str, float] = Field(
        default_factory=dict,
        description="other Ray resources that each actor needs, by name",
    )
    start_timeout: float = Field(
        60.0,
        gt=0,
        description="longest time in seconds to wait for the cluster and the first actor",
    )

    @field_validator("resources")
    @classmethod
    def _check_resources(cls, resources: dict[str, float]) -> dict[str, float]:
        for name, amount in resources.items():
            if name in ("CPU", "GPU"):
                raise ValueError(f"set {name} with ray.{name.lower()}s")
            if amount <= 0:
                raise ValueError(f"{name} is {amount:g}. It must be above 0")
        return resources

    def needs(self, threads: int) -> dict[str, float]:
        """What an actor with this number of threads needs of its node, by Ray's names."""
        cpus = float(threads) if self.cpus is None else self.cpus
        wanted = {"CPU": cpus, "GPU": self.gpus, **self.resources}
        return {name: amount for name, amount in wanted.items() if amount}
