"""Every sentence of comparison, figures, leaderboard, variance, trust and rates that compares is
recomputed from the committed tables, or from the code it is about.

What a page's generator counts is tested in test_claims.py, where the page must be what the
generator writes; here are the words that the generator, or a person, has written by hand.
"""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from research import gallery, rates
from research.compare import improvement, read_table
from research.study import FIGURES, LEADERBOARD, MNIST, VARIANCE, WBCD
from silodp.core.figures import rounded_up
from silodp.core.privacy.accounting import Budget
from silodp.core.sampling import DisjointBatches
from silodp.server.algorithms import find
from silodp.server.order import Order
from silodp.server.paper import paper_multipliers
from silodp.simulation.planning import planned_totals

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DATA = ("wbcd", "mnist", "cifar10")


def words_of(page: str) -> str:
    return " ".join((ROOT / page).read_text().split())


def table(name: str) -> list[dict]:
    return read_table(DOCS / f"figures/{name}.csv")


def errors(name: str) -> dict[tuple[str, float | None], float]:
    return {(r["curve"], r["epsilon"]): r["test_error"] for r in table(name)}


# --- comparison ----------------------------------------------------------------------------------


def test_the_choice_of_model_matters_more_than_the_optimiser():
    """On each data set the linear model gains more over MB-SGD than any other method on the paper's
    network.
    """
    assert "The choice of model matters more than the optimiser" in words_of("docs/comparison.md")
    for data in DATA:
        rows, linear = table(f"leaderboard-{data}"), table(f"leaderboard-{data}-linear")
        methods = {r["curve"] for r in rows} - {"mb-sgd", "spider-paper"}
        known = {r["epsilon"] for r in rows}
        model = improvement(
            [*rows, *(r for r in linear if r["epsilon"] in known)], "mb-sgd", "linear"
        )
        assert model > max(improvement(rows, "mb-sgd", method) for method in methods), data


# --- figures -------------------------------------------------------------------------------------


def test_under_our_protocol_spider_is_not_ahead_of_mb_sgd_at_more_than_half_of_the_epsilons_of_any_figure():  # noqa: E501
    for name in FIGURES:
        rows = table(name)
        assert (
            gallery.significant(rows, "spider", "mb-sgd")[0]
            <= len({r["epsilon"] for r in rows if r["epsilon"]}) / 2
        ), name


def test_where_phase_1_is_picked_spider_and_mb_sgd_are_the_same_runs():
    picked = 0
    for name in FIGURES:
        rows = {(r["curve"], r["epsilon"]): r for r in table(name)}
        for (curve, at), r in rows.items():
            if curve == "spider" and r["algorithm"] == "mb-sgd":
                picked += 1
                assert (r["errors"], r["settings"]) == (
                    rows["mb-sgd", at]["errors"],
                    rows["mb-sgd", at]["settings"],
                )
    assert picked > 20


@pytest.mark.parametrize("name", [name for name in FIGURES if "M12" in name])
def test_where_some_silos_answer_less_is_spent_than_set_for(name):
    assert all(
        r["spent_epsilon"] < r["epsilon"]
        for r in table(name)
        if r["epsilon"] and not r["curve"].endswith("-paper")
    )
    assert all(
        r["spent_epsilon"] > 0.99 * r["epsilon"]
        for r in table(name.replace("M12", "M25"))
        if r["curve"] == "mb-sgd"
    )


def test_the_table_of_differences_says_what_our_grids_and_noise_are():
    page = words_of("docs/figures.md")
    assert "of the five on MNIST four are 0.25 or more" in page
    assert (len(MNIST.steps), sum(step >= 0.25 for step in MNIST.steps)) == (5, 4)
    assert "0.24 to 0.49 of the records" in page
    assert [f"{math.sqrt(24) / (2 * math.sqrt(rounds)):.2f}" for rounds in (100, 25)] == [
        "0.24",
        "0.49",
    ]
    assert "2 (breast cancer: 2 or 4) steps a round on all records" in page
    assert (WBCD.grid.local, MNIST.local) == ((2, 4), (2,))
    assert "2 steps, 1 clip, phases 1 and 2, no alternate form, 3 epsilons, 3 splits" in page
    for name in ("cifar10-R50", "cifar10-R100"):
        study = FIGURES[name]
        assert (
            len(study.grid.steps),
            len(study.grid.clips),
            study.grid.phases,
            study.grid.alternate,
        ) == (2, 1, (1, 2), False)
        assert (len(study.epsilons), study.trials) == (3, 3)
    settings = {
        name: find(name).schedule({"rounds": 50, "phase": 1, "slope": math.inf})
        for name in ("spider", "mb-sgd")
    }
    noise = {
        name: paper_multipliers(name, Budget(3.0, 1e-6), chosen)
        for name, chosen in settings.items()
    }
    assert (
        noise["spider"]["anchor"] > noise["mb-sgd"]["minibatch"]
    )  # "the same algorithm with more noise"


