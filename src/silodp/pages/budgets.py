"""The parts of a report that say what was spent of each silo's budget, by training and by
evaluations beside it.
"""

from __future__ import annotations

import math

from silodp.core.figures import ALONE, left_of, shown
from silodp.core.privacy.accounting import rounded_up
from silodp.pages.charts import Series, chart, legend, rounded, spent_bar
from silodp.pages.markup import Markup, figure, folded, section, table, tag
from silodp.pages.runs import Run, Silo

MOST = 5
"""Curves in one chart."""


def budgets(run: Run) -> Markup:
    kinds = list(dict.fromkeys(kind for s in run.silos for _, kind, _ in s.charges))
    bars = [
        figure(s.name, spent(run, s), spent_bar(s.name, s.charges, s.used, kinds))
        for s in run.silos
    ]
    rows = [
        (
            q + 1,
            kind,
            *(
                f"{rounded_up(100 * dict((c[0], c[2]) for c in s.charges).get(q, 0.0), 3, 'f')}%"
                for s in run.silos
            ),
        )
        for q, kind in dict((c[0], c[1]) for s in run.silos for c in s.charges).items()
    ]
    columns = ("question", "kind", *(s.name for s in run.silos))
    caption = "What each question cost each silo, as a share of its budget"
    history = table(caption, columns, rows, numbers=(0, *range(2, len(columns))))
    note = (
        "Each piece of a bar is one charge. Shares add up; epsilons do not, so half of the bar "
        "is less than half of ε."
    )
    if rows:
        every = folded("charges", "Every charge in numbers", history)
    else:
        every = ""
    parts = (
        tag("p", note, class_="soft small"),
        *bars,
        legend(kinds) if kinds else "",
        so_far(run),
        every,
    )
    return section("budgets", "Each silo's budget", *parts)


def so_far(run: Run) -> Markup | str:
    """How much of its budget each silo had spent after each question. Silos whose shares rose
    alike, as they do where everybody answers every question, are one curve; of more than five
    curves, the most and the least spent are drawn.
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
    else:
        groups = groups
    lines = [
        Series(_names(group, len(run.silos)), _risen(group[0], last), i, ("", "dash", "dot")[i % 3])
        for i, group in enumerate(groups)
    ]
    ends = [f"{line.name} ε {_ended(group)}" for line, group in zip(lines, groups, strict=True)]
    said = (
        "Share of the budget after each question. "
        f"{'At the end' if run.state == 'finished' else 'So far'}: {'; '.join(ends)}."
    )
    if left_out:
        said += f" Of {len(run.silos)} silos, the most and the least spent one."
    else:
        said += ""
    top = max(1.0, *(s.used for s in run.silos))
    ticks = [x for x in rounded(0, last, 6) if x == int(x)]
    name = "Spent so far, question by question"
    return chart(
        name,
        said,
        lines,
        across="question",
        up="spent",
        percent=True,
        shape="flat",
        top=top,
        ticks=ticks,
    )


def _risen(s: Silo, last: int) -> list[tuple[float, float]]:
    """(questions asked, share spent), flat where a question was not charged to this silo."""
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
    return ", ".join(s.name for s in group[:3]) + (
        f" and {len(group) - 3} more" if len(group) > 3 else ""
    )


def _ended(group: list[Silo]) -> str:
    low, high = (shown(end(s.spent for s in group)) for end in (min, max))
    return high if low == high else f"{low} to {high}"


def spent(run: Run, s: Silo) -> str:
    """Training, evaluations and both together, each by its own figure: evaluations are priced
    beside the budget, not out of it.
    """
    if run.totals:
        whom = " against the server"
    else:
        whom = ""
    said = (
        f"ε {shown(s.spent)} of {rounded_up(s.epsilon, 6)} spent{whom} in training at δ "
        f"{rounded_up(s.delta)}, {left_of(s.used)} of the budget left, "
    )
    said += (
        f"{len(s.charges)} charges"
        + "".join(f"; {code} {times}" for code, times in s.dropped.items())
        + "."
    )
    if s.local is not None:
        if math.isfinite(s.local):
            local = f"ε {shown(s.local)}"
        else:
            local = "no bound"
        said += (
            " Under this silo's own noise alone, "
            f"{ALONE.get(str(run.about.get('trust')), '')}: {local}."
        )
    if s.evaluated:
        own = s.evaluated
        if own.count:
            said += (
                f" Beside it {own.count} evaluation{'s' if own.count > 1 else ''}: ε "
                f"{shown(own.epsilon)} at δ {rounded_up(own.delta)}."
            )
        said += f" Together ε {shown(own.together[0])} at δ {rounded_up(own.together[1])}."
    return said + (f" Ledger: {s.ledger['count']} entries." if s.ledger else "")
