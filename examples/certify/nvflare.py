"""NVFlare 2.9.0, SVTPrivacy: `silodp audit certify examples/certify/nvflare.py:svt --epsilon 1
--unit silo`.

The claim is what its accountant notes with each message: "epsilon_total", here 0.5 for the choice
of weights and 0.5 for their values, delta 0. A client's whole update is replaced; the filtered one
is what is sent. Needs: pip install nvflare==2.9.0
"""

import logging

import numpy as np
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.filters.svt_privacy import SVTPrivacy

logging.disable(logging.INFO)
FILTER = SVTPrivacy(fraction=0.1, epsilon=0.5, epsilon_release=0.5, gamma=1.0, tau=0.5)


def svt(x, y, seed):
    np.random.seed(seed % 2**32)
    update = np.repeat(10 * ((y - 0.5)[:, None] * x).mean(0), 5)
    return FILTER.process_dxo(
        DXO(DataKind.WEIGHT_DIFF, data={"w": update}), Shareable(), FLContext()
    ).data["w"]
