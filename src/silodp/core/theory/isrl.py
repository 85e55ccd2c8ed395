"""Evaluate the paper's ISRL-DP theorems: what they prescribe and what they promise.

They prescribe R, K, q, step and noise, and promise upper and lower bounds. This is pure arithmetic.

Bounds are the expressions inside O(.) and Omega(.) with constant 1. Where a printed constant does
not satisfy the proof that it belongs to, the corrected value is prescribed and the printed one is
in `Prescription.printed`. Each docstring names the correction and the reason. Exact accounting
(PAPER-NOTES section 3) needs less noise for the same guarantee. This module evaluates the theorems
as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import ceil, floor, log, log2, sqrt
from typing import Any, TypeVar

from silodp.core.errors import BadInput

Theorem = TypeVar("Theorem")

_SYMBOL = {
    "lipschitz": "L",
    "smoothness": "beta",
    "pl": "mu, the proximal-PL constant",
    "gap": "Delta, a bound on F(w_0) - F*",
    "diameter": "D",
}
_COUNT = {"records": "n", "silos": "N", "answering": "M", "dimension": "d"}
UPSILON = "upsilon^2, the heterogeneity of the silos, is taken at its largest value L^2"
EXCHANGEABLE = (
    "M = N (for M < N the proof takes the records of the M answering silos for a uniform "
    "sample of all records)"
)


@dataclass(frozen=True, kw_only=True)
class Constants:
    """L, beta, mu, Delta, n, N, M, d, epsilon and delta of a problem.

    Raise BadInput for a value that no theorem can use.
    """

    lipschitz: float
    smoothness: float
    pl: float | None = None
    gap: float | None = None
    diameter: float | None = None
    records: int
    silos: int
    answering: int
    dimension: int
    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        for name, symbol in (_SYMBOL | _COUNT | {"epsilon": "of the guarantee"}).items():
            value = getattr(self, name)
            if value is None and name in ("pl", "gap", "diameter"):
                continue
            if name in _COUNT:
                kind = int
                wanted = "a whole number from 1"
            else:
                kind = int | float
                wanted = "a positive number from 1e-20"
            if isinstance(value, bool) or not isinstance(value, kind) or not 1e-20 <= value <= 1e20:
                raise BadInput(f"{name} ({symbol}) must be {wanted} to 1e20, got {value!r}.")
        if self.answering > self.silos:
            raise BadInput(
                f"answering (M) must be at most silos (N = {self.silos}), got {self.answering}."
            )
        if not isinstance(self.delta, float) or not 0 < self.delta < 0.5:
            raise BadInput(f"delta must lie strictly between 0 and 1/2, got {self.delta!r}.")

    @property
    def log_delta(self) -> float:
        """Return ln(1/delta)."""
        return -log(self.delta)

    @property
    def privacy(self) -> float:
        """Return d ln(1/delta) / (epsilon^2 n^2), one silo's squared privacy error in units of
        L^2.
        """
        return self.dimension * self.log_delta / (self.epsilon * self.records) ** 2

    def need(self, name: str, theorem: str) -> float:
        """Return the constant `name`. Raise BadInput if it was left out."""
        value = getattr(self, name)
        if value is None:
            raise BadInput(
                f"{name} ({_SYMBOL[name]}) is missing: {theorem} needs it as a positive number."
            )
        return value


@dataclass(frozen=True, kw_only=True)
class Promise:
    """A theorem evaluated: its bound as a formula, and the conditions on the constants."""

    theorem: str
    formula: str
    conditions: tuple[tuple[str, bool], ...]
    notes: tuple[str, ...]

    @property
    def applies(self) -> bool:
        """Return whether every condition is satisfied."""
        return all(holds for _, holds in self.conditions)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        conditions = [
            {"condition": sentence, "holds": holds} for sentence, holds in self.conditions
        ]
        return asdict(self) | {
            "conditions": conditions,
            "notes": list(self.notes),
            "applies": self.applies,
        }


@dataclass(frozen=True, kw_only=True)
class LowerBound(Promise):
    """A bound that no algorithm of the theorem's class beats, up to a constant."""

    value: float


