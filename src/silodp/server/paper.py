"""The paper's own noise constants. They are only used to show their real cost, never to protect a
record.
"""

from __future__ import annotations

import math

from silodp.core.errors import BadInput
from silodp.core.privacy.accounting import Budget


def paper_multipliers(algorithm: str, budget: Budget, settings: dict) -> dict[str, float]:
    """Return the noise multipliers (std / sensitivity) of the appendix's experiments, full batch,
    for a claim of (epsilon, delta).

    spider: sigma_1^2 = 16 L^2 ln(1/delta) max(R/q, 1) / (eps n)^2 on sensitivity 2L/n and sigma_2^2
    = 64 L^2 R ln(1/delta) / (eps n)^2 on 4L/n. spider-alternate: 8 and 32 times L^2 R ln(2/delta) /
    (eps n)^2. mb-sgd: 8 L^2 R ln(2/delta) / (eps n)^2. local-sgd has the same constant, with one
    composition for each of its R x steps local steps.

    Raise BadInput for an algorithm without such constants.
    """
    rounds = settings["rounds"]
    log1 = math.log(1 / budget.delta)
    log2 = math.log(2 / budget.delta)
    match algorithm:
        case "spider":
            return {
                "anchor": 2 / budget.epsilon * math.sqrt(log1 * max(rounds / settings["phase"], 1)),
                "refine": 2 / budget.epsilon * math.sqrt(log1 * rounds),
            }
        case "spider-alternate":
            return dict.fromkeys(
                ("anchor", "refine"), math.sqrt(2 * rounds * log2) / budget.epsilon
            )
        case "mb-sgd":
            return {"minibatch": math.sqrt(2 * rounds * log2) / budget.epsilon}
        case "local-sgd":
            return {
                "minibatch": math.sqrt(2 * rounds * settings["local_steps"] * log2) / budget.epsilon
            }
    raise BadInput(
        f"the paper gives no experimental noise constants for {algorithm}; use --noise exact"
    )
