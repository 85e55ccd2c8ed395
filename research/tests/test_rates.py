"""The study of rates measures what it says: true constants, the theorems' noise within its budget,
exact risks, and slopes with errors.
"""

import csv
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from research import __main__ as cli
from research import figures, rates
from research.rates import Line, carried, log_slope, point, schedule
from research.rates_problems import (
    DELTA,
    LENGTH,
    RADIUS,
    Size,
    constants,
    empirical_optimum,
    make_problem,
    make_records,
    mean_of,
)
from silodp.core.errors import BadInput
from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import Budget
from silodp.core.problem.problem import Problem
from silodp.core.problem.prox import GroupL1, L2Ball, Zero
from silodp.core.sampling import FullBatch
from silodp.core.theory.isrl import lower_bound, prescribe
from silodp.server.plan import with_multipliers
from silodp.silo.data.records import Records
from silodp.testing.evaluate import mapping_norm, training_loss

SIZE = Size(40, 4, 3, 4.0)
ALGORITHMS = {
    "prox-sgd": "risk",
    "prox-svrg": "risk",
    "prox-pl-svrg": "risk",
    "spider": "mapping",
    "spider-alternate": "mapping",
    "accelerated": "risk",
    "localized": "convex",
}


@pytest.fixture
def here(monkeypatch):
    """Points are computed in this process."""
    monkeypatch.setattr(rates, "spread", lambda work, tasks, **_: (work(*task) for task in tasks))


# --- the mapping norm ----------------------------------------------------------------------------


def unequal() -> Records:
    """Silos of 5 and 2 records: each silo counts the same, whatever its number of records."""
    random = np.random.default_rng(0)
    x, y = torch.zeros(2, 5, 1), torch.zeros(2, 5, 3)
    for i, n in enumerate((5, 2)):
        x[i, :n], y[i, :n] = (
            torch.from_numpy(random.normal(size=(n, 1))),
            torch.from_numpy(random.normal(size=(n, 3))),
        )
    return Records(x, y, (5, 2), ("a", "b"))


@pytest.mark.parametrize("measure", ["risk", "mapping"])
def test_without_a_penalty_the_mapping_norm_is_the_norm_of_the_gradient_of_the_training_loss(
    measure,
):
    problem, records = make_problem(measure, 3), unequal()
    smooth = Problem(problem.model, problem.loss, Zero())
    w = torch.tensor([[0.3, -0.2, 0.5], [1.0, 0.0, 2.0]])

    def loss(v: torch.Tensor) -> torch.Tensor:
        per_silo = [
            smooth.losses(v, records.x[i, :n], records.y[i, :n]).mean(-1)
            for i, n in enumerate(records.counts)
        ]
        return torch.stack(per_silo).mean(0).sum()

    gradient = torch.func.grad(loss)(w)
    for step in (0.1, 2.0):
        assert mapping_norm(smooth, w, records, step) == pytest.approx(
            gradient.norm(dim=-1).tolist(), rel=1e-5
        )


def test_with_a_constraint_it_is_zero_at_the_constrained_minimum_and_not_at_the_free_one():
    records = make_records("risk", SIZE, 0)
    best, _ = empirical_optimum(records)
    tight = Problem(
        make_problem("risk", 3).model, make_problem("risk", 3).loss, L2Ball(float(best.norm()) / 2)
    )
    at = (
        torch.stack([best / 2, best]).float()
    )  # the risk is a multiple of ||w - best||^2, so its least point in the ball is best / 2
    norms = mapping_norm(tight, at, records, 0.1)
    assert norms[0] == pytest.approx(0, abs=1e-5)
    assert norms[1] == pytest.approx(float(best.norm()) / 2 / 0.1, rel=1e-4)


def test_a_penalty_that_outweighs_the_gradient_makes_zero_stationary():
    problem, records = make_problem("mapping", 3), make_records("mapping", SIZE, 0)
    strong = Problem(problem.model, problem.loss, GroupL1(2.0, ((0, 3),)))
    at = torch.zeros(1, 3)
    assert mapping_norm(strong, at, records, 0.3).item() == 0
    assert mapping_norm(problem, at, records, 0.3).item() > 0.1


