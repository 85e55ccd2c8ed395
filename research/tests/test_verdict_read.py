"""What is read from the verdict's trials: tuned curves, chances that allow for overlapping splits,
Holm's correction, and sentences that follow.
"""

import itertools
import math
import re
import statistics
from pathlib import Path

import pytest
from scipy import stats
from typer.testing import CliRunner

from research.__main__ import app
from research.verdict import read_trials
from research.verdict_page import page
from research.verdict_plan import CONDITIONS, FIGURES, Arm, grid, spaced
from research.verdict_read import Trials, average, chance_of, count, gaps, holm
from research.verdict_says import short
from silodp.core.errors import BadInput

TABLE = Path(__file__).parents[2] / "docs/figures/verdict.csv"


def row(
    arm,
    epsilon,
    errors,
    loss,
    *,
    condition="primary",
    figure="mnist-M25-R25",
    output="last",
    spent=None,
):
    return {
        "figure": figure,
        "condition": condition,
        "arm": arm,
        "epsilon": epsilon,
        "output": output,
        "spent": epsilon if spent is None else spent,
        "step": 1.0,
        "clip": 1.0,
        "slope": "",
        "loss": loss,
        "errors": tuple(errors),
    }


def made(**losses):
    kinds = {"mb-sgd": 0.10, "spider-q2": 0.12, "alternate": 0.09}
    return Trials(
        row(arm, 3.0, [e, e + 0.01, e + 0.02], losses[arm.replace("-", "_")])
        for arm, e in kinds.items()
    )


def test_a_curve_has_the_arm_of_least_training_loss_and_phase_1_is_mb_sgd():
    trials = made(mb_sgd=0.5, spider_q2=0.6, alternate=0.55)
    curve = {
        m: trials.curve(m, "mnist-M25-R25", "primary", 3.0).arm
        for m in ("spider", "reduced", "phases", "mb-sgd")
    }
    assert curve == {
        "spider": "mb-sgd",
        "reduced": "alternate",
        "phases": "spider-q2",
        "mb-sgd": "mb-sgd",
    }
    assert gaps(trials, "spider", "mb-sgd", ["mnist-M25-R25"], "primary")[0].same


def test_a_curve_is_unknown_where_one_of_its_arms_was_not_run():
    trials = Trials([row("mb-sgd", 3.0, [0.1, 0.2], 0.5), row("spider-q2", 3.0, [0.1, 0.2], 0.4)])
    assert trials.curve("spider", "mnist-M25-R25", "primary", 3.0) is None
    assert trials.curve("phases", "mnist-M25-R25", "primary", 3.0) is not None


def test_the_files_phase_1_is_its_own_and_its_mb_sgd_the_texts():
    rows = [
        row("mb-sgd", 3.0, [0.1, 0.2], 0.5, condition="text"),
        row("alternate", 3.0, [0.2, 0.3], 0.6, condition="text"),
    ]
    rows += [
        row(f"spider-q{q}", 3.0, [0.01 * q, 0.02], 0.1 * q, condition="file", spent=9.0)
        for q in (1, 2)
    ]
    found = gaps(Trials(rows), "spider", "mb-sgd", ["mnist-M25-R25"], "file")
    assert [(g.first.arm, g.second.arm, g.first.spent) for g in found] == [
        ("spider-q1", "mb-sgd", 9.0)
    ]


def test_chances_allow_for_splits_that_overlap():
    first, second = [0.10, 0.12, 0.11, 0.13], [0.12, 0.13, 0.14, 0.13]
    differences = [a - b for a, b in zip(first, second, strict=True)]
    t = statistics.mean(differences) / (statistics.stdev(differences) * math.sqrt(1 / 4 + 1 / 4))
    assert chance_of(first, second) == pytest.approx(2 * stats.t.sf(abs(t), 3))
    assert chance_of(first, second) > stats.ttest_rel(first, second).pvalue, (
        "the plain test would be too sure"
    )
    assert chance_of(first, first) == 1.0


