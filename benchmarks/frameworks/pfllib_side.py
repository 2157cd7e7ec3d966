"""PFLlib, whose folder the command line names: one process; it drops a last, smaller batch."""

import os
import random
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from side import Workload

if __name__ == "__main__":
    work, place = Workload(), Path(tempfile.mkdtemp())
    for part in ("system", "dataset/own/train", "dataset/own/test"):
        (place / part).mkdir(parents=True)
    for client in range(work.clients):  # its own format
        own = dict(zip("xy", work.client(client), strict=True))
        np.savez(place / f"dataset/own/train/{client}.npz", data=own)
        few = {name: value[:1] for name, value in own.items()}
        np.savez(place / f"dataset/own/test/{client}.npz", data=few)
    os.chdir(place / "system")
    sys.path.insert(0, f"{sys.argv[2]}/system")
    from flcore.servers.serveravg import FedAvg

    class Counted(FedAvg):
        """Tells of its rounds, and evaluates nothing."""

        def evaluate(self):
            pass

        def aggregate_parameters(self):
            super().aggregate_parameters()
            work.ended(work.weights_of(self.global_model))

    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  (which it takes)
    torch.manual_seed(0)
    settings = SimpleNamespace(
        **{
            "device": "cpu",
            "dataset": "own",
            "model": work.network(),
            "algorithm": "FedAvg",
            "num_classes": 10,
            "global_rounds": 10**6,
            "local_epochs": 1,
            "batch_size": work.batch_size,
            "local_learning_rate": work.rate,
            "learning_rate_decay": False,
            "learning_rate_decay_gamma": 0.99,
            "num_clients": work.clients,
            "join_ratio": work.cohort / work.clients,
            "random_join_ratio": False,
            "few_shot": 0,
            "time_select": False,
            "time_threthold": 10000,
            "goal": "test",
            "save_folder_name": "items",
            "top_cnt": 100,
            "auto_break": False,
            "eval_gap": 10**9,
            "client_drop_rate": 0.0,
            "train_slow_rate": 0.0,
            "send_slow_rate": 0.0,
            "dlg_eval": False,
            "dlg_gap": 100,
            "batch_num_per_client": 2,
            "num_new_clients": 0,
            "fine_tuning_epoch_new": 0,
        }
    )
    Counted(settings, 0).train()
