"""The clients' networks together: the teacher of a fusion in function space."""

import copy
import math
from collections.abc import Sequence

import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedbayes.core.targets import Target
from fedbayes.core.wording import listed
from fedbayes.data.progress import progress
from fedbayes.errors import ModelError
from fedbayes.fusion.class_counts import (
    class_offsets,
    class_shares,
    frequencies,
    groups,
    in_groups,
    of_groups,
    sharpness,
    stationary,
)
from fedbayes.fusion.draws import CHUNK, Batches
from fedbayes.fusion.frozen import Function, frozen
from fedbayes.fusion.uncompared import Evidence, clarity, preferences, scaling, whitening
from fedbayes.likelihoods import Classes, Likelihood
from fedbayes.likelihoods.categorical import Categorical
from fedbayes.likelihoods.temperature import at_temperature, has_temperature

Temperatures = Sequence[float | None] | Tensor
"""Of each client's predictions [S], fitted to rows that it did not train on; None: it has none."""

SOFTNESS, SOFTNESS_OF_CHAIN = 0.6, 0.4
"""Temperature of clients without one of their own, above 1, for each unit that their outputs
deviate by over the classes: in the sum of logits, and in the stationary distribution."""
_LEAST = 0.01
"""Smallest variance of a client's outputs that counts, relative to the largest of all clients."""
COMPARED = 4
"""Chunks of inputs on which clients of one class are compared."""
ALIKE = 0.1
"""Correlation of log-odds at images and at mirror images from which both count. Classes that change
places in a mirror have one below 0; networks that hardly tell them apart, one near 0."""
MIRRORED = 256
"""Inputs that classes which change places in a mirror are found on."""
_PIECE = 32
"""Of them that clients are asked about at once; progress is shown after each."""
_SMALLEST = 1e-12
"""Variance of outputs over the classes where no client distinguishes any."""


