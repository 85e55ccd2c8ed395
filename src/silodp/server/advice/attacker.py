"""What a silo gives up at a budget, said as what the best attacker can do."""

from __future__ import annotations

import math

from scipy import special

from silodp.core.privacy.accounting import Budget, gdp_mu

FALSE_ALARMS = 0.01


def gives_up(budget: Budget, *, gaussian: bool = True) -> dict:
    """What the best attacker can tell about one record from everything its silo says, if all releases are Gaussian and fill the budget; else
    what epsilon and delta alone leave him, which is more.

    "guesses_right" starts from a prior of 50 %; "belief" is the posterior that is passed with probability "belief_passed" at most.
    """
    stated = {"epsilon": budget.epsilon, "delta": budget.delta, "false_positives": FALSE_ALARMS}
    if not gaussian:
        epsilon, delta, least = budget.epsilon, budget.delta, math.exp(-budget.epsilon)
        return stated | {
            "true_positives": min(FALSE_ALARMS / least + delta, 1 - least * (1 - delta - FALSE_ALARMS)),
            "guesses_right": (1 + delta * least) / (1 + least),
            "belief": 1 / (1 + math.exp(-epsilon - 1)),
            "belief_passed": delta / (1 - math.exp(-1)),  # P(loss > epsilon + t) (1 - exp(-t)) is delta at most
        }
    mu = gdp_mu(budget)
    return stated | {
        "mu": mu,
        "true_positives": float(special.ndtr(special.ndtri(FALSE_ALARMS) + mu)),
        "guesses_right": float(special.ndtr(mu / 2)),
        "belief": 1 / (1 + math.exp(-budget.epsilon)),
        "belief_passed": float(special.ndtr(mu / 2 - budget.epsilon / mu)),
    }
