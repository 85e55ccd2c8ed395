"""The same run by Flower's simulation: a ServerApp, and ClientApps on as many Ray workers as there
are cores, Opacus's hooks inside each.

A worker keeps its model and records from message to message, and a message carries one flat vector.
Flower's settings are its own; among them, its server and its scheduler look for messages ten times
a second each.
"""

from __future__ import annotations

import functools
import logging
import os
import time
import warnings

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"  # read when flwr is imported
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # else Ray warns that it will once be so

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from torch import Tensor
from torch.nn.utils import vector_to_parameters

from benchmarks.gradient import Client, hooks
from benchmarks.models import mlp
from benchmarks.run import ROUNDS, SILOS, STEP, data, start

client_app = ClientApp()


@functools.cache
def worker() -> tuple[torch.nn.Module, Client]:
    """Kept in a Ray worker from message to message."""
    warnings.filterwarnings("ignore", category=UserWarning)
    torch.set_num_threads(1)  # there is a worker for each core
    model = mlp()
    return model, hooks(model)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    w = torch.from_numpy(message.content["w"].to_numpy_ndarrays()[0].copy())
    x, y = data()
    silo = int(context.node_config["partition-id"])
    model, clipped_mean = worker()
    vector_to_parameters(w, model.parameters())
    release = clipped_mean(x[silo], y[silo]) + message.content["noise"]["std"] * torch.randn(
        w.shape
    )
    return Message(RecordDict({"w": ArrayRecord([release.numpy()])}), reply_to=message)


def simulate(std: float, out: str) -> None:
    """Writes the last point, the seconds of the rounds alone, and those with the start and end of
    Ray and of the workers.
    """
    server_app = ServerApp()
    found: dict[str, object] = {}

    def mean(grid: Grid, nodes: list[int], w: Tensor) -> Tensor:
        content = RecordDict({"w": ArrayRecord([w.numpy()]), "noise": ConfigRecord({"std": std})})
        messages = [Message(content, dst_node_id=node, message_type="train") for node in nodes]
        replies = list(grid.send_and_receive(messages))
        assert len(replies) == SILOS, "a client did not answer"
        return torch.stack(
            [torch.from_numpy(r.content["w"].to_numpy_ndarrays()[0].copy()) for r in replies]
        ).mean(0)

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        w = start().clone()
        while len(nodes := list(grid.get_node_ids())) < SILOS:
            time.sleep(0.1)
        mean(grid, nodes, w)  # workers start, import and read their data before the clock does
        begin = time.perf_counter()
        for _ in range(ROUNDS):
            w = w - STEP * mean(grid, nodes, w)
        found.update(w=w, rounds=time.perf_counter() - begin)

    logging.getLogger("flwr").setLevel(logging.ERROR)
    begin = time.perf_counter()
    cores = len(os.sched_getaffinity(0))
    run_simulation(
        server_app,
        client_app,
        num_supernodes=SILOS,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": cores, "log_to_driver": False},
        },
    )
    torch.save(found | {"whole": time.perf_counter() - begin}, out)
