"""The tables of docs/trust-errors.md: the errors of the same algorithms under each trust."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from research.study import COLLUDING, Study

COLUMNS = {
    "": "ISRL-DP",
    "-shuffle": "masks or shuffle",
    "-masks": f"masks, {COLLUDING} may collude",
    "-central": "central DP",
}
METHODS = {
    "mb-sgd": ("MB-SGD", "mb-sgd"),
    "spider": ("SPIDER, phase 2", "spider-diff"),
    "momentum": ("logistic, momentum", "momentum"),
}
"""The name of each method, and its curve under ISRL-DP."""


def trust_table(rows: Sequence[dict], study: Study) -> list[str]:
    """Return the test errors by epsilon, a column for each trust, and how totals compare with
    central DP.
    """
    by = {(r["curve"], r["epsilon"]): r for r in rows}
    curves = {curve for curve, _ in by}
    methods = {method: names for method, names in METHODS.items() if names[1] in curves}
    trusts = [
        trust
        for trust in COLUMNS
        if not trust or any(f"{method}{trust}" in curves for method in methods)
    ]
    lines = [
        "| epsilon | method | " + " | ".join(COLUMNS[trust] for trust in trusts) + " |",
        "|---:|---|" + "---:|" * len(trusts),
    ]
    for epsilon in study.epsilons:
        for method, (name, plain) in methods.items():
            cells = (by[f"{method}{t}" if t else plain, epsilon] for t in trusts)
            lines.append(f"| {epsilon:g} | {name} | " + " | ".join(map(_error, cells)) + " |")
    over = [
        100 * (by[f"{method}-shuffle", e]["test_error"] / r["test_error"] - 1)
        for method in methods
        for e in study.epsilons
        if (r := by[f"{method}-central", e])
    ]
    lines.append(
        f"\nMasks or shuffle over central DP: {statistics.mean(over):+.1f} % on average over these "
        f"{len(over)} cells, from {min(over):+.1f} to {max(over):+.1f} %. The two have the same "
        "noise, and cells share its draws: this is chance."
    )
    return lines


def _error(row: dict) -> str:
    return f"{100 * row['test_error']:.2f} ± {100 * row['standard_error']:.2f}"
