"""The report of the audit: every algorithm at every claim, a table, a run folder, and the picture
of the trade-off curves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from rich.table import Table
from scipy import stats

from silodp.audit.bounds import (
    epsilon_lower,
    epsilon_of,
    gdp_fit,
    gdp_lower,
    refuted,
    trade_off,
)
from silodp.audit.canary import neighbours
from silodp.audit.claims import FACTOR, of_plan
from silodp.audit.masked import COHORT, COLLUDING, attack_masked
from silodp.audit.pipeline import SOUND
from silodp.audit.shuffled import (
    attack_numbers,
    attack_shuffled,
    attack_totals,
)
from silodp.audit.transcript import Case, attack, attack_deployed, attack_persons
from silodp.core.errors import BadInput
from silodp.core.privacy.accounting import Budget, gdp_mu
from silodp.core.sampling import DisjointBatches, Poisson, WithoutReplacement
from silodp.host import atomic
from silodp.server.algorithms import ALGORITHMS, find
from silodp.simulation.runfolder import make_folder, write_environment
from silodp.simulation.sweep import Tick, spread

CLAIMS = (1.0, 6.0)
ALARM = 1e-6
"""False-alarm rate of a row. An alarm is raised if the estimate is above the claim at confidence
1 - ALARM.
"""

SETTINGS: dict[str, dict[str, float]] = {
    "mb-sgd": {"rounds": 4},
    "prox-sgd": {"rounds": 4},
    "prox-svrg": {"rounds": 6, "inner": 3, "slope": 1.0},
    "spider": {"rounds": 6, "phase": 3, "slope": 1.0},
    "local-sgd": {"rounds": 3, "local_steps": 2},
    "prox-pl-svrg": {"restarts": 2, "rounds": 6, "inner": 3, "slope": 1.0},
    "spider-alternate": {"rounds": 3, "slope": 1.0},
    "diff2": {"rounds": 6, "phase": 3, "slope": 1.0},
    "diff2-local": {"rounds": 4, "phase": 2, "local_steps": 2, "slope": 1.0},
    "scaffold": {"rounds": 3, "local_steps": 2},
    "momentum": {"rounds": 4, "momentum": 0.5},
    "scaled": {"rounds": 2, "momentum": 0.5},
    "adam": {"rounds": 4, "momentum": 0.9},
    "disk": {"rounds": 4, "kappa": 0.7},
    "accelerated": {"rounds": 4, "restarts": 2, "strong": 0.1},
    "localized": {"rounds": 4, "stages": 2, "pull": 0.1, "growth": 8.0},
    "one-shot": {},
}
SHORT = {"rounds": 4, "phase": 2, "local_steps": 2, "inner": 2, "restarts": 2}
"""Settings of any other algorithm that takes them. The rounds are few, because an attack listens to
all of them.
"""
SECRET = (
    "the attacker does not know who is in a batch; its scores are not Gaussian, and the fit "
    "understates their tails"
)
RENYI = (
    "no tight accountant is known for this sampling under replace-one; the Renyi bound charges "
    "more than an attacker can learn"
)

ATTACKS: dict[str, tuple[str, Callable[..., tuple[np.ndarray, np.ndarray]]]] = {
    "simulated": ("", attack),
    "deployed": ("deployed gate", attack_deployed),
    "shuffle": ("totals of a shuffle", attack_shuffled),
    "persons": ("a person of 20 rows", attack_persons),
    "persons of changing rows": ("a person of 1 row or 20", partial(attack_persons, first=1)),
    "deployed shuffle": ("totals of deployed silos", attack_totals),
    "deployed numbers": ("one silo's numbers at the shuffler", attack_numbers),
    "deployed masks": (f"masked totals, {COLLUDING} of {COHORT} silos colluding", attack_masked),
}
"""What is attacked, in words (of the simulated gate there is nothing to say), and how, by the name
of the gate.
"""
PERSONS = ("persons", "persons of changing rows")

TOTALS = ("shuffle", "deployed shuffle", "deployed numbers", "deployed masks")

TOTAL_CLAIMS = (1.0, 3.0, 6.0)
"""Claims of the rows of totals, where no others are asked for."""

TOTAL_FACTOR = 1.2
"""A row of totals has power if it alarms where the noise is that of a claim so many times as large.
"""
SHUFFLED = ("prox-sgd", "prox-svrg", "spider")


def cases(
    algorithms: Sequence[str] | None = None,
    epsilons: Sequence[float] = CLAIMS,
    given: dict[str, Any] | None = None,
) -> list[tuple[Case, str]]:
    """Return (case, gate) of every row: each algorithm on its own batches, then sub-sampled
    batches, then the deployed gate's arithmetic, then persons and totals.

    An algorithm is a name or FILE.py:NAME. `given` are the settings of the user's own algorithm.
    Raise BadInput if there is none.
    """
    others = [name for name in algorithms or ALGORITHMS if name not in SETTINGS]
    if given and not others:
        raise BadInput(
            "--set is for an algorithm whose schedule the audit does not fix; name one by "
            "--algorithm FILE.py:NAME"
        )
    settings = SETTINGS | {name: find(name).schedule(SHORT | (given or {})) for name in others}
    rows = [(Case(a, e, s), "simulated") for a, s in settings.items() for e in epsilons]
    rows += [
        (Case("mb-sgd", e, {"rounds": 16}, Poisson(0.25), gap=SECRET), "simulated")
        for e in epsilons
    ]
    rows += [
        (Case("mb-sgd", e, {"rounds": 4}, WithoutReplacement(0.25), gap=RENYI), "simulated")
        for e in epsilons
    ]
    rows += [(Case("mb-sgd", e, {"rounds": 1}), "deployed") for e in epsilons]
    rows += [(Case("mb-sgd", e, {"rounds": 4}), g) for g in PERSONS for e in epsilons]
    of_totals = TOTAL_CLAIMS if tuple(epsilons) == CLAIMS else epsilons
    rows += [(Case(a, e, SETTINGS[a]), "shuffle") for a in SHUFFLED for e in of_totals]
    rows += [(Case("mb-sgd", e, {"rounds": 2}), g) for g in TOTALS[1:] for e in of_totals]
    return [(case, gate) for case, gate in rows if not algorithms or case.algorithm in algorithms]


def row_of(case: Case, gate: str, runs: int, seed: int) -> dict[str, Any]:
    """One row: the claim, the point estimate, a 95 % bound, whether it is an alarm, whether it
    would be at FACTOR times the claim, the curve.

    Where the claim is not one of Gaussian differential privacy, an alarm is a refuted (epsilon,
    delta) of the accountant's, at any delta.

    Scores of totals are Gaussian, and so is the claim: an alarm is an estimate of mu above the
    claim's by as many standard errors as ALARM allows, which needs fewer runs than counting.
    """
    began = time.monotonic()
    first, second = _scores(case, gate, runs, seed)
    mu, error = gdp_fit(first, second)
    sees = True
    if gate in TOTALS:
        lower = epsilon_of(mu - 1.645 * error, case.delta)
        alarm = _above(mu, error, case)
        louder = replace(case, epsilon=TOTAL_FACTOR * case.epsilon)
        sees = _above(*gdp_fit(*_scores(louder, gate, runs, seed + 3 * runs)), case)
    elif gate in ("simulated", "deployed", *PERSONS) and not case.batches.sampled:
        lower, surely = (
            epsilon_of(gdp_lower(first, second, level), case.delta) for level in (0.05, ALARM)
        )
        alarm = surely > case.epsilon
    else:  # the claim is not one of Gaussian differential privacy
        lower = epsilon_lower(first, second, case.delta, 0.05)
        held = of_plan(case.plan(neighbours()[0].counts, SOUND), case.budget)
        alarm = refuted(first, second, held, ALARM)
        sees = refuted(
            *_scores(replace(case, epsilon=FACTOR * case.epsilon), gate, runs, seed + 3 * runs),
            held,
            ALARM,
        )
    alarms, misses = trade_off(first, second)
    return {
        "algorithm": case.algorithm,
        "sampling": _words(case),
        "gate": gate,
        "claimed_epsilon": case.epsilon,
        "delta": case.delta,
        "empirical_epsilon": epsilon_of(mu, case.delta),
        "confidence": 0.95,
        "lower_bound": lower,
        "fit_interval": [epsilon_of(mu + z * error, case.delta) for z in (-1.96, 1.96)],
        "runs": runs,
        "mu": mu,
        "claimed_mu": gdp_mu(case.budget),
        "alarm": alarm,
        "sees": sees,
        "gap": case.gap,
        "seconds": round(time.monotonic() - began, 1),
        "curve": {"false_alarm": alarms.tolist(), "miss": misses.tolist()},
    }


def _above(mu: float, error: float, case: Case) -> bool:
    """Return whether normal scores so far apart refute the claim, with the false-alarm rate
    ALARM.
    """
    return mu - float(stats.norm.isf(ALARM)) * error > gdp_mu(case.budget)


def _scores(case: Case, gate: str, runs: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores of an attack. Deployed gates draw from the operating system, and take no
    seed.
    """
    _, attack_gate = ATTACKS[gate]
    if gate.startswith("deployed"):
        return attack_gate(case, runs)
    return attack_gate(case, runs, seed=seed)


