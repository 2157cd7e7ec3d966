"""Texts from the clients' counts of tokens and of pairs of tokens: a Markov chain.

A client counts in how many of its texts a token occurs, and in how many a token follows another.
Counts add over clients. Counts of few texts are left out, and a client may add noise to them.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ConfigDict, Field, Strict
from torch import Tensor

from fedbayes.core import pretrained
from fedbayes.core.files import write_beside
from fedbayes.core.plausible import MOST_ROWS
from fedbayes.core.pretrained import PADDING
from fedbayes.data.tables.summaries import read_as
from fedbayes.data.tokens import Tokens
from fedbayes.errors import DataError
from fedbayes.inputs.prior import InputPrior
from fedbayes.inputs.texts import special_tokens

EDGE = -1
"""Stands before the first token of a text and behind the last one."""
Pair = tuple[int, int]
Key = TypeVar("Key", int, tuple[int, int])
_Count = Annotated[int, Field(ge=1, le=MOST_ROWS)]
_Token = Annotated[int, Field(ge=EDGE)]


@dataclass(frozen=True)
class TextSums:
    """In how many texts tokens and pairs of tokens occur; those of several clients can be added."""

    texts: int
    """Number of texts."""
    tokenizer: str
    """Digest of the tokenizer (`Tokens.digest`)."""
    tokens: Mapping[int, int]
    """Texts by token."""
    pairs: Mapping[Pair, int]
    """Texts by a token and the one behind it."""

    def __add__(self, other: "TextSums") -> "TextSums":
        tokens, pairs = Counter(self.tokens), Counter(self.pairs)
        tokens.update(other.tokens)
        pairs.update(other.pairs)
        return TextSums(self.texts + other.texts, self.tokenizer, tokens, pairs)


def text_sums_of(
    ids: npt.NDArray[Any],
    tokenizer: str,
    least: int = 1,
    epsilon: float | None = None,
    rng: np.random.Generator | None = None,
) -> TextSums:
    """Count tokens and pairs over texts.

    A text of at most m tokens changes m counts of tokens and m + 1 of pairs, each by one. With ε
    all counts get noise of the two-sided geometric distribution, P(z) ∝ exp(−ε |z| / (2 m + 1)).
    Only then those below `least` are left out. See `delta` for what that hides.

    Args:
        ids: tokens [n, length], `PADDING` behind a text, without special ones.
        tokenizer: digest of the tokenizer.
        least: texts that a count is of at least.
        epsilon: of the noise; None: no noise.
        rng: of the noise.

    Examples:
        >>> import numpy as np
        >>> from fedbayes.inputs.text_sums import text_sums_of
        >>> found = text_sums_of(np.array([[5, 7, 5], [5, 7, -1]]), "")
        >>> found.tokens[7], found.pairs[5, 7], found.pairs[7, 5]
        (2, 2, 1)
    """
    tokens: Counter[int] = Counter()
    pairs: Counter[Pair] = Counter()
    for row in ids:
        own = [int(token) for token in row if token != PADDING]
        tokens.update(set(own))
        pairs.update(set(zip([EDGE, *own], [*own, EDGE], strict=True)))
    share, rng = None, rng or np.random.default_rng()
    if epsilon is not None:
        share = 1 - float(np.exp(-epsilon / (2 * ids.shape[1] + 1)))
    return TextSums(
        len(ids), tokenizer, _kept(tokens, least, share, rng), _kept(pairs, least, share, rng)
    )


def _kept(
    counts: Mapping[Key, int], least: int, share: float | None, rng: np.random.Generator
) -> dict[Key, int]:
    """Counts with noise, if there is any, that are not too small."""
    noise = np.zeros(len(counts), np.int64)
    if share is not None:
        noise = rng.geometric(share, len(counts)) - rng.geometric(share, len(counts))
    noisy = zip(counts.items(), noise.tolist(), strict=True)
    return {key: count + more for (key, count), more in noisy if count + more >= least}


def delta(epsilon: float, most: int, least: int) -> float:
    """The δ of (ε, δ)-differential privacy for one text of noisy counts.

    What no text has is not counted. So a token or pair of one text alone is in the file if its
    noise is at least `least` − 1. A text has at most 2 `most` + 1 of them.

    Args:
        epsilon: of the noise.
        most: tokens of a text.
        least: texts that a count is of at least.

    Examples:
        >>> from fedbayes.inputs.text_sums import delta
        >>> f"{delta(8.0, 30, 200):.1e}"
        '1.5e-10'
    """
    falls = float(np.exp(-epsilon / (2 * most + 1)))
    return min(1.0, (2 * most + 1) * falls ** (least - 1) / (1 + falls))


class SumsPrior(InputPrior):
    """Texts of a Markov chain over tokens, from the clients' counts.

    The token behind a is b with probability n_ab / n_a. Of pairs that were left out, the rest
    1 − Σ_b n_ab / n_a, the token is drawn by n_b alone.

    Args:
        length: tokens of a text, with special ones.
        sums: of all clients.
        before: special tokens that a text begins with.
        after: that it ends with.

    Raises:
        DataError: no count is left, or texts have no room.
    """

    name = "texts by sums"

    def __init__(
        self, length: int, sums: TextSums, before: Sequence[int] = (), after: Sequence[int] = ()
    ) -> None:
        super().__init__((length,))
        self._before, self._after = list(before), list(after)
        self._most = length - len(self._before) - len(self._after)
        if not sums.tokens or self._most < 1:
            raise DataError(
                f"sums of {sums.texts:,} texts have no count of a token, or texts of {length} "
                "tokens have no room. Count more texts, or with a smaller --min-rows"
            )
        self._all = np.array(sorted(sums.tokens))
        counts = np.array([sums.tokens[t] for t in self._all.tolist()], np.float64)
        self._shares = counts / counts.sum()
        following: dict[int, list[tuple[int, int]]] = {}
        for (one, two), count in sums.pairs.items():
            following.setdefault(one, []).append((two, count))
        self._next: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]] = {}
        for one, behind in following.items():
            whole = sums.texts if one == EDGE else sums.tokens.get(one, 0)
            chances = np.array([count for _, count in behind], np.float64)
            chances /= max(whole, chances.sum())
            self._next[one] = np.array([two for two, _ in behind]), chances
        self.assumes = (
            f"a Markov chain over tokens, from counts of {len(sums.tokens):,} tokens and "
            f"{len(sums.pairs):,} pairs in {sums.texts:,} texts"
        )

    def draw(self, count: int, rng: np.random.Generator) -> Tensor:
        """As `InputPrior.draw`: ids with `PADDING` behind them."""
        texts = torch.full((count, *self.shape), PADDING, dtype=torch.float32)
        for row in range(count):
            own = [*self._before, *self._text(rng), *self._after]
            texts[row, : len(own)] = torch.tensor(own, dtype=torch.float32)
        return texts

    def _text(self, rng: np.random.Generator) -> list[int]:
        found: list[int] = []
        token = EDGE
        while len(found) < self._most:
            token = self._behind(token, rng)
            if token == EDGE and found:
                break
            if token != EDGE:
                found.append(token)
        return found

    def _behind(self, token: int, rng: np.random.Generator) -> int:
        place = rng.random()
        if token in self._next:
            tokens, chances = self._next[token]
            ends = np.cumsum(chances)
            if place < ends[-1]:
                return int(tokens[np.searchsorted(ends, place, side="right")])
        return int(rng.choice(self._all, p=self._shares))


class _TextSumsFile(BaseModel):
    """The JSON file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: Literal["fedbayes text sums 1"]
    texts: _Count
    tokenizer: str
    tokens: list[Annotated[tuple[_Token, _Count], Strict(False)]]  # JSON has lists for tuples
    pairs: list[Annotated[tuple[_Token, _Token, _Count], Strict(False)]]


