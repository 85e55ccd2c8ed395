"""Estimates from totals: at a very large budget they are those of all records in one place, and at
an ordinary one their noise is that of one hospital with all records.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import GDP, Budget
from silodp.core.problem.build import Words, build
from silodp.core.problem.task import Task
from silodp.core.statistics import ClassCounts
from silodp.core.weights import Weights
from silodp.server.algorithms import find
from silodp.server.estimates.groups import Groups, score_groups
from silodp.server.estimates.placing import assumed, bins_of
from silodp.server.estimates.profile import profile, releases
from silodp.server.estimates.scoring import ask_pooled, asked_of, gaussian_for, score
from silodp.server.estimates.survival import survival
from silodp.server.federation import Everyone
from silodp.server.plan import calibrate
from silodp.server.settings import prepared
from silodp.server.shuffled import in_totals
from silodp.silo.data.records import Records
from silodp.silo.ledger.memory import MemoryLedger
from silodp.simulation.connect import connect

N = 240
SILOS = 6
VAST = Budget(2000.0, 1e-6)
SMALL = Budget(1.0, 1e-6)
RANDOM = np.random.default_rng(3)
X = RANDOM.uniform(-1, 1, (N, 3)).astype(np.float32)
Y = (X[:, 0] + 0.3 * RANDOM.normal(size=N) > 0).astype(int)
CODES = RANDOM.integers(0, 9, N)


def asked(silos: int, trust: str, budget: Budget, labels=Y, model="logistic", classes=2):
    """A federation over the same records in so many silos, and what a mechanism follows from."""
    records = Records.of([(X[i::silos], labels[i::silos]) for i in range(silos)])
    problem = build(Words(model, Task.plain(classes)), 3, load=None)
    ledger = MemoryLedger(GDP(), [budget] * silos, records.counts)
    weights = Weights("records", records.counts)
    everyone = Everyone(silos)
    fed = connect(trust, problem, records, ledger, [(5, silos)], everyone, weights)
    counting = {"budgets": [budget] * silos, "trust": trust, "counted": silos}
    return fed, problem, records.counts, counting, ledger


def told(silos: int, trust: str, budget: Budget, what: str):
    """The numbers of one kind of estimate."""
    if what == "survival":
        fed, _, counts, counting, ledger = asked(silos, trust, budget, CODES, "linear", 0)
        label = SimpleNamespace(edges=(0.5, 1.0, 1.5, 2.0), columns=("t",), task="survival")
        found = survival(fed, gaussian_for("survival", **counting), label, counts)
        return [row["survival"] for row in found["curve"]], found["count_error"], ledger
    fed, problem, counts, counting, ledger = asked(silos, trust, budget)
    w = torch.tensor([[2.0, 0.5, -0.5, 0.1]])
    if what == "profile":
        mechanism = gaussian_for(
            "profile", releases=releases("abc", ("no", "yes"), None), **counting
        )
        found = profile(
            fed, mechanism, features=("a", "b", "c"), classes=("no", "yes"), counts=counts
        )
        numbers = [row[name] for row in found["features"] for name in ("mean", "deviation")]
        return numbers + [row["count"] for row in found["classes"]], None, ledger
    if what == "groups":
        groups = Groups("side", ("no", "yes"), 1, 1, 0, "")
        found = score_groups(fed, w, gaussian_for("groups", **counting), groups, counts)
        return [row["records"] for row in found["rows"]], found["rows"][0]["records_noise"], ledger
    if what == "score":
        question = asked_of(2, None, problem.loss, bins=bins_of(assumed(0.5), 4, 0.5), cap=4.0)
        names = [f"s{i}" for i in range(silos)]
        mechanism = gaussian_for("score", **counting)
        rows = score(fed, w, mechanism, names=names, held_out=counts, asked=question)
        assert len(rows) == (1 if trust != "isrl" else 1 + silos)
        figures = rows[0].figures
        return [figures["accuracy"].value, figures["loss"].value], figures["accuracy"].noise, ledger
    run = prepared(find("one-shot"), find("one-shot").schedule({}), 1.0)
    plan = calibrate(
        run, {"gram": Gaussian("gram", 1.0, 0.0)}, [[budget] * silos], counts, rule="gdp"
    )
    if trust != "isrl":
        plan = in_totals(plan, silos, masked=trust == "masks")
    *_, last = run(fed, problem, problem.initial([0]), **plan.mechanisms)
    return last[0].tolist(), None, ledger


KINDS = ("survival", "profile", "groups", "score", "one-shot")


@pytest.mark.parametrize("trust", ["masks", "shuffle"])
@pytest.mark.parametrize("what", KINDS)
def test_every_estimate_comes_out_of_totals_as_if_all_records_were_in_one_place(what, trust):
    whole = told(1, "isrl", VAST, what)[0]
    total, _, ledger = told(SILOS, trust, VAST, what)
    assert total == pytest.approx(whole, rel=2e-2, abs=2e-2)
    assert np.all(ledger.epsilon() <= VAST.epsilon)


@pytest.mark.parametrize("what", ["survival", "groups", "score"])
def test_the_noise_of_a_total_is_that_of_one_hospital_with_all_records(what):
    alone = told(1, "isrl", SMALL, what)[1]
    together = told(SILOS, "masks", SMALL, what)[1]
    apart = told(SILOS, "isrl", SMALL, what)[1]
    assert together == pytest.approx(alone, rel=1e-6)
    assert apart == pytest.approx(math.sqrt(SILOS) * alone, rel=1e-6)


def test_what_each_silo_pays_is_the_budget_and_no_silo_is_seen_by_itself():
    fed, _, counts, counting, ledger = asked(SILOS, "masks", SMALL, CODES, "linear", 0)

    found = ask_pooled(fed, ClassCounts(9), gaussian_for("a", **counting), counts)
    assert found.each == {}
    assert found.records == N
    assert ledger.epsilon() == pytest.approx(np.full((1, SILOS), 1.0), rel=1e-6)
    assert np.all(ledger.epsilon() <= 1.0)
