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
from silodp.server.estimates.synthetic import Design, cells_of, pairs_of, shares_of, synthesise
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


def design_of(schema, bins=10):
    return Design(tuple(grids_of(schema, bins).values()))


@pytest.mark.parametrize("label", LABELS, ids=lambda label: label["task"])
def test_a_row_is_read_back_in_the_cells_it_was_drawn_in(label):
    schema = Schema.of({"columns": COLUMNS, "label": label})
    asked = design_of(schema)
    random = np.random.default_rng(0)
    codes = [random.integers(0, grid.binned.cells, 400) for grid in asked.grids]
    codes[1] %= asked.grids[1].binned.bins  # dose is never missing
    codes[-1] %= asked.grids[-1].binned.bins
    frame = pd.DataFrame(cells_of(asked.grids, schema, codes, random))
    records = by_schema({"made": frame}, schema).loaded.records
    x = torch.where(records.missing, torch.nan, records.x)[0].double()
    for grid, code in zip(asked.grids, codes, strict=True):
        assert grid.binned.codes(x, records.y[0]).tolist() == code.tolist()


def test_noise_leaves_pairs_of_the_columns_on_which_the_label_depends_most():
    schema = Schema.of({"columns": COLUMNS, "label": BINARY})
    asked = design_of(schema)
    alone = [np.full(grid.binned.cells, 1 / grid.binned.cells) for grid in asked.columns]
    strength = [0.1, 0.0, 0.3, 0.2]
    rich = pairs_of(asked, alone, strength, gaussian(2.0), [100_000])
    assert len(rich.places) == 6
    assert len(rich.statistic.pairs) == 6
    poor = pairs_of(asked, alone, strength, gaussian(2.0), [45])
    assert poor.places == ((0, 2), (0, 3), (2, 3))
    assert len(poor.statistic.binned) == 3
    assert rich.groups[0].bins > poor.groups[0].bins


def test_a_number_is_grouped_by_its_shares_and_missing_values_are_apart():
    schema = Schema.of({"columns": COLUMNS, "label": BINARY})
    asked = design_of(schema)
    bins = asked.columns[0].binned.bins
    shares = np.append(np.full(bins, 0.02), 0.1)
    shares[0] = 0.9 - 0.02 * (bins - 1)
    merge = module._merged(asked.columns[0], shares, 3)
    assert merge[0] != merge[1], "the first bin has most of the records, and a group of its own"
    assert merge[-1] == merge[-2] + 1
    assert set(merge) == set(range(merge[-1] + 1))


def test_both_questions_together_take_the_whole_budget():
    schema = Schema.of({"columns": COLUMNS, "label": BINARY})
    shares = shares_of(schema)
    parts = [module._part(gaussian(2.0), share) for share in shares]
    # A release of noise multiplier z is 1/z-GDP, and the squares add up.
    assert sum(float(1 / part.noise_multiplier**2) for part in parts) == pytest.approx(1 / 2.0**2)
    one = Schema.of({"columns": {"age": COLUMNS["age"]}, "label": BINARY})
    assert shares_of(one) == (1.0,), "one column has no pairs"


class Silos:
    """Stand-ins for the silos, which remember the noise multiplier of each question."""

    def __init__(self, x, y, noise, seed=None):
        self.x = x
        self.y = y
        self.noise = noise
        self.random = np.random.default_rng(seed)
        self.exact = seed is None
        self.multipliers = []

    def ask(self, fed, statistic, mechanism, counts):
        self.multipliers.append(float(mechanism.noise_multiplier))
        answer = table_of(statistic, self.x, self.y)
        if not self.exact:
            answer = answer + self.noise * self.random.normal(size=answer.shape)
        return Pooled(answer, self.noise, len(self.y), {})


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

    silos = Silos(x, y, noise)
    monkeypatch.setattr(module, "ask_pooled", silos.ask)
    found = synthesise(None, gaussian(1.0), schema, 4000, [n])
    assert found["pairs"] == 6
    assert sum(1 / multiplier**2 for multiplier in silos.multipliers) <= 1 + 1e-9
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


