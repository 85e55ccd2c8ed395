"""The files of docs/extending.md, taken from the page, run by their paths alone in every command that takes them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from silodp.core.errors import BadInput
from silodp.host.extension import load
from silodp.server.algorithms import find
from silodp.testing import check_prox

PAGE = (Path(__file__).parents[2] / "docs/extending.md").read_text()
FILES = dict(re.findall(r'```python title="(.*?)"\n(.*?)```', PAGE, re.DOTALL))
OWN = ("--algorithm", "fedavgm.py:fedavgm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("extending")
    for name, code in FILES.items():
        (place / name).write_text(code)
    return place


def silodp(folder: Path, *words: str, status: int = 0) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "silodp.cli", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == status, done.stderr + done.stdout[-2000:]
    return done


def test_the_page_has_a_file_of_each_kind_and_the_algorithm_is_short():
    assert set(FILES) == {"fedavgm.py", "slack.py", "own.py"}
    assert len(FILES["fedavgm.py"].strip().splitlines()) <= 30


def test_the_signature_declares_it(folder):
    found = find(f"{folder}/fedavgm.py:fedavgm")
    assert found.kinds == ("minibatch",)
    assert list(found.settings) == ["rounds", "local_steps", "keep"]
    assert found.summary.startswith("Server momentum on local steps")
    assert found.schedule({"rounds": 3, "keep": "0.25"}) == {"rounds": 3, "local_steps": 5, "keep": 0.25}
    with pytest.raises(BadInput, match=r"^keep is 1; it must be 0 or more, and less than 1$"):
        found.schedule({"keep": "1"})
    with pytest.raises(BadInput, match=r"has no setting 'kept'; it has rounds, local_steps, keep$"):
        found.schedule({"kept": "0.5"})


def test_the_prox_passes_the_public_check(folder):
    check_prox(load(f"{folder}/slack.py:Slack")(0.3, 0.5), dim=4)


def test_plan_prices_it_and_train_runs_it_with_every_file(folder):
    plan = json.loads(
        silodp(folder, "plan", *OWN, "--records", "200", "--silos", "2", "--rounds", "4", "--local-steps", "2", "--json").stdout
    )
    assert plan["releases"][0]["count"] == 8
    own = ("--model", "own.py:net:3", "--loss", "own.py:hinge", "--prox", "slack.py:Slack:0.01:0.5", "--feature-map", "own.py:squares")
    words = (*OWN, "--data", "wbcd", "--rounds", "4", "--set", "keep=0.3", "--seed", "0", "--json", *own)
    found = json.loads(silodp(folder, "train", *words, "--out", "run").stdout)
    assert found["parameters"] == 60 * 3 + 3 + 3 * 2 + 2
    assert json.loads((folder / "run/run.json").read_text())["settings"]["keep"] == 0.3
    assert "has no setting" in silodp(folder, "train", *OWN, "--data", "wbcd", "--set", "kept=1", status=2).stderr
