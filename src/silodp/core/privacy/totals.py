"""How far a sum of rounded Gaussians is from a rounded Gaussian, and what pays for the distance.

In a total each of m honest silos adds real Gaussian noise to its integer sum and rounds once:
R_i = round(s_i + N(0, v_i)). Let V be the sum of the v_i and v the least of them. The claim of
docs/tightness.md, which has the proof: modulo M, the law of the sum of the R_i is within

    sqrt(M) (q^(m - 1) - 1) / (1 - exp(-2 pi^2 m v))

of that of T, in total variation, with q = 1 + 2 sum over j >= 1 of exp(-2 pi^2 v j^2 / m). T is
made from S + N(0, V) whatever S is, so a record that moves S by a vector t pays for Gaussian noise
of variance V: mu = |t| / sqrt(V), exactly.

**What pays for the distance.** An answer has d coordinates of independent noise, so that it is
within tau = d times that bound of one with exact Gaussian noise. Over a run, whatever is asked
next, these distances add up: the answers' laws are replaced one after the other. Let mu^2 be the
sum over the answers, and tau their sum. Then delta(epsilon) is at most that of mu-GDP plus (1 +
e^epsilon) tau. A price contains that term as an amount `paid` of mu^2: with mu'^2 = mu^2 + paid,

    delta_mu'(epsilon) >= delta_mu(epsilon) + (1 + e^epsilon) tau

wherever epsilon <= 3,000 and 10^-300 <= delta_mu' <= 1 - 10^-16: of every budget that a ledger is
made with but for an epsilon above 3,000, which promises nothing. Proof. d delta_mu / d mu is
phi(a), a = mu/2 - epsilon/mu, and delta <= Phi(a). So a is between -38 and 9, and phi(a) >= 0.7
10^-300 at mu'. As paid <= 10^-12 mu^2 (else the price is infinite), phi(a) is at least half of that
on [mu, mu']. With mu' <= 10^4 the difference is at least 10^-306 paid, and paid = 10^1610 tau >=
10^306 (1 + e^3000) tau.

**Whoever adapts.** Let prices add up to at most C = mu'^2 on every path. Then mu^2 <= C, and the
paid amounts add up to at most 10^-12 C, on every path. `gdp_mu` is rounded down by a part of
10^-12, so that the filter of mu^2 holds with a C that is larger by that part, and by the inequality
above this part pays for the distances of all paths.

At ordinary scales paid is below 10^-30,000 and vanishes in a float. It is computed all the same,
and each price is rounded up, by more than what vanishes.
"""

from __future__ import annotations

import math

from silodp.core.lattice import SHARE_STEPS

LEAST_STEPS = 2.0**17
"""The sensitivity 2 C in steps of the lattice, at least: `core.lattice.lattice_step`."""
COORDINATES = 2**26
"""Numbers of an answer at most."""
MODULUS_BITS = 64
LOG_WORTH = 1610 * math.log(10)
"""Log of the mu^2 that pays for a unit of total variation."""
PART = 1e-12
"""Of a price that the distance may take."""


def log_distance(scale: float, silos: int, modulus_bits: float) -> float:
    """Return the log of the bound on the total variation in one coordinate.

    Args:
        scale: Standard deviation of the least noise of a silo, in steps of the lattice.
        silos: The number m of honest silos.
        modulus_bits: Log to base 2 of the modulus M.
    """
    if silos == 1:
        return -math.inf
    rate = 2 * math.pi**2 * scale * scale
    a = rate / silos
    if not a > 0:
        return math.inf
    # j^2 >= 1 + 3 (j - 1), so that the sum in q is below a geometric series.
    log_p = math.log(2) - a - math.log(-math.expm1(-3 * a))
    log_x = math.log(silos - 1) + log_p
    if log_x < -40:
        excess = log_x + 1e-15  # (1 + p)^(m - 1) - 1 <= x e^x for x = (m - 1) p
    elif log_x < 6:
        excess = math.log(math.expm1((silos - 1) * math.log1p(math.exp(log_p))))
    else:
        return math.inf
    return modulus_bits / 2 * math.log(2) + excess - math.log(-math.expm1(-rate * silos))


def least_scale(noise_multiplier: float, counted: int) -> float:
    """Return the least size of a silo's share of the noise in steps of the total.

    These are steps of the lattice, or coarser ones of which the share has SHARE_STEPS at least for
    each root of a counted silo (`core.lattice.total_shift`).
    """
    return min(noise_multiplier * LEAST_STEPS, SHARE_STEPS * math.sqrt(counted))


def total_price(noise_multiplier: float, counted: int) -> float:
    """Return what one total costs in mu^2, the distance from Gaussian noise included.

    Args:
        noise_multiplier: The share: noise of one silo over sensitivity.
        counted: The silos whose shares the price counts on.
    """
    if not noise_multiplier > 0 or counted < 1:
        return math.inf
    price = 1 / (counted * noise_multiplier**2)
    log_tau = log_distance(least_scale(noise_multiplier, counted), counted, MODULUS_BITS)
    log_paid = log_tau + math.log(COORDINATES) + LOG_WORTH
    if log_paid > math.log(PART) + math.log(price):
        return math.inf
    return math.nextafter((price + math.exp(log_paid)) * (1 + 1e-15), math.inf)
