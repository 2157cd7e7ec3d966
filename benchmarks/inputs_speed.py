"""Images, or rows, that each input prior draws in a second of one core's time.

python benchmarks/inputs_speed.py
"""

import argparse
from time import process_time

import numpy as np
import torch

from fedbayes.inputs import build_prior, sums_of

BATCH = 2000


def table(width: int) -> np.ndarray:
    """Correlated rows, of which every tenth feature is one of three categories."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((1000, width)) @ rng.standard_normal((width, width))
    rows[:, ::10] = np.digitize(rows[:, ::10], [-3.0, 3.0])
    return rows


def main() -> None:
    """Print a line for each prior and shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=2)
    batches = parser.parse_args().batches
    torch.set_num_threads(1)
    names = [str(feature) for feature in range(0, 100, 10)]
    tables = {"normal": None, "copula": sums_of(table(100), categories=names)}
    cases = [
        *(("leaves", shape, None) for shape in [(3, 32, 32), (1, 28, 28), (3, 96, 96)]),
        *(("strokes", shape, None) for shape in [(1, 28, 28), (1, 64, 64)]),
        *(("noise", shape, None) for shape in [(3, 32, 32), (6, 128)]),
        ("tones", (1024,), None),
        *(("gaussian", (100,), name) for name in tables),
    ]
    print("prior     shape            a second   20,000 in")
    for name, shape, kind in cases:
        prior = build_prior(name, shape, sums=tables[kind] if kind else None)
        rng = np.random.default_rng(0)
        prior.draw(10, rng)
        began = process_time()
        for _ in range(batches):
            prior.draw(BATCH, rng)
        rate = batches * BATCH / (process_time() - began)
        print(f"{kind or name:9} {shape!s:15} {rate:9,.0f} {20_000 / rate:9.1f} s")


if __name__ == "__main__":
    main()
