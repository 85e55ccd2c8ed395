"""The gates of this machine without an engine, the commands for them, and peers without a server:
real daemons, real bytes.
"""

import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from gates import ASKER, LIMIT, Clock, Unhurried, three_gates
from silodp.cli.federation_processes import command_of
from silodp.core.mechanisms import Gaussian
from silodp.server.algorithms.spider import prox_spider
from silodp.server.federation import Everyone, Federation, StopRun
from silodp.server.peers import Folder, Peer
from silodp.server.remote import Remote, Timeouts
from silodp.silo.ledger.durable import DurableLedger
from silodp.silo.ledger.reserve import listed
from silodp.wire.hub import Direct

pytestmark = pytest.mark.xdist_group("direct")  # one set of daemons for all
CALM, BRIEF = (
    Timeouts(deadline=LIMIT, limit=LIMIT, retry=30.0),
    Timeouts(deadline=3.0, limit=3.0, retry=1.0),
)
SETTINGS = {
    "rounds": 6,
    "phase": 3,
    "step": 0.5,
    "slope": 1.0,
    "anchor": Gaussian("anchor", 1.0, 30.0),
    "refine": Gaussian("refine", 1.0, 30.0),
}


@pytest.fixture(scope="module")
def gates():
    with three_gates() as made:
        yield made


def test_a_carrier_asks_those_it_knows_and_leaves_out_whoever_does_not_listen(gates, tmp_path):
    carrier = Direct(gates.sockets | {"gone": tmp_path / "no.sock"})
    assert carrier.names() == ["silo-0", "silo-1", "silo-2"]
    replies = carrier.exchange({"silo-0": b"?", "gone": b"?", "unknown": b"?"}, LIMIT)
    assert list(replies) == ["silo-0"]
    assert replies["silo-0"].startswith(b"SDPR")
    assert carrier.exchange({}, 5.0) == {}


def peers(gates, relay_of, run: str, timeouts: Timeouts = CALM, last=lambda: None) -> list:
    """Each silo's own process, here a thread: it reaches its own gate and the relay, and gives its
    iterates or why it stopped.
    """
    results: list = [None] * 3
    start = gates.problem.initial(
        [0]
    )  # draws from torch's one generator, which threads would share as processes do not

    def work(i: int) -> None:
        name = gates.cards[i].name
        carrier = Peer(name, Unhurried(Direct({name: gates.sockets[name]})), relay_of(i))
        channel = Remote(gates.cards, carrier, run=run, key=ASKER, quorum=3, timeouts=timeouts)
        try:
            results[i] = list(
                prox_spider(Federation(channel, Everyone(3)), gates.problem, start, **SETTINGS)
            )
        except StopRun as stop:
            results[i] = str(stop)

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 2, 1)]
    for thread in threads:
        if thread is threads[-1]:
            last()
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    return results


@pytest.fixture(scope="module")
def honest(gates, tmp_path_factory):
    """The relay's folder and the peers' iterates when all goes well; a gate's first answer may take
    seconds, its next do not.
    """
    relay = tmp_path_factory.mktemp("peers") / "relay"
    return relay, peers(gates, lambda i: Folder(relay), "peers")


def test_peers_reach_the_same_iterates_bit_for_bit_and_each_answer_is_charged_once(gates, honest):
    relay, (first, second, third) = honest
    assert len(first) == 6
    for a, b, c in zip(first, second, third, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    assert len(list(relay.iterdir())) == 18
    for gate in gates.gates:
        ids = gate.charges("peers")
        assert len(ids) == len(set(ids)) == 6


class Altering(Folder):
    """A relay that changes one bit of what it gives."""

    def __init__(self, path: Path, at: int) -> None:
        super().__init__(path)
        self._at = at

    def get(self, name):
        content = super().get(name)
        if content is None:
            return None
        at = self._at % len(content)
        return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


class Swapping(Folder):
    """A relay that gives one silo's reply for another's: what was put first, whatever is asked
    for.
    """

    def get(self, name):
        return next(
            (path.read_bytes() for path in sorted(self._path.iterdir()) if path.suffix != ".part"),
            None,
        )


@pytest.mark.parametrize(
    "relay",
    [lambda path: Altering(path, 20), lambda path: Altering(path, -9), Swapping],
    ids=["key", "value", "swap"],
)
def test_a_relay_that_alters_a_byte_or_swaps_replies_is_noticed_by_whoever_reads_it(
    gates, honest, tmp_path, relay, monkeypatch
):
    Clock(monkeypatch)
    path = tmp_path / "relay"

    def others_have_answered() -> None:
        deadline = time.monotonic() + LIMIT
        while len(list(path.glob("?" * 64))) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)

    results = peers(
        gates,
        lambda i: relay(path) if i == 1 else Folder(path),
        f"bad-{path.parent.name[-1]}",
        BRIEF,
        last=others_have_answered,
    )
    assert "forged" in results[1]
    assert all(isinstance(result, str) for result in results), (
        "without the second peer the others do not go on either"
    )


