"""The folder is the clearance: import-linter's contracts hold, and each goes red when somebody
breaks it.
"""

import os
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CONTRACTS = ROOT / ".importlinter"


def lint(source):
    """Exit code and report of `lint-imports` over the package in `source`."""
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command; lint_imports_command()",
    ]
    environment = os.environ | {"PYTHONPATH": str(source), "COLUMNS": "200"}
    done = subprocess.run(
        [*command, "--no-cache", "--config", str(CONTRACTS)],
        cwd=source,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clearance")
    shutil.copytree(
        ROOT / "src" / "silodp", folder / "silodp", ignore=shutil.ignore_patterns("__pycache__")
    )
    return folder


def names():
    config = ConfigParser()
    config.read(CONTRACTS)
    return {config[section]["name"] for section in config.sections() if ":contract:" in section}


def test_every_contract_holds():
    code, report = lint(ROOT / "src")
    assert code == 0, report
    assert "0 broken" in report
    assert all(f"{name} KEPT" in report for name in names()), report


PLANTED = [
    (
        "core/query.py",
        "from silodp.silo.data.records import Records",
        "core, server and wire never import silo",
    ),
    ("server/federation.py", "import silodp.silo.gate", "core, server and wire never import silo"),
    (
        "wire/inprocess.py",
        "from silodp.silo.gate import Gate",
        "core, server and wire never import silo",
    ),
    ("silo/gate.py", "from silodp.server.plan import Plan", "silo does not import server or wire"),
    (
        "silo/ledger/memory.py",
        "from silodp.wire import inprocess",
        "silo does not import server or wire",
    ),
    (
        "silo/service/door.py",
        "from silodp.silo.fits.compare import compare",
        "nothing that answers imports a fit to raw records",
    ),
    (
        "silo/answer/exact.py",
        "def late():\n    from silodp.silo import personal",
        "nothing that answers imports a fit to raw records",
    ),
    (
        "server/plan.py",
        "def late():\n    from silodp.wire.inprocess import InProcess",
        "server does not import wire",
    ),
    ("core/problem/prox.py", "import silodp.server.output", "core imports nothing of the others"),
    (
        "pages/runs.py",
        "from silodp.silo.ledger.memory import MemoryLedger",
        "pages import core alone",
    ),
    ("pages/report.py", "from silodp.server.plan import Plan", "pages import core alone"),
    (
        "silo/answer/simulated.py",
        "from silodp.simulation import evaluate",
        "nothing deployed imports simulation, audit or cli",
    ),
    (
        "server/output.py",
        "from silodp.testing.evaluate import error_rate",
        "nothing deployed imports simulation, audit or cli",
    ),
    (
        "wire/inprocess.py",
        "from silodp import cli",
        "nothing deployed imports simulation, audit or cli",
    ),
    (
        "shuffler/__init__.py",
        "from silodp.simulation import evaluate",
        "nothing deployed imports simulation, audit or cli",
    ),
    (
        "shuffler/pool.py",
        "from silodp.silo import records",
        "the shuffler imports core and host only",
    ),
    (
        "shuffler/door.py",
        "from silodp.server import remote",
        "the shuffler imports core and host only",
    ),
    (
        "host/listener.py",
        "from silodp.silo import policy",
        "nothing deployed imports simulation, audit or cli",
    ),
]


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    PLANTED,
    ids=lambda v: v.split("\n")[-1].strip().removeprefix("from "),
)
def test_a_planted_import_turns_its_contract_red(copy, file, line, contract):
    path = copy / "silodp" / file
    before = path.read_text() if path.exists() else None
    path.parent.mkdir(exist_ok=True)
    try:
        path.write_text((before or "") + f"\n{line}\n")
        code, report = lint(copy)
    finally:
        if before is None:
            shutil.rmtree(path.parent)
        else:
            path.write_text(before)
    assert code == 1, report
    assert f"{contract} BROKEN" in report, report


def test_every_contract_is_seen_red_above():
    assert {contract for _, _, contract in PLANTED} == names()
