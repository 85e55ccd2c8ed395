"""One algorithm per file, the paper's and its rivals, each a generator that asks a federation and yields iterates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from silodp.server.algorithms.adam import adam
from silodp.server.algorithms.diff2 import diff2
from silodp.server.algorithms.disk import disk
from silodp.server.algorithms.local_sgd import local_sgd
from silodp.server.algorithms.mb_sgd import mb_sgd
from silodp.server.algorithms.momentum import heavy_ball
from silodp.server.algorithms.prox_pl_svrg import prox_pl_svrg
from silodp.server.algorithms.prox_sgd import prox_sgd
from silodp.server.algorithms.prox_spider import prox_spider
from silodp.server.algorithms.prox_svrg import prox_svrg
from silodp.server.algorithms.scaffold import scaffold
from silodp.server.algorithms.spider_alternate import spider_alternate


@dataclass(frozen=True)
class Algorithm:
    """A generator with the kinds of release it makes and the settings, beside `step`, that shape its schedule."""

    name: str
    run: Callable
    kinds: tuple[str, ...]
    settings: tuple[str, ...]
    summary: str
    disjoint: bool = False


ALGORITHMS: dict[str, Algorithm] = {
    a.name: a
    for a in (
        Algorithm("prox-sgd", prox_sgd, ("minibatch",), ("rounds",), "Noisy Prox-SGD on disjoint batches", disjoint=True),
        Algorithm("mb-sgd", mb_sgd, ("minibatch",), ("rounds",), "minibatch SGD, every round on all records or a fresh batch"),
        Algorithm("local-sgd", local_sgd, ("minibatch",), ("rounds", "steps"), "FedAvg with noisy local steps"),
        Algorithm("prox-svrg", prox_svrg, ("anchor", "refine"), ("epochs", "inner", "slope"), "FedProx-SVRG"),
        Algorithm(
            "prox-pl-svrg",
            prox_pl_svrg,
            ("anchor", "refine"),
            ("restarts", "epochs", "inner", "slope"),
            "FedProx-PL-SVRG: SVRG with restarts",
        ),
        Algorithm("spider", prox_spider, ("anchor", "refine"), ("rounds", "phase", "slope"), "FedProx-SPIDER"),
        Algorithm(
            "spider-alternate",
            spider_alternate,
            ("anchor", "refine"),
            ("rounds", "slope"),
            "Fed-SPIDER in two half-rounds",
        ),
        Algorithm("diff2", diff2, ("anchor", "refine"), ("rounds", "phase", "slope"), "DIFF2: differences clipped by the move of w alone"),
        Algorithm("scaffold", scaffold, ("minibatch",), ("rounds", "steps"), "DP-SCAFFOLD: local steps with public control variates"),
        Algorithm("momentum", heavy_ball, ("minibatch",), ("rounds", "momentum"), "MB-SGD with server momentum"),
        Algorithm("adam", adam, ("minibatch",), ("rounds", "momentum"), "MB-SGD with Adam on the server"),
        Algorithm("disk", disk, ("minibatch",), ("rounds", "kappa"), "DiSK: MB-SGD through a Kalman filter on the server"),
    )
}

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "adam",
    "diff2",
    "disk",
    "heavy_ball",
    "local_sgd",
    "mb_sgd",
    "prox_pl_svrg",
    "prox_sgd",
    "prox_spider",
    "prox_svrg",
    "scaffold",
    "spider_alternate",
]