def test_holms_correction_is_that_of_the_textbook():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])


def test_holm_leaves_cells_of_the_same_runs_out_and_settings_picked_on_one_split_are_not_tested():
    rows = []
    for figure in ("mnist-M25-R25", "cifar10-R50"):
        phases = (2,) if figure.startswith("mnist") else (2, 3, 4)
        for e, alternate in (
            (1.0, 0.9),
            (3.0, 0.4),
        ):  # at epsilon 1 training loss picks MB-SGD, at 3 the alternate form
            rows += [
                row("mb-sgd", e, [0.10, 0.12, 0.11, 0.13], 0.5, figure=figure),
                row("alternate", e, [0.05, 0.06, 0.06, 0.07], alternate, figure=figure),
            ]
            rows += [
                row(f"spider-q{q}", e, [0.2, 0.2, 0.2, 0.2], 0.9, figure=figure) for q in phases
            ]
    small, large = (
        gaps(Trials(rows), "spider", "mb-sgd", [f], "primary")
        for f in ("mnist-M25-R25", "cifar10-R50")
    )
    assert [g.same for g in small] == [True, False]
    assert small[1].adjusted == small[1].chance < 0.05, "one comparison, not two"
    assert (count(small)["surely better"], count(large)["surely better"]) == (1, 0)


def test_a_difference_of_the_tables_rounding_is_none():
    rows = [
        row("mb-sgd", 3.0, [0.03261, 0.0326], 0.5),
        row("alternate", 3.0, [0.032609, 0.0326], 0.4),
        row("spider-q2", 3.0, [0.2, 0.2], 0.9),
    ]
    assert count(gaps(Trials(rows), "spider", "mb-sgd", ["mnist-M25-R25"], "primary"))["same"] == 1


@pytest.fixture(scope="module")
def trials():
    return Trials(read_trials(TABLE))


def test_the_committed_trials_are_of_twenty_splits_and_sound_noise_spends_its_claim(trials):
    for (figure, condition, _, epsilon, _), r in trials.rows.items():
        assert len(r["errors"]) == (5 if figure.startswith("cifar") else 20)
        if condition not in ("text", "file", "open", "wide"):
            assert 0.999 * epsilon <= r["spent"] <= epsilon * (1 + 1e-6)


def test_the_verdicts_first_sentence_is_recomputed_from_single_trials(trials):
    """By hand, from the rows, without the code that wrote it."""
    worse = cells = 0
    relative = []
    for figure in trials.figures:
        for e in (0.75, 1, 1.5, 3, 6, 12, 18):
            rows = [
                r
                for (f, c, _, x, o), r in trials.rows.items()
                if (f, c, x, o) == (figure, "primary", e, "last")
            ]
            base = next((r for r in rows if r["arm"] == "mb-sgd"), None)
            spiders = [r for r in rows if r["arm"].startswith("spider") or r["arm"] == "alternate"]
            if base and spiders:
                best = min([base, *spiders], key=lambda r: r["loss"])
                relative.append(
                    statistics.mean(best["errors"]) / statistics.mean(base["errors"]) - 1
                )
                cells += 1
                worse += statistics.mean(
                    min(spiders, key=lambda r: r["loss"])["errors"]
                ) > statistics.mean(base["errors"])
    found = gaps(trials, "spider", "mb-sgd", trials.figures, "primary")
    assert len(found) == cells
    assert average(found) == pytest.approx(-100 * statistics.mean(relative))
    assert count(gaps(trials, "reduced", "mb-sgd", trials.figures, "primary"))["worse"] == worse
    assert f"over {cells} cells" in short(trials)


def errors_of(trials, figure, condition, epsilon, arms):
    """By hand: the mean test error of the arm with the least training loss."""
    rows = [trials.rows[figure, condition, arm, epsilon, "last"] for arm in arms]
    return statistics.mean(min(rows, key=lambda r: r["loss"])["errors"])


