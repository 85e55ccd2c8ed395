"""Advice in a few plain lines, and as a settings file that `train --settings` and `federation run
--settings` take whole.
"""

from __future__ import annotations

import json
from typing import Any

from silodp.server.advice.candidates import WITH_MOMENTUM
from silodp.server.advice.chooser import Advice
from silodp.server.order import Order

SETTINGS = (
    "algorithm",
    "model",
    "rounds",
    "step",
    "clip",
    "momentum",
    "weights",
    "output",
    "recalibration",
    "settings",
    "trust",
    "epsilon",
    "delta",
)
"""What a settings file holds of an order."""


def lines(advice: Advice) -> list[str]:
    """Return what was chosen, what to expect, and whom it concerns."""
    order = advice.order
    told = advice.expected
    if order.rounds > 1:
        often = f"{order.rounds} rounds, "
    else:
        often = "one round, "
    if order.algorithm in WITH_MOMENTUM:
        moved = f", momentum {order.momentum:g}"
    else:
        moved = ""
    if order.algorithm == "one-shot":
        how = ""
    else:
        how = f"{often}step {order.step:g}{moved}, clip {order.clip:g}, "
    if order.model:
        model = f"model {order.model}"
    else:
        model = "the model that the silos approved"
    found = [
        (
            f"Chosen from sizes, columns and budgets alone, which costs no privacy: {model}, "
            f"{order.algorithm}, {how}weights by {order.weights}"
            f"{', the later half averaged' if order.output == 'tail' else ''}."
        )
    ]
    if advice.left_out:
        found.append(
            "Not tried, because a silo's policy does not allow its questions: "
            f"{', '.join(advice.left_out)}."
        )
    low, high = (100 * value for value in told["middle"])
    plain = 100 * told["not_private"]
    guess = 100 * told["guessing"]
    if round(low) < round(high):
        seen = f"{low:.0f} to {high:.0f} %"
    else:
        seen = f"about {low:.0f} %"
    if told["measure"] == "error":
        if told.get("weighed"):
            counted = " (classes weighted as in the schema)"
        else:
            counted = ""
        said = f"error {seen}{counted}; without privacy {plain:.0f} %; majority class {guess:.0f} %"
    else:
        said = f"loss {seen} of the loss of a constant; without privacy {plain:.0f} %"
    found.append(
        f"Expected on simulated data of this shape: {said}. Your data may be easier or "
        "harder. The cost of privacy should be similar."
    )
    if "auc" in told:
        (loss, plain_loss), (auc, plain_auc), (slope, _) = (
            told[name] for name in ("log_loss", "auc", "slope")
        )
        found.append(
            f"There the AUC was {auc:.2f} (without privacy {plain_auc:.2f}), the log loss "
            f"{loss:.2f} ({plain_loss:.2f}), and the calibration slope {slope:.2f}, where 1 is "
            "right."
        )
    if order.recalibration:
        found.append(
            f"{100 * order.recalibration:g} % of the budget (mu squared) pays for one last "
            "question, which recalibrates the model's risks. --no-recalibration omits it."
        )
    if not advice.enough:
        found.append(
            "Do not train on a real budget yet: with so few records at this epsilon, the expected "
            "gain over a constant risk is as small as the noise of a run. Use more records, "
            "more silos or a larger epsilon."
        )
    if small := [
        f"{s['name']} ({s['records']} records)" for s in advice.silos if s.get("too_small")
    ]:
        found.append(
            f"These silos are used, but add little at this epsilon: {', '.join(small)}. To save "
            "their budget, leave them out of the run (in a project: out of `silo` in silodp.toml)."
        )
    helps = [s for s in advice.silos if s.get("noise_without", 1.0) < 1.0]
    if helps:
        best = min(helps, key=lambda s: s["noise_without"])
        found.append(
            f"Leaving {best['name']} out would make the noise "
            f"{100 * (1 - best['noise_without']):.1f} % smaller."
        )
    return found


def settings_file(order: Order) -> str:
    """TOML, one line for each option of the order that is not the usual."""
    rows = []
    moves = order.algorithm in WITH_MOMENTUM
    for name in SETTINGS:
        value: Any = getattr(order, name)
        if value in (None, (), "") or (name == "momentum" and not moves):
            continue
        rows.append(f"{name} = {json.dumps(list(value) if isinstance(value, tuple) else value)}")
    return (
        "\n".join(
            [
                (
                    "# The options of `silodp train --settings` and `silodp federation run "
                    "--settings`."
                ),
                *rows,
            ]
        )
        + "\n"
    )
