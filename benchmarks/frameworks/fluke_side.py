"""fluke: one process with as many threads as there are cores."""

import sys

import torch
from side import Workload

try:
    import torchvision  # noqa: F401
except RuntimeError:  # its operators need CUDA's libraries; fluke imports it, and uses none here
    for name in [name for name in sys.modules if name.startswith("torchvision")]:
        del sys.modules[name]
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader


class Rounds:
    """What the federation tells of."""

    def __init__(self, work, network):
        self.work, self.weights = work, work.weights_of(network)

    def end_round(self, round):
        self.work.ended(self.weights)


if __name__ == "__main__":
    work = Workload()
    FlukeENV().set_seed(0)
    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    loaders = [
        FastDataLoader(
            *work.tensors(client), num_labels=10, batch_size=work.batch_size, shuffle=True
        )
        for client in range(work.clients)
    ]
    data = DummyDataContainer(loaders, [None] * work.clients, None, num_classes=10)
    client = {
        "batch_size": work.batch_size,
        "local_epochs": 1,
        "loss": "CrossEntropyLoss",
        "optimizer": {"name": "SGD", "lr": work.rate},
        "scheduler": {"name": "StepLR", "gamma": 1, "step_size": 1},
    }
    network = work.network()
    settings = DDict(client=client, server={"weighted": True}, model=network)
    federation = FedAVG(work.clients, DataSplitter(data), settings)
    federation.attach(Rounds(work, federation.server.model))
    federation.run(10**6, work.cohort / work.clients)
