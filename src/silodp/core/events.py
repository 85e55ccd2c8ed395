"""What a query does to privacy, as data: accountants give it meaning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from silodp.core.numbers import Number
from silodp.core.sampling import Sampling


@dataclass(frozen=True, eq=False)
class Event:
    """What one query does to privacy: `count` Gaussian releases at this noise multiplier (std / sensitivity) on these batches."""

    sampling: Sampling
    noise_multiplier: Number
    count: Any = 1
    """An int; in a committed schedule of several silos, an array with one for each."""


@dataclass(frozen=True, eq=False)
class TotalEvent:
    """What one shuffled query does to privacy: `count` totals of d coordinates, each under the noise of `contributions` records.

    Every contribution is an integer vector with entries in 0 .. levels under Bin(noise_bits, p). Numbers, or one per run (J, 1). The
    noise of a silo's own records is all that protects it from whoever sees its message alone: its ledger says how much that is.
    """

    sampling: Sampling
    levels: Any
    noise_bits: Any
    p: float
    contributions: int
    dimension: int
    count: int = 1
