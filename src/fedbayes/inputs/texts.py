"""Texts as inputs: token sequences that a pretrained network draws itself, or texts of a file."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbayes.core import pretrained
from fedbayes.core.devices import arithmetic, in_half
from fedbayes.core.files import read_text
from fedbayes.core.pretrained import PADDING
from fedbayes.core.wording import listed
from fedbayes.data.progress import progress
from fedbayes.data.source_settings import SourceSettings
from fedbayes.data.sources.own import SUFFIXES
from fedbayes.data.sources.tables import read_tables
from fedbayes.errors import ConfigError, DataError, did_you_mean, told_as
from fedbayes.inputs.prior import InputPrior
from fedbayes.inputs.samples import RealSamples
from fedbayes.models.others import LanguageNetwork, language_model

TEXTS = "texts"
"""Name of the prior."""
STEPS = 8
"""Passes in which a masked language model fills a text."""
SHORTEST = 3
"""Tokens of a drawn text, without special ones."""
_PORTION = 64


class TextPrior(InputPrior):
    """Token sequences that a pretrained network draws itself.

    A causal language model draws one token after the other. A masked one starts from masks and
    fills a share of them in each of `STEPS` passes, in a random order. Lengths are uniform from
    `SHORTEST` to the longest; special tokens are where the tokenizer puts them. A network without a
    language model in its files draws nothing itself: then tokens are independent, and the k-th of
    `by_frequency` has a probability proportional to 1 / (k + 3) (Zipf's law).

    Args:
        network: name of the pretrained network, or its folder.
        length: of a sequence, with special tokens.
        tokenizer: name of another network whose tokenizer it has.

    Raises:
        ConfigError: the length has no room for a text, or the network cannot be loaded.
    """

    name = TEXTS

    def __init__(self, network: str, length: int, tokenizer: str | None = None) -> None:
        super().__init__((length,))
        words: Any = pretrained.tokenizer(tokenizer or network, ConfigError)
        self._before, self._after = special_tokens(words)
        self._most = length - len(self._before) - len(self._after)
        if self._most < SHORTEST:
            raise ConfigError(
                f"texts of {length} tokens have no room for {SHORTEST} in addition to the special "
                "ones. Use longer texts (--length, --shape or data.max_tokens)"
            )
        found = language_model(network, ConfigError)
        self._network: LanguageNetwork | None = None if found is None else found[0]
        self._causal = found is not None and found[1]
        self._mask = words.mask_token_id
        if self._network is not None and not self._causal and self._mask is None:
            self._network = None
        vocabulary = len(words) if self._network is None else self._network.vocabulary
        self._kept = torch.ones(vocabulary, dtype=torch.bool)
        self._kept[[token for token in words.all_special_ids if token < vocabulary]] = False
        self._kept[len(words) :] = False
        self._start = words.bos_token_id
        if self._network is None:
            self._ranked = by_frequency(words)
            self.assumes = (
                "independent tokens by Zipf's law over the vocabulary, of uniform lengths: not "
                "sentences"
            )
            self.notes = (
                f"{network} has no language model to sample texts, so inputs are independent "
                "tokens by frequency. Real texts are better: --inputs FILE",
            )
        else:
            kind = "causal" if self._causal else "masked"
            self.assumes = f"texts sampled from the base network as a {kind} language model"

    def draw(self, count: int, rng: np.random.Generator) -> Tensor:
        """Token ids with `PADDING` behind them, float32 [count, length]."""
        lengths = torch.from_numpy(rng.integers(SHORTEST, self._most + 1, count))
        torch_rng = torch.Generator().manual_seed(int(rng.integers(2**62)))
        if self._network is None:
            ids = self._frequent(count, torch_rng)
        else:
            way = self._causally if self._causal else self._masked
            pieces = torch.split(lengths, _PORTION)
            with _shown(len(pieces)) as advance:
                parts = []
                for piece in pieces:
                    parts.append(way(self._network, piece, torch_rng))
                    advance(1)
            ids = torch.cat(parts)
        texts = torch.full((count, *self.shape), PADDING, dtype=torch.float32)
        for row, (tokens, length) in enumerate(zip(ids, lengths.tolist(), strict=True)):
            own = [*self._before, *tokens[:length].tolist(), *self._after]
            own = [token for token in own if token != PADDING]
            texts[row, : len(own)] = torch.tensor(own, dtype=torch.float32)
        return texts

    def _frequent(self, count: int, rng: torch.Generator) -> Tensor:
        """Independent tokens [count, most]."""
        weights = 1 / (torch.arange(len(self._ranked), dtype=torch.float64) + 3)
        drawn = torch.multinomial(weights, count * self._most, replacement=True, generator=rng)
        return self._ranked[drawn].reshape(count, self._most)

    def _tokens(self, logits: Tensor, rng: torch.Generator, also: int | None = None) -> Tensor:
        """A token of each row of logits, none of them special but `also`."""
        kept = self._kept.clone()
        if also is not None:
            kept[also] = True
        chances = logits.float().masked_fill(~kept, -torch.inf).softmax(-1)
        return torch.multinomial(chances, 1, generator=rng).flatten()

    @torch.no_grad()
    def _masked(self, model: LanguageNetwork, lengths: Tensor, rng: torch.Generator) -> Tensor:
        """Tokens [n, most] of a masked language model."""
        first, places = len(self._before), torch.arange(self._most)
        x = torch.full((len(lengths), self.shape[0]), PADDING)
        for row, length in enumerate(lengths.tolist()):
            own = [*self._before, *[self._mask] * length, *self._after]
            x[row, : len(own)] = torch.tensor(own)
        inner = x[:, first : first + self._most]
        # A place is filled in the pass that a uniform number says.
        turn = (torch.rand(inner.shape, generator=rng) * STEPS).long()
        for step in range(STEPS):
            now = (turn == step) & (places < lengths[:, None])
            if not now.any():
                continue
            logits = _logits(model, x)[:, first : first + self._most]
            inner[now] = self._tokens(logits[now], rng)
        return inner

    @torch.no_grad()
    def _causally(self, model: LanguageNetwork, lengths: Tensor, rng: torch.Generator) -> Tensor:
        """Tokens [n, most] of a causal language model; `PADDING` behind the end of a text."""
        count = len(lengths)
        start = self._before or ([] if self._start is None else [self._start])
        given = torch.tensor([start] * count, dtype=torch.long).reshape(count, len(start))
        drawn: list[Tensor] = []
        if not start:  # nothing says how texts begin
            drawn.append(self._tokens(torch.zeros(count, len(self._kept)), rng))
            given = drawn[0][:, None]
        end = getattr(model.network.config, "eos_token_id", None)
        end = end[0] if isinstance(end, list) else end
        over, past = torch.zeros(count, dtype=torch.bool), None
        while len(drawn) < int(lengths.max()):
            answer: Any = model.network(input_ids=given, past_key_values=past, use_cache=True)
            past = answer.past_key_values
            token = self._tokens(answer.logits[:, -1], rng, end if len(drawn) >= SHORTEST else None)
            over |= token == end if end is not None else False
            given = token[:, None]
            drawn.append(torch.where(over, PADDING, token))
        found = torch.stack(drawn, 1)
        return torch.nn.functional.pad(found, (0, self._most - found.shape[1]), value=PADDING)


def _shown(pieces: int) -> AbstractContextManager[Callable[[int], object]]:
    """A progress bar, unless the caller knows how far it is after each piece."""
    return nullcontext(lambda done: None) if pieces == 1 else progress("drawing texts", pieces)


def _logits(model: LanguageNetwork, x: Tensor) -> Tensor:
    """Of all tokens, [n, length, vocabulary]."""
    with arithmetic(in_half("auto", x.device), x.device):
        answer: Any = model.network(
            input_ids=torch.where(x >= 0, x, model.pad), attention_mask=(x >= 0).long()
        )
    logits: Tensor = answer.logits
    return logits


def by_frequency(words: Any) -> Tensor:
    """Tokens of a tokenizer without its special ones [K], the most frequent first, as far as known.

    Vocabularies have words in the order of their frequency, but before them single characters of
    all scripts and places that nobody uses, such as [unused7]. These come last here, and the full
    stop and the comma first.
    """
    special = set(words.all_special_ids)
    plain = [token for token in range(len(words)) if token not in special]

    def order(token: str) -> int:
        letters = token.strip(_MARKS)
        return 0 if letters in _STOPS else 1 if letters.isalpha() and len(letters) > 1 else 2

    orders = [order(token or "") for token in words.convert_ids_to_tokens(plain)]
    return torch.tensor([token for _, token in sorted(zip(orders, plain, strict=True))])


_MARKS, _STOPS = "#▁Ġ", (".", ",")
"""What tokenizers put before letters, for the beginning or the middle of a word; and the most
frequent characters of texts."""


def special_tokens(words: Any) -> tuple[list[int], list[int]]:
    """Tokens that a tokenizer puts before and behind a text."""
    plain = words(words.decode([_plain(words)]), add_special_tokens=False)["input_ids"]
    whole = words(words.decode([_plain(words)]))["input_ids"]
    for place in range(len(whole) - len(plain) + 1):
        if whole[place : place + len(plain)] == plain:
            return whole[:place], whole[place + len(plain) :]
    return [], []


def _plain(words: Any) -> int:
    """A token that is not special, from the middle of the vocabulary."""
    special = set(words.all_special_ids)
    middle = len(words) // 2
    return next(token for token in range(middle, len(words)) if token not in special)


class TextSamples(RealSamples):
    """Unlabelled texts that somebody has, as tokens; one in five is held out.

    Args:
        path: texts, one a line, or a table (`.csv`, `.parquet`) with a column of texts.
        column: of the table; by default the only one with texts.
        tokenizer: name of the network whose tokenizer is taken, or its folder.
        length: tokens of a text at most; longer ones are cut.

    Raises:
        DataError: there are no texts, or the file cannot be read.
    """

    name = "texts of a file"

    def __init__(self, path: Path, column: str | None, tokenizer: str, length: int) -> None:
        notes: list[str] = []
        texts = _read_texts(path, column, notes)
        words: Any = pretrained.tokenizer(tokenizer, DataError)
        rows = words(texts, truncation=True, max_length=length)["input_ids"]
        ids = np.full((len(rows), length), PADDING, np.float32)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)] = tokens
        cut = sum(len(tokens) == length for tokens in rows)
        if cut:
            notes.append(
                f"{path}: {cut:,} of {len(rows):,} texts reach the limit of {length} tokens"
            )
        self._take(ids, path, notes)
        self.assumes = f"as {len(rows):,} unlabelled texts of {path.name}"


def _read_texts(path: Path, column: str | None, notes: list[str]) -> list[str]:
    """Texts of a file."""
    if not path.name.lower().endswith(SUFFIXES):
        if column is not None:
            raise DataError(f"{path} is not a table, so it has no column {column!r}. Leave it out")
        with told_as(DataError, f"cannot read the texts {path}", OSError, ValueError):
            text = read_text(path).replace("\r\n", "\n").replace("\r", "\n")
            lines = [line.strip() for line in text.split("\n")]  # splitlines knows others too
        texts = [line for line in lines if line]
        if not texts:
            raise DataError(f"{path} has no lines with text")
        return texts
    if path.suffix.lower() == ".npz":
        raise DataError(f"{path} has numbers. Give one text per line, or a column of a table")
    frame, *_ = read_tables({"train": [path]}, SourceSettings(), notes)
    worded = [name for name in frame.columns if _are_words(frame[name])]
    if column is None and len(worded) != 1:
        raise DataError(
            f"{path} has {len(worded)} columns of texts ({listed(worded) or 'none'}). Choose one, "
            f"as --inputs {path}:{worded[0] if worded else 'COLUMN'}"
        )
    column = worded[0] if column is None else column
    if column not in frame.columns:
        raise DataError(
            f"{path} has no column {column!r}{did_you_mean(column, frame.columns)}. It has "
            f"{listed(frame.columns)}"
        )
    cells = list(frame[column])
    texts = [cell for cell in cells if isinstance(cell, str) and cell.strip()]
    if not texts:
        raise DataError(f"{path}: the column {column!r} has no texts")
    if len(texts) < len(cells):
        notes.append(f"{path}: {len(cells) - len(texts):,} rows without a text are left out")
    return texts


def _are_words(cells: Any) -> bool:
    """Whether a column has texts of several words: names of classes are none."""
    return any(isinstance(cell, str) and " " in cell.strip() for cell in cells)


def text_inputs(
    name: str | None,
    network: str,
    length: int,
    *,
    tokenizer: str | None = None,
    column: str | None = None,
) -> InputPrior:
    """The input prior of `--inputs` for a network of texts.

    Args:
        name: `texts`, a file, or `FILE:COLUMN`; `texts` by default.
        network: name of the pretrained network, or its folder.
        length: tokens of a text.
        tokenizer: name of another network whose tokenizer it has.
        column: of a table, where the name has none.

    Raises:
        ConfigError: it is another prior.
        DataError: there is no such file, or it has no texts.
    """
    if name in (None, "auto", TEXTS):
        return TextPrior(network, length, tokenizer)
    assert name is not None
    path, _, own = name.rpartition(":")
    if Path(name).is_file():
        path, own = name, ""
    if not Path(path).is_file():
        raise ConfigError(
            f"--inputs {name} is not a file, and the network takes texts. Give {TEXTS}, or a "
            "file with one text per line, or FILE.csv:COLUMN"
        )
    found = Path(path)
    table = found.name.lower().endswith(SUFFIXES)
    return TextSamples(found, own or (column if table else None), tokenizer or network, length)
