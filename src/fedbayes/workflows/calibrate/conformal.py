"""Thresholds of scores for the model of a run, from its clients' counts."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedbayes.contracts import Federation, Sampler
from fedbayes.core.brief import Brief
from fedbayes.core.tensors import PREDICTED, Samples
from fedbayes.errors import ConfigError, warn
from fedbayes.likelihoods import Classes, Likelihood, Numeric
from fedbayes.likelihoods.conformal import (
    Conformal,
    Score,
    check_counts,
    choose_score,
    count,
    scores,
    threshold,
)
from fedbayes.likelihoods.conformal_shift import (
    checked_prior,
    count_by_class,
    outlying,
    shifted_threshold,
)
from fedbayes.likelihoods.numeric import check_share
from fedbayes.storage.calibrations import CONFORMAL
from fedbayes.workflows.calibrate.ended_run import EndedRun
from fedbayes.workflows.calibrate.held_out import check_counted, divided


@dataclass(frozen=True)
class Covered:
    """How often targets are where they were promised to be, on rows that were not counted."""

    counted: int
    """Rows behind the threshold."""
    tested: int
    """Rows that the coverage is of."""
    coverage: tuple[float, ...]
    """Share of targets inside; of numbers for each column. Empty where no row was left to test."""
    size: tuple[float | None, ...]
    """Mean number of classes in a set; or median width of the interval of each column, in its
    unit, None where it is endless. Empty likewise."""
    bounded: bool
    """Whether enough rows were counted for the level; else sets are whole, intervals endless."""


@dataclass(frozen=True, repr=False)
class ConformalCalibration(Brief):
    """What `calibrate_conformal` wrote, and how it does."""

    path: Path
    level: float
    score: Score
    all: Covered
    """Of all clients' rows: under the common threshold, or each under its own if that was asked
    for."""
    clients: dict[str, Covered]
    """Of each client with test rows, by name, under the same."""
    left_out: tuple[str, ...] = ()
    """Clients whose counts were left out as malicious."""


def calibrate_conformal(
    folder: Path | str,
    level: float = 0.9,
    *,
    score: str = "auto",
    per_client: bool = False,
    personal: bool = False,
    share: float = 0.5,
    malicious: int = 0,
    prior: Mapping[str, float] | None = None,
) -> ConformalCalibration:
    """Find conformal thresholds for sets or intervals, and write them next to the model.

    The sets or intervals hold the truth with a given probability; `fedbayes predict` reads their
    thresholds. They are computed from a share of each client's test rows, drawn from the run's
    seed. None of these rows trained the model. The reported coverage is that of the other test
    rows.

    Args:
        folder: of a run that has ended, with its data.
        level: the guaranteed coverage, above 0 and below 1.
        score: its name, as in `fedbayes.likelihoods.conformal.SCORES`; `auto` by the likelihood.
        per_client: a threshold for each client too, from its rows alone.
        personal: of every client's own model, each with a threshold from its rows alone, instead of
            the global model.
        share: of each client's test rows that are counted.
        malicious: clients whose counts are left out, those that differ most from the others'
            within the classes.
        prior: shares of the classes among new rows, by name, where they are others than those of
            the counted rows (label shift). The reported coverage is weighted likewise.

    Raises:
        FedbayesError: the run has not ended, has no such model, or predicts neither classes nor
            numbers; its data are not here; or its clients have too few test rows.

    Examples:
        >>> import fedbayes
        >>> from fedbayes.workflows.calibrate.conformal import calibrate_conformal
        >>> result = fedbayes.run(rounds=1, model={"hidden": [8]}, data={"clients": 2}, out="sets")
        >>> calibrate_conformal("sets", level=0.9).level
        0.9
    """
    check_share(share, "share of the test rows")
    if personal and (malicious or prior):
        raise ConfigError(
            "a threshold of a client's own model uses only its rows. Leave out malicious and "
            "prior, or personal"
        )
    ended = EndedRun.open(folder, personal=personal)
    run, data, seed = ended.run, ended.data, ended.config.seed
    kind = choose_score(run.likelihood, level, score)
    _note_chosen_round(ended)
    ended.note_no_noise("the counts of scores")
    names = ended.folder.client_names()
    halves = {
        client: _Halves.of(run, draw, data.test(client), seed, client, kind, level, share)
        for client, draw in ended.models()
    }
    shares = None if prior is None else _shares(prior, run.likelihood)
    check_counted(sum(half.rows for half in halves.values()), ended.folder.path)
    own = per_client or personal
    columns = 1 if isinstance(run.likelihood, Classes) else run.likelihood.target.columns
    for client, half in halves.items():
        check_counts(half.counts, columns, half.rows, names[client])
    there = list(halves)
    odd = [there[one] for one in outlying([half.strata for half in halves.values()], malicious)]
    honest = {client: half for client, half in halves.items() if client not in odd}
    if shares is None:
        common = threshold(sum_of(honest), run.likelihood, kind, level)
    else:
        strata = torch.stack([half.strata for half in honest.values()]).sum(dim=0)
        common = shifted_threshold(strata, shares, run.likelihood, kind, level)
    single = {
        client: threshold(half.counts, run.likelihood, kind, level)
        for client, half in halves.items()
        if half.rows
    }
    path = ended.keep(CONFORMAL, common, single if own else {})
    told = {
        client: half.test(single[client] if own else common, run.likelihood)
        for client, half in halves.items()
        if not own or client in single
    }
    classes = isinstance(run.likelihood, Classes)
    # Of who lies about scores, nothing that it says of coverage is believed either.
    believed = [one for client, one in told.items() if client not in odd]
    return ConformalCalibration(
        path,
        level,
        kind,
        _covered(believed, classes, shares),
        {names[client]: _covered([one], classes) for client, one in told.items()},
        tuple(names[client] for client in odd),
    )


def sum_of(halves: "dict[int, _Halves]") -> Tensor:
    """What the server adds up, [columns, BINS]."""
    return torch.stack([half.counts for half in halves.values()]).sum(dim=0)


@dataclass(frozen=True)
class _Halves:
    """A client's test rows: those that it counts, and those that tell the coverage."""

    counts: Tensor
    """What it sends."""
    strata: Tensor
    """The same by class, where classes are predicted: sent where clients are compared, or classes
    have other shares."""
    rows: int
    draws: Sampler
    rest: Samples
    coins: Tensor | None
    """Of the rest, where sets are random."""
    device: torch.device

    @classmethod
    def of(
        cls,
        run: Federation,
        draw: Sampler,
        samples: Samples,
        seed: int,
        client: int,
        kind: Score,
        level: float,
        share: float,
    ) -> "_Halves":
        first, rest, rng = divided(len(samples.y), seed, client, share)
        rows, random = len(first), kind == "adaptive-random"
        coins = torch.from_numpy(rng.random(len(samples.y))) if random else None
        columns = 1 if isinstance(run.likelihood, Classes) else run.likelihood.target.columns
        found = [torch.empty(0, columns, dtype=torch.float64)]
        labels = samples.y[first]
        for part in torch.split(first, PREDICTED) if rows else ():
            x, y = (values[part].to(run.network.device) for values in samples)
            tossed = None if coins is None else coins[part]
            found.append(scores(run.likelihood, draw(x), y, kind, level, tossed).cpu())
        left = Samples(samples.x[rest], samples.y[rest])
        others = None if coins is None else coins[rest]
        every = torch.cat(found)
        strata = counts = count(every)
        if isinstance(run.likelihood, Classes):
            strata = count_by_class(every, labels.cpu(), run.likelihood.target.classes)
        return cls(counts, strata, rows, draw, left, others, run.network.device)

    def test(self, found: Conformal, likelihood: Likelihood) -> "_Tested":
        """Which of the other rows' targets are inside, and how large the sets are."""
        inside, sizes = [], []
        for part in torch.split(torch.arange(len(self.rest.y)), PREDICTED):
            if not len(part):
                continue
            x, y = self.rest.x[part], self.rest.y[part]
            draws = self.draws(x.to(self.device))
            if isinstance(likelihood, Classes):
                sets = found.sets(likelihood, draws, self._tossed(part)).cpu()
                inside.append(sets.gather(1, y[:, None]))
                sizes.append(sets.sum(dim=1, keepdim=True))
            else:
                assert isinstance(likelihood, Numeric)
                low, high = (end.cpu() for end in found.interval(likelihood, draws))
                inside.append((low <= y) & (y <= high))
                sizes.append(high - low)
        return _Tested(
            self.rows,
            not found.too_few,
            torch.cat(inside).double().numpy() if inside else None,
            torch.cat(sizes).double().numpy() if sizes else None,
            self.rest.y.cpu().numpy(),
        )

    def _tossed(self, part: Tensor) -> Tensor | None:
        return None if self.coins is None else self.coins[part]