# --- the leaderboard -----------------------------------------------------------------------------


def test_the_least_of_each_row_is_bold_and_the_papers_constants_never_are():
    lines = [
        line
        for line in (DOCS / "leaderboard.md").read_text().splitlines()
        if re.match(r"\| [\d.]+ \|", line)
    ]
    assert len(lines) == sum(len(study.epsilons) for study in LEADERBOARD.values())
    for line in lines:
        cells = [cell.strip() for cell in line.split("|")[2:-1]]
        assert not cells[0].startswith("**")
        means = [float(cell.strip("* ").split(" ")[0]) for cell in cells[1:]]
        assert {
            mean for mean, cell in zip(means, cells[1:], strict=True) if cell.startswith("**")
        } == {min(means)}


def test_plain_steps_do_not_get_far_on_cifar10_private_or_not_and_methods_that_move_faster_are_ahead():  # noqa: E501
    assert (
        "Plain steps of that size do not get far in so few rounds, private or not, and "
        "methods that move faster are ahead."
    ) in words_of("docs/leaderboard.md")
    found, plain = errors("leaderboard-cifar10"), errors("cifar10-R50")["mb-sgd-open", None]
    assert plain > 0.7
    for at in (3.0, 18.0):
        assert max(found["momentum", at], found["adam", at]) < min(plain, found["mb-sgd", at])
    assert min(found["mb-sgd", e] for e in LEADERBOARD["leaderboard-cifar10"].epsilons) > 0.7


# --- where variance reduction helps --------------------------------------------------------------


def test_anchors_take_every_record_also_where_gradients_take_small_batches():
    for study in VARIANCE.values():
        for arm in study.arms():
            placed = study.placed(arm, 25).order.sampling
            if study.sampling != "full" and arm.curve.startswith("spider"):
                assert placed == f"anchor=full,refine={study.sampling}"
            else:
                assert placed == (None if study.sampling == "full" else study.sampling)


# --- trust ---------------------------------------------------------------------------------------


def test_the_rows_of_errors_under_each_trust_are_the_tables():
    page = words_of("docs/trust.md")
    mnist, wbcd = (
        {curve: f"{100 * error:.1f} %" for (curve, at), error in errors(name).items() if at == 0.75}
        for name in ("trust-mnist", "trust-wbcd")
    )
    assert (
        f"| MNIST, 25 silos, epsilon 0.75: error | {mnist['mb-sgd']} | "
        f"{mnist['mb-sgd-shuffle']} (c = 0), {mnist['mb-sgd-masks']} (c = 2) | "
        f"{mnist['mb-sgd-shuffle']} | {mnist['mb-sgd-central']} |"
    ) in page
    total = wbcd["momentum-shuffle"]
    assert (
        f"| breast cancer, 2 silos, epsilon 0.75: error | {wbcd['momentum']} | {total} | {total} | "
        f"{wbcd['momentum-central']} |"
    ) in page


def test_what_totals_spend_and_hide_in_the_example_is_what_the_accountant_says():
    """MB-SGD, 50 rounds, 25 silos of 1238 records, 3394 parameters, epsilon 0.75 at delta =
    1/n^2.
    """
    page, order = (
        words_of("docs/trust.md"),
        Order("mb-sgd", rounds=50, epsilon=("0.75",), trust="shuffle"),
    )
    answer = planned_totals(order, (1238,) * 25, [f"silo-{i}" for i in range(25)], 3394)
    assert f"| 0.75, {rounded_up(answer['epsilon']['shuffler'])} |" in page
    noise = answer["noise_std"]
    assert noise["shuffle"] == pytest.approx(noise["central"], rel=1e-3)


