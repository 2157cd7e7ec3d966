"""How soon something happens, where for some it has not happened yet: Cox's partial likelihood."""

import math
from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedbayes.core.tensors import Tensors
from fedbayes.errors import ConfigError, ModelError
from fedbayes.likelihoods.base import Likelihood, finite, mean_of

_BLOCK = 1 << 10
"""Samples that are compared with as many one by one."""


class Cox(Likelihood):
    """The partial likelihood of Cox (1972) of log-risks f: who has the event, of all at risk then.

    With R(t) those whose time is at least t, a sample i with an event adds

        log p_i = f_i − log Σ_{j ∈ R(t_i)} exp f_j

    and one that is censored nothing (Breslow 1974). Of d events at one time, the l-th of them,
    l = 0 … d − 1, has Σ_R − (l / d) Σ_D instead of Σ_R, where D are these d (Efron 1977).

    So samples are not independent: `log_prob`, `nll` and `terms` are of the samples that they are
    given together, which are those of one client and never of several. The likelihood is thus
    stratified by client, each with a baseline hazard of its own. A constant that is added to all
    log-risks changes nothing.
    """

    name = "cox"
    summary = "log-risk of an event, by the partial likelihood"
    kinds = ("survival",)
    metric = "c_index"
    higher_is_better = True
    possible = (0.0, 1.0)
    nonnegative = ("nll", "events", "concordant", "comparable")
    coupled = True

    ties: Literal["efron", "breslow"] = Field("efron", description="events at the same time")

    @property
    def outputs(self) -> int:
        """One, the log-risk."""
        return 1

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """What each sample adds to the log of the partial likelihood of all of them.

        Args:
            f: log-risks, [..., n, 1].
            y: time and event of each, [n, 2].

        Returns:
            [..., n]; of events at the same time each the mean of theirs, of the censored 0.

        Raises:
            ModelError: outputs or targets have other columns.
        """
        if f.shape[-1] != 1 or y.shape != (*f.shape[-2:-1], 2):
            raise ModelError(
                f"the likelihood {self.name} needs outputs [n, 1] and targets [n, 2], got "
                f"{tuple(f.shape)} and {tuple(y.shape)}"
            )
        order = y[:, 0].argsort(descending=True)
        risk, event = f[..., 0][..., order], y[order, 1] > 0.5
        group, last = _same(y[order, 0])
        at_risk = risk.logcumsumexp(dim=-1)[..., last]
        count = _within(event.to(risk.dtype), group)
        own = risk - at_risk
        if self.ties == "efron":
            passed = event.to(risk.dtype).cumsum(dim=-1)
            rank = passed - 1 - (passed[last] - count)
            share = _within(torch.where(event, own.exp(), 0.0), group)
            left = torch.where(event, rank / count.clamp(min=1), 0.0)
            own = own - torch.log1p(-(left * share).clamp(max=1 - 1e-7))
        mean = _within(torch.where(event, own, 0.0), group) / count.clamp(min=1)
        return torch.where(event, mean, 0.0)[..., order.argsort()]

    def log_predictive(self, draws: Tensor, y: Tensor) -> Tensor:
        """What each sample adds at the mean log-risk of draws [draws, n, 1], float64 [n].

        A mixture of partial likelihoods is no sum over samples, and draws differ by constants that
        mean nothing; of the mean log-risk they change nothing.
        """
        return self.log_prob(self.mean(draws.double()), y.double())

    def mean(self, draws: Tensor) -> Tensor:
        """The mean log-risk over samples, [n, 1]; it is relative, so only differences are
        meaningful.

        Args:
            draws: outputs under draws from a posterior, [draws, n, 1].
        """
        return draws.mean(dim=0)

    @torch.no_grad()
    def terms(self, draws: Tensor, y: Tensor) -> Tensors:
        """Counts, "nll", "events", and of Harrell's C-index the pairs of these samples.

        A pair is "comparable" where it is known who had the event first: the earlier time is an
        event, or of equal times one alone is. It counts with whom that was. It is "concordant", 1,
        where that one has the higher log-risk, and 1/2 where both have the same.
        """
        terms = super().terms(draws, y)
        risk = self.mean(draws.double())[:, 0]
        concordant, comparable = _pairs(risk, y[:, 0].double(), y[:, 1] > 0.5)
        return terms | {
            "events": (y[:, 1] > 0.5).double(),
            "concordant": torch.where(finite(draws), concordant, 0.0),
            "comparable": comparable,
        }

    def metrics(self, scores: Mapping[str, float]) -> dict[str, float]:
        """The C-index, NaN where no pair is comparable, and the mean of −log p over samples."""
        pairs, count = scores["comparable"], scores["count"]
        if pairs > count * (count - 1) / 2 or scores["concordant"] > pairs:
            raise ValueError(f"{pairs:g} comparable pairs of {count:g} samples are impossible")
        index = scores["concordant"] / pairs if pairs else math.nan
        return {"c_index": index, "nll": mean_of(scores, "nll")}

    def pooled(self, draws: Tensor, weights: Tensor) -> Tensor:
        """Raise an error: log-risks are relative."""
        raise self._relative("combined")

    def divergence(self, f: Tensor, g: Tensor) -> Tensor:
        """Raise an error: log-risks are relative."""
        raise self._relative("compared")

    def _relative(self, what: str) -> ConfigError:
        return ConfigError(
            f"predictions of several networks cannot be {what} under the likelihood {self.name}: "
            "log-risks are relative, without a time of the event. Choose another likelihood or "
            "method"
        )


