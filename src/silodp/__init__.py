"""silodp: federated learning for people who do not trust the server.

The public names load on first use, so that `import silodp` is light.
"""

from importlib import import_module

_HOME = {
    "Budget": "core.privacy.accounting",
    "BadInput": "core.errors",
    "Refused": "core.errors",
    "Problem": "core.problem.problem",
    "DisjointBatches": "core.query",
    "FullBatch": "core.query",
    "Gaussian": "core.query",
    "Grad": "core.query",
    "GradDiff": "core.query",
    "LocalSteps": "core.query",
    "Poisson": "core.query",
    "Query": "core.query",
    "Release": "core.query",
    "WithoutReplacement": "core.query",
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
