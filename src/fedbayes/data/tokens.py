"""Texts as the tokens that a pretrained network reads."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from typing import Any

import numpy as np

from fedbayes.core import pretrained
from fedbayes.core.pretrained import PADDING
from fedbayes.errors import DataError

_BATCH = 1024


@dataclass(frozen=True)
class Tokens:
    """How the texts of a data set become samples: ids of tokens, cut or padded to one length."""

    column: str = field(compare=False)
    """The column of the texts; networks see the same of any."""
    tokenizer: str
    """Name of the pretrained network whose tokenizer it is, or its folder."""
    digest: str
    """Of the tokenizer, SHA-256 in hex: two that differ give other tokens."""
    length: int
    """Tokens of a sample."""
    vocabulary: int
    """How many tokens there are."""

    @property
    def statistics(self) -> tuple[Any, Any]:
        """Means and stds that leave ids as they are, float32 [length]."""
        return np.zeros(self.length, np.float32), np.ones(self.length, np.float32)

    @classmethod
    def of(cls, column: str, tokenizer: str, length: int) -> "Tokens":
        """With the tokenizer as it is here. Raises a DataError if it cannot be loaded."""
        found, digest = _load(tokenizer)
        return cls(column, tokenizer, digest, length, len(found))

    def encode(self, texts: Sequence[Any], where: str, notes: list[str] | None = None) -> Any:
        """Texts as ids of tokens.

        Args:
            texts: n of them.
            where: they are from, for messages.
            notes: takes up what a user should know.

        Returns:
            Ids int32 [n, length], `PADDING` behind a text that is shorter.

        Raises:
            DataError: a text is missing or no text (names the row), or the tokenizer is another
                one than that of the training.
        """
        tokenizer, digest = _load(self.tokenizer)
        if digest != self.digest:
            raise DataError(
                f"the tokenizer {self.tokenizer} is not the one of the training (SHA-256 "
                f"{self.digest[:12]}…, here {digest[:12]}…). Restore its files"
            )
        odd = next((row for row, text in enumerate(texts) if not isinstance(text, str)), None)
        if odd is not None:
            what = "no text" if texts[odd] is None or texts[odd] != texts[odd] else repr(texts[odd])
            raise DataError(
                f"{where}: column '{self.column}' has {what} in row {odd + 1:,}. Every row needs "
                "a text: add one, or leave the row out"
            )
        ids = np.full((len(texts), self.length), PADDING, np.int32)
        cut = 0
        for start in range(0, len(texts), _BATCH):
            batch = tokenizer(
                list(texts[start : start + _BATCH]),
                truncation=True,
                max_length=self.length,
                return_attention_mask=False,
            )["input_ids"]
            for row, tokens in enumerate(batch, start):
                ids[row, : len(tokens)] = tokens
                cut += len(tokens) == self.length
        if cut and notes is not None:
            notes.append(
                f"{where}: {cut:,} of {len(texts):,} texts reach the limit of {self.length} "
                "tokens, and longer texts are cut. data.max_tokens sets the limit"
            )
        return ids


@cache
def _load(name: str) -> tuple[Any, str]:
    """A tokenizer, and its digest."""
    found = pretrained.tokenizer(name, DataError)
    backend = getattr(found, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else repr(sorted(found.get_vocab().items()))
    return found, sha256(text.encode()).hexdigest()
