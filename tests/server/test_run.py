"""What a run over a network writes of its releases."""

import json
from dataclasses import asdict

import pytest
from torch import nn

from silodp.core.mechanisms import Gaussian
from silodp.core.problem.losses import logistic
from silodp.core.problem.problem import Problem
from silodp.core.protocol.card import Card
from silodp.core.query import Query
from silodp.core.statistics import Grad
from silodp.server.advice import Advice
from silodp.server.journal import Heard
from silodp.server.order import Order
from silodp.server.progress import Progress
from silodp.server.remote import QuestionReport
from silodp.server.run import advised, plan_order
from silodp.server.spending import Spending


def test_the_noise_of_a_mean_is_over_the_records_that_are_trained_on(tmp_path):
    """Half of the records are held out, so the mean of the others has twice the noise."""
    problem = Problem(nn.Linear(2, 1), logistic)
    about = {
        "key": "0" * 64,
        "records": 100,
        "epsilon": 3.0,
        "delta": 1e-4,
        "rule": "gdp",
        "model": "logistic",
        "prox": "zero",
    }
    card = Card(
        name="a",
        **about,
        features=("u", "v"),
        classes=("0", "1"),
        parameters=3,
        definition="",
        held_out=50,
    )
    plan = plan_order(Order("mb-sgd", rounds=1), [card]).plan
    query = Query(Grad(problem.initial([0])), Gaussian("gradient", 1.0, 2.0))
    record = Progress(tmp_path, keep=False)
    spending = Spending([card], plan, record)
    told = QuestionReport(
        sequence=0, query=query, event=query.event(), answered=("a",), dropped={}, replayed=False
    )
    spending._write_line(told, {"a": Heard("0" * 64, 1, "0" * 64, 0.0)})
    record.close()
    line = json.loads((tmp_path / "progress.jsonl").read_text())
    assert line["noise"] == pytest.approx(2.0 * 2 / 50 * 3**0.5)


def test_advice_over_a_network_asks_only_for_what_every_card_allows(monkeypatch):
    """A silo that says nothing of it may be an older one; what another says counts."""
    seen = []
    monkeypatch.setattr(
        "silodp.server.run.choose", lambda order, facts: seen.append(facts) or Advice(order, {}, ())
    )
    about = {
        "key": "0" * 64,
        "records": 100,
        "epsilon": 3.0,
        "delta": 1e-4,
        "rule": "gdp",
        "model": "logistic",
        "prox": "zero",
    }
    card = Card(
        name="a",
        **about,
        features=("u", "v"),
        classes=("0", "1"),
        parameters=3,
        definition="0" * 64,
    )
    for said in ([()], [("Gram", "Grad")], [("Gram", "Grad"), ("Grad",), ()]):
        cards = [
            Card.of({**asdict(card), "name": f"s{i}", "statistics": list(allowed)})
            for i, allowed in enumerate(said)
        ]
        advised(Order(), cards)
    assert [facts.statistics for facts in seen] == [None, ("Grad", "Gram"), ("Grad",)]
