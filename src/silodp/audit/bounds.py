"""Lower bounds on epsilon from an attacker's scores: a Gaussian fit, Clopper-Pearson threshold
tests, and the one-run theorem.

This is pure arithmetic on scores. A score is large if the attacker takes the second of two
neighbouring data sets to be the more likely one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import optimize, stats

from silodp.core.privacy.accounting import gdp_epsilon

MOST = 50.0
"""A separation mu above this is reported as this number. At it no protection is left."""


def gdp_fit(first: np.ndarray, second: np.ndarray) -> tuple[float, float]:
    """Return (mu, standard error): the separation of the scores, d' = difference of means / pooled
    standard deviation.

    The log-likelihood ratio of a mu-GDP Gaussian transcript is N(-mu^2/2, mu^2) under one data set
    and N(+mu^2/2, mu^2) under the other, so its d' is mu. The standard error is that of normal
    scores: the square root of d'^2 / (2 (n0 + n1)) + 1/n0 + 1/n1.
    """
    spread = math.sqrt((first.var(ddof=1) + second.var(ddof=1)) / 2)
    gap = float(second.mean() - first.mean())
    if spread > 0:
        mu = min(gap / spread, MOST)
    elif gap > 0:
        mu = MOST
    else:
        mu = 0.0
    return mu, math.sqrt(
        mu * mu / (2 * (len(first) + len(second))) + 1 / len(first) + 1 / len(second)
    )


def upper(errors: int, trials: int, level: float) -> float:
    """Return a Clopper-Pearson upper bound on a probability. The truth is above it with probability
    at most `level`.
    """
    if errors >= trials:
        return 1.0
    return float(stats.beta.isf(level, errors + 1, trials - errors))


def gdp_lower(first: np.ndarray, second: np.ndarray, level: float) -> float:
    """Return a lower bound on mu, from the threshold test score > 0. The true mu is below it with
    probability at most `level`.

    Formal guarantees: a mu-GDP mechanism has false-alarm rate a and miss rate b with Phi^-1(1 - a)
    - Phi^-1(b) <= mu for every test. Both rates are bounded from above by Clopper-Pearson at level
    / 2. The threshold must not depend on the scores. 0 is the natural one for log-likelihood
    ratios. No assumption is made about the distribution of scores.
    """
    a = upper(int((first > 0).sum()), len(first), level / 2)
    b = upper(int((second <= 0).sum()), len(second), level / 2)
    return max(0.0, float(stats.norm.isf(min(a, 1 - 1e-16)) - stats.norm.ppf(min(b, 1 - 1e-16))))


def epsilon_lower(first: np.ndarray, second: np.ndarray, delta: float, level: float) -> float:
    """Return a lower bound on epsilon at this delta, for every mechanism. The true epsilon is below
    it with probability at most `level`.

    (epsilon, delta)-DP implies 1 - b <= e^epsilon a + delta for every test. Threshold and direction
    are chosen on the even runs and tested on the odd ones, so the choice costs nothing.
    """
    best = -math.inf
    choice = None
    for sign in (1.0, -1.0):
        if sign > 0:
            x = first
            y = second
        else:
            x = -second
            y = -first
        for threshold in np.quantile(
            np.concatenate([x[::2], y[::2]]), np.linspace(0.01, 0.995, 100)
        ):
            a = (int((x[::2] > threshold).sum()) + 1) / (len(x[::2]) + 2)
            b = (int((y[::2] <= threshold).sum()) + 1) / (len(y[::2]) + 2)
            value = math.log(max(1 - b - delta, 1e-300) / a) - math.sqrt(1 / (a * len(x[::2])))
            if value > best:
                best = value
                choice = (x[1::2], y[1::2], float(threshold))
    assert choice is not None
    x, y, threshold = choice
    a = upper(int((x > threshold).sum()), len(x), level / 2)
    b = upper(int((y <= threshold).sum()), len(y), level / 2)
    return max(0.0, math.log(max(1 - b - delta, 1e-300) / a))


def refuted(
    first: np.ndarray, second: np.ndarray, claims: Sequence[tuple[float, float]], level: float
) -> bool:
    """Return whether the scores refute one of these claims (epsilon, delta), which hold together. A
    true list is refuted with probability <= `level`.

    Claim, threshold and direction are chosen on a third of the runs, and tested once on the others
    by Clopper-Pearson. A mechanism's accountant has an epsilon for every delta. Few runs see much
    more at a delta of a tenth than at a delta of 1e-5.
    """
    best = -math.inf
    choice = None
    for sign in (1.0, -1.0):
        if sign > 0:
            x = first
            y = second
        else:
            x = -second
            y = -first
        third = (len(x[::3]), len(y[::3]))
        for threshold in np.quantile(
            np.concatenate([x[::3], y[::3]]), np.linspace(0.01, 0.995, 100)
        ):
            a = (int((x[::3] > threshold).sum()) + 1) / (third[0] + 2)
            hit = (int((y[::3] > threshold).sum()) + 1) / (third[1] + 2)
            for epsilon, delta in claims:
                factor = math.exp(min(epsilon, 500.0))
                error = math.sqrt(hit * (1 - hit) / third[1]) + factor * math.sqrt(
                    a * (1 - a) / third[0]
                )
                value = (hit - delta - factor * a) / error
                if value > best:
                    best = value
                    choice = (x, y, float(threshold), factor, delta)
    assert choice is not None
    *scores, threshold, factor, delta = choice
    x, y = (np.delete(some, np.s_[::3]) for some in scores)
    a = upper(int((x > threshold).sum()), len(x), level / 2)
    b = upper(int((y <= threshold).sum()), len(y), level / 2)
    return 1 - b > factor * a + delta


def epsilon_of(mu: float, delta: float) -> float:
    """Return the epsilon of a mu for estimates, where a negative mu counts as zero."""
    return gdp_epsilon(min(max(mu, 0.0), MOST), delta)


def trade_off(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (false alarms, misses) of the tests score > t, for t over the quantiles of all
    scores.
    """
    thresholds = np.quantile(np.concatenate([first, second]), np.linspace(0, 1, 200))
    alarms = 1 - np.searchsorted(np.sort(first), thresholds, side="right") / len(first)
    misses = np.searchsorted(np.sort(second), thresholds, side="right") / len(second)
    return alarms, misses


