"""The nearest run by pfl-research (Apple): its simulated backend, federated averaging with one
full-batch step for each user.

What differs: pfl clips and perturbs a user's whole update and has no per-record clipping, so each
user takes one ordinary gradient, which is far less work than one for each record, and what it
protects is the user's update as one item. The noise has the same size and is as fresh for each
silo. Results are compared with clipping off on both sides.
"""

from __future__ import annotations

import asyncio

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks.gradient import CLIP
from benchmarks.models import mlp
from benchmarks.run import ROUNDS, SILOS, STEP, data, start


class Network(nn.Module):
    """The same network, with the two methods that pfl asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.inner(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        return {"nothing": Weighted(0, 1)}


def by_pfl(std: float) -> Tensor:
    x, y = data()
    network = Network()
    vector_to_parameters(start().clone(), network.parameters())
    users = FederatedDataset(
        lambda silo: Dataset(raw_data=[x[silo], y[silo]], user_id=str(silo)),
        get_user_sampler("minimize_reuse", list(range(SILOS))),
    )
    # a user's update is -STEP times its gradient, and so are its clip and its noise
    mechanism = (
        [GaussianMechanism(clipping_bound=STEP * CLIP, relative_noise_stddev=std / CLIP)]
        if std
        else []
    )
    asyncio.set_event_loop(asyncio.new_event_loop())
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=ROUNDS,
            evaluation_frequency=ROUNDS,
            train_cohort_size=SILOS,
            val_cohort_size=None,
        ),
        SimulatedBackend(training_data=users, val_data=users, postprocessors=mechanism),
        PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0)),
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=STEP, local_batch_size=None),
        send_metrics_to_platform=False,
    )
    return parameters_to_vector(network.parameters()).detach()
