"""What a server makes of scores and profiles: the silos' own figures, with intervals that hold as
often as they say.
"""

import math
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from silodp.core.errors import BadInput
from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import GDP, Budget
from silodp.core.problem.losses import (
    Hazard,
    Ordinal,
    Poisson,
    Weighted,
    cross_entropy,
    logistic,
    squared_error,
)
from silodp.core.problem.problem import Problem
from silodp.core.problem.schema import Label
from silodp.server.estimates.placing import assumed, bins_of
from silodp.server.estimates.profile import profile, releases
from silodp.server.estimates.ranking import auc
from silodp.server.estimates.scoring import asked_of, gaussian_for, score
from silodp.server.federation import Absent, Everyone, Federation, StopRun
from silodp.silo.answer.simulated import Simulated
from silodp.silo.data.records import Records
from silodp.silo.gate import Gate
from silodp.silo.ledger.memory import MemoryLedger
from silodp.wire.inprocess import InProcess

FEATURES = 2
COUNTS = (400, 150)


def silos(kind="class", seed=0):
    random = np.random.default_rng(seed)
    made = []
    for i, n in enumerate(COUNTS):
        x = random.normal(size=(n, FEATURES)).astype(np.float32)
        y = x[:, 0] + random.normal(size=n) + i
        made.append((x, y.astype(np.float32) if kind == "number" else (y > 0.3).astype(np.int64)))
    return made


def connected(problem, data, budgets=math.inf, seed=0):
    records = Records.of(data)
    ledger = MemoryLedger(GDP(), Budget(budgets, 1e-6), records.counts)
    gate = Gate(Simulated(problem, records, [seed]), ledger, dim=problem.dim, counts=records.counts)
    return Federation(InProcess(gate), Everyone(len(records))), ledger


PROBLEM = Problem(nn.Linear(FEATURES, 1), logistic)
W = torch.tensor([[1.5, 0.3, -0.2]])
SILOS = {"names": ("a", "b"), "held_out": COUNTS}


def asking(bins=200, classes=2, label=None, loss=logistic, cap=3.0):
    return asked_of(classes, label, loss, bins=bins_of(assumed(0.5), bins, 0.5), cap=cap)


ASKED = SILOS | {"asked": asking()}


def exact_auc(scores, y):
    above = (scores[y == 1][:, None] > scores[y == 0]).mean()
    return float(above + (scores[y == 1][:, None] == scores[y == 0]).mean() / 2)


def test_without_noise_the_figures_are_those_of_the_records_pooled_and_by_silo():
    data = silos()
    found = score(connected(PROBLEM, data)[0], W, Gaussian("score", 1.0, 0.0), **ASKED)
    assert [(row.name, row.held_out) for row in found] == [("all", 550), ("a", 400), ("b", 150)]
    together = tuple(np.concatenate(parts) for parts in zip(*data, strict=True))
    for row, (x, y) in zip(found, [together, *data], strict=True):
        margin = x @ W[0, :2].numpy() + W[0, 2].item()
        loss = np.minimum(np.log1p(np.exp(margin)) - y * margin, 3.0).mean()
        assert row.figures["loss"].value == pytest.approx(loss, abs=1e-5)
        assert row.figures["accuracy"].value == pytest.approx(((margin > 0) == y).mean())
        assert row.figures["auc"].value == pytest.approx(
            exact_auc(margin, y), abs=3e-3
        )  # 200 bins: ties within one count half
        right = [((margin > 0) == y)[y == k].mean() for k in (0, 1)]
        assert row.figures["specificity"].value == pytest.approx(right[0])
        assert row.figures["sensitivity"].value == pytest.approx(right[1])
        for name, flag in (("positive predictive value", 1), ("negative predictive value", 0)):
            chosen = (margin > 0) == flag
            assert row.figures[name].value == pytest.approx((y == flag)[chosen].mean())
        assert row.figures["flagged"].value == pytest.approx((margin > 0).mean())
        assert row.figures["prevalence"].value == pytest.approx(y.mean())
        assert row.figures["balanced accuracy"].value == pytest.approx(np.mean(right))
        assert row.figures["larger class"].value == pytest.approx(max(y.mean(), 1 - y.mean()))
        risk = 1 / (1 + np.exp(-margin))
        assert row.figures["calibration in the large"].value == pytest.approx(
            risk.mean() - y.mean(), abs=1e-5
        )
        assert row.figures["calibration slope"].value == pytest.approx(
            np.polyfit(risk, y, 1)[0], rel=5e-3
        )
        assert row.figures["accuracy"].sampling == pytest.approx(
            math.sqrt(0.25 / row.held_out), rel=0.5
        )


