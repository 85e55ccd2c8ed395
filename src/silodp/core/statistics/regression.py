"""Compute what one Newton step of a regression needs: residuals and information at a point."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from silodp.core.errors import Refused
from silodp.core.fields import INTEGER, REAL, VECTOR
from silodp.core.problem.problem import Problem
from silodp.core.statistics.gram import MAX_FACTORS, Factored
from silodp.core.statistics.statistic import Rows

LOGISTIC = 0
COUNTS = 1
COX = 2
PLAIN = 3
FAMILIES = (LOGISTIC, COUNTS, COX, PLAIN)
MAX_LEVELS = 2**9
"""The most time bins of a query.

A query is a few numbers long. It must not make a silo allocate more memory than its answer needs.
"""
MAX_PERIODS = 8


@dataclass(frozen=True, eq=False)
class Regression(Factored):
    """Residuals and information of a logistic, Poisson or Cox model, at a public point.

    A record has u = (x - centre) scale, of the features with a scale above 0, and the linear
    predictor eta = level + slopes u. In each period p it has an observed part d >= 0, an expected
    part e >= 0, the residual r = d - e, and the weight v = (d + e) / 2. Given u, both parts have
    one mean if the model is right, which is the information about eta.

    - LOGISTIC: d is 1 - m for the second class, and e is m for the first class, with the chance m.
    - COUNTS: d is the count, and e the rate exp(eta). Both are at most `reach`.
    - COX: the label is 2 b + event. h_b = exp(levels_b + slopes u) is the hazard of bin b. An event
      in bin b has d = s_b h_b / (exp(h_b) - 1), and e is the sum of s_b h_b over the survived bins,
      with half of the bin in which a record is lost. The weight
      s_b = min(1, exp(reach - 1 - H_b)) follows from the hazard H_b up to the end of bin b, and so
      from the past. The residual is weighted by
      (1 - exp(-h_b)) / h_b, which makes its information the mean of v.
    - PLAIN: r = 0 and v = 1, whatever the label is: the moments of the features alone.

    The factors of the term of period p are (sqrt(v) i_p, sqrt(v) u, c r / sqrt(v)) t. Here i_p is
    the indicator of p, c = length / 2, and t is the largest number up to 1 with
    t^2 (1 + |u|^2 + 4 c^2) <= 2 length^2. It depends on the features alone, so no coefficient is
    biased by it. A record with features that are not finite, or with no valid label, is zero.

    Sensitivity: |r| <= 2 v, so the squares of the factors sum to at most
    t^2 (1 + |u|^2 + 4 c^2) sum v. The sum of v is at most reach / 2: this follows for LOGISTIC with
    reach 1. For COX, the sum of s h up to H is at most H, and at most reach - exp(reach - 1 - H)
    from H = reach - 1 on. So with an event after H it is at most reach. For PLAIN, COUNTS
    and against all rounding, longer factors are scaled down. So bound^2 = reach length^2, and one
    replaced record moves a sum by at most sqrt(2) reach length^2 (`Factored`).
    """

    family: int
    slopes: Tensor
    levels: Tensor
    periods: Tensor
    centre: Tensor
    scale: Tensor
    length: float
    reach: float
    wire: ClassVar = {
        "family": INTEGER,
        "slopes": VECTOR,
        "levels": VECTOR,
        "periods": VECTOR,
        "centre": VECTOR,
        "scale": VECTOR,
        "length": REAL,
        "reach": REAL,
    }

    @property
    def terms(self) -> int:  # type: ignore[override]
        """Return the number of periods."""
        return 1 + int(self.periods.max())

    @property
    def size(self) -> int:
        """Return the number of factors: a level for each period, the features, the residual."""
        return self.terms + len(self.slopes) + 1

    @property
    def bound(self) -> float:
        """Return the length of a record's factors, over all terms."""
        return self.length * math.sqrt(self.reach)

    @property
    def balance(self) -> float:
        """Return c, the factor of the residual in the products."""
        return self.length / 2

    @property
    def about_features(self) -> int:
        """Return the number of features."""
        return len(self.scale)

    def _check_shapes(self, dim: int, runs: int) -> None:
        """Raise Refused for a field of another shape or range."""
        vectors = (self.slopes, self.levels, self.periods, self.centre, self.scale)
        if any(vector.ndim != 1 for vector in vectors) or type(self.family) is not int:
            raise Refused("shape")
        if not all(bool(torch.isfinite(vector).all()) for vector in vectors):
            raise Refused("not-finite")
        if self.family not in FAMILIES or not 1 <= len(self.levels) <= MAX_LEVELS:
            raise Refused("shape")
        if self.family != COX and len(self.levels) != 1:
            raise Refused("shape")
        if len(self.periods) != len(self.levels) or not _counted(self.periods, MAX_PERIODS):
            raise Refused("shape")
        if len(self.centre) != len(self.scale) or bool((self.scale < 0).any()):
            raise Refused("shape")
        if len(self.slopes) != int((self.scale > 0).sum()) or self.size > MAX_FACTORS:
            raise Refused("shape")
        if not (2.0**-40 < self.length < 2.0**40 and 1 <= self.reach < 2.0**40):
            raise Refused("clip")

    def check_silo(self, features: int, held_out: int) -> None:
        """Raise Refused unless there is a scale for each of the silo's features."""
        if len(self.scale) != features:
            raise Refused("shape")

    def factors(self, problem: Problem, run: int, dtype: torch.dtype | None = None) -> Rows:
        """Return the function that gives each record's factors (m, terms size)."""
        chosen = [place for place, scale in enumerate(self.scale.tolist()) if scale]
        centre = self.centre.double()[chosen]
        scale = self.scale.double()[chosen]
        slopes = self.slopes.double()
        indicators = torch.eye(self.terms, dtype=torch.float64)
        c = self.balance

        def factors(x: Tensor, y: Tensor) -> Tensor:
            """Return the factors (m, terms size) of these records."""
            u = (x.flatten(1).double()[:, chosen] - centre) * scale
            square = u.square().sum(1)
            valid = torch.isfinite(square)
            u = torch.where(valid[:, None], u, 0.0)
            residual, weight, labelled = self._parts((u * slopes).sum(1), y)
            most = 2 * self.length**2 / (1 + 4 * c * c + square.nan_to_num(torch.inf))
            root = weight.sqrt() * most.clamp(max=1.0).sqrt()[:, None]
            ratio = torch.where(weight > 0, residual / weight, 0.0)
            last = c * root * ratio
            terms = [
                torch.cat([root[:, t : t + 1] * part for part in (indicators[t], u)], 1)
                for t in range(self.terms)
            ]
            parts = [torch.cat([term, last[:, t : t + 1]], 1) for t, term in enumerate(terms)]
            z = torch.cat(parts, 1)
            long = z.square().sum(1).sqrt().clamp(min=self.bound)
            return torch.where((valid & labelled)[:, None], z * (self.bound / long)[:, None], 0.0)

        return factors

    def _parts(self, eta: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return residuals and weights (m, terms), and which records have a valid label."""
        if self.family == COX:
            return self._survival(eta, y)
        if self.family == PLAIN:
            return torch.zeros_like(eta)[:, None], torch.ones_like(eta)[:, None], eta == eta
        eta = eta + self.levels.double()[0]
        if self.family == LOGISTIC:
            chance = eta.sigmoid()
            observed = torch.where(y == 1, 1 - chance, 0.0)
            expected = torch.where(y == 0, chance, 0.0)
            valid = (y == 0) | (y == 1)
        else:
            valid = torch.isfinite(y)
            observed = y.double().nan_to_num(0.0).clamp(0, self.reach)
            expected = eta.clamp(max=math.log(self.reach)).exp()
        residual = observed - expected
        weight = (observed + expected) / 2
        return residual[:, None], weight[:, None], valid

    def _survival(self, eta: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return residuals and weights (m, terms) of survival times, and which labels are valid."""
        levels = self.levels.double()
        bins = torch.arange(len(levels), device=y.device)
        code = y.long()[:, None]
        last = code.div(2, rounding_mode="floor")
        event = (bins == last) & (code % 2 == 1)
        lost = (bins == last) & (code % 2 == 0)
        hazard = (levels + eta[:, None]).clamp(-50, 20).exp()
        at_risk = torch.where(bins < last, hazard, torch.where(lost, hazard / 2, 0.0))
        weight = (self.reach - 1 - hazard.cumsum(1)).clamp(max=0.0).exp()
        residual = torch.where(event, (-hazard).exp(), at_risk.neg().expm1()) * weight
        together = torch.where(event, hazard / hazard.expm1(), at_risk) * weight / 2
        periods = [self.periods == period for period in range(self.terms)]
        valid = (code >= 0) & (code <= 2 * len(levels))
        residuals = [(residual * period).sum(1) for period in periods]
        weights = [(together * period).sum(1) for period in periods]
        return torch.stack(residuals, 1), torch.stack(weights, 1), valid[:, 0]


def _counted(places: Tensor, most: int) -> bool:
    """Return whether these are integers from 0, without a gap, and fewer than `most`."""
    found = sorted(set(places.tolist()))
    return found == list(range(len(found))) and len(found) <= most
