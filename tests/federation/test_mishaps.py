"""Starts that fail and runs that are broken off, with real processes: the next command finds its
way, nothing is lost and nothing paid twice.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest

from gates import LIMIT, wbcd, write_csv
from silodp.silo.ledger.durable import DurableLedger

pytestmark = [
    pytest.mark.xdist_group("federation-direct"),
    pytest.mark.filterwarnings(
        "ignore:subprocess .* is still running:ResourceWarning"
    ),  # gates outlive the command that starts them
]
BRIEF = ("--epsilon", 0.5, "--rounds", 150, "--algorithm", "mb-sgd")


@pytest.fixture(scope="module")
def home():
    place = Path(tempfile.mkdtemp(prefix="silodp-"))  # short, for the sockets in it
    yield place
    for left in place.glob("*/federation.json"):
        subprocess.run(
            command("down", "--folder", left.parent),
            check=True,
            env=environment(place),
            timeout=LIMIT,
        )
    shutil.rmtree(place)


@pytest.fixture
def silodp(silodp, home, monkeypatch):
    """Runs `silodp federation ...` in this process, to start once: (exit code, stdout, stderr).
    What it starts are processes.
    """
    monkeypatch.setenv("SILODP_STATE", str(home / "state"))
    return partial(silodp, "federation")


def command(*words):
    return [sys.executable, "-m", "silodp.cli", "federation", *map(str, words)]


def environment(home):
    return os.environ | {"SILODP_STATE": str(home / "state"), "OMP_NUM_THREADS": "1"}


def begun(home, *words):
    """The process itself, which a real SIGINT reaches even if a shell started the suite in the
    background.
    """
    return subprocess.Popen(
        command(*words),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(home),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for(event, process):
    deadline = time.monotonic() + LIMIT
    while not event():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.002)


def refused(result, *words):
    code, _, err = result
    assert (code, err.count("\n"), "Traceback" in err) == (2, 1, False), err
    for word in words:
        assert word in err, err


def charged(folder):
    ledgers = [DurableLedger.open(path) for path in sorted(folder.glob("silos/*/ledger.db"))]
    return [
        [entry.query_id for entry in ledger.entries() if entry.act == "charge"]
        for ledger in ledgers
    ]


def test_a_start_that_fails_at_any_place_is_in_nobodys_way(silodp, home):
    folder = home / "f"
    paths = [
        write_csv(home / f"{name}.csv", *part) for name, part in zip("ab", wbcd(2), strict=True)
    ]
    up = (
        "up",
        "--folder",
        folder,
        "--engine",
        "direct",
        "--model",
        "mlp:4",
        *(w for path in paths for w in ("--silo", path)),
    )
    good = paths[1].read_text()
    paths[1].write_text(good.replace("label", "outcome", 1))
    refused(
        silodp(*up), "label"
    )  # once the first silo is made, and its ledger known on this machine
    assert not folder.exists()
    paths[1].write_text(good)
    paths[1].chmod(0o666)
    refused(silodp(*up), "did not start")  # once everything is made, and one of the gates runs
    assert not (folder / "federation.json").exists()
    paths[1].chmod(0o600)
    code, _, err = silodp(*up)
    assert code == 0, err
    refused(silodp(*up), "already has a running federation", f"down --folder {folder}")
    assert silodp("down", "--folder", folder)[0] == 0
    keys = [path.read_text() for path in sorted(folder.glob("**/*.key"))]
    refused(silodp(*up, "--epsilon", 11), "another epsilon")
    assert silodp(*up)[0] == 0, "what was stopped goes on by the same command"
    assert [path.read_text() for path in sorted(folder.glob("**/*.key"))] == keys
    assert (
        silodp("run", "--folder", folder, "--epsilon", 0.1, "--rounds", 1, "--algorithm", "mb-sgd")[
            0
        ]
        == 0
    )
    assert silodp("down", "--folder", folder)[0] == 0
    state = json.loads((folder / "stopped.json").read_text())
    (folder / "stopped.json").write_text(json.dumps(state | {"ran": False}))
    refused(silodp(*up, "--epsilon", 11), "has charges")
    (folder / "stopped.json").unlink()
    refused(silodp(*up), "does not overwrite")
    (folder / "making.json").write_text("{}")
    refused(silodp(*up), "has charges")
    assert [len(ids) for ids in charged(folder)] == [1, 1], (
        "a ledger with charges stays, whatever else the folder says"
    )


def test_a_start_that_is_killed_or_interrupted_is_in_nobodys_way(silodp, home):
    folder = home / "g"
    up = (
        "up",
        "--folder",
        folder,
        "--engine",
        "direct",
        "--model",
        "mlp:4",
        "--data",
        "wbcd",
        "--silos",
    )
    said = {}
    for kind in (signal.SIGINT, signal.SIGKILL):
        assert not folder.exists()
        process = begun(home, *up, 40)
        wait_for(lambda: (folder / "silos/silo-2/silo.json").exists(), process)
        process.send_signal(kind)
        said[kind] = process.communicate(timeout=LIMIT)[1], process.returncode
    assert said[signal.SIGINT] == (
        "silodp: interrupted; no files are left, and the same command starts again\n",
        130,
    )
    assert said[signal.SIGKILL] == ("", -signal.SIGKILL)
    assert (folder / "making.json").exists()
    code, _, err = silodp(*up, 2)
    assert code == 0, err
    assert silodp("down", "--folder", folder)[0] == 0


def test_an_interrupted_run_says_how_to_go_on_and_no_second_one_is_begun_by_accident(silodp, home):
    folder = home / "h"
    assert (
        silodp(
            "up",
            "--folder",
            folder,
            "--engine",
            "direct",
            "--model",
            "mlp:4",
            "--data",
            "wbcd",
            "--silos",
            2,
        )[0]
        == 0
    )
    try:
        for words in (
            ("--quorum", 3),
            ("--epsilon", 11),
            ("--sampling", "poisson:0.1"),
            ("--step", -1),
            ("--algorithm", "x"),
        ):
            refused(silodp("run", "--folder", folder, "--algorithm", "mb-sgd", *words))
        refused(silodp("run", "--folder", folder, "--resume"), "no interrupted run")
        assert not [*folder.glob("runs/*")], "what is refused leaves no folder"
        place = folder / "runs/1"
        process = begun(home, "run", "--folder", folder, *BRIEF)
        wait_for(
            lambda: (
                (place / "progress.jsonl").exists()
                and (place / "progress.jsonl").read_bytes().count(b'"question"') > 2
            ),
            process,
        )
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LIMIT)
        assert (process.returncode, err.count("\n")) == (130, 1), err
        again = shlex.split(
            re.search(r"`silodp federation (.*)` resumes the run", err)[1]
        )  # the printed command can be typed
        assert again[-3:] == ["--resume", "--out", str(place)]
        spent = charged(folder)
        refused(
            silodp("run", "--folder", folder, *BRIEF),
            f"the run in {place} is unfinished",
            "--resume",
            "--new",
        )
        assert charged(folder) == spent
        assert not (folder / "runs/2").exists()
        code, out, err = silodp(
            "run",
            "--folder",
            folder,
            "--epsilon",
            0.1,
            "--rounds",
            2,
            "--algorithm",
            "mb-sgd",
            "--new",
            "--json",
        )
        assert (code, json.loads(out)["iterates"]) == (0, 2), err
        code, out, err = silodp(*again, "--json")
        assert (code, json.loads(out)["ended"]) == (0, "finished"), err
        assert [(len(ids), len(set(ids))) for ids in charged(folder)] == [(152, 152)] * 2, (
            "nothing was paid twice"
        )
        refused(silodp("run", "--folder", folder, "--resume"), "no interrupted run")
        assert (
            silodp(
                "run", "--folder", folder, "--epsilon", 0.1, "--rounds", 1, "--algorithm", "mb-sgd"
            )[0]
            == 0
        )
        assert (folder / "runs/3/model.safetensors").exists()
    finally:
        assert silodp("down", "--folder", folder)[0] == 0
