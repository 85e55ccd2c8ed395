"""FedML 0.9.6: `silodp audit certify examples/certify/fedml.py:local --epsilon 0.9 --unit silo`, or
`:nbafl`.

The claim: frames "LocalDP" and "NbAFL_DP" with arguments epsilon, delta and sensitivity or C, "a
clipping threshold for bounding w_i" (core/dp/frames). A client's whole update is replaced; what the
frame makes of it is sent. Needs: pip install --no-deps fedml==0.9.6; its __init__ is passed by.
"""

import importlib.util
import sys
from collections import OrderedDict
from types import ModuleType, SimpleNamespace

import numpy as np
import torch

HOME = importlib.util.find_spec("fedml").submodule_search_locations[0]
for name in ("fedml", "fedml.core"):  # their __init__ would load all of its services
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__path__ = [HOME + name.removeprefix("fedml").replace(".", "/")]
from fedml.core.dp.frames.ldp import LocalDP  # noqa: E402
from fedml.core.dp.frames.NbAFL import NbAFL_DP  # noqa: E402

PRICE = {"epsilon": 0.9, "delta": 1e-5}
LOCAL = LocalDP(SimpleNamespace(mechanism_type="gaussian", sensitivity=1.0, **PRICE))
NBAFL = NbAFL_DP(
    SimpleNamespace(C=1.0, comm_round=10, client_num_per_round=2, client_num_in_total=2, **PRICE)
)


def sent(frame, x: np.ndarray, y: np.ndarray, seed: int, times: int) -> np.ndarray:
    torch.manual_seed(seed)
    update = torch.tensor(10 * ((y - 0.5)[:, None] * x).mean(0)).repeat(times)
    return frame.add_local_noise(OrderedDict(w=update))["w"].numpy()


def local(x, y, seed):
    return sent(LOCAL, x, y, seed, 1)


def nbafl(x, y, seed):
    """An update of 3,200 numbers for 8 columns, as of a small network."""
    return sent(NBAFL, x, y, seed, 400)
