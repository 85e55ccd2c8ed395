"""The part of a report on what an attacker can learn: the trade-off between misses and false
alarms, and the findings of audits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

from silodp.core.figures import rounded_up, shown
from silodp.core.privacy.accounting import Budget, gdp_mu
from silodp.pages.charts import Series, chart
from silodp.pages.markup import Markup, section, sentence, table, tag
from silodp.pages.runs import Run


def misses(mu: float, alarms: float) -> float:
    """Return the least type II error of any test at this type I error, if a release is mu-GDP."""
    normal = NormalDist()
    return normal.cdf(normal.inv_cdf(1 - alarms) - mu)


def floor(epsilon: float, delta: float, alarms: float) -> float:
    """Return the least type II error of any test at this type I error, if only (epsilon, delta) is
    known of the releases.
    """
    steep = math.exp(min(epsilon, 700.0))
    return max(0.0, 1 - delta - steep * alarms, math.exp(-epsilon) * (1 - delta - alarms))


@dataclass(frozen=True)
class Claim:
    """The guarantee against an attacker on some silos: (epsilon, delta), and a whole Gaussian curve
    where releases are Gaussian.
    """

    name: str
    epsilon: float
    delta: float
    gaussian: bool

    @property
    def mu(self) -> float:
        return gdp_mu(Budget(self.epsilon, self.delta))

    @property
    def guarantee(self) -> str:
        if self.gaussian:
            return f"μ = {shown(self.mu)}"
        return f"ε = {shown(self.epsilon)}, δ = {rounded_up(self.delta)}"

    def misses(self, alarms: float) -> float:
        if self.gaussian:
            return misses(self.mu, alarms)
        return floor(self.epsilon, self.delta, alarms)

    def curve(self) -> list[tuple[float, float]]:
        """Return points to join by lines.

        For (epsilon, delta) alone these are the corners, so that no line is above the bound that
        follows.
        """
        if not self.gaussian:
            corner = (1 - self.delta) / (1 + math.exp(min(self.epsilon, 700.0)))
            return [(0.0, 1 - self.delta), (corner, corner), (1 - self.delta, 0.0), (1.0, 0.0)]
        inner = [i / 100 for i in range(1, 100)]
        ends = [1e-6, 1e-4, 1e-3, 4e-3]
        return [
            (0.0, 1.0),
            *((a, self.misses(a)) for a in (*ends, *inner, *(1 - e for e in reversed(ends)))),
            (1.0, 0.0),
        ]


def trade_off(run: Run, audit: Sequence[dict[str, Any]]) -> Markup:
    claims = claims_of(run)
    if not claims:
        return section(
            "trade-off", "What an attacker can learn", tag("p", "Nothing has been spent yet.")
        )
    lines = [Series(claim.name, claim.curve(), i % 7) for i, claim in enumerate(claims)]
    lines.append(Series("random guessing", [(0.0, 1.0), (1.0, 0.0)], 7, "dot"))
    description = (
        "An attacker sees everything that left a silo and tests whether one record was "
        "replaced. No such test is below the curve."
    )
    if not all(claim.gaussian for claim in claims):
        description += (
            " Where some releases are not Gaussian on full or disjoint batches, the "
            "curve follows from ε and δ alone: at a false alarm rate a, the miss rate "
            "is at least max(0, 1 − δ − e^ε a, e^−ε (1 − δ − a))."
        )
    drawn = chart(
        "Misses against false alarms",
        description,
        lines,
        across="false alarms (type I)",
        up="misses (type II)",
        top=1.0,
        shape="square",
    )
    rows = [
        (
            c.name,
            c.guarantee,
            *(f"{math.floor(1000 * c.misses(a)) / 1000:.1%}" for a in (0.05, 0.5)),
        )
        for c in claims
    ]
    table_ = table(
        "The same in numbers",
        ("spend", "guarantee", "misses at 5 % false alarms", "misses at 50 %"),
        rows,
        numbers=(1, 2, 3),
    )
    return section(
        "trade-off",
        "What an attacker can learn",
        tag("div", drawn, table_, class_="pair"),
        _audited(run, audit),
    )


def claims_of(run: Run) -> list[Claim]:
    """Return one claim for each group of silos with similar spends, at the largest spend of the
    group.
    """
    if run.kind == "compare":
        n = min((s["records"] for s in run.about.get("silos", ())), default=0)
        if n > 1:
            return [
                Claim(f"ε = {e:g}", e, 1 / n**2, run.gaussian)
                for e in run.about.get("epsilons", ())
            ]
        return []
    groups: dict[str, list[Claim]] = {}
    for s in run.silos:
        if s.spent > 0:
            claim = Claim(s.name, *s.together, s.gaussian)
            alike = f"{claim.epsilon:.2g} {claim.delta:.2g}"
            if s.gaussian:
                alike = f"{claim.mu:.2g}"
            groups.setdefault(alike, []).append(claim)
    found = []
    for mine in groups.values():
        name = ", ".join(c.name for c in mine[:3])
        if len(mine) > 3:
            name += f" and {len(mine) - 3} more"
        # The claims of one group are all Gaussian or all not: their keys differ in form.
        if mine[0].gaussian:
            worst = max(mine, key=lambda c: c.mu)
        else:
            worst = max(mine, key=lambda c: c.epsilon)
            worst = replace(worst, delta=max(c.delta for c in mine))
        found.append(replace(worst, name=name))
    return sorted(found, key=lambda c: c.misses(0.05), reverse=True)


def _audited(run: Run, audit: Sequence[dict[str, Any]]) -> Markup:
    if not audit:
        words = (
            "There is no audit of this run. `silodp audit` attacks the code that ran. "
            "Give its folder with `--audit`."
        )
        return tag("p", sentence(words), class_="soft small")
    mine = [row for row in audit if row["algorithm"] == run.algorithm] or list(audit)
    rows = [
        (
            row["algorithm"],
            row.get("gate", "simulated"),
            f"{row['claimed_epsilon']:g}",
            f"{row['empirical_epsilon']:.3f}",
            f"{row['lower_bound']:.3f}",
            _verdict(row),
        )
        for row in mine
    ]
    columns = (
        "attack on",
        "gate",
        "ε claimed",
        "ε found by the attack",
        "lower bound, 95 %",
        "claim",
    )
    return table(
        "Audit: results of attacks on the shipped code, at the claims that the audit tested",
        columns,
        rows,
        numbers=(2, 3, 4),
    )


def _verdict(row: dict[str, Any]) -> object:
    if row["alarm"]:
        return tag("b", "REFUTED", class_="alarm")
    return "not refuted"
