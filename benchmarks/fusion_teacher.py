"""What the clients say together, by how its normalizer is taken: accuracy of the teacher alone.

    python benchmarks/fusion_teacher.py fedfisher-0.1 cifar10-lenet mnist-mlp --keep validation

Clients of the cases of `fusion.py` have 20,000 training samples, and 5,000 others judge, as with
its `--validation 20000`. With counts the teacher is

    log t_k = log p_k + Σ_s share_sk (f_sk − T log Σ_j exp(f_sj / T) − log p_s(k)) + const,

and T is a number, or so many times the deviation of f over the classes, the mean over clients: once
is what `fedbayes.fusion.teacher.Teacher` has. Also its column for networks that are surer: all f
twice as large, which changes nobody's predictions.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch
from fusion import CASES, Clients
from torch import Tensor

from fedbayes.fusion.teacher import Teacher, class_offsets, class_shares, frozen
from fedbayes.papers.finding import markdown

NUMBERS = (1.0, 3.0)
TIMES = (0.5, 1.0, 2.0)


def spread(f: Tensor) -> Tensor:
    """Deviation of outputs [S, n, K] over the classes, the mean over clients, [n, 1]."""
    return f.std(-1, correction=0, keepdim=True).mean(0)


def added_up(f: Tensor, counts: Tensor, temperature: Tensor | float) -> Tensor:
    """The formula above, [n, K]."""
    level = temperature * torch.logsumexp(f / temperature, -1, keepdim=True)
    return (class_shares(counts)[:, None] * (f - level)).sum(0) + class_offsets(counts)


def lines(clients: Clients) -> dict[str, str]:
    """Accuracy of each teacher on what judges the clients."""
    x, y = clients.test.x, clients.test.y.long()
    networks = [frozen(network) for network in clients.networks.values()]
    counts = torch.as_tensor(clients.counts)
    with torch.no_grad():
        outputs = [torch.cat([network(part) for part in x.split(500)]) for network in networks]
    f = torch.stack(outputs).float()

    def accuracy(said: Callable[[Tensor], Tensor]) -> str:
        once, twice = ((said(g).argmax(-1) == y).float().mean() for g in (f, 2 * f))
        return f"{once:.3f} ({twice:.3f})"

    row = {
        "mean of probabilities": accuracy(lambda g: g.softmax(-1).mean(0)),
        "class-share logits": accuracy(Teacher(networks, class_shares(counts)).of),
    }
    for number in NUMBERS:
        row[f"T = {number:g}"] = accuracy(lambda g, t=number: added_up(g, counts, t))
    for times in TIMES:
        name = f"{times:g} deviations"
        row[name] = accuracy(lambda g, k=times: added_up(g, counts, k * spread(g)))
    row["deviation"] = f"{spread(f).mean():.1f}"
    return row


def main() -> None:
    """Print a row for each case and seed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="+", choices=list(CASES))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument(
        "--samples", type=int, default=20_000, help="of training, that clients have"
    )
    parser.add_argument("--keep", type=Path, default=Path("fusion-runs"))
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    found = []
    for name in given.cases:
        case = CASES[name].validation(given.samples)
        for seed in range(given.seeds):
            clients = Clients(f"{name}-validation", seed, given.keep.absolute(), case)
            found.append({"case": name, "seed": seed} | lines(clients))
    print(markdown(pd.DataFrame(found)))


if __name__ == "__main__":
    main()
