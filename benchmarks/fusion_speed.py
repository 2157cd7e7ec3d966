"""Seconds of least squares in function space against the number of clients, and the width.

    python benchmarks/fusion_speed.py [--clients 2 5 10] [--widths 1 2] [--draws 4096] [--whole]

Networks are LeNets of images of 32 by 32 as they start, inputs standard normal: what is computed
does not depend on either. The last column is the part of the time that the teacher would take to
answer all draws once, measured in the same run. With `--whole` it is all that `fedbayes fuse` does
by default: leaves are drawn, least squares for two choices of units, training end to end.
"""

import argparse
from time import perf_counter

import torch

from fedbayes.fusion.function import fuse_functions
from fedbayes.fusion.regression import UNSEEN, regress
from fedbayes.fusion.teacher import Teacher
from fedbayes.inputs import Inputs, build_prior
from fedbayes.models import LeNet5

BATCH = 512


def whole(count: int, width: float) -> dict[str, float]:
    """Seconds of the parts of a fusion with its defaults."""
    clients = {str(number): LeNet5(3, 32, 32, 10).eval() for number in range(count)}
    centre, spread = torch.tensor([0.49, 0.48, 0.45]), torch.tensor([0.25, 0.24, 0.26])
    inputs = Inputs(build_prior("leaves", (3, 32, 32)), centre, spread)
    counts = torch.randint(1, 500, (count, 10))
    fused = fuse_functions(clients, clients["0"], inputs, counts=counts, widths=width)
    return {name: round(seconds, 1) for name, seconds in fused.seconds.items()}


def main() -> None:
    """Print a row for each number of clients and width."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[2, 5, 10])
    parser.add_argument("--widths", type=float, nargs="+", default=[1.0, 2.0])
    parser.add_argument("--draws", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--whole", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.whole:
        for count in options.clients:
            for width in options.widths:
                print(count, f"width {width:g}", whole(count, width), flush=True)
        return
    batches = max(1, options.draws // BATCH)
    inputs = torch.randn(batches + UNSEEN, BATCH, 3, 32, 32)
    print(f"{batches * BATCH} draws, {options.threads} threads")
    print(f"{'clients':>7} {'width':>6} {'seconds':>8} {'teacher':>8}")
    for count in options.clients:
        modules = [LeNet5(3, 32, 32, 10).eval() for _ in range(count)]
        teacher = Teacher(modules, torch.full((count, 10), 1 / count))
        begin = perf_counter()
        with torch.no_grad():
            for batch in inputs[:batches]:
                teacher(batch)
        once = perf_counter() - begin
        for width in options.widths:
            begin = perf_counter()
            regress(modules, modules[0], teacher, inputs.__getitem__, batches, widths=width)
            print(f"{count:7} {width:6g} {perf_counter() - begin:8.1f} {once:8.1f}", flush=True)


if __name__ == "__main__":
    main()
