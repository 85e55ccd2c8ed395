"""docs/verdict.md from verdict.csv: every sentence that compares is computed from the trials."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from research.figures import draw_panels
from research.verdict import read_trials
from research.verdict_plan import CONDITIONS, FIGURES, LEFT_OUT, arms
from research.verdict_read import ROUNDED, Gap, Trials, average, count, gaps
from research.verdict_says import (
    ENDED,
    NAMES,
    TITLES,
    answered,
    apart,
    bought,
    causes,
    percent,
    regimes,
    short,
    signed,
    spending,
    without_noise,
)
from research.verdict_words import OBJECTIONS, PROTOCOL, WHY
from silodp.core.privacy.accounting import rounded_up
from silodp.host import atomic

UNTESTED = "which is not called sure: step and clip were picked on one of its five splits"


def write_verdict(docs: Path, tables: Path) -> Path | None:
    """verdict.md from the table verdict.csv; None without one."""
    path = tables / "verdict.csv"
    if not path.exists():
        return None
    trials = Trials(read_trials(path))
    draw_panels(
        {TITLES[f]: _lines(trials, f) for f in trials.figures if trials.epsilons(f, "primary")},
        tables / "verdict",
    )
    atomic.write(docs / "verdict.md", page(trials), mode=0o644, durable=False)
    return docs / "verdict.md"


def _lines(trials: Trials, figure: str) -> dict[str, list[tuple[float, float]]]:
    """The primary comparison's curves by name, as points of epsilon and test error."""
    found = {}
    for method, label in (
        ("mb-sgd", "MB-SGD = SPIDER, phase 1"),
        ("phases", "SPIDER, phase > 1"),
        ("alternate", "alternate form"),
        ("local-sgd", "Local SGD"),
    ):
        curves = [
            (e, trials.curve(method, figure, "primary", e))
            for e in trials.epsilons(figure, "primary")
        ]
        found[label] = [(e, c.error) for e, c in curves if c]
    return found


def page(trials: Trials) -> str:
    return "\n".join(
        [
            "# A verdict on the paper's experiments\n",
            short(trials),
            PROTOCOL,
            (
                "![Test error against epsilon under the authors' protocol with sound noise, a "
                "panel for each figure](figures/verdict.png)\n"
            ),
            "## SPIDER against MB-SGD\n",
            *_against(trials, "mb-sgd"),
            (
                "The conditions by data, where signs differ: SPIDER against MB-SGD, then "
                "without phase 1, and in brackets the cells.\n"
            ),
            apart(trials),
            "## SPIDER against Local SGD\n",
            *_against(trials, "local-sgd"),
            "## What the constants spend\n",
            *_spends(trials),
            "## High privacy, M and R\n",
            *_regimes(trials),
            *_open(trials),
            WHY.format(spending=spending(trials)) + causes(trials),
            bought(trials),
            OBJECTIONS.format(**answered(trials)),
            "## What was not run\n",
            *(f"- {said}" for said in [*LEFT_OUT, *missing(trials)]),
            "",
        ]
    )


def line_of(trials: Trials, figure: str) -> list[str]:
    """Of one figure: a line and a small table, or that the primary comparison was not run."""
    found, real, local = (
        gaps(trials, first, other, [figure], "primary")
        for first, other in (("spider", "mb-sgd"), ("reduced", "mb-sgd"), ("spider", "local-sgd"))
    )
    if not found:
        return (
            [
                (
                    f"**Under the authors' protocol this figure is missing**: {ENDED} "
                    "([verdict](verdict.md)).\n"
                )
            ]
            if trials.figures
            else []
        )
    n = count(real)
    sure = (
        f"surely lower at {n['surely better']} and surely higher at {n['surely worse']} of "
        f"{len(real)} epsilons"
    )
    words = (
        "**Verdict under the authors' protocol with sound noise**: SPIDER's test error is "
        f"{percent(average(found))} MB-SGD's"
        f"{f' and {percent(average(local))} Local SGD’s' if local else ''}; without phase "
        f"1, which is MB-SGD, it is {percent(average(real))} MB-SGD's, "
        f"{sure if real[0].tested else UNTESTED} ([all of it](verdict.md)).\n"
    )
    lines = [
        (
            "| epsilon | MB-SGD | SPIDER (phase) | without phase 1 | p of *without phase 1* "
            "against MB-SGD, after Holm | Local SGD |"
        ),
        "|---:|---:|---:|---:|---:|---:|",
    ]
    beside = {g.epsilon: g.second.error for g in local}
    for g, r in zip(found, real, strict=True):
        other = f"{100 * beside[g.epsilon]:.1f}" if g.epsilon in beside else ""
        lines.append(
            f"| {g.epsilon:g} | {100 * g.second.error:.1f} | {100 * g.first.error:.1f} "
            f"({_arm(g.first.arm)}) | {100 * r.first.error:.1f} | "
            f"{f'{r.adjusted:.2g}' if r.tested else 'not tested'} | {other} |"
        )
    return [words, "\n".join(lines) + "\n"]