class Teacher:
    """The clients' networks as one function, which a fused network learns.

    With counts of classes it is Bayes' rule for clients whose classes differ in frequency. Let
    π_sj be client s's share of the samples of class j, p_s(k | x) its prediction (0 for classes of
    which it has no sample), and θ the frequencies of classes over all clients. The prediction
    q(x) is the stationary distribution of a chain over classes (`stationary`):

        q = (1 − ε) M q + ε θ,    M_kj(x) = Σ_s π_sj p_s(k | x).

    If clients' predictions are exact, so is q as ε tends to 0: Σ_j M_kj q_j = q_k for the posterior
    of all samples together. Networks are overconfident. A client that fitted a temperature to rows
    which it kept out of training has its outputs divided by it. In q there is one more temperature,
    1 + `SOFTNESS_OF_CHAIN` u_s times the deviation of outputs. Here u_s is 1 for clients that
    fitted none. Rows that a client keeps have no sample of a class that it lacks, so otherwise u_s
    is the frequency Σ θ_k of those classes, among those of its `groups`. Networks are not exact. On
    validation rows of nine cases the geometric mean of q and a sum of logits was on average .004
    more accurate than the better of them (`benchmarks/fusion_teacher.py`). That mean is the
    teacher, and the sum is

        log t_k(x) = log θ_k + Σ_s π_sk (f_sk − T log Σ_j exp(f_sj / T) − log p_s(k)) + const,

    with outputs f of client s, its frequencies p_s(k) of classes, and T = 1 + `SOFTNESS` times
    the deviation of f over the classes: the geometric mean over clients by their mean share.
    Where no client connects two groups of classes (`groups`), q says nothing of which group it is,
    and the sum compares logits of clients on scales of their own. So after `compared` each group
    has the geometric mean of two probabilities: that of the sum, and one by how clear-cut its
    clients find the input (`clarity`), on one scale (`Evidence`). Before, it is that of the sum.

    If no client has two classes, predictions of exact clients are constant, and Bayes' rule has
    nothing to compare. Then the teacher is how far each network prefers its class to the others,

        o_k(x) = Σ_s π_sk log(p_s(k | x) / (1 − p_s(k | x))),

    after `compared` has put them on one scale, whatever temperatures are.

    With shares of each class alone the teacher is Σ_s π_sk f_sk of centred logits. Without counts
    and shares its prediction is nearest to the mixture of the clients': the least
    Σ_s w_s KL(p_s ‖ p). For classes and labels that is the mean of probabilities, for counts that
    of rates, for real numbers the mixture's mean and variance (quantiles: their mean).

    Args:
        clients: their networks. Of modules frozen twins are asked, which share their memory.
        shares: of each client in each class, [S, K], columns that add to 1 (see `class_shares`); or
            weights of the clients in a mixture, [S]; equal weights by default.
        likelihood: what outputs mean; a class for each output by default.
        names: of the clients, for errors.
        counts: samples of each client and class, [S, K]; instead of shares.
        temperatures: see `Temperatures`; without counts outputs are divided by them, too.

    Raises:
        ModelError: a client's weights are not finite, or shares or temperatures do not fit.

    Examples:
        >>> import torch
        >>> from fedbayes.fusion.teacher import Teacher
        >>> north, south = (torch.nn.Linear(2, 2) for _ in range(2))
        >>> teacher = Teacher([north, south], counts=torch.tensor([[90.0, 10.0], [10.0, 90.0]]))
        >>> teacher(torch.zeros(5, 2)).shape
        torch.Size([5, 2])
    """

    def __init__(
        self,
        clients: Sequence[Function],
        shares: Tensor | None = None,
        likelihood: Likelihood | None = None,
        names: Sequence[str] = (),
        counts: npt.ArrayLike | Tensor | None = None,
        temperatures: Temperatures | None = None,
    ) -> None:
        if not clients:
            raise ModelError("a teacher needs at least one client's network")
        self.names = tuple(names) or tuple(f"client {number}" for number in range(len(clients)))
        if len(self.names) != len(clients):
            raise ModelError(f"there are {len(clients)} clients and {len(self.names)} names")
        self.clients: tuple[Function, ...] = tuple(
            frozen(client, name) if isinstance(client, nn.Module) else client
            for client, name in zip(clients, self.names, strict=True)
        )
        self.counts = None if counts is None else torch.as_tensor(counts, dtype=torch.float64)
        if self.counts is not None:
            if shares is not None:
                raise ModelError("a teacher takes shares or counts of classes. Leave one out")
            shares = class_shares(self.counts, len(clients))
        self._groups = [] if self.counts is None else groups(self.counts)
        self.shares, self._likelihood = shares, likelihood
        if shares is not None:
            self._check_shares(shares)
        self.temperatures = self._checked(temperatures)
        self._pooling = False
        self.views: tuple[Function, ...] = (_as_it_is,)
        """Inputs as they are and, of photographs, in a mirror (`mirrored`)."""
        self._swapped: tuple[int, int] | None = None
        self._apart = self.counts is not None and bool(((self.counts > 0).sum(1) < 2).all())
        self._evidence: Evidence | None = None

    @torch.no_grad()
    def compared(self, draws: Batches) -> "Teacher":
        """The same, with preferences on the scale that they have on these inputs (`Evidence`).

        Only if no client has two classes, or none connects two groups of them. All others are the
        same on any inputs.
        """
        if self.counts is None or not (self._apart or len(self._groups) > 1):
            return self
        found, seen = copy.copy(self), []
        for number in range(COMPARED):
            x = draws.batch(-1 - number, CHUNK)
            seen.append(self._preferred(self._stacked([client(x) for client in self.clients])))
        preferred, theta = torch.cat(seen), frequencies(self.counts)
        if self._apart:
            scale = whitening(preferred, self.counts.sum(0) > 0)
        else:
            had = torch.stack([(self.counts * own.to(self.counts)).sum(1) for own in self._groups])
            warm = torch.tensor([1 if t is None else t for t in self.temperatures]).to(had)
            scale = scaling(preferred, had @ warm / had.sum(1))
            theta = had.sum(1) / had.sum()
        found._evidence = Evidence.of(preferred, scale, theta)
        return found

    def _preferred(self, outputs: Tensor) -> Tensor:
        """What clients say of classes or groups that none compares, [n, K] or [n, G], from their
        outputs [S, n, K].
        """
        assert self.counts is not None
        assert self.shares is not None
        kind = self.likelihood(outputs.shape[-1])
        assert isinstance(kind, Classes)
        if self._apart:
            return preferences(kind.normalized(outputs), self.shares)
        scores = kind.normalized(self._tempered(outputs, kind))
        return clarity(scores, self.counts.to(scores.device), self._groups)

    def _tempered(self, outputs: Tensor, kind: Likelihood) -> Tensor:
        """The clients' outputs [S, n, K] at their temperatures."""
        if not any(self.temperatures):
            return outputs
        return torch.stack(
            [
                f if t is None else at_temperature(kind, f[None], t)[0]
                for f, t in zip(outputs, self.temperatures, strict=True)
            ]
        )

    @torch.no_grad()
    def mirrored(self, draws: Batches) -> "Teacher":
        """The same, with one prediction for an image and its mirror image: of mean log-probability.

        Of photographs it is the more accurate one. Other inputs (`Batches.mirrors`) and likelihoods
        without classes stay as they are. So do classes of which two change places in a mirror, such
        as left and right: their log-odds at inputs and at mirror images have a correlation below
        `ALIKE`.
        """
        if not draws.mirrors:
            return self
        x = draws.batch(-1, CHUNK)[:MIRRORED]
        kind = self.likelihood(self(x[:1]).shape[-1])
        if x.ndim != 4 or not isinstance(kind, Classes):
            return self
        pieces = torch.split(x, _PIECE)
        with progress("comparing mirror images", len(pieces)) as advance:
            logs = []
            for piece in pieces:
                logs.append([kind.normalized(self(view)) for view in (piece, mirror(piece))])
                advance(1)
        before, after = (torch.cat(each).double() for each in zip(*logs, strict=True))
        alike = _correlations(before, after)
        found = copy.copy(self)
        if alike.min() < ALIKE:
            found._swapped = divmod(int(alike.argmin()), len(alike))
        else:
            found.views = (_as_it_is, mirror)
        return found

    def joined(self, several: Sequence[Tensor]) -> Tensor:
        """Outputs [n, K] of all views together, from those of each: `of`, in their order."""
        if len(several) == 1:
            return several[0]
        kind = self.likelihood(several[0].shape[-1])
        assert isinstance(kind, Classes)
        return kind.outputs_of(torch.stack([kind.normalized(f) for f in several]).mean(0))

    def pooled(self) -> "Teacher":
        """The same, as confident as all samples together make it, if clients are calibrated.

        A client with few samples has logits that are off by a variance w. Calibrated, it divides
        them by (1 + λ w)^½. The mean of N clients, whose errors correlate by ρ = 50 / (50 + n)
        with n samples on average, is off by w (ρ + (1 − ρ) / N) only; ρ is 0 if nobody knows n. So
        the sum of logits is multiplied by

            a = ((1 + λ w) / (1 + λ w (ρ + (1 − ρ) / N)))^½.

        A mean of probabilities is flatter than the mean of their logits, by
        b = (1 + λ v (1 − 1/N))^½. So logits of q, and of a mixture, are multiplied by a b.

        At each input v is twice the variance of the clients' calibrated logits, less log p_s,
        around their mean by shares. (1 − ρ) w is the same of these logits times max(1, T_s), as
        they were before calibration. N is 1 / Σ_s π_sk², the mean over the classes that t predicts.

        Without temperatures of clients, and of other likelihoods than classes, it is the teacher.
        """
        found = copy.copy(self)
        found._pooling = any(self.temperatures)
        return found

    def _checked(self, temperatures: Temperatures | None) -> tuple[float | None, ...]:
        if temperatures is None:
            return (None,) * len(self.clients)
        found = tuple(None if t is None else float(t) for t in temperatures)
        given = [t for t in found if t is not None]
        if len(found) != len(self.clients) or not all(0 < t < math.inf for t in given):
            raise ModelError(
                f"temperatures are {list(found)}, but each of the {len(self.clients)} clients "
                "needs one above 0, or None"
            )
        kind = self._likelihood
        if given and kind is not None and not has_temperature(kind):
            raise ModelError(f"predictions of the likelihood {kind.name} have no temperature")
        return found

    @property
    def told(self) -> str:
        """What the prediction is made of, in a sentence for users."""
        return f"{self._made_of}{self._of_mirrors}{self._of_groups}"

    @property
    def _of_groups(self) -> str:
        """Which classes no client compares, to be added to it."""
        if len(self._groups) < 2 or self._apart:
            return ""
        names = self.likelihood(len(self._groups[0])).target.names
        each = [listed((names[int(k)] for k in own.nonzero()), 3) for own in self._groups]
        return (
            ". No model has enough samples of two of these groups of classes, so the more likely "
            f"group is where a model is more certain: {listed(each, 3, ' | ')}"
        )

    @property
    def _of_mirrors(self) -> str:
        """Whether mirror images count, to be added to it."""
        if self._swapped is not None:
            names = self.likelihood(max(self._swapped) + 1).target.names
            left, right = (names[place] for place in self._swapped)
            return f". Mirror images do not count: in a mirror {left} and {right} change places"
        return "; each image counts with its mirror image" if len(self.views) > 1 else ""

    @property
    def _made_of(self) -> str:
        by = "counts of classes" if self.counts is not None else "shares"
        how = f"ensemble prediction by {by}" if self.shares is not None else "mean prediction"
        if self._apart:
            return (
                "the teacher is how far each model prefers its only class, since no client has "
                "two; its probabilities are rough"
            )
        given = [t for t in self.temperatures if t is not None]
        if not given:
            return f"the teacher is the {how} of the models, none of which has a temperature"
        without = [n for n, t in zip(self.names, self.temperatures, strict=True) if t is None]
        span = " to ".join(dict.fromkeys(f"{t:.3g}" for t in (min(given), max(given))))
        left = f"; {listed(without, 3)} have no temperature" if without else ""
        return f"the teacher is the {how} of the models at temperatures of {span}{left}"

    def _check_shares(self, shares: Tensor) -> None:
        if len(shares) != len(self.clients):
            raise ModelError(f"shares have {len(shares)} clients; there are {len(self.clients)}")
        if not (shares >= 0).all() or not torch.allclose(
            shares.sum(0), torch.ones(shares.shape[1:]).to(shares), atol=1e-4
        ):
            raise ModelError("clients' shares must be at least 0 and add to 1")
        kind = self._likelihood
        if shares.ndim > 1 and kind is not None and not isinstance(kind, Classes):
            raise ModelError(
                f"shares by class need classes, but the likelihood {kind.name} has none. Give a "
                "weight for each client"
            )

    def __call__(self, x: Tensor) -> Tensor:
        """Outputs [n, K] at inputs [n, ...]."""
        seen = [view(x) for view in self.views]
        return self.joined([self.of([client(x) for client in self.clients]) for x in seen])

    def of(self, outputs: Sequence[Tensor]) -> Tensor:
        """What the clients' outputs in one view, each [n, K], come to.

        Raises:
            ModelError: clients differ in the number of outputs, one is not finite, the shares
                are of another number of classes, or one output is to be all classes.
        """
        draws = self._stacked(outputs)
        kind = self.likelihood(draws.shape[-1])
        if self._apart:
            assert isinstance(kind, Classes)
            assert self.shares is not None
            if self._evidence is None:
                raise ModelError(
                    "no client has two classes, so their predictions are compared on synthetic "
                    "inputs. Use Teacher.compared(inputs)"
                )
            return kind.outputs_of(self._evidence.log_probabilities(self._preferred(draws)))
        raw, draws = draws, self._tempered(draws, kind)
        if self.shares is None or self.shares.ndim == 1:
            weights = self.shares
            if weights is None:
                weights = draws.new_full((len(draws),), 1 / len(draws))
            mixture = kind.pooled(draws, weights)
            if not self._pooling or not isinstance(kind, Classes):
                return mixture
            log = kind.normalized(mixture)
            spread = kind.normalized(draws)
            own = weights[:, None].expand(-1, log.shape[-1]).to(draws)
            a, b = sharpness(spread, own, log, self.temperatures)
            return kind.outputs_of((a * b * log).log_softmax(-1))
        assert isinstance(kind, Classes)
        scores = kind.normalized(draws)
        shares = self.shares.to(draws)
        if self.counts is None:
            scores = scores - scores.mean(-1, keepdim=True)
            return kind.outputs_of((shares[:, None] * scores).sum(0))
        counts = self.counts.to(draws.device)
        scores = scores - scores.mean(-1, keepdim=True)
        deviation = _deviation(scores, shares[:, None])
        softness = SOFTNESS_OF_CHAIN * self._untold(counts).to(draws)
        softer = 1 + softness[:, None, None] * deviation
        chain = stationary(scores / softer, counts).log()
        temperature = 1 + SOFTNESS * deviation
        level = temperature * torch.logsumexp(scores / temperature, -1, keepdim=True)
        total = (shares[:, None] * (scores - level)).sum(0) + class_offsets(counts).to(draws)
        total = total.log_softmax(-1)
        if self._pooling:
            own = ((counts + 1) / (counts + 1).sum(1, keepdim=True)).log().to(draws)
            told = kind.normalized(draws) - own[:, None]
            samples = float(counts.sum()) / len(counts)
            a, b = sharpness(told, shares, (chain + total) / 2, self.temperatures, samples)
            chain, total = a * b * chain, a * total
        found = (chain + total) / 2
        if len(self._groups) > 1:
            of_each = in_groups(total, self._groups).log_softmax(-1)
            if self._evidence is not None:
                of_each = (of_each + self._evidence.log_probabilities(self._preferred(raw))) / 2
            found = of_groups(found, of_each, self._groups)
        return kind.outputs_of(found)

    def _stacked(self, outputs: Sequence[Tensor]) -> Tensor:
        """The clients' outputs as one tensor [S, n, K]; errors as for `of`."""
        if outputs[0].shape[-1] == 1 and isinstance(self.likelihood(1), Categorical):
            # Any prediction of a single class is right, and a fused network would be noise.
            raise ModelError(
                "the networks have one output, which is a number or the logit of a class. Fuse "
                "files of fedbayes with cards, or fuse by weights (average, permute)"
            )
        for name, said in zip(self.names, outputs, strict=True):
            if said.shape != outputs[0].shape:
                raise ModelError(
                    f"{name} returns {tuple(said.shape)} and {self.names[0]} "
                    f"{tuple(outputs[0].shape)}: all must have the same outputs"
                )
        draws = torch.stack(list(outputs)).float()
        if not torch.isfinite(draws).all():
            bad = [n for n, f in zip(self.names, draws, strict=True) if not torch.isfinite(f).all()]
            raise ModelError(
                f"outputs of {bad[0]} are not finite on synthetic inputs. Leave it out, or check "
                "that inputs are scaled like its training data"
            )
        kind = self.likelihood(draws.shape[-1])
        if self.shares is not None and self.shares.ndim > 1 and isinstance(kind, Classes):
            known = kind.normalized(draws[:1, :1]).shape[-1]
            if known != self.shares.shape[1]:
                raise ModelError(
                    f"shares have {self.shares.shape[1]} classes, but the networks have {known}"
                )
        return draws

    def _untold(self, counts: Tensor) -> Tensor:
        """Frequency of the classes that a client's temperature says nothing of, [S].

        Among those of its groups: q compares no others (`of_groups`).
        """
        fitted = torch.tensor([t is not None for t in self.temperatures], device=counts.device)
        compared = torch.ones_like(counts, dtype=torch.bool)
        for own in self._groups:
            inside = own.to(counts.device)
            compared &= ((counts * inside).sum(1, keepdim=True) > 0) | ~inside
        of_all = compared * frequencies(counts)
        lacking = ((counts == 0) * of_all).sum(1) / of_all.sum(1).clamp_min(_SMALLEST)
        return torch.where(fitted, lacking, 1.0)

    def likelihood(self, outputs: int) -> Likelihood:
        """What outputs mean: as given, or a class for each."""
        if self._likelihood is None:
            names = tuple(map(str, range(outputs)))
            self._likelihood = Categorical(target=Target("class", names))
        return self._likelihood


