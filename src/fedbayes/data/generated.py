"""Clients whose samples a function of the user's own gives, each when it is asked for."""

from collections.abc import Sequence

import numpy as np
import torch

from fedbayes.core.targets import Target
from fedbayes.core.tensors import Samples
from fedbayes.data.dataset import Array, Rows
from fedbayes.data.federated import FederatedData
from fedbayes.data.numbered import Numbered
from fedbayes.data.partition import Partition
from fedbayes.data.sources.generators import Generator, GeneratorPool
from fedbayes.errors import DataError


class GeneratedData(FederatedData):
    """The clients of a `Generator`, as many as one likes: nothing is kept of each of them.

    Some are looked at before the first round (`test_clients` of the settings). The mean and
    deviation that samples are standardized by are those of their training samples, and the union
    of all test samples is that of theirs: they are the `owners`.
    """

    def __init__(
        self,
        generator: Generator,
        pool: GeneratorPool,
        *,
        statistics: tuple[Array, Array] | None = None,
        target: Target | None = None,
    ) -> None:
        """Take up the clients of a generator.

        Args:
            generator: what gives their samples.
            pool: those that were looked at.
            statistics: mean and deviation to standardize by, instead of the pool's.
            target: what is to be predicted, with the center and scale likewise.
        """
        self._generator, self._looked_at = generator, pool.clients
        trained = int(pool.train_sizes.sum())
        division = Partition(
            np.arange(trained),
            np.concatenate([[0], pool.train_sizes.cumsum()]),
            np.arange(trained, pool.dataset.samples),
            np.concatenate([[0], pool.test_sizes.cumsum()]),
            tuple(f"client-{client}" for client in pool.clients.tolist()),
        )
        super().__init__(pool.dataset, division, generator.seed, statistics, target=target)

    @property
    def clients(self) -> int:
        """Number of clients S that can be trained on."""
        return self._generator.clients

    @property
    def division(self) -> None:
        """Clients divide no pool of samples."""
        return None

    @property
    def names(self) -> Sequence[str]:
        """Names of the clients, and of those beyond them that are only tested on."""
        return Numbered(max(self.clients, int(self._looked_at[-1]) + 1))

    @property
    def owners(self) -> Rows:
        """The clients that were looked at, rising."""
        return self._looked_at

    @property
    def calls(self) -> int:
        """How often the function was called in this process."""
        return self._generator.calls

    def train(self, client: int) -> Samples:
        """Training samples of a client."""
        return self._samples(client, self._generator.split(client)[0])

    def test(self, client: int) -> Samples:
        """Test samples of a client, possibly none."""
        return self._samples(client, self._generator.split(client)[1])

    def all_train(self) -> Samples:
        """What there is none of."""
        raise DataError(
            f"{self._generator.name} gives samples client by client, so no method can pool them"
        )

    def _samples(self, client: int, rows: Rows) -> Samples:
        drawn = self._generator.drawn(client)
        y = self._generator.targets(client, drawn.y, self.target)[rows]
        x = torch.from_numpy(drawn.x[rows]).to(torch.float32, copy=True)
        self.preprocessing.standardize_(x, may_miss=False)
        return Samples(x, torch.from_numpy(y))
