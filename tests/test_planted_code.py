"""A file that somebody leaves in the folder from which a command is given is not run in its place:
`python -m` alone would put that folder first.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import silodp
from silodp.cli.federation_processes import await_gates, launch_gates
from silodp.core.errors import BadInput
from silodp.wire.flower import site as flower_site
from silodp.wire.nvflare import site as nvflare_site

SOURCES = sorted(Path(silodp.__file__).parent.rglob("*.py"))


# Each means the current folder to Python, in spite of -P.
UNSAFE_ENTRIES = {
    "trailing-colon": "/some/path:",
    "leading-colon": ":/some/path",
    "inner-colons": "/some/path::/other/path",
    "dot": ".",
    "relative": "../here",
}


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """The mark that a planted module would leave."""
    here = tmp_path / "here"
    here.mkdir()
    for name in ("typer", "cryptography", "torch"):
        (here / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(here)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return tmp_path / "ran"


@pytest.fixture(params=[None, *UNSAFE_ENTRIES])
def python_path(request, planted, monkeypatch):
    """No PYTHONPATH, or one through which Python would run what is planted."""
    if request.param:
        monkeypatch.setenv("PYTHONPATH", UNSAFE_ENTRIES[request.param])


def test_the_plant_works_where_nothing_is_done_against_it(planted):
    subprocess.run([sys.executable, "-m", "silodp.cli", "--help"], capture_output=True, check=False)
    assert planted.exists()


@pytest.mark.parametrize("entry", UNSAFE_ENTRIES.values(), ids=UNSAFE_ENTRIES)
def test_python_alone_runs_the_plant_through_an_empty_or_relative_entry(
    planted, monkeypatch, entry
):
    monkeypatch.setenv("PYTHONPATH", entry)
    command = [sys.executable, "-P", "-c", "import typer"]
    subprocess.run(command, check=False)
    assert planted.exists()


STARTS = {
    "silodp": ["script"],
    "silodp.cli": ["-P", "-m", "silodp.cli"],
    "nvflare": ["-P", "-m", "silodp.wire.nvflare.site"],
    "flower": ["-P", "-m", "silodp.wire.flower.site"],
}


@pytest.mark.parametrize("words", STARTS.values(), ids=STARTS)
def test_each_command_leaves_the_current_folder_out_at_its_own_start(
    planted, python_path, tmp_path, words
):
    script = tmp_path / "script"
    script.write_text("from silodp.cli.app import main\nmain()\n")
    words = [str(script) if word == "script" else word for word in words]
    done = subprocess.run(
        [sys.executable, *words, "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not planted.exists()


def test_the_gates_of_a_federation_do_not_run_what_is_planted_in_the_current_folder(
    planted, python_path, tmp_path
):
    state = {"registry": str(tmp_path / "state"), "silos": {"north": str(tmp_path / "none.toml")}}
    with pytest.raises(BadInput, match=r"the gate north did not start: .*none\.toml"):
        await_gates(tmp_path, state, launch_gates(tmp_path, state))
    assert not planted.exists()


def test_every_python_that_is_started_leaves_the_current_folder_out():
    starts = [
        (path.name, rest)
        for path in SOURCES
        for rest in re.findall(r"\[\s*sys\.executable,\s*(\S+)", path.read_text())
    ]
    assert len(starts) >= 3, "the pattern finds them"
    assert [name for name, rest in starts if rest != '"-P",'] == []


def test_every_child_of_silodp_has_the_environment_that_leaves_the_current_folder_out():
    calls = [
        (path.name, call)
        for path in SOURCES
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("subprocess.Popen", "os.execv")
    ]
    assert len(calls) >= 5, "the walk finds them"
    without = [
        name for name, call in calls if "env" not in {keyword.arg for keyword in call.keywords}
    ]
    assert without == []
    made = [
        path.name
        for path in SOURCES
        if re.search(r"os\.environ \||dict\(os\.environ", path.read_text())
    ]
    assert made == ["python_path.py"], "one function makes every child's environment"


def test_a_courier_of_flower_gets_no_empty_or_relative_entry(planted, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}::relative:")
    given = {}

    def start(self, name, words, environment, *, within):
        given.update(environment)

    monkeypatch.setattr(flower_site.Processes, "start", start)
    flower_site._spawn(tmp_path, "north", "silo", tmp_path)
    assert given["PYTHONPATH"] == str(tmp_path)
    assert given["PYTHONSAFEPATH"] == "1"


def test_workers_that_a_library_starts_for_a_command_leave_it_out(silodp, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/some/path:")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    seen = {}
    monkeypatch.setattr("silodp.cli.app.app", lambda: sys.exit(seen.update(os.environ)))
    silodp("doctor")
    assert seen["PYTHONPATH"] == "/some/path"
    assert seen["PYTHONSAFEPATH"] == "1"
    assert os.environ["PYTHONPATH"] == "/some/path:"
    assert "PYTHONSAFEPATH" not in os.environ


def test_the_jobs_that_nvflare_starts_itself_leave_it_out_too(planted, python_path, tmp_path):
    """It starts them by `python -m` of its own, in the folder and environment that it was given."""
    code = (
        "import subprocess, sys; subprocess.run([sys.executable, '-m', 'silodp.cli', "
        "'--help'], stdout=subprocess.DEVNULL)"
    )
    (tmp_path / "kits" / "north").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvflare_site, "command", lambda kit: [sys.executable, "-c", code])
        with pytest.raises(BadInput, match="north ended at once"):
            nvflare_site._bring_up(tmp_path, ["north"], 600)
    assert (tmp_path / "north.log").read_text() == "", "the command ran well"
    assert not planted.exists()
