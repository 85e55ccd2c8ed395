"""The bins of a schema's columns: round ends, and values at an end in the bin below."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from silodp.core.errors import BadInput
from silodp.core.problem.problem import Problem
from silodp.core.problem.schema import Schema
from silodp.core.statistics import Marginals
from silodp.server.estimates.grids import bins_for, ends_of, grids_of
from silodp.silo.data.tables import table_of

SCHEMA = {
    "columns": {
        "age": {"type": "number", "range": [0, 110], "missing": 50},
        "ward": {"type": "category", "categories": ["a", "b", "other"], "missing": "own"},
        "smoker": {"type": "boolean", "missing": False, "indicator": True},
    },
    "label": {"task": "count", "column": "visits", "most": 9},
}


def label(table):
    return SCHEMA | {"label": table}


@pytest.mark.parametrize(("low", "high"), [(0, 110), (-1, 1), (0.5, 2.7), (1e-5, 2e-5), (0, 1e6)])
@pytest.mark.parametrize("bins", [1, 2, 8, 15, 64])
def test_a_range_has_at_most_so_many_bins_and_ends_where_it_ends(low, high, bins):
    ends = ends_of(low, high, bins)
    assert ends[0] == low
    assert ends[-1] == high
    assert len(ends) - 1 <= max(bins, 2)
    assert all(a < b for a, b in pairwise(ends))


def test_more_records_and_less_noise_give_more_bins():
    assert bins_for(1000, 0.0) == 100
    assert bins_for(300, 20.0) < bins_for(300, 2.0) <= bins_for(30_000, 2.0) <= 100
    assert bins_for(10, 1e9) == 8


def test_the_cells_of_a_file_are_those_that_a_loop_over_its_rows_finds():
    random = np.random.default_rng(0)
    age = np.array([*random.integers(0, 111, 199).astype(float), np.nan])
    ward = random.choice(["a", "b", "c", ""], 200)
    smoker = random.choice(["yes", "no", ""], 200)
    visits = random.integers(0, 10, 200)
    cells = {"age": age, "ward": ward, "smoker": smoker, "visits": visits}
    table = table_of("file", cells, Schema.of(SCHEMA))
    grids = grids_of(Schema.of(SCHEMA), 12)
    assert list(grids) == ["age", "ward", "smoker", "visits"]
    asked = Marginals.of([grid.binned for grid in grids.values()], [(0,), (1,), (2,), (3,)])
    x = torch.from_numpy(np.where(table.missing, np.nan, table.x))
    rows = asked.rows(Problem(torch.nn.Linear(1, 1), lambda a, b: a), 0)
    found = asked.split(rows(x, torch.from_numpy(table.y)).sum(0))
    ends = grids["age"].ends
    below = np.histogram(age[:-1], [-1, *(end + 1e-9 for end in ends[1:])])[0]
    assert found[0].tolist() == [*below, 1]
    letters = [(ward == name).sum() for name in ("a", "b", "c", "")]
    assert found[1].tolist() == letters
    assert found[2].tolist() == [(smoker == name).sum() for name in ("no", "yes", "")]
    half = grids["visits"].ends
    assert half[0] == -0.5
    assert half[-1] == 9.5
    assert found[3].tolist() == [*np.histogram(visits, half)[0], 0]


def test_labels_are_columns_too():
    assert grids_of(
        Schema.of(label({"task": "binary", "column": "y", "classes": ["no", "yes"]})), 8
    )["y"].labels == ("no", "yes")
    time = {"task": "survival", "time": "t", "event": "e", "edges": [6, 12]}
    grid = grids_of(Schema.of(label(time)), 8)["t and e"]
    assert grid.labels == ("lost by 6", "event by 6", "lost by 12", "event by 12", "after 12")
    number = {"task": "regression", "column": "y", "range": [0, 10]}
    grid = grids_of(Schema.of(label(number)), 5)["y"]
    assert grid.ends == (0, 2.5, 5, 7.5, 10)
    assert grid.binned.edges == (-0.5, 0.0, 0.5)


def test_images_and_files_without_a_schema_have_no_columns():
    with pytest.raises(BadInput, match="--schema"):
        grids_of(None, 8)
