"""Peers without a server as real processes: one for each silo, with its own gate's socket and the
relay's folder, and nothing else.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from gates import LIMIT, shell
from silodp.server.peers import model_hash
from silodp.silo.ledger.durable import DurableLedger
from silodp.silo.ledger.reserve import listed

pytestmark = pytest.mark.xdist_group("peers")  # one set of daemons for all

SILOS = ["silo-1", "silo-2", "silo-3"]
ORDER = (
    "--algorithm",
    "spider",
    "--epsilon",
    "0.5",
    "--phase",
    "2",
    "--deadline",
    "600",
    "--patience",
    "600",
    "--retry",
    "30",
)
COMMAND = [sys.executable, "-m", "silodp.cli", "federation", "run", "--peers"]


@pytest.fixture(scope="module")
def folder():
    home = Path(tempfile.mkdtemp(prefix="silodp-"))
    shell(
        "federation",
        "up",
        "--folder",
        home / "f",
        "--engine",
        "direct",
        "--data",
        "wbcd",
        "--model",
        "mlp:4",
        "--json",
    )
    try:
        yield home / "f"
    finally:
        shell("federation", "down", "--folder", home / "f")
    shutil.rmtree(home)


def charged(folder: Path, run: str) -> list[list[str]]:
    ledgers = [DurableLedger.open(path) for path in sorted(folder.glob("silos/*/ledger.db"))]
    return [
        [entry.query_id for entry in ledger.entries() if entry.act == "charge" and entry.run == run]
        for ledger in ledgers
    ]


def nothing_held(folder: Path) -> bool:
    return not any(listed(DurableLedger.open(path)) for path in folder.glob("silos/*/ledger.db"))


def test_one_command_starts_a_peer_for_each_silo_and_all_have_the_same_model(folder):
    done = subprocess.run(
        [*COMMAND, "--folder", folder, *ORDER, "--rounds", "4"],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    place = folder / "runs/1"
    about, hashes = (
        json.loads((place / "peers.json").read_text()),
        {model_hash(place / name / "model.safetensors") for name in SILOS},
    )
    assert hashes == {model_hash(place / "model.safetensors")}
    assert f"All 3 peers' models are equal: SHA-256 {hashes.pop()}." in done.stdout
    for name in SILOS:
        assert (
            f"{name}: answered 4 of 4 questions, spent at most epsilon 0.5 of 0.5 at delta "
            in done.stdout
        )
    assert [(len(ids), len(set(ids))) for ids in charged(folder, about["run"])] == [(4, 4)] * 3
    assert nothing_held(folder)


def test_a_peer_killed_by_kill_9_stops_the_others_and_all_go_on_together_at_no_second_price(folder):
    place = folder / "runs/2"
    run = subprocess.Popen(
        [*COMMAND, "--folder", folder, *ORDER, "--rounds", "40", "--out", place],
        stderr=subprocess.PIPE,
        text=True,
    )
    journal, deadline = place / "silo-2/journal", time.monotonic() + LIMIT
    while not (journal.exists() and journal.stat().st_size > 10_000):
        assert run.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process_of("silo-2", place), signal.SIGKILL)
    _, errors = run.communicate(timeout=LIMIT)
    assert run.returncode in (2, 3)
    assert "silo-2: its process was killed by signal 9" in errors or run.returncode == 3
    assert not any(process_of(name, place) for name in SILOS), "nobody is left behind"
    words = [
        *COMMAND,
        "--folder",
        folder,
        "--deadline",
        "600",
        "--patience",
        "600",
        "--resume",
        "--json",
        "--out",
        place,
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["ended"], summary["iterates"], len(set(summary["models"].values()))) == (
        "finished",
        40,
        1,
    )
    assert all(silo["spent_epsilon_at_most"] <= 0.5 for silo in summary["silos"])
    assert [(len(ids), len(set(ids))) for ids in charged(folder, summary["run"])] == [(40, 40)] * 3
    assert nothing_held(folder)


def process_of(name: str, place: Path) -> int:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if (
            "--as" in words
            and words[words.index("--as") + 1] == name
            and str(place / name) in words
        ):
            return int(path.parent.name)
    return 0


def test_a_relay_that_alters_replies_stops_every_peer_and_no_model_is_made(folder, tmp_path):
    """Peers at hospitals of their own: the second sees the relay through somebody who alters a bit
    of each answer on its way.
    """
    here, there, stop = tmp_path / "relay", tmp_path / "seen-by-silo-2", threading.Event()
    here.mkdir()
    there.mkdir()
    carried: dict[Path, bytes] = {}

    def carry() -> None:
        while not stop.wait(0.02):
            for source, target in ((here, there), (there, here)):
                for path in source.glob("?" * 64):
                    content = path.read_bytes()
                    if carried.get(path) != content:
                        answer = content.startswith(b"SDPR")
                        altered = (
                            content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]
                            if answer
                            else content
                        )
                        (target / f"{path.name}.part").write_bytes(altered)
                        (target / f"{path.name}.part").replace(target / path.name)
                        carried[path], carried[target / path.name] = content, altered

    courier = threading.Thread(target=carry)
    courier.start()
    cards = [
        word for name in SILOS for word in ("--card", str(folder / "silos" / name / "silo.json"))
    ]
    times = ("--deadline", "60", "--patience", "60", "--retry", "5")
    started = {}
    for name in SILOS:
        own = (
            "--as",
            name,
            "--gate",
            str(folder / "silos" / name / "gate.sock"),
            "--relay",
            str(there if name == "silo-2" else here),
        )
        words = [
            *COMMAND,
            *own,
            "--run-id",
            "altered",
            "--key",
            str(folder / "asker.key"),
            *cards,
            *ORDER,
            *times,
            "--rounds",
            "2",
        ]
        started[name] = subprocess.Popen(
            [*words, "--out", tmp_path / name],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
    said = {name: process.communicate(timeout=LIMIT)[1] for name, process in started.items()}
    stop.set()
    courier.join()
    assert [process.returncode for process in started.values()] == [2, 2, 2], said
    assert "silo-1 forged, silo-3 forged" in said["silo-2"]
    assert "silo-2 forged" in said["silo-1"]
    assert not list(tmp_path.glob("*/model.safetensors"))
    assert [len(ids) for ids in charged(folder, "altered")] == [1, 1, 1], (
        "each gate has answered the one question, once"
    )
    assert nothing_held(folder)


def test_a_run_that_one_silo_refuses_to_hold_for_is_charged_by_none(folder):
    before = [DurableLedger.open(path).head() for path in sorted(folder.glob("silos/*/ledger.db"))]
    words = [
        *COMMAND,
        "--folder",
        folder,
        "--rounds",
        "2",
        "--phase",
        "2",
        "--epsilon",
        "10",
        "--out",
        folder / "runs/refused",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 2, done.stdout
    assert "needs 100.0 % of the budget of silo silo-1" in done.stderr
    assert "nothing was charged" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (folder / "runs/refused").exists()
    assert [
        DurableLedger.open(path).head()[0] for path in sorted(folder.glob("silos/*/ledger.db"))
    ] == [head[0] for head in before]
    assert nothing_held(folder)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("--as", "silo-1"), "--as NAME needs"),
        (("--hub", "x"), "must be given together"),
        (("--quorum", "2"), "leave it out"),
        (("--resume", "--new"), "give one of them"),
        (("--resume", "--out", "nowhere"), "contains no run of these peers"),
    ],
)
def test_words_that_do_not_go_together_are_refused_in_a_sentence(silodp, folder, words, wanted):
    code, _, err = silodp("federation", "run", "--peers", "--folder", folder, *words)
    assert (code, err.count("\n")) == (2, 1), err
    assert wanted in err