def write_text_sums(sums: TextSums, path: Path) -> None:
    """Write sums as JSON, whole or not at all."""
    content = _TextSumsFile(
        format="fedbayes text sums 1",
        texts=sums.texts,
        tokenizer=sums.tokenizer,
        tokens=sorted(sums.tokens.items()),
        pairs=sorted((one, two, count) for (one, two), count in sums.pairs.items()),
    )
    write_beside(path, json.dumps(content.model_dump()).encode() + b"\n")


def read_text_sums(path: Path) -> TextSums:
    """Read sums that a client sent.

    Raises:
        DataError: there is no such file, or it holds no sums of texts.
    """
    wrong = (
        "does not contain sums of texts. Create it with: fedbayes sums MODEL --data FILE -o "
        "sums.json"
    )
    file = read_as(_TextSumsFile, path, wrong)
    tokens = dict(file.tokens)
    pairs = {(one, two): count for one, two, count in file.pairs}
    if len(tokens) < len(file.tokens) or len(pairs) < len(file.pairs) or EDGE in tokens:
        raise DataError(f"{path} counts a token or a pair twice, or one that is none")
    return TextSums(file.texts, file.tokenizer, tokens, pairs)


def add_text_sums(paths: Sequence[Path], tokenizer: str, vocabulary: int) -> TextSums:
    """The sums of all clients, from a file of each; `tokenizer` is the digest of the networks' own.

    Raises:
        DataError: a file is named twice, holds no sums of texts, or is of another tokenizer.
    """
    found: TextSums | None = None
    for number, path in enumerate(paths):
        if path in paths[:number]:
            raise DataError(f"{path} is given twice. Give each client's file once")
        own = read_text_sums(path)
        largest = max((t for t in (*own.tokens, *(t for p in own.pairs for t in p))), default=0)
        if own.tokenizer != tokenizer or largest >= vocabulary:
            raise DataError(
                f"{path} has sums of another tokenizer than the networks'. Create it with: "
                "fedbayes sums MODEL --data FILE, from a model that is fused"
            )
        found = own if found is None else found + own
    assert found is not None
    return found


def prior_by_sums(tokens: Tokens, paths: Sequence[Path]) -> SumsPrior:
    """The prior of texts that networks take, by the sums in a file of each client.

    Raises:
        DataError: as `add_text_sums` and `SumsPrior`.
    """
    sums = add_text_sums(paths, tokens.digest, tokens.vocabulary)
    before, after = special_tokens(pretrained.tokenizer(tokens.tokenizer, DataError))
    return SumsPrior(tokens.length, sums, before, after)


def plain_tokens(ids: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
    """Texts without the special tokens that a tokenizer puts around them.

    Args:
        ids: tokens [n, length], `PADDING` behind a text.
        name: of the tokenizer.

    Returns:
        Tokens [n, length less the special ones], in the same form.
    """
    before, after = map(len, special_tokens(pretrained.tokenizer(name, DataError)))
    found = np.full((len(ids), ids.shape[1] - before - after), PADDING, np.int64)
    for row, text in zip(found, ids, strict=True):
        own = text[text != PADDING][before:]
        own = own[: len(own) - after]
        row[: len(own)] = own
    return found
