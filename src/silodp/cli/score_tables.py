"""How groups of records, survival curves and profiles are shown in a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from silodp.cli.console import dump, say, show, table

SHARED = "The price below is for both questions, of all records and of the groups; by itself each would have 0.7 times this noise."


def show_groups(groups: Mapping[str, Any]) -> None:
    from silodp.core import quality

    say(quality.differences(groups), style="bold")
    (first, *rest), rows = quality.by_group(groups)
    show(table("|".join([first, *(f"{name}>" for name in rest)]), rows, title=f"Held-out records by {groups['by']}"))
    say(*filter(None, (groups["note"], SHARED)))


def show_survival(answer: dict, page: Path | None, as_json: bool) -> bool:
    """Whether it was shown to people, who are then told the price."""
    if page:
        from silodp.cli.pages import put
        from silodp.pages.survival import page_of

        put(page, page_of(answer))
    if as_json:
        dump(answer)
        return False
    rows = []
    for row in answer["curve"]:
        share = "too noisy" if row["survival"] is None else f"{100 * row['survival']:.1f} %"
        rows.append((f"{row['time']:g}", share, f"{100 * row['low']:.1f} to {100 * row['high']:.1f} %", f"{max(row['at_risk'], 0):.0f}"))
    title = f"Without the event, by a private release over {answer['records']} records"
    show(table(f"until {answer['time']}>|share>|95 %>|still there>", rows, title=title))
    say(f"The band includes the privacy noise: each count has a standard error of {answer['count_error']:.2g} by it.")
    return True


def show_profile(answer: dict) -> None:
    rows = []
    for row in answer["features"]:
        pairs = (f"{row[name]:.4g} ± {row[f'{name}_error']:.2g}" for name in ("mean", "deviation"))
        missing = f"{100 * row['missing']:.1f} ± {100 * row['missing_error']:.1f} %"
        rows.append((row["feature"], f"{row['low']:g} to {row['high']:g}", *pairs, missing))
    title = "Features, by private releases (± standard error by noise)"
    show(table("feature|range>|mean>|deviation>|missing>", rows, title=title))
    if answer["classes"]:
        rows = ((row["class"], f"{row['count']:.0f} ± {row['count_error']:.2g}", f"{row['weight']:.3g}") for row in answer["classes"])
        show(table("class|records>|weight>", rows, title="Classes"))
    say("A range is a run of public bins; what lies outside is clamped to it, for mean and deviation too.")
