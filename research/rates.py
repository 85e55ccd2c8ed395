"""The theorems as slopes: what is measured against epsilon, n, N and d, on the problems of
`rates_problems`.

Schedules (R, K, q, S, step) are those that `core/theory` prescribes, noise is their rho = epsilon^2
/ (8 ln(1/delta)). Under SDP a total of all silos has the noise of one release of n N records, so
that N^2 stands where ISRL-DP has N; levels and coins are those that spend what rho spends.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from research.binomial import theory as sdp
from research.binomial.mechanism import Binomial
from research.binomial.run import calibrate as calibrate_shuffled
from research.binomial.run import connect as connect_binomial
from research.rates_problems import (
    DELTA,
    DISTANCE,
    Size,
    constants,
    empirical_optimum,
    make_problem,
    make_records,
    mean_of,
)
from silodp.core.errors import BadInput
from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import Budget, gdp_epsilon
from silodp.core.sampling import DisjointBatches, FullBatch
from silodp.core.theory import convex
from silodp.core.theory.isrl import Constants, LowerBound, lower_bound, prescribe
from silodp.host import atomic
from silodp.server.algorithms import ALGORITHMS
from silodp.server.federation import Everyone
from silodp.server.plan import Plan, with_multipliers
from silodp.simulation.connect import simulate
from silodp.simulation.runfolder import make_folder, write_environment
from silodp.simulation.sweep import Tick, spread, unseen
from silodp.testing.evaluate import mapping_norm

STAGES = 6
MAPPING = ("mapping", "near")
"""Measures that are the squared norm of the gradient mapping."""

Key = tuple[str, str, str, Size, int]
"""Algorithm, trust, measure, size and number of runs: what one point of the study is."""


@dataclass(frozen=True)
class Line:
    """One algorithm along one axis: its sizes, and the exponent that its theorem gives."""

    theorem: str
    algorithm: str
    measure: str
    against: str
    exponent: float
    base: Size
    values: tuple[float, ...]
    draws: int
    runs: int
    sampling: bool = False
    """Whether the sampling term is meant, not the private one."""
    trust: str = "isrl"
    """Or sdp, through a shuffler."""

    @property
    def sizes(self) -> list[Size]:
        return [replace(self.base, **{self.against: value}) for value in self.values]

    def key(self, size: Size) -> Key:
        return self.algorithm, self.trust, self.measure, size, self.runs


# --- one algorithm as its theorem runs it --------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """An algorithm ready to run, which of its iterates the theorem's output is uniform over, and
    the two terms of its proof's bound.
    """

    run: Callable[..., Iterator[Tensor]]
    mechanisms: dict[str, Gaussian]
    counted: range
    rounds: int
    """Messages of a silo."""
    private: float
    """d sigma^2 / N, the variance of the noise in an (anchor's) mean gradient; for SPIDER the part
    of it that is carried.
    """
    rest: float = 0.0


def carried(phase: int, step: float) -> float:
    """The share of an anchor's noise that the squared gradient holds on average over a phase, where
    the curvature is 1, as it is near w*.

    All steps of a phase follow the same noise: after t of them the gradient holds 1 - a^t of it, a
    = 1 - step, and a^t of what the phase before left. That is a third for two steps and all of it
    for many; SPIDER's bound has all of it for any phase.
    """
    a = 1 - step
    left = (1 - a**phase) / (1 + a**phase)
    return sum(a ** (2 * t) * left + (1 - a**t) ** 2 for t in range(1, phase + 1)) / phase


def effective(c: Constants, trust: str) -> Constants:
    """The constants with N^2 silos under SDP: d / (epsilon^2 n^2 N^2) is then what d / (epsilon^2
    n^2 N) is in every schedule of ISRL-DP.
    """
    if trust == "isrl":
        return c
    return replace(c, silos=c.silos**2, answering=c.silos**2)


def prescribed(algorithm: str, c: Constants):
    """The theorem's; the alternate SPIDER has none, and takes that of the first. Accelerated steps
    have as many stages at every size: at the sizes of this study a number that grows would make the
    slope."""
    if algorithm in ("accelerated", "localized"):
        if algorithm == "accelerated":
            return convex.accelerated(c, stages=STAGES)
        return convex.localized(c)
    return prescribe("spider" if algorithm == "spider-alternate" else algorithm, c)


def schedule(algorithm: str, c: Constants, draw: int = 0) -> Schedule:
    """R, K, q, S and step as prescribed, at the theorems' mu = epsilon / (2 sqrt(ln(1/delta))); the
    nearest where that cannot be run.

    SVRG's differences take full batches, and half of mu^2 pays for them: with the theorem's batches
    and its advanced composition the noise would fill the ball at every size of this study. The
    alternate SPIDER has no theorem: its rounds are those of SPIDER's proof at phase 2.
    """
    plan = prescribed(algorithm, c)
    L = c.lipschitz
    R = plan.rounds
    S = plan.restarts
    mu = c.epsilon / (2 * math.sqrt(c.log_delta))
    run = partial(ALGORITHMS[algorithm].run, step=plan.step)

    def private(batch: int, multiplier: float) -> float:
        return c.dimension * (2 * L / batch * multiplier) ** 2 / c.silos

    if algorithm in ("prox-sgd", "accelerated"):
        noisy = {"minibatch": Gaussian("minibatch", L, 1 / mu, DisjointBatches(R))}
        if algorithm == "prox-sgd":
            run = partial(run, rounds=R)
        else:
            run = partial(run, rounds=R, restarts=S, strong=c.need("pl", algorithm))
        return Schedule(
            run,
            noisy,
            range(R - 1, R),
            R,
            private(plan.batch, 1 / mu),
            c.lipschitz**2 / (c.silos * plan.batch),
        )
    if algorithm == "localized":
        noisy = {"minibatch": Gaussian("minibatch", L, math.sqrt(R) / mu, FullBatch())}
        error = math.sqrt(private(c.records, 1 / mu)), L / math.sqrt(c.records * c.silos)
        return Schedule(
            partial(run, rounds=R, stages=S, pull=convex.pull(c)), noisy, range(R - 1, R), R, *error
        )
    run = partial(run, slope=c.smoothness)
    rest = 0.0
    share = 1.0
    if algorithm in ("prox-svrg", "prox-pl-svrg"):
        anchors = S * (plan.epochs or 0)
        counted = range((S - 1) * (R + 1), (S - 1) * (R + 1) + R)
        run = partial(run, rounds=anchors * (plan.inner_steps or 0), inner=plan.inner_steps)
        if algorithm == "prox-pl-svrg":
            run = partial(run, restarts=S, seed=draw)
    else:
        gap = c.need("gap", "SPIDER")
        if algorithm == "spider":
            phase = plan.phase or 1
            anchors = -(-R // phase)
            run = partial(run, rounds=R, phase=phase)
        else:
            phase = 2
            anchors = math.ceil(math.sqrt(2 * c.silos * gap * c.smoothness / c.privacy) / L / 2)
            R = phase * anchors
            run = partial(run, rounds=anchors)
        counted = range(R)
        rest = gap / (plan.step * R)
        share = carried(phase, plan.step)
    differences = S * R - anchors
    anchor = math.sqrt(anchors * (2 if differences else 1)) / mu
    # where there is none it is never asked
    if differences:
        refine = math.sqrt(2 * differences) / mu
    else:
        refine = anchor
    noisy = {
        "anchor": Gaussian("anchor", L, anchor, FullBatch()),
        "refine": Gaussian("refine", L, refine, FullBatch()),
    }
    return Schedule(run, noisy, counted, S * R, share * private(c.records, anchor), rest)


def priced(plan: Schedule, c: Constants, trust: str, runs: int = 1) -> Plan:
    """The schedule at a price: the theorem's noise in each silo, or totals that spend what that
    noise does.
    """
    counts = (c.records,) * c.silos
    if trust == "isrl":
        return with_multipliers(plan.run, plan.mechanisms, counts, Budget(c.epsilon, DELTA))
    same = Budget(gdp_epsilon(c.epsilon / (2 * math.sqrt(c.log_delta)), DELTA), DELTA)
    if len(plan.mechanisms) > 1:
        shares = {kind: 1 / len(plan.mechanisms) for kind in plan.mechanisms}
    else:
        shares = None
    return calibrate_shuffled(
        plan.run,
        plan.mechanisms,
        [same] * runs,
        counts,
        Everyone(c.silos),
        dimension=c.dimension,
        least=c.silos,
        shares=shares,
    )


def point(
    algorithm: str, trust: str, measure: str, size: Size, runs: int, draw: int
) -> tuple[Key, Tensor]:
    """With (runs,) values of what the theorem bounds, one for each private run: the mean over the
    iterates that its output is drawn from.

    Prox-SVRG starts at the minimiser, where Delta = 0: one call only halves the gap, and half a gap
    would hide the private term.
    """
    c = constants(measure, size)
    problem = make_problem(measure, size.d)
    records = make_records(measure, size, draw)
    plan = schedule(algorithm, effective(c, trust), draw)
    ready = priced(plan, c, trust, runs)
    seeds = [(draw, j) for j in range(runs)]
    binomial = any(isinstance(m, Binomial) for m in ready.mechanisms.values())
    started = connect_binomial if binomial else simulate
    fed, _ = started(problem, records, ready, seeds)
    best, curvature = empirical_optimum(records)
    if algorithm == "prox-svrg":
        start = best.float()
    else:
        start = torch.zeros(size.d)
    if algorithm in ("prox-sgd", "accelerated"):  # their theorems are about the population
        best = torch.full((size.d,), DISTANCE["risk"] / math.sqrt(size.d), dtype=torch.float64)
        curvature = 1.0
    total = torch.zeros(runs, dtype=torch.float64)
    for t, w in enumerate(plan.run(fed, problem, start.expand(runs, -1), **ready.mechanisms)):
        if t not in plan.counted:
            continue
        if measure == "risk":
            total += curvature * (w.double() - best).square().sum(-1)
        elif measure == "convex":  # -<w, E y> less its least value
            total += mean_of(size) * (1 - w.double().sum(-1) / math.sqrt(size.d))
        else:
            total += mapping_norm(problem, w, records, 1 / (2 * c.smoothness)).double().square()
    return (algorithm, trust, measure, size, runs), total / len(plan.counted)


# --- the study -----------------------------------------------------------------------------------

EXPONENTS = {
    trust: {"epsilon": -2.0, "n": -2.0, "N": of_silos, "d": 1.0}
    for trust, of_silos in (("isrl", -1.0), ("sdp", -2.0))
}
"""Of d / (epsilon^2 n^2 N); SPIDER's rate is this to the power 2/3, a fixed phase gives 1/2, and so
does the excess risk of convex losses.
"""


def study() -> list[Line]:
    """Sizes where the private term is above the rest and below the start's error, with few records:
    n epsilon matters, records cost time.
    """
    risk = {
        "epsilon": (1.75, 3.5, 7.0, 14.0),
        "n": (250, 500, 1000, 2000),
        "N": (4, 8, 16, 32),
        "d": (5, 10, 20, 40),
    }
    call = risk | {"n": (128, 256, 512, 1024)}
    short = {"epsilon": (3.5, 7.0, 14.0), "n": (128, 256, 512), "N": (4, 8, 16), "d": (5, 10, 20)}
    mapping = {
        "epsilon": (1.25, 2.5, 5.0, 10.0, 20.0),
        "n": (50, 100, 200),
        "N": (4, 16, 64),
        "d": (5, 10, 20, 40),
    }
    through = {
        "epsilon": (1.25, 2.5, 5.0, 10.0),
        "n": (50, 100, 200),
        "N": (2, 4, 8),
        "d": (5, 10, 20, 40),
    }
    crowd = {
        "epsilon": (2.5, 5.0, 10.0),
        "n": (250, 500, 1000),
        "N": (120, 240, 480),
        "d": (5, 10, 20),
    }
    few = {
        "epsilon": (0.5, 1.0, 2.0, 4.0),
        "n": (40, 80, 160),
        "N": (120, 240, 480),
        "d": (5, 10, 20, 40),
    }
    rows = (
        ("Prox-SGD, PPL", "prox-sgd", "risk", 1, Size(500, 8, 10, 4.0), risk, 4, 10, "isrl"),
        (
            "Prox-PL-SVRG, one call",
            "prox-svrg",
            "risk",
            1,
            Size(256, 8, 10, 7.0),
            call,
            1,
            16,
            "isrl",
        ),
        (
            "Prox-PL-SVRG, ERM",
            "prox-pl-svrg",
            "risk",
            1,
            Size(256, 8, 10, 12.0),
            short,
            1,
            8,
            "isrl",
        ),
        (
            "FedProx-SPIDER",
            "spider",
            "mapping",
            2 / 3,
            Size(100, 16, 10, 5.0),
            mapping,
            1,
            4,
            "isrl",
        ),
        (
            "none (SPIDER's proof at q = 2)",
            "spider-alternate",
            "mapping",
            1 / 2,
            Size(100, 16, 10, 5.0),
            mapping,
            1,
            4,
            "isrl",
        ),
        ("SDP Prox-SGD, PPL", "prox-sgd", "risk", 1, Size(500, 8, 10, 4.0), risk, 1, 10, "sdp"),
        (
            "SDP FedProx-SPIDER",
            "spider",
            "mapping",
            2 / 3,
            Size(100, 4, 10, 5.0),
            through,
            1,
            4,
            "sdp",
        ),
        (
            "Accelerated MB-SGD, strongly convex",
            "accelerated",
            "risk",
            1,
            Size(500, 120, 10, 5.0),
            crowd,
            1,
            8,
            "isrl",
        ),
        (
            "Localized MB-SGD, convex",
            "localized",
            "convex",
            1 / 2,
            Size(80, 120, 10, 1.0),
            few,
            1,
            16,
            "isrl",
        ),
    )
    lines = [
        Line(
            theorem,
            algorithm,
            measure,
            against,
            power * EXPONENTS[trust][against],
            base,
            values,
            draws,
            runs,
            trust=trust,
        )
        for theorem, algorithm, measure, power, base, axes, draws, runs, trust in rows
        for against, values in axes.items()
    ]
    sampling = Line(
        "Prox-SGD, PPL: sampling",
        "prox-sgd",
        "risk",
        "n",
        -1.0,
        Size(8000, 2, 4, 15.0),
        (8000, 16000, 32000),
        30,
        1,
        sampling=True,
    )
    near = Line(
        "FedProx-SPIDER, long phases",
        "spider",
        "near",
        "epsilon",
        -4 / 3,
        Size(330, 4, 4, 5.0),
        through["epsilon"],
        1,
        4,
    )
    return [*lines[:20], sampling, *lines[20:], near]  # the order of the tables that are kept


def measure(
    folder: Path, *, tick: Tick = unseen, lines: Sequence[Line] | None = None
) -> list[dict]:
    """A fit for each line; writes rates.json and, with a row for each point, rates.csv."""
    make_folder(folder)
    lines = study() if lines is None else lines
    # axes cross at one size, which is run once; the longest runs come first
    tasks = list(
        {
            (*line.key(size), draw): None
            for line in lines
            for size in line.sizes
            for draw in range(line.draws)
        }
    )
    tasks.sort(key=_cost, reverse=True)
    values: dict[Key, list[Tensor]] = {}
    for key, runs in spread(point, tasks, tick=tick):
        values.setdefault(key, []).append(runs)
    fits = [
        fit(line, [_mean(torch.cat(values[line.key(size)])) for size in line.sizes])
        for line in lines
    ]
    atomic.write_json(folder / "rates.json", fits)
    rows = [{**{name: f[name] for name in NAMED}, **p} for f in fits for p in f["points"]]
    atomic.write_table(folder / "rates.csv", list(rows[0]), rows)
    write_environment(folder, noise="simulation: seeded pseudo-random float noise")
    return fits


NAMED = ("algorithm", "trust", "measure", "against")
"""What a row of the table says of its line."""


def _cost(task: tuple[str, str, str, Size, int, int]) -> float:
    algorithm, trust, measure, size, runs, _ = task
    return (
        schedule(algorithm, effective(constants(measure, size), trust)).counted.stop
        * size.n
        * size.N
        * size.d
        * runs
    )


def _mean(runs: Tensor) -> dict[str, float]:
    """The mean of a point's runs, with its standard error."""
    return {
        "runs": len(runs),
        "value": float(runs.mean()),
        "standard_error": float(runs.std() / math.sqrt(len(runs))),
    }


def read(path: Path, lines: Sequence[Line] | None = None) -> list[dict]:
    """The fits of a study from its rates.csv alone."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    fits = []
    at = 0
    for line in study() if lines is None else lines:
        mine = rows[at : at + len(line.sizes)]
        at += len(mine)
        told = [
            (*(r[name] for name in NAMED), *(float(r[name]) for name in ("n", "N", "d", "epsilon")))
            for r in mine
        ]
        if told != [
            (*(getattr(line, name) for name in NAMED), *astuple(size)) for size in line.sizes
        ]:
            raise BadInput(
                f"{path} is not a table of this study (its {line.algorithm} against "
                f"{line.against} differs); run python -m research rates again"
            )
        fits.append(
            fit(
                line,
                [
                    {
                        "runs": int(r["runs"]),
                        **{k: float(r[k]) for k in ("value", "standard_error")},
                    }
                    for r in mine
                ],
            )
        )
    return fits


def fit(line: Line, measured: Sequence[dict]) -> dict:
    """The log-log slope by least squares, its standard error from the runs' spread, and the
    theorem's beside it.

    `as_run` is the slope of the proof's own error terms at the very R, K, q, S and noise that ran:
    the exponent with its hidden logarithms and with whole numbers in the place of real ones.
    """
    points = []
    terms = []
    regime = []
    for size, mean in zip(line.sizes, measured, strict=True):
        c = constants(line.measure, size)
        plan = schedule(line.algorithm, effective(c, line.trust))
        terms.append(
            plan.rest
            if line.sampling
            else plan.private + (0.0 if line.measure == "risk" else plan.rest)
        )
        bound = bound_of(line, c, plan)
        points.append(asdict(size) | mean | {"lower_bound": bound.value if bound.applies else None})
        if line.algorithm == "spider":
            regime += [regime_of(line, c)]
        else:
            regime += []
    slope, slope_error = log_slope(
        line.values, [p["value"] for p in points], [p["standard_error"] for p in points]
    )
    as_run, _ = log_slope(line.values, terms, [0.0] * len(terms))
    return {
        "theorem": line.theorem,
        **{name: getattr(line, name) for name in NAMED},
        "sampling": line.sampling,
        "x": list(line.values),
        "slope": slope,
        "slope_error": slope_error,
        "theory": line.exponent,
        "as_run": as_run,
        "verdict": verdict(line, slope, slope_error, as_run),
        "points": points,
        "regime": regime,
    }


def regime_of(line: Line, c: Constants) -> dict[str, float]:
    """What decides whether SPIDER shows its exponent: X, with which the phase q grows as
    (X/8)^(2/3), R, and the share of an anchor's noise that a phase of q rounds carries. The bound
    has all of it: the exponent is seen once phases are so long that the share no longer grows."""
    c = effective(c, line.trust)
    plan = prescribed("spider", c)
    X = c.lipschitz * math.sqrt(c.answering / (c.privacy * c.need("gap", "SPIDER") * c.smoothness))
    return {
        "X": X,
        "phase": plan.phase or 1,
        "rounds": plan.rounds,
        "carried": carried(plan.phase or 1, plan.step),
    }


def bound_of(line: Line, c: Constants, plan: Schedule) -> LowerBound:
    """The lower bound of the algorithm's class with the constant 1; where a condition of it fails
    it says nothing.
    """
    if line.measure in MAPPING:
        kind = "smooth-convex"
    elif line.measure == "convex":
        kind = "convex-so"
    else:
        kind = "strongly-convex-erm"
    if line.algorithm in ("prox-sgd", "accelerated"):  # of the population
        kind = "strongly-convex-so"
    if line.trust == "sdp":
        return sdp.lower_bound(c, kind)
    # on disjoint batches each has the whole budget, which makes these two sqrt(R)-compositional
    if kind == "strongly-convex-so":
        C = math.sqrt(plan.rounds)
    else:
        C = 1.0
    # a round's epsilon_r has the share of epsilon that its mu has of the whole mu = epsilon / (2
    # sqrt(ln(1/delta)))
    loudest = (
        2
        * math.sqrt(c.log_delta)
        / min(float(noisy.noise_multiplier) for noisy in plan.mechanisms.values())
    )
    return lower_bound(c, kind, compositionality=C, rounds=plan.rounds, loudest=loudest)


def log_slope(
    x: Sequence[float], y: Sequence[float], errors: Sequence[float]
) -> tuple[float, float]:
    """Slope of log y against log x by least squares, and its standard error from those of the y."""
    at = np.log(np.asarray(x, float))
    weight = (at - at.mean()) / np.square(at - at.mean()).sum()
    return float(weight @ np.log(y)), float(
        np.linalg.norm(weight * np.asarray(errors) / np.asarray(y))
    )


def verdict(line: Line, slope: float, error: float, as_run: float) -> str:
    """Three standard errors decide, first against the theorem's exponent, then against its terms at
    the schedule that ran.
    """
    if abs(slope - line.exponent) <= 3 * error:
        return "agrees"
    if abs(slope - as_run) <= 3 * error:
        return "agrees as run"
    if abs(slope) < abs(as_run):
        return "flatter"
    return "steeper"
