"""How good a model is, as pages show it. A plain verdict comes first, then figures with intervals:
by silo, by predicted risk, and compared with other models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from silodp.core import quality
from silodp.core.figures import ACCURACY, AUC, BALANCED, TOO_NOISY, WHY
from silodp.pages.charts import Series, chart
from silodp.pages.markup import Markup, section, table, tag
from silodp.pages.runs import Run

BASES = {
    "held-out": "held-out records, by private releases",
    "test": "test records of a simulation, which is not private",
}


def row_of(run: Run, basis: str | None = None) -> tuple[str, Mapping[str, Any]] | None:
    """Return the kind of records the model was last measured on, and the scores. Return None
    without scores.

    The silos' held-out records come before a simulation's test records.
    """
    found = {}
    if run.scored:
        found["held-out"] = run.scored[-1]["scores"][0]
    found["test"] = run.summary.get("test")
    return next(((name, row) for name, row in found.items() if row and basis in (None, name)), None)


def grouped(run: Run) -> list[Mapping[str, Any]]:
    """Return the latest results by group, one for each column that was evaluated."""
    return list(
        {
            found["by"]: found
            for evaluation in run.evaluations
            if (found := evaluation.get("groups"))
        }.values()
    )


def refused(run: Run) -> str:
    """Return the sentence that explains why only groups have scores."""
    return (
        "There is no score of all records: "
        f"{run.evaluations[-1].get('refused', 'the gates refused it')}."
    )


def headline(run: Run) -> list[tuple[str, str]]:
    """Return (description, figure) for the main figures."""
    if not (found := row_of(run)):
        return []
    basis, row = found
    if basis == "held-out":
        where = "held-out records"
    else:
        where = "test records, not private"
    names = [name for name in (AUC, BALANCED) if name in row["figures"]]
    pairs = []
    for name in names or list(row["figures"])[:1]:
        if name in row["figures"]:
            value, _, interval = quality.short(row, name).partition(" (")
            called = quality.NAMES.get(name, name)
            if interval:
                pairs.append((f"{called}, {interval[:-1]} ({where})", value))
            else:
                pairs.append((f"{called} ({where})", TOO_NOISY))
    return pairs


def judged(run: Run) -> list[Markup]:
    """Show what is known of the model's quality, as one section."""
    if not (found := row_of(run)):
        if run.evaluations:
            return [
                section("judged", "How good the model is", tag("p", refused(run)), *_by_groups(run))
            ]
        none = (
            "This model has not been evaluated on held-out records yet, so this page shows its "
            "price but not its quality. "
        )
        if run.kind == "federation":
            command = "federation evaluate"
        else:
            command = "evaluate"
        return [
            section(
                "judged",
                "How good the model is",
                tag("p", none, tag("code", f"silodp {command}"), " evaluates it, at a price."),
            )
        ]
    basis, row = found
    if basis == "held-out":
        scores = run.scored[-1]["scores"]
    else:
        scores = [row]
    if basis == "held-out" and len(run.scored) > 1:
        which = f", the last of {len(run.scored)} evaluations"
    else:
        which = ""
    parts = []
    if words := quality.verdict(row):
        parts.append(tag("p", words, class_="lead"))
    rows = [(name.replace("auc", "AUC"), *quality.cells(row, name)) for name in row["figures"]]
    parts.append(
        table(
            f"{row['held_out']} {BASES[basis]}{which}",
            ("figure", "value", "interval", "noise", "sampling"),
            rows,
            numbers=(1, 2, 3, 4),
        )
    )
    note = (
        "An interval contains the true value in at least 95 of 100 evaluations. Noise "
        "protects the records. Sampling is the error from their limited number."
    )
    parts.append(tag("p", note, class_="soft small"))
    parts += _reliability(row)
    if len(scores) > 2:
        columns, lines = quality.by_silo(scores)
        parts.append(table("By silo", columns, lines, numbers=range(1, len(columns))))
    parts += _by_groups(run, scores)
    return [section("judged", "How good the model is", *parts)]


