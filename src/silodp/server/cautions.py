"""Warn of settings that are allowed and rarely meant: each sentence says why."""

from __future__ import annotations

import math
from collections.abc import Sequence

from silodp.core.figures import rounded_up
from silodp.server.order import Order, targets

LARGE_EPSILON = 20.0
FEWEST_RECORDS = 20
FAR = 100.0
"""The length of one step, step times clip, above which a model jumps instead of learning."""
NEAR = 0.01
"""The length of all steps together below which a model stays where it starts."""
SHOWN = 8


def cautions(order: Order, names: Sequence[str], records: Sequence[int]) -> list[str]:
    """Return a sentence for each setting that is probably a mistake, and why.

    They follow from the order and the numbers of records, which are public.
    """
    budgets = dict(zip(names, targets(order, names, records), strict=True))
    counts = dict(zip(names, records, strict=True))
    sentences = []
    epsilon = max(budget.epsilon for budget in budgets.values())
    if epsilon > LARGE_EPSILON:
        sentences.append(
            f"epsilon {epsilon:g} protects little: what is released may change the odds of a guess "
            f"about a record by a factor of 10^{epsilon / math.log(10):.0f}. Use 10 or less."
        )
    large = [
        f"{name} ({rounded_up(budget.delta)}; {counts[name]} records)"
        for name, budget in budgets.items()
        if budget.delta > 1 / counts[name] and counts[name] > 1
    ]
    if large and not order.user_level:
        sentences.append(
            f"delta is above 1/n at {_listed(large)}. Such a delta allows publishing a whole "
            "record. Use 1/n^2 or less."
        )
    small = [f"{name} ({n} records)" for name, n in counts.items() if n < FEWEST_RECORDS]
    if small:
        sentences.append(
            f"fewer than {FEWEST_RECORDS} records at {_listed(small)}. Noise hides what so few "
            "records could add. Leave the silo out, or join it with another."
        )
    return [*sentences, *_of_step(order)]


def _of_step(order: Order) -> list[str]:
    """Return a sentence if the step is absurdly large or small."""
    if order.noise == "theory":
        return []
    length = order.step * order.clip
    settings = f"step {order.step:g} with clip {order.clip:g}"
    advice = f"Try a step of about {1 / order.clip:g}."
    if length > FAR:
        return [
            f"{settings} may move the model by {length:g} in one round. It will jump about instead "
            f"of learning. {advice}"
        ]
    if 0 < length * order.rounds < NEAR:
        return [
            f"{settings} moves the model by at most {length * order.rounds:.2g} in {order.rounds} "
            f"rounds. It will stay where it starts. {advice}"
        ]
    return []


def _listed(items: Sequence[str]) -> str:
    """Return the first items, and the number of the others."""
    text = ", ".join(items[:SHOWN])
    if len(items) > SHOWN:
        return f"{text} and {len(items) - SHOWN} more"
    return text
