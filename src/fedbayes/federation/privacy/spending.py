"""What rounds have spent, and what the next one goes on from: part of every checkpoint."""

from dataclasses import dataclass, replace
from math import inf
from typing import Self

import torch
from torch import Tensor

from fedbayes.core.tensors import Tensors
from fedbayes.federation.privacy.accounting import Spent

NONCE = 16
"""Bytes of a nonce."""


@dataclass(frozen=True)
class Spending:
    """What each round spent when it was run, whatever the config says now."""

    run: str
    """The id under which the server keeps the secret of the noise; empty if it needs none."""
    fingerprint: str
    """Of the secret that the last round's noise came from, hex."""
    bounds: Tensors
    """Of each part, the bound of the next round, float64 []; empty before the first."""
    clips: Tensors
    """Of each part, the bound of each round, float64 [rounds]; 0 where there was none."""
    levels: Tensor
    """Of each round noise multiplier, that of the counts, and rate; float64 [rounds, 3]."""
    kinds: Tensor
    """Of each round whether noise is correlated, whether a sequence begins, its bands, and how many
    entries there are; int64 [rounds, 4]."""
    nonces: Tensor
    """Of each round, uint8 [rounds, NONCE]."""
    sizes: Tensor
    """Of each round, how many clients it is known of that they were in it, int64 [rounds]."""
    members: Tensor
    """Those clients, round after round, int64 [Σ sizes]."""

    @classmethod
    def empty(cls, run: str = "") -> Self:
        """Before any round of the run of this id."""
        return cls(
            run,
            "",
            {},
            {},
            torch.zeros(0, 3, dtype=torch.float64),
            torch.zeros(0, 4, dtype=torch.int64),
            torch.zeros(0, NONCE, dtype=torch.uint8),
            torch.zeros(0, dtype=torch.int64),
            torch.zeros(0, dtype=torch.int64),
        )

    @property
    def rounds(self) -> int:
        """Rounds that are on record; those before the first with noise are too, as without any."""
        return len(self.sizes)

    def spent(self, rounds: int) -> list[Spent]:
        """What each of so many rounds spent; those that are not on record had no noise."""
        ends = self.sizes.cumsum(0).tolist()
        known = [
            Spent(
                noise,
                count_noise,
                rate,
                tuple(self.members[end - size : end].tolist()),
                correlated=bool(correlated),
                begins=bool(begins),
                bands=bands,
            )
            for (noise, count_noise, rate), (correlated, begins, bands, _), size, end in zip(
                self.levels.tolist(),
                self.kinds.tolist(),
                self.sizes.tolist(),
                ends,
                strict=True,
            )
        ]
        return known[:rounds] + [Spent(0.0)] * (rounds - self.rounds)

    def sequence(self) -> int:
        """The round, from 1, in which the sequence of correlated noise that the last round belongs
        to began; 0 if it belongs to none.
        """
        if not self.rounds or not self.kinds[-1, 0]:
            return 0
        return int(self.kinds[:, 1].nonzero()[-1, 0]) + 1

    def after(
        self,
        number: int,
        spent: Spent,
        *,
        clips: dict[str, float],
        bounds: dict[str, float],
        entries: int,
        nonce: bytes,
        fingerprint: bytes,
    ) -> "Spending":
        """With a round more.

        Args:
            number: the round, from 1; what came before and is not on record had no noise.
            spent: by it.
            clips: its bounds, by part.
            bounds: those of the next round.
            entries: numbers that there was noise on.
            nonce: of its noise.
            fingerprint: of the secret.
        """
        before = self
        if number - 1 > self.rounds:
            before = self._padded(number - 1 - self.rounds)
        now = number - 1
        columns = {}
        for part in before.clips.keys() | clips.keys():
            past = before.clips.get(part, torch.zeros(now, dtype=torch.float64))
            newest = torch.tensor([clips.get(part, 0.0)], dtype=torch.float64)
            columns[part] = torch.cat([past, newest])
        level = torch.tensor([[spent.noise, spent.count_noise, spent.rate]], dtype=torch.float64)
        kind = torch.tensor([[spent.correlated, spent.begins, spent.bands, entries]])
        return replace(
            before,
            fingerprint=fingerprint.hex(),
            bounds={part: torch.tensor(b, dtype=torch.float64) for part, b in bounds.items()},
            clips=columns,
            levels=torch.cat([before.levels, level]),
            kinds=torch.cat([before.kinds, kind.to(torch.int64)]),
            nonces=torch.cat([before.nonces, torch.tensor([list(nonce)], dtype=torch.uint8)]),
            sizes=torch.cat([before.sizes, torch.tensor([len(spent.members)])]),
            members=torch.cat([before.members, torch.tensor(spent.members, dtype=torch.int64)]),
        )

    def _padded(self, rounds: int) -> "Spending":
        """With so many rounds more that had no noise."""
        level = torch.tensor([[0.0, inf, 0.0]], dtype=torch.float64).expand(rounds, 3)
        return replace(
            self,
            clips={
                part: torch.cat([past, torch.zeros(rounds, dtype=torch.float64)])
                for part, past in self.clips.items()
            },
            levels=torch.cat([self.levels, level]),
            kinds=torch.cat([self.kinds, torch.zeros(rounds, 4, dtype=torch.int64)]),
            nonces=torch.cat([self.nonces, torch.zeros(rounds, NONCE, dtype=torch.uint8)]),
            sizes=torch.cat([self.sizes, torch.zeros(rounds, dtype=torch.int64)]),
        )