@dataclass(frozen=True, kw_only=True)
class Prescription(Promise):
    """What to run and what it promises.

    - `noise` maps the paper's symbols to standard deviations per silo and coordinate.
    - `output` is "w_0" if the paper answers with the start and asks no silo. Noise is then empty,
      as it is for K = 0.
    - `rounds` is R, of each of the S restarts.
    - `log_factor` is what the tilde of O(.) hides, or 1.
    - `printed` has what the paper prints for the corrected symbols, with noise at the R and q
      prescribed here.
    """

    algorithm: str
    output: str
    rounds: int
    batch: int
    phase: int | None = None
    epochs: int | None = None
    inner_steps: int | None = None
    restarts: int = 1
    step: float
    noise: Mapping[str, float]
    upper_bound: float
    log_factor: float = 1.0
    printed: Mapping[str, float] = field(default_factory=dict)


def prox_sgd(c: Constants) -> Prescription:
    """Return the prescription of Noisy Prox-SGD (thm. "hetero pl fl proxgrad").

    It has disjoint batches K = floor(n/R), step 1/(2 beta) and output w_R.

    Corrected: sigma^2 = 16 L^2 ln(1/delta) / (epsilon K)^2, as prop. "gauss" gives for sensitivity
    2L/K under epsilon <= 2 ln(1/delta). The printed 8 under epsilon <= min(8 ln(1/delta), 15) is
    not private there (at epsilon = 15, delta = 1e-5 it has 28 times that delta).
    """
    mu = c.need("pl", "Noisy Prox-SGD")
    gap = c.need("gap", "Noisy Prox-SGD")
    kappa = c.smoothness / mu
    M = c.answering
    n = c.records
    run = sgd_run(c, mu * gap / c.lipschitz**2 * min(M * n, M / c.privacy))
    first, *others = run.pop("conditions")
    K = run["batch"]
    noise: dict[str, float] = {}
    printed: dict[str, float] = {}
    if K:
        scale = c.lipschitz * sqrt(c.log_delta) / (c.epsilon * K)
        noise["sigma"] = 4 * scale
        printed["sigma"] = sqrt(8) * scale
    return Prescription(
        theorem="Noisy Prox-SGD: heterogeneous PPL FL, part 1",
        formula=(
            "E F(w_R) - F* = O~((L^2/mu) (kappa^2 d ln(1/delta) / (epsilon^2 n^2 M) + kappa/(M n)))"
        ),
        conditions=(
            first,
            ("epsilon <= 2 ln(1/delta), which the noise needs", c.epsilon <= 2 * c.log_delta),
            *others,
        ),
        notes=(
            (
                "for M < N and unlike silos the error has a further term of order "
                "(N-M)/(M(N-1)) L^2/mu that no n removes"
            ),
        ),
        noise=noise,
        upper_bound=c.lipschitz**2 / mu * (kappa**2 * c.privacy / M + kappa / (M * n)),
        printed=printed,
        **run,
    )


def sgd_run(c: Constants, target: float) -> dict[str, Any]:
    """Return what both theorems on Prox-SGD prescribe alike.

    They run rounds until the gap has shrunk to 1/`target` of its start, on disjoint batches.
    """
    kappa = c.smoothness / c.need("pl", "Prox-SGD")
    R = max(1, ceil(2 * kappa * log(target)))
    K = c.records // R
    return {
        "conditions": (
            ("epsilon <= min(8 ln(1/delta), 15)", c.epsilon <= min(8 * c.log_delta, 15)),
            ("mu <= beta", kappa >= 1),
            ("n >= R, so that K = floor(n/R) >= 1", K >= 1),
            (
                (
                    "the logarithm in R is positive (else w_0 already meets the bound, and R is "
                    "set to 1)"
                ),
                target > 1,
            ),
            (EXCHANGEABLE, c.silos == c.answering),
        ),
        "algorithm": "prox-sgd",
        "output": "w_R",
        "rounds": R,
        "batch": K,
        "step": 1 / (2 * c.smoothness),
        "log_factor": max(1.0, log(target)) ** 2,
    }


