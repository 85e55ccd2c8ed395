"""`silodp plan --advise`: which algorithm, settings and trust for silos of these sizes, and what to expect. A function of public numbers only.

Accuracy comes from simulation on synthetic records: a mixture of one Gaussian for each class, of which the best possible model gets a
stated share right. Every algorithm tried here asks for means over full batches, so that N silos act as one with the noise of their mean:
one pool of records is simulated, at the noise that each trust needs. Real records differ, from each other and between silos.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy import integrate, special
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.mechanisms import Gaussian
from silodp.core.numbers import CLIP_TOLERANCE
from silodp.core.privacy.accounting import Budget, gdp_mu, root
from silodp.core.problem.build import Words, build
from silodp.core.problem.problem import Problem
from silodp.core.problem.task import Task
from silodp.host.extension import load
from silodp.lab.planning import planned
from silodp.lab.simulation import simulate
from silodp.server.algorithms import find
from silodp.server.order import TRUSTS, Order, default_delta, finite
from silodp.server.output import output
from silodp.server.plan import with_multipliers
from silodp.silo.data.datasets import Split
from silodp.silo.data.records import Records
from silodp.testing.evaluate import error_rate

SIGNALS = {"easy": 0.95, "typical": 0.85, "hard": 0.70}
"""Share that the best possible model gets right, by name."""
TESTED = 4000
POOL = 4000
"""Most records that are simulated; the noise is always that of the real number."""
TRIALS = 2
FRESH = 8
"""Synthetic data sets that settings are chosen on, and fresh ones that the expected accuracy is measured on."""
CLOSE = 0.02
"""Trust that buys less accuracy than this is not advised."""
TIE = 0.005
GROWTH = tuple(1.3**k for k in range(1, 26))
MOST_EPSILON = 50.0
GROWN = 4
"""How much more is looked at if there is not enough (up to 700 times as many records), and on how many data sets settings are chosen then."""
_CLIPS, _LENGTHS = (0.5, 2.0), (0.03, 0.1, 0.3, 1.0, 3.0)


@dataclass(frozen=True)
class Shape:
    """What is known before any record is read."""

    records: tuple[int, ...]
    features: int
    classes: int = 2
    model: str = "logistic"
    epsilon: float = 3.0
    delta: float | None = None
    signal: float = SIGNALS["typical"]

    def __post_init__(self) -> None:
        if not self.records or min(self.records) < 1:
            raise BadInput(f"records are {self.records}; every silo needs 1 record or more")
        if self.classes < 2 or self.features < self.classes - 1:
            raise BadInput(
                f"there are {self.features} features and {self.classes} classes; synthetic data need 2 classes or more, "
                "and a feature for each class but one"
            )
        if not 1 / self.classes < self.signal < 1:
            raise BadInput(f"signal is {self.signal:g}; it must lie between 1/{self.classes}, which is guessing, and 1")
        finite(self.epsilon)

    @property
    def effective(self) -> int:
        """Records whose plain mean is as sharp as the mean over silos: N^2 / sum of 1/n, all of them where silos have one size."""
        return max(1, int(len(self.records) ** 2 / sum(1 / n for n in self.records)))

    def problem(self) -> Problem:
        return build(Words(self.model, Task.plain(self.classes)), self.features, load=load)


def signal_by_name(text: str) -> float:
    try:
        return SIGNALS[text] if text in SIGNALS else float(text)
    except ValueError:
        raise BadInput(f"signal {text!r} is unknown; use {', '.join(SIGNALS)}, or the accuracy of the best model, such as 0.9") from None


# --- synthetic records -----------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def separation(accuracy: float, classes: int) -> float:
    """s at which means s e_k under unit noise let the best model be right this often: the mean of Phi(z + s)^(classes - 1)."""

    def right(s: float) -> float:
        density = lambda z: math.exp(-z * z / 2) / math.sqrt(2 * math.pi) * special.ndtr(z + s) ** (classes - 1)  # noqa: E731
        return integrate.quad(density, -9, 9)[0]

    return root(lambda s: right(s) - accuracy, 0.0, 30.0, 1e-9)


def synthetic(shape: Shape, counts: Sequence[int], trial: int) -> Split:
    """Silos of these sizes, and records to test on, from one mixture with balanced classes; all silos draw from the same."""
    rng = np.random.default_rng((0xAD, trial))
    corners, lengths, _ = np.linalg.svd(np.eye(shape.classes) - 1 / shape.classes)
    axes = np.linalg.qr(rng.standard_normal((shape.features, shape.classes - 1)))[0].T
    means = separation(shape.signal, shape.classes) * (corners * lengths)[:, :-1] @ axes

    def draw(n: int) -> tuple[np.ndarray, np.ndarray]:
        y = rng.integers(shape.classes, size=n)
        return (means[y] + rng.standard_normal((n, shape.features))).astype(np.float32), y

    train = Records.of([draw(n) for n in counts])
    x, y = draw(TESTED)
    return Split(train, torch.from_numpy(x), torch.from_numpy(y), shape.classes)


# --- candidates and their noise --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """An algorithm with its schedule; step, clip and slope are tried in one batch."""

    algorithm: str
    rounds: int
    phase: int = 1

    def order(self, shape: Shape, trust: str) -> Order:
        delta = () if shape.delta is None else (repr(shape.delta),)
        return Order(self.algorithm, rounds=self.rounds, phase=self.phase, epsilon=(repr(shape.epsilon),), delta=delta, trust=trust)

    def noise(self, shape: Shape, trust: str) -> dict[str, float]:
        """Std of the noise in the mean that the algorithm sees, for each kind of release and a clip of 1."""
        answer = planned(self.order(shape, trust), shape.records, dimension=shape.problem().dim if trust == "shuffle" else None)
        kinds = find(self.algorithm).kinds
        if trust == "shuffle":
            found = [answer, answer.get("differences", answer)]
            return {kind: found[i]["noise_std"]["shuffle"] / _largest(kind) for i, kind in enumerate(kinds)}
        squares = dict.fromkeys(kinds, 0.0)
        for silo in answer["silos"]:
            for release in silo["releases"]:
                squares[release["kind"]] += (release["noise_std"] / _largest(release["kind"])) ** 2
        return {kind: math.sqrt(total) / len(answer["silos"]) for kind, total in squares.items()}

    def points(self, shape: Shape) -> list[dict[str, float]]:
        """step x clip is the longest a record can move w in a round."""
        slopes = (shape.features / 16, shape.features / 4) if "slope" in find(self.algorithm).settings else (None,)
        return [
            {"step": length / clip, "clip": clip} | ({"slope": slope} if slope else {})
            for clip in _CLIPS for length in _LENGTHS for slope in slopes
        ]  # fmt: skip


def _largest(kind: str) -> float:
    return 2.0 if kind == "refine" else 1.0


CANDIDATES = (
    *(Candidate("mb-sgd", r) for r in (5, 15, 50)),
    *(Candidate("momentum", r) for r in (15, 50)),
    Candidate("disk", 50),
    *(Candidate("spider", r, q) for r in (15, 50) for q in (3, 8)),
)


def accuracies(
    shape: Shape, candidate: Candidate, points: Sequence[dict[str, float]], noise: Sequence[dict[str, float]], trial: int
) -> Tensor:
    """(J,): accuracy of each point at its noise (std of the mean for a clip of 1), as one batch of runs on one synthetic data set."""
    pool = min(shape.effective, POOL)
    split, problem, algorithm = synthetic(shape, [pool], trial), shape.problem(), find(candidate.algorithm)
    settings = algorithm.schedule(candidate.order(shape, "isrl").schedule)
    columns = {name: torch.tensor([[p[name]] for p in points]) for name in points[0]}
    clip = columns.pop("clip")
    mechanisms = {
        kind: Gaussian(kind, clip, torch.tensor([[n[kind] * pool / 2 / (1 + CLIP_TOLERANCE)] for n in noise], dtype=torch.float64))
        for kind in algorithm.kinds
    }

    def run(fed, problem, w, **mechanisms):
        return algorithm.run(fed, problem, w, **{**settings, **columns}, **mechanisms)

    def dry(fed, problem, w, **mechanisms):
        return algorithm.run(fed, problem, w, **{**settings, **{k: float(c[0, 0]) for k, c in columns.items()}}, **mechanisms)

    # the ledger only counts here: records are synthetic, and the noise is that of the plan
    plain = {kind: replace(m, clip=1.0) for kind, m in mechanisms.items()}
    plan = with_multipliers(dry, plain, (pool,), [[Budget(math.inf, 0.5)]] * len(points))
    fed, _ = simulate(problem, split.train, plan, [trial] * len(points))
    w = output(run(fed, problem, problem.initial([trial]).expand(len(points), -1), **mechanisms))
    return 1 - error_rate(problem, w, split.test_x, split.test_y)


# --- the advice ------------------------------------------------------------------------------------------------------------------

Spread = Callable[[Callable, Sequence[tuple]], Iterator]


def advise(
    shape: Shape,
    spread: Spread,
    *,
    candidates: Sequence[Candidate] = CANDIDATES,
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> dict:
    """What `silodp plan --advise --json` prints. `spread` runs batches side by side (see `sweep.spread`); `tick` hears of progress."""
    levels, refused = _levels(shape, candidates)
    first = [(shape, c, levels[c], t) for c in candidates for t in range(TRIALS)]
    total = len(first) + (len(TRUSTS) + 1) * FRESH
    done = 0
    means: dict[Candidate, Tensor] = {}
    for candidate, found in spread(_grid, first):
        means[candidate] = means.get(candidate, torch.zeros_like(found)) + found / TRIALS
        tick(done := done + 1, total)
    chosen = {trust: _best(shape, means, levels, trust) for trust in ("open", *TRUSTS) if trust not in refused}
    fresh: dict[str, list[float]] = {trust: [] for trust in chosen}
    for trust, value in spread(_measure, [(shape, trust, *c, TRIALS + t) for trust, c in chosen.items() for t in range(FRESH)]):
        fresh[trust].append(value)
        tick(done := done + 1, total)
    guess = 1 / shape.classes
    open_accuracy = float(np.mean(fresh["open"]))
    trusts: dict[str, dict[str, Any]] = {
        trust: _entry(shape, trust, *chosen[trust], fresh[trust], guess) if trust in chosen else {"trust": trust, "refused": refused[trust]}
        for trust in TRUSTS
    }
    if not trusts["isrl"]["enough"]:
        trusts["isrl"]["needed"] = _needed(shape, "isrl")
    tick(total, total)
    advised = _advised(trusts)
    budgets = {n: Budget(shape.epsilon, shape.delta or default_delta(n)) for n in sorted(set(shape.records))}
    return {
        "synthetic": True, "signal": shape.signal, "majority": guess, "not_private": open_accuracy, "parameters": shape.problem().dim,
        "simulated_records": min(shape.effective, POOL), "advised": advised, "trusts": trusts,
        "gives_up": [{"records": n} | gives_up(budget, gaussian=advised != "shuffle") for n, budget in budgets.items()],
    }  # fmt: skip


def _levels(shape: Shape, candidates: Sequence[Candidate]) -> tuple[dict[Candidate, dict[str, dict[str, float]]], dict[str, str]]:
    """Noise of every candidate under every trust, and why a trust has none."""
    levels: dict[Candidate, dict[str, dict[str, float]]] = {c: {"open": dict.fromkeys(find(c.algorithm).kinds, 0.0)} for c in candidates}
    refused: dict[str, str] = {}
    for trust in TRUSTS:
        try:
            found = {c: c.noise(shape, trust) for c in candidates}
        except BadInput as error:
            if trust != "shuffle":
                raise
            refused[trust] = str(error)
            continue
        for c, noise in found.items():
            levels[c][trust] = noise
    return levels, refused


def _grid(shape: Shape, candidate: Candidate, levels: dict[str, dict[str, float]], trial: int) -> tuple[Candidate, Tensor]:
    points = candidate.points(shape)
    noise = [level for level in levels.values() for _ in points]
    return candidate, accuracies(shape, candidate, points * len(levels), noise, trial).reshape(len(levels), -1)


def _best(shape: Shape, means: dict[Candidate, Tensor], levels: dict, trust: str) -> tuple[Candidate, dict[str, float], dict[str, float]]:
    """(candidate, point, noise): the first candidate, the simplest come first, that is within `TIE` of the best under this trust."""
    row = {c: list(levels[c]).index(trust) for c in means}
    best = {c: float(means[c][row[c]].max()) for c in levels}
    winner = next(c for c in levels if best[c] >= max(best.values()) - TIE)
    return winner, winner.points(shape)[int(means[winner][row[winner]].argmax())], levels[winner][trust]


def _measure(shape: Shape, trust: str, candidate: Candidate, point: dict, noise: dict, trial: int) -> tuple[str, float]:
    return trust, float(accuracies(shape, candidate, [point], [noise], trial)[0])


def _entry(shape: Shape, trust: str, candidate: Candidate, point: dict, noise: dict, values: Sequence[float], guess: float) -> dict:
    accuracy, spread = float(np.mean(values)), float(np.std(values, ddof=1))
    error = math.hypot(spread, math.sqrt(guess * (1 - guess) / TESTED))
    settings = {"rounds": candidate.rounds} | ({"phase": candidate.phase} if candidate.algorithm == "spider" else {})
    return {
        "trust": trust, "algorithm": candidate.algorithm, **settings, **{k: float(f"{v:.3g}") for k, v in point.items()},
        "accuracy": accuracy, "run_to_run": spread, "enough": accuracy > guess + 2 * error, "noise_std": next(iter(noise.values())) * point["clip"],
    }  # fmt: skip


def _advised(trusts: dict[str, dict]) -> str | None:
    """The least trust that comes close to the best; nobody's records are worth spending where no trust is enough."""
    usable = [t for t in TRUSTS if trusts[t].get("enough")]
    if not usable:
        return None
    best = max(trusts[t]["accuracy"] for t in usable)
    return next(t for t in usable if trusts[t]["accuracy"] >= best - CLOSE)


