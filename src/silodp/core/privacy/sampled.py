"""Price one release on a sampled batch, by our own integral or by a library.

The library's units are translated here and nowhere else.
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
    """Return the Renyi divergence of one release at this order, for neighbours that replace one
    record.
    """
    n = int(n)
    if noise_multiplier == 0:
        return math.inf
    match sampling:
        case Poisson(rate):
            return _renyi_poisson(rate, noise_multiplier, order)
        case WithoutReplacement():
            from dp_accounting.rdp import rdp_privacy_accountant as library

            # Here the library reads noise_multiplier as std / replace-one sensitivity, as we do.
            # Above 1e6 its formula loses all digits. The price falls in it, so the bound is safe.
            bounded = min(noise_multiplier, 1e6)
            event = _dp_event().SampledWithoutReplacementDpEvent(
                n, int(sampling.batch(n)), _dp_event().GaussianDpEvent(bounded)
            )
            accountant = library.RdpAccountant([order], library.NeighborRel.REPLACE_ONE)
            accountant.compose(event)
            # a sampled batch never costs more than a full one
            return min(float(accountant.rdp[0]), order / (2 * noise_multiplier**2))
    return order / (2 * noise_multiplier**2)


def _renyi_poisson(rate: float, noise_multiplier: float, order: float) -> float:
    """Return the Renyi divergence of a release on a Poisson batch.

    The pair is (1-q) N(0, s^2) + q N(1, s^2) and (1-q) N(0, s^2) + q N(-1, s^2), with s = std /
    clip = 2 noise multipliers. That pair dominates Poisson sampling under replace-one. It is its
    own mirror image, so both directions agree. The integrand is smooth and decays like a Gaussian.
    So the trapezium rule on a fine grid converges faster than any power of its step.
    """
    s = 2 * noise_multiplier
    full_batch = order / (2 * noise_multiplier**2)
    # The tilted integrand has its peak at or below 2 order - 1, with the base's width.
    reach = 12 * s + 2 * order
    if reach / s > 1e4:
        # With so little noise, sampling hides too little to be worth a fine grid.
        return full_batch
    t = np.linspace(-reach, reach, 2 * math.ceil(reach / s * 64) + 1)
    if rate < 1:
        log_absent = math.log1p(-rate)
    else:
        log_absent = -math.inf
    log_p = np.logaddexp(log_absent, math.log(rate) + (2 * t - 1) / (2 * s * s))
    log_q = np.logaddexp(log_absent, math.log(rate) + (-2 * t - 1) / (2 * s * s))
    log_base = -t * t / (2 * s * s) - math.log(s) - 0.5 * math.log(2 * math.pi)
    log_sum = special.logsumexp(log_base + order * log_p + (1 - order) * log_q) + math.log(
        2 * reach / (len(t) - 1)
    )
    # This rounds up by more than the sum can have lost. So no release is free, and none costs more
    # than on a full batch.
    divergence = (max(0.0, float(log_sum)) * (1 + 1e-9) + 1e-12) / (order - 1)
    return min(divergence, full_batch)


def _dp_event():
    """Return the library's module of events, which is slow to load."""
    from dp_accounting import dp_event

    return dp_event


def pld_event(sampling: Sampling, noise_multiplier: float):
    """Return the library's event for a release.

    Unit trap: under REPLACE_ONE the PLD accountant reads noise_multiplier as std / clip, twice our
    std / sensitivity. Raise BadInput for other samplings than full and Poisson batches.
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
