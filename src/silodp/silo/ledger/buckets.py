"""Check whether a charge fits a ledger's capacity.

Amounts are added bucket by bucket, combined by a rule, and compared with its capacity. Every ledger
uses this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from silodp.core.privacy.accounting import Rule

Amounts = Mapping[str, Any]
"""Bucket -> amount in the rule's unit: a number, or an array with one for each run and silo."""


def added(*amounts: Amounts) -> dict[str, Any]:
    """Return the sum of these amounts, bucket by bucket."""
    total: dict[str, Any] = {}
    for each in amounts:
        for bucket, amount in each.items():
            if bucket in total:
                total[bucket] = total[bucket] + amount
            else:
                total[bucket] = amount
    return total


def total(rule: Rule, *amounts: Amounts) -> np.ndarray:
    """Return the rule's total of all these amounts."""
    return np.asarray(
        rule.total({bucket: np.asarray(amount) for bucket, amount in added(*amounts).items()})
    )


def fits(rule: Rule, capacity: np.ndarray | float, *amounts: Amounts, slack: float = 0.0) -> bool:
    """Return whether the total of all these amounts stays within the capacity of every run and
    silo.

    A share `slack` of the capacity must stay free.
    """
    return bool((total(rule, *amounts) <= capacity * (1 - slack)).all())
