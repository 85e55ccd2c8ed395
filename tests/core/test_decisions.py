"""A threshold by cost or by wanted sensitivity, from released figures, with what it implies."""

import math

import pytest

from silodp.core.decisions import by_cost, by_sensitivity, implied
from silodp.core.errors import BadInput


def row(risk, sensitivity, flagged):
    return {
        "risk": risk,
        "sensitivity": [sensitivity, sensitivity - 0.1, min(sensitivity + 0.1, 1.0)],
        "specificity": [0.8, 0.75, 0.85],
        "positive predictive value": [0.3, 0.2, 0.4],
        "flagged": [flagged, flagged - 0.05, flagged + 0.05],
    }


ROWS = [{"risk": 0.01}, row(0.05, 0.97, 0.6), row(0.1, 0.91, 0.4), row(0.3, 0.6, 0.1)]


def test_a_missed_case_that_costs_nine_alarms_is_flagged_from_a_tenth_on():
    assert by_cost(9) == pytest.approx(0.1)
    assert by_cost(1) == 0.5
    for cost in (0, -1, math.inf, math.nan):
        with pytest.raises(BadInput, match="--cost-ratio"):
            by_cost(cost)


def test_the_largest_threshold_that_finds_enough_is_chosen():
    assert by_sensitivity(ROWS, 0.9) == 0.1
    assert by_sensitivity(ROWS, 0.95) == 0.05
    with pytest.raises(BadInput, match=r"the largest that was measured is 0\.97"):
        by_sensitivity(ROWS, 0.99)
    for rows in ([], ROWS[:1]):
        with pytest.raises(BadInput, match="evaluate the model first"):
            by_sensitivity(rows, 0.9)
    with pytest.raises(BadInput, match="a share between 0 and 1"):
        by_sensitivity(ROWS, 90)


def test_what_a_threshold_implies_is_that_of_the_closest_one_with_its_intervals():
    words = " ".join(implied(ROWS, 0.1))
    assert words == (
        "At a risk of 0.1 or more: 40 (35 to 45) of 100 records are flagged; 91 (81 to 100) of 100 "
        "with the outcome are found; 30 (20 to 40) of 100 flagged records have the outcome. Of 100 "
        "without the outcome, 80 (75 to 85) are not flagged."
    )
    assert "No threshold closer to 0.2 was evaluated" in " ".join(implied(ROWS, 0.2))
    assert implied([], 0.1) == []
    assert implied(ROWS[:1], 0.1) == []
