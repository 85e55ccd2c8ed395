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
from research.verdict_plan import CONDITIONS, FIGURES, Arm, grid, spaced
from research.verdict_read import Trials, chance_of, count, gaps, holm
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


def test_the_part_of_the_grid_is_described_as_it_is():
    figure = FIGURES["cifar10-R50"]
    part = {(p["step"], p["clip"]) for p in grid(figure, CONDITIONS["many"], Arm("spider", 2))}
    assert part == set(itertools.product(spaced(*figure.span)[-8:][1::2], figure.clips[-3:]))
    assert len(grid(figure, CONDITIONS["many"], Arm("mb-sgd"))) == 72


def test_what_adam_does_not_change_is_read_from_the_primary_comparison(trials):
    """SPIDER without phase 1 has all its phases beside Local SGD with Adam: the alternate form
    alone was there once.
    """
    for g in gaps(trials, "reduced", "local-sgd", ["wbcd"], "adam"):
        assert g.first == trials.curve("reduced", "wbcd", "primary", g.epsilon)


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
