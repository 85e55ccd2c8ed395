"""How evaluations, survival curves and profiles are shown in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from silodp.cli.console import say, show, table
from silodp.core import quality
from silodp.core.figures import WHY, rounded_up, shown

SHARED = (
    "The price below is for both questions, of all records and of the groups; by itself each "
    "would have 0.7 times this noise."
)
ALONE = (
    "The price below is for the groups alone, at the noise that both questions would have had "
    "together."
)
SAID = (
    "noise: standard error by the mechanism, which is known; sampling: standard error "
    "since there are only so many held-out records, "
    "estimated from released figures; 95 %: the interval by both together."
)


def show_evaluation(answer: Mapping[str, Any]) -> None:
    """Print the score of all records, then the groups if there are any, and the silos without an
    answer.
    """
    scores = answer["scores"]
    groups = answer.get("groups", {})
    if scores:
        _show_scores(scores)
    _show_without("all records", answer)
    if groups:
        say(quality.differences(groups), style="bold")
        (first, *rest), rows = quality.by_group(groups)
        show(
            table(
                "|".join([first, *(f"{name}>" for name in rest)]),
                rows,
                title=f"Held-out records by {groups['by']}",
            )
        )
        say(*filter(None, (groups["note"], SHARED if scores else ALONE)))
        _show_without("groups", groups)
    if quality.noisy([*scores, *groups.get("rows", ())]):
        say(WHY)


def _show_without(what: str, found: Mapping[str, Any]) -> None:
    from silodp.server.asking import why

    if codes := found.get("without"):
        said = ", ".join(f"{name} {code}" for name, code in sorted(codes.items()))
        say(f"Not in the figures of {what}: {said}{why(codes)}.")


def _show_scores(rows: Sequence[dict]) -> None:
    whole = rows[0]
    if words := quality.verdict(whole):
        say(words, style="bold")
    lines = [(name.replace("auc", "AUC"), *quality.cells(whole, name)) for name in whole["figures"]]
    show(
        table(
            "figure|value>|95 %>!|noise>!|sampling>!",
            lines,
            title=f"{whole['held_out']} held-out records, by private releases",
        )
    )
    if stretches := quality.reliable(whole):
        show(
            table(
                "predicted risk|observed share>|95 %>!|records>",
                stretches,
                title="Do the risks come true?",
            )
        )
    if len(rows) > 2:
        columns, by_silo = quality.by_silo(rows)
        show(
            table(
                "|".join([columns[0], *(f"{name}>" for name in columns[1:])]),
                by_silo,
                title="By silo",
            )
        )
    say(SAID)


def show_survival(answer: dict) -> None:
    rows = []
    for row in answer["curve"]:
        if row["survival"] is None:
            share = "too noisy"
        else:
            share = f"{100 * row['survival']:.1f} %"
        rows.append(
            (
                f"{row['time']:g}",
                share,
                f"{100 * row['low']:.1f} to {100 * row['high']:.1f} %",
                f"{max(row['at_risk'], 0):.0f}",
            )
        )
    title = f"Without the event, by a private release over {answer['records']} records"
    show(table(f"until {answer['time']}>|share>|95 %>|still there>", rows, title=title))
    say(
        "The band includes the privacy noise: each count has a standard error of "
        f"{answer['count_error']:.2g} by it."
    )


def show_profile(answer: dict) -> None:
    rows = []
    for row in answer["features"]:
        pairs = (f"{row[name]:.4g} ± {row[f'{name}_error']:.2g}" for name in ("mean", "deviation"))
        missing = f"{100 * row['missing']:.1f} ± {100 * row['missing_error']:.1f} %"
        rows.append((row["feature"], f"{row['low']:g} to {row['high']:g}", *pairs, missing))
    title = "Features, by private releases (± standard error by noise)"
    show(table("feature|range>|mean>|deviation>|missing>", rows, title=title))
    if answer["classes"]:
        rows = (
            (row["class"], f"{row['count']:.0f} ± {row['count_error']:.2g}", f"{row['weight']:.3g}")
            for row in answer["classes"]
        )
        show(table("class|records>|weight>", rows, title="Classes"))
    say(
        "A range is a run of public bins; what lies outside is clamped to it, for mean and "
        "deviation too."
    )


def show_charged(silos: Sequence[dict]) -> None:
    """Print what each silo has paid, or may have."""
    for silo in silos:
        if not silo["epsilon"]:
            say(f"{silo['name']}: nothing more was charged.")
        elif "spent_epsilon" in silo:
            say(
                f"{silo['name']}: epsilon {shown(silo['spent_epsilon'])} at delta "
                f"{rounded_up(silo['delta'])} for this."
            )
        else:
            if "rule" in silo:
                by = f"; its ledger, of the rule {silo['rule']}, may count more"
            else:
                by = ", in its ledger with the rest"
            say(
                f"{silo['name']}: at most epsilon {shown(silo['epsilon'])} at delta "
                f"{rounded_up(silo['delta'])}{by}."
            )
