"""Odds ratios, rate ratios and hazard ratios with intervals and p-values that include the privacy
noise, by Newton steps from noisy residuals and information.

Every question gives the sums of one Newton step at a public point (`statistics.Regression`). With
the information J and the residuals g of the last questions, each at a point t near the solution,
the estimate is the mean of t + J^-1 g. To first order its error is J^-1 (u + e). Here u is the
sampling error, with covariance J / n if the model is right, and e the noise, independent in each
coordinate, with a known standard deviation s. So the covariance is J^-1 / n + s^2 J^-1 J^-1.

In a Cox model a record's weight falls with the hazard that it has passed (`reach`), so that every
record is bounded. The residuals' covariance is then a share of J, which follows from the life table
and the spread of the risks (`Follow.share`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from silodp.core.errors import BadInput
from silodp.core.mechanisms import Gaussian
from silodp.core.problem.schema import Schema
from silodp.core.quality import Z
from silodp.core.query import Query
from silodp.core.statistics import ClassCounts, Regression
from silodp.core.statistics.gram import CROSS, DIAGONAL
from silodp.core.statistics.regression import COUNTS, COX, LOGISTIC, PLAIN
from silodp.core.weights import Weights
from silodp.server.estimates.scoring import Pooled, ask_pooled, noise_of
from silodp.server.federation import Port

MOMENTS = 0.06
LEVELS = 0.04
STEPS = (0.15, 0.25, 0.5)
"""Shares of the budget (mu^2): for the features' moments, for the level, and for the steps."""
SHARES = (MOMENTS, LEVELS, *STEPS)
QUESTIONS = len(SHARES)
FAR = 1.0
"""The longest move of a coefficient, for one standard deviation of its feature, before the last
step.
"""
CLEAR = 2.0
"""The least information, in standard errors of its noise, in every direction of the coefficients.
With less, the noise decides the answer.
"""
KINDS = {"binary": LOGISTIC, "count": COUNTS, "survival": COX}
NAMES = {LOGISTIC: "logistic", COUNTS: "poisson", COX: "cox"}
RATIOS = {LOGISTIC: "odds ratio", COUNTS: "rate ratio", COX: "hazard ratio"}
REACHES = (1.0, 1.5, 2.0, 3.0, 4.0)
DEARER = 1.25
"""The largest reach is taken whose expected variance is at most this many times the least. With it,
late events count nearly as much as early ones, as in lifelines.
"""
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(31)
WEIGHTS = WEIGHTS / WEIGHTS.sum()


@dataclass(frozen=True)
class Term:
    """One feature of a model, with what its own unit is."""

    name: str
    place: int
    half: float
    """How much of the column's own unit one unit of the feature is."""
    middle: float
    """The feature's zero, in the column's own unit."""
    binary: tuple[float, float] | None
    """The two values of a feature that has no others."""


@dataclass(frozen=True)
class Model:
    """What is fitted: the family, the features that take part, and public facts of the label."""

    family: int
    terms: tuple[Term, ...]
    features: int
    """How many features a record has."""
    edges: tuple[float, ...] = ()
    most: float = 1.0
    strata: bool = False

    @property
    def name(self) -> str:
        """Return the name of the model."""
        return NAMES[self.family]


def model_of(
    schema: Schema | None, columns: Sequence[str] = (), *, strata: bool = False, trust: str = "isrl"
) -> Model:
    """Return the model that the schema's label defines, on these columns, or on all.

    The first category of a column is the reference, which has no coefficient. Raise BadInput for
    a task or a column that it is not for, before anything is asked.
    """
    if schema is None or schema.label.task not in KINDS:
        raise BadInput(
            "an estimate needs a schema with a label of task binary, count or survival; for a "
            "number, run `silodp train --model linear --algorithm one-shot` and give its folder"
        )
    if strata and trust != "isrl":
        raise BadInput(
            f"--strata needs the answers of each silo, but --trust is {trust}, which gives totals "
            "only; leave it out, or use --trust isrl"
        )
    names = [column.name for column in schema.columns]
    if unknown := [name for name in columns if name not in names]:
        raise BadInput(
            f"--columns has {unknown[0]!r}; the columns of the schema are {', '.join(names)}"
        )
    terms: list[Term] = []
    place = 0
    for column in schema.columns:
        low, high = column.range
        for index, feature in enumerate(column.features):
            of_value = index < max(1, len(column.categories))
            reference = bool(column.categories) and index == 0
            if (not columns or column.name in columns) and not reference:
                if column.type == "number" and of_value:
                    terms.append(Term(feature, place, (high - low) / 2, (high + low) / 2, None))
                elif column.type == "boolean" and of_value:
                    terms.append(Term(feature, place, 0.5, 0.5, (-1.0, 1.0)))
                else:
                    terms.append(Term(feature, place, 1.0, 0.0, (0.0, 1.0)))
            place += 1
    if not terms:
        raise BadInput("no column is left for the estimate; name some of the schema's columns")
    label = schema.label
    return Model(
        KINDS[label.task],
        tuple(terms),
        place,
        label.edges,
        max(1.0, label.range[1]) if label.task == "count" else 1.0,
        strata,
    )


