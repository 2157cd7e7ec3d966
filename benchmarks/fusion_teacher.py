"""The clients' networks together, by rule: accuracy, NLL and ECE of the teacher alone.

    python benchmarks/fusion_teacher.py fedfisher-0.1 mnist-mlp digits --keep validation

Clients of the cases of `fusion.py` have 20,000 training samples, and 5,000 others judge, as with
its `--validation 20000`. `digits` are the clients of `fusion_rounds.py`, Dirichlet .1, in the first
three rounds of averaging, judged by the test samples: some have one class alone. Each client fits a
temperature to its share of 500 of the judging samples (a fifth at most), of classes as frequent as
its own; the others judge. Rules are those of `fedbayes.fusion.teacher.Teacher`:

- `sum`: the sum of logits with T = 1 and 0.6 deviations;
- `chain`: the stationary distribution, with T = 1 and 0.4 deviations;
- `both`: their geometric mean, the teacher without temperatures of clients; groups of classes that
  no client connects have the probabilities of the sum;
- `sum, T_s`, `chain, T_s`, `both, T_s`: likewise after each client's outputs are divided by its
  temperature, the chain at T = 1;
- `both, T_s, lacking`: likewise with T = 1 and 0.4 deviations times the frequency of the classes
  that a client lacks in the chain, the teacher with temperatures;
- `groups compared`: where no client connects groups of classes, likewise with probabilities of
  groups by how clear-cut their clients find an input, the teacher of these;
- `mirrored`: the same, the mean of each photograph and its mirror image: the teacher of these;
- `both, ε = .01`: likewise with a larger ε.

Clients of one class each (`fedlpa-1`) have other rules, by how far networks prefer their class:

- `preferences`: with offsets by which classes are as frequent on synthetic inputs as among all
  samples;
- `standardized`: likewise after each is standardized on synthetic inputs;
- `white`: likewise after they are whitened there; the teacher.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from fusion import CASES, Clients
from fusion_rounds import FusionCase
from torch import Tensor, nn
from torch.nn import functional

from fedbayes.core.metrics import calibrate
from fedbayes.core.targets import Target
from fedbayes.core.tensors import Samples
from fedbayes.errors import DataError
from fedbayes.fusion.class_counts import (
    RESTART,
    class_offsets,
    class_shares,
    frequencies,
    groups,
    in_groups,
    of_groups,
    stationary,
)
from fedbayes.fusion.combining import combine
from fedbayes.fusion.draws import CHUNK
from fedbayes.fusion.frozen import frozen
from fedbayes.fusion.teacher import COMPARED, SOFTNESS, SOFTNESS_OF_CHAIN, Teacher, mirror
from fedbayes.fusion.uncompared import SPREAD, Evidence, preferences, whitening
from fedbayes.inputs import Inputs
from fedbayes.likelihoods import build_likelihood
from fedbayes.likelihoods.temperature import temperature_sums
from fedbayes.workflows.fuse.network_fusing import drawn
from fedbayes_papers.finding import markdown

ROUNDS, EPOCHS, ALPHA = 3, 8, 0.1
"""Of `digits`."""
KEPT = 500
"""Samples of all clients that temperatures are fitted to, a fifth of the judging ones at most."""


def deviation(f: Tensor, counts: Tensor) -> Tensor:
    """Deviation of outputs [S, n, K] over the classes, the geometric mean over clients, [n, 1]."""
    weights = class_shares(counts).mean(1)[:, None, None]
    return (weights * f.std(-1, correction=0, keepdim=True).log()).sum(0).exp()


def added_up(f: Tensor, counts: Tensor) -> Tensor:
    """The sum of logits, log-probabilities [n, K]."""
    warmth = 1 + SOFTNESS * deviation(f, counts)
    level = warmth * torch.logsumexp(f / warmth, -1, keepdim=True)
    total = (class_shares(counts)[:, None] * (f - level)).sum(0) + class_offsets(counts)
    return total.log_softmax(-1)


def both(f: Tensor, soft: Tensor, counts: Tensor, restart: float = RESTART) -> Tensor:
    """The mean of the sum of logits and of the chain of these, [n, K]."""
    chain, total = stationary(soft, counts, restart).log(), added_up(f, counts)
    masks = groups(counts)
    return of_groups((chain + total) / 2, in_groups(total, masks), masks)


def temperatures(f: Tensor, y: Tensor, counts: Tensor, rng: torch.Generator) -> tuple[Tensor, list]:
    """A temperature of each client [S], and the samples that they took."""
    free, found = torch.ones(len(y), dtype=torch.bool), []
    labels = build_likelihood("auto", Target("class", tuple(map(str, range(f.shape[-1])))))
    for said, own in zip(f, counts.double(), strict=True):
        chance = torch.where(free, own[y] / torch.bincount(y, minlength=len(own))[y], 0.0)
        share = float(own.sum() / counts.sum())
        wanted = min(round(min(KEPT, 0.2 * len(y)) * share), int((chance > 0).sum()))
        if not wanted:
            found.append(1.0)
            continue
        rows = torch.multinomial(chance, wanted, generator=rng)
        free[rows] = False
        try:
            found.append(temperature_sums(labels, said[None, rows], y[rows]).temperature())
        except DataError:
            found.append(1.0)
    return torch.tensor(found), free


def measured(
    networks: Sequence[nn.Module],
    counts: Tensor,
    test: Samples,
    seed: int,
    inputs: Inputs | None = None,
) -> dict[str, tuple[float, float, float]]:
    """Accuracy, NLL and ECE by rule; groups of classes are compared on the inputs, if any."""
    functions = [frozen(network) for network in networks]

    @torch.no_grad()
    def outputs(x: Tensor) -> Tensor:
        return torch.stack([torch.cat([f(part) for part in x.split(500)]) for f in functions])

    f = outputs(test.x).float()
    warmth, judge = temperatures(f, test.y, counts, torch.Generator().manual_seed(seed))
    f, y = f[:, judge], test.y[judge]
    teacher = Teacher(functions, counts=counts, temperatures=warmth)
    cold = f / warmth[:, None, None]
    soft = f / (1 + SOFTNESS_OF_CHAIN * deviation(f, counts))
    rules = {
        "mean of probabilities": f.softmax(-1).mean(0).log(),
        "class-share logits": Teacher(functions, class_shares(counts)).of(list(f)),
        "sum": added_up(f, counts),
        "chain": stationary(soft, counts).log(),
        "both": Teacher(functions, counts=counts).of(list(f)),
        "sum, T_s": added_up(cold, counts),
        "chain, T_s": stationary(cold, counts).log(),
        "both, T_s": both(cold, cold, counts),
        "both, T_s, lacking": teacher.of(list(f)),
        "both, ε = .01": both(f, soft, counts, 0.01),
    }
    if inputs is not None and len(groups(counts)) > 1:
        teacher = teacher.compared(inputs)
        rules["groups compared"] = teacher.of(list(f))
    if test.x.ndim == 4 and test.x.shape[1] > 1:
        reversed_f = outputs(mirror(test.x[judge])).float()
        rules["mirrored"] = teacher.joined([teacher.of(list(f)), teacher.of(list(reversed_f))])
    return {name: scores(log, y) for name, log in rules.items()}


def measured_apart(clients: Clients) -> dict[str, tuple[float, float, float]]:
    """The same of clients of one class each, without temperatures."""
    functions = [frozen(network) for network in clients.networks.values()]
    counts, test = torch.as_tensor(clients.counts), clients.test
    shares, theta = class_shares(counts), frequencies(counts)
    inputs = drawn(clients.silos, clients.prior, (), clients.seed)[1]
    synthetic = torch.cat([inputs.batch(-1 - number, CHUNK) for number in range(COMPARED)])

    @torch.no_grad()
    def outputs(x: Tensor) -> Tensor:
        return torch.stack([torch.cat([f(part) for part in x.split(500)]) for f in functions])

    f = outputs(test.x)
    seen = preferences(outputs(synthetic), shares).double()
    ways = {
        "preferences": torch.eye(len(theta)).double(),
        "standardized": SPREAD * torch.diag(1 / seen.std(0)),
        "white": whitening(seen, counts.sum(0) > 0),
    }
    rules = {
        "mean of probabilities": f.softmax(-1).mean(0).log(),
        "class-share logits": Teacher(functions, shares).of(list(f)),
    }
    for name, weights in ways.items():
        rules[name] = Evidence.of(seen, weights, theta).log_probabilities(preferences(f, shares))
    return {name: scores(log, test.y) for name, log in rules.items()}


def scores(log: Tensor, y: Tensor) -> tuple[float, float, float]:
    """Accuracy, NLL and ECE of logits."""
    confidence, chosen = log.softmax(-1).max(-1)
    right, nll = chosen == y, float(functional.cross_entropy(log, y))
    return float(right.float().mean()), nll, calibrate(confidence, right).error


def federations(
    name: str, seed: int, keep: Path
) -> Iterator[dict[str, tuple[float, float, float]]]:
    """Accuracy, NLL and ECE by rule, of each federation of a case and seed."""
    if name != "digits":
        clients = Clients(f"{name}-validation", seed, keep, CASES[name].validation(20_000))
        if ((clients.counts > 0).sum(1) < 2).all():
            yield measured_apart(clients)
            return
        networks, counts = list(clients.networks.values()), torch.as_tensor(clients.counts)
        inputs = drawn(clients.silos, clients.prior, (), seed)[1]
        yield measured(networks, counts, clients.test, seed, inputs)
        return
    federation, rng = FusionCase(name, ALPHA, seed), torch.Generator().manual_seed(seed)
    weights = federation.start
    for _ in range(ROUNDS):
        networks = [federation.local(weights, client, EPOCHS, rng) for client in range(10)]
        yield measured(networks, torch.as_tensor(federation.counts), federation.test, seed)
        weights = combine([dict(n.state_dict()) for n in networks], federation.weights)


def main() -> None:
    """Print a row for each case, the mean over seeds and rounds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="+", choices=[*CASES, "digits"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--keep", type=Path, default=Path("fusion-runs"))
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    lines = []
    for name in given.cases:
        found: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
        for seed in given.seeds:
            for by_rule in federations(name, seed, given.keep.absolute()):
                for teacher, three in by_rule.items():
                    found[teacher].append(three)
        means = {teacher: np.mean(pairs, axis=0) for teacher, pairs in found.items()}
        told = {rule: "{:.3f}, {:.2f}, {:.3f}".format(*three) for rule, three in means.items()}
        lines.append({"case": name} | told)
    print(markdown(pd.DataFrame(lines).fillna("")))


if __name__ == "__main__":
    main()
