"""A share of each client's test rows, to calibrate by; the other rows measure the result."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedbayes.core import seeds
from fedbayes.errors import RunError


def check_counted(rows: int, folder: Path) -> None:
    """See that some rows are there to calibrate by.

    Raises:
        RunError: there are none, of all clients of the run.
    """
    if not rows:
        raise RunError(
            f"the clients of {folder} have too few test rows. A client needs two or more"
        )


def divided(
    rows: int, seed: int, client: int, share: float
) -> tuple[Tensor, Tensor, np.random.Generator]:
    """Numbers of a client's test rows: the same for whatever is calibrated by them.

    Args:
        rows: how many there are.
        seed: of the run.
        client: its number.
        share: that is counted.

    Returns:
        Those to calibrate by, the others, and what drew them, for what else is random.
    """
    rng = seeds.numpy_rng(seed, "conformal", client=client)
    order = torch.from_numpy(rng.permutation(rows))
    count = round(share * rows)
    return order[:count], order[count:], rng