def mirror(x: Tensor) -> Tensor:
    """Inputs along the last axis in the other direction."""
    return x.flip(-1)


def _correlations(a: Tensor, b: Tensor) -> Tensor:
    """Of a_j − a_k and b_j − b_k over the rows of two tables [n, K], for all j and k; 1 where one
    of them is constant.
    """

    def of_pairs(one: Tensor, other: Tensor) -> Tensor:
        joint = (one - one.mean(0)).T @ (other - other.mean(0))
        diagonal = joint.diagonal()
        return diagonal[:, None] + diagonal - joint - joint.T

    size = (of_pairs(a, a) * of_pairs(b, b)).clamp_min(0).sqrt()
    return torch.where(size > _SMALLEST, of_pairs(a, b) / size, 1.0)


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _deviation(scores: Tensor, shares: Tensor) -> Tensor:
    """The clients' geometric mean standard deviation over classes, by shares, [n, 1]."""
    weights = shares.mean(-1, keepdim=True)
    variance = scores.double().square().mean(-1, keepdim=True) * (weights > 0)
    variance = torch.maximum(variance, _LEAST * variance.amax(0, keepdim=True)) + _SMALLEST
    return ((weights * variance.log()).sum(0) / 2).exp().to(scores)


def divergence(outputs: Tensor, teacher_outputs: Tensor, likelihood: Likelihood) -> Tensor:
    """KL(teacher's prediction ‖ the network's) in nats, the mean over inputs, a scalar.

    Args:
        outputs: of the network, [n, K].
        teacher_outputs: [n, K].
        likelihood: what outputs mean.
    """
    return likelihood.divergence(teacher_outputs, outputs).mean()
