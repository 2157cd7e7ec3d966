"""Flower's simulation on Ray, with a core for every client."""

import random

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from side import Workload
from torch.utils.data import DataLoader, TensorDataset

work = Workload()
app, server = ClientApp(), ServerApp()


@app.train()
def train(message, context):
    client = context.node_config["partition-id"]
    torch.manual_seed(client)
    network = work.network()
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    data = TensorDataset(*work.tensors(client))
    optimizer = torch.optim.SGD(network.parameters(), lr=work.rate)
    for x, y in DataLoader(data, batch_size=work.batch_size, shuffle=True):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
    arrays = ArrayRecord(network.state_dict())
    metrics = MetricRecord({"num-examples": len(data)})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


class Counted(FedAvg):
    """Adds up the bytes of the arrays that a round sends."""

    sent = 0

    def configure_train(self, server_round, arrays, config, grid):
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self.sent = len(messages) * arrays.count_bytes()
        return messages

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        for reply in replies:
            if reply.has_error():
                raise RuntimeError(reply.error.reason)
            self.sent += reply.content["arrays"].count_bytes()
        return super().aggregate_train(server_round, replies)


@server.main()
def main(grid, context):
    random.seed(0)
    strategy = Counted(
        fraction_train=work.cohort / work.clients,
        fraction_evaluate=0.0,
        min_available_nodes=work.clients,
    )

    def ended(number, arrays):
        if number:
            work.ended(arrays.to_numpy_ndarrays, strategy.sent)

    arrays = ArrayRecord(work.network().state_dict())
    strategy.start(grid, arrays, num_rounds=10**6, evaluate_fn=ended)


if __name__ == "__main__":
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, app, num_supernodes=work.clients, backend_config=resources)
