"""Write docs/verdict-tables.md: every table of the verdict, from the trials in verdict.csv."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from research.verdict_plan import CONDITIONS
from research.verdict_read import TITLES, Gap, Trials, average, count, gaps
from silodp.core.figures import rounded_up
from silodp.host import atomic

OUTPUTS = {
    "primary": ("last", "random", "least"),
    "text": ("last", "random", "least"),
    "file": ("last", "random", "least"),
}
"""Conditions that score more than the last iterate."""
WITHOUT_NOISE = ("open", "wide")
AGAINST_LOCAL = ("primary", "text", "adam")
CLAIMS = (0.75, 3.0, 18.0)
SPENDING_ARMS = {
    ("text", "mb-sgd"): "MB-SGD",
    ("text", "spider-q2"): "SPIDER, phase 2",
    ("text", "alternate"): "SPIDER's alternate form",
    ("text", "local-sgd"): "Local SGD",
    ("file", "spider-q1"): "SPIDER, phase 1",
    ("file", "spider-q2"): "SPIDER, phase 2",
}
SPENDING_FIGURES = ("wbcd", "mnist-M25-R50", "cifar10-R50", "cifar10-R100")
"""Figures whose spending is shown. The other MNIST figures spend nearly the same."""

INTRODUCTION = """\
# The verdict's tables

`python -m research gallery` writes this page from [verdict.csv](figures/verdict.csv).
[The verdict](verdict.md) has the answer, and [the details](verdict-details.md) have the protocol.

- A **setting** is one figure of the paper at one epsilon.
- A negative percentage means that SPIDER's test error is lower. Below 0.01 % counts as the same.
- **Significantly** is at 95 % after Holm's correction. CIFAR-10 is not tested.
- **Without phase 1** leaves out the phase in which SPIDER is MB-SGD.
- **Pick** is the arm of SPIDER with the least training loss: a phase, or alt. (alternate form)."""


def write_verdict_tables(docs: Path, trials: Trials) -> Path:
    """Write `docs`/verdict-tables.md and return its path."""
    parts = [
        INTRODUCTION,
        "## SPIDER against MB-SGD",
        "Each condition changes one thing of the primary comparison. The last column has the\n"
        "primary comparison on the row's own settings: SPIDER, then SPIDER without phase 1.\n"
        "Compare a row with that column, not with the first row.",
        _by_condition(trials, "mb-sgd", [c for c in CONDITIONS if c != "adam"]),
        "The primary comparison by figure, with the picks in order of epsilon:",
        _by_figure(trials, "mb-sgd"),
        "SPIDER against MB-SGD, then without phase 1, with the number of settings in brackets:",
        _by_data_set(trials),
        "## SPIDER against Local SGD",
        _by_condition(trials, "local-sgd", AGAINST_LOCAL),
        _by_figure(trials, "local-sgd"),
        "## Test error by figure and epsilon",
        "Test error in per cent in the primary comparison:",
        _errors(trials),
        "## Means on MNIST",
        "Test error in per cent, averaged over the seven epsilons:",
        _mnist_means(trials),
        "## Without noise",
        "Test error in per cent at the grid point with the least training loss. On CIFAR-10 step\n"
        "and clip are picked on one split of five. The alternate form takes two steps a round:\n"
        "compare it with MB-SGD at twice R.",
        _without_noise(trials),
        "## What the constants spend",
        "The epsilon that a run spends, for a record of the silo that spends most, at delta 1/n².\n"
        "The accounting is by privacy-loss distributions, with each record drawn by a coin.",
        _spending(trials),
    ]
    path = docs / "verdict-tables.md"
    atomic.write(path, "\n\n".join(parts) + "\n", mode=0o644, durable=False)
    return path


def signed(found: Sequence[Gap]) -> str:
    """Return the average difference in per cent, below 0 where the first has less error."""
    return f"{0 - average(found):+.1f} %"


def _table(titles: Sequence[str], rules: str, rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table. `rules` has one letter a column: l for left, r for right."""
    rule = ["---:" if letter == "r" else "---" for letter in rules]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [titles, rule, *rows])