def _words(case: Case) -> str:
    """Return the sampling of a case in words."""
    match case.batches:
        case Poisson(rate):
            return f"poisson:{rate:g}"
        case WithoutReplacement(rate):
            return f"without-replacement:{rate:g}"
        case DisjointBatches():
            return "disjoint"
    return "full"


def _task(index: int, case: Case, gate: str, runs: int, seed: int) -> tuple[int, dict[str, Any]]:
    """Return the index of a row, and the row."""
    return index, row_of(case, gate, runs, seed)


def audit(
    algorithms: Sequence[str] | None,
    epsilons: Sequence[float],
    *,
    runs: int,
    seed: int,
    tick: Tick,
    given: dict[str, Any],
) -> list[dict[str, Any]]:
    """Return all rows, computed on all cores. Every row has seeds of its own."""
    rows: dict[int, dict[str, Any]] = {}
    tasks = [
        (i, case, gate, runs, seed + 6 * i * runs)
        for i, (case, gate) in enumerate(cases(algorithms, epsilons, given))
    ]
    # Rows with a gap calibrate for seconds, so they start first.
    slow_first = sorted(tasks, key=lambda task: task[1].gap == "")
    for index, row in spread(_task, slow_first, tick=tick):
        rows[index] = row
    return [rows[i] for i in sorted(rows)]


