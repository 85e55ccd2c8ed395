"""Explain an evaluation in plain words.

Is the model better than guessing? Which of several models is better? Is the model worse for some
groups of records?

Raw error answers none of these: a constant prediction of the larger class has a small error. Models
are judged by figures that guessing cannot raise: the AUC of two classes, the balanced accuracy of
more. Every comparison uses 95 per cent intervals that cover noise and sampling together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from silodp.core.figures import (
    ACCURACY,
    AUC,
    BALANCED,
    DEVIANCE,
    EXPLAINED,
    FLAGGED,
    IN_THE_LARGE,
    LARGER,
    NPV,
    PPV,
    PREVALENCE,
    SENSITIVITY,
    SLOPE,
    SPECIFICITY,
    TOO_NOISY,
)

Z = 1.959964
"""How many standard deviations contain 95 per cent of a normal law."""
SHARES = (
    ACCURACY,
    BALANCED,
    AUC,
    LARGER,
    PREVALENCE,
    SENSITIVITY,
    SPECIFICITY,
    PPV,
    NPV,
    FLAGGED,
)
SIGNED = (IN_THE_LARGE, SLOPE, EXPLAINED, DEVIANCE)
"""Figures that can be below zero."""
FIGURES = (
    "loss",
    "squared error",
    "absolute error",
    EXPLAINED,
    DEVIANCE,
    ACCURACY,
    BALANCED,
    AUC,
)
"""The figures in a table by silo, which has little room."""
NAMES = {AUC: "AUC", BALANCED: "balanced accuracy", ACCURACY: "accuracy"}


def called(name: str) -> str:
    """Return the name of a figure for people."""
    return NAMES.get(name, name)


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
NOT_ERROR = "Raw error does not count here: always predicting the larger class keeps it small."

Row = Mapping[str, Any]
"""One row of an evaluation's scores, as its file has it."""


def clear_figure(row: Row, name: str) -> Mapping[str, Any] | None:
    """Return a figure of this name, or None if it is absent or hidden by the noise."""
    figure = row["figures"].get(name)
    if figure is None or figure["value"] is None or figure.get("too_noisy"):
        return None
    return figure


def interval(name: str, figure: Mapping[str, Any]) -> tuple[float, float]:
    """Return the 95 per cent interval, for noise and sampling together.

    A file of an earlier version has the interval of the noise alone, to which sampling is added.
    """
    value = figure["value"]
    low = figure["low"]
    high = figure["high"]
    if figure.get("whole"):
        return low, high
    sampling = Z * (figure.get("sampling") or 0.0)
    low = value - math.hypot(value - low, sampling)
    high = value + math.hypot(high - value, sampling)
    if name in SIGNED:
        return low, high
    if name in SHARES:
        high = min(high, 1.0)
    return max(low, 0.0), high


def short(row: Row, name: str) -> str:
    """Return "value (low-high)" for a narrow cell."""
    if name not in row["figures"]:
        return "-"
    if (figure := clear_figure(row, name)) is None:
        return "too noisy"
    low, high = interval(name, figure)
    form = ".2f" if name in SHARES else ".3g"
    between = " to " if low < 0 else "-"
    return f"{figure['value']:{form}} ({low:{form}}{between}{high:{form}})"


def cells(row: Row, name: str) -> tuple[str, str, str, str]:
    """Return the value, the 95 % interval, the noise and the sampling error of one figure, as
    texts.

    If the noise hides the figure, return the interval that the noise alone leaves.
    """
    figure = row["figures"][name]
    if clear_figure(row, name) is None:
        low = _formatted(figure["low"], "{:.3f}", "?")
        high = _formatted(figure["high"], "{:.3f}", "?")
        return TOO_NOISY, f"{low} to {high}", "-", "-"
    low, high = interval(name, figure)
    noise = _formatted(figure["noise"], "± {:.2g}", "-")
    sampling = _formatted(figure["sampling"], "± {:.2g}", "-")
    return f"{figure['value']:.4g}", f"{low:.3f} to {high:.3f}", noise, sampling


