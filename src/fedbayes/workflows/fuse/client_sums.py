"""Sums over a client's samples, from its data into a file for `fedbayes fuse --sums`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedbayes.core.files import writable
from fedbayes.data.tables.columns import flags
from fedbayes.data.tables.sums import check_sums
from fedbayes.data.tokens import Tokens
from fedbayes.errors import ConfigError, DataError, warn
from fedbayes.inputs import Sums, add_sums, read_sums, sums_of, write_sums
from fedbayes.inputs.spectra import Spectra, add_spectra, read_spectra, spectra_of, write_spectra
from fedbayes.inputs.text_sums import delta, plain_tokens, text_sums_of, write_text_sums
from fedbayes.workflows.serve.evaluation_set import EvaluationSet, find_training

LEAST = 10
"""Rows that sums are of at least, unless said otherwise: those of one row are the row."""


@dataclass(frozen=True)
class SumsJob:
    """Sums over a client's samples into a file; `fedbayes sums`."""

    data: Path
    out: Path
    model: Path | None = None
    """The client's network, whose features are taken, in its order; all columns without."""
    given: Sequence[str] = ()
    """Settings of `[data]` and `[task]`: how the data are read."""
    categories: Sequence[str] = ()
    """Features for which the number of rows with each value is sent."""
    least: int = LEAST
    """Rows or samples that there must be; of texts, that a count is of."""
    epsilon: float | None = None
    """Of the noise on counts of texts."""

    def run(self) -> dict[str, Any]:
        """Sum up and write.

        Returns:
            What the file holds, in short.

        Raises:
            FedbayesError: what is wrong with an option or a file; or there are too few rows.
        """
        writable(self.out, "the sums", (".json",), [self.data, self.model])
        if self.least < 1:
            raise ConfigError("give --min-rows of 1 or more")
        found = find_training(self.model, self.data, self.given)
        if found.preprocessing.tokens is not None:
            return self._of_texts(found.samples.x.numpy(), found.preprocessing.tokens)
        if self.epsilon is not None:
            raise ConfigError(
                "--epsilon works only with texts: sums of rows have no bounded sensitivity. Leave "
                "it out"
            )
        if found.samples.x.ndim > 2:
            return self._of_signals(found)
        sums = self._sums(found)
        write_sums(sums, self.out)
        return {
            "rows": sums.count,
            "features": list(sums.features),
            "categories": [sums.features[index] for index in sums.categories],
        }

    def _of_texts(self, ids: npt.NDArray[Any], tokens: Tokens) -> dict[str, Any]:
        """Count tokens and pairs of tokens over texts."""
        if self.categories:
            raise ConfigError("--category has no effect on texts. Leave it out")
        if self.epsilon is not None and not 0 < self.epsilon < np.inf:
            raise ConfigError(f"--epsilon {self.epsilon:g}: give a number above 0, such as 4")
        if len(ids) < self.least:
            raise DataError(
                f"{self.data} has {len(ids):,} texts; the minimum is {self.least}. Combine them "
                "with other texts, or set --min-rows"
            )
        plain = plain_tokens(ids, tokens.tokenizer)
        sums = text_sums_of(plain, tokens.digest, self.least, self.epsilon)
        if not sums.tokens:
            raise DataError(
                f"{self.data}: no token is in {self.least} texts, so nothing is left to send. "
                "Combine it with other texts, or set --min-rows"
            )
        write_text_sums(sums, self.out)
        noise = {} if self.epsilon is None else {"epsilon": self.epsilon}
        if self.epsilon is not None:
            noise["delta"] = delta(self.epsilon, plain.shape[1], self.least)
        told = {"tokens": len(sums.tokens), "pairs": len(sums.pairs), **noise}
        return {"rows": sums.texts, "features": [], "categories": [], **told}

    def _of_signals(self, found: EvaluationSet) -> dict[str, Any]:
        """The mean and spectra of images or signals."""
        if self.categories:
            raise ConfigError("--category has no effect on images and signals. Leave it out")
        x = found.samples.x.numpy()
        if len(x) < self.least:
            raise DataError(
                f"{self.data} has {len(x):,} samples, and the mean of few samples nearly reveals "
                f"them; the minimum is {self.least}. Combine them with other samples, or set "
                "--min-rows"
            )
        write_spectra(spectra_of(x / found.preprocessing.scale, str(self.data)), self.out)
        return {"rows": len(x), "features": [], "categories": [], "shape": list(x.shape[1:])}

    def _sums(self, found: EvaluationSet) -> Sums:
        x = found.samples.x.numpy()
        seen = found.preprocessing
        if seen.columns:  # as a network sees them: a mean, and a feature that says so
            x = np.where(np.isnan(x), seen.statistics[0] * seen.scale, x)
        whole = np.isfinite(x).all(1)
        if not whole.all():
            warn(
                f"{self.data}: {int((~whole).sum()):,} of {len(x):,} rows are left out, because "
                "they have missing values"
            )
        rows = x[whole]
        if len(rows) < self.least:
            raise DataError(
                f"{self.data} has {len(rows):,} rows without missing values, and sums of few rows "
                f"nearly reveal them; the minimum is {self.least}. Combine them with other rows, "
                "or set --min-rows"
            )
        if len(rows) <= x.shape[1]:
            warn(
                f"{self.data} has {len(rows):,} rows of {x.shape[1]:,} features: with at most as "
                "many rows as features, sums reveal directions in which the rows do not vary"
            )
        shown = [*self.categories, *(n for n in flags(seen.columns) if n not in self.categories)]
        sums = sums_of(rows, seen.features, shown, str(self.data))
        for index, counts in sums.categories.items():
            self._look_at(sums.features[index], list(counts.values()))
        return sums

    def _look_at(self, name: str, counts: list[int]) -> None:
        """See that the values of a category are not those of single rows."""
        once = counts.count(1)
        if 2 * len(counts) > sum(counts):
            raise DataError(
                f"{self.data}: '{name}' has {len(counts):,} different values in {sum(counts):,} "
                "rows; counts of them would reveal the rows' values. Leave out --category for it"
            )
        if once:
            way = "leave out --category"
            if name not in self.categories:  # a feature that says that a value is missing
                way = "leave the feature out with --set data.missing=impute"
            warn(
                f"{self.data}: {once:,} of the {len(counts):,} values of '{name}' "
                f"{'is' if once == 1 else 'are'} in only one row, and the file would reveal it. "
                f"Combine rare values first, or {way}"
            )


