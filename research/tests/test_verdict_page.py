"""The numbers of docs/verdict.md and verdict-tables.md are those of docs/figures/verdict.csv."""

from pathlib import Path

from research.verdict import read_trials
from research.verdict_plan import CONDITIONS
from research.verdict_read import TITLES, Trials, average, count, gaps

DOCS = Path(__file__).parents[2] / "docs"
OUTPUTS = {"primary", "text", "file"}
"""Conditions whose table has all three outputs."""


def signed(found):
    return f"{0 - average(found):+.1f} %"


def row(found, without):
    """The cells of a table's row: settings, average, signs, significant ones, without phase 1."""
    n = count(found)
    significant = f"{n['surely better']} / {n['surely worse']}"
    if not any(gap.tested for gap in found):
        significant = "not tested"
    signs = f"{n['better']} / {n['same']} / {n['worse']}"
    return f"| {len(found)} | {signed(found)} | {signs} | {significant} | {signed(without)} |"


def pick(arm):
    return {"mb-sgd": "1", "alternate": "alt."}.get(arm, arm.rpartition("q")[2])


def test_the_numbers_of_the_verdict_page_are_those_of_its_trials():
    answer = " ".join((DOCS / "verdict.md").read_text().split("![")[0].split())
    page = (DOCS / "verdict.md").read_text() + (DOCS / "verdict-tables.md").read_text()
    trials = Trials(read_trials(DOCS / "figures/verdict.csv"))

    def compared(other, figures=trials.figures, condition="primary", output="last"):
        return [
            gaps(trials, first, other, figures, condition, output)
            for first in ("spider", "reduced")
        ]

    alike, without = compared("mb-sgd")
    local, without_local = compared("local-sgd")
    n = count(alike)
    assert f"test error is {average(alike):.1f} % lower on average over {len(alike)} settings" in (
        answer
    )
    assert (
        f"lower in {n['better']} settings, the same in {n['same']} and higher in {n['worse']}"
        in answer
    )
    assert {gap.figure for gap in alike if gap.better} == {"cifar10-R50"}
    assert f"{average(local):.1f} % lower than Local SGD's over {len(local)} settings" in answer
    assert {gap.first.arm for gap in local} == {"mb-sgd"}
    assert f"(the primary comparison) | {signed(alike)} | {signed(local)} |" in page
    assert f"without phase 1 | {signed(without)} | {signed(without_local)} |" in page
    for other in ("mb-sgd", "local-sgd"):
        for condition in CONDITIONS:
            for output in ("last", "random", "least") if condition in OUTPUTS else ("last",):
                found, reduced = compared(other, condition=condition, output=output)
                wanted = condition not in ("open", "wide") and (
                    other == "mb-sgd" or condition in ("primary", "text", "adam")
                )
                if found and wanted and not (condition == "adam" and other == "mb-sgd"):
                    assert f"| {output} {row(found, reduced)}" in page
        for figure, title in TITLES.items():
            found, reduced = compared(other, [figure])
            if found:
                picks = ", ".join(pick(gap.first.arm) for gap in found)
                assert f"| {title} {row(found, reduced)} {picks} |" in page
    for gap, other in zip(alike, without, strict=True):
        errors = f"{100 * gap.second.error:.1f} | {100 * gap.first.error:.1f}"
        reduced = f"({pick(gap.first.arm)}) | {100 * other.first.error:.1f}"
        assert f"| {TITLES[gap.figure]} | {gap.epsilon:g} | {errors} {reduced} |" in page