# --- rates ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fits() -> dict[tuple[str, str], dict]:
    return {(f["theorem"], f["against"]): f for f in rates.read(DOCS / "rates.csv")}


def values(fit: dict) -> list[float]:
    return [p["value"] for p in fit["points"]]


def off(fit: dict, wanted: str = "theory") -> float:
    """How many standard errors the slope is from what is wanted."""
    return abs(fit["slope"] - fit[wanted]) / fit["slope_error"]


def test_what_is_said_of_each_theorems_slopes_holds(fits):
    page = words_of("docs/rates.md")
    assert (
        "Prox-SGD follows -2 in epsilon and +1 in d. In n and N it is flatter than the exponent"
        in page
    )
    assert [fits["Prox-SGD, PPL", axis]["verdict"] for axis in ("epsilon", "d", "n", "N")] == [
        "agrees"
    ] * 2 + ["agrees as run"] * 2
    assert 'One Prox-SVRG call follows all four exponents. Its "as run" column does not' in page
    calls = [fits["Prox-PL-SVRG, one call", axis] for axis in ("epsilon", "n", "N", "d")]
    assert {f["verdict"] for f in calls} == {"agrees"}
    assert max(off(f, "as_run") for f in calls) > 3
    restarts = [fits["Prox-PL-SVRG, ERM", axis] for axis in ("epsilon", "n")]
    assert (
        "({:.1f} and {:.1f} standard errors, 8 runs and 3 points an axis)".format(
            *map(off, restarts)
        )
        in page
    )
    assert {(p["runs"], len(f["points"])) for f in restarts for p in f["points"]} == {(8, 3)}
    runs = {p["runs"] for f in fits.values() for p in f["points"]}
    assert (
        f"spread of {min(runs)} to {max(runs)} runs; those of SPIDER rest on 4 runs of one draw"
        in page
    )


def test_the_alternate_form_is_lower_at_every_size_but_the_least_epsilon(fits):
    assert "is lower at every size here but epsilon 1.25, where both are the same" in words_of(
        "docs/rates.md"
    )
    for axis in ("epsilon", "n", "N", "d"):
        first, alternate = (
            values(fits[name, axis])
            for name in ("FedProx-SPIDER", "none (SPIDER's proof at q = 2)")
        )
        same = [a == b for a, b in zip(first, alternate, strict=True)]
        assert same == [axis == "epsilon" and at == 0 for at in range(len(same))]
        assert all(a > b for a, b, equal in zip(first, alternate, same, strict=True) if not equal)


def test_a_third_of_an_anchors_noise_is_held_after_two_steps_and_nearly_all_after_many():
    assert (
        "After two steps the gradient holds a third of its variance, after many all of it"
        in words_of("docs/rates.md")
    )
    assert rates.carried(2, 1 / 3) == pytest.approx(1 / 3)
    assert rates.carried(200, 1 / 3) > 0.98


def test_where_phases_are_long_spider_shows_its_exponent_and_the_constants_say_why(fits):
    page, near, far = (
        words_of("docs/rates.md"),
        fits["FedProx-SPIDER, long phases", "epsilon"],
        fits["FedProx-SPIDER", "epsilon"],
    )
    assert (near["verdict"], far["verdict"]) == ("agrees", "flatter")
    assert f"the slope in epsilon is {near['slope']:.2f} ± {near['slope_error']:.2f}" in page
    ends = [(f["regime"][0], f["regime"][-1]) for f in (near, far)]
    assert (
        "is {:.0f} to {:.0f} in place of {:.0f} to {:.0f}".format(
            *(end["X"] for pair in ends for end in pair)
        )
        in page
    )
    assert "phases are {} to {} rounds long".format(*(end["phase"] for end in ends[0])) in page
    assert (
        "carry {:.2f} to {:.2f} of an anchor's noise in place of {:.2f} to {:.2f}".format(
            *(e["carried"] for pair in ends for e in pair)
        )
        in page
    )
    sizes = [(measure, rates.Size(100, 16, 10, 5.0)) for measure in ("near", "mapping")]
    known = [rates.constants(*size) for size in sizes]
    assert (
        "L²/(Delta beta), {:.1f} there and {:.1f} from the far start".format(
            *(c.lipschitz**2 / (c.gap * c.smoothness) for c in known)
        )
        in page
    )


