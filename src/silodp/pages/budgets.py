"""The parts of a report about each silo's budget: what training and evaluations have spent."""

from __future__ import annotations

import math

from silodp.core.figures import ALONE, rounded_up, shown
from silodp.pages.charts import Series, chart, legend, rounded, spent_bar
from silodp.pages.markup import Markup, figure, folded, section, table, tag
from silodp.pages.runs import Run, Silo

MOST = 5
"""Curves in one chart."""


def budgets(run: Run) -> Markup:
    """Show each silo's budget as a bar of charges, with the shares in a table."""
    kinds = list(dict.fromkeys(kind for s in run.silos for _, kind, _ in s.charges))
    bars = [
        figure(s.name, spent(run, s), spent_bar(s.name, s.charges, s.used, kinds))
        for s in run.silos
    ]
    rows = _history(run)
    columns = ("question", "kind", *(s.name for s in run.silos))
    caption = "What each question cost each silo, as a share of its budget"
    history = table(caption, columns, rows, numbers=range(2, len(columns)))
    note = (
        "Each piece of a bar is one charge. Shares add up, epsilons do not: half of "
        "the bar is more than half of ε."
    )
    if rows:
        every = folded("charges", "Every charge in numbers", history)
    else:
        every = ""
    colours = ""
    if kinds:
        colours = legend(kinds)
    noted = tag("p", note, class_="soft small")
    return section("budgets", "Each silo's budget", noted, *bars, colours, so_far(run), every)


def _history(run: Run) -> list[tuple[str, ...]]:
    """Return what each question cost each silo. Questions in a row with equal costs are one row."""
    shares = [{question: share for question, _, share in s.charges} for s in run.silos]
    kinds = {question: kind for s in run.silos for question, kind, _ in s.charges}
    groups: list[tuple[tuple[str, ...], list[int]]] = []
    for question, kind in kinds.items():
        costs = (rounded_up(100 * of_silo.get(question, 0.0), 3, "f") for of_silo in shares)
        row = (kind, *(f"{cost}%" for cost in costs))
        if groups and groups[-1][0] == row and groups[-1][1][-1] == question - 1:
            groups[-1][1].append(question)
        else:
            groups.append((row, [question]))
    return [(_span(questions), *row) for row, questions in groups]


def _span(questions: list[int]) -> str:
    """Return the numbers of questions in a row, from 1."""
    if len(questions) == 1:
        return f"{questions[0] + 1}"
    return f"{questions[0] + 1} to {questions[-1] + 1}, each"


def so_far(run: Run) -> Markup | str:
    """Draw the share of the budget that each silo had spent after each question.

    Silos with equal shares are one curve. Of more than five curves, the most and the least spent
    are drawn.
    """
    last = max((question + 1 for s in run.silos for question, _, _ in s.charges), default=0)
    if not last:
        return ""
    alike: dict[tuple, list[Silo]] = {}
    for s in run.silos:
        alike.setdefault(tuple((x, round(y, 3)) for x, y in _risen(s, last)), []).append(s)
    groups = sorted(alike.values(), key=lambda group: -group[0].used)
    left_out = len(groups) > MOST
    if left_out:
        groups = [groups[0], groups[-1]]
    lines = [
        Series(_names(group, len(run.silos)), _risen(group[0], last), i, ("", "dash", "dot")[i % 3])
        for i, group in enumerate(groups)
    ]
    ends = [f"{line.name} ε {_ended(group)}" for line, group in zip(lines, groups, strict=True)]
    when = "So far"
    if run.state == "finished":
        when = "At the end"
    words = f"Share of the budget after each question. {when}: {'; '.join(ends)}."
    if left_out:
        words += f" Of {len(run.silos)} silos, only the most and the least spent are drawn."
    top = max(1.0, *(s.used for s in run.silos))
    ticks = [x for x in rounded(0, last, 6) if x == int(x)]
    name = "Spent so far, question by question"
    return chart(
        name,
        words,
        lines,
        across="question",
        up="spent",
        percent=True,
        shape="flat",
        top=top,
        ticks=ticks,
    )


def _risen(s: Silo, last: int) -> list[tuple[float, float]]:
    """Return (questions asked, share spent), flat where a question was not charged to this silo."""
    points = [(0.0, 0.0)]
    for question, _, share in s.charges:
        if question > points[-1][0]:
            points.append((float(question), points[-1][1]))
        points.append((question + 1.0, points[-1][1] + share))
    if points[-1][0] == last:
        return points
    return [*points, (float(last), points[-1][1])]


def _names(group: list[Silo], of: int) -> str:
    if len(group) == of > 1:
        if of == 2:
            return "both silos"
        return f"all {of} silos"
    names = ", ".join(s.name for s in group[:3])
    if len(group) > 3:
        names += f" and {len(group) - 3} more"
    return names


def _ended(group: list[Silo]) -> str:
    low = shown(min(s.spent for s in group))
    high = shown(max(s.spent for s in group))
    if low == high:
        return high
    return f"{low} to {high}"


def spent(run: Run, s: Silo) -> str:
    """Return the spend of training, of evaluations, and of both together, in words.

    Evaluations are priced in addition to the budget, not out of it.
    """
    if run.totals:
        whom = " against the server"
    else:
        whom = ""
    share = rounded_up(100 * s.used, 1, "f")
    words = (
        f"ε {shown(s.spent)} of {rounded_up(s.epsilon, 6)} spent{whom} in training at δ "
        f"{rounded_up(s.delta)}, {share} % of the budget used, {len(s.charges)} charges"
    )
    words += "".join(f"; {code} {times}" for code, times in s.dropped.items()) + "."
    if s.local is not None:
        if math.isfinite(s.local):
            local = f"ε {shown(s.local)}"
        else:
            local = "no bound"
        if s.evaluated:
            part = " and without the evaluations"
        else:
            part = ""
        words += (
            " Under this silo's own noise alone, "
            f"{ALONE.get(str(run.about.get('trust')), '')}{part}: {local}."
        )
    if s.evaluated:
        own = s.evaluated
        if own.count:
            plural = "s" * (own.count > 1)
            words += (
                f" In addition, {own.count} evaluation{plural}: ε {shown(own.epsilon)} at δ "
                f"{rounded_up(own.delta)}."
            )
        words += f" Together ε {shown(own.together[0])} at δ {rounded_up(own.together[1])}."
    if s.ledger:
        words += f" Ledger: {s.ledger['count']} entries."
    return words