def test_of_a_number_errors_are_clipped_and_in_its_unit():
    data, problem = silos("number"), Problem(nn.Linear(FEATURES, 1), squared_error)
    (row, *_) = score(
        connected(problem, data)[0],
        W,
        Gaussian("s", 1.0, 0.0),
        **SILOS | {"asked": asking(classes=0, loss=squared_error, cap=2.0)},
    )
    x, y = (np.concatenate(parts) for parts in zip(*data, strict=True))
    error = np.minimum(np.abs(x @ W[0, :2].numpy() + W[0, 2].item() - y), 2.0)
    assert set(row.figures) == {"squared error", "absolute error"}
    assert row.figures["squared error"].value == pytest.approx((error**2).mean(), rel=1e-4)
    assert row.figures["absolute error"].value == pytest.approx(error.mean(), rel=1e-4)


def test_a_number_that_the_schema_scales_is_scored_in_its_own_unit():
    data, problem = silos("number"), Problem(nn.Linear(FEATURES, 1), squared_error)
    label = Label("regression", ("days",), range=(0.0, 30.0))  # 15 days are 1 to the silos
    asked = SILOS | {"asked": asking(classes=0, label=label, loss=squared_error, cap=20.0)}
    (row, *_) = score(connected(problem, data)[0], W, Gaussian("s", 1.0, 0.0), **asked)
    x, y = (np.concatenate(parts) for parts in zip(*data, strict=True))
    error = np.minimum(15 * np.abs(x @ W[0, :2].numpy() + W[0, 2].item() - y), 20.0)
    variance = (15 * y.clip(-1, 1)).var()
    assert row.figures["explained variance (R2)"].value == pytest.approx(
        1 - (error**2).mean() / variance, rel=1e-3
    )
    assert row.figures["squared error"].value == pytest.approx((error**2).mean(), rel=1e-4)
    assert row.figures["absolute error"].value == pytest.approx(error.mean(), rel=1e-4)


def test_an_error_is_not_cut_below_what_the_schema_allows():
    """The errors of counts with a long tail are 17 on average; a cap of 4 would make them 4.7."""
    label = Label("count", ("visits",), range=(0.0, 77.0))
    problem = Problem(nn.Linear(FEATURES, 1), Poisson(77.0))
    asked = asked_of(0, label, problem.loss)
    assert (asked.cap, asked.cut) == (77.0, "Errors above 77 count as 77.")
    data = [(x, np.round(3 * np.exp(x[:, 0] + y)).clip(0, 77)) for x, y in silos("number")]
    w = torch.tensor([[0.2, 0.0, 1.0]])
    (row, *_) = score(connected(problem, data)[0], w, Gaussian("s", 1.0, 0.0), **SILOS, asked=asked)
    x, y = (np.concatenate(parts).astype(float) for parts in zip(*data, strict=True))
    rate = np.exp(0.2 * x[:, 0] + 1.0)
    assert row.figures["squared error"].value == pytest.approx(((rate - y) ** 2).mean(), rel=1e-3)

    def deviance(at):
        return 2 * (y * np.log(np.maximum(y, 1)) - y * np.log(at) - y + at).mean()

    assert row.figures["explained deviance"].value == pytest.approx(
        1 - deviance(rate) / deviance(y.mean()), abs=1e-3
    )