def _needed(shape: Shape, trust: str) -> dict:
    """The least growth of all silos, and that of epsilon, at which MB-SGD is half of the way from guessing to the best possible model."""
    larger = [replace(shape, records=tuple(math.ceil(n * f) for n in shape.records)) for f in GROWTH]
    looser = [replace(shape, epsilon=shape.epsilon * f) for f in GROWTH if shape.epsilon * f <= MOST_EPSILON]
    records, epsilon = _first(larger, trust), _first(looser, trust)
    return {"records": None if records is None else list(records.records), "epsilon": None if epsilon is None else epsilon.epsilon}


def _first(shapes: Sequence[Shape], trust: str) -> Shape | None:
    """The first shape with enough, by bisection; None if the last has not."""
    low, high = -1, len(shapes) - 1
    if high < 0 or not _suffices(shapes[high], trust):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _suffices(shapes[middle], trust) else (middle, high)
    return shapes[high]


def _suffices(shape: Shape, trust: str) -> bool:
    """Step and clip are chosen on some synthetic data sets, and judged on others: the best of many looks better than it is."""
    candidate, guess = Candidate("mb-sgd", 15), 1 / shape.classes
    points, noise = candidate.points(shape), candidate.noise(shape, trust)
    chosen = sum(accuracies(shape, candidate, points, [noise] * len(points), TRIALS + FRESH + t) for t in range(GROWN))
    point = points[int(torch.as_tensor(chosen).argmax())]
    found = [float(accuracies(shape, candidate, [point], [noise], TRIALS + t)) for t in range(FRESH)]
    mean = float(np.mean(found))
    return mean >= (guess + shape.signal) / 2 and mean > guess + 2 * float(np.std(found, ddof=1))


