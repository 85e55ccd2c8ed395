"""The wheel and the sdist hold what they should, and the wheel works in an environment of its
own.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("package")  # one wheel and one environment for all

ROOT = Path(__file__).parent.parent
LEFT_OUT = shutil.ignore_patterns(
    ".git",
    ".venv",
    "__pycache__",
    "*.egg-info",
    "*.so",
    "build",
    "dist",
    "site",
    "runs",
    "federation",
    ".*_cache",
    ".hypothesis",
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(wheel, sdist), made from a copy of the sources: a build leaves folders behind."""
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(ROOT, folder / "source", ignore=LEFT_OUT)
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        str(folder),
        str(folder / "source"),
    ]
    done = subprocess.run(command, env=_alone(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def clean(built, tmp_path_factory):
    """The bin folder of a new environment with the wheel, over the libraries of this one but not
    its silodp.
    """
    home = tmp_path_factory.mktemp("env")
    venv.create(home, with_pip=False, symlinks=True)
    library = home / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    (library / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(home / "bin/python"),
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--ignore-installed",
    ]
    subprocess.run([*pip, str(built[0])], env=_alone(), check=True)
    return home / "bin"


def _alone():
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME")
    }


def run(*words):
    return subprocess.run(
        [str(w) for w in words],
        env=_alone() | {"OMP_NUM_THREADS": "1"},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )


C_CODE = ROOT / "src/silodp/engine/c"
HAS_GCC = sys.platform == "linux" and shutil.which("gcc") is not None


def test_the_wheel_has_every_module_and_nothing_else(built):
    inside = {name for name in zipfile.ZipFile(built[0]).namelist() if ".dist-info/" not in name}
    assert {name for name in inside if not name.endswith(".so")} == {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src/silodp").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and C_CODE not in path.parents
    }


@pytest.mark.skipif(not HAS_GCC, reason="there is no gcc here")
def test_the_wheel_has_the_c_code_built_for_this_platform_and_every_level(built):
    levels = ["baseline"]
    if platform.machine() == "x86_64":
        levels += ["x86-64-v3", "x86-64-v4"]
    libraries = {name for name in zipfile.ZipFile(built[0]).namelist() if name.endswith(".so")}
    assert libraries == {f"silodp/engine/c/{level}.abi3.so" for level in levels}
    assert "-cp311-abi3-linux_" in built[0].name


def test_a_build_without_a_compiler_succeeds_and_leaves_the_c_code_out(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=LEFT_OUT)
    done = subprocess.run(
        [sys.executable, "setup.py", "build"],
        cwd=source,
        env=_alone() | {"CC": "/bin/false"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(source.rglob("silodp/engine/native.py"))
    assert not list(source.rglob("*.so"))


@pytest.mark.skipif(not HAS_GCC, reason="there is no gcc here")
def test_an_installed_wheel_runs_the_c_code(clean):
    code = "from silodp.engine import native; print(native.library() is not None)"
    assert run(clean / "python", "-c", code).stdout.strip() == "True"


def test_the_sdist_can_be_tested_and_documented(built):
    with tarfile.open(built[1]) as sdist:
        inside = {name.partition("/")[2] for name in sdist.getnames()}
    assert {
        "Makefile",
        "setup.py",
        *(str(path.relative_to(ROOT)) for path in C_CODE.glob("*.c")),
        "constraints.txt",
        "mkdocs.yml",
        "docs/index.md",
        "examples/own_loss.py",
        "conftest.py",
        "deploy/silodp-gate.service",
    } <= inside


def test_the_installed_command_is_the_wheels_and_the_doctor_finds_nothing_red(clean, tmp_path):
    where = run(clean / "python", "-c", "import silodp; print(silodp.__file__)").stdout.strip()
    assert where.startswith(str(clean.parent)), where
    assert "train" in run(clean / "silodp", "--help").stdout
    done = run(clean / "silodp", "doctor", "--json", "--folder", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["ok"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_are_told_how_to_complete(clean, shell):
    script = subprocess.run(
        [str(clean / "silodp")],
        env=_alone() | {"_SILODP_COMPLETE": f"source_{shell}"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "_SILODP_COMPLETE" in script
    words = {
        "COMP_WORDS": "silodp fed",
        "COMP_CWORD": "1",
        "_TYPER_COMPLETE_ARGS": "silodp fed",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    found = subprocess.run(
        [str(clean / "silodp")],
        env=_alone() | words | {"_SILODP_COMPLETE": f"complete_{shell}"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "federation" in found
