"""`silodp doctor` is green on a machine that can run silodp, and says of each thing that is wrong
what it is and what to do.
"""

import json
import os
import re
import sqlite3
import sys
import time
from pathlib import Path

import pytest

from silodp.cli import doctor
from silodp.cli.app import main
from silodp.engine import native


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """`silodp doctor ...` in an empty folder: (exit code, findings by name, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["silodp", "doctor", "--json", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            main()
        out = capsys.readouterr()
        found = {c["name"]: c for c in json.loads(out.out)["checks"]} if out.out else {}
        return stop.value.code or 0, found, out.err

    return run


def test_this_machine_can_run_silodp_and_the_doctor_leaves_nothing_behind(run, tmp_path):
    code, found, _ = run()
    assert code == 0, found
    assert set(found) >= {
        "python",
        "libraries",
        "torch",
        "gpu",
        "extension",
        "nvflare",
        "flower",
        "disk",
        "permissions",
        "sqlite",
        "clock",
        "entropy",
        "loopback",
        "sockets",
    }
    assert all(c["status"] in ("green", "yellow") for c in found.values())
    assert all(c["fix"] for c in found.values() if c["status"] != "green")
    assert list(tmp_path.iterdir()) == []


def test_it_says_the_same_to_people(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["silodp", "doctor", "--folder", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    assert "Nothing is red" in capsys.readouterr().out


def test_the_libraries_it_looks_for_are_those_of_the_package():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    needed = dict(re.findall(r'^    "([\w-]+)>=([\d.]+)",$', text, re.MULTILINE))
    assert needed == doctor.NEEDED


@pytest.mark.parametrize(
    ("change", "name", "status", "says"),
    [
        (lambda m: m.setattr(doctor, "PYTHON", (9, 0)), "python", "red", "9.0"),
        (lambda m: m.setattr(doctor, "NEEDED", {"numpy": "99"}), "libraries", "red", "numpy>=99"),
        (
            lambda m: m.setattr(doctor, "NEEDED", {"no-such-package": "1"}),
            "libraries",
            "red",
            "no-such-package",
        ),
        (
            lambda m: m.setattr(doctor, "ENGINES", {"nvflare": "no-such-package"}),
            "nvflare",
            "yellow",
            "silodp[nvflare]",
        ),
        (
            lambda m: m.setattr(doctor, "supported", lambda package, version: False),
            "nvflare",
            "red",
            "is not supported",
        ),
        (lambda m: m.setattr(native, "library", lambda: None), "extension", "yellow", "gcc"),
        (lambda m: m.setenv("SILODP_NATIVE", "0"), "extension", "yellow", "unset SILODP_NATIVE"),
        (lambda m: m.setattr(sqlite3, "sqlite_version_info", (3, 8, 0)), "sqlite", "red", "3.37"),
        (
            lambda m: m.setattr(doctor, "EARLIEST", doctor.datetime(2999, 1, 1, tzinfo=doctor.UTC)),
            "clock",
            "red",
            "Set the clock",
        ),
        (lambda m: m.setattr(doctor, "_synchronised", lambda: False), "clock", "yellow", "chrony"),
        (lambda m: m.setattr(os, "getrandom", lambda *_: b"0" * 32), "entropy", "red", "repeats"),
        (
            lambda m: m.setattr(doctor, "_filesystem", lambda _: "nfs4"),
            "disk",
            "yellow",
            "local disk",
        ),
        (
            lambda m: m.setattr(doctor, "LONGEST_SOCKET", 5),
            "sockets",
            "yellow",
            "a shorter path",
        ),
        (
            lambda m: m.setattr(doctor, "_version", lambda _: 1 / 0),
            "libraries",
            "red",
            "ZeroDivisionError",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_fix(run, monkeypatch, change, name, status, says):
    change(monkeypatch)
    code, found, _ = run()
    assert found[name]["status"] == status
    assert says in found[name]["said"] + found[name]["fix"]
    assert code == (1 if status == "red" else 0)


def test_a_folder_that_others_may_write_is_yellow_and_one_that_is_not_there_is_refused(
    run, tmp_path
):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert run("--folder", "open")[1]["permissions"]["status"] == "yellow"
    code, _, err = run("--folder", "nowhere")
    assert code == 2
    assert "nowhere" in err


def test_a_folder_that_cannot_be_written_is_red(run, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(
        doctor.tempfile, "NamedTemporaryFile", refuse
    )  # root may write anywhere, so a mode would not do
    code, found, _ = run()
    assert (code, found["disk"]["status"]) == (1, "red")


def test_it_is_quick(run):
    start = time.process_time()  # what else the machine does is not counted
    run()
    assert time.process_time() - start < 20
