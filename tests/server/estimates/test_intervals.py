"""Intervals include the privacy noise, cover as they say, and are not called 95 % where they do
not.
"""

import json
import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression

from research.coverage import Design, measure
from silodp.core.errors import BadInput
from silodp.core.statistics import Gram
from silodp.server.estimates.intervals import coefficients, coverage, of_bought
from silodp.server.estimates.moments import Bought

F64 = {"dtype": torch.float64}


def bought_of(x, y, noise=0.0, classes=0, bound=None):
    z = np.concatenate([np.ones((len(y), 1)), x, y[:, None]], 1)
    gram = Gram(x.shape[1], classes, 1.0, bound or math.sqrt(2 + x.shape[1]))
    i, j = np.triu_indices(gram.size)
    value = (z.T @ z / len(y))[i, j] * np.where(i == j, 1.0, 41 / 29)
    return Bought(
        gram,
        torch.tensor(value, **F64)[None],
        torch.full((1, 1), noise, **F64),
        torch.full((1, 1), float(len(y)), **F64),
    )


def drawn(n=400, seed=0):
    random = np.random.default_rng(seed)
    x = random.uniform(-1, 1, (n, 3))
    return x, 0.2 + x @ [0.4, -0.2, 0.0] + 0.1 * random.normal(size=n)


def test_without_noise_they_are_the_textbook_s():
    x, y = drawn()
    made = of_bought(bought_of(x, y))
    fitted = LinearRegression().fit(x, y)
    design = np.concatenate([np.ones((len(y), 1)), x], 1)
    variance = ((y - fitted.predict(x)) ** 2).sum() / (len(y) - 4)
    error = np.sqrt(variance * np.diag(np.linalg.inv(design.T @ design)))
    np.testing.assert_allclose(made.value[0], [fitted.intercept_, *fitted.coef_], rtol=1e-9)
    np.testing.assert_allclose(made.error[0], error, rtol=1e-6)
    assert float(made.p_value[0, 1]) < 1e-6 < 0.01 < float(made.p_value[0, 3])


@pytest.mark.parametrize(
    "design",
    [Design(2, (500,), 1.0), Design(3, (300, 700), 3.0), Design(5, (1500,), 3.0, common=0.3)],
)
def test_they_cover_the_truth_as_often_as_they_say(design):
    """2,000 replications: a share of 95 % is between 93 and 97 % but once in 20,000 coefficients;
    seeds are fixed.
    """
    (row,) = measure(2000, (design,))
    assert row["called_95"]
    assert 0.93 <= row["least"] <= row["largest"] <= 0.97


def test_intervals_that_leave_the_privacy_noise_out_do_not_cover(monkeypatch):
    monkeypatch.setattr(
        "research.coverage.covers",
        lambda full, theta, noise, n, random, most: _without(full, theta, noise, n, random),
    )
    (row,) = measure(400, (Design(2, (500,), 1.0),))
    assert row["largest"] < 0.6
    assert not row["called_95"]


def _without(full, theta, noise, n, random):
    each = torch.randn(full.shape, generator=random, **F64).triu() / math.sqrt(2)
    made = coefficients(
        full + noise * (each + each.triu(1).mT),
        torch.zeros(len(full), 1, **F64),
        torch.full((len(full), 1), float(n), **F64),
    )
    return (made.low <= theta) & (theta <= made.high)


def test_where_the_clip_or_the_noise_bites_they_are_not_called_so():
    clipped, hidden = measure(200, (Design(5, (2000,), 3.0, clip=0.5), Design(10, (500,), 0.5)))
    assert not clipped["called_95"]
    assert clipped["least"] > 0.93  # a smaller weight is no bias
    assert not hidden["called_95"]
    assert hidden["largest"] < 0.5


def test_coverage_is_measured_around_the_estimate():
    x, y = drawn(2000)
    sound = coverage(bought_of(x, y, noise=0.004), repeats=800)
    assert float((sound - 0.95).abs().max()) < 0.035
    with pytest.raises(BadInput, match="the noise hides"):
        coverage(bought_of(x, y, noise=0.6), repeats=10)


def test_a_class_has_no_intervals():
    x, y = drawn()
    with pytest.raises(BadInput, match="--model linear"):
        of_bought(bought_of(x, np.sign(y), classes=2))


SCHEMA = """
[columns.age]
type = "number"
range = [0, 100]
[columns.smoker]
type = "boolean"
[label]
column = "pressure"
task = "regression"
range = [50, 250]
"""


def test_a_run_s_estimates_are_in_the_columns_own_units(silodp, tmp_path):
    random = np.random.default_rng(1)
    for name, n in (("a", 4000), ("b", 3000)):
        age, smoker = random.uniform(0, 100, n), random.integers(0, 2, n)
        pressure = 110 + 0.5 * age + 20 * smoker + random.normal(0, 10, n)
        rows = "\n".join(
            f"{a:.3f},{'true' if s else 'false'},{p:.3f}"
            for a, s, p in zip(age, smoker, pressure, strict=True)
        )
        (tmp_path / f"{name}.csv").write_text(f"age,smoker,pressure\n{rows}\n")
    (tmp_path / "schema.toml").write_text(SCHEMA)
    words = (
        "--silo",
        "a.csv",
        "--silo",
        "b.csv",
        "--schema",
        "schema.toml",
        "--model",
        "linear",
        "--algorithm",
        "one-shot",
    )
    code, _, err = silodp(
        "train",
        *words,
        "--weights",
        "records",
        "--clip",
        2,
        "--epsilon",
        3,
        "--seed",
        1,
        "--out",
        "run",
        "--json",
    )
    assert code == 0, err
    found = json.loads(silodp("stats", "estimate", "run", "--json")[1])
    rows = {row["name"]: row for row in found["coefficients"]}
    for name, truth in (("constant", 145.0), ("age", 0.5), ("smoker", 20.0)):
        assert abs(rows[name]["estimate"] - truth) < 4 * rows[name]["error"]
        assert rows[name]["low"] < rows[name]["estimate"] < rows[name]["high"]
        assert 0 < rows[name]["noise"] <= rows[name]["error"] < 5
    assert found["called_95"]
    assert "95 % intervals" in silodp("stats", "estimate", "run")[1]
    code, _, err = silodp("stats", "estimate", "nowhere")
    assert code == 2
    assert "Traceback" not in err