def test_survival_times_are_judged_by_the_middle_time_bin():
    problem = Problem(nn.Linear(FEATURES, 3), Hazard(3))
    data = [(x, np.arange(len(x)) % 7) for x, _ in silos()]
    label = Label("survival", ("t", "died"), edges=(1.0, 2.0, 3.0))
    w = problem.initial([0])
    (row, *_) = score(
        connected(problem, data)[0],
        w,
        Gaussian("s", 1.0, 0.0),
        **SILOS,
        asked=asking(classes=0, label=label, loss=problem.loss),
    )
    x, y = (torch.from_numpy(np.concatenate(parts)) for parts in zip(*data, strict=True))
    assert set(row.figures) == {"loss", "auc", "calibration in the large"}
    output = problem.outputs(w, x)[0]
    risk = (1 - (1 - output.sigmoid())[:, :2].prod(1)).numpy()
    event = np.isin(y, (1, 3))
    known = event | (y.numpy() > 3)
    assert row.figures["auc"].value == pytest.approx(exact_auc(risk[known], event[known]), abs=0.02)
    assert row.figures["calibration in the large"].value == pytest.approx(
        (risk - event)[known].mean(), abs=1e-5
    )
    assert row.figures["loss"].value == pytest.approx(
        float(problem.losses(w, x, y).clamp(max=3.0).mean()), rel=1e-4
    )


def test_of_many_classes_there_is_a_balanced_accuracy_and_no_auc():
    problem, w = (
        Problem(nn.Linear(FEATURES, 3), cross_entropy),
        3 * Problem(nn.Linear(FEATURES, 3), cross_entropy).initial([0]),
    )
    data = [(x, np.digitize(x[:, 0] + x[:, 1], (-1.0, 1.5))) for x, _ in silos()]
    (row, *_) = score(
        connected(problem, data)[0],
        w,
        Gaussian("s", 1.0, 0.0),
        **SILOS,
        asked=asking(classes=3, loss=cross_entropy),
    )
    x, y = (np.concatenate(parts) for parts in zip(*data, strict=True))
    right = problem.outputs(w, torch.from_numpy(x))[0].argmax(1).numpy() == y
    assert set(row.figures) == {"loss", "accuracy", "balanced accuracy", "larger class"}
    assert row.figures["balanced accuracy"].value == pytest.approx(
        np.mean([right[y == k].mean() for k in range(3)])
    )
    assert row.figures["larger class"].value == pytest.approx(np.bincount(y).max() / len(y))


def test_of_classes_in_an_order_there_are_the_figures_of_several_classes():
    problem = Problem(nn.Linear(FEATURES, 2), Ordinal(3))
    data = [(x, np.arange(len(x)) % 3) for x, _ in silos()]
    label = Label("ordinal", ("stage",), classes=("a", "b", "c"))
    (row, *_) = score(
        connected(problem, data)[0],
        problem.initial([0]),
        Gaussian("s", 1.0, 0.0),
        **SILOS,
        asked=asking(classes=3, label=label, loss=problem.loss),
    )
    assert set(row.figures) == {"loss", "accuracy", "balanced accuracy", "larger class"}


def test_a_model_that_always_says_the_larger_class_is_told_from_a_useful_one_with_a_larger_error():
    random = np.random.default_rng(2)
    y = (random.random(4000) < 0.2).astype(np.int64)
    x = np.stack([y * 1.6 + random.normal(size=4000), random.normal(size=4000)], 1).astype(
        np.float32
    )
    asked = {"names": ("a",), "held_out": (4000,), "asked": asking(bins=10, cap=4.0)}
    budgets = [Budget(1.0, 1e-6)]
    majority, useful = (
        score(
            connected(PROBLEM, [(x, y)])[0],
            torch.tensor([w]),
            gaussian_for("score", budgets),
            **asked,
        )[0].figures
        for w in ([0.0, 0.0, -1.4], [1.6, 0.0, -0.9])
    )
    assert majority["accuracy"].value > useful["accuracy"].high
    for name in ("balanced accuracy", "auc"):
        assert majority[name].low <= 0.5 <= majority[name].high
        assert useful[name].low > 0.5
    assert useful["balanced accuracy"].low > majority["balanced accuracy"].high
    assert majority["larger class"].low <= majority["accuracy"].high
    assert majority["accuracy"].low <= majority["larger class"].high


