"""Format spends and scores for people, in one way for every command and page.

It also has sentences about the meaning of such figures.
"""

from __future__ import annotations

import math

HOLDS = (
    "This figure is exact if all questions were fixed in advance. If questions, or the time to "
    "stop, depended on earlier answers, rely on the whole budget: it is valid for any questions."
)
"""The meaning of a spend.

1. Rules are filters: they keep a sum within its budget for adaptive questions and stopping. This is
   a statement about the budget.
2. A statement about the sum so far, where an adaptive asker has stopped, would need an odometer. No
   rule here is one.
3. For example, take a mechanism that uses the whole budget unless its first answer is large. It is
   not as private as its first answer alone.
"""
EARLY = (
    "If no answer influenced when a run was stopped, its spend so far is valid. Otherwise, rely on "
    "the price of the whole planned run."
)
"""A planned schedule is fixed in advance, so its whole price is valid however it is cut short.

The answers that exist are a function of the answers that the whole schedule would give.
"""
UNCHANGED = "if no silo's records changed during the run"
"""The condition of a server's sum over disjoint batches.

If records change, the gate draws a new partition, and its ledger adds both: a record may be in a
batch of each. No reply contains this, and the server counts one partition.
"""
NO_MU = "no mu is known for such releases, so only epsilon at this delta is stated"


def rounded_up(value: float, digits: int = 3, style: str = "g") -> str:
    """Return so many digits ("g") or decimals ("f"), never less than the value but for float noise.

    A reader must not see less than was spent.
    """
    shown = f"{value:.{digits}{style}}"
    if math.isnan(value) or float(shown) >= value * (1 - 1e-9):
        return shown
    if style == "g":
        before = math.floor(math.log10(value)) + 1
    else:
        before = 0
    return f"{value + 0.5 * 10 ** (before - digits):.{digits}{style}}"


def shown(value: float) -> str:
    """Return epsilon or mu that is spent, with four digits, rounded up."""
    return rounded_up(value, 4)


def used_of(used: float) -> str:
    """Return the used share of a budget in per cent, rounded up, as a clause."""
    return f"{rounded_up(100 * used, 1, 'f')} % of the budget is used"


def left_of(used: float, decimals: int = 1) -> str:
    """Return the rest of a budget of which a share is used, in per cent and rounded down.

    A reader must not see more than is left.
    """
    scale = 10**decimals
    return f"{math.floor(100 * scale * max(0.0, 1 - used) + 1e-6) / scale:.{decimals}f}%"


# --- scores --------------------------------------------------------------------------------------

ACCURACY = "accuracy"
BALANCED = "balanced accuracy"
AUC = "auc"
LARGER = "larger class"
"""The names of figures of classes.

The last is the share of the larger class, which is the accuracy of always predicting that class.
"""
PREVALENCE = "prevalence"
SENSITIVITY = "sensitivity"
SPECIFICITY = "specificity"
PPV = "positive predictive value"
NPV = "negative predictive value"
FLAGGED = "flagged"
"""Of two classes: the share of the second class, and what follows from a threshold on the risk.

Flagged is the share of records whose risk is at least the threshold.
"""
EXPLAINED = "explained variance (R2)"
DEVIANCE = "explained deviance"
"""The share of the variance of numbers, or of the deviance of counts, that the model explains."""
IN_THE_LARGE = "calibration in the large"
"""The mean predicted risk less the observed share."""
SLOPE = "calibration slope"
"""By how much the observed share rises with the predicted risk."""
WIDEST = 0.5
"""How much of a figure's range its interval may cover, and still be shown.

The range is 0 to 1 for an AUC or an accuracy, and 0 to the cap for a loss.
"""
TOO_NOISY = "too noisy to say"
WHY = (
    "Too noisy to say: the noise alone makes the 95 % interval wider than half of the "
    "figure's range (0.2 for calibration in the large, 1 for its slope). Evaluate with "
    "a larger epsilon, or on more held-out records."
)


def too_noisy(low: float, high: float, noise: float) -> bool:
    """Return whether the noise of a release hides a figure between 0 and 1."""
    return not (high - low <= WIDEST and noise <= WIDEST)


ALONE = {
    "masks": "if all other silos collude with the server",
    "shuffle": "against the shuffler itself",
}
"""Against whom a silo's own noise is its only protection, under trusts that rely on others' noise.
"""