def _by_groups(run: Run, scores: Sequence[Mapping[str, Any]] = ()) -> list[Markup]:
    """Show the results by group, and explain figures that are too noisy, here or in `scores`."""
    parts = []
    rows = [*scores]
    for groups in grouped(run):
        columns, lines = quality.by_group(groups)
        parts.append(table(f"By {groups['by']}", columns, lines, numbers=range(1, len(columns))))
        parts.append(tag("p", f"{quality.differences(groups)} {groups['note']}".rstrip()))
        rows += groups["rows"]
    if quality.noisy(rows):
        return [*parts, tag("p", WHY, class_="soft small")]
    return parts


def _reliability(row: Mapping[str, Any]) -> list[Markup]:
    rows = quality.reliable(row)
    bins = row.get("reliability", ())
    if not rows:
        return []
    middle = [((b["risk_low"] + b["risk_high"]) / 2, b) for b in bins]
    drawn = chart(
        "Calibration",
        (
            "Predicted risk against the observed share. On the dashed line they are "
            "equal. The band is the confidence interval, noise included."
        ),
        [
            Series(
                "observed",
                [(m, b["observed"]) for m, b in middle],
                0,
                dots=True,
                band=[(b["low"], b["high"]) for _, b in middle],
            ),
            Series("as predicted", [(0.0, 0.0), (1.0, 1.0)], 1, "dash"),
        ],
        across="predicted risk",
        up="observed share",
        percent=True,
        top=1.0,
        shape="square",
    )
    columns = ("predicted risk", "observed share", "interval", "records")
    return [drawn, table("Predicted risk and observed share", columns, rows, numbers=(1, 2, 3))]


# --- several models ------------------------------------------------------------------------------


def ranked(named: Sequence[tuple[str, Run]]) -> list[Markup]:
    """Show the runs in order of quality, from best to worst, with a sentence that gives the reason.

    Only runs measured on the same records are ranked. Otherwise explain why there is no order.
    """
    trained = [(name, run) for name, run in named if run.kind != "compare"]
    if len(trained) < 2:
        return []
    for basis in BASES:
        rows = {name: found[1] for name, run in trained if (found := row_of(run, basis))}
        if len(rows) == len(trained):
            return [
                section(
                    "ranking",
                    "Which is better",
                    *_order(rows, basis, {name: _where(run, basis) for name, run in trained}),
                )
            ]
    without = [name for name, run in trained if not row_of(run)]
    if without:
        why = f"{', '.join(without)}: not evaluated on held-out records"
    else:
        why = "they were not measured on the same kind of records"
    return [section("ranking", "Which is better", tag("p", f"They are not ranked: {why}."))]


def _order(
    rows: Mapping[str, Mapping[str, Any]], basis: str, where: Mapping[str, object]
) -> list[Markup]:
    if len(set(where.values())) > 1:
        return [
            tag(
                "p",
                (
                    "They are not ranked: they were not measured on the same records "
                    "(the silos, their numbers of records or the classes differ)."
                ),
            )
        ]
    standings, why = quality.ranking(rows)
    if not standings:
        return [tag("p", why)]
    lines = []
    for s in standings:
        accuracy = quality.clear_figure(s.row, ACCURACY)
        place = f"{s.place}"
        if s.tied:
            place += " (tied)"
        error = "-"
        if accuracy:
            error = f"{1 - accuracy['value']:.1%}"
        lines.append(
            (
                place,
                tag("a", s.name, href=f"/run/{quote(s.name)}"),
                *(quality.short(s.row, name) for name in (AUC, BALANCED)),
                error,
            )
        )
    columns = ("place", "run", "AUC", "balanced accuracy", "raw error")
    return [
        tag("p", why, class_="lead"),
        table(f"Measured on {BASES[basis]}", columns, lines, numbers=(2, 3, 4)),
    ]


def _where(run: Run, basis: str) -> object:
    """Return the public facts of the measured records. Two evaluations are comparable only if these
    are equal.
    """
    if basis == "test":
        row = run.summary["test"]
        return run.about.get("data"), row["held_out"], row.get("classes")
    return tuple(
        (row["name"], row["held_out"], row.get("classes")) for row in run.scored[-1]["scores"]
    )
