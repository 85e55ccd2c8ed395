"""The verdict's plan, noise and vectorised runs: each training is what the algorithms and the
accountant say it is.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from research import verdict as lab
from research.verdict_local import drawn, local_round
from research.verdict_noise import Table, noise
from research.verdict_plan import (
    CONDITIONS,
    FIGURES,
    Arm,
    Unit,
    arms,
    grid,
    rate,
    records_of,
    reduced,
    sampling,
    spaced,
    units,
)
from research.verdict_runs import Splits, losses, problem_of, run, split_of
from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import Budget, composed_epsilon
from silodp.core.query import Query
from silodp.core.sampling import FullBatch, Poisson
from silodp.core.statistics import ClippedDiff, Grad
from silodp.engine.clipping import clipped_sum
from silodp.server.algorithms import find
from silodp.server.federation import Everyone
from silodp.server.plan import with_multipliers
from silodp.silo.answer.simulated import Simulated
from silodp.simulation.connect import simulate
from silodp.testing.evaluate import error_rate, training_loss

WBCD = replace(FIGURES["wbcd"], rounds=3, span=(-1, 0, 2), clips=(0.5, 5.0), phases=(2,), trials=2)
COUNTS = (285, 169)
PRIMARY = CONDITIONS["primary"]


def ported(trials, multiplier=0.0, drawn=FullBatch()):  # noqa: B008 -- frozen
    splits = [split_of("wbcd", t, None, "cpu", None) for t in trials]
    problem = problem_of(WBCD, splits[0], "cpu")
    noises = {
        kind: torch.full((3, 2), multiplier, dtype=torch.float64)
        for kind in ("minibatch", "anchor", "refine")
    }
    return problem, splits, Splits(problem, splits, trials, noises, drawn, None)


# --- the plan ------------------------------------------------------------------------------------


def test_the_plan_has_the_appendix_grids_and_the_files_batches():
    assert spaced(-9, 0, 5)[0] == pytest.approx(math.exp(-9), rel=1e-5)
    assert np.allclose(np.diff(np.log(spaced(-9, 0, 15))), 9 / 14, atol=1e-4)
    assert rate(FIGURES["wbcd"], PRIMARY, Arm("mb-sgd"), 3.0) == pytest.approx(0.4899, abs=1e-4)
    assert rate(FIGURES["mnist-M25-R50"], PRIMARY, Arm("spider", 4), 3.0) == pytest.approx(
        2 * rate(FIGURES["mnist-M25-R50"], PRIMARY, Arm("alternate"), 3.0)
    )
    assert sampling(FIGURES["wbcd"], PRIMARY, Arm("spider", 5), 3.0) == FullBatch()
    small, other = (
        rate(FIGURES["cifar10-R50"], CONDITIONS["small"], Arm("mb-sgd"), e) for e in (0.75, 24.0)
    )
    assert small == pytest.approx(math.sqrt(0.75 / 50) / 2), "the text's"
    assert other == rate(FIGURES["cifar10-R50"], PRIMARY, Arm("mb-sgd"), 0.75)
    assert all(
        figure.trials >= 20 for name, figure in FIGURES.items() if not name.startswith("cifar")
    )
    assert [
        len(grid(FIGURES[f], PRIMARY, Arm("mb-sgd")))
        for f in ("wbcd", "mnist-M25-R25", "cifar10-R50", "cifar10-R100")
    ] == [
        60,
        25,
        72,
        48,
    ]


def test_more_records_are_of_cifar10_alone_and_phases_on_a_part_of_its_grid():
    many, figure = CONDITIONS["many"], FIGURES["cifar10-R50"]
    assert [name for name, f in FIGURES.items() if arms(f, many)] == ["cifar10-R50", "cifar10-R100"]
    assert (records_of(figure, PRIMARY), records_of(figure, many)) == (1000, 4800)
    assert all(
        grid(figure, many, arm) == grid(figure, PRIMARY, arm)
        for arm in (Arm("mb-sgd"), Arm("alternate"))
    )
    few, every = (
        [(p["step"], p["clip"]) for p in grid(figure, c, Arm("spider", 2))] for c in (many, PRIMARY)
    )
    assert (len(few), set(few) <= set(every), max(few) == max(every)) == (12, True, True)


def test_every_batch_of_the_reduced_protocol_has_a_record():
    """The text's batches are the smallest: on 20 records at epsilon 0.75 they had less than one,
    and the command ended there.
    """
    for figure in (reduced(f) for f in FIGURES.values() if f.dataset != "wbcd"):
        for condition in CONDITIONS.values():
            shares = [
                rate(figure, condition, arm, e)
                for arm in arms(figure, condition)
                for e in (0.75, 3.0, 18.0)
            ]
            assert all(share * records_of(figure, condition) >= 1 for share in shares)


def test_phase_1_is_mb_sgd_and_has_its_noise_except_in_the_file():
    for condition in CONDITIONS.values():
        ones = [
            arm
            for arm in arms(FIGURES["wbcd"], condition)
            if arm.curve == "spider" and arm.phase == 1
        ]
        assert len(ones) == (condition.noise == "file")


def test_a_units_name_says_which_it_is():
    every = [unit.key for name in FIGURES for c in CONDITIONS.values() for unit in units(name, c)]
    assert len(every) == len(set(every))


# --- the noise -----------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", [Arm("mb-sgd"), Arm("spider", 2), Arm("alternate")])
def test_sound_noise_spends_its_epsilon_and_keeps_the_texts_split(arm):
    found = noise(FIGURES["wbcd"], PRIMARY, arm, (169,), 3.0)
    assert found["spent"][0] == pytest.approx(3.0, abs=2e-4)
    assert found["spent"][0] <= 3.0
    if "refine" in found:
        assert found["refine"][0] / found["anchor"][0] == pytest.approx(
            math.sqrt(arm.phase), rel=1e-9
        )


def test_half_of_sound_noise_would_be_seen():
    """Planted: at half the noise the same accountant says more than twice the epsilon."""
    found = noise(FIGURES["wbcd"], PRIMARY, Arm("mb-sgd"), (169,), 3.0)
    half = composed_epsilon(
        ((sampling(FIGURES["wbcd"], PRIMARY, Arm("mb-sgd"), 3.0), found["minibatch"][0] / 2, 25),),
        169**-2.0,
    )
    assert half > 6


def test_the_constants_are_those_of_the_text_and_of_the_file():
    figure, n, epsilon = FIGURES["wbcd"], 169, 1.0
    logs = math.log(n**2)
    mean = math.sqrt(16 * logs * 25 / 2) / (
        epsilon * n
    )  # sigma_1 / L of the text, for the mean of n records
    text = noise(figure, CONDITIONS["text"], Arm("spider", 2), (n,), epsilon)
    batch = rate(figure, CONDITIONS["text"], Arm("spider", 2), 3.0) * n
    assert text["anchor"][0] * 2 / batch == pytest.approx(mean)
    assert text["refine"][0] * 4 / batch == pytest.approx(math.sqrt(64 * 25 * logs) / (epsilon * n))
    file = noise(figure, CONDITIONS["file"], Arm("spider", 2), (n,), epsilon)
    assert file["anchor"][0] == pytest.approx(text["anchor"][0] / math.sqrt(25 / 2))
    assert file["refine"] == text["refine"]
    assert file["spent"][0] > 2 * text["spent"][0]


def test_local_sgds_price_is_of_all_its_steps():
    figure = replace(FIGURES["wbcd"], rounds=4)
    found = noise(figure, PRIMARY, Arm("local-sgd"), (169,), 1.0)
    steps = 4 * int(169 * math.sqrt(24 / 4) / 2)
    assert composed_epsilon(
        ((Poisson(1 / 169), found["minibatch"][0], steps),), 169**-2.0
    ) == pytest.approx(1.0, abs=1e-3)


# --- the runs ------------------------------------------------------------------------------------


def test_splits_side_by_side_have_the_means_that_each_has_alone():
    problem, splits, fed = ported((0, 1))
    w = problem.initial([5, 6]).repeat(3, 1)
    clip = torch.tensor([[0.3], [1.0], [9.0]]).repeat_interleave(2, 0)
    for statistic in (Grad(w), ClippedDiff(w, 0.5 * w, clip)):
        factor = 2 if isinstance(statistic, ClippedDiff) else 1
        found = fed.mean(Query(statistic, Gaussian("anchor", factor * clip, 0.0)))
        for run_, t in ((0, 0), (1, 1), (2, 0)):
            row, c = 2 * run_ + t, float(clip[2 * run_])
            mine = (
                Grad(w[row : row + 1])
                if factor == 1
                else ClippedDiff(w[row : row + 1], 0.5 * w[row : row + 1], c)
            )
            alone = (
                Simulated(problem, splits[t].train, [0])
                .answer(Query(mine, Gaussian("anchor", factor * c, 0.0)), [0, 1])
                .mean(1)
            )
            torch.testing.assert_close(found[row : row + 1], alone, atol=1e-6, rtol=1e-4)


def test_noise_is_as_large_as_its_price_says_and_other_in_each_split():
    problem, _splits, fed = ported((0, 1), multiplier=2.0)
    _problem2, _, silent = ported((0, 1))
    w = problem.initial([5]).repeat(6, 1)
    asked = Query(Grad(w), Gaussian("anchor", 0.5, 0.0))
    means = torch.stack([fed.mean(asked) - silent.mean(asked) for _ in range(60)])
    expected = math.sqrt(sum((2.0 * 2 * 0.5 / n) ** 2 for n in COUNTS)) / 2
    assert float(means.std()) == pytest.approx(expected, rel=0.03)
    assert float(
        torch.corrcoef(torch.stack([means[:, 0].flatten(), means[:, 1].flatten()]))[0, 1]
    ) == pytest.approx(0, abs=0.05)


def test_a_poisson_batch_has_each_record_with_its_chance_and_divides_by_the_expected_size():
    problem, _splits, fed = ported((0,), drawn=Poisson(0.3))
    sizes = []
    for _ in range(300):
        x, _, weight = fed._batch(fed.cohort())
        sizes.append(weight.sum(1))
        assert float(x.flatten(1).abs().max()) < 100
    mean = torch.stack(sizes).mean(0)
    assert mean.tolist() == pytest.approx([0.3 * n for n in COUNTS], rel=0.02)
    w = problem.initial([1]).expand(3, -1)
    drawn_mean = torch.stack(
        [fed.mean(Query(Grad(w), Gaussian("anchor", 0.5, 0.0)))[0] for _ in range(400)]
    ).mean(0)
    _, _, whole = ported((0,))
    assert (
        float((drawn_mean - whole.mean(Query(Grad(w), Gaussian("anchor", 0.5, 0.0)))[0]).norm())
        < 0.01
    )


def test_the_unit_of_a_full_batch_is_the_run_of_the_simulation():
    """Without noise, point by point and split by split, through gate and ledger."""
    figure, condition, arm = WBCD, replace(CONDITIONS["open"], batches="full"), Arm("spider", 2)
    unit = Unit("wbcd", "open", arm, (0, 1), (math.inf,))
    table = SimpleNamespace(known={})
    CONDITIONS["open"], kept = condition, CONDITIONS["open"]
    try:
        found = run(unit, {"wbcd": figure}, table, None, "cpu")
    finally:
        CONDITIONS["open"] = kept
    settings = {"rounds": 3, "phase": 2, "slope": 1.0, "form": "each"}
    spider = find("spider").run
    for t in (0, 1):
        split = split_of("wbcd", t, None, "cpu", None)
        problem = problem_of(figure, split, "cpu")
        for g, point in enumerate(grid(figure, condition, arm)):
            mechanisms = {kind: Gaussian(kind, point["clip"], 0.0) for kind in ("anchor", "refine")}

            def go(fed, problem, w, step=point["step"], **kinds):
                return spider(fed, problem, w, step=step, **settings, **kinds)

            plan = with_multipliers(go, mechanisms, COUNTS, Budget(math.inf, 1e-5), Everyone(2))
            fed, _ = simulate(problem, split.train, plan, [t])
            *_, w = go(fed, problem, problem.initial([t]), **mechanisms)
            assert found[g, t, 0] == pytest.approx(
                float(training_loss(problem, w, split.train)), rel=1e-4
            )
            assert found[g, t, 1] == pytest.approx(
                float(error_rate(problem, w, split.test_x, split.test_y)), abs=0.01
            )
            assert found[g, t, 4] <= found[g, t, 0] + 1e-6


def test_the_training_loss_counts_silos_alike():
    problem, splits, _ = ported((0, 1))
    w = problem.initial([1, 2]).repeat(3, 1)
    found = losses(problem, w, splits)
    for t in (0, 1):
        torch.testing.assert_close(
            found[t::2], training_loss(problem, w[t::2], splits[t].train), rtol=1e-6, atol=1e-6
        )


# --- local steps of one record -------------------------------------------------------------------


def test_local_steps_toss_a_coin_for_each_record_and_truncate_nothing():
    at, there = drawn(torch.tensor([5, 40]), 4000, torch.Generator().manual_seed(1))
    for silo, n in enumerate((5, 40)):
        taken = torch.bincount(at[:, silo][there[:, silo]], minlength=n).double() / 4000
        assert taken.tolist() == pytest.approx([1 / n] * n, abs=5 * math.sqrt(1 / n / 4000))
        assert int(at[:, silo][there[:, silo]].max()) < n
        sizes = there[:, silo].sum(1)
        assert float(sizes.double().var()) == pytest.approx(1 - 1 / n, rel=0.1), (
            "a truncated or fixed size would vary less"
        )
    for places, real in zip(at.flatten(0, 1), there.flatten(0, 1), strict=True):
        assert len(set(places[real].tolist())) == int(real.sum())


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_local_steps_are_those_of_clipped_gradients_one_network_at_a_time(optimiser):
    problem, splits, fed = ported((0, 1))
    w = problem.initial([3, 4]).repeat(3, 1)
    step, clip = (
        torch.tensor(v).reshape(3, 1).repeat_interleave(2, 0)
        for v in ([0.1, 0.3, 0.02], [0.2, 1.0, 30.0])
    )
    found = local_round(fed, w, 7, step, clip, torch.Generator().manual_seed(2), optimiser)
    at, there = drawn(torch.tensor(COUNTS * 2), 7, torch.Generator().manual_seed(2))
    for row in range(6):
        ends = []
        for silo in range(2):
            train, own = splits[row % 2].train, 2 * (row % 2) + silo
            point = torch.nn.Parameter(w[row].clone())
            adam = (
                torch.optim.Adam([point], lr=float(step[row]))
                if optimiser == "adam"
                else torch.optim.SGD([point], lr=float(step[row]))
            )
            for k in range(7):
                places = at[k, own][there[k, own]]
                x, y = train.x[silo, places][None], train.y[silo, places][None]
                point.grad = clipped_sum(
                    problem,
                    point.detach()[None],
                    x,
                    y,
                    torch.ones(1, len(places)),
                    float(clip[row]),
                )[0, 0]
                adam.step()
            ends.append(point.detach())
        torch.testing.assert_close(found[row], torch.stack(ends).mean(0), atol=2e-5, rtol=1e-3)


def test_local_steps_noise_is_as_large_as_its_price_says():
    problem, _splits, fed = ported((0,), multiplier=3.0)
    w, step, clip = (
        problem.initial([1]).repeat(3, 1),
        torch.full((3, 1), 0.01),
        torch.full((3, 1), 1e-3),
    )
    moved = torch.cat(
        [
            local_round(fed, w, 5, step, clip, torch.Generator().manual_seed(s)) - w
            for s in range(40)
        ]
    )
    assert float(moved[::3].std()) == pytest.approx(
        0.01 * math.sqrt(5) * 2 * 1e-3 * 3.0 / math.sqrt(2), rel=0.05
    )


# --- carrying out --------------------------------------------------------------------------------


def test_shards_and_pieces_give_the_table_of_one_go(tmp_path, monkeypatch):
    monkeypatch.setattr(
        lab, "spread", lambda work, cpu, gpu: [work(*task) for task in (*cpu, *gpu)]
    )
    monkeypatch.setattr("research.verdict_noise.os.cpu_count", lambda: 1)
    figures = {"wbcd": replace(WBCD, clips=(0.5,))}
    tables = []
    for folder, shards in (("one", [(1, 1)]), ("two", [(1, 2), (2, 2), (1, 2)])):
        job = lab.Job(tmp_path / folder, figures, None)
        wanted = lab.planned(figures, figures, ["full"], (18.0,))
        missing = [lab.carry_out(job, wanted, shard=shard) for shard in shards]
        assert not missing[-1]
        lab.write_trials(lab.collect(job, figures, ["full"], (18.0,)), tmp_path / f"{folder}.csv")
        tables.append((tmp_path / f"{folder}.csv").read_text())
    assert tables[0] == tables[1]
    assert len(lab.read_trials(tmp_path / "one.csv")) == 3, "mb-sgd, spider and the alternate form"
    late = lab.Job(tmp_path / "late", figures, None, until=0.0)
    assert len(lab.carry_out(late, wanted)) == len(wanted), (
        "after its time nothing is begun, and all is listed"
    )


@pytest.mark.parametrize("condition", ["full", "small"])
def test_picked_settings_are_those_of_least_training_loss_on_the_first_split(
    condition, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        lab, "spread", lambda work, cpu, gpu: [work(*task) for task in (*cpu, *gpu)]
    )
    monkeypatch.setattr("research.verdict_noise.os.cpu_count", lambda: 1)
    figures = {"wbcd": replace(WBCD, tuned_on=1, trials=3)}
    job = lab.Job(tmp_path, figures, None)
    wanted = [
        u
        for u in lab.planned(figures, figures, [condition], (3.0, 18.0))
        if u.arm.curve == "mb-sgd"
    ]
    seen = []
    assert not lab.carry_out(job, wanted, tick=lambda done, total: seen.append((done, total)))
    assert seen == [(k, len(wanted)) for k in range(len(wanted) + 1)], (
        "one bar, over what is tried and what is picked"
    )
    tried = np.load(job.path(wanted[1]))
    row = next(
        r
        for r in lab.collect(job, figures, [condition], (3.0, 18.0))
        if (r["epsilon"], r["output"]) == (18.0, "last")
    )
    best = grid(figures["wbcd"], CONDITIONS[condition], Arm("mb-sgd"))[int(tried[:, 0, 0].argmin())]
    assert (row["step"], row["clip"]) == (best["step"], best["clip"])
    assert len(row["errors"]) == 3
    assert row["errors"][0] == pytest.approx(float(tried[int(tried[:, 0, 0].argmin()), 0, 1]))


def test_the_table_of_noise_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("research.verdict_noise.os.cpu_count", lambda: 1)
    table, task = (
        Table(tmp_path / "noise.json"),
        (FIGURES["wbcd"], CONDITIONS["full"], Arm("mb-sgd"), (169,), 3.0),
    )
    table.fill([task])
    assert Table(tmp_path / "noise.json").of(*task[:3], (169, 169), 3.0) == noise(*task)
