"""A file that somebody leaves in the folder from which a command is given is not run in its place:
`python -m` alone would put that folder first.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import silodp
from silodp.cli.federation_processes import await_gates, launch_gates
from silodp.core.errors import BadInput
from silodp.wire.nvflare import site as nvflare_site

SOURCES = sorted(Path(silodp.__file__).parent.rglob("*.py"))


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """The mark that a planted module would leave."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "typer.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(here)
    return tmp_path / "ran"


def test_the_plant_works_where_nothing_is_done_against_it(planted):
    subprocess.run([sys.executable, "-m", "silodp.cli", "--help"], capture_output=True, check=False)
    assert planted.exists()


def test_the_gates_of_a_federation_do_not_run_what_is_planted_in_the_current_folder(
    planted, tmp_path
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


def test_the_jobs_that_nvflare_starts_itself_leave_it_out_too(planted, tmp_path):
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
