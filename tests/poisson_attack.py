"""An attack on Poisson sampling: does a release give away more than was charged, when the server
chooses the point w?

Everybody but record j holds the same features, and numbers that cancel are so placed in w that what
is left of a prediction depends on the order in which a kernel adds: something or nothing, on this
side or on that. The gradient is then nothing, or a whole clip either way. In an answerer that
gathers a batch the others' gradients depend on how many are drawn, hence on whether j is, and what
j's coin hides is less than what is charged for. All else is exact: sums are the answerer's own
integers, the noise is Gaussian, and the divergences are those of the mixtures over j's coin and the
number of others that are drawn. As a program it prints a table of the shipped answerer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import binom
from torch import Tensor, nn

from silodp.core.events import Event
from silodp.core.lattice import lattice_step
from silodp.core.privacy.accounting import Budget, Renyi
from silodp.core.problem.losses import squared_error
from silodp.core.problem.problem import Problem
from silodp.core.sampling import Poisson
from silodp.silo.answer.exact import Exact
from silodp.silo.data.records import Records

FEATURES, CLIP = 24, 1.0
PROMISE, ORDER = Budget(3.0, 1e-5), 17.8
PROBLEM = Problem(nn.Sequential(nn.Linear(FEATURES, 1)), squared_error)
ALONG = np.ones(PROBLEM.dim) / math.sqrt(PROBLEM.dim)
CASES = ((4, 0.25), (5, 0.25), (20, 0.05), (20, 0.25), (100, 0.05), (200, 0.05))

Answerer = Callable[[Records], Exact]


def shipped(data: Records) -> Exact:
    return Exact(PROBLEM, data, partition=lambda name, batches: np.arange(data.counts[0]))


def neighbours(n: int) -> list[Records]:
    """All features are 1 and all targets 0, but for the last record's, which is beyond anything on
    either side.
    """
    return [
        Records.of([(np.ones((n, FEATURES)), np.append(np.zeros(n - 1), far))])
        for far in (-1e38, 1e38)
    ]


def hostile(trial: int) -> Tensor:
    """(1, d): two or three times L, -L and a small number, at places of w that the trial decides,
    and zeros.

    What is left of their sum is the small number or nothing, by the order in which a kernel adds;
    either is far beyond the clip.
    """
    rng, w = np.random.default_rng(trial), np.zeros(PROBLEM.dim)
    places = rng.permutation(FEATURES)
    for i in range(rng.integers(1, 4)):
        large, small = 10.0 ** (30 - 8 * i), rng.choice([-1, 1]) * 10.0 ** (8 - i)
        w[places[3 * i : 3 * i + 3]] = large, small, -large
    return torch.from_numpy(w)[None]


@dataclass(frozen=True)
class Sums:
    """In units of the clip: for each number of others, its chance, the sum without j, and the sums
    with j in either data set.
    """

    chance: np.ndarray
    without: np.ndarray
    joined: tuple[np.ndarray, np.ndarray]


def summed(exact: Exact, w: Tensor, batches: list[list[int]]) -> np.ndarray:
    """The answerer's own integer sums of these batches, along the one direction in which anything
    moves.
    """
    gamma, rows = lattice_step(CLIP, PROBLEM.dim), exact._gradients([w])
    totals = [
        exact._sum(rows, np.array(chosen, np.int64), CLIP, gamma, PROBLEM.dim) for chosen in batches
    ]
    return np.stack(totals) @ ALONG * (gamma / CLIP)


def sums(answerer: Answerer, n: int, rate: float, w: Tensor) -> Sums:
    """Of the first k of the others, without j and with it.

    Where rows depend on nothing but how many are drawn this is the whole law. Elsewhere it is that
    of a server that knows which others are drawn whenever it knows how many: a price that holds for
    each batch of the others holds for that too.
    """
    here, there = (answerer(data) for data in neighbours(n))
    likely = [k for k in range(n) if binom.pmf(k, n - 1, rate) > 1e-40]
    alone, joined = [list(range(k)) for k in likely], [[*range(k), n - 1] for k in likely]
    return Sums(
        binom.pmf(likely, n - 1, rate),
        summed(here, w, alone),
        (summed(here, w, joined), summed(there, w, joined)),
    )


def log_laws(seen: Sums, rate: float) -> tuple[np.ndarray, np.ndarray, float]:
    """Logarithms of the two densities of a release of noise multiplier 1 on a grid, and the grid's
    step.
    """
    scale = 2.0
    centres = np.concatenate([seen.without, *seen.joined])
    y = np.arange(centres.min() - 30 * scale, centres.max() + 30 * scale, scale / 24)
    laws = []
    for joined in seen.joined:
        at, weight = (
            np.concatenate([seen.without, joined]),
            np.concatenate([seen.chance * (1 - rate), seen.chance * rate]),
        )
        parts = np.log(weight / weight.sum())[:, None] - ((y - at[:, None]) / scale) ** 2 / 2
        laws.append(np.logaddexp.reduce(parts, axis=0) - math.log(scale * math.sqrt(2 * math.pi)))
    return laws[0], laws[1], scale / 24


def divergence(seen: Sums, rate: float, order: float = ORDER) -> float:
    """The larger of the two Renyi divergences between releases of the neighbours."""
    p, q, step = log_laws(seen, rate)
    return max(
        float(np.logaddexp.reduce(order * a + (1 - order) * b) + math.log(step)) / (order - 1)
        for a, b in ((p, q), (q, p))
    )


def delta(
    seen: Sums,
    rate: float,
    releases: int,
    rounding: np.ufunc = np.ceil,
    epsilon: float = PROMISE.epsilon,
) -> float:
    """The delta at epsilon of so many releases, the larger of the two directions: no less with
    losses rounded up, no more with np.floor.
    """
    p, q, step = log_laws(seen, rate)
    found, grain, half = 0.0, 2e-3, 2**14
    for a, b in ((p, q), (q, p)):
        cell = rounding((a - b) / grain).astype(int).clip(-half, half - 1)
        law, size = (
            np.bincount(cell + half, weights=np.exp(a) * step, minlength=2 * half),
            2 * half * releases,
        )
        together = np.fft.irfft(np.fft.rfft(law, size) ** releases, size)
        loss = (np.arange(size) - half * releases) * grain
        over = loss > epsilon
        found = max(found, float((together[over] * -np.expm1(epsilon - loss[over])).sum()))
    return found


def charged(n: int, rate: float, order: float = ORDER) -> float:
    """What the renyi rule takes for a release of noise multiplier 1."""
    return float(Renyi(order).price(Event(Poisson(rate), 1.0, 1), np.asarray(n))[1])


def affordable(n: int, rate: float) -> int:
    """How many of them a ledger with the promise lets out."""
    rule = Renyi.for_gaussian(PROMISE)
    capacity = rule.capacity(np.array([PROMISE], dtype=object))
    return int(capacity[0] / charged(n, rate, float(rule.order)))


def points(answerer: Answerer, trials: int) -> list[Tensor]:
    """Of so many hostile points one of each kind, by what an answerer of nine records makes of the
    first of them.
    """
    exact = answerer(neighbours(9)[0])
    kinds = {
        summed(exact, hostile(t), [list(range(k)) for k in range(1, 9)]).round(6).tobytes(): t
        for t in range(trials)
    }
    return [hostile(trial) for trial in kinds.values()]


def attack(answerer: Answerer, n: int, rate: float, trials: int = 60) -> Sums:
    """The sums at the worst of so many hostile points."""
    found = [sums(answerer, n, rate, w) for w in points(answerer, trials)]
    return max(found, key=lambda seen: divergence(seen, rate))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for n, rate in CASES:
        seen, releases = attack(shipped, n, rate), affordable(n, rate)
        print(
            (
                f"n {n}, rate {rate}: charged {charged(n, rate):.3g}, real "
                f"{divergence(seen, rate):.3g};"
                f" delta {delta(seen, rate, releases):.2g} of {PROMISE.delta:g} after "
                f"{releases} releases"
            ),
            flush=True,
        )
