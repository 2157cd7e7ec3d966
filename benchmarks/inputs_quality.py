"""How well a network learns from each input prior what five clients' networks say together.

Clients hold 12,000 training images by Dirichlet shares (0.5) and train a small LeNet each. A
student from random weights fits their class-share logits on 5,000 draws of a prior, or on as many
other real images, by squared error. With `+ sums` draws have the mean and spectra of the clients'
images. What is printed is measured on 3,000 further training images;
no test image is read.

    FEDBAYES_DATA=data python benchmarks/inputs_quality.py cifar10
"""

import argparse

import numpy as np
import torch
from torch import Tensor, nn

from fedbayes.data import DataSettings, load_dataset
from fedbayes.fusion.teacher import Teacher
from fedbayes.inputs import InputPrior, Inputs, build_prior
from fedbayes.inputs.spectra import spectra_of

CLIENTS, BATCH = 5, 64
PRIORS = {
    "cifar10": ("real", "leaves", "noise", "strokes", "white"),
    "mnist": ("real", "strokes", "leaves", "noise", "white"),
}
SUMS = " + sums"
"""After the name of a prior: with the mean and spectra of the clients' images."""


class Real(InputPrior):
    """Real images, in place of a prior."""

    name, assumes = "real", "real images"

    def __init__(self, x: Tensor) -> None:
        super().__init__(tuple(x.shape[1:]))
        self.x = x

    def draw(self, count: int, rng: np.random.Generator) -> Tensor:
        return self.x[torch.from_numpy(rng.choice(len(self.x), count, replace=False))]


class White(InputPrior):
    """White noise, for comparison."""

    name, assumes = "white", "nothing"

    def draw(self, count: int, rng: np.random.Generator) -> Tensor:
        x = 0.5 + 0.25 * rng.standard_normal((count, *self.shape), np.float32)
        return torch.from_numpy(x.clip(0, 1))


def lenet(shape: tuple[int, ...]) -> nn.Module:
    """Of a third of the usual widths."""
    channels, height, width = shape
    flat = 24 * (((height - 4) // 2 - 4) // 2) * (((width - 4) // 2 - 4) // 2)
    convolutions = [nn.Conv2d(channels, 12, 5), nn.Conv2d(12, 24, 5)]
    stages = [part for one in convolutions for part in (one, nn.ReLU(), nn.MaxPool2d(2))]
    return nn.Sequential(*stages, nn.Flatten(), nn.Linear(flat, 64), nn.ReLU(), nn.Linear(64, 10))


def trained(x: Tensor, y: Tensor, seed: int, epochs: int) -> nn.Module:
    """A client's network."""
    torch.manual_seed(seed)
    network = lenet(tuple(x.shape[1:]))
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(y)).split(BATCH):
            loss = nn.functional.cross_entropy(network(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return network.eval()


def distilled(teacher: Teacher, x: Tensor, start: nn.Module, steps: int, seed: int) -> None:
    """Fit the teacher's centred logits on these inputs, over their variance."""
    rng = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(start.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    with torch.no_grad():
        wanted = torch.cat([teacher(part) for part in x.split(256)])
    for _ in range(steps):
        rows = torch.randint(len(x), (BATCH,), generator=rng)
        said = start(x[rows])
        error = said - said.mean(-1, keepdim=True) - wanted[rows]
        loss = (error**2).mean() / wanted.var()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def main() -> None:
    """Print a line for each prior."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", choices=list(PRIORS))
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--draws", type=int, default=5000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--priors", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = load_dataset(DataSettings(name=options.data))
    order = np.random.default_rng(5).permutation(data.official_train)
    parts = [np.sort(rows) for rows in np.split(order[:25_000], [12_000, 15_000])]
    (x, y), (held, labels), (other, _) = (
        (torch.from_numpy(data.x[rows].astype(np.float32) / 255), torch.from_numpy(data.y[rows]))
        for rows in parts
    )
    mean, std = torch.tensor(data.mean), torch.tensor(data.std)
    shape = tuple(x.shape[1:])
    scaled = Inputs(Real(x), mean, std).scaled
    rng = np.random.default_rng(3)
    owner = np.empty(len(y), np.int64)
    for label in range(10):
        rows = np.flatnonzero(y.numpy() == label)
        owner[rows] = rng.choice(CLIENTS, len(rows), p=rng.dirichlet([0.5] * CLIENTS))
    mine = [torch.from_numpy(np.flatnonzero(owner == client)) for client in range(CLIENTS)]
    counts = torch.stack([torch.bincount(y[rows], minlength=10) for rows in mine]).float()
    clients = [
        trained(scaled(x[rows]), y[rows], client, options.epochs)
        for client, rows in enumerate(mine)
    ]
    teacher = Teacher(clients, counts / counts.sum(0))
    held = scaled(held)
    with torch.no_grad():
        said = teacher(held).argmax(-1)
        locals_ = [float((client(held).argmax(-1) == labels).float().mean()) for client in clients]
    right = float((said == labels).float().mean())
    print(f"{options.data}: clients {np.mean(locals_):.3f}, together {right:.3f}", flush=True)
    print("prior           accuracy  deviation  agreement", flush=True)
    sums, own = spectra_of(x.numpy()), {"real": Real(other), "white": White(shape)}
    known = [name + SUMS for name in PRIORS[options.data] if name not in own]
    for name in options.priors or (*PRIORS[options.data], *known):
        plain, summed, _ = name.partition(SUMS)
        prior = own.get(name) or build_prior(plain, shape, sums=sums if summed else None)
        found = []
        for seed in range(options.seeds):
            torch.manual_seed(100 + seed)
            student = lenet(shape)
            inputs = Inputs(prior, mean, std, seed)
            draws = inputs.augmented(inputs.batch(0, options.draws), torch.Generator())
            distilled(teacher, draws, student, options.steps, seed)
            with torch.no_grad():
                guess = student.eval()(held).argmax(-1)
            found.append([float((guess == truth).float().mean()) for truth in (labels, said)])
        accuracy, agreement = np.mean(found, 0)
        deviation = np.std([row[0] for row in found])
        print(f"{name:15} {accuracy:8.3f} {deviation:10.3f} {agreement:10.3f}", flush=True)


if __name__ == "__main__":
    main()
