"""List what may be averaged over a silo's records."""

from silodp.core.fields import discovered
from silodp.core.statistics.grad import ClippedDiff, Grad, GradDiff
from silodp.core.statistics.gram import Gram
from silodp.core.statistics.group_score import MAX_GROUPS, GroupClasses, GroupScore
from silodp.core.statistics.local_steps import LocalSteps, SteeredSteps
from silodp.core.statistics.marginals import LABEL, Binned, Marginals
from silodp.core.statistics.outcomes import Outcomes
from silodp.core.statistics.regression import Regression
from silodp.core.statistics.risk_cells import RiskCells
from silodp.core.statistics.scaled_grad import ScaledGrad
from silodp.core.statistics.score import MAX_BINS, Score
from silodp.core.statistics.statistic import Cells, Rowed, Rows, Statistic
from silodp.core.statistics.summaries import (
    MAX_CLASSES,
    MAX_EDGES,
    ClassCounts,
    Histogram,
    MissingRates,
    Moments,
)

STATISTICS: dict[str, type[Statistic]] = discovered(Statistic, __name__, __path__)

__all__ = [
    "LABEL",
    "MAX_BINS",
    "MAX_CLASSES",
    "MAX_EDGES",
    "MAX_GROUPS",
    "STATISTICS",
    "Binned",
    "Cells",
    "ClassCounts",
    "ClippedDiff",
    "Grad",
    "GradDiff",
    "Gram",
    "GroupClasses",
    "GroupScore",
    "Histogram",
    "LocalSteps",
    "Marginals",
    "MissingRates",
    "Moments",
    "Outcomes",
    "Regression",
    "RiskCells",
    "Rowed",
    "Rows",
    "ScaledGrad",
    "Score",
    "Statistic",
    "SteeredSteps",
]