def _compared(
    trials: Trials,
    other: str,
    figures: Iterable[str],
    condition: str = "primary",
    output: str = "last",
) -> tuple[list[Gap], list[Gap]]:
    """Return the gaps of SPIDER and of SPIDER without phase 1."""
    figures = list(figures)
    return (
        gaps(trials, "spider", other, figures, condition, output),
        gaps(trials, "reduced", other, figures, condition, output),
    )


def _cells(found: Sequence[Gap], reduced: Sequence[Gap]) -> list[str]:
    numbers = count(found)
    significant = f"{numbers['surely better']} / {numbers['surely worse']}"
    if not any(gap.tested for gap in found):
        significant = "not tested"
    signs = f"{numbers['better']} / {numbers['same']} / {numbers['worse']}"
    return [str(len(found)), signed(found), signs, significant, signed(reduced)]


def _matching(primary: Sequence[Gap], found: Sequence[Gap]) -> list[Gap]:
    settings = {(gap.figure, gap.epsilon) for gap in found}
    return [gap for gap in primary if (gap.figure, gap.epsilon) in settings]


def _named(condition: str) -> str:
    if condition == "primary":
        return "primary comparison"
    return CONDITIONS[condition].said


def _by_condition(trials: Trials, other: str, conditions: Iterable[str]) -> str:
    against = {"mb-sgd": "MB-SGD", "local-sgd": "Local SGD"}[other]
    titles = [
        "condition",
        "output",
        "settings",
        f"SPIDER against {against}",
        "lower / same / higher",
        "significantly lower / higher",
        "without phase 1",
        "primary comparison, same settings",
    ]
    rows = []
    for condition in conditions:
        if condition in WITHOUT_NOISE:
            continue
        name = _named(condition)
        for output in OUTPUTS.get(condition, ("last",)):
            found, reduced = _compared(trials, other, trials.figures, condition, output)
            if not found:
                continue
            beside = ""
            if condition != "primary":
                primary = _compared(trials, other, trials.figures, "primary", output)
                mine = [signed(_matching(every, found)) for every in primary]
                beside = " / ".join(mine)
            rows.append([name, output, *_cells(found, reduced), beside])
            name = ""
    return _table(titles, "llrrrrrr", rows)


def _by_figure(trials: Trials, other: str) -> str:
    against = {"mb-sgd": "MB-SGD", "local-sgd": "Local SGD"}[other]
    titles = [
        "figure",
        "settings",
        f"SPIDER against {against}",
        "lower / same / higher",
        "significantly lower / higher",
        "without phase 1",
        "SPIDER's picks",
    ]
    rows = []
    for figure, title in TITLES.items():
        found, reduced = _compared(trials, other, [figure])
        if found:
            picks = ", ".join(_pick(gap.first.arm) for gap in found)
            rows.append([title, *_cells(found, reduced), picks])
    return _table(titles, "lrrrrrl", rows)


def _pick(arm: str) -> str:
    """Return how an arm of SPIDER is shown: its phase, or alt. for the alternate form."""
    names = {"mb-sgd": "1", "alternate": "alt."}
    return names.get(arm, arm.rpartition("q")[2])


def _by_data_set(trials: Trials) -> str:
    columns = {
        "breast cancer and MNIST": [f for f in TITLES if not f.startswith("cifar10")],
        "CIFAR-10, R = 50": ["cifar10-R50"],
        "CIFAR-10, R = 100": ["cifar10-R100"],
    }
    rows = []
    for condition in CONDITIONS:
        if condition in (*WITHOUT_NOISE, "adam"):
            continue
        cells = []
        for figures in columns.values():
            found, reduced = _compared(trials, "mb-sgd", figures, condition)
            text = f"{signed(found)} / {signed(reduced)} ({len(found)})" if found else ""
            cells.append(text)
        if any(cells):
            rows.append([_named(condition), *cells])
    return _table(["condition", *columns], "lrrr", rows)