# --- the problems --------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", ["risk", "mapping", "near"])
def test_the_constants_hold_for_every_record(measure):
    c, records = constants(measure, SIZE), make_records(measure, replace_n(400), 1)
    problem = make_problem(measure, 3)
    radius = RADIUS if measure == "risk" else 1.0
    points = (
        torch.nn.functional.normalize(
            torch.randn(60, 3, generator=torch.Generator().manual_seed(0)), dim=-1
        )
        * radius
    )
    x, y = records.x.flatten(0, 1), records.y.flatten(0, 1)

    def gradients(w: torch.Tensor) -> torch.Tensor:
        one = torch.func.grad(lambda w, a, b: problem.losses(w[None], a[None], b[None]).sum())
        return torch.func.vmap(torch.func.vmap(one, (None, 0, 0)), (0, None, None))(w, x, y)

    at = gradients(points)
    norms = at.norm(dim=-1)
    assert norms.max() <= c.lipschitz * (1 + 1e-5)
    assert (
        norms.max() > 0.7 * c.lipschitz
    )  # a constant far too large would pass too, and its noise drown everything
    moves = (points[1:] - points[:-1]).norm(dim=-1)[:, None]
    assert ((at[1:] - at[:-1]).norm(dim=-1) <= c.smoothness * moves * (1 + 1e-4)).all()
    start = torch.zeros(1, 3)
    assert training_loss(problem, start, records).item() <= c.gap + (
        0
        if measure == "mapping"
        else training_loss(problem, torch.cat([points, 0.3 * points]), records).min()
    )


def test_the_mean_of_linear_losses_is_as_long_as_the_bound_and_no_record_longer_than_the_clip():
    size = Size(40, 120, 3, 1.0)
    records, c = make_records("convex", size, 0), constants("convex", size)
    assert records.y.norm(dim=-1).max() <= c.lipschitz
    assert mean_of(size) == pytest.approx(LENGTH * lower_bound(c, "convex-so").value)
    assert records.y.mean((0, 1)).norm().item() == pytest.approx(mean_of(size), rel=0.2)


def replace_n(n: int) -> Size:
    return Size(n, SIZE.N, SIZE.d, SIZE.epsilon)


def test_the_empirical_excess_risk_is_the_difference_of_training_losses():
    problem, records = make_problem("risk", 3), make_records("risk", SIZE, 2)
    best, curvature = empirical_optimum(records)
    w = torch.tensor([[0.1, 0.2, -0.3]])
    excess = training_loss(problem, w.double(), doubled(records)) - training_loss(
        problem, best[None], doubled(records)
    )
    assert curvature * (w.double() - best).square().sum(-1).item() == pytest.approx(
        excess.item(), rel=1e-9
    )


def doubled(records: Records) -> Records:
    return Records(records.x.double(), records.y.double(), records.counts, records.names)


# --- schedules and noise -------------------------------------------------------------------------


def test_noise_is_the_theorems_for_prox_sgd_and_spider():
    c = constants("risk", Size(2000, 16, 10, 2.0))
    plan, noisy = prescribe("prox-sgd", c), schedule("prox-sgd", c).mechanisms["minibatch"]
    assert noisy.noise_multiplier * 2 * c.lipschitz / plan.batch == pytest.approx(
        plan.noise["sigma"]
    )
    c = constants("mapping", Size(400, 16, 10, 4.0))
    plan, noisy = prescribe("spider", c), schedule("spider", c).mechanisms
    assert plan.phase > 1
    assert noisy["anchor"].noise_multiplier * 2 * c.lipschitz / 400 == pytest.approx(
        plan.noise["sigma_1"]
    )
    assert noisy["refine"].noise_multiplier * 2 * c.smoothness / 400 == pytest.approx(
        plan.noise["sigma_2"]
    )


