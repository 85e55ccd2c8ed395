"""Whether a charge fits: amounts bucket by bucket, added up by a rule and held against its
capacity. Every ledger asks this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from silodp.core.privacy.accounting import Rule

Amounts = Mapping[str, Any]
"""Bucket -> amount in the rule's unit: a number, or an array with one for each run and silo."""


def added(*amounts: Amounts) -> dict[str, Any]:
    """Bucket by bucket."""
    total: dict[str, Any] = {}
    for each in amounts:
        for bucket, amount in each.items():
            if bucket in total:
                total[bucket] = total[bucket] + amount
            else:
                total[bucket] = amount
    return total


def total(rule: Rule, *amounts: Amounts) -> np.ndarray:
    """What the rule makes of all these amounts together."""
    return np.asarray(
        rule.total({bucket: np.asarray(amount) for bucket, amount in added(*amounts).items()})
    )


def fits(rule: Rule, capacity: np.ndarray | float, *amounts: Amounts, slack: float = 0.0) -> bool:
    """Whether all these amounts together stay within the capacity, less a share `slack` of it, of
    every run and silo.
    """
    return bool((total(rule, *amounts) <= capacity * (1 - slack)).all())
