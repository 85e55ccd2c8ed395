"""Flower 1.42.0, LocalDpMod: `silodp audit certify examples/certify/flower.py:message --epsilon 1
--unit silo`, or `:rounds`.

The claim: "epsilon: The privacy budget. Smaller value of epsilon indicates a higher level of
privacy protection" (clientapp/mod/localdp_mod.py); of one message or of a run it does not say. A
client's whole update is replaced; its message is what is sent. Needs: pip install flwr==1.42.0
"""

import logging
from types import SimpleNamespace

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.clientapp.mod import LocalDpMod
from flwr.supercore.task_identity import TaskIdentity

logging.getLogger("flwr").setLevel(logging.ERROR)
TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = (
    1,
    1,
    1,
)  # what its client app sets before it runs
MOD = LocalDpMod(clipping_norm=1.0, sensitivity=1.0, epsilon=1.0, delta=1e-5)


def told(x: np.ndarray, y: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The model that leaves a client which has been sent w and takes one step."""

    def client(message, context):
        step = ((1 / (1 + np.exp(-np.clip(x @ w, -50, 50))) - y)[:, None] * x).mean(0)
        return Message(RecordDict({"w": ArrayRecord([w - 100 * step])}), reply_to=message)

    asked = Message(RecordDict({"w": ArrayRecord([w])}), dst_node_id=1, message_type="train")
    return MOD(asked, SimpleNamespace(), client).content["w"].to_numpy_ndarrays()[0]


def message(x, y, seed):
    np.random.seed(seed % 2**32)
    return told(x, y, np.zeros(x.shape[1]))


def rounds(x, y, seed, times=30):
    """Thirty rounds of the same client at one model; the mean of what it sent, which says no more
    than all of it.
    """
    np.random.seed(seed % 2**32)
    w = np.zeros(x.shape[1])
    return np.mean([told(x, y, w) for _ in range(times)], axis=0)
