"""Choose the risk from which the second of two classes is predicted, by released figures alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from silodp.core.errors import BadInput
from silodp.core.figures import FLAGGED, PPV, SENSITIVITY, SPECIFICITY
from silodp.core.quality import at_threshold, counted

Row = Mapping[str, Any]
"""One threshold of an evaluation: its `risk`, and (value, low, high) of each figure by name."""
CLOSE = 0.1
"""Difference of logits up to which figures of one threshold are shown for another."""


def by_cost(ratio: float) -> float:
    """Return the threshold with the smallest expected cost.

    A missed case costs as much as `ratio` false alarms. At a risk p, an alarm costs 1 - p and no
    alarm costs ratio x p. Both are equal at p = 1 / (1 + ratio). This needs calibrated risks.
    """
    if not 0 < ratio < math.inf:
        raise BadInput(
            f"--cost-ratio is {ratio:g}; give how many false alarms cost as much as one missed "
            "case, such as 10"
        )
    return 1 / (1 + ratio)


def by_sensitivity(thresholds: Sequence[Row], wanted: float) -> float:
    """Return the largest threshold whose released sensitivity is at least `wanted`."""
    if not 0 < wanted < 1:
        raise BadInput(f"--sensitivity is {wanted:g}; give a share between 0 and 1, such as 0.9")
    measured = [row for row in thresholds if SENSITIVITY in row]
    reached = [row["risk"] for row in measured if row[SENSITIVITY][0] >= wanted]
    if reached:
        return max(reached)
    if not measured:
        raise BadInput(
            f"--sensitivity is {wanted:g}, but no evaluation has measured a sensitivity; evaluate "
            "the model first, with an epsilon that is not too small"
        )
    largest = max(row[SENSITIVITY][0] for row in measured)
    raise BadInput(
        f"--sensitivity is {wanted:g}, but the largest that was measured is {largest:.2f}; ask for "
        "less, or give --threshold"
    )


def implied(thresholds: Sequence[Row], threshold: float) -> list[str]:
    """Return sentences about what a threshold implies, by the closest one that was evaluated.

    Return no sentence if none was evaluated.
    """
    if not thresholds:
        return []
    closest = min(thresholds, key=lambda row: abs(_logit(row["risk"]) - _logit(threshold)))
    figures: dict[str, dict[str, Any]] = {}
    for name in (SENSITIVITY, SPECIFICITY, PPV, FLAGGED):
        if name in closest:
            value, low, high = closest[name]
            figures[name] = {"value": value, "low": low, "high": high, "whole": True}
    words = at_threshold(closest["risk"], figures)
    if words and SPECIFICITY in figures:
        passed = counted(SPECIFICITY, figures[SPECIFICITY])
        words.append(f"Of 100 without the outcome, {passed} are not flagged.")
    if words and abs(_logit(closest["risk"]) - _logit(threshold)) > CLOSE:
        words.append(
            f"No threshold closer to {threshold:.3g} was evaluated: use `silodp evaluate` with "
            f"--threshold {threshold:.3g}."
        )
    return words


def _logit(risk: float) -> float:
    """Return the logit of a risk, within what can be computed."""
    inside = min(max(risk, 1e-12), 1 - 1e-12)
    return math.log(inside / (1 - inside))
