"""How FedL1 gets rid of units that no sample ever moves: their norms over the rounds.

    python -m benchmarks.fedl1_dead_units [--rounds 1500] [--figure FILE]

A row of d weights, uniform in ±1/√d as PyTorch begins, that gets no gradient but the lasso's: a
client takes 8 steps of rate .05, each λ lr = 1e-4 of its norm; then both thresholds and the
server's step, as in FedL1. Printed is the round at which the row is left out, and its norm in the
last rounds where it never is.
"""

import argparse

import numpy as np
import torch

from fedbayes.core.tensors import Tensors
from fedbayes.methods.fedl1 import FedL1

STEPS, RATE, WIDTHS = 8, 0.05, (25, 75, 500, 1250)


def norms(method: FedL1, width: int, rounds: int, seed: int = 0) -> list[float]:
    """The norm of a dead row after each round; zeros once it is left out."""
    rng = torch.Generator().manual_seed(seed)
    weights: Tensors = {"w": (2 * torch.rand(1, width, generator=rng) - 1) / width**0.5}
    price = method.price(width)
    state: Tensors = {}
    found = []
    for _ in range(rounds):
        own = weights["w"].clone()
        for _ in range(STEPS):
            own -= RATE * price * own / own.norm().clamp_min(1e-30)
        own *= own.norm() > price
        weights, state = method.server_step(weights, {"w": weights["w"] - own}, state, 1.0)
        weights = {"w": weights["w"] * (weights["w"].norm() > price)}
        found.append(float(weights["w"].norm()))
        if not found[-1]:
            return found + [0.0] * (rounds - len(found))
    return found


def main() -> None:
    """Print the table, and draw it where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--figure", default="")
    options = parser.parse_args()
    curves = {}
    print("| server | d | λ of a group | left out in round | norm in the last 100 rounds |")
    print("| --- | --- | --- | --- | --- |")
    for label, method in (
        ("plain", FedL1(server_optimizer="sgd")),
        ("Adam", FedL1(server_optimizer="adam")),
        ("Adam, λ by size", FedL1(server_optimizer="adam", by_size=True)),
    ):
        for width in WIDTHS:
            found = norms(method, width, options.rounds)
            curves[label, width] = found
            gone = found.index(0.0) + 1 if 0.0 in found else None
            left = "" if gone else f"{np.mean(found[-100:]):.4f}"
            print(f"| {label} | {width} | {method.price(width):.4f} | {gone or 'never'} | {left} |")
    if options.figure:
        draw(curves, options.figure)


def draw(curves: dict[tuple[str, int], list[float]], path: str) -> None:
    """Norms over rounds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    styles = {"plain": "-", "Adam": "--", "Adam, λ by size": ":"}
    for (label, width), found in curves.items():
        shown = [value or np.nan for value in found]
        axes.plot(shown, styles[label], linewidth=1, label=f"{label}, d = {width}")
    axes.axhline(FedL1().l1, color="0.6", linewidth=0.8)
    axes.set(yscale="log", xlabel="round", ylabel="norm of a dead unit")
    axes.legend(fontsize="xx-small", ncols=3)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
