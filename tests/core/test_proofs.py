"""Every statistic and mechanism says beside its code what one replaced record can change, and the
bounds that are numbers hold for the worst records.
"""

import itertools
import math

import pytest
import torch

from silodp.core.mechanisms import MECHANISMS
from silodp.core.statistics import STATISTICS, ClassCounts, Histogram, MissingRates, Moments


@pytest.mark.parametrize(
    "kind", [*STATISTICS.values(), *MECHANISMS.values()], ids=lambda kind: kind.__name__
)
def test_a_statistic_or_mechanism_states_its_sensitivity_in_its_own_docstring(kind):
    """`__doc__` is not inherited from a base class's: each has its own."""
    assert "Sensitivity" in (kind.__doc__ or "")


TWO = torch.tensor(
    list(itertools.product([-9.0, 0.0, 0.4, 9.0, math.nan], repeat=2)), dtype=torch.float64
)


@pytest.mark.parametrize(
    ("statistic", "records", "reach"),
    [
        pytest.param(Histogram(torch.tensor([0.0, 1.0]), 2), TWO, math.sqrt(2 * 2), id="Histogram"),
        pytest.param(
            Moments(torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 2.0])),
            TWO,
            math.sqrt(5 * 2),
            id="Moments",
        ),
        pytest.param(
            MissingRates(2),
            torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]], dtype=torch.bool),
            math.sqrt(2),
            id="MissingRates",
        ),
        pytest.param(
            ClassCounts(3), torch.zeros(5, 1, dtype=torch.float64), math.sqrt(2), id="ClassCounts"
        ),
    ],
)
def test_no_two_records_are_further_apart_than_is_said_nor_that_more_than_is_charged(
    statistic, records, reach
):
    labels = torch.arange(len(records))
    vectors = statistic.rows(None, 0)(records, labels)
    furthest = float(torch.cdist(vectors, vectors).max())
    assert furthest <= reach + 1e-9
    assert reach <= 2 * statistic.norm + 1e-9
    assert furthest >= 0.8 * reach, "the bound says what some two records show"