# --- what is shown and kept ----------------------------------------------------------------------


def name_of(row: dict[str, Any]) -> str:
    """Return the algorithm, and the special part of the row if there is one."""
    special = special_of(row)
    if special:
        return f"{row['algorithm']}, {special}"
    return row["algorithm"]


def special_of(row: dict[str, Any]) -> str:
    """Return what is attacked, or the sampling if it explains a gap, or an empty text."""
    attacked = ATTACKS[row["gate"]][0]
    if not attacked and row["gap"]:
        return row["sampling"]
    return attacked


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the rows as a table for the terminal."""
    drawn = Table(
        title=(
            "Epsilon that an attacker gets out of a silo's transcript or from totals, from 2 "
            f"x {max(row['runs'] for row in rows)} runs at most"
        )
    )
    drawn.add_column("attack on", justify="left", no_wrap=True)
    for column in ("claim", "estimate", "95 % bound", "alarm"):
        drawn.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        numbers = (
            f"{row['claimed_epsilon']:g}",
            f"{row['empirical_epsilon']:.2f}",
            f"{row['lower_bound']:.2f}",
        )
        if row["alarm"]:
            drawn.add_row(name_of(row), *numbers, "YES", style="bold red")
        else:
            drawn.add_row(name_of(row), *numbers, "no", style="")
    return drawn


def write(
    rows: Sequence[dict[str, Any]], folder: Path, answers: Sequence[dict[str, Any]] = ()
) -> None:
    """Write audit.csv, curves.csv, audit.json, audit.png, audit.svg and environment.json, and
    answers.csv if there are answers.
    """
    make_folder(folder)
    flat = [{k: v for k, v in row.items() if k != "curve"} for row in rows]
    atomic.write_json(folder / "audit.json", {"rows": flat, "answers": list(answers)})
    for name, kept in (("audit.csv", flat), ("answers.csv", answers)):
        if kept:
            atomic.write_table(folder / name, list(kept[0]), kept)
    named = ("algorithm", "sampling", "gate", "claimed_epsilon")
    points = (
        (*(row[name] for name in named), *point)
        for row in rows
        for point in zip(*row["curve"].values(), strict=True)
    )
    atomic.write_table(folder / "curves.csv", (*named, "false_alarm", "miss"), points)
    draw(rows, folder)
    write_environment(
        folder,
        noise=(
            "simulation: seeded pseudo-random float noise; rows of deployed silos: exact "
            "lattice noise"
        ),
    )


def draw(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Write audit.png and audit.svg: misses against false alarms, each attack beside the curve that
    its claim allows.
    """
    claims = sorted({row["claimed_epsilon"] for row in rows})
    figure, axes = plt.subplots(
        1, len(claims), figsize=(4.4 * len(claims) + 0.6, 4.4), layout="constrained", squeeze=False
    )
    grid = np.linspace(1e-4, 1 - 1e-4, 400)
    for claim, ax in zip(claims, axes[0], strict=True):
        at_claim = [row for row in rows if row["claimed_epsilon"] == claim]
        for row in at_claim:
            if row["gap"]:
                dotted = ":"
            elif row["gate"] != "simulated":
                dotted = "--"
            else:
                dotted = "-"
            label = f"{name_of(row)}: {row['empirical_epsilon']:.2f}"
            ax.plot(
                row["curve"]["false_alarm"], row["curve"]["miss"], dotted, linewidth=1, label=label
            )
        budget = Budget(claim, at_claim[0]["delta"])
        ax.plot(
            grid,
            stats.norm.cdf(stats.norm.isf(grid) - gdp_mu(budget)),
            color="black",
            linewidth=1.6,
            label="claim: no attack below this",
        )
        allowed = np.maximum(
            1 - budget.delta - np.exp(claim) * grid, np.exp(-claim) * (1 - budget.delta - grid)
        )
        ax.plot(
            grid, allowed.clip(0), color="grey", linewidth=0.8, label="the same as (epsilon, delta)"
        )
        ax.set(
            xlabel="false alarms",
            ylabel="misses",
            title=f"claim: epsilon = {claim:g}",
            xlim=(0, 1),
            ylim=(0, 1),
        )
        ax.grid(alpha=0.25)
        ax.legend(fontsize=6.5)
    figure.savefig(folder / "audit.png", dpi=150)
    # Without its date an SVG of the same rows has the same bytes.
    figure.savefig(folder / "audit.svg", dpi=150, metadata={"Date": None})
    plt.close(figure)
