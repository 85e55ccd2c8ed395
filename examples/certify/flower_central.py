"""Flower 1.42.0, DifferentialPrivacyServerSideFixedClipping: `silodp audit certify
examples/certify/flower_central.py:weighted --epsilon 1 --unit silo`, or `:accounted`.

The claim: "noise_multiplier: The noise multiplier for the Gaussian mechanism for model updates"
(serverapp/strategy/dp_fixed_clipping.py). Flower's own accountant gives epsilon 1 at delta 1e-5 for
one round at 4.1. A client's whole update is replaced; the noisy mean of ten clients is what is
sent. `weighted` has the defaults, and the client has 1,000 of 1,090 rows. `accounted` has the
accountant, and equal weights. Needs: pip install flwr==1.42.0 dp-accounting
"""

import logging
from types import SimpleNamespace

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from flwr.supercore.privacy_accounting import NeighboringRelation, PrivacyConfig, SamplingMethod
from flwr.supercore.privacy_accounting.rdp_accountant import RdpAccountant
from flwr.supercore.task_identity import TaskIdentity

logging.getLogger("flwr").setLevel(logging.ERROR)
# what its server app sets before it runs
TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = (1, 1, 1)
CLIENTS, NOISE = 10, 4.1
GRID = SimpleNamespace(get_node_ids=lambda: range(1, CLIENTS + 1))


def accountant() -> RdpAccountant:
    """Return Flower's accountant for ten clients that all take part."""
    return RdpAccountant(
        PrivacyConfig(
            target_delta=1e-5,
            population_size=CLIENTS,
            neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
            sampling_method=SamplingMethod.NO_AMPLIFICATION,
        )
    )


def mean(x: np.ndarray, y: np.ndarray, rows: int, counts: RdpAccountant | None) -> np.ndarray:
    """Return the noisy mean of the updates, of which only the first depends on the table."""
    strategy = DifferentialPrivacyServerSideFixedClipping(
        FedAvg(), NOISE, 1.0, CLIENTS, accountant=counts
    )
    start = ArrayRecord([np.zeros(x.shape[1])])
    update = 10 * ((y - 0.5)[:, None] * x).mean(0)
    replies = []
    asked = strategy.configure_train(1, start, ConfigRecord(), GRID)
    for client, message in enumerate(asked):
        own = update if client == 0 else np.full(x.shape[1], 1e-9)  # 0 stops the clipping
        metrics = MetricRecord({"num-examples": rows if client == 0 else 10})
        content = RecordDict({"arrays": ArrayRecord([own]), "metrics": metrics})
        replies.append(Message(content, reply_to=message))
    arrays, _ = strategy.aggregate_train(1, replies)
    return arrays.to_numpy_ndarrays()[0]


def weighted(x, y, seed):
    np.random.seed(seed % 2**32)
    return mean(x, y, 1000, None)


def accounted(x, y, seed):
    np.random.seed(seed % 2**32)
    return mean(x, y, 10, accountant())
