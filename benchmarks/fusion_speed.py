"""Seconds of least squares in function space against the number of clients, and the width.

    python benchmarks/fusion_speed.py [--clients 2 5 10] [--widths 1 2] [--draws 4096]

Networks are LeNets of images of 32 by 32 as they start, inputs standard normal: what is computed
does not depend on either. The last column is the part of the time that the teacher would take to
answer all draws once, measured in the same run.
"""

import argparse
from time import perf_counter

import torch

from fedbayes.fusion.regression import regress
from fedbayes.fusion.teacher import Teacher
from fedbayes.models import LeNet5

BATCH = 512


def main() -> None:
    """Print a row for each number of clients and width."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[2, 5, 10])
    parser.add_argument("--widths", type=float, nargs="+", default=[1.0, 2.0])
    parser.add_argument("--draws", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    batches = max(1, options.draws // BATCH)
    inputs = torch.randn(batches, BATCH, 3, 32, 32)
    print(f"{batches * BATCH} draws, {options.threads} threads")
    print(f"{'clients':>7} {'width':>6} {'seconds':>8} {'teacher':>8}")
    for count in options.clients:
        modules = [LeNet5(3, 32, 32, 10).eval() for _ in range(count)]
        teacher = Teacher(modules, torch.full((count, 10), 1 / count))
        begin = perf_counter()
        with torch.no_grad():
            for batch in inputs:
                teacher(batch)
        once = perf_counter() - begin
        for width in options.widths:
            begin = perf_counter()
            regress(modules, modules[0], teacher, inputs.__getitem__, batches, widths=width)
            print(f"{count:7} {width:6g} {perf_counter() - begin:8.1f} {once:8.1f}", flush=True)


if __name__ == "__main__":
    main()
