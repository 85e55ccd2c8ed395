"""The part of a report that says what an attacker can tell: the trade-off of misses and false
alarms, and what audits have found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

from silodp.core.figures import shown
from silodp.core.privacy.accounting import Budget, gdp_mu, rounded_up
from silodp.pages.charts import Series, chart
from silodp.pages.markup import Markup, section, sentence, table, tag
from silodp.pages.runs import Run


def misses(mu: float, alarms: float) -> float:
    """The least type II error of any test at this type I error, if a release is mu-GDP."""
    normal = NormalDist()
    return normal.cdf(normal.inv_cdf(1 - alarms) - mu)


def floor(epsilon: float, delta: float, alarms: float) -> float:
    """The least type II error of any test at this type I error, if nothing but (epsilon, delta) is
    known of the releases.
    """
    steep = math.exp(min(epsilon, 700.0))
    return max(0.0, 1 - delta - steep * alarms, math.exp(-epsilon) * (1 - delta - alarms))


@dataclass(frozen=True)
class Claim:
    """What an attacker on some silos is up against: (epsilon, delta), and a whole Gaussian curve
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
    def said(self) -> str:
        if self.gaussian:
            return f"μ = {shown(self.mu)}"
        return f"ε = {shown(self.epsilon)}, δ = {rounded_up(self.delta)}"

    def misses(self, alarms: float) -> float:
        if self.gaussian:
            return misses(self.mu, alarms)
        return floor(self.epsilon, self.delta, alarms)

    def curve(self) -> list[tuple[float, float]]:
        """Points to join by lines; of (epsilon, delta) alone these are the corners, so that no line
        is above what follows from it.
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
            "trade-off", "What an attacker can tell", tag("p", "Nothing has been spent yet.")
        )
    lines = [Series(claim.name, claim.curve(), i % 7) for i, claim in enumerate(claims)]
    lines.append(Series("guessing blindly", [(0.0, 1.0), (1.0, 0.0)], 7, "dot"))
    said = (
        "An attacker with everything that left a silo asks whether one record was replaced. No "
        "test of it comes below its curve."
    )
    if not all(claim.gaussian for claim in claims):
        said += (
            " Where releases are not all Gaussian on full or disjoint batches, the curve "
            "is what ε and δ alone imply: "
            "at a false alarms at least max(0, 1 − δ − e^ε a, e^−ε (1 − δ − a)) misses."
        )
    drawn = chart(
        "Misses against false alarms",
        said,
        lines,
        across="false alarms (type I)",
        up="misses (type II)",
        top=1.0,
        shape="square",
    )
    rows = [
        (c.name, c.said, *(f"{math.floor(1000 * c.misses(a)) / 1000:.1%}" for a in (0.05, 0.5)))
        for c in claims
    ]
    table_ = table(
        "The same in numbers",
        ("spend", "known of it", "misses at 5 % false alarms", "misses at 50 %"),
        rows,
        numbers=(1, 2, 3),
    )
    return section(
        "trade-off",
        "What an attacker can tell",
        tag("div", drawn, table_, class_="pair"),
        _audited(run, audit),
    )


def claims_of(run: Run) -> list[Claim]:
    """One claim for silos that differ little, at the most that any of them has spent."""
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
            groups.setdefault(
                f"{claim.mu:.2g}" if s.gaussian else f"{claim.epsilon:.2g} {claim.delta:.2g}", []
            ).append(claim)
    found = []
    for mine in groups.values():
        name = ", ".join(c.name for c in mine[:3]) + (
            f" and {len(mine) - 3} more" if len(mine) > 3 else ""
        )
        worst = max(mine, key=lambda c: c.mu if c.gaussian else c.epsilon)
        found.append(
            replace(
                worst,
                name=name,
                delta=worst.delta if worst.gaussian else max(c.delta for c in mine),
            )
        )
    return sorted(found, key=lambda c: c.misses(0.05), reverse=True)


def _audited(run: Run, audit: Sequence[dict[str, Any]]) -> Markup:
    if not audit:
        words = (
            "No audit lies beside this run. `silodp audit` attacks the code that ran; give its "
            "folder with `--audit`."
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
            tag("b", "REFUTED", class_="alarm") if row["alarm"] else "not refuted",
        )
        for row in mine
    ]
    columns = (
        "attack on",
        "gate",
        "ε claimed",
        "ε that the attack found",
        "at least, at 95 %",
        "claim",
    )
    return table(
        "The audit: what attacks on the shipped code have found, at claims of its own",
        columns,
        rows,
        numbers=(2, 3, 4),
    )
