import pytest

from research.figures import draw_comparison
from research.study import STUDIES


@pytest.mark.parametrize("methods", sorted({study.methods for study in STUDIES.values()}))
def test_every_study_has_something_to_draw(methods, tmp_path):
    rows = [
        {"curve": curve, "epsilon": e, "test_error": 0.1, "standard_error": 0.01}
        for curve in methods
        for e in (1.0, 3.0)
    ]
    draw_comparison(rows, tmp_path / "figure", title="all of them")
    assert (tmp_path / "figure.svg").read_text().count("<path") > 10