@dataclass(frozen=True)
class Scaling:
    """Noisy centres and scales of the terms, after which each has a mean near 0 and a deviation
    near 1.
    """

    centre: np.ndarray
    scale: np.ndarray
    furthest: float
    """The largest 1 + |u|^2 that a record can have."""


@dataclass(frozen=True)
class Follow:
    """The follow-up of one stratum, from its noisy life table: each bin's hazard, and the share of
    the records at risk in it.
    """

    hazard: np.ndarray
    at_risk: np.ndarray

    def levels(self, spread: float) -> np.ndarray:
        """Return the log hazard of each bin at the mean risk, if log risks are normal with this
        spread.

        Those with a high risk leave first, so the hazard of all falls below that of each.
        """
        alive = np.exp(-self.hazard.cumsum())
        risk = np.exp(spread * NODES)
        low = np.zeros(len(alive))
        high = np.full(len(alive), 1e4)
        for _ in range(60):
            middle = (low + high) / 2
            above = (np.exp(-middle[:, None] * risk) * WEIGHTS).sum(1) > alive
            low = np.where(above, middle, low)
            high = np.where(above, high, middle)
        return np.log(np.maximum(np.diff(low, prepend=0.0), 1e-6))

    def information(self, spread: float, reach: float) -> tuple[float, float]:
        """Return the expected information of a record about its log risk, and the variance of its
        residual.
        """
        hazard = np.exp(self.levels(spread))[:, None] * np.exp(spread * NODES)
        passed = hazard.cumsum(0)
        alive = np.exp(hazard - passed) * WEIGHTS
        present = self.at_risk[:, None] * alive / alive.sum(1, keepdims=True)
        weight = np.exp(np.minimum(reach - 1 - passed, 0.0))
        survive = np.exp(-hazard)
        information = (present * weight * hazard * survive).sum()
        variance = (present * weight**2 * (1 - survive) * survive).sum()
        return float(information), float(variance)


@dataclass(frozen=True)
class Sums:
    """What one question gives of one stratum: mean information and residuals, their noise, and how
    many records they are of.
    """

    information: np.ndarray
    residual: np.ndarray
    information_noise: float
    residual_noise: float
    records: int