def test_risks_are_those_that_are_predicted_whatever_weights_the_classes_had():
    """Records from the model's own odds: with the weights taken back out the risks come true, with
    them left in they do not.
    """
    random = np.random.default_rng(5)
    x = random.normal(size=(20000, FEATURES)).astype(np.float32)
    margin = x @ W[0, :2].numpy() + W[0, 2].item()
    y = (random.random(20000) < 1 / (1 + np.exp(-(margin - math.log(4))))).astype(np.int64)
    weighted = Problem(nn.Linear(FEATURES, 1), Weighted(logistic, (1.0, 4.0)))
    asked = {"names": ("a",), "held_out": (20000,)}
    for problem, off in ((weighted, 0.0), (PROBLEM, 0.22)):
        (row, *_) = score(
            connected(problem, [(x, y)])[0],
            W,
            Gaussian("s", 1.0, 0.0),
            **asked,
            asked=asking(bins=20, loss=problem.loss),
        )
        assert row.figures["calibration in the large"].value == pytest.approx(off, abs=0.03)
        told = [abs((b.risk_low + b.risk_high) / 2 - b.observed) for b in row.reliability]
        assert (max(told) < 0.08) == (off == 0.0)
    assert row.figures["calibration slope"].value != pytest.approx(1.0, abs=0.02)


def test_an_evaluation_takes_the_budget_it_was_given_and_no_more():
    fed, ledger = connected(PROBLEM, silos(), budgets=0.7)
    score(fed, W, gaussian_for("score", [Budget(0.7, 1e-6)] * 2), **ASKED)
    assert ledger.epsilon() == pytest.approx(0.7, rel=1e-6)
    assert (ledger.epsilon() <= 0.7).all()


def test_intervals_of_accuracy_and_loss_hold_as_often_as_they_say():
    """150 evaluations at 95 per cent: fewer than 131 hits has a probability of 1e-4 if the interval
    is right, more than 149.5 one of 5e-4.
    """
    data = silos()
    truth = score(connected(PROBLEM, data)[0], W, Gaussian("score", 1.0, 0.0), **ASKED)[0].figures
    hits = dict.fromkeys(truth, 0)
    for seed in range(150):
        found = score(
            connected(PROBLEM, data, seed=seed)[0],
            W,
            Gaussian("score", 1.0, 5.0),
            **SILOS,
            asked=asking(bins=10),
        )[0].figures
        for name in hits:
            hits[name] += found[name].low <= truth[name].value <= found[name].high
    assert all(hits[name] >= 131 for name in hits), hits
    assert all(hits[name] < 150 for name in ("loss", "accuracy", "calibration in the large")), hits


@pytest.mark.parametrize(("noise", "width"), [(0.0005, 0.1), (0.005, 0.2), (0.05, 1.0)])
@pytest.mark.parametrize("within", [0.0, 0.5, 1.0])
def test_the_interval_of_an_auc_covers_it_whatever_the_order_within_a_bin(noise, width, within):
    """600 draws at 95 per cent: below 92 per cent has a probability of 4e-4 where the interval is
    exact. So many records have no sampling error.
    """
    random = np.random.default_rng(1)
    negative, positive = np.array([4, 3, 2, 1, 0, 0]) / 15, np.array([0, 0, 1, 1, 2, 1]) / 15
    order = np.tri(6, k=-1) + np.eye(6) * within
    truth = positive @ order @ negative / (positive.sum() * negative.sum())
    found = [
        auc(
            *(part + noise * random.normal(size=6) for part in (negative, positive)),
            noise=noise,
            n=10**9,
        )
        for _ in range(600)
    ]
    assert np.mean([figure.low <= truth <= figure.high for figure in found]) > 0.92
    assert np.median([figure.high - figure.low for figure in found]) <= width
    if noise < 0.01 and within == 0.5:
        errors = np.array([figure.value - truth for figure in found])
        assert np.median([figure.noise for figure in found]) == pytest.approx(
            errors.std(), rel=0.15
        )


def test_one_class_alone_has_no_auc_and_the_interval_says_so():
    nothing = auc(np.array([0.4, 0.6]), np.zeros(2), noise=0.01, n=100)
    assert (nothing.low, nothing.high) == (0.0, 1.0)
    assert math.isnan(nothing.value)


class Deaf:
    """A channel on which one silo never answers."""

    def __init__(self, fed):
        self._channel = fed._channel

    def ask(self, query, silos):
        if silos == (1,):
            raise Absent("nobody answered", {"b": "budget"})
        return self._channel.ask(query, silos)


def test_a_silo_that_does_not_answer_is_left_out():
    fed = Federation(Deaf(connected(PROBLEM, silos())[0]), Everyone(2))
    assert [row.name for row in score(fed, W, Gaussian("score", 1.0, 0.0), **ASKED)] == ["all", "a"]


