"""Scores as totals through a shuffler: the held-out records' own figures, what one record can do to
them, and what they cost.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from silodp.server.estimates.scoring_total import score_total, shuffled_for
from torch import nn

from silodp.core.errors import Refused
from silodp.core.mechanisms import Gaussian, shuffle
from silodp.core.privacy.accounting import Budget
from silodp.core.privacy.totals import Schedule, Totals
from silodp.core.problem.losses import cross_entropy, logistic
from silodp.core.problem.problem import Problem
from silodp.core.query import Query
from silodp.core.statistics import Score, ScoreTotal
from silodp.server.estimates.scoring import asked_of, scores_of
from silodp.silo.answer.exact import Exact
from silodp.silo.data.heldout import held_out
from silodp.silo.data.records import Records
from silodp.silo.gate import Gate, check
from silodp.silo.ledger.memory import MemoryLedger
from silodp.testing.statistic import hostile_records
from silodp.wire.inprocess import Total

FEATURES, SHARE, COUNTS = 2, 0.25, (400, 240)
PROBLEM = Problem(nn.Linear(FEATURES, 1), logistic)
W = torch.tensor([[1.5, 0.3, -0.2]])
ASKED = {"classes": 2, "bins": 4, "cap": 3.0, "label": None, "loss": logistic}
BUDGET = Budget(3.0, 1e-5)


def silo(n, seed):
    random = np.random.default_rng(seed)
    x = random.normal(size=(n, FEATURES)).astype(np.float32)
    return x, (x[:, 0] + random.normal(size=n) > 0.3).astype(np.int64)


def deployed(data):
    n = len(data[1])
    return Exact(
        PROBLEM, Records.of([data]), partition=lambda *_: np.arange(n), held_out_share=SHARE
    )


class Added:
    """Deployed silos and a shuffler that adds what they say, each paying from a ledger of
    totals.
    """

    def __init__(self, data):
        self.silos = [deployed(part) for part in data]
        self.ledgers = [MemoryLedger(Totals.for_budget(BUDGET), BUDGET, [len(y)]) for _, y in data]
        self.counts = [len(y) for _, y in data]

    def ask(self, query, silos):
        values = []
        for i in silos:
            self.silos[i].check(query)
            values.append(
                Gate(self.silos[i], self.ledgers[i], dim=PROBLEM.dim, counts=[self.counts[i]])
                .answer(query, [0])
                .value
            )
        return Total(torch.stack(values).sum(0).double(), tuple(silos))


def parts(data):
    held = [held_out(len(y), SHARE) for _, y in data]
    x, y = (
        np.concatenate([part[k][h] for part, h in zip(data, held, strict=True)]) for k in (0, 1)
    )
    rows = Score(W, 4, 3.0).rows(PROBLEM, 0)(torch.from_numpy(x), torch.from_numpy(y))
    return [int(h.sum()) for h in held], rows.mean(0).numpy()


def test_a_total_has_the_held_out_records_own_figures_and_takes_the_budget():
    data = [silo(n, i) for i, n in enumerate(COUNTS)]
    held, mean = parts(data)
    truth = scores_of("all", sum(held), mean, 0.0, asked_of(**ASKED)[0]).figures
    query, channel = shuffled_for(W, BUDGET, COUNTS, **ASKED), Added(data)
    (found,) = score_total(channel, query, counts=COUNTS, held_out=held, **ASKED)
    assert (found.name, found.held_out) == ("all", sum(held))
    for name in ("loss", "accuracy", "auc", "balanced accuracy", "calibration in the large"):
        width = max(
            found.figures[name].high - found.figures[name].low, 4 * found.figures[name].noise
        )
        assert (
            found.figures[name].low - width <= truth[name].value <= found.figures[name].high + width
        )
    assert all(0.9 < ledger.used().item() <= 1 for ledger in channel.ledgers)
    made = Schedule()
    made.add("", query.event())
    assert made.epsilon(BUDGET.delta) <= BUDGET.epsilon
    with pytest.raises(Refused):
        channel.ask(query, [0])  # a second one has no budget left


def test_the_noise_that_is_stated_is_the_noise_that_is_there():
    data = [silo(n, i) for i, n in enumerate((40, 24))]
    held, mean = parts(data)
    query = shuffled_for(W, BUDGET, (40, 24), **ASKED)
    query = Query(query.statistic, replace(query.mechanism, noise_bits=64, levels=16))
    channel, found = Added(data), []
    for ledger in channel.ledgers:
        ledger.charge = lambda event, silos: None
    for _ in range(100):
        (row,) = score_total(channel, query, counts=(40, 24), held_out=held, **ASKED)
        found.append((row.figures["accuracy"].value, row.figures["calibration in the large"].value))
        noise = row.figures["calibration in the large"].noise
    assert np.std([c for _, c in found]) == pytest.approx(
        noise, rel=0.4
    )  # 100 draws: 5.7 standard errors of a standard deviation
    assert np.mean([c for _, c in found]) == pytest.approx(2 * mean[2] - 1, abs=6 * noise / 10)


def test_whatever_a_record_holds_its_vector_is_within_the_ball_that_is_priced():
    statistic = ScoreTotal(W, 4, 1e-300)
    rows = statistic.rows(PROBLEM, 0)
    most = 0.0
    for x, y in hostile_records(FEATURES):
        for label in (y, torch.tensor(1), torch.tensor(0)):
            vector = rows(x[None].float(), torch.as_tensor(label).long()[None])[0]
            assert bool(torch.isfinite(vector).all())
            assert float(vector.norm()) <= statistic.norm * (1 + 1e-12)
            most = max(most, float(vector.norm()))
    assert most > 0.97 * statistic.norm
    assert statistic.norm**2 == pytest.approx(3 / 4 + 1)
    assert ScoreTotal(W, 0, 1.0).norm ** 2 == pytest.approx(2 / 4)


def test_only_the_held_out_records_are_in_it_and_the_others_lend_their_noise(monkeypatch):
    """Without noise, and with even levels: a record of the training part is at the middle, whatever
    it holds.
    """
    monkeypatch.setattr(
        shuffle, "binomial", lambda random, trials, p, size: np.full(size, int(trials * p))
    )
    x, y = silo(40, 7)
    held = held_out(40, SHARE)
    query = shuffled_for(W, BUDGET, (40,), **ASKED)
    query = Query(query.statistic, replace(query.mechanism, levels=2**12))
    before = deployed((x, y)).answer(query, [0])[0, 0]
    for k in (int(np.flatnonzero(~held)[0]), int(np.flatnonzero(held)[0])):
        changed, labels = x.copy(), y.copy()
        changed[k], labels[k] = 50.0, 1 - y[k]
        moved = float((deployed((changed, labels)).answer(query, [0])[0, 0] - before).abs().max())
        assert (moved > 400) == bool(held[k]), (
            "rounding moves a total by a few tens, another label by half of the levels"
        )


def test_it_is_for_totals_alone_and_a_clip_below_its_norm_is_refused():
    statistic = ScoreTotal(W, 4, 3.0)
    with pytest.raises(Refused):
        check(Query(statistic, Gaussian("score", statistic.norm, 1.0)), PROBLEM.dim, [40])
    query = shuffled_for(W, BUDGET, (40,), **ASKED)
    check(query, PROBLEM.dim, [40])
    with pytest.raises(Refused):
        check(Query(statistic, query.mechanism.clipped(statistic.norm * 0.999)), PROBLEM.dim, [40])
    with pytest.raises(Refused):
        Exact(PROBLEM, Records.of([silo(40, 1)]), partition=lambda *_: np.arange(40)).check(
            query
        )  # nothing is held out


def test_fewer_silos_than_all_may_be_counted_on_for_noise():
    everybody, fewer = (
        shuffled_for(W, BUDGET, COUNTS, least, **ASKED).mechanism for least in (None, 1)
    )
    assert (everybody.contributions, fewer.contributions) == (640, 240)
    assert fewer.noise_bits > everybody.noise_bits
    many = Problem(nn.Linear(FEATURES, 3), cross_entropy)
    assert shuffled_for(
        many.initial([0]), BUDGET, COUNTS, **ASKED | {"classes": 3}
    ).statistic.shape == (1, 3 + 6)