def test_the_main_pattern_of_a_noisy_table_stays_where_the_rest_is_noise():
    random = np.random.default_rng(4)
    even = np.full(5, 0.2)
    alone = np.outer(even, even)
    place = np.arange(5.0)[:, None]
    rising = 0.004 * np.outer(place - 2, place - 2)
    noisy = alone + rising + 0.006 * random.normal(size=(5, 5))
    main = shrunk(noisy, 0.006, even, even, (place, place))
    assert np.abs(main - alone - rising).max() < np.abs(noisy - alone - rising).max() / 2
    plain = shrunk(noisy, 0.006, even, even)
    assert ((main - alone - rising) ** 2).sum() < ((plain - alone - rising) ** 2).sum()


def test_a_mixture_has_no_record_in_an_impossible_cell_and_agrees_with_a_pair():
    alone = [np.array([0.5, 0.5, 0.0]), np.array([0.5, 0.5])]
    pair = np.array([[0.4, 0.1], [0.1, 0.4], [0.0, 0.0]])
    found = fit(alone, {(0, 1): pair}, [np.arange(3), np.arange(2)], 0.01)
    one, other = found.sample(4000, np.random.default_rng(3))
    assert one.max() == 1
    assert (one == other).mean() == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize("columns", [["age"], ["age", "ward"]])
@pytest.mark.parametrize("label", LABELS, ids=lambda label: label["task"])
def test_every_label_has_rows_and_one_column_is_one_question(label, columns, monkeypatch):
    schema = Schema.of({"columns": {name: COLUMNS[name] for name in columns}, "label": label})
    random = np.random.default_rng(6)
    asked = design_of(schema)
    codes = [random.integers(0, grid.binned.bins, 600) for grid in asked.grids]
    frame = pd.DataFrame(cells_of(asked.grids, schema, codes, random))
    records = by_schema({"all": frame}, schema).loaded.records
    silos = Silos(records.x[0], records.y[0], 5e-3, seed=7)
    monkeypatch.setattr(module, "ask_pooled", silos.ask)
    found = synthesise(None, gaussian(1.0), schema, 200, [600])
    assert len(silos.multipliers) == len(shares_of(schema)) == len(columns)
    assert found["pairs"] == len(columns) - 1
    made = by_schema({"made": pd.DataFrame(found["table"])}, schema).loaded.records
    assert len(made.y[0]) == 200


def copies(n, seed):
    """Return features and labels of a schema in which six columns are copies of one fact."""
    random = np.random.default_rng(seed)
    fact = random.random(n) < 0.4
    y = torch.from_numpy(random.random(n) < np.where(fact, 0.6, 0.25)).long()
    columns = {f"c{k}": {"type": "boolean"} for k in range(6)}
    x = torch.from_numpy(np.where(fact, 1.0, -1.0)).float()[:, None].expand(n, 6)
    return Schema.of({"columns": columns, "label": BINARY}), x, y


def test_a_fact_that_six_columns_state_counts_once(monkeypatch):
    """Without the pairs, a model of the rows has risks near 0 and 1."""
    n = 4000
    schema, x, y = copies(n, 0)
    monkeypatch.setattr(module, "ask_pooled", Silos(x, y, 3e-3, seed=5).ask)
    made = pd.DataFrame(synthesise(None, gaussian(0.1), schema, 5000, [n])["table"])
    inputs = (made[[f"c{k}" for k in range(6)]] == "true").to_numpy(float)
    ill = (made.died == "yes").to_numpy()
    both = [inputs.all(1), (1 - inputs).all(1)]
    assert min(group.mean() for group in both) > 0.3, "the copies agree in the table too"
    assert ill[both[0]].mean() == pytest.approx(0.6, abs=0.06)
    assert ill[both[1]].mean() == pytest.approx(0.25, abs=0.06)
