"""Columns by group from one question: the figures of a table made by pandas, whatever the trust."""

import math

import numpy as np
import pandas as pd
import pytest
import torch

from silodp.core.errors import BadInput
from silodp.core.privacy.accounting import Budget, gdp_mu
from silodp.core.problem.schema import Schema
from silodp.server.estimates.columns import chosen, columns_by_group, count_noise
from silodp.server.estimates.scoring import gaussian_for
from silodp.server.order import Order
from silodp.simulation.frames import by_schema
from silodp.simulation.scoring import columns_data

SCHEMA = Schema.of(
    {
        "columns": {
            "age": {"type": "number", "range": [0, 100]},
            "crp": {"type": "number", "range": [0, 60], "missing": 5},
            "ward": {"type": "category", "categories": ["a", "b"], "missing": "own"},
            "smoker": {"type": "boolean", "missing": False},
        },
        "label": {"task": "binary", "column": "died", "classes": ["no", "yes"]},
    }
)
RANDOM = np.random.default_rng(2)
N = 900
FRAME = pd.DataFrame(
    {
        "age": RANDOM.integers(0, 101, N).astype(float),
        "crp": np.where(RANDOM.random(N) < 0.2, np.nan, RANDOM.gamma(2, 6, N).clip(0, 60)),
        "ward": RANDOM.choice(["a", "b", ""], N, p=[0.5, 0.4, 0.1]),
        "smoker": RANDOM.choice(["yes", "no", ""], N, p=[0.3, 0.6, 0.1]),
        "died": RANDOM.choice(["yes", "no"], N, p=[0.2, 0.8]),
    }
)
FRAMES = {"north": FRAME[:500], "south": FRAME[500:800], "west": FRAME[800:]}


def asked(epsilon="1000", by="ward", trust="isrl", **more):
    order = Order(epsilon=(epsilon,), delta=("1e-6",), trust=trust, seed=3)
    return columns_data(order, by_schema(FRAMES, SCHEMA), by, **more)


@pytest.mark.parametrize("trust", ["isrl", "masks", "shuffle"])
def test_with_little_noise_every_figure_is_that_of_the_records(trust):
    answer = asked(trust=trust)
    columns = {column["column"]: column for column in answer["columns"]}
    assert list(columns) == ["age", "crp", "smoker", "died"]
    parts = [FRAME, FRAME[FRAME.ward == "a"], FRAME[FRAME.ward == "b"]]
    for k, part in enumerate(parts):
        assert answer["groups"][k]["records"] == pytest.approx(len(part), abs=3)
        for name in ("age", "crp"):
            own = columns[name]["groups"][k]
            assert own["records"] == pytest.approx(part[name].count(), abs=8)
            assert own["mean"]["value"] == pytest.approx(part[name].mean(), abs=1)
            assert own["mean"]["deviation"] == pytest.approx(part[name].std(), abs=1)
            for q in own["quantiles"]:
                assert q["value"] == pytest.approx(part[name].quantile(q["level"]), abs=2)
        for name in ("smoker", "died"):
            yes = columns[name]["groups"][k]["levels"][1]
            assert yes["count"] == pytest.approx((part[name] == "yes").sum(), abs=4)
            assert yes["share"] == pytest.approx(
                (part[name] == "yes").sum() / (part[name] != "").sum(), abs=0.01
            )
    assert columns["crp"]["missing"]["count"] == pytest.approx(FRAME.crp.isna().sum(), abs=4)
    assert columns["age"]["missing"]["count"] == pytest.approx(0, abs=4)
    assert columns["smoker"]["missing"]["share"] == pytest.approx(0.1, abs=0.03)


def test_one_question_takes_the_price_and_no_more():
    answer = asked("1")
    assert [silo["spent_epsilon"] for silo in answer["silos"]] == pytest.approx([1.0] * 3)
    assert all(silo["spent_epsilon"] <= 1.0 for silo in answer["silos"])


def test_the_noise_of_a_count_is_that_of_the_price_and_the_number_of_columns():
    """A record is in a cell of each of four tables: sensitivity sqrt(8)."""
    counts = (500, 300, 100)
    budgets = [Budget(1.0, 1e-6)] * 3
    each = math.sqrt(8) / gdp_mu(budgets[0])
    noise = {trust: asked("1", trust=trust)["count_error"] for trust in ("isrl", "masks")}
    assert noise["masks"] == pytest.approx(each, rel=1e-3)
    assert noise["isrl"] == pytest.approx(math.sqrt(3) * each, rel=1e-3)
    mechanism = gaussian_for("columns", budgets)
    assert count_noise(mechanism, 4, counts) == pytest.approx(noise["isrl"], rel=1e-6)


def test_fewer_columns_have_less_noise_and_numbers_alone_can_be_asked():
    few = asked("1", columns=("age",))
    assert [column["column"] for column in few["columns"]] == ["age"]
    assert few["count_error"] == pytest.approx(asked("1")["count_error"] / 2, rel=1e-6)
    only = asked("1", by=None, numbers=True)
    assert [column["column"] for column in only["columns"]] == ["age", "crp"]
    assert [group["name"] for group in only["groups"]] == ["Overall"]


def test_what_a_silo_is_asked_follows_from_public_numbers_alone():
    """Another file of the same size gets the same question."""

    class Recorder:
        def __init__(self, frames):
            self.sent = []
            self.frames = frames

        def each(self):
            return {i: self for i in range(3)}

        def mean(self, query):
            statistic = query.statistic
            self.sent += [statistic.columns, statistic.edges, statistic.tables]
            return torch.full((1, statistic.cells), float(self.frames))

    sent = []
    for frames in (0, 1):
        port = Recorder(frames)
        mechanism = gaussian_for("columns", [Budget(1.0, 1e-6)] * 3)
        columns_by_group(port, mechanism, SCHEMA, ["age", "smoker"], "ward", (500, 300, 100))
        sent.append(port.sent)
    assert all(torch.equal(a, b) for a, b in zip(*sent, strict=True))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"by": "age"}, "--by is 'age'; it must be a category or boolean column of the schema: "),
        ({"by": "nothing"}, "ward, smoker, died"),
        ({"by": None, "columns": ("agee",)}, "--columns has 'agee'; choose from age"),
        ({"by": "ward", "columns": ("ward",)}, "--columns has 'ward'"),
        ({"by": None, "columns": ("smoker",), "numbers": True}, "choose from age, crp"),
    ],
)
def test_a_column_that_cannot_be_used_is_refused_in_a_sentence(words, sentence):
    with pytest.raises(BadInput, match=sentence):
        chosen(SCHEMA, **words)
    with pytest.raises(BadInput, match="--schema"):
        chosen(None, **words)