def prox_svrg(c: Constants, *, restarts: int | None = None) -> Prescription:
    """Return the prescription of Prox-SVRG (thm. "ISRL-DP prox PL SVRG ERM").

    It has S restarts of E epochs of Q = floor(n/K) steps, with R = E Q >= 48 kappa. Without
    `restarts` it is one call, which halves the gap up to noise (eq. "26thing", with the 1/mu that
    its noise lost).

    Corrected:

    - R = 48 kappa, since 3 Delta/(eta mu R) <= Delta/2 at the proof's eta <= 1/(8 beta). The
      printed 12 kappa drops the 8.
    - sigma_2^2 has 4096 for the sensitivity 4L/K of a difference (printed 1024, PAPER-NOTES 2.16).
    - The delta of S E and S R releases gives ln(5SE/delta) and ln(5SR/delta) (printed 5E and 2.5R).
    - The M < N term is divided by mu, as in the proof.
    """
    mu = c.need("pl", "Prox-SVRG")
    L = c.lipschitz
    M = c.answering
    n = c.records
    S = restarts or 1
    kappa = c.smoothness / mu
    ln2 = log(2) + c.log_delta
    least = max(1.0, 48 * kappa)
    # K >= n/(48 kappa) keeps one epoch from having more rounds than needed. It only makes the
    # theorem's "K >= ..." stricter.
    K = min(
        n,
        ceil(
            max((n * n / M) ** (1 / 3), c.epsilon * n / (4 * sqrt(2 * S * least * ln2)), n / least)
        ),
    )
    run = svrg_run(c, K, restarts, L**2 * c.privacy / (mu * M), "M")
    E = run["epochs"]
    R = run["rounds"]

    def std(constant: float, releases: int, logged: float) -> float:
        """Return the std of a kind of release, from its constant, count and logarithm."""
        return L * sqrt(constant * releases * ln2 * (log(logged) + c.log_delta)) / (c.epsilon * n)

    theorem = "Noisy Prox-PL-SVRG: ERM, part 1"
    if not restarts:
        theorem += " (its proof, for one call of Prox-SVRG)"
    return Prescription(
        theorem=theorem,
        conditions=(
            ("epsilon <= min(2 ln(2/delta), 15)", c.epsilon <= min(2 * ln2, 15)),
            (
                "K >= epsilon n / (4 sqrt(2 S R ln(2/delta)))",
                c.epsilon * n <= 4 * K * sqrt(2 * S * R * ln2),
            ),
            (
                "epsilon <= 4 sqrt(2 S E ln(2/delta)), which the anchors' Gaussian mechanism needs",
                c.epsilon <= 4 * sqrt(2 * S * E * ln2),
            ),
            ("mu <= beta", kappa >= 1),
        ),
        notes=(
            (
                "batches must be drawn without replacement: with replacement 4L/K is no "
                "sensitivity (PAPER-NOTES 2.3)"
            ),
            UPSILON,
        ),
        noise={"sigma_1": std(256, S * E, 5 * S * E), "sigma_2": std(4096, S * R, 5 * S * R)},
        log_factor=S * (log(5 * S * R) + c.log_delta),
        printed={
            "R": 12 * kappa,
            "sigma_1": std(256, S * E, 5 * E),
            "sigma_2": std(1024, S * R, 2.5 * R),
        },
        **run,
    )


