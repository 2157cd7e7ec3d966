"""Networks to fuse, and what fusions of them are compared with."""

import copy
from functools import cache

import numpy as np
import torch

from fedbayes.fusion.teacher import Teacher
from fedbayes.models.steps import clean
from fedbayes.models.units import find_units, permute
from tests.helpers.architectures import ARCHITECTURES


def network(name):
    """A network of `ARCHITECTURES`, its groups of units and its weights; each test has its own."""
    return copy.deepcopy(_network(name))


@cache
def _network(name):
    make, example = ARCHITECTURES[name]
    torch.manual_seed(0)
    module = shaken(make())
    groups = [group for group in find_units(module, example()).groups if not group.output]
    return module, groups, {n: t.clone() for n, t in clean(module).items()}


def shuffled(weights, groups, seed):
    """The same function with units in another order, within their cells."""
    rng = np.random.default_rng(seed)
    for group in groups:
        cells, order = np.array(group.cells), np.arange(group.count)
        for cell in set(group.cells):
            own = np.flatnonzero(cells == cell)
            order[own] = rng.permutation(own)
        weights = permute(weights, group, order.tolist())
    return weights


def shaken(module):
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer.uniform_(0.5, 1.5)
    return module.eval()


def trained_like(make, seed):
    """A network whose scales, shifts and running statistics are not those of a start."""
    rng = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = make().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=rng)
        for name, buffer in module.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(0, 0.2, generator=rng)
            if name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5, generator=rng)
    return module


def inputs(example, number, n=48):
    rng = torch.Generator().manual_seed(number)
    if example.dtype == torch.int64:
        return torch.randint(11, (n, *example.shape[1:]), generator=rng)
    return torch.randn(n, *example.shape[1:], generator=rng)


def teacher_of(modules, classes, seed=0):
    shares = torch.rand(len(modules), classes, generator=torch.Generator().manual_seed(seed))
    functions = [lambda x, m=module: m(x).detach() for module in modules]
    return Teacher(functions, shares / shares.sum(0))


def error(fused, teacher, x):
    """Relative, of centred outputs."""
    with torch.no_grad():
        one, two = (out - out.mean(-1, keepdim=True) for out in (fused(x), teacher(x)))
    return float((one - two).norm() / two.norm())
