"""The ISRL-DP theorems as slopes: what is measured against epsilon, n, N and d, on problems whose L, beta, mu and Delta are known.

Silo i's records are (x, y) with y = x w_i + z in R^d, x^2 uniform on [1/2, 3/2], z uniform on a sphere; the silos' w_i differ, and their
mean is what is sought. Nothing but d itself grows with d. The clip is the Lipschitz constant, so it is never active. Two losses:
least squares over a ball (proximal-PL, optimum known) and Welsch's robust loss with a non-smooth penalty (neither convex nor PL).
Schedules (R, K, q, S, step) are those that `core/theory/isrl.py` prescribes, noise is their rho = epsilon^2 / (8 ln(1/delta)).
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
from torch import Tensor, nn

from silodp.core.errors import BadInput
from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import Budget
from silodp.core.problem.losses import squared_error
from silodp.core.problem.problem import Problem
from silodp.core.problem.prox import GroupL1, L2Ball
from silodp.core.sampling import DisjointBatches, FullBatch
from silodp.core.theory.isrl import Constants, lower_bound, prescribe
from silodp.host import atomic
from silodp.lab.runfolder import make_folder, write_environment
from silodp.lab.simulation import simulate
from silodp.lab.studies.sweep import Tick, spread, unseen
from silodp.server.algorithms import ALGORITHMS
from silodp.server.plan import with_multipliers
from silodp.silo.data.records import Records
from silodp.testing.evaluate import mapping_norm

DELTA = 1e-6
STEEPEST = 1.5
"""The largest x^2; its mean is 1."""
UNLIKE, NOISE, RADIUS = 0.1, 0.25, 0.6
"""||w_i - w*||, ||z||, and the ball of the least squares."""
DISTANCE = {"risk": 0.5, "mapping": 1.5}
"""||w* - w_0||: the second start is where Welsch's loss is concave."""


@dataclass(frozen=True)
class Size:
    """What a theorem's rate is about: n, N, d and epsilon."""

    n: int
    N: int
    d: int
    epsilon: float


Key = tuple[str, str, Size, int]
"""Algorithm, measure, size and number of runs: what one point of the study is."""


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

    @property
    def sizes(self) -> list[Size]:
        return [replace(self.base, **{self.against: value}) for value in self.values]

    def key(self, size: Size) -> Key:
        return self.algorithm, self.measure, size, self.runs


# --- the two problems -----------------------------------------------------------------------------------------------------------


def welsch(output: Tensor, target: Tensor) -> Tensor:
    """1 - exp(-||output - target||^2 / 2): as least squares near the target, flat far from it, concave in between."""
    return -torch.expm1(-(output - target).square().sum(-1) / 2)


def make_problem(measure: str, d: int) -> Problem:
    model = nn.Sequential(nn.Linear(1, d, bias=False))
    return Problem(model, squared_error, L2Ball(RADIUS)) if measure == "risk" else Problem(model, welsch, GroupL1(0.05, ((0, d),)))


def constants(measure: str, size: Size) -> Constants:
    """L and beta hold for every record and w (in the ball, for least squares); Delta is exact there, and a bound on f0 + f1 at w_0 here."""
    steep, far = math.sqrt(STEEPEST), DISTANCE["risk"] + UNLIKE + RADIUS
    known = (
        {"lipschitz": 2 * steep * (steep * far + NOISE), "smoothness": 2 * STEEPEST, "pl": 2.0, "gap": DISTANCE["risk"] ** 2}
        if measure == "risk"
        else {"lipschitz": steep * math.exp(-0.5), "smoothness": STEEPEST, "gap": 1.0}
    )
    return Constants(**known, records=size.n, silos=size.N, answering=size.N, dimension=size.d, epsilon=size.epsilon, delta=DELTA)


