"""Survival curves from one noisy histogram: the life table without noise, intervals that cover with
it, and the price of one release.
"""

import json
import math

import numpy as np
import pytest
from torch import nn
from typer.testing import CliRunner

from silodp.cli.app import app
from silodp.core.errors import BadInput
from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import GDP, Budget
from silodp.core.problem.losses import Hazard
from silodp.core.problem.problem import Problem
from silodp.core.problem.schema import Label
from silodp.server.estimates.scoring import gaussian_for
from silodp.server.estimates.survival import curve, survival, survival_label
from silodp.server.federation import Everyone, Federation
from silodp.silo.answer.simulated import Simulated
from silodp.silo.data.records import Records
from silodp.silo.gate import Gate
from silodp.silo.ledger.memory import MemoryLedger
from silodp.wire.inprocess import InProcess

EDGES = (3.0, 6.0, 12.0, 18.0, 24.0)
LABEL = Label("survival", ("months", "died"), edges=EDGES)


def codes(random: np.random.Generator, n: int) -> np.ndarray:
    """Deaths at a rate of 0.03 a month, losses at half of it; as a silo's file is read."""
    death, loss = (
        random.exponential(1 / 0.03, n),
        np.minimum(random.exponential(1 / 0.015, n), 24.001),
    )
    last, event = np.searchsorted(EDGES, np.minimum(death, loss)), death <= loss
    return np.where(last < len(EDGES), 2 * last + event, 2 * last)


def cells(random: np.random.Generator, n: int) -> np.ndarray:
    return np.bincount(codes(random, n), minlength=2 * len(EDGES) + 1).astype(float)


def connected(
    data: list[np.ndarray], epsilon: float
) -> tuple[Federation, MemoryLedger, list[Budget]]:
    records, budgets = (
        Records.of([(np.zeros((len(y), 1), np.float32), y) for y in data]),
        [Budget(epsilon, 1e-6)] * len(data),
    )
    ledger, problem = (
        MemoryLedger(GDP(), budgets, records.counts),
        Problem(nn.Linear(1, 5), Hazard(5)),
    )
    gate = Gate(Simulated(problem, records, [7]), ledger, dim=problem.dim, counts=records.counts)
    return Federation(InProcess(gate), Everyone(len(data))), ledger, budgets


def test_without_noise_it_is_the_life_table_with_greenwoods_interval():
    """100 people; in the first bin 10 die and 20 are lost, in the second 15 die and 5 are lost, and
    50 remain.
    """
    first, second = curve(np.array([20.0, 10, 5, 15, 50]), 0.0, 100, (1.0, 2.0))
    q1, q2 = 10 / (100 - 10), 15 / (70 - 2.5)
    assert first["survival"] == pytest.approx(1 - q1)
    assert second["survival"] == pytest.approx((1 - q1) * (1 - q2))
    greenwood = math.sqrt(10 / (90 * 80) + 15 / (67.5 * 52.5))
    assert second["low"] == pytest.approx(second["survival"] * math.exp(-1.959964 * greenwood))
    assert second["high"] == pytest.approx(second["survival"] * math.exp(1.959964 * greenwood))


@pytest.mark.parametrize(("n", "noise"), [(1000, 0.0), (1000, 8.0), (300, 4.0)])
def test_the_intervals_cover_the_truth_with_the_noise_and_not_without_it(n, noise):
    """1,000 replications of five times each: 95 % has a standard error of 0.7 points at one time;
    four of them are allowed.
    """
    random, truth = np.random.default_rng(1), np.exp(-0.03 * np.array(EDGES))
    covered, unaware = np.zeros(len(EDGES)), np.zeros(len(EDGES))
    for _ in range(1000):
        noisy = cells(random, n) + noise * random.normal(size=2 * len(EDGES) + 1)
        covered += [
            row["low"] <= s <= row["high"]
            for row, s in zip(curve(noisy, noise, n, EDGES), truth, strict=True)
        ]
        unaware += [
            row["low"] <= s <= row["high"]
            for row, s in zip(curve(noisy, 0.0, n, EDGES), truth, strict=True)
        ]
    assert (covered >= 922).all()
    assert (covered <= 978).all()
    assert noise == 0 or (unaware < 900).all()


def test_a_curve_falls_and_ends_where_noise_hides_who_is_there():
    random = np.random.default_rng(2)
    rows = curve(cells(random, 300) + 18 * random.normal(size=11), 18.0, 300, EDGES)
    shown = [row["survival"] for row in rows if row["survival"] is not None]
    assert 0 < len(shown) < len(rows)
    assert all(a >= b for a, b in zip([1.0, *shown], shown, strict=False))
    assert rows[-1]["survival"] is None
    assert (rows[-1]["low"], rows[-1]["high"]) == (0.0, rows[len(shown) - 1]["high"])


def test_one_question_takes_the_budget_it_was_given_and_counts_each_record_once():
    random = np.random.default_rng(3)
    data = [codes(random, n) for n in (800, 300)]
    fed, ledger, budgets = connected(data, 0.5)
    found = survival(fed, gaussian_for("survival", budgets), LABEL, [800, 300])
    assert np.asarray(ledger.epsilon())[0].tolist() == pytest.approx([0.5, 0.5])
    assert found["records"] == 1100
    fed, _, _ = connected(data, math.inf)
    exact = survival(fed, Gaussian("survival", 1.0, 0.0), LABEL, [800, 300])["curve"]
    together = np.bincount(np.concatenate(data), minlength=11).astype(float)
    assert exact == [pytest.approx(row) for row in curve(together, 0.0, 1100, EDGES)]


def test_only_survival_times_have_a_curve():
    assert survival_label(LABEL) is LABEL
    for label in (None, Label("regression", ("days",))):
        with pytest.raises(BadInput, match='task = "survival"'):
            survival_label(label)


def test_the_command_prints_the_curve_its_price_and_draws_a_page(tmp_path):
    (tmp_path / "s.toml").write_text(
        '[columns.age]\ntype = "number"\nrange = [0, 110]\n[label]\ntask = '
        '"survival"\ntime = "months"\nevent = "died"\nedges = [3, 6]\n'
    )
    random = np.random.default_rng(4)
    for name in "ab":
        rows = [
            f"{random.uniform(20, 90):.0f},{random.uniform(0, 9):.2f},{random.integers(0, 2)}"
            for _ in range(400)
        ]
        (tmp_path / f"{name}.csv").write_text("\n".join(["age,months,died", *rows]) + "\n")
    words = [
        "stats",
        "survival",
        "--schema",
        "s.toml",
        "--silo",
        "a.csv",
        "--silo",
        "b.csv",
        "--epsilon",
        "2",
        "--page",
        "curve.html",
    ]
    words = [str(tmp_path / word) if "." in word else word for word in words]
    answer = json.loads(CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False).stdout)
    assert [row["time"] for row in answer["curve"]] == [3.0, 6.0]
    assert [silo["spent_epsilon"] for silo in answer["silos"]] == pytest.approx([2.0, 2.0])
    assert "The curve in numbers" in (tmp_path / "curve.html").read_text()
    said = CliRunner().invoke(app, words, catch_exceptions=False).stdout
    assert "The band includes the privacy noise" in said
    (tmp_path / "curve.html").write_text("somebody's own")
    with pytest.raises(BadInput, match="exists and is not a report"):
        CliRunner().invoke(app, words, catch_exceptions=False)