PHASES = {
    "mnist-M25-R25": (2,),
    "mnist-M12-R25": (2,),
    "cifar10-R50": (2, 3, 4),
    "mnist-M12-R50": (2, 3, 4),
    "mnist-M25-R50": (2, 3, 4),
    "wbcd": range(2, 11),
}
EVERY = (0.75, 1.0, 1.5, 3.0, 6.0, 12.0, 18.0)


def signs(values):
    return ", ".join(f"{v + 0:+.1f} %" for v in values)


def test_what_is_said_of_all_of_cifar10s_records_is_in_the_trials(trials):
    said = " ".join(page(trials).split())
    every = ["mb-sgd", "alternate", "spider-q2", "spider-q3", "spider-q4"]
    lead = {}
    for condition in ("primary", "many"):
        base, best = (
            {e: errors_of(trials, "cifar10-R50", condition, e, a) for e in EVERY}
            for a in (every[:1], every)
        )
        lead[condition] = {e: 100 * (1 - best[e] / base[e]) for e in EVERY}
    many = lead["many"]
    low, high = (statistics.mean(-many[e] for e in some) + 0.0 for some in (EVERY[:3], EVERY[3:]))
    assert f"{low:+.1f} % up to epsilon 1.5 and {high:+.1f} % from epsilon 3 on" in said
    least = [
        100 * (min(best[x] for x in EVERY if x <= e) / min(base[x] for x in EVERY if x <= e) - 1)
        for e in EVERY[3:]
    ]
    assert f"SPIDER's is {signs(least)} at epsilon 3, 6, 12, 18." in said
    assert (
        f"MB-SGD's own error is {100 * base[1.5]:.1f} % at epsilon 1.5 and "
        f"{100 * base[12.0]:.1f} % at 12"
    ) in said
    assert (min(base.values()), max(base.values())) == (base[1.5], base[12.0])
    ahead, before = ([e for e in EVERY if found[e] > 0.01] for found in (many, lead["primary"]))
    assert ahead == [6.0, 12.0, 18.0]
    form = [
        100 * (errors_of(trials, "cifar10-R50", "many", e, ["alternate"]) / base[e] - 1)
        for e in EVERY[:4]
    ]
    assert f"which is {signs(form)} at epsilon 0.75, 1, 1.5, 3, where it is not picked" in said
    phases = [
        100 * (errors_of(trials, "cifar10-R50", "many", e, every[2:]) / base[e] - 1) for e in ahead
    ]
    assert f"fewer settings, is {signs(phases)} at epsilon 6, 12, 18" in said
    whole, fifth = (statistics.mean(found.values()) for found in (many, lead["primary"]))
    assert (
        f"it is {whole:.1f} % below MB-SGD's on CIFAR-10, R = 50, where it is {fifth:.1f} "
        "% below with a fifth"
    ) in said
    assert f"and lower in {len(ahead)} of 7 cells, where it is in {len(before)}" in said
    assert "and is 0.0, 3.8, 16.7 and 18.8 % now, the average over the seven epsilons 5.6 %" in said
    assert [f"{many[e] + 0:.1f}" for e in EVERY[3:]] + [f"{whole:.1f}"] == [
        "0.0",
        "3.8",
        "16.7",
        "18.8",
        "5.6",
    ]
    points = [
        100 * (base[e] - best[e])
        for found in ("primary", "many")
        for e in (12.0, 18.0)
        for base, best in [
            (
                {e: errors_of(trials, "cifar10-R50", found, e, every[:1])},
                {e: errors_of(trials, "cifar10-R50", found, e, every)},
            )
        ]
    ]
    assert "SPIDER's leads at epsilon 12 and 18 are larger" in said
    assert min(points) > 3