def test_where_nobody_answers_it_is_said_who_refused_and_why_each_reason_once():
    def asking(*refusals):
        return SimpleNamespace(
            each=lambda: {
                i: SimpleNamespace(mean=Mock(side_effect=refusal))
                for i, refusal in enumerate(refusals)
            }
        )

    many = asking(
        Absent("", {"a": "statistic"}), Absent("", {"b": "statistic"}), Absent("", {"c": "silent"})
    )
    reason = (
        r"Score \(a statistic, b statistic, c silent\)\. \(statistic\): The policy does not "
        r"allow this statistic; the gates' logs say why"
    )
    with pytest.raises(BadInput, match=f"{reason}, and their policies must allow Score$"):
        score(many, W, Gaussian("score", 1.0, 0.0), **ASKED)
    with pytest.raises(BadInput, match=r"Score \(a budget\)\. \(budget\): "):
        score(asking(StopRun("", {"a": "budget"})), W, Gaussian("score", 1.0, 0.0), **ASKED)
    with pytest.raises(BadInput, match=r"^no$"):
        score(asking(StopRun("no")), W, Gaussian("score", 1.0, 0.0), **ASKED)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"cap": 0.0}, "the cap is 0; it must be above 0"),
        ({"cap": math.nan}, "the cap is nan; it must be above 0"),
        ({"bins": 513}, "bins is 513; it must be from 2 to 512"),
    ],
)
def test_a_senseless_question_is_not_asked(change, sentence):
    with pytest.raises(BadInput, match=sentence):
        asking(**change)


# --- profiles ------------------------------------------------------------------------------------


def holed(seed=0):
    random, made = np.random.default_rng(seed), []
    for n, share in ((3000, 0.3), (1500, 0.0)):
        x = random.normal([50.0, -0.2], [8.0, 0.05], (n, 2)).astype(np.float32)
        x[random.random(n) < share, 0] = np.nan
        made.append((x, (random.random(n) < 0.1).astype(np.int64)))
    return made


def test_a_profile_finds_means_deviations_missing_rates_and_classes_within_its_error_bars():
    """Every figure lies within 5 of its standard errors (and, for moments, what clamping to the
    range costs).
    """
    data, budget = holed(), Budget(3.0, 1e-6)
    fed, ledger = connected(PROBLEM, data, budgets=3.0)
    found = profile(
        fed,
        gaussian_for("profile", [budget] * 2, releases("ab", "01", None)),
        features=("a", "b"),
        classes=("no", "yes"),
        counts=(3000, 1500),
    )
    x, y = (np.concatenate(parts) for parts in zip(*data, strict=True))
    for j, row in enumerate(found["features"]):
        inside = x[~np.isnan(x[:, j]), j].clip(row["low"], row["high"])
        assert abs(row["mean"] - inside.mean()) <= 5 * row["mean_error"]
        assert abs(row["deviation"] - inside.std()) <= 5 * row["deviation_error"]
        assert abs(row["missing"] - np.isnan(x[:, j]).mean()) <= 5 * row["missing_error"]
        assert row["low"] <= np.nanmedian(x[:, j]) <= row["high"]
    for k, row in enumerate(found["classes"]):
        assert abs(row["count"] - (y == k).sum()) <= 5 * row["count_error"]
        assert row["weight"] == pytest.approx(len(y) / (2 * (y == k).sum()), rel=0.1)
    assert (ledger.epsilon() <= 3.0).all()
    assert ledger.epsilon() == pytest.approx(3.0, rel=1e-6)


def test_error_bars_of_counts_and_missing_rates_are_the_noise_that_is_there():
    """200 profiles of the same records: the spread of a figure is its standard error to 25 per cent
    (5 sigma of a chi-square of 199).
    """
    data, mechanism = holed(), Gaussian("profile", 1.0, 2.0)
    shown = []
    for seed in range(200):
        fed, _ = connected(PROBLEM, [(x[:60], y[:60]) for x, y in data], seed=seed)
        found = profile(fed, mechanism, features=("a", "b"), classes=("no", "yes"), counts=(60, 60))
        shown.append((found["classes"][0]["count"], found["classes"][0]["count_error"]))
    values, errors = np.array(shown).T
    assert values.std() == pytest.approx(errors[0], rel=0.25)
