"""What a stranger meets first: the package's names, its version, and how quickly help comes."""

import ast
import importlib
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import silodp

SOURCE = Path(silodp.__file__)


def test_type_checkers_and_the_interpreter_find_the_same_names():
    told = {
        alias.name: node.module.removeprefix("silodp.")
        for node in ast.walk(ast.parse(SOURCE.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("silodp.")
        for alias in node.names
    }
    assert told == silodp._HOME
    assert sorted(silodp.__all__) == sorted(told)
    assert (SOURCE.parent / "py.typed").exists()


def test_every_public_name_is_listed_and_loads():
    assert set(silodp.__all__) <= set(dir(silodp))
    for name in silodp.__all__:
        assert getattr(silodp, name) is getattr(
            importlib.import_module(f"silodp.{silodp._HOME[name]}"), name
        )
    with pytest.raises(AttributeError, match="no_such"):
        _ = silodp.no_such


def test_the_version_is_the_one_that_the_command_prints():
    done = subprocess.run(
        [sys.executable, "-m", "silodp.cli", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"silodp {silodp.__version__}\n"


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        (["-c", "import silodp"], 0.2),
        (["-m", "silodp.cli", "--help"], 0.5),
        (["-m", "silodp.cli", "-h"], 0.5),
    ],
)
def test_import_and_help_are_quick(words, seconds):
    """By processor time, since a machine that tests is busy; the best of three, since caches may be
    cold.
    """

    def used():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(used() for _ in range(3)) < seconds