def svrg_run(
    c: Constants, K: int, restarts: int | None, private: float, silos: str
) -> dict[str, Any]:
    """Return what both theorems on Prox-SVRG prescribe alike, at batches of K.

    `private` is the squared error of one round, and `silos` the M in its formula.
    """
    gap = c.need("gap", "Prox-SVRG")
    kappa = c.smoothness / c.need("pl", "Prox-SVRG")
    L = c.lipschitz
    M = c.answering
    N = c.silos
    n = c.records
    Q = c.records // K
    E = ceil(max(1.0, 48 * kappa) / Q)
    R = E * Q
    absent = (N - M) / (M * max(N - 1, 1)) * L**2 / c.need("pl", "Prox-SVRG")
    if restarts:
        factor = "kappa"
        error = kappa * private
    else:
        factor = "24 kappa Delta/R + R"
        error = 24 * kappa * gap / R + R * private
    return {
        "formula": (
            f"E Fhat(w) - Fhat* = O~({factor} L^2 d ln(1/delta) / (mu epsilon^2 n^2 {silos})"
            " + upsilon^2 (N-M) / (mu M (N-1)))"
        ),
        "algorithm": "prox-svrg",
        "output": "uniform over the iterates",
        "rounds": R,
        "batch": K,
        "epochs": E,
        "inner_steps": Q,
        "restarts": restarts or 1,
        "step": min(1.0, K**1.5 * sqrt(M) / n) / (8 * c.smoothness),
        "upper_bound": absent + error,
    }


def prox_pl_svrg(c: Constants) -> Prescription:
    """Return the prescription of Prox-PL-SVRG (same theorem).

    It has S = ceil(log_2(Delta mu M epsilon^2 n^2 / (kappa d L^2))) restarts of `prox_svrg`, at
    least one.
    """
    mu = c.need("pl", "Prox-PL-SVRG")
    gap = c.need("gap", "Prox-PL-SVRG")
    ratio = (
        gap
        * mu**2
        * c.answering
        * (c.epsilon * c.records) ** 2
        / (c.smoothness * c.dimension * c.lipschitz**2)
    )
    return replace(
        prox_svrg(c, restarts=max(1, ceil(log2(ratio)))), algorithm="prox-pl-svrg", output="w_S"
    )


