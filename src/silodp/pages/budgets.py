"""The parts of a report that say what was spent of each silo's budget, by training and by evaluations beside it."""

from __future__ import annotations

import math

from silodp.core.figures import ALONE, left_of, shown
from silodp.core.privacy.accounting import rounded_up
from silodp.pages.charts import legend, spent_bar
from silodp.pages.markup import Markup, folded, section, table, tag
from silodp.pages.runs import Run, Silo


def budgets(run: Run) -> Markup:
    kinds = list(dict.fromkeys(kind for s in run.silos for _, kind, _ in s.charges))
    bars = [
        tag("figure", tag("figcaption", tag("b", s.name), tag("span", spent(run, s))), spent_bar(s.name, s.charges, s.used, kinds))
        for s in run.silos
    ]
    rows = [
        (q + 1, kind, *(f"{rounded_up(100 * dict((c[0], c[2]) for c in s.charges).get(q, 0.0), 3, 'f')}%" for s in run.silos))
        for q, kind in dict((c[0], c[1]) for s in run.silos for c in s.charges).items()
    ]
    history = table(
        "What each question cost each silo, as a share of its budget",
        ("question", "kind", *(s.name for s in run.silos)),
        rows,
        numbers=(0, *range(2, 2 + len(run.silos))),
    )
    note = "Each piece of a bar is one charge. Shares add up; epsilons do not, so half of the bar is less than half of ε."
    every = folded("charges", "Every charge in numbers", history) if rows else ""
    return section("budgets", "Each silo's budget", tag("p", note, class_="soft small"), *bars, legend(kinds) if kinds else "", every)


def spent(run: Run, s: Silo) -> str:
    """Training, evaluations and both together, each by its own figure: evaluations are priced beside the budget, not out of it."""
    whom = " against the server" if run.rule == "totals" else ""
    said = f"ε {shown(s.spent)} of {rounded_up(s.epsilon, 6)} spent{whom} in training at δ {rounded_up(s.delta)}, {left_of(s.used)} of the budget left, "
    said += f"{len(s.charges)} charges" + "".join(f"; {code} {times}" for code, times in s.dropped.items()) + "."
    if s.local is not None:
        local = f"ε {shown(s.local)}" if math.isfinite(s.local) else "no bound"
        said += f" Under this silo's own noise alone, {ALONE.get(str(run.about.get('trust')), '')}: {local}."
    if s.evaluated:
        own = s.evaluated
        if own.count:
            said += f" Beside it {own.count} evaluation{'s' if own.count > 1 else ''}: ε {shown(own.epsilon)} at δ {rounded_up(own.delta)}."
        said += f" Together ε {shown(own.together[0])} at δ {rounded_up(own.together[1])}."
    return said + (f" Ledger: {s.ledger['count']} entries." if s.ledger else "")
