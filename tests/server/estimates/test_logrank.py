"""The log-rank test of noisy counts: without noise the usual one, and with it as often wrong as it
should be.
"""

import numpy as np
import pytest

from silodp.core.errors import BadInput
from silodp.core.problem.schema import Schema
from silodp.server.estimates.logrank import compared, two_groups

BINS = 6


def counts(random, n=800, ratio=1.0):
    """The codes of two groups, the second with another hazard: (2, codes)."""
    cells = np.zeros((2, 2 * BINS + 1))
    for group in (0, 1):
        time = random.exponential(1 / (0.2 * ratio**group), n)
        lost = random.uniform(0, 9, n)
        seen = np.minimum(np.minimum(time, lost), BINS)
        place = np.minimum(seen.astype(int), BINS - 1)
        code = np.where(seen >= BINS, 2 * BINS, 2 * place + (time <= lost))
        np.add.at(cells[group], code, 1)
    return cells


def test_it_is_the_test_that_is_done_by_hand():
    """Two bins: 10 of 100 and 20 of 100 have the event in the first, 9 of 90 and 8 of 80 in the
    second.
    """
    cells = np.array([[0, 10, 0, 9, 81], [0, 20, 0, 8, 72]], float)
    found = compared(cells, 0.0)
    expected = 30 * 0.5 + 17 * 80 / 170
    variance = 30 * 0.25 * 170 / 199 + 17 * (80 / 170) * (90 / 170) * 153 / 169
    assert found["expected"] == pytest.approx(expected)
    assert found["chi_squared"] == pytest.approx((28 - expected) ** 2 / variance)
    assert found["bins"] == 2


@pytest.mark.parametrize("noise", [0.0, 6.0])
def test_alike_groups_are_called_different_in_one_of_twenty_cases(noise):
    random = np.random.default_rng(1)
    values = []
    for _ in range(600):
        cells = counts(random)
        values.append(compared(cells + noise * random.normal(size=cells.shape), noise)["p"])
    assert 0.03 <= np.mean(np.array(values) < 0.05) <= 0.07


def test_other_groups_are_called_different():
    random = np.random.default_rng(2)
    cells = counts(random, ratio=1.6)
    found = compared(cells + 6 * random.normal(size=cells.shape), 6.0)
    assert found["p"] < 0.001
    assert found["difference"] > 0


def test_a_group_that_the_noise_hides_is_not_compared():
    with pytest.raises(BadInput, match="the noise hides how many of each group are at risk"):
        compared(counts(np.random.default_rng(3), n=20), 10.0)


def test_only_two_groups_of_survival_times_are_compared():
    columns = {
        "sex": {"type": "boolean"},
        "stage": {"type": "category", "categories": ["I", "II", "III"]},
    }
    times = {"task": "survival", "time": "t", "event": "e", "edges": [1, 2]}
    schema = Schema.of({"columns": columns, "label": times})
    assert two_groups(schema, "sex")[1].names == ("no", "yes")
    with pytest.raises(BadInput, match="which has 3 groups; a log-rank test compares two"):
        two_groups(schema, "stage")
    with pytest.raises(BadInput, match="--by is 'age'"):
        two_groups(schema, "age")
    with pytest.raises(BadInput, match="survival curve needs a label"):
        two_groups(None, "sex")
