"""Estimate how much work a price takes, without computing it, so that a gate can bound it."""

from __future__ import annotations

import math

import numpy as np

from silodp.core.events import Event
from silodp.core.privacy.accounting import Renyi, Rule
from silodp.core.sampling import Poisson, WithoutReplacement

GRID_COST = 8
"""How many functions of each point the integral of a Poisson batch computes."""
LIBRARY_COST = 2**23
"""The approximate work of a library's price of a batch without replacement, at any order."""


def price_work(rule: Rule, event: Event) -> int:
    """Return about how many numbers the rule computes to price the event for the first time.

    The answer is 0 for a closed formula, and where the rule refuses the event without a price.
    """
    if isinstance(rule, Renyi):
        if isinstance(event.sampling, WithoutReplacement):
            return LIBRARY_COST
        if isinstance(event.sampling, Poisson) and event.multiplier > 0:
            std = 2 * event.multiplier
            in_stds = 12 + 2 * float(np.asarray(rule.order)) / std
            return GRID_COST * 128 * math.ceil(min(in_stds, 1e4))
    return 0
