"""Tests run one thread each: the suite itself is spread over the cores."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from silodp.cli.app import main

os.environ["COLUMNS"] = "200"  # tables are read by tests at one width, whatever the terminal

torch.set_num_threads(
    int(os.environ.get("SILODP_TEST_THREADS", "1"))
)  # more in `instruction_sets` alone


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """pytest-xdist 3.8 writes a test's group where pytest 9.2 no longer looks for it, so that
    --dist loadgroup would do nothing.
    """
    for item in items:
        if "@" in (grouped := getattr(item, "_nodeid", "")) and hasattr(item, "_id"):
            item._id = type(item._id).parse(grouped)
    items.sort(
        key=lambda item: item.get_closest_marker("xdist_group") is None
    )  # what takes long begins first, so that no worker waits at the end


@pytest.fixture
def silodp(monkeypatch, capsys, tmp_path):
    """Runs `silodp ...` in an empty folder, in this process: (exit code, stdout, stderr)."""
    return in_process(main, "silodp", monkeypatch, capsys, tmp_path)


@pytest.fixture
def research(monkeypatch, capsys, tmp_path):
    """Runs `python -m research ...` in an empty folder, in this process, as `silodp` does."""
    from research.__main__ import main as research_main

    return in_process(research_main, "research", monkeypatch, capsys, tmp_path)


def in_process(command, name, monkeypatch, capsys, folder):
    """Return a function that runs the command with these words and returns what it printed."""
    monkeypatch.chdir(folder)

    def run(*words):
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            command()
        out = capsys.readouterr()
        return stop.value.code or 0, out.out, out.err

    return run


@pytest.fixture
def said(silodp):
    """What `silodp ...` prints, in this process; it has to end well."""

    def run(*words):
        code, out, err = silodp(*words)
        assert not code, err
        return out

    return run


@pytest.fixture
def folder():
    """In memory where there is such a place: these tests are about order and content, and a disk's
    fsync takes their time.
    """
    place = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


@pytest.fixture
def passable():
    """An empty folder that other users may pass through.

    It is not in pytest's own folder: each new pytest process closes that one to other users,
    also while another process runs its tests.
    """
    with tempfile.TemporaryDirectory(prefix="silodp-") as name:
        Path(name).chmod(0o711)
        yield Path(name)


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The site, built strictly."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    pytest.importorskip("jupytext")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONWARNINGS": "default"}
    done = subprocess.run(
        command,
        cwd=Path(__file__).parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder
