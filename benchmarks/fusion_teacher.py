"""What the clients say together, by how its normalizer is taken: accuracy of the teacher alone.

    python benchmarks/fusion_teacher.py fedfisher-0.1 mnist-mlp digits --keep validation

Clients of the cases of `fusion.py` have 20,000 training samples, and 5,000 others judge, as with
its `--validation 20000`. `digits` are the clients of `fusion_rounds.py`, Dirichlet .1, in the first
three rounds of averaging, judged by the test samples: some have one class alone. With counts the
teacher is

    log t_k = log p_k + Σ_s share_sk (f_sk − T log Σ_j exp(f_sj / T) − log p_s(k)) + const,

and T is a number; or so many times the deviation of f over the classes, the geometric mean over
clients, each with its mean share; or 1 and 0.6 times that, as `fedbayes.fusion.teacher.Teacher` has
it. In parentheses networks are surer: all f are twice as large, which changes nobody's classes.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from fusion import CASES, Clients
from fusion_rounds import FusionCase
from torch import Tensor, nn

from fedbayes.core.tensors import Samples
from fedbayes.fusion.combining import combine
from fedbayes.fusion.teacher import Teacher, class_offsets, class_shares, frozen
from fedbayes_papers.finding import markdown

NUMBERS = (1.0, 3.0)
TIMES = (0.5, 0.75, 1.0)
ROUNDS, EPOCHS, ALPHA = 3, 8, 0.1
"""Of `digits`."""


def spread(f: Tensor, counts: Tensor) -> Tensor:
    """Deviation of outputs [S, n, K] over the classes, the geometric mean over clients, [n, 1]."""
    weights = class_shares(counts).mean(1)[:, None, None]
    return (weights * f.std(-1, correction=0, keepdim=True).log()).sum(0).exp()


def added_up(f: Tensor, counts: Tensor, temperature: Tensor | float) -> Tensor:
    """The formula above, [n, K]."""
    level = temperature * torch.logsumexp(f / temperature, -1, keepdim=True)
    return (class_shares(counts)[:, None] * (f - level)).sum(0) + class_offsets(counts)


def accuracies(
    networks: Sequence[nn.Module], counts: Tensor, test: Samples
) -> dict[str, tuple[float, float]]:
    """Of each teacher, and of the same where all outputs are twice as large."""
    functions = [frozen(network) for network in networks]
    with torch.no_grad():
        said = [torch.cat([f(part) for part in test.x.split(500)]) for f in functions]
    f = torch.stack(said).float()

    def accuracy(teacher: Callable[[Tensor], Tensor]) -> tuple[float, float]:
        once, twice = (float((teacher(g).argmax(-1) == test.y).float().mean()) for g in (f, 2 * f))
        return once, twice

    found = {
        "mean of probabilities": accuracy(lambda g: g.softmax(-1).mean(0)),
        "class-share logits": accuracy(Teacher(functions, class_shares(counts)).of),
    }
    for number in NUMBERS:
        found[f"T = {number:g}"] = accuracy(lambda g, t=number: added_up(g, counts, t))
    for k in TIMES:
        name = f"{k:g} deviations"
        found[name] = accuracy(lambda g, k=k: added_up(g, counts, k * spread(g, counts)))
    found["1 and 0.6"] = accuracy(lambda g: added_up(g, counts, 1 + 0.6 * spread(g, counts)))
    return found


def federations(
    name: str, seed: int, keep: Path
) -> Iterator[tuple[Sequence[nn.Module], Tensor, Samples]]:
    """Clients' networks, their counts of classes and what judges them."""
    if name != "digits":
        clients = Clients(f"{name}-validation", seed, keep, CASES[name].validation(20_000))
        yield list(clients.networks.values()), torch.as_tensor(clients.counts), clients.test
        return
    federation, rng = FusionCase(name, ALPHA, seed), torch.Generator().manual_seed(seed)
    weights = federation.start
    for _ in range(ROUNDS):
        networks = [federation.local(weights, client, EPOCHS, rng) for client in range(10)]
        yield networks, torch.as_tensor(federation.counts), federation.test
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
        found: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for seed in given.seeds:
            for federation in federations(name, seed, given.keep.absolute()):
                for teacher, pair in accuracies(*federation).items():
                    found[teacher].append(pair)
        means = {teacher: np.mean(pairs, axis=0) for teacher, pairs in found.items()}
        told = {teacher: f"{once:.3f} ({twice:.3f})" for teacher, (once, twice) in means.items()}
        lines.append({"case": name} | told)
    print(markdown(pd.DataFrame(lines)))


if __name__ == "__main__":
    main()
