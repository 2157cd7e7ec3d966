"""BlazeFL: threads where Python has no global lock, as it recommends, else its processes."""

import os
import tempfile
from importlib.metadata import version
from pathlib import Path

THREADS = version("blazefl") >= "3"
if not THREADS:
    os.environ["OMP_NUM_THREADS"] = "1"

import torch  # noqa: E402
from blazefl import contrib  # noqa: E402
from blazefl.reproducibility import setup_reproducibility  # noqa: E402
from side import Workload  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402


class Data:
    """Its clients, by number."""

    def __init__(self, work):
        self.work = work

    def get_dataset(self, type_, cid):
        return TensorDataset(*self.work.tensors(cid))

    def set_dataset(self, type_, cid, dataset):
        """Keep nothing: a client's rows do not change."""

    def get_dataloader(self, type_, cid, batch_size, generator):
        data = self.get_dataset(type_, cid)
        return DataLoader(data, batch_size=batch_size, shuffle=True, generator=generator)


class Networks:
    def __init__(self, work):
        self.work = work

    def select_model(self, model_name):
        return self.work.network()


if __name__ == "__main__":
    work, parallel = Workload(), os.cpu_count()
    setup_reproducibility(0)
    common = {
        "model_selector": Networks(work),
        "model_name": work.name,
        "dataset": Data(work),
        "num_clients": work.clients,
        "device": "cpu",
        "batch_size": work.batch_size,
        "seed": 0,
    }
    handler = contrib.FedAvgBaseServerHandler(
        **common, global_round=10**6, sample_ratio=work.cohort / work.clients
    )
    common |= {"epochs": 1, "lr": work.rate, "num_parallels": parallel}
    if THREADS:
        trainer = contrib.FedAvgThreadPoolClientTrainer(**common)
    else:
        from blazefl.core import IPCMode

        places = {name: Path(tempfile.mkdtemp()) for name in ("share_dir", "state_dir")}
        trainer = contrib.FedAvgProcessPoolClientTrainer(
            **common, **places, ipc_mode=IPCMode.SHARED_MEMORY
        )
    # The first optimizer of a process loads modules, which each worker would do in every round.
    torch.optim.SGD(handler.model.parameters(), lr=work.rate)
    while True:
        sampled, sent = handler.sample_clients(), handler.downlink_package()
        trainer.local_process(sent, sampled)
        for report in trainer.uplink_package():
            handler.load(report)
        work.ended(work.weights_of(handler.model))
