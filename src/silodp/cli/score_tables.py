"""How evaluations, survival curves and profiles are shown in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from silodp.cli.console import say, show, table
from silodp.core import quality
from silodp.core.figures import WHY, rounded_up, shown

SHARED = (
    "The price below is for both questions: all records, and the groups. One question alone would "
    "have 0.7 times this noise."
)
ALONE = "The price below is for the groups alone. They have the same noise as with both questions."
SAID = (
    "An interval contains the true value in at least 95 of 100 evaluations. It includes both "
    "errors. noise: standard error of the added noise. sampling: standard error of the limited "
    "number of records."
)


def show_evaluation(answer: Mapping[str, Any]) -> None:
    """Print the score of all records, then the groups if there are any, and the silos without an
    answer.
    """
    scores = answer["scores"]
    groups = answer.get("groups", {})
    if scores:
        _show_scores(scores)
        say(answer["cut"])
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
            "figure|value>|interval>!|noise>!|sampling>!",
            lines,
            title=f"{whole['held_out']} held-out records, by private releases",
        )
    )
    if stretches := quality.reliable(whole):
        show(
            table(
                "predicted risk|observed share>|interval>!|records>",
                stretches,
                title="Calibration: do the risks come true?",
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


def show_forecast(answer: Mapping[str, Any]) -> None:
    """Print how precise an evaluation would be, and the price that is proposed."""
    for line in forecast_lines(answer):
        say(line)


def show_expectation(expected: Mapping[str, Any]) -> None:
    """Print what an evaluation is about to cost, and how precise it is expected to be."""
    name = quality.called(expected["figure"])
    if expected["within"] is None:
        precision = f"the noise will hide the {name}; without --epsilon other prices are shown"
    else:
        precision = f"{name} within {expected['within']:.2f}"
    say(f"Price: epsilon {expected['epsilon']:g} at each silo. Expected precision: {precision}.")


def forecast_lines(answer: Mapping[str, Any]) -> list[str]:
    """Return the expected precision at each price as sentences, the proposed price last."""
    name = quality.called(answer["figure"])
    prices = []
    for row in answer["forecast"]:
        width = row["within"][answer["figure"]]
        if width is None:
            prices.append(f"epsilon {row['epsilon']:g}: {name} hidden by the noise")
        else:
            prices.append(f"epsilon {row['epsilon']:g}: {name} within {width:.2f}")
    basis = f"{answer['held_out']} held-out records"
    if answer["prevalence"] is not None:
        source = "as released in training" if answer["released"] else "an assumption"
        basis += f" and an outcome share of {answer['prevalence']:.0%} ({source})"
    proposed = answer["proposed_epsilon"]
    return [
        "Expected precision, from public facts alone. Nothing is spent.",
        *(f"  {price}" for price in prices),
        f"This is for {basis}.",
        f"Proposed price: --epsilon {proposed:g}",
    ]


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
    show(table(f"until {answer['time']}>|share>|95 %>|remaining>", rows, title=title))
    say(
        "The band includes the privacy noise. It gives each count a standard error of "
        f"{answer['count_error']:.2g}."
    )


def show_profile(answer: dict) -> None:
    rows = []
    for row in answer["features"]:
        deviation = "too noisy"
        if row["deviation_error"] < row["deviation"]:
            deviation = f"{row['deviation']:.3g} ± {row['deviation_error']:.2g}"
        rows.append(
            (
                row["feature"],
                f"{row['low']:g} to {row['high']:g}",
                f"{row['mean']:.4g}",
                f"{row['mean_low']:.4g} to {row['mean_high']:.4g}",
                deviation,
                f"{100 * row['missing']:.1f} %",
                f"{100 * row['missing_low']:.1f} to {100 * row['missing_high']:.1f} %",
            )
        )
    title = "Features, by private releases"
    show(table("feature|range>|mean>|95 %>|deviation>|missing>|95 %>", rows, title=title))
    if answer["classes"]:
        rows = (
            (row["class"], f"{row['count']:.0f} ± {row['count_error']:.2g}", f"{row['weight']:.3g}")
            for row in answer["classes"]
        )
        show(table("class|records>|weight>", rows, title="Classes"))
    say("The intervals include privacy noise and sampling error. ±: standard error of the noise.")
    if answer["units"]:
        say("Means are in the units of the schema. Means of categories and booleans are shares.")
    else:
        say(
            "A range consists of public bins. Values outside it are clamped, also for mean and "
            "deviation."
        )


def show_estimate(answer: dict) -> None:
    """Print coefficients and ratios, as statsmodels and lifelines do."""
    rows = [
        (
            row["name"],
            f"{row['coef']:.3g}",
            f"{row['exp_coef']:.3g}",
            f"{row['se']:.2g}",
            f"{row['exp_lower_95']:.3g} to {row['exp_upper_95']:.3g}",
            f"{row['z']:.2f}",
            p_value(row["p"]),
        )
        for row in answer["coefficients"]
    ]
    ratio = answer["ratio"]
    title = f"{MODELS[answer['kind']]} regression over {answer['records']:,} records"
    heading = "column|coef>!|exp(coef)>!|se>!|95 % of ratio>!|z>!|p>!"
    show(table(heading, rows, title=title))
    noise = [100 * row["noise"] / row["se"] for row in answer["coefficients"]]
    say(
        f"exp(coef) is the {ratio}, for one unit of the column, or for yes instead of no. "
        f"Standard errors, intervals and p-values include the privacy noise. The noise alone is "
        f"{min(noise):.0f} to {max(noise):.0f} % of the standard errors."
    )
    if answer["kind"] == "poisson":
        say("The intervals assume that the counts follow a Poisson law, given the columns.")


def show_logrank(answer: dict) -> None:
    """Print a log-rank test."""
    rows = [
        (
            row["name"],
            f"{row['records']:.0f}",
            f"{row['events']:.0f}",
            f"{row['expected']:.0f}",
        )
        for row in answer["groups"]
    ]
    title = f"Log-rank test by {answer['by']}, over {answer['records']:,} records"
    show(table("group|records>|events>|expected if alike>", rows, title=title))
    say(
        f"p = {p_value(answer['p'])} (chi-squared {answer['chi_squared']:.2f}, 1 degree of "
        f"freedom). It includes the privacy noise, which gives each count a standard error of "
        f"{answer['count_error']:.2g}."
    )
    say(*filter(None, [answer["note"]]))


def show_plan(plan: dict) -> None:
    """Print the price and the expected precision of an estimate, without a question."""
    say(
        f"{MODELS[plan['kind']]} regression of {len(plan['features'])} features: "
        f"{plan['questions']} questions to each silo, about {plan['records']:,} records."
    )
    what = "events per record" if plan["kind"] == "poisson" else "share with the event"
    rows = [
        (f"{row['events']:g}", f"{row['sampling']:.2g}", f"{row['noise']:.2g}")
        for row in plan["precision"]
    ]
    title = "Expected standard error of a coefficient, for one standard deviation of its column"
    show(table(f"{what}>|by sampling>|by noise>", rows, title=title))
    for silo in plan["silos"]:
        say(
            f"{silo['name']}: epsilon {shown(silo['epsilon'])} at delta "
            f"{rounded_up(silo['delta'])}. Nothing was asked or spent."
        )


MODELS = {"logistic": "Logistic", "poisson": "Poisson", "cox": "Cox"}


def p_value(p: float) -> str:
    """Return a p-value as papers print it."""
    if p < 0.0001:
        return "<0.0001"
    return f"{p:.4f}"


def show_charged(silos: Sequence[dict]) -> None:
    """Print what each silo has paid, or may have paid."""
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
                by = f"; its ledger uses the rule {silo['rule']} and may count more"
            else:
                by = ", added to the rest in its ledger"
            say(
                f"{silo['name']}: at most epsilon {shown(silo['epsilon'])} at delta "
                f"{rounded_up(silo['delta'])}{by}."
            )
