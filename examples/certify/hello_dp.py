"""NVFlare 2.9.0, hello-dp (commit f3b7c1bf): `silodp audit certify
examples/certify/hello_dp.py:model --epsilon 1 --features 29`, or `:figures`.

The claim: "target_epsilon ... specifies the total privacy budget for the entire training process"
(examples/hello-world/hello-dp/README.md). Its client.py runs unchanged, by the settings of job.py:
10 rounds of 5 epochs. `model` returns the model's updates. `figures` returns what goes to the
server beside them: the metrics of each update, and the series for TensorBoard. Needs: pip install
nvflare==2.9.0 opacus, and that folder of NVFlare's repository on PYTHONPATH.
"""

import contextlib
import io
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pandas as pd
import torch

warnings.simplefilter("ignore")
import client  # noqa: E402

ROUNDS = 10
torch.set_num_threads(1)


class Server:
    """The server that client.py talks to. It keeps what it receives."""

    FLModel = SimpleNamespace

    def __init__(self) -> None:
        torch.manual_seed(0)
        state = client.TabularMLP(input_dim=29, hidden_dims=[64, 32], output_dim=2).state_dict()
        self.start = {name: value.clone() for name, value in state.items()}
        self.model = dict(state)
        self.round = 0
        self.figures = []

    def init(self) -> None:
        """Do nothing."""

    def system_info(self) -> dict[str, str]:
        """Return the name of the only site."""
        return {"site_name": "site-1"}

    def is_running(self) -> bool:
        """Return whether a round is left."""
        return self.round < ROUNDS

    def receive(self) -> SimpleNamespace:
        """Return the model of this round."""
        return SimpleNamespace(
            params=dict(self.model), current_round=self.round, total_rounds=ROUNDS
        )

    def send(self, update: SimpleNamespace) -> None:
        """Receive an update and its metrics, and begin the next round."""
        self.model = {name: self.model[name] + step for name, step in update.params.items()}
        self.figures += update.metrics.values()
        self.round += 1

    def add_scalar(self, tag: str, scalar: float, global_step: int) -> None:
        """Receive a number for TensorBoard."""
        self.figures.append(scalar)


def trained(x: np.ndarray, y: np.ndarray, seed: int) -> Server:
    """Run the client on this table, and return what the server has received."""
    server = Server()
    table = SimpleNamespace(data=pd.DataFrame(x), target=pd.Series(y))
    client.flare = server
    client.SummaryWriter = lambda: server
    client.fetch_openml = lambda *words, **options: table
    sys.argv = ["client.py", "--batch_size", "128", "--epochs", "5", "--n_clients", "1"]
    torch.manual_seed(seed)
    with contextlib.redirect_stdout(io.StringIO()):
        client.main()
    return server


def model(x, y, seed):
    server = trained(x, y, seed)
    return torch.cat([(server.model[name] - was).flatten() for name, was in server.start.items()])


def figures(x, y, seed):
    return trained(x, y, seed).figures
