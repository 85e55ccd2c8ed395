"""What one release on a sampled batch costs: by our own integral, or by a library, whose units are
translated here and nowhere else.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from scipy import special

from silodp.core.errors import BadInput
from silodp.core.sampling import FullBatch, Poisson, Sampling, WithoutReplacement


@functools.lru_cache(maxsize=65536)
def renyi(sampling: Sampling, noise_multiplier: float, order: float, n: int) -> float:
    """Renyi divergence of one release at this order, replace-one."""
    n = int(n)
    if noise_multiplier == 0:
        return math.inf
    match sampling:
        case Poisson(rate):
            return _renyi_poisson(rate, noise_multiplier, order)
        case WithoutReplacement():
            from dp_accounting.rdp import rdp_privacy_accountant as library

            # The library reads noise_multiplier as std / replace-one sensitivity here: our own
            # unit.
            bounded = min(
                noise_multiplier, 1e6
            )  # beyond, its formula loses all digits; the price falls in it
            event = _dp_event().SampledWithoutReplacementDpEvent(
                n, int(sampling.batch(n)), _dp_event().GaussianDpEvent(bounded)
            )
            accountant = library.RdpAccountant([order], library.NeighborRel.REPLACE_ONE)
            accountant.compose(event)
            return min(
                float(accountant.rdp[0]), order / (2 * noise_multiplier**2)
            )  # sampling never costs more than none
    return order / (2 * noise_multiplier**2)


def _renyi_poisson(rate: float, noise_multiplier: float, order: float) -> float:
    """Renyi divergence between (1-q) N(0, s^2) + q N(1, s^2) and (1-q) N(0, s^2) + q N(-1, s^2), s
    = std / clip = 2 noise multipliers.

    That pair dominates Poisson sampling under replace-one; it is its own mirror image, so both
    directions agree. The integrand is smooth and decays like a Gaussian, so the trapezium rule on a
    fine grid converges faster than any power of its step.
    """
    s = 2 * noise_multiplier
    reach = (
        12 * s + 2 * order
    )  # the tilted integrand sits at or below 2 order - 1, with the base's width
    if reach / s > 1e4:
        return order / (
            2 * noise_multiplier**2
        )  # so little noise that sampling hides nothing worth a fine grid: the price without it
    t = np.linspace(-reach, reach, 2 * math.ceil(reach / s * 64) + 1)
    log_p = np.logaddexp(
        math.log1p(-rate) if rate < 1 else -math.inf, math.log(rate) + (2 * t - 1) / (2 * s * s)
    )
    log_q = np.logaddexp(
        math.log1p(-rate) if rate < 1 else -math.inf, math.log(rate) + (-2 * t - 1) / (2 * s * s)
    )
    log_base = -t * t / (2 * s * s) - math.log(s) - 0.5 * math.log(2 * math.pi)
    log_sum = special.logsumexp(log_base + order * log_p + (1 - order) * log_q) + math.log(
        2 * reach / (len(t) - 1)
    )
    # rounded up by more than the sum can have lost: no release is ever free, and none dearer than
    # without sampling
    return min(
        (max(0.0, float(log_sum)) * (1 + 1e-9) + 1e-12) / (order - 1),
        order / (2 * noise_multiplier**2),
    )


def _dp_event():
    from dp_accounting import dp_event

    return dp_event


def pld_event(sampling: Sampling, noise_multiplier: float):
    """Unit trap: under REPLACE_ONE the PLD accountant reads noise_multiplier as std / clip, twice
    our std / sensitivity.
    """
    gaussian = _dp_event().GaussianDpEvent(2 * noise_multiplier)
    match sampling:
        case FullBatch():
            return gaussian
        case Poisson(rate):
            return _dp_event().PoissonSampledDpEvent(rate, gaussian)
    raise BadInput(
        f"no privacy-loss distribution is known for {type(sampling).__name__} batches "
        "under replace-one; use the renyi rule"
    )