# --- the commands --------------------------------------------------------------------------------


@pytest.fixture
def silodp(silodp):
    return partial(silodp, "federation")


def charged(folder: Path) -> list[list[str]]:
    ledgers = [DurableLedger.open(path) for path in sorted(folder.glob("silos/*/ledger.db"))]
    return [
        [entry.query_id for entry in ledger.entries() if entry.act == "charge"]
        for ledger in ledgers
    ]


def test_one_command_starts_a_federation_another_trains_over_it_and_a_killed_run_goes_on(silodp):
    home = Path(tempfile.mkdtemp(prefix="silodp-"))
    folder = home / "f"
    words = (
        "up",
        "--folder",
        str(folder),
        "--engine",
        "direct",
        "--data",
        "wbcd",
        "--model",
        "mlp:4",
        "--json",
    )
    done = subprocess.run(
        [sys.executable, "-m", "silodp.cli", "federation", *words],
        capture_output=True,
        text=True,
        check=True,
    )
    try:
        made = json.loads(done.stdout)
        assert [p["runs"] for p in made["processes"]] == [True] * 3
        assert made["connected"] == ["silo-1", "silo-2", "silo-3"]
        assert all(
            path.stat().st_mode & 0o777 == 0o600
            for path in [*folder.glob("data/*"), folder / "asker.key"]
        )
        run = ("run", "--folder", folder, "--epsilon", 0.5, "--rounds", 60, "--algorithm", "mb-sgd")
        process = subprocess.Popen(
            [sys.executable, "-m", "silodp.cli", "federation", *map(str, run), "--json"],
            stdout=subprocess.DEVNULL,
        )
        deadline, journal = time.monotonic() + LIMIT, folder / "runs/1/journal"
        while not (journal.exists() and journal.stat().st_size > 20_000):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.kill()
        assert process.wait(LIMIT) == -signal.SIGKILL
        code, text, _ = silodp("run", "--folder", folder, "--resume", "--json")
        summary = json.loads(text)
        assert (code, summary["ended"], summary["iterates"]) == (0, "finished", 60)
        assert all(silo["spent_epsilon_at_most"] <= 0.5 for silo in summary["silos"])
        assert [(len(ids), len(set(ids))) for ids in charged(folder)] == [(60, 60)] * 3
        code, text, _ = silodp(
            "run",
            "--folder",
            folder,
            "--epsilon",
            0.50004,
            "--rounds",
            4,
            "--algorithm",
            "spider",
            "--phase",
            2,
        )
        assert (
            "silo-2: answered 4 of 4 questions, spent at most epsilon 0.5001 of 0.50004 at delta "
            in text
        )
        assert (folder / "runs/2/model.safetensors").exists()
        before = charged(folder)
        code, _, err = silodp(
            "run",
            "--folder",
            folder,
            "--epsilon",
            10,
            "--rounds",
            4,
            "--algorithm",
            "spider",
            "--phase",
            2,
        )
        assert (code, err.count("\n")) == (2, 1), err
        assert re.search(
            (
                r"needs 100\.0 % of the budget of silo silo-1 \(epsilon 10\), and 9\d\.\d % is "
                r"left; nothing was charged or reserved"
            ),
            err,
        )
        assert charged(folder) == before
        assert not (folder / "runs/3").exists()
        assert not any(
            listed(DurableLedger.open(path)) for path in folder.glob("silos/*/ledger.db")
        )
        for words, wanted in (
            (("up", "--folder", folder, "--data", "wbcd"), "already has a running federation"),
            (("run", "--folder", folder, "--out", folder / "runs/2"), "already contains a run"),
            (("run", "--folder", folder, "--epsilon", 11), "has 10 in all"),
            (("run", "--folder", folder, "--quorum", 4), "between 1 and 3"),
            (("run", "--folder", folder, "--hub", "x"), "must be given together"),
            (("run", "--folder", home / "none"), "no federation runs from"),
            (
                ("up", "--folder", home / "g", "--engine", "smoke", "--data", "wbcd"),
                "engine 'smoke' is unknown",
            ),
            (("up", "--folder", home / "g"), "either --data"),
            (
                ("up", "--folder", home / ("g" * 100), "--engine", "direct", "--data", "wbcd"),
                "too long",
            ),
        ):
            code, _, err = silodp(*words)
            assert (code, err.count("\n"), wanted in err) == (2, 1, True), err
        assert not (folder / "runs/3").exists(), "a run that was refused leaves no folder"
    finally:
        assert silodp("down", "--folder", folder)[0] == 0
    assert not any(command_of(process["pid"]) for process in made["processes"])
    assert not (folder / "federation.json").exists()
    shutil.rmtree(home)