@dataclass(frozen=True)
class Fitted:
    """A fitted model in the columns' own units, with the covariance of its coefficients."""

    model: Model
    names: tuple[str, ...]
    value: np.ndarray
    error: np.ndarray
    noise: np.ndarray
    """The part of the standard error that is privacy noise."""
    records: int
    reach: float
    spread: float
    """Standard deviation of the linear predictor over the records, by the fit."""

    @property
    def z(self) -> np.ndarray:
        """Return the estimates in standard errors."""
        return self.value / self.error

    @property
    def p(self) -> np.ndarray:
        """Return the p-values of no effect, by the normal law."""
        return torch.special.erfc(torch.from_numpy(np.abs(self.z)) / math.sqrt(2)).numpy()

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each coefficient, as statsmodels and lifelines name the figures."""
        low = self.value - Z * self.error
        high = self.value + Z * self.error
        found = []
        for j, name in enumerate(self.names):
            row = {
                "name": name,
                "coef": self.value[j],
                "exp_coef": _exp(self.value[j]),
                "se": self.error[j],
                "noise": self.noise[j],
                "lower_95": low[j],
                "upper_95": high[j],
                "exp_lower_95": _exp(low[j]),
                "exp_upper_95": _exp(high[j]),
                "z": self.z[j],
                "p": self.p[j],
            }
            found.append({key: v if key == "name" else float(v) for key, v in row.items()})
        return found


def regress(fed: Port, mechanism: Gaussian, model: Model, counts: Sequence[int]) -> Fitted:
    """Return a fitted model, from `QUESTIONS` questions to every silo.

    One release by the mechanism would take the whole budget. Each question takes a share of it.
    Raise BadInput if the noise decides the answer.
    """
    scaling, moments = _scaled(fed, mechanism, model, counts)
    fit = _Fit(fed, mechanism, model, counts, scaling, moments)
    fit.begin()
    for share in STEPS:
        fit.step(share)
    return fit.fitted()


def answer(fed: Port, mechanism: Gaussian, model: Model, counts: Sequence[int]) -> dict[str, Any]:
    """Return a fitted model for files and --json."""
    fitted = regress(fed, mechanism, model, counts)
    return {
        "kind": model.name,
        "ratio": RATIOS[model.family],
        "coefficients": fitted.rows(),
        "records": fitted.records,
        "strata": "silo" if model.strata else None,
        "reach": fitted.reach,
        "questions": QUESTIONS,
    }


def planned(mechanism: Gaussian, model: Model, counts: Sequence[int]) -> dict[str, Any]:
    """Return what a fit would cost and how precise it would be, before anything is asked.

    A standard error is of a coefficient for one standard deviation of its column, if columns are
    not correlated.
    """
    length = math.sqrt(1 + len(model.terms))
    norm = model.most * length**2 / math.sqrt(2)
    whole = mechanism.clipped(norm)
    noise, records = whole.deviation(range(len(counts)), Weights("records", tuple(counts)))
    of_residual = float(noise) * DIAGONAL / CROSS / (length / 2) / math.sqrt(sum(STEPS[1:]))
    rows = []
    for share in (0.1, 0.3, 0.5):
        information = share * (1 - share) if model.family == LOGISTIC else share
        if model.family == COUNTS:
            information = 10 * share
        rows.append(
            {
                "events": 10 * share if model.family == COUNTS else share,
                "noise": of_residual / information,
                "sampling": 1 / math.sqrt(float(records) * information),
            }
        )
    return {
        "kind": model.name,
        "features": [term.name for term in model.terms],
        "questions": QUESTIONS,
        "records": sum(counts),
        "precision": rows,
    }


def _part(mechanism: Gaussian, share: float) -> Gaussian:
    """Return the mechanism of a release that takes a share of the budget (mu^2)."""
    multiplier = torch.as_tensor(mechanism.noise_multiplier, dtype=torch.float64)
    return replace(mechanism, noise_multiplier=multiplier / math.sqrt(share))


def _scaled(
    fed: Port, mechanism: Gaussian, model: Model, counts: Sequence[int]
) -> tuple[Scaling, tuple[Pooled, float]]:
    """Return centres and scales by one question, and its answer with the norm of its statistic."""
    places = [term.place for term in model.terms]
    scale = np.zeros(model.features)
    scale[places] = 1.0
    length = math.sqrt(1 + len(places))
    statistic = _statistic(PLAIN, np.zeros(len(places)), [0.0], [0], 0 * scale, scale, length, 1.0)
    found = ask_pooled(fed, statistic, _part(mechanism, MOMENTS), counts)
    products = statistic.matrix(torch.from_numpy(found.mean)[None])[0].numpy()
    weight = max(products[0, 0], 0.1)
    mean = (products[0, 1:-1] / weight).clip(-1, 1)
    square = products.diagonal()[1:-1] / weight
    noise = found.noise / weight
    centre = np.zeros(len(places))
    scale = np.zeros(len(places))
    furthest = 1.0
    for j, term in enumerate(model.terms):
        low, high = term.binary or (-1.0, 1.0)
        centre[j] = mean[j].clip(low, high)
        if term.binary:
            variance = (high - centre[j]) * (centre[j] - low)
            doubt = 2 * noise * abs(high + low - 2 * centre[j]) + noise**2
        else:
            variance = float(square[j]) - centre[j] ** 2
            doubt = 2 * noise
        # A feature that the noise hides has a scale that is too small, and never one too large.
        variance = max(variance, doubt, 1e-6)
        scale[j] = 1 / math.sqrt(variance)
        furthest += max(high - centre[j], centre[j] - low) ** 2 / variance
    scaling = Scaling(centre, scale, furthest)
    return scaling, (found, statistic.norm)  # type: ignore[return-value]


def _statistic(
    family: int,
    slopes: np.ndarray,
    levels: Sequence[float] | np.ndarray,
    periods: Sequence[int],
    centre: np.ndarray,
    scale: np.ndarray,
    length: float,
    reach: float,
) -> Regression:
    """Return the statistic with these fields as tensors."""
    return Regression(
        family,
        _tensor(slopes),
        _tensor(levels),
        _tensor(periods),
        _tensor(centre),
        _tensor(scale),
        length,
        reach,
    )


def _tensor(numbers: Sequence[float] | np.ndarray) -> torch.Tensor:
    """Return the numbers as a vector in float64."""
    return torch.tensor(np.asarray(numbers), dtype=torch.float64)


class _Fit:
    """A fit in progress: a point, and what the questions have given so far.

    Coefficients are those of the scaled features. Each stratum has its own levels, one for each
    period. Without strata there is one.
    """

    def __init__(
        self,
        fed: Port,
        mechanism: Gaussian,
        model: Model,
        counts: Sequence[int],
        scaling: Scaling,
        moments: tuple[Pooled, float],
    ) -> None:
        self._fed = fed
        self._mechanism = mechanism
        self._model = model
        self._counts = counts
        self._scaling = scaling
        self._moments = moments
        self._reach = model.most
        self._length = math.sqrt(min(1 + len(model.terms), scaling.furthest))
        self._periods = [0]
        self._follow: dict[int, Follow] = {}
        self._base: dict[int, np.ndarray] = {}
        self._slopes = np.zeros(len(model.terms))
        self._shifts: dict[int, np.ndarray] = {}
        self._asked: list[tuple[float, np.ndarray, dict[int, Sums]]] = []

    # --- the start -------------------------------------------------------------------------------

    def begin(self) -> None:
        """Ask for the level: the life table of survival times, or the mean of the label."""
        if self._model.family == COX:
            self._begin_times()
            return
        start = 0.0
        if self._model.family == COUNTS:
            start = math.log(self._model.most / 100)
        none = np.zeros(self._model.features)
        statistic = _statistic(
            self._model.family, np.zeros(0), [start], [0], none, none, 1.0, self._reach
        )
        for stratum, sums in self._ask(dict.fromkeys(self._strata(), statistic), LEVELS).items():
            mean = math.exp(start) + sums.residual[0]
            noise = sums.residual_noise
            if self._model.family == LOGISTIC:
                edge = min(max(2 * noise, 0.01), 0.5)
                mean = min(max(0.5 + sums.residual[0], edge), 1 - edge)
                level = math.log(mean / (1 - mean))
            else:
                level = math.log(max(mean, 2 * noise, 0.01))
            self._base[stratum] = np.array([level])
            self._shifts[stratum] = np.zeros(1)

    def _begin_times(self) -> None:
        """Ask for the life table, and choose periods and reach from it."""
        bins = len(self._model.edges)
        found = ask_pooled(
            self._fed, ClassCounts(2 * bins + 1), _part(self._mechanism, LEVELS), self._counts
        )
        self._follow = {0: _follow_of(found.mean, found.noise, found.records)}
        whole = self._follow[0]
        self._reach = self._best_reach(whole)
        if self._model.strata:
            self._follow = {
                silo: _follow_of(mean, self._silo_noise(found, silo), self._counts[silo])
                for silo, mean in found.each.items()
            }
        periods = self._best_periods(whole)
        events = (whole.hazard * whole.at_risk).cumsum()
        share = (events - events[0] / 2) / events[-1]
        places = np.minimum((periods * share).astype(int), periods - 1)
        _, found_periods = np.unique(places, return_inverse=True)
        self._periods = found_periods.tolist()
        for stratum in self._follow:
            self._shifts[stratum] = np.zeros(1 + max(self._periods))
        self._level_times()

    def _silo_noise(self, found: Pooled, silo: int) -> float:
        """Return the noise of one silo's own life table."""
        statistic = ClassCounts(2 * len(self._model.edges) + 1)
        return noise_of(statistic, _part(self._mechanism, LEVELS), self._counts[silo], silo)

    def _level_times(self) -> None:
        """Set the levels from the life tables, at the present spread of risks."""
        spread = self._spread()
        for stratum, follow in self._follow.items():
            self._base[stratum] = follow.levels(spread)
            self._shifts[stratum] = 0 * self._shifts[stratum]

    def _step_noise(self, reach: float, share: float) -> tuple[float, float]:
        """Return the noise that a step's information and residuals will have."""
        found, norm = self._moments
        bound = reach * self._length**2
        noise = found.noise * (bound / math.sqrt(2) / norm) * math.sqrt(MOMENTS / share)
        return noise, noise * DIAGONAL / CROSS / (self._length / 2)

    def _best_reach(self, follow: Follow) -> float:
        """Return the largest reach at which the expected variance is near the least one."""

        def variance(reach: float) -> float:
            information, spread = follow.information(0.5, reach)
            _, noise = self._step_noise(reach, sum(STEPS[1:]))
            return (spread / self._moments[0].records + noise**2) / information**2

        least = min(map(variance, REACHES))
        return max(reach for reach in REACHES if variance(reach) <= DEARER * least)

    def _best_periods(self, follow: Follow) -> int:
        """Return how many periods have clear information about their own level."""
        information, _ = follow.information(0.5, self._reach)
        noise, _ = self._step_noise(self._reach, STEPS[-1])
        if self._model.strata:
            noise = noise * len(self._follow)
        clear = int(information / (10 * noise))
        return max(1, min(4, clear, len(self._model.edges)))

    def _spread(self) -> float:
        """Return the standard deviation of the linear predictor, by the features' moments."""
        return math.sqrt(max(float(self._slopes @ self._correlation() @ self._slopes), 0.0))

    def _correlation(self) -> np.ndarray:
        """Return the noisy correlations of the features, with 1 on the diagonal."""
        found, _ = self._moments
        size = 2 + len(self._slopes)
        i, j = np.triu_indices(size)
        products = np.zeros((size, size))
        products[i, j] = found.mean * np.where(i == j, 1.0, DIAGONAL / CROSS)
        products = products + np.triu(products, 1).T
        moments = products[1:-1, 1:-1] / max(products[0, 0], 0.1)
        centred = moments - np.outer(self._scaling.centre, self._scaling.centre)
        correlation = centred * np.outer(self._scaling.scale, self._scaling.scale)
        np.fill_diagonal(correlation, 1.0)
        return correlation.clip(-1, 1)

    # --- questions -------------------------------------------------------------------------------

    def _strata(self) -> list[int]:
        """Return the numbers of the strata: the silos, or 0 alone."""
        if self._base:
            return list(self._base)
        if self._model.strata:
            return list(self._fed.each())
        return [0]

    def _ask(self, statistics: dict[int, Regression], share: float) -> dict[int, Sums]:
        """Return the sums of each stratum, asked at its own point."""
        if not self._model.strata:
            found = ask_pooled(
                self._fed, statistics[0], _part(self._mechanism, share), self._counts
            )
            return {0: _sums(statistics[0], found.mean, found.noise, found.records)}
        return {
            silo: _sums(
                statistics[silo],
                *_ask_silo(
                    port, statistics[silo], _part(self._mechanism, share), self._counts[silo], silo
                ),
            )
            for silo, port in self._fed.each().items()
            if silo in statistics
        }

    def step(self, share: float) -> None:
        """Ask for one Newton step, and take it unless it is the last."""
        if self._model.family == COX and len(self._asked) == 1:
            self._level_times()
        scaling = self._scaling
        centre = np.zeros(self._model.features)
        scale = np.zeros(self._model.features)
        places = [term.place for term in self._model.terms]
        centre[places] = scaling.centre
        scale[places] = scaling.scale
        statistics = {
            stratum: _statistic(
                self._model.family,
                self._slopes,
                self._base[stratum] + self._shifts[stratum][self._periods],
                self._periods,
                centre,
                scale,
                self._length,
                self._reach,
            )
            for stratum in self._base
        }
        sums = self._ask(statistics, share)
        self._asked.append((share, self._point(), sums))
        if len(self._asked) == len(STEPS):
            return
        information, noise = self._information()
        values, vectors = np.linalg.eigh(information)
        values = np.maximum(values, max(CLEAR * noise, 1e-3))
        residual, _ = self._joined(sums)
        move = vectors @ ((vectors.T @ residual) / values)
        move *= min(1.0, FAR / float(np.abs(move).max()))
        self._move(move)

    # --- linear algebra over all strata ----------------------------------------------------------

    def _point(self) -> np.ndarray:
        """Return all parameters: the levels' shifts of each stratum, then the slopes."""
        return np.concatenate([*self._shifts.values(), self._slopes])

    def _move(self, move: np.ndarray) -> None:
        """Move the point."""
        at = 0
        for stratum, shift in self._shifts.items():
            self._shifts[stratum] = shift + move[at : at + len(shift)]
            at += len(shift)
        self._slopes = self._slopes + move[at:]

    def _joined(self, sums: dict[int, Sums]) -> tuple[np.ndarray, np.ndarray]:
        """Return the residuals of all parameters, and the variance of their noise."""
        residual = np.zeros(len(self._point()))
        variance = np.zeros(len(residual))
        records = sum(part.records for part in sums.values())
        for places, part in zip(self._places(), (sums.get(s) for s in self._shifts), strict=True):
            if part is not None:
                weight = part.records / records
                residual[places] += weight * part.residual
                variance[places] += (weight * part.residual_noise) ** 2
        return residual, variance

    def _information(self) -> tuple[np.ndarray, float]:
        """Return the information of all parameters, by the latest questions, and its noise."""
        latest = self._asked[-2:]
        total = np.zeros((len(self._point()),) * 2)
        precision = sum(share for share, _, _ in latest)
        noise = 0.0
        for share, _, sums in latest:
            records = sum(part.records for part in sums.values())
            squares = 0.0
            for places, part in zip(
                self._places(), (sums.get(s) for s in self._shifts), strict=True
            ):
                if part is not None:
                    weight = part.records / records * share / precision
                    total[np.ix_(places, places)] += weight * part.information
                    squares += (weight * part.information_noise) ** 2
            noise += squares
        return total, math.sqrt(noise)

    def _places(self) -> list[list[int]]:
        """Return the places of each stratum's parameters among all."""
        each = 1 + max(self._periods)
        slopes = [each * len(self._shifts) + j for j in range(len(self._slopes))]
        return [[*range(k * each, (k + 1) * each), *slopes] for k in range(len(self._shifts))]

    # --- the end ---------------------------------------------------------------------------------

    def fitted(self) -> Fitted:
        """Return the coefficients in own units. Raise BadInput if the noise decides them."""
        information, noise = self._information()
        kept = np.ix_(*[self._kept(information, noise)] * 2)
        values, vectors = np.linalg.eigh(information[kept])
        if values[0] < CLEAR * noise:
            raise BadInput(self._hidden(vectors[:, 0]))
        inverse = np.zeros_like(information)
        inverse[kept] = np.linalg.inv(information[kept])
        latest = self._asked[-2:]
        total = sum(share for share, _, _ in latest)
        point = np.zeros(len(information))
        variance = np.zeros(len(information))
        records = 0
        for share, at, sums in latest:
            residual, squares = self._joined(sums)
            point += share / total * (at + inverse @ residual)
            variance += (share / total) ** 2 * squares
            records = sum(part.records for part in sums.values())
        by_noise = inverse @ np.diag(variance) @ inverse
        self._slopes = point[len(point) - len(self._slopes) :]
        covariance = self._share() * inverse / records + by_noise
        return self._in_own_units(point, covariance, by_noise, records)

    def _kept(self, information: np.ndarray, noise: float) -> np.ndarray:
        """Return the places of the parameters that are fitted.

        A stratum may have hardly a record at risk in its later periods. The level of such a period
        stays as it is.
        """
        each = 1 + max(self._periods)
        later = np.arange(len(information)) % each > 0
        later[len(information) - len(self._slopes) :] = False
        return np.flatnonzero(~later | (information.diagonal() >= CLEAR * noise))

    def _hidden(self, direction: np.ndarray) -> str:
        """Return the sentence about a direction of the coefficients that the noise hides."""
        slopes = np.abs(direction[len(direction) - len(self._slopes) :])
        weakest = self._model.terms[int(slopes.argmax())].name
        todo = "use a larger epsilon, more records or fewer --columns"
        if "=" in weakest:
            todo += ", or put the most common category first in the schema"
        return (
            f"epsilon is too small to fit {len(slopes)} features on {self._moments[0].records:,} "
            f"records: the noise hides most of {weakest}; {todo}"
        )

    def _share(self) -> float:
        """Return the residuals' variance as a share of the information.

        Records with a smaller weight have a smaller share. Their weights follow from the features,
        which are drawn here by their released centres.
        """
        random = np.random.default_rng(0)
        square = np.ones(4000)
        for j, term in enumerate(self._model.terms):
            if term.binary:
                low, high = term.binary
                second = random.random(4000) < (self._scaling.centre[j] - low) / (high - low)
                value = np.where(second, high, low) - self._scaling.centre[j]
                square += (value * self._scaling.scale[j]) ** 2
            else:
                square += random.standard_normal(4000) ** 2
        weight = np.minimum(1, 2 * self._length**2 / (square + self._length**2))
        share = float((weight**2 * square).sum() / (weight * square).sum())
        if self._model.family != COX:
            return share
        spread = self._spread()
        parts = [follow.information(spread, self._reach) for follow in self._follow.values()]
        return share * sum(variance for _, variance in parts) / sum(part for part, _ in parts)

    def _in_own_units(
        self, point: np.ndarray, covariance: np.ndarray, by_noise: np.ndarray, records: int
    ) -> Fitted:
        """Return the coefficients for one unit of each column, and the constant where there is
        one.
        """
        scaling = self._scaling
        slopes = len(self._slopes)
        factor = scaling.scale / np.array([term.half for term in self._model.terms])
        into = np.zeros((slopes, len(point)))
        into[:, len(point) - slopes :] = np.diag(factor)
        names = [term.name for term in self._model.terms]
        value = into @ point
        if self._model.family != COX and not self._model.strata:
            zero = scaling.centre + np.array([t.middle / t.half for t in self._model.terms])
            constant = np.concatenate([[1.0], -scaling.scale * zero])
            into = np.concatenate([constant[None], into])
            value = np.concatenate([[self._base[0][0] + constant @ point], value])
            names = ["constant", *names]
        error = np.sqrt((into @ covariance @ into.T).diagonal())
        noise = np.sqrt((into @ by_noise @ into.T).diagonal())
        return Fitted(
            self._model,
            tuple(names),
            value,
            error,
            noise,
            records,
            self._reach,
            self._spread(),
        )


