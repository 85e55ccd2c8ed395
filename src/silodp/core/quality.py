"""What an evaluation means, in plain words: whether a model is better than guessing, which of
several is better, and whether it is worse for some groups of records.

Raw error says neither: whoever always says the larger of two classes has a small one. Models are
judged by what guessing cannot raise: the AUC of two classes, the balanced accuracy of more. Every
comparison goes by 95 per cent intervals that hold noise and sampling together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from silodp.core.figures import ACCURACY, AUC, BALANCED, IN_THE_LARGE, LARGER, SLOPE, TOO_NOISY

Z = 1.959964
"""95 per cent of a normal law lie within so many standard deviations."""
SHARES = (ACCURACY, BALANCED, AUC, LARGER)
FIGURES = ("loss", "squared error", "absolute error", ACCURACY, BALANCED, AUC)
"""What a table by silo shows of each, where there is room for little."""
NAMES = {AUC: "AUC", BALANCED: "balanced accuracy", ACCURACY: "accuracy"}
MEANING = {
    AUC: (
        "how often a record of the second class gets a higher risk than one of the "
        "first; guessing gives 0.5"
    ),
    BALANCED: (
        "the share of correct predictions, averaged over the classes; guessing gives 1 "
        "over their number"
    ),
}
NOT_ERROR = "Raw error is not used: predicting only the majority class keeps it small."

Row = Mapping[str, Any]
"""One row of an evaluation's scores, as its file has it."""


def said(row: Row, name: str) -> Mapping[str, Any] | None:
    """A figure that the noise has not drowned."""
    figure = row["figures"].get(name)
    if figure is None or figure["value"] is None or figure.get("too_noisy"):
        return None
    return figure


def interval(name: str, figure: Mapping[str, Any]) -> tuple[float, float]:
    """95 per cent, by noise and sampling together."""
    value = figure["value"]
    low = figure["low"]
    high = figure["high"]
    own = Z * (figure.get("sampling") or 0.0)
    low = value - math.hypot(value - low, own)
    high = value + math.hypot(high - value, own)
    if name in (IN_THE_LARGE, SLOPE):
        return (low, high)
    return (max(low, 0.0), min(high, 1.0) if name in SHARES else high)


def short(row: Row, name: str) -> str:
    """value (low-high) for a narrow cell."""
    if name not in row["figures"]:
        return "-"
    if (figure := said(row, name)) is None:
        return "too noisy"
    low, high = interval(name, figure)
    form = ".2f" if name in SHARES else ".3g"
    between = " to " if low < 0 else "-"
    return f"{figure['value']:{form}} ({low:{form}}{between}{high:{form}})"


def cells(row: Row, name: str) -> tuple[str, str, str, str]:
    """(value, 95 % interval, noise, sampling) of one private figure, as a table shows them; of one
    that is drowned, what noise alone leaves.
    """
    figure = row["figures"][name]
    if said(row, name) is None:
        low, high = (
            "?" if end is None else f"{end:.3f}" for end in (figure["low"], figure["high"])
        )
        return TOO_NOISY, f"{low} to {high}", "-", "-"
    low, high = interval(name, figure)
    noise, sampling = (
        "-" if figure[error] is None else f"± {figure[error]:.2g}"
        for error in ("noise", "sampling")
    )
    return f"{figure['value']:.4g}", f"{low:.3f} to {high:.3f}", noise, sampling


