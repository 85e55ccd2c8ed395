"""The study of evaluations runs the product's estimators on known populations."""

import pytest

from research.evaluation import DESIGNS, Design, measure, summary

FEW = (
    Design("binary", 100, 8.0, 0.1, off=0.7),
    Design("count", 30, 1000.0),
    Design("regression", 30, 8.0),
    Design("survival", 100, 1000.0),
)


def test_intervals_contain_the_truth_of_a_known_population():
    """60 draws at 95 per cent: fewer than 49 hits have a probability of 1e-4."""
    rows = list(measure(60, FEW))
    assert {row["kind"] for row in rows} == {"binary", "count", "regression", "survival"}
    assert all(row["coverage"] >= 49 / 60 for row in rows), rows
    off = next(r for r in rows if r["figure"] == "calibration in the large")
    assert off["truth"] == pytest.approx(-0.06, abs=0.03)
    least = {(row["kind"], row["figure"]): row["least"] for row in summary(rows)}
    assert len(least) == len(rows)


def test_the_study_has_small_silos_rare_outcomes_and_all_prices():
    binary = [design for design in DESIGNS if design.kind == "binary"]
    assert {7, 30, 100} <= {design.records for design in binary}
    assert {0.02, 0.1} <= {design.prevalence for design in binary}
    assert {design.epsilon for design in DESIGNS} == {0.5, 2.0, 8.0, 1000.0}
