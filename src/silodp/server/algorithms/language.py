"""What algorithms are written in: each file of this folder takes its words from here.

They ask a port, and know of records and silos nothing that is not in it.
"""

from collections.abc import Iterator
from typing import Annotated

from torch import Tensor

from silodp.core.mechanisms import Gaussian
from silodp.core.numbers import Number
from silodp.core.problem.problem import Problem
from silodp.core.query import Query
from silodp.core.sampling import DisjointBatches
from silodp.core.statistics import ClippedDiff, Grad, GradDiff, LocalSteps, SteeredSteps
from silodp.server.algorithms.signature import Setting
from silodp.server.federation import Absent, Port

__all__ = [
    "Absent",
    "Annotated",
    "ClippedDiff",
    "DisjointBatches",
    "Gaussian",
    "Grad",
    "GradDiff",
    "Iterator",
    "LocalSteps",
    "Number",
    "Port",
    "Problem",
    "Query",
    "Setting",
    "SteeredSteps",
    "Tensor",
]
