"""silodp: federated learning for people who do not trust the server.

The public names load on first use, so that `import silodp` is light.
"""

from importlib import import_module

_HOME = {
    "Budget": "core.privacy.accounting",
    "BadInput": "core.errors",
    "Refused": "core.errors",
    "Problem": "core.problem.problem",
    "DisjointBatches": "core.sampling",
    "FullBatch": "core.sampling",
    "Gaussian": "core.mechanisms",
    "Grad": "core.statistics",
    "GradDiff": "core.statistics",
    "LocalSteps": "core.statistics",
    "Poisson": "core.sampling",
    "Query": "core.query",
    "Release": "core.query",
    "WithoutReplacement": "core.sampling",
    "ALGORITHMS": "server.algorithms",
    "Federation": "server.federation",
    "calibrate": "server.plan",
    "Records": "silo.data.records",
    "simulate": "lab.simulation",
}

__all__ = list(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'silodp' has no attribute {name!r}")
    return getattr(import_module(f"silodp.{_HOME[name]}"), name)
