"""The label given the columns, from noisy tables of each column with the label."""

import numpy as np
import pytest
from scipy import special

from silodp.core.problem.schema import Schema
from silodp.server.estimates.grids import grids_of
from silodp.server.estimates.outcome import fit_outcome

LABELS = {
    "multiclass": {"task": "multiclass", "column": "kind", "classes": ["a", "b", "c"]},
    "regression": {"task": "regression", "column": "score", "range": [-3, 7]},
    "survival": {"task": "survival", "time": "months", "event": "event", "edges": [6, 12, 24]},
}
BINARY = {"task": "binary", "column": "died", "classes": ["no", "yes"]}


def schema_of(columns, label):
    number = {"type": "number", "range": [0, 1]}
    return Schema.of({"columns": {f"x{k}": number for k in range(columns)}, "label": label})


def table(code, value, cells, values):
    found = np.zeros((cells, values))
    np.add.at(found, (code, value), 1 / len(code))
    return found


def simulated(slopes, shared, n, seed):
    """Return the cells of columns with a shared part, and a label of a logistic model of them."""
    random = np.random.default_rng(seed)
    common = random.normal(size=(n, 1))
    own = random.normal(size=(n, len(slopes)))
    x = np.sqrt(shared) * common + np.sqrt(1 - shared) * own
    codes = [np.clip(np.floor(4 + 1.5 * column), 0, 7).astype(int) for column in x.T]
    logit = np.stack(codes, 1) @ slopes
    logit = logit - logit.mean()
    return codes, (random.random(n) < special.expit(logit)).astype(int), logit


def fitted(codes, value, noise, seed, label=BINARY, values=2):
    grids = list(grids_of(schema_of(len(codes), label), 8).values())
    random = np.random.default_rng(seed)
    tables = []
    for grid, code in zip(grids, codes, strict=False):
        exact = table(code, value, grid.binned.cells, values)
        tables.append(exact + noise * random.normal(size=exact.shape))
    return fit_outcome(tables, noise, len(value), grids[:-1], grids[-1], codes, codes)


@pytest.mark.parametrize("shared", [0.0, 0.8])
def test_risks_are_right_whether_columns_share_evidence_or_not(shared):
    codes, value, logit = simulated(np.array([0.5, -0.3, 0.0]), shared, 6000, 1)
    risk = fitted(codes, value, 1e-4, 2).chances(codes)[:, 1]
    slope = np.polyfit(logit, special.logit(risk), 1)[0]
    assert slope == pytest.approx(1, abs=0.2)
    assert np.abs(risk - special.expit(logit)).mean() < 0.03


def test_effects_that_are_noise_are_shrunk_to_nearly_nothing():
    codes, value, _ = simulated(np.zeros(6), 0.0, 2000, 3)
    for seed in range(5):
        risk = fitted(codes, value, 0.01, seed).chances(codes)[:, 1]
        assert risk.std() < 0.06


def test_more_noise_never_makes_risks_surer_on_average():
    codes, value, logit = simulated(np.array([0.4, 0.4]), 0.3, 2000, 4)
    spreads = []
    for noise in (1e-3, 0.01, 0.1):
        risks = [fitted(codes, value, noise, seed).chances(codes)[:, 1] for seed in range(8)]
        spreads.append(np.mean([risk.std() for risk in risks]))
    assert spreads[0] == pytest.approx(special.expit(logit).std(), rel=0.15)
    assert spreads[0] > spreads[1] > spreads[2]


@pytest.mark.parametrize("kind", list(LABELS))
def test_a_label_of_several_values_follows_its_column(kind):
    schema = schema_of(2, LABELS[kind])
    label = list(grids_of(schema, 8).values())[-1]
    values = label.binned.bins
    random = np.random.default_rng(5)
    codes = [random.integers(0, 8, 5000) for _ in range(2)]
    if kind == "survival":
        # The first column brings events forward.
        value = np.where(random.random(5000) < codes[0] / 8, 1, values - 1)
    else:
        centre = codes[0] / 7 * (values - 1)
        value = np.clip(np.round(centre + random.normal(size=5000)), 0, values - 1).astype(int)
    outcome = fitted(codes, value, 1e-3, 6, LABELS[kind], values)
    drawn = outcome.sample(codes, np.random.default_rng(7))
    assert drawn.max() < values
    for cell in range(8):
        own = codes[0] == cell
        near = np.abs(drawn[own].mean() - value[own].mean())
        assert near < 0.12 * (values - 1)
    real = np.corrcoef(codes[0], value)[0, 1]
    assert np.corrcoef(codes[0], drawn)[0, 1] == pytest.approx(real, abs=0.08)
    assert np.corrcoef(codes[1], drawn)[0, 1] == pytest.approx(0, abs=0.08)