def _formatted(number: float | None, form: str, absent: str) -> str:
    """Return a number in this form, or the text for an absent one."""
    if number is None:
        return absent
    return form.format(number)


def by_silo(scores: Sequence[Row]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the columns and rows of a table with one line for each silo.

    A line has the silo's held-out records and its figures.
    """
    shown = [name for name in FIGURES if any(name in row["figures"] for row in scores)]
    shown = [name for name in shown if name != "loss" or ACCURACY not in shown]
    return ("silo", "records", *(called(name) for name in shown)), [
        (row["name"], str(row["held_out"]), *(short(row, name) for name in shown))
        for row in scores[1:]
    ]


def reliable(row: Row) -> list[tuple[str, str, str, str]]:
    """Return predicted risk, observed share, 95 % interval and records of each range of risks."""
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
    """Return the name of the figure by which the row is judged.

    Return None if there are no classes, or nothing was released for the row.
    """
    return next((name for name in (AUC, BALANCED) if name in row["figures"]), None)


def guessing(row: Row) -> float:
    """Return what guessing has in `measure`. A row without a number of classes has two."""
    return 1 / max(int(row.get("classes") or 2), 2)


# --- one model -----------------------------------------------------------------------------------


def verdict(row: Row) -> str:
    """Return a few plain sentences about the model."""
    if row.get("kind") in ("regression", "count"):
        return " ".join(_of_numbers(row))
    if (name := measure(row)) is None:
        return ""
    if (figure := clear_figure(row, name)) is None:
        return (
            f"The noise hides how good the model is: its {NAMES[name]} is too noisy. Evaluate with "
            "a larger epsilon, or on more held-out records."
        )
    low, _ = interval(name, figure)
    chance = guessing(row)
    better = "significantly" if low > chance else "not significantly"
    words = (
        f"The model is {better} better than guessing: {NAMES[name]} {short(row, name)}, where "
        f"guessing has {chance:.3g}."
    )
    return " ".join([words, *_of_a_hundred(row), *_beside_the_larger_class(row), *_calibrated(row)])


def _of_numbers(row: Row) -> list[str]:
    """Return sentences about the errors of numbers or counts."""
    words = []
    for name, what in ((EXPLAINED, "variance"), (DEVIANCE, "deviance")):
        if figure := clear_figure(row, name):
            low, high = interval(name, figure)
            words.append(
                f"The model explains {figure['value']:.0%} of the {what} ({low:.0%} to "
                f"{high:.0%}); always predicting the mean explains 0%."
            )
        elif name in row["figures"]:
            words.append(
                f"The noise hides how much of the {what} the model explains. Evaluate with a "
                "larger epsilon, or on more held-out records."
            )
    if figure := clear_figure(row, "absolute error"):
        low, high = interval("absolute error", figure)
        words.append(
            f"On average a prediction is off by {figure['value']:.3g} ({low:.3g} to {high:.3g})."
        )
    return words


def _of_a_hundred(row: Row) -> list[str]:
    """Return sentences that count records: what happens to 100 of them."""
    if row.get("kind") in ("multiclass", "ordinal"):
        if not (accuracy := clear_figure(row, ACCURACY)):
            return []
        return [f"Of 100 records it predicts the class of {counted(ACCURACY, accuracy)} correctly."]
    if row.get("kind") == "survival":
        return [f"The figures are about {row['outcome']}."] if row.get("outcome") else []
    if "threshold" not in row:
        return []
    words = []
    outcome = row.get("outcome") or "the second class"
    if prevalence := clear_figure(row, PREVALENCE):
        words.append(f"Of 100 records, {outcome} for {counted(PREVALENCE, prevalence)}.")
    words += at_threshold(row["threshold"], row["figures"])
    return words


def at_threshold(threshold: float, figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a sentence about what follows from a threshold on the risk."""
    row = {"figures": figures}
    parts = []
    if flagged := clear_figure(row, FLAGGED):
        parts.append(f"{counted(FLAGGED, flagged)} of 100 records are flagged")
    if found := clear_figure(row, SENSITIVITY):
        parts.append(f"{counted(SENSITIVITY, found)} of 100 with the outcome are found")
    if true := clear_figure(row, PPV):
        parts.append(f"{counted(PPV, true)} of 100 flagged records have the outcome")
    if not parts:
        return []
    return [f"At a risk of {threshold:.3g} or more: {'; '.join(parts)}."]


def counted(name: str, figure: Mapping[str, Any]) -> str:
    """Return a share as a number of 100, with its interval."""
    low, high = interval(name, figure)
    return f"{100 * figure['value']:.0f} ({100 * low:.0f} to {100 * high:.0f})"


def _beside_the_larger_class(row: Row) -> list[str]:
    """Return a sentence if the accuracy is not significantly above the larger class's share."""
    accuracy = clear_figure(row, ACCURACY)
    larger = clear_figure(row, LARGER)
    if not accuracy or not larger or interval(ACCURACY, accuracy)[0] > interval(LARGER, larger)[1]:
        return []
    return [
        f"Its accuracy of {accuracy['value']:.1%} is not significantly above the share of the "
        f"larger class, {larger['value']:.1%}."
    ]


def _calibrated(row: Row) -> list[str]:
    """Return sentences about the calibration, as far as the noise allows."""
    words = []
    if error := clear_figure(row, IN_THE_LARGE):
        low, high = interval(IN_THE_LARGE, error)
        amount = (
            f"by {100 * abs(error['value']):.1f} points ({100 * min(abs(low), abs(high)):.1f} to "
            f"{100 * max(abs(low), abs(high)):.1f})"
        )
        if low > 0:
            words.append(f"On average its risks are too high {amount}.")
        elif high < 0:
            words.append(f"On average its risks are too low {amount}.")
        else:
            words.append("Its risks show no detectable average error.")
    if slope := clear_figure(row, SLOPE):
        low, high = interval(SLOPE, slope)
        how = f"calibration slope {short(row, SLOPE)}, where 1 is right."
        if high < 1:
            words.append(f"They are too extreme: {how}")
        elif low > 1:
            words.append(f"They are too cautious: {how}")
    return words


# --- groups of records ---------------------------------------------------------------------------


def by_group(groups: Row) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the columns and rows of a table with one line for each group.

    A line has the group's records and accuracy, and the accuracy of all other groups together.
    """
    return ("group", "records (± noise)", "accuracy (interval)", "all others (interval)"), [
        (
            row["name"],
            f"{max(row['records'], 0):.0f} ± {row['records_noise']:.2g}",
            short(row, ACCURACY),
            short(row["rest"], ACCURACY),
        )
        for row in groups["rows"]
    ]


def noisy(rows: Sequence[Row]) -> bool:
    """Return whether a figure of the rows, or of a group's rest, is too noisy."""
    return any(
        figure.get("too_noisy")
        for row in rows
        for part in (row, row.get("rest", row))
        for figure in part["figures"].values()
    )


def differences(groups: Row) -> str:
    """Return one or two plain sentences on groups for which the model is clearly worse.

    A group is compared with all others together. If no difference is found, the sentence does not
    claim that there is none.

    Clearly worse means that the two 95 per cent intervals do not overlap. With more than two groups
    there are as many comparisons. The intervals are then wider, so that all of them hold together
    with 95 per cent (Bonferroni).
    """
    rows = groups["rows"]
    by = groups["by"]
    worse = []
    # of two groups, each is the other's rest, so there is one comparison
    comparisons = 1
    if len(rows) > 2:
        comparisons = len(rows)
    wider = NormalDist().inv_cdf(1 - 0.025 / comparisons) / Z
    clear = [
        (row, group, rest)
        for row in rows
        if (group := clear_figure(row, ACCURACY)) and (rest := clear_figure(row["rest"], ACCURACY))
    ]
    for row, group, rest in clear:
        above = interval(ACCURACY, group)[1] - group["value"]
        below = rest["value"] - interval(ACCURACY, rest)[0]
        if group["value"] + wider * above < rest["value"] - wider * below:
            worse.append(
                f"{row['name']}, {short(row, ACCURACY)} against "
                f"{short(row['rest'], ACCURACY)} for all others"
            )
    if not clear:
        return (
            f"The noise hides all differences by {by}. Evaluate with a larger epsilon, or on more "
            "held-out records."
        )
    hidden = ""
    if len(clear) < len(rows):
        hidden = f" The noise hides {len(rows) - len(clear)} of {len(rows)} groups."
    if not worse:
        return f"No difference by {by} is visible at this price, but there may be one.{hidden}"
    return (
        f"The model is clearly less accurate where {by} is "
        f"{'; and where it is '.join(worse)}.{hidden}"
    )


# --- several models ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Standing:
    """One model among several.

    `place` counts the models that are clearly better. `tied` are those with overlapping intervals.
    """

    name: str
    row: Row
    place: int
    tied: tuple[str, ...]


def ranking(rows: Mapping[str, Row]) -> tuple[list[Standing], str]:
    """Return the models from the best to the worst, and the reason in plain words.

    If they cannot be compared, return no models, and why not.
    """
    names = {measure(row) for row in rows.values()}
    if len(names) != 1 or (name := names.pop()) is None:
        return (
            [],
            "They are not ranked: they were not judged by the same figure.",
        )
    if hidden := [run for run, row in rows.items() if clear_figure(row, name) is None]:
        return (
            [],
            f"They are not ranked: the noise hides the {NAMES[name]} of {_listed(hidden)}.",
        )
    order = sorted(rows, key=lambda run: -rows[run]["figures"][name]["value"])
    standings = []
    for run in order:
        better = [other for other in order if _clearly_better(rows[other], rows[run], name)]
        worse = [other for other in order if _clearly_better(rows[run], rows[other], name)]
        tied = tuple(
            other for other in order if other != run and other not in better and other not in worse
        )
        standings.append(Standing(run, rows[run], 1 + len(better), tied))
    return standings, " ".join(
        [f"Ranked by {NAMES[name]}: {MEANING[name]}. {NOT_ERROR}", *_why(standings, name)]
    )


def _clearly_better(one: Row, other: Row, name: str) -> bool:
    """Return whether the interval of the first model is above that of the second.

    The AUC of a model that gives nearly equal risks has a wide interval, because its records share
    one bin. The balanced accuracy then decides.
    """
    for figure in (name, BALANCED):
        first = clear_figure(one, figure)
        second = clear_figure(other, figure)
        if first and second and interval(figure, first)[0] > interval(figure, second)[1]:
            return True
    return False


def _why(standings: Sequence[Standing], name: str) -> list[str]:
    """Return sentences on ties of the first model, and on models with a smaller error."""
    words = []
    first = standings[0]
    if first.tied:
        words.append(
            f"{first.name} is not clearly better than {_listed(first.tied)}: their 95 % intervals "
            "overlap."
        )
    error = {s.name: 1 - a["value"] for s in standings if (a := clear_figure(s.row, ACCURACY))}
    for other in standings[1:]:
        if other.name in first.tied or error.get(other.name, 1.0) >= error.get(first.name, 0.0):
            continue
        figure = other.row["figures"][name]
        sentence = (
            f"{other.name} has the smaller error ({error[other.name]:.1%} against "
            f"{error[first.name]:.1%}), but its {NAMES[name]} is "
            f"{figure['value']:.2f} against {first.row['figures'][name]['value']:.2f}"
        )
        if interval(name, figure)[0] <= guessing(other.row):
            sentence += ", no better than guessing"
        words.append(f"{sentence}.")
    return words


def _listed(names: Sequence[str]) -> str:
    """Return names as a list in a sentence."""
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} and {names[-1]}"
