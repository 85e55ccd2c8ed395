"""What may be averaged over a silo's records: one kind of statistic a file."""

from silodp.core.statistics.cells import MAX_BINS, MAX_CLASSES, Cells, ClassCounts, MissingRates, Score
from silodp.core.statistics.features import Histogram, Moments
from silodp.core.statistics.grad import Grad, GradDiff
from silodp.core.statistics.steps import LocalSteps, SteeredSteps

Statistic = Grad | GradDiff | LocalSteps | SteeredSteps | Histogram | Moments | Score | ClassCounts | MissingRates

__all__ = [
    "MAX_BINS", "MAX_CLASSES", "Cells", "ClassCounts", "Grad", "GradDiff", "Histogram", "LocalSteps", "MissingRates", "Moments", "Score",
    "Statistic", "SteeredSteps",
]  # fmt: skip