def spectra_of_clients(paths: Sequence[Path]) -> Spectra:
    """The sums of all clients' images or signals, from a file of each.

    Args:
        paths: the files.

    Raises:
        DataError: a file is named twice, holds no such sums, or samples have different shapes.
    """
    _once(paths)
    return add_spectra([read_spectra(path) for path in paths], [str(path) for path in paths])


def sums_of_clients(paths: Sequence[Path], features: Sequence[str]) -> Sums:
    """The sums of all clients' rows, from a file of each.

    Args:
        paths: the files.
        features: names of what networks see, in their order; empty if they are not known.

    Raises:
        DataError: a file is named twice, holds no sums, or sums are of other features.
    """
    _once(paths)
    several, names = [read_sums(path) for path in paths], [str(path) for path in paths]
    together = add_sums(several, names)
    check_sums(several, names)
    named = together.features != tuple(map(str, range(len(together.features))))
    if named and features and together.features != tuple(features):
        odd = next(
            (pair for pair in zip(together.features, features, strict=False) if pair[0] != pair[1]),
            (f"{len(together.features)} features", f"{len(features)}"),
        )
        raise DataError(
            f"{paths[0]} has sums of other features than the networks, or in another order: "
            f"{odd[0]!r} instead of {odd[1]!r}. Create them with: fedbayes sums MODEL --data FILE"
        )
    return together


def _once(paths: Sequence[Path]) -> None:
    """See that no file is named twice."""
    for number, path in enumerate(paths):
        if path in paths[:number]:
            raise DataError(f"{path} is given twice. Give each client's file once")