def _ask_silo(
    port: Port, statistic: Regression, mechanism: Gaussian, records: int, silo: int
) -> tuple[np.ndarray, float, int]:
    """Return one silo's own answer, its noise and its records."""
    query = Query(statistic, mechanism.clipped(statistic.norm))
    mean = port.mean(query)[0].double().cpu().numpy()
    return mean, noise_of(statistic, mechanism, records, silo), records


def _sums(statistic: Regression, mean: np.ndarray, noise: float, records: int) -> Sums:
    """Return the sums in an answer."""
    products = statistic.matrix(torch.from_numpy(mean)[None])[0].numpy()
    return Sums(
        products[:-1, :-1],
        products[:-1, -1] / statistic.balance,
        noise,
        noise * DIAGONAL / CROSS / statistic.balance,
        records,
    )


def _follow_of(cells: np.ndarray, noise: float, records: int) -> Follow:
    """Return hazards and shares at risk from the noisy shares of the codes 2 b + event.

    The shares add up to 1, so they are moved alike until they do. A bin whose noise hides it has
    the hazard of its noise.
    """
    cells = cells + (1 - cells.sum()) / len(cells)
    lost = cells[0:-1:2]
    events = cells[1::2]
    present = cells[::-1].cumsum()[::-1][:-1:2] - lost / 2
    floor = max(noise, 1 / records)
    present = np.maximum(present, 3 * floor)
    hazard = -np.log1p(-(np.maximum(events, floor / 2) / present).clip(1e-6, 0.95))
    return Follow(hazard, present.clip(0, 1))


def _exp(value: float) -> float:
    """Return exp(value), or infinity where it has no float."""
    return math.exp(value) if value < 700 else math.inf