@pytest.mark.parametrize("size", [Size(60, 4, 3, 0.5), Size(100, 16, 5, 12.0)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_schedule_spends_most_of_its_epsilon_and_no_more_and_yields_what_is_counted(
    algorithm, size
):
    c = constants(ALGORITHMS[algorithm], size)
    plan = schedule(algorithm, c)
    priced = with_multipliers(
        plan.run, plan.mechanisms, (size.n,) * size.N, Budget(size.epsilon, DELTA)
    )
    spent = priced.spent().max()
    assert 0.4 * size.epsilon < spent <= size.epsilon
    steps = sum(
        1
        for _ in plan.run(
            Silent(),
            make_problem(ALGORITHMS[algorithm], size.d),
            torch.zeros(1, size.d),
            **plan.mechanisms,
        )
    )
    assert plan.counted.stop == steps - (
        algorithm == "prox-pl-svrg"
    )  # whose last iterate is one of the others, yielded again


class Silent:
    """A federation that answers zero to everything."""

    def mean(self, query):
        return torch.zeros(query.statistic.shape)

    def cohort(self):
        return self


# --- slopes --------------------------------------------------------------------------------------


def test_the_slope_and_its_error_are_those_of_least_squares():
    slope, error = log_slope((1, 2, 4), (8.0, 2.0, 0.5), (0.0, 0.0, 0.0))
    assert (slope, error) == (pytest.approx(-2), 0)
    random = np.random.default_rng(0)
    means = np.exp(0.05 * random.normal(size=(4000, 3)))
    slopes = [log_slope((1, 3, 20), row, 0.05 * row)[0] for row in means]
    assert np.std(slopes) == pytest.approx(
        log_slope((1, 3, 20), means[0], 0.05 * means[0])[1], rel=0.05
    )


def line(
    algorithm: str, against: str, values: tuple, exponent: float, base: Size, runs: int = 12
) -> Line:
    return Line(
        "a theorem", algorithm, ALGORITHMS[algorithm], against, exponent, base, values, 1, runs
    )


def test_the_verdict_asks_the_exponent_first_and_the_schedule_second():
    one = line("spider", "epsilon", (1.0, 2.0), -4 / 3, SIZE)
    assert rates.verdict(one, -1.3, 0.02, -1.0) == "agrees"
    assert rates.verdict(one, -1.0, 0.02, -1.03) == "agrees as run"
    assert rates.verdict(one, -0.5, 0.02, -1.0) == "flatter"


def test_four_times_the_epsilon_is_a_sixteenth_of_the_excess_risk(here, tmp_path):
    """False-alarm rate 1e-4 or less: the standard error of the slope is 0.04 to 0.08, and four of
    them are allowed.
    """
    fits = rates.measure(
        tmp_path, lines=[line("prox-svrg", "epsilon", (3.5, 14.0), -2.0, Size(128, 4, 10, 7.0))]
    )
    assert 0.01 < fits[0]["slope_error"] < 0.1
    assert abs(fits[0]["slope"] + 2) < 4 * fits[0]["slope_error"]
    assert fits[0]["as_run"] == pytest.approx(-2)


def test_every_point_is_in_the_table_and_the_same_seed_gives_the_same_numbers(here, tmp_path):
    lines = [
        line("spider", "n", (30, 60), -4 / 3, Size(30, 4, 2, 2.0), 2),
        line("prox-sgd", "d", (2, 4), 1.0, Size(200, 4, 2, 5.0), 2),
    ]
    fits = rates.measure(tmp_path, lines=lines)
    rows = list(csv.DictReader((tmp_path / "rates.csv").read_text().splitlines()))
    assert [(r["algorithm"], r["n"], r["d"]) for r in rows] == [
        ("spider", "30", "2"),
        ("spider", "60", "2"),
        ("prox-sgd", "200", "2"),
        ("prox-sgd", "200", "4"),
    ]
    assert json.loads((tmp_path / "rates.json").read_text()) == fits
    _, again = point(*lines[0].key(lines[0].sizes[0]), 0)
    assert float(again.mean()) == fits[0]["points"][0]["value"]
    assert (
        rates.read(tmp_path / "rates.csv", lines) == fits
    )  # so that a figure is redrawn from the table alone
    with pytest.raises(
        BadInput, match=r"is not a table of this study \(its prox-sgd against d differs\)"
    ):
        rates.read(tmp_path / "rates.csv", lines[::-1])


def test_a_lower_bound_is_known_and_drawn_where_its_conditions_hold_and_nowhere_else(
    tmp_path, monkeypatch
):
    """N >= 16 ln(28 N R), which is 213 silos for R = 100, and epsilon_r = epsilon / sqrt(R) <= 1/n,
    which n = 100 has at epsilon 0.1.
    """
    size = Size(100, 16, 10, 0.099)
    many = line("prox-svrg", "N", (16, 212, 213, 400), -1.0, size)
    loud = line("prox-svrg", "epsilon", (0.099, 0.101), -2.0, replace(size, N=400))

    def hundred(algorithm, c):
        noisy = Gaussian(
            "anchor", c.lipschitz, 20 * math.sqrt(c.log_delta) / c.epsilon, FullBatch()
        )
        return rates.Schedule(iter, {"anchor": noisy}, range(1), 100, 1.0)

    monkeypatch.setattr(rates, "schedule", hundred)
    measured = {"runs": 2, "value": 1.0, "standard_error": 1e-5}
    fits = [rates.fit(one, [measured] * len(one.values)) for one in (many, loud)]
    known = [[p["lower_bound"] for p in fit["points"]] for fit in fits]
    assert [[bound is not None for bound in row] for row in known] == [
        [False, False, True, True],
        [True, False],
    ]
    assert known[0][3] == pytest.approx(known[0][2] * 213 / 400)
    drawn = []
    monkeypatch.setattr(figures, "_save", lambda figure, stem, suffixes: drawn.append(figure))
    figures.draw_rates(fits, tmp_path)
    dotted = [
        tuple(curve.get_xdata())
        for ax in drawn[0].axes
        for curve in ax.get_lines()
        if curve.get_linestyle() == ":"
    ]
    assert sorted(dotted) == [(0.099,), (213, 400)]
    assert "dotted lower bound" in drawn[0].get_suptitle()


@pytest.mark.parametrize("algorithm", ["prox-sgd", "accelerated", "localized", "spider"])
def test_the_loudest_round_decides_whether_a_bound_holds(algorithm):
    """On disjoint batches each round has the whole epsilon; R equal rounds have epsilon / sqrt(R)
    each; SPIDER's anchors tell more than its differences.
    """
    size = Size(100, 400, 3, 4.0)
    c = constants(ALGORITHMS[algorithm], size)
    plan, one = schedule(algorithm, c), line(algorithm, "N", (400,), -1.0, size)
    anchors = -(-plan.rounds // (prescribe("spider", c).phase or 1)) if algorithm == "spider" else 1
    share = {"localized": plan.rounds**-0.5, "spider": (2 * anchors) ** -0.5}.get(algorithm, 1.0)
    for n, holds in ((0.99, True), (1.01, False)):
        few = replace(c, records=1, epsilon=n / share)
        quiet = replace(
            plan,
            mechanisms={
                k: replace(m, noise_multiplier=m.noise_multiplier * 4.0 * share / n)
                for k, m in plan.mechanisms.items()
            },
        )
        assert (
            dict(rates.bound_of(one, few, quiet).conditions)["epsilon_r <= 1/n in every round"]
            == holds
        )


def test_the_bound_of_prox_sgd_is_that_of_its_own_class():
    """It is sqrt(R)-compositional, so the private term of the bound is R^2 times smaller."""
    c = constants("risk", Size(500, 128, 10, 4.0))
    plain, rounds = lower_bound(c, "strongly-convex-so").value, prescribe("prox-sgd", c).rounds
    sampled = c.lipschitz**2 / 2.0 / (500 * 128)
    bound = rates.bound_of(
        line("prox-sgd", "N", (128,), -1.0, Size(500, 128, 10, 4.0)), c, schedule("prox-sgd", c)
    ).value
    assert rounds > 1
    assert bound - sampled == pytest.approx((plain - sampled) / rounds**2, rel=1e-6)


def test_totals_of_an_sdp_line_have_the_noise_of_one_release_of_all_records(here, tmp_path):
    """Their mean's standard deviation is that of ISRL-DP divided by sqrt(N), up to what rounding
    and the Renyi order add; N then has the exponent of n.
    """
    size = Size(400, 16, 4, 4.0)
    c = constants("risk", size)
    plan = schedule("prox-sgd", rates.effective(c, "sdp"))
    total = rates.priced(plan, c, "sdp").mechanisms["minibatch"]
    batch = plan.mechanisms["minibatch"].sampling.batch(size.n)
    std = (
        2
        * c.lipschitz
        / int(total.levels)
        * np.sqrt((int(total.noise_bits) + 1) / 4 / (size.N * batch))
    )
    alone = 2 * c.lipschitz / batch * float(plan.mechanisms["minibatch"].noise_multiplier)
    assert 1.0 < std / (alone / size.N) < 1.1
    assert {
        one.against: one.exponent for one in rates.study() if one.theorem == "SDP Prox-SGD, PPL"
    }["N"] == -2


def test_long_phases_carry_all_of_an_anchors_noise_and_short_ones_a_part():
    short, long = (
        next(one for one in rates.study() if one.theorem == name)
        for name in ("FedProx-SPIDER", "FedProx-SPIDER, long phases")
    )
    far, near = (
        [rates.regime_of(one, constants(one.measure, size)) for size in one.sizes]
        for one in (short, long)
    )
    assert max(r["carried"] for r in far) / min(r["carried"] for r in far) > 2
    assert min(r["carried"] for r in near) > 0.8
    assert min(r["phase"] for r in near) > max(r["phase"] for r in far) / 2
    assert all(r["phase"] == max(1, int((r["X"] / 8) ** (2 / 3))) for r in far + near)


def test_the_command_prints_a_row_for_each_line_and_draws(here, monkeypatch, tmp_path):
    few = [
        line("prox-svrg", "N", (2, 4), -1.0, Size(16, 4, 2, 7.0), 2),
        line("spider", "d", (2, 4), 2 / 3, Size(30, 4, 2, 2.0), 2),
    ]
    monkeypatch.setattr(rates, "study", lambda: few)
    done = CliRunner().invoke(cli.app, ["rates", "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    assert done.output.count("a theorem") == 2
    assert {p.name for p in (tmp_path / "run").iterdir()} >= {
        "rates.csv",
        "rates.json",
        "rates.png",
        "rates.svg",
        "environment.json",
    }
    assert "4/3" in done.output


def test_an_interrupt_is_one_sentence(monkeypatch, tmp_path):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(rates, "measure", interrupted)
    done = CliRunner().invoke(cli.app, ["rates", "--out", str(tmp_path)])
    assert done.exit_code == 130
    assert (
        done.stderr
        == "silodp: interrupted; nothing is kept, since the whole study takes a few minutes\n"
    )


def test_the_study_keeps_to_the_theorems_conditions():
    for one in rates.study():
        for size in one.sizes:
            c = rates.effective(constants(one.measure, size), one.trust)
            assert rates.prescribed(one.algorithm, c).applies, (one.algorithm, size)


@pytest.mark.parametrize("phase", [1, 2, 7])
def test_the_share_of_an_anchors_noise_that_is_carried_is_what_steps_on_a_parabola_carry(phase):
    noise, w, total = np.random.default_rng(0).normal(size=20000), 0.0, 0.0
    for xi in noise:
        for _ in range(phase):
            w -= 0.3 * (w + xi)
            total += w * w
    assert total / (phase * len(noise)) == pytest.approx(carried(phase, 0.3), rel=0.05)