# --- one run -------------------------------------------------------------------------------------


def one_run_p_value(
    canaries: int, guesses: int, correct: int, epsilon: float, delta: float
) -> float:
    """Return an upper bound on the probability that an (epsilon, delta)-DP mechanism allows this
    many correct guesses in one run.

    Steinke, Nasr & Jagielski 2023, thm. 5.2: m canaries each take one of two forms by a fair coin,
    an attacker guesses r of the coins from one run's output, and V guesses are right. With q =
    e^epsilon / (1 + e^epsilon) and B ~ Binomial(r, q), for every v

        P[V >= v]  <=  P[B >= v]  +  2 m delta  max over 1 <= i <= v of  P[v - i <= B < v] / i.

    Coins choose between two records in one place, so the mechanism's neighbours are those of
    silodp: replace one record. Raise ValueError for numbers that contradict each other.
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(
            f"{correct} right of {guesses} guesses about {canaries} canaries is impossible"
        )
    q = 1 / (1 + math.exp(-epsilon))
    tail = float(stats.binom.sf(correct - 1, guesses, q))
    below = np.cumsum(stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, q))
    if correct:
        alpha = float((below / np.arange(1, correct + 1)).max())
    else:
        alpha = 0.0
    return min(1.0, tail + 2 * canaries * delta * alpha)


def one_run_epsilon(canaries: int, guesses: int, correct: int, delta: float, level: float) -> float:
    """Return the largest epsilon that this many correct guesses refute. The true epsilon is below
    it with probability at most `level`.
    """
    if guesses == 0 or one_run_p_value(canaries, guesses, correct, 0.0, delta) > level:
        return 0.0
    high = 1.0
    while high < 64 and one_run_p_value(canaries, guesses, correct, high, delta) <= level:
        high *= 2
    if high >= 64:
        return 64.0
    root = optimize.brentq(
        lambda e: one_run_p_value(canaries, guesses, correct, e, delta) - level,
        0.0,
        high,
        xtol=1e-6,
    )
    return float(root)  # type: ignore[arg-type]
