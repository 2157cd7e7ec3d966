"""What the side of every framework has: its workload, and a line after every round."""

import json
import sys
from functools import cache
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parent.parent))  # of `pfl_speed`, which has the networks


@cache
def rows(folder):
    """The rows of all clients, and where each client's begin; nothing is read before use."""
    return [np.load(f"{folder}/{name}.npy", mmap_mode="r") for name in ("x", "y", "starts")]


class Workload:
    """A federation to train, of a JSON file: the one that the command line names, if none."""

    def __init__(self, file=None):
        self.__dict__ |= json.loads(Path(file or sys.argv[1]).read_text())
        self.number = 0

    def client(self, number):
        """The x and y of a client, in memory of their own."""
        x, y, starts = rows(self.folder)
        own = slice(starts[number], starts[number + 1])
        return np.array(x[own]), np.array(y[own])

    def tensors(self, number):
        import torch

        return tuple(map(torch.from_numpy, self.client(number)))

    def initial(self):
        """Every framework's first weights, in PyTorch's order and shapes."""
        with np.load(f"{self.folder}/initial.npz") as file:
            return [file[name] for name in file]

    def network(self):
        """The network in PyTorch, with the first weights."""
        import torch
        from pfl_speed import NETWORKS
        from torch import nn

        tiny = [nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)]
        network = nn.Sequential(*tiny) if self.name == "tiny" else NETWORKS[self.name]()
        own = zip(network.state_dict(), self.initial(), strict=True)
        network.load_state_dict({name: torch.from_numpy(value) for name, value in own})
        return network

    def ended(self, weights, sent="in memory"):
        """Tell the driver of a round: `weights()` are the model's, `sent` the round's bytes."""
        self.number += 1
        if self.number == self.warm:
            np.savez(f"{self.folder}/model.npz", *(np.asarray(one) for one in weights()))
        print(f"@round {sent}", flush=True)

    def weights_of(self, network):
        return lambda: [one.detach().numpy() for one in network.state_dict().values()]