def by_silo(scores: Sequence[Row]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows of a table that has a line for each silo: what it holds out, and its
    figures.
    """
    shown = [name for name in FIGURES if any(name in row["figures"] for row in scores)]
    shown = [name for name in shown if name != "loss" or ACCURACY not in shown]
    return ("silo", "records", *(NAMES.get(name, name) for name in shown)), [
        (row["name"], str(row["held_out"]), *(short(row, name) for name in shown))
        for row in scores[1:]
    ]


def reliable(row: Row) -> list[tuple[str, str, str, str]]:
    """(predicted risk, observed share, 95 %, records) of each stretch of risks."""
    return [
        (
            f"{b['risk_low']:.0%} to {b['risk_high']:.0%}",
            f"{b['observed']:.1%}",
            f"{b['low']:.1%} to {b['high']:.1%}",
            f"{b['records']:.0f}",
        )
        for b in row.get("reliability", ())
    ]


def measure(row: Row) -> str | None:
    """What the row is judged by; None where there are no classes, or nothing was released for
    it.
    """
    return next((name for name in (AUC, BALANCED) if name in row["figures"]), None)


def guessing(row: Row) -> float:
    """What guessing has in `measure`; a row that does not say how many classes there are has
    two.
    """
    return 1 / max(int(row.get("classes") or 2), 2)


# --- one model -----------------------------------------------------------------------------------


def verdict(row: Row) -> str:
    """One or a few plain sentences about the model; empty where there are no classes."""
    if (name := measure(row)) is None:
        return ""
    if (figure := said(row, name)) is None:
        return (
            f"The noise is too large to measure this model's {NAMES[name]}. Evaluate with a "
            "larger epsilon, or on more held-out records."
        )
    low, _ = interval(name, figure)
    chance = guessing(row)
    how = f"{NAMES[name]} {short(row, name)}"
    if low > chance:
        words = f"The model is better than guessing: {how}; guessing gives {chance:.3g}."
    else:
        words = (
            f"The model is not significantly better than guessing: {how}; guessing "
            f"gives {chance:.3g}."
        )
    return " ".join([words, *_beside_the_larger_class(row), *_calibrated(row)])


def _beside_the_larger_class(row: Row) -> list[str]:
    accuracy = said(row, ACCURACY)
    larger = said(row, LARGER)
    if not accuracy or not larger or interval(ACCURACY, accuracy)[0] > interval(LARGER, larger)[1]:
        return []
    return [
        (
            f"Its accuracy of {accuracy['value']:.1%} is not significantly above the "
            f"majority class, which has {larger['value']:.1%} of the records."
        )
    ]


def _calibrated(row: Row) -> list[str]:
    words = []
    if off := said(row, IN_THE_LARGE):
        low, high = interval(IN_THE_LARGE, off)
        if low > 0:
            which = "too high"
        elif high < 0:
            which = "too low"
        else:
            which = ""
        amount = (
            f"by {100 * abs(off['value']):.1f} points ({100 * min(abs(low), abs(high)):.1f} to "
            f"{100 * max(abs(low), abs(high)):.1f})"
        )
        words.append(
            f"On average its risks are {which} {amount}."
            if which
            else "On average its risks are not significantly too high or too low."
        )
    if slope := said(row, SLOPE):
        low, high = interval(SLOPE, slope)
        if high < 1 or low > 1:
            words.append(
                f"They are {'too extreme' if high < 1 else 'too cautious'}: calibration "
                f"slope {short(row, SLOPE)}; the correct slope is 1."
            )
    return words


# --- groups of records ---------------------------------------------------------------------------


def by_group(groups: Row) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows of a table that has a line for each group: its records and accuracy, and
    that of all other groups together.
    """
    return ("group", "records (± noise)", "accuracy (95 %)", "all others (95 %)"), [
        (
            row["name"],
            f"{max(row['records'], 0):.0f} ± {row['records_noise']:.2g}",
            short(row, ACCURACY),
            short(row["rest"], ACCURACY),
        )
        for row in groups["rows"]
    ]


def noisy(rows: Sequence[Row]) -> bool:
    """Whether something in them, or in what a group is compared with, is too noisy to say."""
    return any(
        figure.get("too_noisy")
        for row in rows
        for part in (row, row.get("rest", row))
        for figure in part["figures"].values()
    )


def differences(groups: Row) -> str:
    """One or two plain sentences: for which groups the model is clearly worse than for all others
    together, or that none can be seen; never that there is none.

    Clearly: the 95 per cent intervals of the two do not overlap. Of more than two groups there are
    as many comparisons, and the intervals are so much wider that all of them hold together with 95
    per cent (Bonferroni).
    """
    rows = groups["rows"]
    by = groups["by"]
    worse = []
    wider = NormalDist().inv_cdf(1 - 0.025 / (len(rows) if len(rows) > 2 else 1)) / Z
    heard = [
        (row, own, rest)
        for row in rows
        if (own := said(row, ACCURACY)) and (rest := said(row["rest"], ACCURACY))
    ]
    for row, own, rest in heard:
        above = interval(ACCURACY, own)[1] - own["value"]
        below = rest["value"] - interval(ACCURACY, rest)[0]
        if own["value"] + wider * above < rest["value"] - wider * below:
            worse.append(
                f"{row['name']}, {short(row, ACCURACY)} against "
                f"{short(row['rest'], ACCURACY)} for all others"
            )
    if not heard:
        return f"The noise is too large to compare the model between groups by {by}."
    if len(heard) < len(rows):
        drowned = f" {len(rows) - len(heard)} of {len(rows)} groups are too noisy to compare."
    else:
        drowned = ""
    if not worse:
        return (
            f"There is no significant difference by {by} at this price. A difference "
            f"may still exist.{drowned}"
        )
    return (
        f"The model is significantly less accurate where {by} is "
        f"{'; and where it is '.join(worse)}.{drowned}"
    )


# --- several models ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Standing:
    """One model among several: `place` counts those that are clearly better, and `tied` are those
    that it cannot be told from.
    """

    name: str
    row: Row
    place: int
    tied: tuple[str, ...]


def ranking(rows: Mapping[str, Row]) -> tuple[list[Standing], str]:
    """The models from the best to the worst, and why in plain words; no models, and why not, where
    they cannot be compared.
    """
    names = {measure(row) for row in rows.values()}
    if len(names) != 1 or (name := names.pop()) is None:
        return (
            [],
            "They are not ranked: they were not measured by the same figure.",
        )
    if drowned := [run for run, row in rows.items() if said(row, name) is None]:
        return (
            [],
            f"They are not ranked: the {NAMES[name]} of {_listed(drowned)} is too noisy.",
        )
    ends = {run: interval(name, row["figures"][name]) for run, row in rows.items()}
    order = sorted(rows, key=lambda run: -rows[run]["figures"][name]["value"])
    found = []
    for run in order:
        low, high = ends[run]
        tied = tuple(
            other
            for other in order
            if other != run and ends[other][0] <= high and low <= ends[other][1]
        )
        found.append(
            Standing(run, rows[run], 1 + sum(ends[other][0] > high for other in order), tied)
        )
    return found, " ".join(
        [f"Ranked by {NAMES[name]}: {MEANING[name]}. {NOT_ERROR}", *_why(found, name)]
    )


def _why(found: Sequence[Standing], name: str) -> list[str]:
    words = []
    first = found[0]
    if first.tied:
        words.append(
            f"{first.name} does not differ significantly from {_listed(first.tied)}: "
            "their 95 % intervals overlap."
        )
    error = {s.name: 1 - a["value"] for s in found if (a := said(s.row, ACCURACY))}
    for other in found[1:]:
        if other.name in first.tied or error.get(other.name, 1.0) >= error.get(first.name, 0.0):
            continue
        figure = other.row["figures"][name]
        useless = ""
        if interval(name, figure)[0] <= guessing(other.row):
            useless = ", not significantly better than guessing"
        words.append(
            f"{other.name} has the smaller error ({error[other.name]:.1%} against "
            f"{error[first.name]:.1%}), but its {NAMES[name]} is {figure['value']:.2f} "
            f"against {first.row['figures'][name]['value']:.2f}{useless}."
        )
    return words


def _listed(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} and {names[-1]}"
