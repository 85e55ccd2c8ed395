"""The examples run as they stand, and end where they say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name, *words):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / name), *words]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_risk_score_is_sparse_accurate_and_within_its_budget():
    said = run("risk_score.py")
    used = int(re.search(r"(\d+) of 30 features", said)[1])
    assert 3 <= used <= 25
    assert float(re.search(r"Test error (\S+)", said)[1]) < 0.15
    assert all(1.99 < float(spent) <= 2 for spent in re.findall(r"epsilon (\S+) of 2", said))


def test_hazard_ratios_are_found_within_their_intervals():
    said = run("hazard_ratios.py")
    rows = re.findall(r"^(\S+) +(\d\.\d+) +(\d\.\d+) +(\d\.\d+)", said, re.MULTILINE)
    ratios = {name: (float(low), float(high)) for name, _, low, high in rows}
    assert ratios["age"][0] < 1.03 < ratios["age"][1]
    assert ratios["treated"][1] < 0.8
    assert re.findall(r"^[A-D] +(3\.0)", said, re.MULTILINE) == ["3.0"] * 4


def test_a_loss_of_ones_own_finds_the_quantiles():
    said = run("own_loss.py")
    median, upper = (int(share) for share in re.findall(r"(\d+)% of 100", said))
    assert 35 <= median <= 65
    assert 75 <= upper <= 98
    assert re.findall(r"epsilon (\S+) of 3", said) == ["3.0000"] * 4


@pytest.mark.skipif(
    "SILODP_LONG" not in os.environ, reason="long: a federation of processes; needs SILODP_LONG=1"
)
def test_images_are_learnt_by_processes_and_every_ledger_verifies():
    """Without an engine between them, which test_end_to_end has: that takes as long again."""
    said = run("images_over_the_network.py", "direct")
    assert said.count("answered 16 of 16") == 3
    assert said.count("is whole") == 3
    # in simulation 12 draws of this noise end between 0.14 and 0.21
    assert float(re.search(r"Test error (\S+)", said)[1]) < 0.35
