"""What several runs and evaluations have spent together is never said to be less than it is."""

import math

import numpy as np
import pytest

from silodp.core.privacy.accounting import Budget, gaussian_sum, gdp_epsilon, gdp_mu
from silodp.server.order import Order
from silodp.simulation.source import Source
from silodp.simulation.together import together
from silodp.simulation.training import train


def test_parts_whose_epsilon_is_told_as_zero_count_for_what_delta_may_hide():
    delta = 1e-5
    mu = 2.4e-5
    assert gdp_epsilon(mu, delta) == 0, "so that zero is what is told of each"
    many = 10_000
    assert gaussian_sum([0.0] * many, delta) >= gdp_epsilon(mu * math.sqrt(many), delta) > 0
    assert gaussian_sum([1.0, 0.0], delta) >= 1.0


def test_every_run_that_shares_a_file_counts_whatever_its_other_files(tmp_path):
    random = np.random.default_rng(0)
    files = {name: tmp_path / f"{name}.csv" for name in ("a", "b", "c")}
    for path in files.values():
        rows = np.column_stack([random.uniform(-1, 1, 40).round(3), random.integers(0, 2, 40)])
        np.savetxt(path, rows, "%g", ",", header="x,label", comments="")
    for place, names in {"ab": "ab", "bc": "bc", "c": "c"}.items():
        order = Order(
            algorithm="mb-sgd", model="logistic", rounds=1, step=1.0, epsilon=("1",), seed=1
        )
        source = Source(silos=tuple(files[name] for name in names), scale="none")
        train(order, source, tmp_path / "runs" / place)
    delta = 1 / 40**2
    twice = gdp_epsilon(gdp_mu(Budget(1.0, delta)) * 2**0.5, delta)
    runs, spent = together(tmp_path / "runs" / "bc")
    assert [run.folder.name for run in runs] == ["ab", "bc", "c"]
    assert {name: round(epsilon, 3) for name, (epsilon, _) in spent.items()} == {
        "b": round(twice, 3),
        "c": round(twice, 3),
    }
    assert together(tmp_path / "runs" / "ab")[1]["a"][0] == pytest.approx(1.0, abs=1e-3)