# --- what a silo gives up --------------------------------------------------------------------------------------------------------


def gives_up(budget: Budget, false_alarms: float = 0.01, *, gaussian: bool = True) -> dict:
    """What the best attacker can tell about one record from everything its silo says, if all releases are Gaussian and fill the budget; else
    what epsilon and delta alone leave him, which is more.

    "guesses_right" starts from a prior of 50 %; "belief" is the posterior that is passed with probability "belief_passed" at most.
    """
    stated = {"epsilon": budget.epsilon, "delta": budget.delta, "false_positives": false_alarms}
    if not gaussian:
        epsilon, delta, least = budget.epsilon, budget.delta, math.exp(-budget.epsilon)
        return stated | {
            "true_positives": min(false_alarms / least + delta, 1 - least * (1 - delta - false_alarms)),
            "guesses_right": (1 + delta * least) / (1 + least),
            "belief": 1 / (1 + math.exp(-epsilon - 1)),
            "belief_passed": delta / (1 - math.exp(-1)),  # P(loss > epsilon + t) (1 - exp(-t)) is delta at most
        }
    mu = gdp_mu(budget)
    return stated | {
        "mu": mu,
        "true_positives": float(special.ndtr(special.ndtri(false_alarms) + mu)),
        "guesses_right": float(special.ndtr(mu / 2)),
        "belief": 1 / (1 + math.exp(-budget.epsilon)),
        "belief_passed": float(special.ndtr(mu / 2 - budget.epsilon / mu)),
    }
