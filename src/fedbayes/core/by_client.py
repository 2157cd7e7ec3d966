"""Numbers of the clients that something is known of: arrays that grow with these alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbayes.core.tensors import Tensors

NOBODY = torch.empty(0, dtype=torch.int64)
"""No clients."""


@dataclass(frozen=True)
class ByClient:
    """A table with a row for each client that something is known of.

    A federation may have a million clients, and a round a hundred of them: what is kept, copied
    and stored between rounds has as many rows as clients have had a part.
    """

    clients: Tensor = NOBODY
    """Their indices, rising, int64 [n]."""
    columns: Tensors = field(default_factory=dict)
    """What is known of them, by name, [n, ...]."""

    @classmethod
    def of(cls, dense: Tensors, known: Tensor) -> "ByClient":
        """Those rows of columns of all clients [S, ...] that something is known in.

        Args:
            dense: columns of all clients.
            known: whether anything is known, bool [S].
        """
        clients = known.nonzero()[:, 0]
        return cls(clients, {name: column[clients] for name, column in dense.items()})

    def __len__(self) -> int:
        return len(self.clients)

    def row(self, client: int) -> int | None:
        """Where the row of a client is; None where there is none."""
        known = self._known
        place = int(known.searchsorted(client))
        return place if place < len(known) and known[place] == client else None

    @cached_property
    def _known(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The clients in NumPy, which finds one of few in a tenth of the time."""
        return self.clients.numpy()

    def having(
        self, clients: Tensor, columns: Tensors, empty: Mapping[str, float] | None = None
    ) -> "ByClient":
        """With these rows instead of those that the clients had.

        Args:
            clients: indices, each once, int64 [k].
            columns: what is known of them, by name, [k, ...]. Of a column that is not here, rows
                stay as they are.
            empty: by name, the value of a row in a column that was never set; 0 if not given.
        """
        if not len(clients):
            return self
        # NumPy merges rows that rise, and fills in a column, in a tenth of PyTorch's time.
        both = np.sort(np.concatenate((self._known, clients.numpy())), kind="stable")
        every, times = torch.from_numpy(both).unique_consecutive(return_counts=True)  # type: ignore[no-untyped-call]
        new = torch.searchsorted(every, clients)
        old = np.ones(len(every), bool)
        old[new.numpy()] = times[new].numpy() > 1
        merged: Tensors = {}
        for name in {**self.columns, **columns}:
            like = columns[name] if name in columns else self.columns[name]
            value = (empty or {}).get(name, 0)
            column = torch.full((len(every), *like.shape[1:]), value, dtype=like.dtype)
            if name in self.columns:
                column.numpy()[old] = self.columns[name].numpy()
            if name in columns:
                column[new] = columns[name]
            merged[name] = column
        return ByClient(every, merged)

    def without(self, client: int) -> "ByClient":
        """Without the row of a client; the clients behind it have one number less."""
        kept = self.clients != client
        clients = self.clients[kept]
        columns = {name: column[kept] for name, column in self.columns.items()}
        return ByClient(clients - (clients > client).to(clients.dtype), columns)
