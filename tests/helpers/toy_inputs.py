"""An input prior that is small, for tests of what is done with inputs."""

import torch

from fedbayes.inputs.prior import InputPrior, Inputs


class Gauss(InputPrior):
    """Standard normal inputs of any shape."""

    name = "toy"

    def draw(self, count, rng):
        return torch.from_numpy(rng.normal(size=(count, *self.shape))).float()

    def augmented(self, x, rng):
        return x * torch.randint(0, 2, (len(x), *[1] * (x.ndim - 1)), generator=rng).mul(2).sub(1)


def inputs(prior, seed=0):
    return Inputs(prior, torch.tensor(0.0), torch.tensor(1.0), seed)
