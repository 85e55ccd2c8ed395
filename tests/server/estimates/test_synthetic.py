"""Synthetic tables: rows in the silos' own cells, and agreement with what was released."""

import numpy as np
import pandas as pd
import pytest
import torch

from silodp.core.mechanisms import Gaussian
from silodp.core.problem.schema import Schema
from silodp.server.estimates import synthetic as module
from silodp.server.estimates.grids import grids_of
from silodp.server.estimates.mixture import fit, on_simplex, shrunk
from silodp.server.estimates.scoring import Pooled
from silodp.server.estimates.synthetic import Design, cells_of, near, synthesise
from silodp.simulation.frames import by_schema

COLUMNS = {
    "age": {"type": "number", "range": [20, 90], "missing": 50},
    "dose": {"type": "number", "range": [0, 1]},
    "ward": {"type": "category", "categories": ["a", "b", "c"], "missing": "own"},
    "smoker": {"type": "boolean", "missing": False},
}
BINARY = {"task": "binary", "column": "died", "classes": ["no", "yes"]}
LABELS = [
    BINARY,
    {"task": "regression", "column": "score", "range": [-3, 7]},
    {"task": "count", "column": "visits", "most": 30},
    {"task": "survival", "time": "months", "event": "event", "edges": [6, 12, 24]},
]


def gaussian(multiplier):
    return Gaussian("synthesise", 1.0, torch.full((1, 1), multiplier, dtype=torch.float64))


def design_of(schema, bins=10, pairs=()):
    grids = tuple(grids_of(schema, bins).values())
    return Design(grids, tuple(module._merged(grid) for grid in grids), pairs)


@pytest.mark.parametrize("label", LABELS, ids=lambda label: label["task"])
def test_a_row_is_read_back_in_the_cells_it_was_drawn_in(label):
    schema = Schema.of({"columns": COLUMNS, "label": label})
    asked = design_of(schema)
    random = np.random.default_rng(0)
    codes = [random.integers(0, grid.binned.cells, 400) for grid in asked.grids]
    codes[1] %= asked.grids[1].binned.bins  # dose is never missing
    codes[-1] %= asked.grids[-1].binned.bins
    frame = pd.DataFrame(cells_of(asked, schema, codes, random))
    records = by_schema({"made": frame}, schema).loaded.records
    x = torch.where(records.missing, torch.nan, records.x)[0].double()
    for grid, code in zip(asked.grids, codes, strict=True):
        assert grid.binned.codes(x, records.y[0]).tolist() == code.tolist()


def test_pairs_of_columns_are_asked_for_only_while_the_noise_allows():
    schema = Schema.of({"columns": COLUMNS, "label": BINARY})
    assert module.design(schema, gaussian(2.0), [200]).pairs == ()
    rich = module.design(schema, gaussian(2.0), [100_000])
    assert len(rich.pairs) == 6
    assert len(rich.statistic.pairs) == 10
    assert near(5, 1) == ((0, 1), (0, 4), (1, 2), (2, 3), (3, 4))


def table_of(statistic, x, y):
    """Return the answer without noise."""
    return statistic.rows(None, 0)(x, y).mean(0).double().numpy()


def test_rows_have_the_released_tables_and_read_nothing_else(monkeypatch):
    """The answer alone decides the table: no record is in reach."""
    schema = Schema.of({"columns": COLUMNS, "label": BINARY})
    random = np.random.default_rng(1)
    n = 4000
    age = random.uniform(20, 90, n)
    frame = pd.DataFrame(
        {
            "age": np.where(random.random(n) < 0.2, np.nan, age),
            "dose": 0.6 * (age - 20) / 70 + 0.4 * random.random(n),
            "ward": random.choice(["a", "b", "c", ""], n),
            "smoker": np.where(age + random.normal(0, 20, n) > 60, "yes", "no"),
            "died": np.where(random.random(n) < (age - 20) / 70, "yes", "no"),
        }
    )
    records = by_schema({"all": frame}, schema).loaded.records
    x = torch.where(records.missing, torch.nan, records.x)[0]
    y = records.y[0]
    noise = 4e-3

    def answered(fed, statistic, mechanism, counts):
        return Pooled(table_of(statistic, x, y), noise, n, {})

    monkeypatch.setattr(module, "ask_pooled", answered)
    found = synthesise(None, gaussian(1.0), schema, 4000, [n])
    assert found["pairs"] == 6
    assert found["within"] > 0.95
    made = pd.DataFrame(found["table"])
    assert not made.dose.isna().any(), "the schema refuses a missing dose"
    assert made.age.isna().mean() == pytest.approx(0.2, abs=0.03)
    assert made[["age", "dose"]].corr().iloc[0, 1] > 0.7
    for pair in found["correlations"]:
        assert pair["synthetic"] == pytest.approx(pair["released"], abs=0.1)
    assert found["model"]["cells"]
    assert synthesise(None, gaussian(1.0), schema, 4000, [n])["table"] == found["table"]


def test_shares_that_noise_made_negative_become_shares():
    found = on_simplex(np.array([0.7, 0.5, -0.1, 0.3]), np.array([True, True, True, False]))
    assert found == pytest.approx([0.6, 0.4, 0, 0])


def test_a_table_of_noise_becomes_independent_and_a_clear_one_stays():
    random = np.random.default_rng(2)
    rows = np.full(6, 1 / 6)
    columns = np.array([0.5, 0.5])
    alone = np.outer(rows, columns)
    noisy = np.mean(
        [
            np.abs(
                shrunk(alone + 0.02 * random.normal(size=alone.shape), 0.02, rows, columns) - alone
            )
            for _ in range(50)
        ]
    )
    assert noisy < 0.01
    clear = alone + np.outer([0.08, 0.08, 0.08, -0.08, -0.08, -0.08], [1, -1])
    assert shrunk(clear, 0.001, rows, columns) == pytest.approx(clear, abs=1e-3)


def test_a_mixture_has_no_record_in_an_impossible_cell():
    tables = [np.array([[0.3, 0.2], [0.2, 0.3], [0.1, 0.1]])]
    allowed = [np.array([True, True, False])]
    found = fit(tables, {}, [np.arange(3)], allowed, np.array([0.5, 0.5]), 0.01)
    codes, labels = found.sample(1000, np.random.default_rng(3))
    assert codes.max() == 1
    assert labels.mean() == pytest.approx(0.5, abs=0.05)
