"""The study of ratios draws models that are right: its intervals hold in nearly all of a few data
sets.
"""

import pytest

from research.coverage import RATIO_DESIGNS, RatioDesign, measure_ratios
from silodp.core.statistics.regression import COUNTS, COX, LOGISTIC


@pytest.mark.parametrize("family", [LOGISTIC, COUNTS, COX])
@pytest.mark.parametrize("trust", ["masks", "isrl"])
def test_intervals_of_ratios_hold_the_truth(family, trust):
    design = RatioDesign(family, 2, 2400, 8.0, trust, events=0.5, lost=0.3)
    (row,) = measure_ratios(20, (design,))
    assert row["without_interval"] == 0
    assert 0.85 <= row["mean"] <= 1.0
    assert 0 < row["noise_share"] < 1


def test_the_designs_have_both_trusts_rare_events_and_records_that_are_lost():
    assert {design.family for design in RATIO_DESIGNS} == {LOGISTIC, COUNTS, COX}
    assert {design.trust for design in RATIO_DESIGNS} == {"masks", "isrl"}
    assert any(design.events <= 0.05 for design in RATIO_DESIGNS)
    assert all(design.lost == 0.3 for design in RATIO_DESIGNS if design.family == COX)
