"""Day two in the middle of a run: a silo comes, certificates are renewed, a gate moves, a silo is
removed, and the run comes to its end.

Real processes on this machine, over NVFlare and without an engine. The run is let on question by
question while each change is made, and held when it is ahead, so that it can neither end before the
last change nor stand still through one. The same by the page's own words, on machines of their own,
is in tests/deploy.
"""

import contextlib
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

from gates import LIMIT, shell, wbcd, write_csv
from silodp.host.certificates import certificates
from silodp.host.keys import public, read_key
from silodp.silo.ledger.durable import DurableLedger
from silodp.wire.hub import Direct, Hub

pytestmark = [
    pytest.mark.skipif("SILODP_LONG" not in os.environ, reason="long; needs SILODP_LONG=1"),
    pytest.mark.xdist_group("day-two"),
    pytest.mark.filterwarnings(
        "ignore:subprocess .* is still running:ResourceWarning"
    ),  # gates outlive the command that starts them
]
ROUNDS, AFTER, PACE = 150, 4, 0.25
"""Questions of the run, of which so many follow each change before the next, and seconds for each
while a change is made.
"""
NAMES = ("north", "south", "east")


def until(event, run=None):
    deadline = time.monotonic() + LIMIT
    while not event():
        assert run is None or run.poll() is None, "the run has ended"
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Run:
    """A run in a process of its own, let on at a pace."""

    def __init__(self, out: Path, *words: object) -> None:
        self.out, self._free, self._most = out, False, 0
        self.log = Path(f"{out}.log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "silodp.cli", *map(str, words)], stdout=log, stderr=log
            )
        threading.Thread(target=self._brake, daemon=True).start()

    def lines(self) -> list[dict]:
        with contextlib.suppress(FileNotFoundError):
            whole = (self.out / "progress.jsonl").read_bytes().splitlines(keepends=True)
            return [
                json.loads(line) for line in whole if line.endswith(b"\n") and b'"question"' in line
            ]
        return []

    def _brake(self) -> None:
        allowed, begin = 0.0, time.monotonic()
        while self.process.poll() is None:
            now = time.monotonic()
            done = len(self.lines())
            allowed, begin = min(self._most, max(allowed, done) + (now - begin) / PACE), now
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(
                    signal.SIGCONT if self._free or done < max(allowed, 1) else signal.SIGSTOP
                )
            time.sleep(0.01)

    @contextlib.contextmanager
    def through(self, what: list[dict]):
        """Lets the run on while a change is made, and then for some questions more; `what` has
        their lines afterwards.
        """
        first = len(self.lines())
        self._most = first + ROUNDS // 6
        yield
        assert self.process.poll() is None, self.log.read_text()
        done = len(self.lines())
        self._most = max(self._most, done + AFTER)
        until(lambda: len(self.lines()) >= done + AFTER, self.process)
        self._most = len(self.lines())
        what += self.lines()[first:]

    def finish(self) -> dict:
        self._free = True
        assert self.process.wait(LIMIT) == 0, self.log.read_text()
        return json.loads((self.out / "summary.json").read_text())