def spider(c: Constants) -> Prescription:
    """Return the prescription of FedProx-SPIDER (thm. "ISRL-DP proxspider", complete statement, M
    <= N).

    It has full batches, phase q and step 1/(2 beta). In `noise`, sigma_1 is for anchors. A
    difference has std min(sigma_2 ||w_r - w_{r-1}||, sigma_2_hat). Let X = epsilon n L sqrt(M) /
    sqrt(d ln(1/delta) Delta beta). Below X = 1 the paper outputs w_0. From there on, q = 1 needs no
    condition.

    Corrected:

    - Half of rho = epsilon^2 / (8 ln(1/delta)) pays for the ceil(R/q) anchors, half for the other
      rounds (PAPER-NOTES 2.4: as printed they cost (2 - 1/q) rho together).
    - The rounds are r = 0..R-1, all that the output w_1..w_R uses (printed 0..R).
    - q = (X/8)^(2/3), or min((X/16)^(2/3), n M/2) for M < N, so that q <= 1/(eta^2 tau_2^2) with
      this sigma_2 (printed without 8, 16, 2).
    """
    gap = c.need("gap", "FedProx-SPIDER")
    L = c.lipschitz
    M = c.answering
    n = c.records
    beta = c.smoothness
    everyone = c.answering == c.silos
    X = L * sqrt(M / (c.privacy * gap * beta))
    runs = X >= 1  # otherwise the paper's output is the start
    formula = (
        "E ||G_eta(w)||^2 = O((sqrt(L beta Delta d ln(1/delta)) / (epsilon n sqrt(M)))^(4/3)"
        " + L^2 d ln(1/delta) / (epsilon^2 n^2 M)"
    )
    if everyone:
        longest = (X / 8) ** (2 / 3)
        longest_printed = X ** (2 / 3)
        partial = 0.0
        formula += ")"
    else:
        longest = min((X / 16) ** (2 / 3), n * M / 2)
        longest_printed = min(X ** (2 / 3), n * M)
        partial = L * sqrt(beta * gap * c.privacy / n) / M + L**2 / (M * n)
        formula += " + L sqrt(beta Delta d ln(1/delta)) / (epsilon n^(3/2) M) + L^2/(M n))"
    q = max(1, floor(longest))
    output = "w_0"
    R = 1
    noise: dict[str, float] = {}
    printed: dict[str, float] = {"q": floor(longest_printed)}
    if runs:
        output = "uniform over w_1..w_R"
        R = ceil(sqrt(M * q * gap * beta / c.privacy) / L)
        anchors = -(-R // q)
        differences = R - anchors
        scale = 4 * sqrt(c.log_delta) / (c.epsilon * n)
        if differences:
            noise["sigma_1"] = scale * L * sqrt(2 * anchors)
            noise["sigma_2"] = scale * beta * sqrt(2 * differences)
            noise["sigma_2_hat"] = 2 * scale * L * sqrt(2 * differences)
        else:
            noise["sigma_1"] = scale * L * sqrt(anchors)
        printed["sigma_1"] = scale * L * sqrt(max(R / q, 1))
        printed["sigma_2"] = scale * beta * sqrt(R)
        printed["sigma_2_hat"] = 2 * scale * L * sqrt(R)
    return Prescription(
        theorem="ISRL-DP FedProx-SPIDER, complete statement",
        formula=formula,
        conditions=(
            ("epsilon <= 2 ln(1/delta)", c.epsilon <= 2 * c.log_delta),
            ("q >= 1 as printed (else the answer is w_0)", runs),
            (EXCHANGEABLE, everyone),
        ),
        notes=(
            (
                "w_0 meets the bound for q < 1 only if ||G_eta(w_0)|| <= L, as for an "
                "indicator f1 with w_0 in its set"
            ),
            "for M < N and unlike silos the last two terms lose their 1/sqrt(n) and 1/n",
        ),
        algorithm="spider",
        output=output,
        rounds=R,
        batch=n,
        phase=q,
        step=1 / (2 * beta),
        noise=noise,
        upper_bound=(L * beta * gap * c.privacy / M) ** (2 / 3) + L**2 * c.privacy / M + partial,
        printed=printed,
    )


_ALGORITHMS = {
    "prox-sgd": prox_sgd,
    "prox-svrg": prox_svrg,
    "prox-pl-svrg": prox_pl_svrg,
    "spider": spider,
}


def prescribe(algorithm: str, constants: Constants) -> Prescription:
    """Return the theorem of `algorithm` (prox-sgd, prox-svrg, prox-pl-svrg, spider) at these
    constants.
    """
    return theorem_of(algorithm, _ALGORITHMS)(constants)


def theorem_of(algorithm: str, theorems: Mapping[str, Theorem]) -> Theorem:
    """Return the theorem of an algorithm. Raise BadInput if there is none."""
    if algorithm not in theorems:
        raise BadInput(f"algorithm must be one of {', '.join(theorems)}, got {algorithm!r}.")
    return theorems[algorithm]


def prescribe_hybrid(algorithm: str, constants: Constants) -> Prescription:
    """Return the prescription for ISRL-DP and (epsilon, delta) user-level DP at once.

    This is app. "hybrid lower bounds": run at (epsilon/n, delta/(4n)). Corrected: the printed upper
    bound takes square roots of d ln(1/delta_0), N and Nn that the Prox-SGD theorem does not have.
    """
    n = constants.records
    epsilon = constants.epsilon
    plan = prescribe(
        algorithm, replace(constants, epsilon=epsilon / n, delta=constants.delta / (4 * n))
    )
    conditions = (
        ("user-level epsilon <= 1", epsilon <= 1),
        ("M = N", constants.answering == constants.silos),
        *plan.conditions,
    )
    return replace(
        plan,
        theorem=f"{plan.theorem}, at (epsilon/n, delta/(4n)) for user-level DP",
        conditions=conditions,
    )


KINDS = ("smooth-convex", "strongly-convex-erm", "strongly-convex-so", "convex-so")


def least_error(
    c: Constants, kind: str, privacy: float, formula: str, kinds: Sequence[str]
) -> tuple[float, str]:
    """Return the value and text of a lower bound for this kind of problem.

    `privacy` is its privacy term, and `formula` that term's text. Raise BadInput for an unknown
    kind.
    """
    if kind not in kinds:
        raise BadInput(f"kind must be one of {', '.join(kinds)}, got {kind!r}.")
    if kind == "smooth-convex":
        value = c.lipschitz**2 * min(1.0, privacy)
        return value, f"E ||grad Fhat(w)||^2 = Omega(L^2 min(1, {formula}))"
    if kind == "convex-so":
        value = (
            c.lipschitz
            * c.need("diameter", "a convex lower bound")
            * min(1.0, sqrt(privacy) + 1 / sqrt(c.silos * c.records))
        )
        return value, f"E F(w) - F* = Omega~(L D min(1, 1/sqrt(n N) + sqrt({formula})))"
    error = privacy
    if kind == "strongly-convex-so":
        error = error + 1 / (c.silos * c.records)
        formula = f"1/(n N) + {formula}"
    value = c.lipschitz**2 / c.need("pl", "a strongly convex lower bound") * min(1.0, error)
    return value, f"E F(w) - F* = Omega~((L^2/mu) min(1, {formula}))"


def lower_bound(
    constants: Constants,
    kind: str,
    *,
    compositionality: float = 1.0,
    rounds: int | None = None,
    loudest: float | None = None,
) -> LowerBound:
    """Return the lower bound for symmetric C-compositional ISRL-DP algorithms.

    C = `compositionality` (sqrt(R) for Prox-SGD) divides privacy by C^4. `kind` is one of these:

    - "smooth-convex": thm. "LDP lower bound", squared gradient norm.
    - "strongly-convex-erm" and "strongly-convex-so": lr21fl, as far as the paper's near-optimality
      remarks state them, that is its upper bounds without powers of kappa.
    - "convex-so": lr21fl, excess risk over a set of diameter D, from memory and not checked against
      the text.
    - "hybrid": the ERM one with n = 1.

    `rounds` is R, if every silo is asked in each round. It is None if a silo is asked once in total
    (sequentially interactive). `loudest` is epsilon_r of the round that spends most. By default it
    is C epsilon / sqrt(R), as if all rounds spend alike. Raise BadInput for a value out of range.
    """
    c = constants
    total = constants.silos * constants.records
    if kind == "hybrid":  # the bound for n = 1
        records = 1
        one_silo = c.privacy * c.records**2
        n2 = ""
    else:
        records = c.records
        one_silo = c.privacy
        n2 = "n^2 "
    if not 1 <= compositionality <= 1e20:
        raise BadInput(
            f"compositionality (C) must be a number from 1 to 1e20, got {compositionality!r}."
        )
    if rounds is not None and not 1 <= rounds <= 1e20:
        raise BadInput(f"rounds (R) must be a whole number from 1 to 1e20, got {rounds!r}.")
    privacy = one_silo / (c.silos * compositionality**4)
    value, formula = least_error(
        c, kind, privacy, f"d ln(1/delta) / (epsilon^2 {n2}N)", (*KINDS, "hybrid")
    )
    if rounds is None:
        least = "16 ln(14 N)"
        allowed = 14 * c.silos
    else:
        least = "16 ln(28 N R)"
        allowed = 28 * c.silos * rounds
    if loudest is None:
        loudest = compositionality * c.epsilon / sqrt(rounds or 1)
    return LowerBound(
        theorem=f"ISRL-DP lower bound, {kind}",
        formula=formula,
        conditions=(
            ("M = N", c.answering == c.silos),
            ("epsilon <= sqrt(N)", c.epsilon <= sqrt(c.silos)),
            ("2^(-n N) <= delta < 1/(n N)", log(total) < c.log_delta <= total * log(2)),
            (
                f"N >= {least}, the least that N >= 16 ln(2/(delta_r n)) allows",
                c.silos >= 16 * log(allowed),
            ),
            ("epsilon_r <= 1/n in every round", loudest * records <= 1),
        ),
        notes=("the shuffling argument hides ln^2(1/(n N delta_min)) in the denominator",),
        value=value,
    )