def make_records(measure: str, size: Size, draw: int) -> Records:
    """One draw of all silos' records; w* lies along (1, ..., 1), and silos come in pairs on opposite sides of it."""
    random = np.random.default_rng((draw, size.n, size.N, size.d))

    def on_sphere(*shape: int) -> np.ndarray:
        u = random.normal(size=(*shape, size.d))
        return u / np.linalg.norm(u, axis=-1, keepdims=True)

    aside = UNLIKE * on_sphere(size.N // 2)
    w = DISTANCE[measure] / math.sqrt(size.d) + np.concatenate([aside, -aside])
    x = np.sqrt(random.uniform(2 - STEEPEST, STEEPEST, size=(size.N, size.n, 1)))
    y = x * w[:, None] + NOISE * on_sphere(size.N, size.n)
    names = tuple(f"silo-{i}" for i in range(size.N))
    return Records(torch.from_numpy(x).float(), torch.from_numpy(y).float(), (size.n,) * size.N, names)


def empirical_optimum(records: Records) -> tuple[Tensor, float]:
    """(w^, A) with Fhat(w) - Fhat* = A ||w - w^||^2 for least squares."""
    x, y = records.x.double(), records.y.double()
    return (x * y).mean((0, 1)) / x.square().mean(), float(x.square().mean())


# --- one algorithm as its theorem runs it ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """An algorithm ready to run, which of its iterates the theorem's output is uniform over, and the two terms of its proof's bound."""

    run: Callable[..., Iterator[Tensor]]
    mechanisms: dict[str, Gaussian]
    counted: range
    private: float
    """d sigma^2 / N, the variance of the noise in an (anchor's) mean gradient; for SPIDER the part of it that is carried."""
    rest: float = 0.0


def carried(phase: int, step: float) -> float:
    """The share of an anchor's noise that the squared gradient holds on average over a phase, where the curvature is 1, as it is near w*.

    All steps of a phase follow the same noise: after t of them the gradient holds 1 - a^t of it, a = 1 - step, and a^t of what the phase
    before left. That is a third for two steps and all of it for many; SPIDER's bound has all of it for any phase.
    """
    a = 1 - step
    left = (1 - a**phase) / (1 + a**phase)
    return sum(a ** (2 * t) * left + (1 - a**t) ** 2 for t in range(1, phase + 1)) / phase


def schedule(algorithm: str, c: Constants, draw: int = 0) -> Schedule:
    """R, K, q, S and step as prescribed, at the theorems' mu = epsilon / (2 sqrt(ln(1/delta))); the nearest where that cannot be run.

    SVRG's differences take full batches, and half of mu^2 pays for them: with the theorem's batches and its advanced composition the noise
    would fill the ball at every size of this study. The alternate SPIDER has no theorem: its rounds are those of SPIDER's proof at phase 2.
    """
    plan = prescribe("spider" if algorithm == "spider-alternate" else algorithm, c)
    L, R, S, mu = c.lipschitz, plan.rounds, plan.restarts, c.epsilon / (2 * math.sqrt(c.log_delta))
    run = partial(ALGORITHMS[algorithm].run, step=plan.step)

    def private(batch: int, multiplier: float) -> float:
        return c.dimension * (2 * L / batch * multiplier) ** 2 / c.silos

    if algorithm == "prox-sgd":
        noisy = {"minibatch": Gaussian("minibatch", L, 1 / mu, DisjointBatches(R))}
        return Schedule(
            partial(run, rounds=R), noisy, range(R - 1, R), private(plan.batch, 1 / mu), c.lipschitz**2 / (c.silos * plan.batch)
        )
    run, rest, share = partial(run, slope=c.smoothness), 0.0, 1.0
    if algorithm in ("prox-svrg", "prox-pl-svrg"):
        anchors, counted = S * (plan.epochs or 0), range((S - 1) * (R + 1), (S - 1) * (R + 1) + R)
        run = partial(run, rounds=anchors * (plan.inner_steps or 0), inner=plan.inner_steps)
        run = partial(run, restarts=S, seed=draw) if algorithm == "prox-pl-svrg" else run
    else:
        gap = c.need("gap", "SPIDER")
        if algorithm == "spider":
            phase = plan.phase or 1
            anchors, run = -(-R // phase), partial(run, rounds=R, phase=phase)
        else:
            phase = 2
            anchors = math.ceil(math.sqrt(2 * c.silos * gap * c.smoothness / c.privacy) / L / 2)
            R, run = phase * anchors, partial(run, rounds=anchors)
        counted, rest, share = range(R), gap / (plan.step * R), carried(phase, plan.step)
    differences = S * R - anchors
    anchor, refine = math.sqrt(anchors * (2 if differences else 1)) / mu, math.sqrt(2 * max(differences, 1)) / mu
    noisy = {"anchor": Gaussian("anchor", L, anchor, FullBatch()), "refine": Gaussian("refine", L, refine, FullBatch())}
    return Schedule(run, noisy, counted, share * private(c.records, anchor), rest)


def point(algorithm: str, measure: str, size: Size, runs: int, draw: int) -> tuple[Key, Tensor]:
    """With (runs,) values of what the theorem bounds, one for each private run: the mean over the iterates that its output is drawn from.

    Prox-SVRG starts at the minimiser, where Delta = 0: one call only halves the gap, and half a gap would hide the private term.
    """
    c = constants(measure, size)
    problem, records, plan = make_problem(measure, size.d), make_records(measure, size, draw), schedule(algorithm, c, draw)
    priced = with_multipliers(plan.run, plan.mechanisms, records.counts, Budget(size.epsilon, DELTA))
    fed, _ = simulate(problem, records, priced, [(draw, j) for j in range(runs)])
    best, curvature = empirical_optimum(records)
    start = best.float() if algorithm == "prox-svrg" else torch.zeros(size.d)
    if algorithm == "prox-sgd":  # its theorem is about the population
        best, curvature = torch.full((size.d,), DISTANCE["risk"] / math.sqrt(size.d), dtype=torch.float64), 1.0
    total = torch.zeros(runs, dtype=torch.float64)
    for t, w in enumerate(plan.run(fed, problem, start.expand(runs, -1), **plan.mechanisms)):
        if t not in plan.counted:
            continue
        if measure == "risk":
            total += curvature * (w.double() - best).square().sum(-1)
        else:
            total += mapping_norm(problem, w, records, 1 / (2 * c.smoothness)).double().square()
    return (algorithm, measure, size, runs), total / len(plan.counted)


# --- the study ------------------------------------------------------------------------------------------------------------------

EXPONENTS = {"epsilon": -2.0, "n": -2.0, "N": -1.0, "d": 1.0}
"""Of d / (epsilon^2 n^2 N); SPIDER's rate is this to the power 2/3, a fixed phase gives 1/2."""


def study() -> list[Line]:
    """Sizes where the private term is above the rest and below the start's error, with few records: n epsilon matters, records cost time."""
    risk = {"epsilon": (1.75, 3.5, 7.0, 14.0), "n": (250, 500, 1000, 2000), "N": (4, 8, 16, 32), "d": (5, 10, 20, 40)}
    call = risk | {"n": (128, 256, 512, 1024)}
    short = {"epsilon": (3.5, 7.0, 14.0), "n": (128, 256, 512), "N": (4, 8, 16), "d": (5, 10, 20)}
    mapping = {"epsilon": (1.25, 2.5, 5.0, 10.0, 20.0), "n": (50, 100, 200), "N": (4, 16, 64), "d": (5, 10, 20, 40)}
    lines = [
        Line(theorem, algorithm, measure, against, power * EXPONENTS[against], base, values, draws, runs)
        for theorem, algorithm, measure, power, base, axes, draws, runs in (
            ("Prox-SGD, PPL", "prox-sgd", "risk", 1, Size(500, 8, 10, 4.0), risk, 4, 10),
            ("Prox-PL-SVRG, one call", "prox-svrg", "risk", 1, Size(256, 8, 10, 7.0), call, 1, 16),
            ("Prox-PL-SVRG, ERM", "prox-pl-svrg", "risk", 1, Size(256, 8, 10, 12.0), short, 1, 8),
            ("FedProx-SPIDER", "spider", "mapping", 2 / 3, Size(100, 16, 10, 5.0), mapping, 1, 4),
            ("none (SPIDER's proof at q = 2)", "spider-alternate", "mapping", 1 / 2, Size(100, 16, 10, 5.0), mapping, 1, 4),
        )
        for against, values in axes.items()
    ]
    many = Size(8000, 2, 4, 15.0)
    return [*lines, Line("Prox-SGD, PPL: sampling", "prox-sgd", "risk", "n", -1.0, many, (8000, 16000, 32000), 30, 1, sampling=True)]


def measure(folder: Path, *, tick: Tick = unseen, lines: Sequence[Line] | None = None) -> list[dict]:
    """A fit for each line; writes rates.json and, with a row for each point, rates.csv."""
    make_folder(folder)
    lines = study() if lines is None else lines
    # axes cross at one size, which is run once; the longest runs come first
    tasks = list({(*line.key(size), draw): None for line in lines for size in line.sizes for draw in range(line.draws)})
    tasks.sort(key=_cost, reverse=True)
    values: dict[Key, list[Tensor]] = {}
    for key, runs in spread(point, tasks, tick=tick):
        values.setdefault(key, []).append(runs)
    fits = [fit(line, [_mean(torch.cat(values[line.key(size)])) for size in line.sizes]) for line in lines]
    atomic.write_json(folder / "rates.json", fits)
    rows = [{"algorithm": f["algorithm"], "measure": f["measure"], "against": f["against"], **p} for f in fits for p in f["points"]]
    atomic.write_table(folder / "rates.csv", list(rows[0]), rows)
    write_environment(folder, noise="simulation: seeded pseudo-random float noise")
    return fits


def _cost(task: tuple[str, str, Size, int, int]) -> float:
    algorithm, measure, size, runs, _ = task
    return schedule(algorithm, constants(measure, size)).counted.stop * size.n * size.N * size.d * runs


def _mean(runs: Tensor) -> dict[str, float]:
    """The mean of a point's runs, with its standard error."""
    return {"runs": len(runs), "value": float(runs.mean()), "standard_error": float(runs.std() / math.sqrt(len(runs)))}


def read(path: Path, lines: Sequence[Line] | None = None) -> list[dict]:
    """The fits of a study from its rates.csv alone."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    fits, at = [], 0
    for line in study() if lines is None else lines:
        mine = rows[at : at + len(line.sizes)]
        at += len(mine)
        told = [(r["algorithm"], r["measure"], r["against"], *(float(r[name]) for name in ("n", "N", "d", "epsilon"))) for r in mine]
        if told != [(line.algorithm, line.measure, line.against, *astuple(size)) for size in line.sizes]:
            raise BadInput(
                f"{path} is not a table of this study (its {line.algorithm} against {line.against} differs); run silodp rates again"
            )
        fits.append(fit(line, [{"runs": int(r["runs"]), **{k: float(r[k]) for k in ("value", "standard_error")}} for r in mine]))
    return fits


def fit(line: Line, measured: Sequence[dict]) -> dict:
    """The log-log slope by least squares, its standard error from the runs' spread, and the theorem's beside it.

    `as_run` is the slope of the proof's own error terms at the very R, K, q, S and noise that ran: the exponent with its hidden
    logarithms and with whole numbers in the place of real ones.
    """
    points, terms = [], []
    for size, mean in zip(line.sizes, measured, strict=True):
        c = constants(line.measure, size)
        plan = schedule(line.algorithm, c)
        terms.append(plan.rest if line.sampling else plan.private + (plan.rest if line.measure == "mapping" else 0.0))
        points.append(asdict(size) | mean | {"lower_bound": known_bound(line, c)})
    slope, slope_error = log_slope(line.values, [p["value"] for p in points], [p["standard_error"] for p in points])
    as_run, _ = log_slope(line.values, terms, [0.0] * len(terms))
    return {
        "theorem": line.theorem, "algorithm": line.algorithm, "measure": line.measure, "against": line.against, "sampling": line.sampling,
        "x": list(line.values), "slope": slope, "slope_error": slope_error, "theory": line.exponent, "as_run": as_run,
        "verdict": verdict(line, slope, slope_error, as_run), "points": points,
    }  # fmt: skip


def known_bound(line: Line, c: Constants) -> float | None:
    """The lower bound of the algorithm's class with the constant 1, or None where a condition of it fails: it then says nothing."""
    if line.algorithm == "prox-sgd":  # each batch has the whole budget, which makes it sqrt(R)-compositional
        bound = lower_bound(c, "strongly-convex-so", compositionality=math.sqrt(prescribe("prox-sgd", c).rounds))
    else:
        bound = lower_bound(c, "smooth-convex" if line.measure == "mapping" else "strongly-convex-erm")
    return bound.value if bound.applies else None


def log_slope(x: Sequence[float], y: Sequence[float], errors: Sequence[float]) -> tuple[float, float]:
    """Slope of log y against log x by least squares, and its standard error from those of the y."""
    at = np.log(np.asarray(x, float))
    weight = (at - at.mean()) / np.square(at - at.mean()).sum()
    return float(weight @ np.log(y)), float(np.linalg.norm(weight * np.asarray(errors) / np.asarray(y)))


def verdict(line: Line, slope: float, error: float, as_run: float) -> str:
    """Three standard errors decide, first against the theorem's exponent, then against its terms at the schedule that ran."""
    if abs(slope - line.exponent) <= 3 * error:
        return "agrees"
    if abs(slope - as_run) <= 3 * error:
        return "agrees as run"
    return "flatter" if abs(slope) < abs(as_run) else "steeper"
