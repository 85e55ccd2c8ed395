"""The names in which algorithms are written. Each algorithm of this folder imports its names from
here.

An algorithm asks a port. It has no name for a record or for a silo beyond what is listed here.
"""

from collections.abc import Iterator
from typing import Annotated

from torch import Tensor

from silodp.core.mechanisms import Gaussian
from silodp.core.numbers import Number
from silodp.core.problem.problem import Problem
from silodp.core.query import Query
from silodp.core.sampling import DisjointBatches
from silodp.core.statistics import (
    ClippedDiff,
    Grad,
    GradDiff,
    LocalSteps,
    Moments,
    ScaledGrad,
    SteeredSteps,
)
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
    "Moments",
    "Number",
    "Port",
    "Problem",
    "Query",
    "ScaledGrad",
    "Setting",
    "SteeredSteps",
    "Tensor",
]
