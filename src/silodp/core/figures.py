"""How spends and scores are written for people, in one way by every command and page, and sentences
that say what such a figure means.
"""

from __future__ import annotations

import math

HOLDS = (
    "This figure is exact if all questions were fixed in advance. If earlier answers "
    "influenced later questions, or when to stop, only the whole budget is a valid "
    "bound."
)
"""What a spend means. Rules are filters: they keep a sum within its budget for adaptive questions
and stopping, and say so of the budget. That the sum on the way, read where an adaptive asker has
stopped, is itself a guarantee would take an odometer, which none of them is: a mechanism that goes
on to the whole budget unless its first answer is large is not as private as its first answer alone.
"""
EARLY = (
    "The spend of a stopped run is valid only if no answer influenced the decision to "
    "stop. Otherwise count the planned spend of the whole run."
)
"""A planned schedule is fixed in advance, so its whole price holds however it is cut short: what
came is a function of what would have come.
"""
UNCHANGED = "if no silo's records changed during the run"
"""Of a server's sum over disjoint batches. Where records change, the gate parts them anew and its
ledger adds both partitions: a record may be in a batch of each. No reply says so, and the server
counts one."""
NO_MU = "mu is not known for such releases, and only epsilon at this delta is stated"


def rounded_up(value: float, digits: int = 3, style: str = "g") -> str:
    """So many digits ("g") or decimals ("f"), never less than the value but for float noise: nobody
    may be shown less than was spent.
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
    """Epsilon or mu that is spent: four digits, rounded up."""
    return rounded_up(value, 4)


def left_of(used: float, decimals: int = 1) -> str:
    """What is left of a budget of which a share is used, in per cent and rounded down: nobody may
    be shown more than is left.
    """
    scale = 10**decimals
    return f"{math.floor(100 * scale * max(0.0, 1 - used) + 1e-6) / scale:.{decimals}f}%"


# --- scores --------------------------------------------------------------------------------------

ACCURACY = "accuracy"
BALANCED = "balanced accuracy"
AUC = "auc"
LARGER = "larger class"
"""Figures of classes by name; the last is the share of the larger class, so the accuracy of always
saying that one.
"""
IN_THE_LARGE = "calibration in the large"
SLOPE = "calibration slope"
"""Mean predicted risk less the observed share, and by how much that share rises with the risk."""
WIDEST = 0.5
"""Of what a figure can be at all (0 to 1 for an AUC or an accuracy, 0 to the cap for a loss): what
its interval may cover and still say something.
"""
TOO_NOISY = "too noisy to say"
WHY = (
    "Too noisy to say: the noise alone makes the 95 % interval wider than half of the "
    "figure's range (0.2 for calibration in the large, 1 for its slope). Evaluate with "
    "a larger epsilon, or on more held-out records."
)


def too_noisy(low: float, high: float, noise: float) -> bool:
    """Whether a share of what a figure can be is drowned by the noise of its release."""
    return not (high - low <= WIDEST and noise <= WIDEST)


ALONE = {
    "masks": "if all other silos collude with the server",
    "shuffle": "against the shuffler itself",
}
"""Before whom a silo's own noise is all that protects it, under trusts that count on the noise of
others.
"""
