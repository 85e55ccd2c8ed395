"""Evaluate two theorems on convex losses under ISRL-DP, what they prescribe and promise.

They are from Lowy & Razaviyayn (2023) and Gao, Lowy, Zhou & Wright (2024). This is pure arithmetic.

Both are cited from memory and were not checked against their texts. As in `isrl`, bounds are the
expressions inside O(.) with constant 1. Noise is that of rho = epsilon^2 / (8 ln(1/delta)).
"""

from math import ceil, floor, log2, sqrt

from silodp.core.theory.isrl import EXCHANGEABLE, Constants, Prescription

MOST_STAGES = 60


def accelerated(c: Constants, *, stages: int | None = None) -> Prescription:
    """Return the prescription of one-pass accelerated MB-SGD in stages.

    It is for strongly convex losses and unlike silos (Lowy & Razaviyayn 2023), on disjoint batches
    K = floor(n/R) with output w^ag.

    A stage of 4 sqrt(2 kappa) rounds halves the gap. Unless `stages` is given, there are as many
    stages as bring the gap down to the noise that so many rounds leave. The stages of multi-stage
    AC-SA have another schedule. When noise dominates, later stages are longer, of the order of
    sigma^2/(mu e_k) rounds for a gap of e_k, and take smaller steps. Our stages are equally long
    and have one step. Steps are those of AC-SA, checked against a public implementation. The
    paper's own constants and this rate are cited from memory.
    """
    mu = c.need("pl", "accelerated MB-SGD")
    gap = c.need("gap", "accelerated MB-SGD")
    kappa = c.smoothness / mu
    M = c.answering
    n = c.records
    length = ceil(4 * sqrt(2 * kappa))
    noise = 16 * c.lipschitz**2 * c.privacy / (mu * M)
    S = stages or next(
        (s for s in range(1, MOST_STAGES) if gap / 2**s <= noise * (s * length) ** 2), MOST_STAGES
    )
    R = S * length
    K = n // R
    stds: dict[str, float] = {}
    if K:
        stds["sigma"] = 4 * c.lipschitz * sqrt(c.log_delta) / (c.epsilon * K)
    return Prescription(
        theorem="One-pass accelerated MB-SGD: heterogeneous, strongly convex",
        formula="E F(w) - F* = O~((L^2/(mu M)) (1/n + sqrt(kappa) d ln(1/delta) / (epsilon^2 n^2)))",  # noqa: E501
        conditions=(
            ("epsilon <= 2 ln(1/delta), which the noise needs", c.epsilon <= 2 * c.log_delta),
            ("mu <= beta", kappa >= 1),
            ("n >= R, so that K = floor(n/R) >= 1", K >= 1),
            (EXCHANGEABLE, c.silos == M),
        ),
        notes=(
            (
                "for convex losses that are not strongly convex its private term is not "
                "optimal; see localized"
            ),
        ),
        algorithm="accelerated",
        output="w_R",
        rounds=R,
        batch=K,
        restarts=S,
        step=1 / (2 * c.smoothness),
        noise=stds,
        upper_bound=c.lipschitz**2 / (mu * M) * (1 / n + sqrt(kappa) * c.privacy),
        log_factor=float(R**2),
    )


def pull(c: Constants) -> float:
    """Return lambda of the first stage: the rate over D^2."""
    D = c.need("diameter", "localized MB-SGD")
    return c.lipschitz / D * (1 / sqrt(c.answering * c.records) + sqrt(c.privacy / c.answering))


def localized(c: Constants) -> Prescription:
    """Return the prescription of localized accelerated MB-SGD (Gao et al. 2024, convex, smooth).

    It runs on full batches, and the accountant prices R rounds for what R rounds cost.

    lambda and its growth by 8 a stage, which the paper has for M <= n^4, are from memory. The first
    stage has 2 sqrt(1 + beta/lambda) rounds, which an accelerated method needs. There are log_2 of
    all rounds stages, and at most log_2 n.
    """
    D = c.need("diameter", "localized MB-SGD")
    R = 2 * ceil(2 * sqrt(1 + c.smoothness / pull(c)))
    return Prescription(
        theorem="Localized accelerated MB-SGD: heterogeneous, convex",
        formula="E F(w) - F* = O~(L D (1/sqrt(n M) + sqrt(d ln(1/delta)) / (epsilon n sqrt(M))))",
        conditions=(
            ("epsilon <= 2 ln(1/delta), which the noise needs", c.epsilon <= 2 * c.log_delta),
            (EXCHANGEABLE, c.silos == c.answering),
        ),
        notes=(
            (
                "the paper's stages have disjoint records; with all records in each the bound "
                "is on the empirical risk, up to what F differs"
            ),
        ),
        algorithm="localized",
        output="w_R",
        rounds=R,
        batch=c.records,
        restarts=min(floor(log2(R)), max(1, floor(log2(c.records)))),
        step=1 / (2 * c.smoothness),
        noise={"sigma": 4 * c.lipschitz * sqrt(R * c.log_delta) / (c.epsilon * c.records)},
        upper_bound=pull(c) * D**2,
    )
