"""Clients' samples that stay on the device between rounds, within a budget."""

from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch

from fedbayes.core.devices import placed
from fedbayes.core.tensors import Samples


class DeviceCache:
    """Keeps samples on a device; those least recently used go first.

    Args:
        device: where they are wanted.
        budget: bytes that they may hold there; 0 keeps none. Samples that are larger than that
            are never kept, and push nothing out.
    """

    def __init__(self, device: torch.device, budget: int) -> None:
        self.device, self.budget = device, budget
        self.held = 0
        """Bytes that are held now."""
        self._kept: OrderedDict[Hashable, Samples] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def get(self, key: Hashable, gather: Callable[[], Samples]) -> Samples:
        """The samples of a key on the device; whoever gets them changes nothing of them.

        Args:
            key: what they are, such as the training samples of a client.
            gather: makes them, wherever; called only if they are not held.
        """
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        samples = Samples(*(placed(tensor, self.device) for tensor in gather()))
        size = _bytes(samples)
        if size <= self.budget:
            self._kept[key] = samples
            self.held += size
            while self.held > self.budget:
                self.held -= _bytes(self._kept.popitem(last=False)[1])
        return samples

    def release(self) -> bool:
        """Let all of them go; whether there were any."""
        had = bool(self._kept)
        self._kept.clear()
        self.held = 0
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return had


def _bytes(samples: Samples) -> int:
    return sum(tensor.nbytes for tensor in samples)
