"""Find what looks wrong in a column although each of its cells is valid: numbers in another unit,
a column that predicts the label almost alone, and too many categories.

All of this is for the silo's operator alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from silodp.core.problem.schema import OTHER, Column
from silodp.silo.data.files import MISSING

FACTORS = {
    10: "10 times too large, as mm for cm",
    100: "100 times too large, as cm for m",
    1000: "1000 times too large, as g for kg",
    0.1: "10 times too small, as cm for mm",
    0.01: "100 times too small, as m for cm",
    0.001: "1000 times too small, as kg for g",
    2.54: "2.54 times too large, as cm for inches",
    1 / 2.54: "2.54 times too small, as inches for cm",
    2.20462: "2.2 times too large, as pounds for kg",
    1 / 2.20462: "2.2 times too small, as kg for pounds",
    18.018: "18 times too large, as mg/dl for mmol/l of glucose",
    1 / 18.018: "18 times too small, as mmol/l for mg/dl of glucose",
    88.42: "88 times too large, as µmol/l for mg/dl of creatinine",
    1 / 88.42: "88 times too small, as mg/dl for µmol/l of creatinine",
}
CLEAR = 1.3
"""A gap between two groups of numbers, as a ratio, that no gap within a group comes near."""
FEWEST = 20
"""With fewer records than this, a column may predict the label by chance."""
ALMOST = 0.98
"""The AUC, or the rank correlation, of a column that predicts the label almost alone."""
MANY_CATEGORIES = 100


def other_unit(values: np.ndarray, bounds: tuple[float, float]) -> str:
    """Return how the values differ from the unit of these bounds, or nothing if no factor fits."""
    low, high = bounds
    for factor, words in FACTORS.items():
        if ((values / factor >= low) & (values / factor <= high)).mean() > 0.95:
            return words
    return ""


def second_unit(values: np.ndarray) -> str:
    """Return a clause about the smaller of two groups of values if it looks like another unit.

    The groups have a clear gap between them, and their medians differ by a known factor.
    """
    positive = np.sort(values[values > 0])
    if len(positive) < max(FEWEST, 0.95 * len(values)) or len(np.unique(positive)) < 10:
        return ""
    ratios = positive[1:] / positive[:-1]
    cut = int(ratios.argmax()) + 1
    groups = sorted((positive[:cut], positive[cut:]), key=len)
    few, many = groups
    if ratios[cut - 1] < CLEAR or len(few) < max(3, 0.01 * len(values)):
        return ""
    ratio = np.median(few) / np.median(many)
    closest = min(FACTORS, key=lambda factor: abs(np.log(ratio / factor)))
    if abs(np.log(ratio / closest)) > np.log(CLEAR):
        return ""
    return f"{len(few)} of {len(values)} values look {FACTORS[closest]}"


def predicts_alone(values: np.ndarray, y: np.ndarray, task: str) -> bool:
    """Return whether one column predicts the label almost alone.

    A missing value is a value of its own: a cell that is filled in only after the outcome is a
    leak too.
    """
    if len(y) < FEWEST:
        return False
    if task == "survival":
        y = y // 2
    filled = ~np.isnan(values)
    if task in ("binary", "multiclass", "ordinal"):
        if _separates(np.nan_to_num(values, nan=-1e30), y) or _separates(filled.astype(float), y):
            return True
        return task == "binary" and _auc(values[filled], y[filled]) >= ALMOST
    x = values[filled]
    y = y[filled]
    if len(np.unique(x)) < 10 or len(np.unique(y)) < 3:
        return False
    return bool(abs(np.corrcoef(_ranks(x), _ranks(y))[0, 1]) >= ALMOST)


def _separates(values: np.ndarray, y: np.ndarray) -> bool:
    """Return whether the most frequent class of each value is wrong a tenth as often as one class
    for all. Only columns of few different values can.
    """
    _, group = np.unique(values, return_inverse=True)
    _, label = np.unique(y, return_inverse=True)
    counts = np.zeros((group.max() + 1, label.max() + 1))
    np.add.at(counts, (group, label), 1)
    if len(counts) > len(y) / 10:
        return False
    wrong = len(y) - counts.max(1).sum()
    by_majority = len(y) - counts.sum(0).max()
    return bool(by_majority >= 5 and wrong <= by_majority / 10)


def _auc(values: np.ndarray, y: np.ndarray) -> float:
    """Return the AUC of a column for two classes, in the better direction, or 0 with too few
    records of one class.
    """
    ones = int((y == 1).sum())
    zeros = len(y) - ones
    if min(ones, zeros) < 5:
        return 0.0
    auc = (_ranks(values)[y == 1].sum() - ones * (ones - 1) / 2) / (ones * zeros)
    return float(max(auc, 1 - auc))


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return the rank of each value from 0, with the mean rank for equal values."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts) - 1
    return (last - (counts - 1) / 2)[place] + np.zeros(len(values))


def many_categories(column: Column, texts: Sequence[str]) -> str:
    """Return a sentence if the column has too many categories to learn from, or nothing."""
    number = len(column.categories)
    if number > MANY_CATEGORIES:
        return (
            f"its {number} categories become {number} features, each with its own noise; group "
            "them by public knowledge, as codes of diagnoses into chapters."
        )
    known = column.places
    others = [
        text
        for text in texts
        if text not in known
        and text.removesuffix(".0") not in known
        and text.lower() not in MISSING
    ]
    if OTHER in known and len(others) > len(texts) / 2:
        return (
            f"{len(set(others))} different values in {len(others)} of {len(texts)} rows are not "
            f"among the schema's categories, and count as {OTHER!r}; group them by public "
            "knowledge, or ignore the column."
        )
    return ""