def _against(trials: Trials, other: str) -> list[str]:
    """One table of all conditions, one of the primary comparison by figure."""
    lines = [
        (
            "| from the primary comparison, changed | output | cells | SPIDER against "
            f"{NAMES[other]} | lower / same / higher | surely lower / higher | without phase 1 "
            "| nothing changed, on the same cells |"
        ),
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, condition in CONDITIONS.items():
        for output in (
            ("last", "random", "least") if name in ("primary", "text", "file") else ("last",)
        ):
            if name in ("open", "wide") or (name == "adam" and other != "local-sgd"):
                continue
            found = gaps(trials, "spider", other, trials.figures, name, output)
            real = gaps(trials, "reduced", other, trials.figures, name, output)
            if found and not (other == "local-sgd" and name not in ("primary", "text", "adam")):
                where = sorted({g.figure for g in found})
                alone = f" ({TITLES[where[0]]}, alone)" if len(where) == 1 else ""
                base = [
                    [
                        g
                        for g in gaps(trials, m, other, where, "primary", output)
                        if g.epsilon in {h.epsilon for h in found}
                    ]
                    for m in ("spider", "reduced")
                ]
                same = "" if name == "primary" else f"{signed(base[0])} / {signed(base[1])}"
                lines.append(
                    f"| {f'{condition.said}{alone}' if output == 'last' else ''} | "
                    f"{output} | {_row(found, real)} | {same} |"
                )
    by_figure = [
        (
            f"| figure | cells | SPIDER against {NAMES[other]} | lower / same / higher | "
            "surely lower / higher | without phase 1 | SPIDER's picks |"
        ),
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for figure in trials.figures:
        found, real = (
            gaps(trials, first, other, [figure], "primary") for first in ("spider", "reduced")
        )
        if found:
            picks = ", ".join(_arm(g.first.arm) for g in found)
            by_figure.append(f"| {TITLES[figure]} | {_row(found, real)} | {picks} |")
    return [
        "\n".join(lines) + "\n",
        (
            "The last column has the primary comparison, all of SPIDER and without phase 1, on "
            "the row's own cells: rows have different cells, and are to be compared with that, "
            "not with the first row. "
            f"A difference of less than {ROUNDED} % is none.\n"
        ),
        "The primary comparison by figure; picks are by epsilon, the least first.\n",
        "\n".join(by_figure) + "\n",
    ]


def _row(found: Sequence[Gap], real: Sequence[Gap]) -> str:
    n = count(found)
    without = f"{-average(real):+.1f} %" if real else ""
    sure = (
        f"{n['surely better']} / {n['surely worse']}"
        if any(g.tested for g in found)
        else "not tested"
    )
    return (
        f"{len(found)} | {-average(found):+.1f} % | {n['better']} / {n['same']} / {n['worse']} "
        f"| {sure} | {without}"
    )


def _arm(name: str) -> str:
    return {"mb-sgd": "1", "alternate": "alt."}.get(name, name.rpartition("q")[2])


def _spends(trials: Trials) -> list[str]:
    """The epsilon that constants really spend, by exact accounting of the Poisson batches that
    stand for theirs.
    """
    figures = [
        f for f in ("wbcd", "mnist-M25-R50", "cifar10-R50", "cifar10-R100") if f in trials.figures
    ]
    lines = [
        "| figure | constants | method | "
        + " | ".join(f"claims {e:g}" for e in (0.75, 3.0, 18.0))
        + " |",
        "|---|---|---|---:|---:|---:|",
    ]
    for figure in figures:
        for condition, kinds in (
            ("text", ("mb-sgd", "spider-q2", "alternate", "local-sgd")),
            ("file", ("spider-q1", "spider-q2")),
        ):
            for arm in kinds:
                rows = [
                    trials.rows.get((figure, condition, arm, e, "last")) for e in (0.75, 3.0, 18.0)
                ]
                if all(rows):
                    cells = " | ".join(
                        rounded_up(r["spent"], 2, "f")
                        if r["spent"] < 100
                        else f"{math.ceil(r['spent']):,}"
                        for r in rows
                        if r
                    )
                    named = {"spider-q1": "SPIDER, phase 1", "spider-q2": "SPIDER, phase 2"}.get(
                        arm
                    ) or NAMES[arm]
                    lines.append(f"| {TITLES[figure]} | {condition} | {named} | {cells} |")
    return [
        (
            "Every release of a run together, for a record of whichever silo spends most, "
            "delta = 1/n², by privacy-loss distributions, if records are drawn by "
            "coins. With sound noise every method spends its claim.\n"
        ),
        "\n".join(lines) + "\n",
    ]


def _regimes(trials: Trials) -> list[str]:
    """By epsilon, and MNIST by M and R."""
    lines = [
        (
            "| MNIST | MB-SGD, which SPIDER picks | SPIDER without phase 1 | against MB-SGD | "
            "Local SGD |"
        ),
        "|---|---:|---:|---:|---:|",
    ]
    for figure in [f for f in trials.figures if f.startswith("mnist")]:
        cells = []
        for method in ("mb-sgd", "reduced", "local-sgd"):
            curves = [
                trials.curve(method, figure, "primary", e)
                for e in trials.epsilons(figure, "primary")
            ]
            cells.append(
                f"{100 * sum(c.error for c in curves if c) / len(curves):.2f}"
                if all(curves) and curves
                else ""
            )
        found = gaps(trials, "reduced", "mb-sgd", [figure], "primary")
        if found:
            lines.append(
                f"| {TITLES[figure].removeprefix('MNIST, ')} | {cells[0]} | {cells[1]} | "
                f"{-average(found):+.1f} % | {cells[2]} |"
            )
    table = (
        ["Test error in per cent, averaged over the seven epsilons:\n", "\n".join(lines) + "\n"]
        if len(lines) > 2
        else []
    )
    return [regimes(trials) + "\n", *table, *_growth(trials)]


def _growth(trials: Trials) -> list[str]:
    """What more silos a round, and more rounds, change in each method's mean error."""
    known = {m: _levels(trials, m) for m in ("mb-sgd", "reduced", "local-sgd")}
    said = []
    for words, pairs in (
        (
            "25 silos a round instead of 12",
            (("mnist-M12-R25", "mnist-M25-R25"), ("mnist-M12-R50", "mnist-M25-R50")),
        ),
        (
            "50 rounds instead of 25",
            (("mnist-M12-R25", "mnist-M12-R50"), ("mnist-M25-R25", "mnist-M25-R50")),
        ),
    ):
        parts = []
        for method, level in known.items():
            changes = [
                f"{100 * (level[b] / level[a] - 1):+.1f} %"
                for a, b in pairs
                if a in level and b in level
            ]
            if changes:
                parts.append(f"that of {NAMES[method]} by {' and '.join(changes)}")
        if parts:
            said.append(
                f"{words} change the mean error: {', '.join(parts)} "
                f"({' and '.join(_where(a, b) for a, b in pairs)})."
            )
    return [" ".join(f"{w[0].upper()}{w[1:]}" for w in said) + "\n"] if said else []


def _where(a: str, b: str) -> str:
    same = [part for part in a.split("-")[1:] if part in b.split("-")]
    return f"{same[0][0]} = {same[0][1:]}"


def _levels(trials: Trials, method: str) -> dict[str, float]:
    found = {}
    for figure in [f for f in trials.figures if f.startswith("mnist")]:
        curves = [
            trials.curve(method, figure, "primary", e) for e in trials.epsilons(figure, "primary")
        ]
        if curves and all(curves):
            found[figure] = sum(c.error for c in curves if c) / len(curves)
    return found


def _open(trials: Trials) -> list[str]:
    """Without noise."""
    lines = [
        (
            "| without noise | the appendix's grid: MB-SGD | SPIDER, phases 2 and 3 | "
            "alternate form | larger steps, full batches: MB-SGD | alternate form |"
        ),
        "|---|---:|---:|---:|---:|---:|",
    ]
    for figure in trials.figures:
        cells = []
        for condition, method in (
            ("open", "mb-sgd"),
            ("open", "phases"),
            ("open", "alternate"),
            ("wide", "mb-sgd"),
            ("wide", "alternate"),
        ):
            found = trials.curve(method, figure, condition, math.inf)
            cells.append(f"{100 * found.error:.1f}" if found else "")
        if any(cells):
            lines.append(f"| {TITLES[figure]} | {' | '.join(cells)} |")
    return (
        [
            "## Without noise\n",
            (
                "Test error in per cent of the setting with the least training loss; chance is "
                "not removed, and on CIFAR-10 step and clip are of one split of five.\n"
            ),
            "\n".join(lines) + "\n",
            without_noise(trials),
        ]
        if len(lines) > 2
        else []
    )


def missing(trials: Trials) -> list[str]:
    """What the plan has and the table has not, conditions that lack the same together."""
    lacking: dict[str, list[str]] = {}
    for name, condition in CONDITIONS.items():
        left = []
        for figure, one in FIGURES.items():
            planned = [arm.name for arm in arms(one, condition)]
            without = [arm for arm in planned if arm not in trials.arms(figure, name)]
            if without:
                left.append(
                    TITLES[figure]
                    if without == planned
                    else f"{TITLES[figure]} ({', '.join(without)})"
                )
        if left:
            lacking.setdefault("; ".join(left), []).append(name)
    return [
        f"In the plan and not run, since the time on a GPU ended ({', '.join(names)}): {left}."
        for left, names in lacking.items()
    ]