def test_splits_and_chances_of_all_of_cifar10s_records_are_as_said(trials):
    said, rows = " ".join(page(trials).split()), trials.rows
    first, second = (
        [rows["cifar10-R50", "many", arm, e, "last"]["errors"] for e in (6.0, 12.0, 18.0)]
        for arm in ("alternate", "mb-sgd")
    )
    tuned = [100 * (a[0] / b[0] - 1) for a, b in zip(first, second, strict=True)]
    rest = [100 * (sum(a[1:]) / sum(b[1:]) - 1) for a, b in zip(first, second, strict=True)]
    assert (
        f"tuned on it is {signs(tuned)} at epsilon 6, 12, 18, on the other four {signs(rest)}."
        in said
    )
    lower = sum(
        x < y for a, b in zip(first, second, strict=True) for x, y in zip(a, b, strict=True)
    )
    assert f"lower in {lower} of the 15 splits in which they are not the same runs" in said
    chances = holm([chance_of(a, b) for a, b in zip(first, second, strict=True)])
    assert f"p after Holm's correction is {', '.join(f'{c:.2g}' for c in chances)};" in said


def test_mb_sgd_with_twice_the_rounds_is_beside_the_alternate_form_on_all_of_cifar10(trials):
    said = " ".join(page(trials).split())
    form, twice = (
        {e: errors_of(trials, figure, "many", e, [arm]) for e in EVERY}
        for figure, arm in (("cifar10-R50", "alternate"), ("cifar10-R100", "mb-sgd"))
    )
    ahead = [e for e in EVERY if form[e] < twice[e]]
    assert f"is below that form in {7 - len(ahead)} of 7 cells" in said
    least = [
        100 * (min(form[x] for x in EVERY if x <= e) / min(twice[x] for x in EVERY if x <= e) - 1)
        for e in ahead
    ]
    words = ", ".join(f"{e:g} by {100 * (1 - form[e] / twice[e]):.1f} %" for e in ahead)
    assert (
        f"ahead of it at epsilon {words}, and with each at its least error of the same or "
        f"a smaller epsilon {signs(least)}:"
    ) in said


def test_what_is_said_of_the_constants_is_in_the_trials(trials):
    """By hand, for all seven figures."""
    said, rows, gap, ratios, local = " ".join(page(trials).split()), trials.rows, [], [], []
    for figure in trials.figures:
        spiders = [f"spider-q{q}" for q in (PHASES | {"cifar10-R100": range(2, 9)})[figure]]
        for e in EVERY:
            best, base = (
                min((rows[figure, "text", a, e, "random"] for a in arms), key=lambda r: r["loss"])
                for arms in ([*spiders, "alternate", "mb-sgd"], ["mb-sgd"])
            )
            mine, other = statistics.mean(best["errors"]), statistics.mean(base["errors"])
            gap.append(100 * (1 - mine / other))
            ratios += [best["spent"] / base["spent"]] if gap[-1] > 0.01 else []
            if not figure.startswith("cifar"):
                local.append(
                    100
                    * (
                        1
                        - mine
                        / statistics.mean(rows[figure, "text", "local-sgd", e, "random"]["errors"])
                    )
                )
    assert (
        f"a random iterate, it is {statistics.mean(gap):.1f} % below MB-SGD's and "
        f"{statistics.mean(local):.1f} % below Local SGD's"
    ) in said
    assert (
        f"it spends {min(ratios):.2f} to {max(ratios):.2f} times as much, and MB-SGD's is "
        f"lower in {sum(g < -0.01 for g in gap)} cells"
    ) in said
    lead = average(gaps(trials, "spider", "mb-sgd", trials.figures, "file"))
    assert f"That is {int(lead / 1.72)} times the lead that the paper reports" in said
    for arm, words in (
        ("mb-sgd", "MB-SGD"),
        ("spider-q2", "phase 2"),
        ("alternate", "the alternate form"),
    ):
        low, high = (
            [rows[f, "text", arm, e, "last"]["spent"] / e for f in trials.figures]
            for e in (0.75, 18.0)
        )
        assert (
            f"{words} spends {min(low):.2f} to {max(low):.2f} times its claim at epsilon "
            f"0.75 and {min(high):.2f} to {max(high):.2f} times at 18"
        ) in said