def test_sdp_is_about_twice_as_steep_in_the_number_of_silos_and_as_steep_in_the_rest(fits):
    page = words_of("docs/rates.md")
    for name, said in (
        ("Prox-SGD, PPL", "Prox-SGD is steeper under SDP"),
        ("FedProx-SPIDER", "SPIDER too"),
    ):
        alone, total = fits[name, "N"]["slope"], fits[f"SDP {name}", "N"]["slope"]
        assert f"{said} ({total:.2f} against {alone:.2f})" in page
        assert 1.8 < total / alone < 2.2
        for axis in ("epsilon", "d"):
            one, other = fits[name, axis], fits[f"SDP {name}", axis]
            assert abs(one["slope"] - other["slope"]) < 3 * math.hypot(
                one["slope_error"], other["slope_error"]
            )


def test_no_lower_bound_is_drawn_for_the_reasons_that_are_said(fits):
    page, times, silos = (
        words_of("docs/rates.md"),
        {"accelerated": [], "localized": []},
        {True: set(), False: set()},
    )
    assert "No lower bound is drawn: at no size here do the conditions of one hold" in page
    assert not [p for f in fits.values() for p in f["points"] if p["lower_bound"] is not None]
    for line in rates.study():
        for size in line.sizes if line.trust == "isrl" else ():
            c = rates.constants(line.measure, size)
            plan = rates.schedule(line.algorithm, c)
            *_, (enough, many), (quiet, told) = rates.bound_of(line, c, plan).conditions
            assert (enough[:19], quiet) == (
                "N >= 16 ln(28 N R),",
                "epsilon_r <= 1/n in every round",
            )
            silos[many].add(size.N)
            assert not told
            if line.algorithm in times:
                times[line.algorithm].append(
                    size.n
                    * size.epsilon
                    / (1 if line.algorithm == "accelerated" else math.sqrt(plan.rounds))
                )
    assert (
        f"it is {min(times['accelerated']):,.0f} to {max(times['accelerated']):,.0f} times "
        "that (accelerated"
    ) in page
    assert (
        f"and {min(times['localized']):.1f} to {max(times['localized']):.0f} times (localized)"
        in page
    )
    assert silos[True] == {240, 480}
    assert max(silos[False]) == 120
    assert {f["verdict"] for f in fits.values() if f["algorithm"] in times} == {"agrees"}
    assert min(p["epsilon"] for f in fits.values() if f["trust"] == "sdp" for p in f["points"]) > 1


def test_disjoint_batches_leave_localized_steps_the_risk_that_is_said(monkeypatch):
    size, found, prescribed = rates.Size(80, 120, 10, 1.0), [], rates.schedule
    c = rates.constants("convex", size)
    plan = prescribed("localized", c)
    whole = plan.mechanisms["minibatch"]
    once = replace(
        whole,
        noise_multiplier=whole.noise_multiplier / math.sqrt(plan.rounds),
        sampling=DisjointBatches(plan.rounds),
    )
    for noisy in (whole, once):
        monkeypatch.setattr(
            rates,
            "schedule",
            lambda *args, noisy=noisy: replace(prescribed(*args), mechanisms={"minibatch": noisy}),
        )
        _, runs = rates.point("localized", "isrl", "convex", size, 16, 0)
        found.append(f"{runs.mean():.3f} ± {runs.std() / 4:.3f}")
    said = (
        "(n = 80, N = 120, d = 10, epsilon 1, 16 draws of the noise) all records leave {} of "
        "excess risk and disjoint batches {}"
    )
    assert said.format(*found) in words_of("docs/algorithms/localized.md")


@pytest.mark.parametrize("data", ["mnist", "wbcd"])
def test_totals_lie_within_five_per_cent_of_central_dp(data):
    by = errors(f"trust-{data}")
    totals = [(curve, epsilon) for curve, epsilon in by if str(curve).endswith("-shuffle")]
    assert len(totals) >= 7
    for curve, epsilon in totals:
        central = by[curve.replace("-shuffle", "-central"), epsilon]
        assert by[curve, epsilon] / central < 1.05, (curve, epsilon)