@dataclass(frozen=True)
class _Tested:
    counted: int
    bounded: bool
    inside: np.ndarray | None
    sizes: np.ndarray | None
    y: np.ndarray


def _shares(prior: Mapping[str, float], likelihood: Likelihood) -> Tensor:
    """Shares of the classes among new rows."""
    if not isinstance(likelihood, Classes):
        raise ConfigError(f"a prior needs classes, and {likelihood.name} predicts numbers")
    return checked_prior(dict(prior), likelihood.target.names)


def _covered(tested: list[_Tested], classes: bool, shares: Tensor | None = None) -> Covered:
    inside = [one.inside for one in tested if one.inside is not None]
    sizes = [one.sizes for one in tested if one.sizes is not None]
    counted, bounded = sum(one.counted for one in tested), all(one.bounded for one in tested)
    if not inside:
        return Covered(counted, 0, (), (), bounded)
    rows, size = np.concatenate(inside), np.concatenate(sizes)
    weights = None
    if shares is not None:
        y = np.concatenate([one.y for one in tested])
        found = np.bincount(y, minlength=len(shares))
        weights = (shares.numpy() / np.maximum(found, 1))[y]
    of_sets = np.average(size, axis=0, weights=weights) if classes else np.median(size, axis=0)
    told = tuple(value if math.isfinite(value) else None for value in of_sets.tolist())
    inside_share = np.average(rows, axis=0, weights=weights)
    return Covered(counted, len(rows), tuple(inside_share.tolist()), told, bounded)


def _note_chosen_round(ended: EndedRun) -> None:
    """Say what weakens the promise."""
    if ended.config.keep_checkpoints == "best" or ended.config.stop_after is not None:
        warn(
            f"the same test rows chose the round of {ended.folder.path}, so coverage may be "
            "slightly below the level"
        )