def _same(times: Tensor) -> tuple[Tensor, Tensor]:
    """Of times in order [n] for each the number of its group of equal ones, and its last place."""
    changes = times[1:] != times[:-1]
    edge = torch.ones_like(times[:1], dtype=torch.bool)
    group = torch.cat([~edge, changes]).cumsum(dim=0)
    places = torch.arange(len(times), device=times.device)
    ends = torch.where(torch.cat([changes, edge]), places, len(times))
    return group, ends.flip(0).cummin(dim=0).values.flip(0)


def _within(values: Tensor, group: Tensor) -> Tensor:
    """The sum over its group of every one of values [..., n]."""
    group = group.expand_as(values)
    return torch.zeros_like(values).scatter_add(-1, group, values).gather(-1, group)


def _pairs(risk: Tensor, time: Tensor, event: Tensor) -> tuple[Tensor, Tensor]:
    """Of each sample the concordant and the comparable pairs in which it is first, float64 [n].

    In the order of times, of equal ones events before the others, those that a sample with an event
    is compared with are all from some place on. Block by block, those behind the block are sorted
    and looked up, and those in it compared one by one.
    """
    order = event.argsort(descending=True, stable=True)
    order = order[time[order].argsort(stable=True)]
    risk, time, event = risk[order], time[order], event[order]
    group, last = _same(time)
    start_of = last + 1 - _within((~event).long(), group)
    comparable = torch.where(event, len(time) - start_of, 0).double()
    concordant = torch.zeros_like(comparable)
    for start in range(0, len(time), _BLOCK):
        here, behind = risk[start : start + _BLOCK], risk[start + _BLOCK :].sort().values
        places = torch.arange(start, start + len(here), device=risk.device)
        inside = event & (start_of >= start) & (start_of < start + _BLOCK)
        for mine in torch.split(inside.nonzero()[:, 0], _BLOCK):
            own = risk[mine].contiguous()
            below = torch.searchsorted(behind, own) + torch.searchsorted(behind, own, right=True)
            counts = places >= start_of[mine, None]
            right = (own[:, None] > here).double() + 0.5 * (own[:, None] == here)
            concordant[mine] = below / 2 + torch.where(counts, right, 0.0).sum(dim=1)
    back = order.argsort()
    return concordant[back], comparable[back]
