"""A share of each client's test rows, to calibrate by; the others tell what came of it."""

from dataclasses import dataclass

import torch

from fedbayes import seeds
from fedbayes.errors import ConfigError
from fedbayes.tensors import Samples


@dataclass(frozen=True)
class HeldOut:
    """A client's test rows."""

    counted: Samples
    """To calibrate by."""
    rest: Samples
    """To try it on."""

    @classmethod
    def of(cls, samples: Samples, seed: int, client: int, share: float) -> "HeldOut":
        """Divide them: the same rows for whatever is calibrated, since the seed draws them.

        Args:
            samples: all of them.
            seed: of the run.
            client: its number.
            share: that is counted.

        Raises:
            ConfigError: the share is none.
        """
        if not 0 < share < 1:
            raise ConfigError(f"a share of {share} of the test rows: give one above 0 and below 1")
        order = seeds.numpy_rng(seed, "conformal", client=client).permutation(len(samples.y))
        rows = round(share * len(order))
        first, rest = (torch.from_numpy(part) for part in (order[:rows], order[rows:]))
        return cls(
            Samples(samples.x[first], samples.y[first]), Samples(samples.x[rest], samples.y[rest])
        )
