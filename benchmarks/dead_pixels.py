"""How many weights of a logistic regression on MNIST have next to nothing to read.

    FEDBAYES_DATA=FOLDER python -m benchmarks.dead_pixels [--share 0.01]

Gates of single weights can close where a pixel is hardly ever on. Printed is the share of pixels
that are on in fewer than 1 % of all training images, and, for clients of one class each, in fewer
than 1 % of the images of a class.
"""

import argparse

import numpy as np

from fedbayes.data import DataSettings, load_dataset
from fedbayes_papers.weight_gates import lit


def main() -> None:
    """Print the shares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=float, default=0.01)
    options = parser.parse_args()
    on = lit("mnist")
    labels = np.asarray(load_dataset(DataSettings(name="mnist")).y).ravel()
    dead = [float((on[labels == k].mean(0) < options.share).mean()) for k in range(10)]
    print(f"of all images: {(on.mean(0) < options.share).mean():.3f}")
    print(f"of a class: {min(dead):.3f} to {max(dead):.3f}, mean {np.mean(dead):.3f}")


if __name__ == "__main__":
    main()