class Federation:
    """Three silos, and what their operators and the server's do."""

    def __init__(self, engine: str, home: Path) -> None:
        self.engine, self.home, self.folder = engine, home, home / "f"
        self.files = [
            write_csv(home / f"{name}.csv", *part)
            for name, part in zip((*NAMES, "west"), wbcd(4), strict=True)
        ]
        words = [word for path in self.files[:3] for word in ("--silo", path)]
        shell(
            "federation",
            "up",
            "--engine",
            engine,
            "--folder",
            self.folder,
            "--model",
            "mlp:4",
            "--classes",
            "0,1",
            *words,
            "--json",
        )
        self.state = json.loads((self.folder / "federation.json").read_text())
        self.pids = dict(self.state["processes"])
        self.silos = {name: Path(policy).parent for name, policy in self.state["silos"].items()}
        self._more: list[subprocess.Popen] = []

    @property
    def site(self):
        from silodp.wire.nvflare import site

        return site

    def run(self, out: Path, *words: object) -> Run:
        asked = (
            "--algorithm",
            "mb-sgd",
            "--epsilon",
            1,
            "--out",
            out,
            "--deadline",
            60,
            "--patience",
            LIMIT,
            "--retry",
            5,
        )
        return Run(out, "federation", "run", *asked, *words)

    def end(self, name: str) -> None:
        """As `systemctl stop` does."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[name], signal.SIGTERM)
        until(lambda: not _runs(self.pids[name]))

    def start(self, *words: object, **environment: str) -> None:
        with (self.home / "more.log").open("ab") as log:
            command = [sys.executable, "-P", "-m", *map(str, words)]
            self._more.append(
                subprocess.Popen(
                    command,
                    env=os.environ | environment,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def serve(self, folder: Path, state: str) -> None:
        self.start("silodp.cli", "silo", "serve", folder / "policy.toml", SILODP_STATE=state)
        until(lambda: Direct({"it": folder / "gate.sock"}).names())

    def connected(self) -> set[str]:
        with contextlib.suppress(Exception):
            return set(Hub(self.folder / "engine/hub.sock").names())
        return set()

    def restart(self, name: str) -> None:
        """One process of the engine, with the files as they are now."""
        self.end(name)
        self.pids |= self.site.restart_job(self.folder / "engine")

    def close(self) -> None:
        for process in self._more:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self._more:
            process.wait(LIMIT)
        shell("federation", "down", "--folder", self.folder)


def _runs(pid: int) -> bool:
    with contextlib.suppress(OSError, ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.fixture(params=["direct", "nvflare"])
def federation(request, monkeypatch):
    if request.param == "nvflare":
        pytest.importorskip("nvflare")
    home = Path(tempfile.mkdtemp(prefix="silodp-"))  # short, for the sockets in it
    monkeypatch.setenv("SILODP_STATE", str(home / "state"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    made = Federation(request.param, home)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(home)


def dropped(lines) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for line in lines:
        for name, code in line["dropped"].items():
            found.setdefault(name, set()).add(code)
    return found


def test_a_run_goes_on_while_silos_come_and_go_certificates_are_renewed_and_a_gate_moves(
    federation,
):
    f, home = federation, federation.home
    nvflare, asker = f.engine == "nvflare", public(read_key(f.folder / "asker.key"))
    run = f.run(home / "second", "--folder", f.folder, "--rounds", ROUNDS)
    until(lambda: run.lines(), run.process)

    came: list[dict] = []
    with run.through(came):  # a silo comes
        west = home / "west"
        shell(
            "silo",
            "init",
            west,
            "--name",
            "west",
            "--data",
            f.files[3],
            "--classes",
            "0,1",
            "--model",
            "mlp:4",
            "--epsilon",
            10,
            "--asker",
            asker,
        )
        f.serve(west, str(home / "state"))
        if nvflare:
            shell("federation", "add", f.folder / "engine", "west")
            f.start(
                "silodp.wire.nvflare.site",
                "silo",
                f.folder / "engine/kits/west",
                "--gate",
                west / "gate.sock",
            )
            until(lambda: f.connected() == {*NAMES, "west"})
    assert dropped(came) == {}, "nobody notices"

    if nvflare:
        renewed: list[dict] = []
        with run.through(
            renewed
        ):  # certificates: one silo's courier, then the server, with their new ones
            shell("federation", "renew", f.folder / "engine")
            own = f.folder / "engine/kits/north/startup/client.crt"
            before = certificates(own.parent)
            own.write_bytes((f.folder / "engine/renewed/north.crt").read_bytes())
            assert certificates(own.parent) != before
            f.restart("north")
            f.restart("server")
        assert dropped(renewed) == {}, "who restarts is waited for, and the others answer as before"

    moving: list[dict] = []
    with run.through(moving):  # south's gate moves, with its courier
        there = home / "moved"
        arrival = shell("ledger", "expect", home / "arrival.key").split()[-1]
        old = f.silos["south"]
        shell(
            "ledger",
            "bury",
            old / "ledger.db",
            "--arrival",
            arrival,
            "--key",
            old / "silo.key",
            "--to",
            "gate2",
        )
        f.end("gate south")
        if nvflare:
            f.end("south")
        shutil.copytree(old, there, ignore=shutil.ignore_patterns("*.sock"))
        shell("ledger", "arrive", there / "ledger.db", "--key", home / "arrival.key")
        f.serve(there, str(home / "state of gate2"))
        if nvflare:
            shutil.copytree(f.folder / "engine/kits/south", home / "kit")
            f.start("silodp.wire.nvflare.site", "silo", home / "kit", "--gate", there / "gate.sock")
            until(lambda: "south" in f.connected())
        else:
            (old / "gate.sock").unlink(missing_ok=True)
            (old / "gate.sock").symlink_to(there / "gate.sock")
    assert set(dropped(moving)) <= {"south"}
    assert moving[-1]["dropped"] == {}, "it is asked again, and answers from its new place"
    refused = subprocess.run(
        [sys.executable, "-m", "silodp.cli", "silo", "serve", old / "policy.toml"],
        capture_output=True,
        text=True,
    )
    assert (refused.returncode, "tombstone" in refused.stderr) == (2, True), refused.stderr

    left: list[dict] = []
    with run.through(
        left
    ):  # east is removed; without an engine its gate is stopped, and that is all
        shell("federation", "remove", f.folder / "engine", "east") if nvflare else f.end(
            "gate east"
        )
    assert dropped(left) == {"east": {"removed", "retired"} if nvflare else {"silent"}}

    summary = run.finish()
    assert (summary["ended"], summary["questions"]) == ("finished", ROUNDS)
    said = run.log.read_text()
    parting = "east has left the run (removed)" if nvflare else "east did not answer (silent)"
    assert (said.count(parting), said.count("east: answered")) == (1, 1), (
        "one sentence when it happens, and one at the end"
    )
    if nvflare:
        cards = [
            word
            for folder in (f.silos["north"], there, west)
            for word in ("--card", folder / "silo.json")
        ]
        third = f.run(
            home / "third",
            "--hub",
            f.folder / "engine/hub.sock",
            "--key",
            f.folder / "asker.key",
            *cards,
            "--rounds",
            3,
        ).finish()
        assert [silo["answered"] for silo in third["silos"]] == [3, 3, 3]
    answered = {silo["name"]: silo["answered"] for silo in summary["silos"]}
    assert answered["north"] == ROUNDS
    for name, folder in {
        "north": f.silos["north"],
        "south": there,
        "east": f.silos["east"],
        "west": west,
    }.items():
        ledger = DurableLedger.open(folder / "ledger.db")
        ledger.verify()
        charges = [entry.query_id for entry in ledger.entries() if entry.act == "charge"]
        more = 3 if nvflare and name != "east" else 0
        assert len(set(charges)) == len(charges), f"{name} paid twice"
        assert len(charges) - more - answered.get(name, 0) in (
            (0, 1) if name in ("south", "east") else (0,)
        ), name
