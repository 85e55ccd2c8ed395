"""What silos have answered to `silodp stats`: each question with its noise, price and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from silodp.core.figures import rounded_up, shown
from silodp.core.privacy.accounting import added
from silodp.pages import ratios, survival, synthetic, table1
from silodp.pages.markup import Markup, folded, section, table, tag
from silodp.pages.paid import price

NAMES = {
    "profile": "Profile of the columns",
    "table1": "Table 1",
    "quantiles": "Quantiles",
    "survival": "Survival curve",
    "estimate": "Regression",
    "logrank": "Log-rank test",
    "synthesise": "Synthetic table",
}
"""The title of each command's answer."""


def spent(lines: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, float, float]]:
    """Return, for each silo, the number of answers and the (epsilon, delta) of all together."""
    parts: dict[str, list[tuple[float, float]]] = {}
    gaussian = True
    for line in lines:
        answer = line["answer"]
        for silo in answer["silos"]:
            epsilon = float(silo.get("spent_epsilon", silo["epsilon"]))
            if epsilon:
                parts.setdefault(silo["name"], []).append((epsilon, float(silo["delta"])))
                gaussian = gaussian and "rule" not in silo and answer["trust"] == "isrl"
    return {name: (len(own), *added(own, gaussian=gaussian)) for name, own in sorted(parts.items())}


def sentence_of(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the price of all answers together, in words."""
    totals = spent(lines).values()
    epsilon = max((own[1] for own in totals), default=0.0)
    delta = max((own[2] for own in totals), default=0.0)
    seen = ""
    if any(line["answer"]["trust"] != "isrl" for line in lines):
        seen = ", against a server that sees totals"
    return (
        f"{len(lines)} answers of {len(totals)} silos. Together they are ({shown(epsilon)}, "
        f"{rounded_up(delta)})‑differentially private for each record{seen}."
    )


def paid(lines: Sequence[Mapping[str, Any]]) -> Markup:
    """Return a table with what each silo has spent on all answers together."""
    rows = [
        (name, count, shown(epsilon), rounded_up(delta))
        for name, (count, epsilon, delta) in spent(lines).items()
    ]
    return table(
        "What each silo has spent on all answers",
        ("silo", "answers", "ε", "δ"),
        rows,
        numbers=(1, 2, 3),
    )


def question(line: Mapping[str, Any]) -> str:
    """Return what was asked, in words."""
    words = "".join(f", {name} {value}" for name, value in sorted(line["asked"].items()))
    return f"{NAMES.get(line['command'], line['command'])}{words}"


def epsilon(line: Mapping[str, Any]) -> float:
    """Return the largest epsilon that a silo has spent on an answer."""
    silos = line["answer"]["silos"]
    return max((float(s.get("spent_epsilon", s["epsilon"])) for s in silos), default=0.0)


def answers(lines: Sequence[Mapping[str, Any]]) -> list[Markup]:
    """Return a section for each answer: the figures, the price and the questions."""
    return [
        section(f"answer-{number}", question(line), *parts(line, number))
        for number, line in enumerate(lines, 1)
    ]


def parts(line: Mapping[str, Any], number: int) -> list[Markup]:
    """Return an answer's command and time, figures, price and questions."""
    about = f"silodp stats {line['command']}, {line['time']}"
    return [
        tag("p", about, class_="soft small"),
        *_figures(line["command"], line["answer"]),
        price(line["answer"]),
        folded(f"questions-{number}", "What was asked", _questions(line["answer"])),
    ]


def _figures(command: str, answer: Mapping[str, Any]) -> list[Markup]:
    """Return the figures of an answer."""
    match command:
        case "table1" | "quantiles":
            head = table1.heading(answer)
            rows = table1.lines(answer)
            numbers = table(command, head, rows, numbers=range(2, len(head)), hide=True)
            return [numbers, *table1.box_plots(answer)]
        case "survival":
            return survival.parts(answer)
        case "estimate":
            return ratios.parts(answer)
        case "synthesise":
            return synthetic.parts_of(answer)
        case "logrank":
            return _logrank(answer)
    return _profile(answer)


def _logrank(answer: Mapping[str, Any]) -> list[Markup]:
    """Return the groups of a log-rank test, and its result."""
    rows = [
        (one["name"], f"{one['records']:.0f}", f"{one['events']:.0f}", f"{one['expected']:.0f}")
        for one in answer["groups"]
    ]
    head = ("group", "records", "events", "expected if alike")
    result = f"p = {answer['p']:.4f}, chi-squared {answer['chi_squared']:.2f}, 1 degree of freedom."
    return [table("The groups", head, rows, numbers=(1, 2, 3)), tag("p", result)]


def _profile(answer: Mapping[str, Any]) -> list[Markup]:
    """Return means and missing shares of the features, and the classes."""
    rows = [
        (
            one["feature"],
            f"{one['mean']:.4g}",
            f"{one['mean_low']:.4g} to {one['mean_high']:.4g}",
            f"{one['missing']:.1%}",
        )
        for one in answer["features"]
    ]
    found = [table("Features", ("feature", "mean", "95 %", "missing"), rows, numbers=(1, 2, 3))]
    if answer["classes"]:
        rows = [
            (one["class"], f"{one['count']:.0f}", f"{one['count_error']:.2g}")
            for one in answer["classes"]
        ]
        head = ("class", "records", "standard error by noise")
        found.append(table("Classes", head, rows, numbers=(1, 2)))
    return found


def _questions(answer: Mapping[str, Any]) -> Markup:
    """Return each question with its noise."""
    rows = []
    for number, one in enumerate(answer["releases"], 1):
        multipliers = sorted(one["noise_multiplier"].values())
        noise = f"{multipliers[0]:.4g}"
        if multipliers[-1] > multipliers[0]:
            noise = f"{noise} to {multipliers[-1]:.4g}"
        silos = ", ".join(one["noise_multiplier"])
        rows.append((number, one["statistic"], one["numbers"], f"{one['clip']:.4g}", noise, silos))
    head = ("question", "statistic", "numbers", "clip", "noise multiplier", "silos")
    return table("Every question to the silos", head, rows, numbers=(0, 2, 3, 4))