def test_the_part_of_the_grid_is_described_as_it_is():
    figure = FIGURES["cifar10-R50"]
    part = {(p["step"], p["clip"]) for p in grid(figure, CONDITIONS["many"], Arm("spider", 2))}
    assert part == set(itertools.product(spaced(*figure.span)[-8:][1::2], figure.clips[-3:]))
    assert len(grid(figure, CONDITIONS["many"], Arm("mb-sgd"))) == 72


def test_a_conditions_row_stands_beside_the_primary_comparison_on_its_own_cells(trials):
    """By hand, for the batches that shrink with epsilon, which lack CIFAR-10 at R = 100."""
    means = []
    for condition in ("small", "primary"):
        ratios = []
        for figure, phases in PHASES.items():
            for e in EVERY:
                reduced = errors_of(
                    trials, figure, condition, e, ["alternate", *(f"spider-q{q}" for q in phases)]
                )
                ratios.append(
                    100 * (reduced / errors_of(trials, figure, condition, e, ["mb-sgd"]) - 1)
                )
        means.append(statistics.mean(ratios))
    line = next(
        line
        for line in page(trials).splitlines()
        if line.startswith("| on batches that shrink") and "| last |" in line
    )
    assert line.split("|")[7].strip() == f"{means[0]:+.1f} %"
    assert line.split("|")[8].split("/")[1].strip() == f"{means[1]:+.1f} %"
    assert (
        f"{means[1]:.1f} % above on the file's and {means[0]:.1f} % above on those that "
        "shrink with epsilon"
    ) in page(trials)


def test_what_adam_does_not_change_is_read_from_the_primary_comparison(trials):
    """SPIDER without phase 1 has all its phases beside Local SGD with Adam: the alternate form
    alone was there once.
    """
    for g in gaps(trials, "reduced", "local-sgd", ["wbcd"], "adam"):
        assert g.first == trials.curve("reduced", "wbcd", "primary", g.epsilon)


def test_a_planted_lead_would_be_said(trials):
    """The page follows the trials: were MB-SGD's errors twice as large, it would say so."""
    planted = [
        r | {"errors": tuple(2 * e for e in r["errors"]), "loss": 2 * r["loss"]}
        if r["arm"] == "mb-sgd"
        else r
        for r in trials.rows.values()
    ]
    assert "SPIDER's test error is equal to" not in short(Trials(planted))
    assert page(Trials(planted)) != page(trials)


# --- the command ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["mnist"], "MNIST and CIFAR-10 are not embedded; give --data-dir DIR"),
        (["nonsense"], "figure 'nonsense' is unknown; choose all, wbcd, mnist, cifar10"),
        (["wbcd", "--minutes", "0"], "minutes"),
    ],
)
def test_what_cannot_be_run_is_one_sentence(given, said, tmp_path):
    with pytest.raises(BadInput, match=re.escape(said)):
        CliRunner().invoke(
            app,
            ["verdict", *given, "--out", str(tmp_path / "runs")],
            catch_exceptions=False,
        )
    assert not (tmp_path / "runs").exists(), "nothing is begun"


def test_the_plan_comes_first_and_what_there_was_no_time_for_is_listed(tmp_path):
    done = CliRunner().invoke(
        app,
        [
            "verdict",
            "wbcd",
            "full",
            "--reduced",
            "--minutes",
            "1e-9",
            "--out",
            str(tmp_path),
        ],
    )
    words = " ".join(done.output.split())
    assert done.exit_code == 0
    assert (
        words.index("trainings in all")
        < words.index("Not run, whatever the time")
        < words.index("Not run yet, and in no table")
    )
    assert "wbcd full mb-sgd" in words
