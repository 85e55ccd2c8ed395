"""List what may be averaged over a silo's records, one statistic in each file."""

from silodp.core.fields import discovered
from silodp.core.statistics.cells import Cells
from silodp.core.statistics.class_counts import MAX_CLASSES, ClassCounts
from silodp.core.statistics.clipped_diff import ClippedDiff
from silodp.core.statistics.grad import Grad
from silodp.core.statistics.grad_diff import GradDiff
from silodp.core.statistics.gram import Gram
from silodp.core.statistics.group_score import MAX_GROUPS, GroupScore
from silodp.core.statistics.histogram import MAX_EDGES, Histogram
from silodp.core.statistics.local_steps import LocalSteps
from silodp.core.statistics.missing_rates import MissingRates
from silodp.core.statistics.moments import Moments
from silodp.core.statistics.risk_cells import RiskCells
from silodp.core.statistics.score import MAX_BINS, Score
from silodp.core.statistics.statistic import Rowed, Rows, Statistic
from silodp.core.statistics.steered_steps import SteeredSteps

STATISTICS: dict[str, type[Statistic]] = discovered(Statistic, __name__, __path__)

__all__ = [
    "MAX_BINS",
    "MAX_CLASSES",
    "MAX_EDGES",
    "MAX_GROUPS",
    "STATISTICS",
    "Cells",
    "ClassCounts",
    "ClippedDiff",
    "Grad",
    "GradDiff",
    "Gram",
    "GroupScore",
    "Histogram",
    "LocalSteps",
    "MissingRates",
    "Moments",
    "RiskCells",
    "Rowed",
    "Rows",
    "Score",
    "Statistic",
    "SteeredSteps",
]