def _errors(trials: Trials) -> str:
    titles = [
        "figure",
        "epsilon",
        "MB-SGD",
        "SPIDER (pick)",
        "SPIDER without phase 1",
        "p of *without phase 1* against MB-SGD, after Holm",
        "Local SGD",
    ]
    alike, without = _compared(trials, "mb-sgd", trials.figures)
    rows = []
    for gap, reduced in zip(alike, without, strict=True):
        local = trials.curve("local-sgd", gap.figure, "primary", gap.epsilon)
        rows.append(
            [
                TITLES[gap.figure],
                f"{gap.epsilon:g}",
                f"{100 * gap.second.error:.1f}",
                f"{100 * gap.first.error:.1f} ({_pick(gap.first.arm)})",
                f"{100 * reduced.first.error:.1f}",
                f"{reduced.adjusted:.2g}" if reduced.tested else "not tested",
                f"{100 * local.error:.1f}" if local else "",
            ]
        )
    return _table(titles, "lrrrrrr", rows)


def _mnist_means(trials: Trials) -> str:
    titles = [
        "MNIST",
        "MB-SGD, which SPIDER picks",
        "SPIDER without phase 1",
        "against MB-SGD",
        "Local SGD",
    ]
    rows = []
    for figure, title in TITLES.items():
        if not figure.startswith("mnist"):
            continue
        _, reduced = _compared(trials, "mb-sgd", [figure])
        local, _ = _compared(trials, "local-sgd", [figure])
        means = [
            statistics.mean(100 * curve.error for curve in curves)
            for curves in (
                [gap.second for gap in reduced],
                [gap.first for gap in reduced],
                [gap.second for gap in local],
            )
        ]
        rows.append(
            [
                title.removeprefix("MNIST, "),
                f"{means[0]:.2f}",
                f"{means[1]:.2f}",
                signed(reduced),
                f"{means[2]:.2f}",
            ]
        )
    return _table(titles, "lrrrr", rows)


def _without_noise(trials: Trials) -> str:
    titles = [
        "without noise",
        "the appendix's grid: MB-SGD",
        "SPIDER, phases 2 and 3",
        "alternate form",
        "larger steps, full batches: MB-SGD",
        "alternate form",
    ]
    wanted = [
        ("mb-sgd", "open"),
        ("phases", "open"),
        ("alternate", "open"),
        ("mb-sgd", "wide"),
        ("alternate", "wide"),
    ]
    rows = []
    for figure, title in TITLES.items():
        cells = [title]
        for method, condition in wanted:
            (epsilon,) = trials.epsilons(figure, condition)
            curve = trials.curve(method, figure, condition, epsilon)
            cells.append(f"{100 * curve.error:.1f}" if curve else "")
        rows.append(cells)
    return _table(titles, "lrrrrr", rows)


def _spending(trials: Trials) -> str:
    titles = ["figure", "constants", "method", *(f"claims {claim:g}" for claim in CLAIMS)]
    rows = []
    for figure in SPENDING_FIGURES:
        for (condition, arm), name in SPENDING_ARMS.items():
            found = [trials.rows.get((figure, condition, arm, e, "last")) for e in CLAIMS]
            spent = [row["spent"] for row in found if row]
            if len(spent) == len(CLAIMS):
                rows.append([TITLES[figure], condition, name, *map(_epsilon, spent)])
    return _table(titles, "lllrrr", rows)


def _epsilon(spent: float) -> str:
    """Return an epsilon rounded up, with two decimals, or none from 100 on."""
    if spent >= 100:
        return f"{math.ceil(spent):,}"
    return rounded_up(spent, 2, "f")
