"""silodp: federated learning for people who do not trust the server.

The public names load on first use, so that `import silodp` is light; type checkers and `dir` see
all of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from silodp.core.errors import BadInput, Refused
    from silodp.core.mechanisms import Gaussian
    from silodp.core.privacy.accounting import Budget
    from silodp.core.problem.problem import Problem
    from silodp.core.query import Query, Release
    from silodp.core.sampling import DisjointBatches, FullBatch, Poisson, WithoutReplacement
    from silodp.core.statistics import Grad, GradDiff, LocalSteps
    from silodp.host.frozen import frozen
    from silodp.server.algorithms import ALGORITHMS
    from silodp.server.federation import Federation
    from silodp.server.plan import calibrate
    from silodp.silo.data.demo import hospitals
    from silodp.silo.data.records import Records
    from silodp.simulation.connect import simulate
    from silodp.simulation.estimator import Classifier, Regressor
    from silodp.simulation.frames import train

__version__ = "0.1.0"

_HOME = {
    "ALGORITHMS": "server.algorithms",
    "BadInput": "core.errors",
    "Budget": "core.privacy.accounting",
    "Classifier": "simulation.estimator",
    "DisjointBatches": "core.sampling",
    "Federation": "server.federation",
    "FullBatch": "core.sampling",
    "Gaussian": "core.mechanisms",
    "Grad": "core.statistics",
    "GradDiff": "core.statistics",
    "LocalSteps": "core.statistics",
    "Poisson": "core.sampling",
    "Problem": "core.problem.problem",
    "Query": "core.query",
    "Records": "silo.data.records",
    "Refused": "core.errors",
    "Regressor": "simulation.estimator",
    "Release": "core.query",
    "WithoutReplacement": "core.sampling",
    "calibrate": "server.plan",
    "frozen": "host.frozen",
    "hospitals": "silo.data.demo",
    "simulate": "simulation.connect",
    "train": "simulation.frames",
}
"""Where each public name is defined; a test holds this to what type checkers are told above."""

__all__ = [
    "ALGORITHMS",
    "BadInput",
    "Budget",
    "Classifier",
    "DisjointBatches",
    "Federation",
    "FullBatch",
    "Gaussian",
    "Grad",
    "GradDiff",
    "LocalSteps",
    "Poisson",
    "Problem",
    "Query",
    "Records",
    "Refused",
    "Regressor",
    "Release",
    "WithoutReplacement",
    "calibrate",
    "frozen",
    "hospitals",
    "simulate",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'silodp' has no attribute {name!r}")
    value = getattr(import_module(f"silodp.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"Any", "TYPE_CHECKING", "annotations", "import_module"})
