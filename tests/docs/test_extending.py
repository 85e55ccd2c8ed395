"""The files of docs/extending.md, taken from the page, run by their paths alone in every command
that the page shows.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import silodp as package
from silodp.core.errors import BadInput
from silodp.host.extension import load
from silodp.server.algorithms import find
from silodp.testing import check_feature_map, check_model, check_prox

PAGE = (Path(__file__).parents[2] / "docs/extending.md").read_text()
FILES = dict(re.findall(r'```python title="(.*?)"\n(.*?)```', PAGE, re.DOTALL))
COMMANDS = {
    words[1]: words[1:]
    for words in map(str.split, re.findall(r"^silodp .*", PAGE, re.MULTILINE))
    if words[1] != "federation"
}
FEDERATION = {
    words[2]: words[1:]
    for words in map(str.split, re.findall(r"^silodp federation .*", PAGE, re.MULTILINE))
}
OWN = "fedavgm.py:fedavgm"


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """The page's files in an empty folder."""
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)
    return tmp_path


def test_the_page_has_a_file_of_each_kind_and_the_algorithm_is_short():
    assert set(FILES) == {"fedavgm.py", "slack.py", "own.py", "exceeds.py", "test_exceeds.py"}
    assert len(FILES["fedavgm.py"].strip().splitlines()) <= 30
    assert list(COMMANDS) == ["plan", "train", "audit"]
    assert list(FEDERATION) == ["up", "run", "down"]


def test_the_signature_declares_it(here):
    found = find(f"{here}/{OWN}")
    assert found.kinds == ("minibatch",)
    assert list(found.settings) == ["rounds", "local_steps", "keep"]
    assert found.summary.startswith("Server momentum on local steps")
    assert found.schedule({"rounds": 3, "keep": "0.25"}) == {
        "rounds": 3,
        "local_steps": 5,
        "keep": 0.25,
    }
    with pytest.raises(BadInput, match=r"^keep is 1; it must be 0 or more, and less than 1$"):
        found.schedule({"keep": "1"})
    with pytest.raises(BadInput, match=r"has no setting 'kept'; it has rounds, local_steps, keep$"):
        found.schedule({"kept": "0.5"})


def test_the_prox_passes_the_public_check(here):
    check_prox(load(f"{here}/slack.py:Slack")(0.3, 0.5), dim=4)


def test_the_model_its_loss_and_the_feature_map_pass_the_public_checks(here):
    hinge, net, squares = (load(f"{here}/own.py:{name}") for name in ("hinge", "net", "squares"))
    coins = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 4, 3, generator=coins), torch.randint(0, 2, (2, 4), generator=coins)
    check_model(package.Problem(net(3, 2), hinge), x, y, outputs=2)
    check_feature_map(squares, 3)


def test_plan_prices_it_and_train_runs_it_with_every_file(here, silodp):
    code, out, _ = silodp(*COMMANDS["plan"], "--json")
    assert (code, json.loads(out)["releases"][0]["count"]) == (0, 8)
    code, out, _ = silodp(*COMMANDS["train"], "--seed", 0, "--json")
    assert (code, json.loads(out)["parameters"]) == (0, 60 * 3 + 3 + 3 * 2 + 2)
    assert json.loads((here / "run/run.json").read_text())["settings"]["keep"] == 0.3
    code, _, err = silodp("train", "--algorithm", OWN, "--data", "wbcd", "--set", "kept=1")
    assert code == 2
    assert "has no setting" in err


def test_it_is_compared_beside_the_others(here, research):
    (words,) = re.findall(r"^python -m research (compare .*)", PAGE, re.MULTILINE)
    code, out, _ = research(*words.split(), "--json")
    assert code == 0
    assert OWN in {row["curve"] for row in json.loads(out)["rows"]}


def test_it_is_attacked_and_keeps_its_claim(here, silodp):
    code, out, _ = silodp(*COMMANDS["audit"], "--json")
    (row,) = json.loads(out)["rows"]
    assert (code, row["algorithm"], row["alarm"]) == (0, OWN, False)


@pytest.mark.filterwarnings(
    "ignore:subprocess .* is still running:ResourceWarning"
)  # gates outlive the command that starts them
def test_it_runs_over_gates_that_are_processes_of_their_own(here, silodp, tmp_path_factory):
    folder = "--folder", tmp_path_factory.mktemp("q")  # short, for the sockets in it
    try:
        code, _, err = silodp(*FEDERATION["up"], *folder)
        assert code == 0, err
        code, out, _ = silodp(*FEDERATION["run"], *folder, "--json")
    finally:
        assert silodp(*FEDERATION["down"], *folder)[0] == 0
    assert code == 0
    assert [silo["answered"] for silo in json.loads(out)["silos"]] == [2, 2]


ANSWERED = """
import sys
from pathlib import Path

import torch

from silodp.core import statistics
from silodp.core.mechanisms import Gaussian
from silodp.core.query import Query
from silodp.core.statistics.exceeds import Exceeds
from silodp.audit import answers
from silodp.audit.pipeline import DIM, SOUND, Silo

assert statistics.STATISTICS["Exceeds"] is Exceeds
statistic = Exceeds(torch.zeros(DIM, dtype=torch.float64))
query = Query(statistic, Gaussian("mine", statistic.norm, 50.0))


class Named(Silo):
    statistics = ("Exceeds",)


found = Named(Path(sys.argv[1], "named"), SOUND).ask("q", query)
assert found.value.shape == (1, DIM)
try:
    Silo(Path(sys.argv[1], "unnamed"), SOUND).ask("q", query)
except AssertionError as refused:
    print(refused)
try:
    answers.answerable()
except AssertionError as stopped:
    print(stopped)
answers.EXAMPLES[Exceeds] = lambda d: Exceeds(torch.ones(d, dtype=torch.float64))
print(*(row for row in answers.answerable() if row.statistic is Exceeds), sep="; ")
"""


def test_a_statistic_is_one_file_that_is_found_checked_answered_where_a_policy_names_it_and_missed_by_the_audit(  # noqa: E501
    here,
):
    source = here / "src/silodp"
    shutil.copytree(
        Path(package.__file__).parent, source, ignore=shutil.ignore_patterns("__pycache__")
    )
    (source / "core/statistics/exceeds.py").write_text(FILES["exceeds.py"])
    (here / "answered.py").write_text(ANSWERED)

    def run(*words):
        environment = os.environ | {"PYTHONPATH": str(source.parent), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, *words],
            cwd=here,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    assert "2 passed" in run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "test_exceeds.py"
    )
    assert run("answered.py", str(here / "silos")).splitlines() == [
        "the gate refused (statistic)",
        (
            "Exceeds has no example in the audit (audit/answers.py); a gate must not "
            "answer what nobody audits"
        ),
        "Exceeds, Gaussian, FullBatch",
    ]
