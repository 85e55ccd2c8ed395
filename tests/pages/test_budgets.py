"""The curve of what was spent so far: every charge is in it, silos that spend alike share a line,
and of many the most and the least are drawn.
"""

import math
import re
from pathlib import Path

import pytest

from silodp.core.privacy.accounting import Budget, gdp_epsilon, gdp_mu
from silodp.pages.budgets import _risen, budgets, so_far
from silodp.pages.runs import Run, Silo
from silodp.runs import State


def silo(name: str, shares: dict[int, float], epsilon: float = 2.0, spent: float = 1.0) -> Silo:
    return Silo(
        name,
        100,
        epsilon,
        1e-5,
        spent,
        sum(shares.values()),
        tuple((q, "anchor", share) for q, share in shares.items()),
    )


def drawn(*silos: Silo, state: str = "finished") -> tuple[int, str]:
    """(curves, what is said under the title) of the chart for a wide screen."""
    found = so_far(Run(Path("run"), "train", state, "", {}, silos=silos))
    wide = re.search(r'<svg[^>]*class="wide".*?</svg>', found, re.DOTALL)
    assert wide
    said = re.search(r"<span>(.*?)</span>", found)
    assert said
    return wide[0].count('class="curve '), said[1]


def test_the_curve_rises_by_each_charge_and_is_flat_where_a_silo_was_not_charged():
    points = _risen(silo("a", {0: 0.25, 1: 0.25, 4: 0.5}), 6)
    assert points == [(0, 0), (1, 0.25), (2, 0.5), (4, 0.5), (5, 1.0), (6, 1.0)]
    assert points[-1][1] == pytest.approx(1.0)


def test_silos_that_spend_alike_are_one_line_and_each_epsilon_is_said():
    same = {0: 0.5, 1: 0.5}
    curves, said = drawn(
        silo("a", same, spent=2.0), silo("b", same, spent=1.00001), silo("c", {0: 0.5}, spent=0.7)
    )
    assert curves == 2
    assert "At the end: a, b ε 1.001 to 2; c ε 0.7." in said
    assert drawn(silo("a", same), silo("b", same)) == (
        1,
        "Share of the budget after each question. At the end: both silos ε 1.",
    )
    assert "So far: a ε 1" in drawn(silo("a", same), state="running")[1]


def test_of_more_than_five_curves_the_most_and_the_least_spent_are_drawn():
    many = [silo(f"s{k}", {0: 0.1 * k, 2: 0.1}, spent=0.1 * k) for k in range(6)]
    assert drawn(*many[:5])[0] == 5
    curves, said = drawn(*many, silo("silent", {}, spent=0.0))
    assert curves == 2
    assert "s5 ε 0.5; silent ε 0. Of 7 silos, only the most and the least spent are drawn." in said


def test_questions_with_equal_costs_are_one_row():
    shares = dict.fromkeys(range(50), 0.018) | {50: 0.1}
    page = str(budgets(Run(Path("run"), "train", "finished", "", {}, silos=(silo("a", shares),))))
    rows = re.findall(r"<tr><th[^>]*>([^<]*)</th><td[^>]*>anchor</td><td[^>]*>([^<]*)</td>", page)
    assert rows == [("1 to 50, each", "1.800%"), ("51", "10.000%")]


def test_a_run_without_charges_has_no_curve():
    assert so_far(Run(Path("run"), "train", State.ENDED, "", {}, silos=(silo("a", {}),))) == ""


def test_half_of_a_budget_is_more_than_half_of_its_epsilon_as_the_page_states():
    """Half of the budget is half of mu squared."""
    page = budgets(Run(Path("run"), "train", State.FINISHED, "", {}, silos=(silo("a", {0: 0.5}),)))
    assert "half of the bar is more than half of ε" in page
    for epsilon in (0.1, 1.0, 10.0, 100.0):
        half = gdp_mu(Budget(epsilon, 1e-5)) / math.sqrt(2)
        assert gdp_epsilon(half, 1e-5) > epsilon / 2
