"""Chaos: whatever is killed, cut off, doubled or held up, a run comes to its end, and nobody pays
twice, too much or too little.

Each run is a seeded storm over a federation of real processes: kill -9 of a gate, a shuffler, a
courier, the engine's server or job, or the algorithm's own process; a network that is cut and
heals; frames that arrive twice or late. Between couriers and gates there is a relay, which makes
the weather and keeps a copy of every reply that leaves a gate or the shuffler. With the engine
`direct` that relay is the courier. `shuffle` is that engine with a shuffler: a run of totals.

The engines' network is a namespace whose only device is taken down and up; without the right to
make one, couriers are stopped and go on. SILODP_LONG is the number of storms.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gates import command
from silodp.cli.federation_files import problem_of, read_key
from silodp.cli.federation_shuffle import shuffler_card
from silodp.core.protocol.codec import Answer, Sealed, decode_reply
from silodp.core.protocol.quote import HELD, decode_hold_reply
from silodp.core.protocol.relay import Passed, decode_outcome
from silodp.host.cards import read_card
from silodp.server.journal import Journal
from silodp.server.order import Order
from silodp.server.run import NetworkRun, plan_order
from silodp.silo.ledger.durable import DurableLedger

STORMS = int(os.environ.get("SILODP_LONG", "1"))
KINDS = {
    "direct": ("gate", "courier", "algorithm", "cut", "twice", "late"),
    "nvflare": ("server", "courier", "cut", "gate", "algorithm", "twice", "late"),
    "flower": ("server", "courier", "server", "cut", "gate", "algorithm"),
    "shuffle": ("shuffler", "gate", "algorithm", "courier", "cut", "shuffler", "twice", "late"),
}
ROUNDS = {"direct": 20, "nvflare": 20, "flower": 6, "shuffle": 12}
WAITS = (
    {"deadline": 300, "patience": 600, "retry": 1, "quorum": 3},
    {"deadline": 2, "patience": 600, "retry": 0.5, "quorum": 1},
    {"deadline": 1, "patience": 1.5, "retry": 0.5, "quorum": 2},
)
"""What the operator may have chosen: to wait for everyone, to go on without whoever is silent, or
to give up and resume.
"""
SLOW = {"deadline": 300, "patience": 600, "retry": 15, "quorum": 3}
BUDGET, EPSILON = 6.0, {"direct": 0.3, "nvflare": 0.3, "flower": 0.3, "shuffle": 0.5}
PATIENCE = 900.0  # to end a test that hangs; nothing waits so long when all is well

RELAY = """
import json, os, random, socket, sys, threading, time
folder, places, guard = sys.argv[1], json.loads(sys.argv[2]), threading.Lock()
def weather(name):
    with open(folder + "/weather") as file:
        return json.load(file).get(name, {})
def whole(line, size):
    data = b""
    while len(data) < size:
        piece = line.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data
def ask(name, frame):
    with socket.socket(socket.AF_UNIX) as gate:
        gate.settimeout(600)
        gate.connect(places[name] + "/real.sock")
        gate.sendall(len(frame).to_bytes(4, "big") + frame)
        reply = whole(gate, int.from_bytes(whole(gate, 4), "big"))
    with guard, open(folder + "/released", "ab", 0) as file:
        file.write(json.dumps([name, reply.hex()]).encode() + b"\\n")
    return reply
def carry(name, line):
    with line:
        try:
            frame = whole(line, int.from_bytes(whole(line, 4), "big"))
            time.sleep(random.uniform(0, 0.04))
            now = weather(name)
            if now.get("cut"):
                while weather(name).get("cut"):
                    time.sleep(0.02)
                return
            time.sleep(random.uniform(0, now.get("late", 0)))
            if now.get("twice"):
                threading.Thread(target=again, args=(name, frame), daemon=True).start()
            reply = ask(name, frame)
            time.sleep(random.uniform(0, 0.04))
            if not weather(name).get("cut"):
                line.sendall(len(reply).to_bytes(4, "big") + reply)
        except (OSError, EOFError):
            pass
def again(name, frame):
    try:
        ask(name, frame)
    except (OSError, EOFError):
        pass
def serve(name):
    path = places[name] + ("/shuffler.sock" if name == "shuffler" else "/gate.sock")
    if os.path.lexists(path):
        os.unlink(path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        while True:
            threading.Thread(target=carry, args=(name, listener.accept()[0]), daemon=True).start()
threads = [threading.Thread(target=serve, args=(name,)) for name in places]
for thread in threads:
    thread.start()
"""

forked = multiprocessing.get_context("forkserver")
forked.set_forkserver_preload(
    [
        "silodp.cli.app",
        "silodp.cli.silo",
        "silodp.silo.service.daemon",
        "silodp.server.run",
        "silodp.shuffler.daemon",
    ]
)


class Ground:
    """A federation on which storms are let loose, and what its operators do about them: they start
    again what was killed.
    """

    def __init__(self, engine: str) -> None:
        self.engine, self.home = engine, Path(tempfile.mkdtemp(prefix="silodp-"))
        self.folder = self.home / "f"
        self.names = ["silo-1", "silo-2", "silo-3"]
        self._gates: dict[str, multiprocessing.process.BaseProcess] = {}
        self._relay: subprocess.Popen | None = None
        self._direct, shuffled = engine in ("direct", "shuffle"), engine == "shuffle"
        self._namespace = (
            f"silodp-{os.getpid()}-{engine}" if not self._direct and _makes_namespaces() else ""
        )
        if self._namespace:
            subprocess.run(["ip", "netns", "add", self._namespace], check=True)
            self._network("up")
        words = (
            "--data",
            "wbcd",
            "--engine",
            "direct" if shuffled else engine,
            "--trust",
            "shuffle" if shuffled else "isrl",
            "--model",
            "mlp:4",
        )
        words += ("--folder", str(self.folder), "--epsilon", str(BUDGET), "--json")
        self._there("-m", "silodp.cli", "federation", "up", *words)
        state = json.loads((self.folder / "federation.json").read_text())
        self.policies, self._processes, self._state = (
            state["silos"],
            state["processes"],
            {"SILODP_STATE": state["registry"]},
        )
        self.cards = [
            read_card(Path(policy).parent / "silo.json") for policy in self.policies.values()
        ]
        self.problem = problem_of(self.cards[0], Order())
        self.mixer = shuffler_card(self.folder / "shuffler/shuffler.json") if shuffled else None
        self._settings = self.policies | ({"shuffler": state["shuffler"]} if shuffled else {})
        for settings in map(Path, self._settings.values()):
            own = "shuffler.sock" if settings.name == "shuffler.toml" else "gate.sock"
            settings.write_text(
                settings.read_text().replace(f'socket = "{own}"', 'socket = "real.sock"')
            )
            (settings.parent / own).rename(settings.parent / "real.sock")
        self.weather()
        self._start_relay()

    def close(self) -> None:
        for gate in self._gates.values():
            gate.terminate()
            gate.join(PATIENCE)
        if self._relay:
            self._relay.kill()
            self._relay.wait()
        if (self.folder / "federation.json").exists():
            self._there("-m", "silodp.cli", "federation", "down", "--folder", str(self.folder))
        if self._namespace:
            subprocess.run(["ip", "netns", "del", self._namespace], check=True)
        shutil.rmtree(self.home)

    # --- what operators do -----------------------------------------------------------------------

    def train(self, out: Path, waits: dict[str, float]) -> multiprocessing.process.BaseProcess:
        """The algorithm's own process: a new run, or the one in `out` resumed."""
        words = ["federation", "run", "--folder", str(self.folder), "--out", str(out), "--json"]
        words += [str(word) for name, value in waits.items() for word in (f"--{name}", value)]
        order = [
            "--algorithm",
            "spider",
            "--rounds",
            str(ROUNDS[self.engine]),
            "--phase",
            "4",
            "--epsilon",
            str(EPSILON[self.engine]),
        ]
        words += ["--resume"] if (out / "run.json").exists() else order
        run = forked.Process(target=command, args=(words, self._state, f"{out}.log"))
        run.start()
        return run

    def _start_gate(self, name: str) -> None:
        group = ["federation", "shuffler"] if name == "shuffler" else ["silo"]
        self._gates[name] = forked.Process(
            target=command,
            args=(
                [*group, "serve", self._settings[name]],
                self._state,
                str(self.folder / "logs/again.txt"),
            ),
        )
        self._gates[name].start()

    def _start_relay(self) -> None:
        self._relay = subprocess.Popen(
            [
                sys.executable,
                "-c",
                RELAY,
                str(self.folder),
                json.dumps(
                    {name: str(Path(settings).parent) for name, settings in self._settings.items()}
                ),
            ]
        )

    def _there(self, *words: str) -> None:
        """A Python program on the engine's side of the network."""
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        inside = ["ip", "netns", "exec", self._namespace] if self._namespace else []
        done = subprocess.run(
            [*inside, sys.executable, *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stderr

    def _site(self, call: str) -> None:
        given = (
            f"from pathlib import Path; from silodp.wire.{self.engine} import site; folder = "
            f"Path({str(self.folder)!r})"
        )
        self._there("-c", f"{given}; site.{call}")

    def _pid(self, name: str) -> int:
        return json.loads((self.folder / "engine/processes.json").read_text())[name][0]

    # --- what happens to them --------------------------------------------------------------------

    def strike(
        self, kind: str, chance: random.Random, run: multiprocessing.process.BaseProcess
    ) -> Callable[[], None]:
        """Does it, and gives what undoes it."""
        name = chance.choice(self.names)
        if kind == "algorithm":
            run.kill()
            return lambda: None
        if kind in ("gate", "shuffler"):
            victim, first = (name, f"gate {name}") if kind == "gate" else (kind, "shuffler daemon")
            if victim in self._gates:
                self._gates[victim].kill()
                self._gates[victim].join(PATIENCE)
            else:
                os.kill(self._processes[first], signal.SIGKILL)
            return lambda: self._start_gate(victim)
        if kind in ("twice", "late"):
            self.weather(
                dict.fromkeys(self._settings, {"twice": True} if kind == "twice" else {"late": 3.0})
            )
            return self.weather
        if kind == "cut":
            return self._cut(chance)
        if self._direct:
            assert self._relay
            self._relay.kill()
            self._relay.wait()
            return self._start_relay
        who = {
            "courier": name,
            "server": "server",
        }[kind]
        os.killpg(self._pid(who), signal.SIGKILL)
        if self.engine == "nvflare":
            return lambda: self._site("restart_job(folder / 'engine')")
        gate = f"folder / 'silos/{name}/gate.sock'"
        return {
            "courier": lambda: self._site(f"start_silo(folder / 'engine', {name!r}, {gate})"),
            "server": lambda: self._site("restart_server(folder / 'engine')"),
        }[kind]

    def _cut(self, chance: random.Random) -> Callable[[], None]:
        if self._direct:
            self.weather(
                {
                    name: {"cut": True}
                    for name in chance.sample(list(self._settings), chance.randint(1, 3))
                }
            )
            return self.weather
        if self._namespace:
            self._network("down")
            return lambda: self._network("up")
        couriers = [self._pid(name) for name in self.names]
        for pid in couriers:
            os.killpg(pid, signal.SIGSTOP)
        return lambda: [os.killpg(pid, signal.SIGCONT) for pid in couriers] and None

    def _network(self, state: str) -> None:
        subprocess.run(["ip", "-n", self._namespace, "link", "set", "lo", state], check=True)

    def weather(self, now: dict | None = None) -> None:
        (self.folder / "weather.part").write_text(json.dumps(now or {}))
        (self.folder / "weather.part").replace(self.folder / "weather")


def _makes_namespaces() -> bool:
    return (
        bool(shutil.which("ip"))
        and os.getuid() == 0
        and not subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode
    )


# --- a storm, and what must hold after it --------------------------------------------------------


def questions(out: Path) -> int:
    """How many are in the journal, as far as it is whole."""
    with contextlib.suppress(FileNotFoundError):
        data, at, count = (out / "journal").read_bytes(), 0, 0
        while at < len(data):
            begin, at = at + 12, at + 8 + int.from_bytes(data[at : at + 8], "big") + 32
            count += at <= len(data) and data.startswith(b'{"sequence"', begin)
        return count
    return 0


def ended(out: Path) -> str:
    with contextlib.suppress(FileNotFoundError, ValueError):
        return json.loads((out / "summary.json").read_text())["ended"]
    return ""


def storm(ground: Ground, number: int, out: Path) -> tuple[list[str], int]:
    """Lets one to three faults loose on a run, and resumes it until it ends: (the faults, how often
    it was resumed).
    """
    chance, kinds = random.Random(f"{ground.engine} {number}"), KINDS[ground.engine]
    faults = list(kinds[3 * number : 3 * number + 3]) or chance.choices(
        kinds, k=chance.randint(1, 3)
    )  # first each kind once
    chance.shuffle(faults)
    when = sorted(chance.sample(range(ROUNDS[ground.engine] - 1), len(faults)))
    patient = SLOW if ground.engine == "flower" else WAITS[0]
    first = SLOW if ground.engine == "flower" else chance.choice(WAITS)
    if ground.mixer:  # of totals at least two
        first = first | {"quorum": max(2, first["quorum"])}
    run, resumed, deadline = ground.train(out, first), 0, time.monotonic() + PATIENCE

    def go_on() -> None:
        nonlocal run, resumed
        run.join(PATIENCE)
        log = Path(f"{out}.log").read_text() if Path(f"{out}.log").exists() else ""
        early = run.exitcode == 2 and ("can be resumed" in log or "nothing was charged" in log)
        assert run.exitcode in (0, 3, -signal.SIGKILL) or early, (run.exitcode, log)
        if ended(out) != "finished":
            resumed += 1
            assert resumed < 10, log
            run = ground.train(out, patient)

    for question, kind in zip(when, faults, strict=True):
        while questions(out) < question and time.monotonic() < deadline:
            if not run.is_alive():
                go_on()
            time.sleep(0.002)
        heal = ground.strike(kind, chance, run)
        time.sleep(chance.choice((0.0, 0.3, 1.5, 3.0)))
        heal()
    while run.is_alive() or ended(out) != "finished":
        go_on()
    return faults, resumed


class Nobody:
    """A carrier that must not be needed."""

    def exchange(self, frames, timeout):
        raise AssertionError("asked")

    names = exchange


def replayed(ground: Ground, out: Path, copy: Path) -> None:
    """The journal alone, played to the generator, ends with the model that the storm ended with,
    bit for bit.
    """
    copy.mkdir()
    for name in ("run.json", "journal"):
        shutil.copy(out / name, copy / name)
    order = Order.read(json.loads((out / "run.json").read_text()), out)
    again = NetworkRun(
        ground.cards,
        ground.problem,
        order,
        Nobody(),
        copy,
        key=read_key(ground.folder / "asker.key"),
        shuffler=ground.mixer,
    )
    assert len(list(again)) == order.rounds
    model, other = load_file(out / "model.safetensors"), load_file(copy / "model.safetensors")
    assert model.keys() == other.keys()
    assert all(torch.equal(model[name], other[name]) for name in model)


def audited(ground: Ground, out: Path, copy: Path) -> Counter:
    """Compares what left the gates, what the server used and what the ledgers say; gives what was
    charged, released and used.
    """
    lines = (
        (ground.folder / "released").read_text().splitlines()
    )  # before the ledgers: what is not there by then was not charged for it
    released = [(name, bytes.fromhex(reply)) for name, reply in map(json.loads, lines)]
    about = json.loads((out / "run.json").read_text())
    plan = plan_order(Order.read(about, out), ground.cards).plan
    capacity = plan.rule.capacity(plan.budgets)[0]
    shutil.copy(out / "journal", copy)
    header = copy.read_bytes()
    told = json.loads(header[12 : 12 + int.from_bytes(header[8:12], "big")])
    journal = Journal(copy, told["run"], told["config"])
    used = [
        (name, heard.sha256)
        for record in iter(journal.read, None)
        for name, heard in record.heard.items()
    ]
    journal.close()
    assert set(used) <= {(name, hashlib.sha256(reply).hexdigest()) for name, reply in released}, (
        "the relay has seen everything"
    )
    passed: dict[str, Passed] = {}
    for raw in {reply for name, reply in released if name == "shuffler"}:
        outcome = decode_outcome(
            raw, limit=2**20, shuffler_key=ground.mixer.sign if ground.mixer else ""
        )
        if isinstance(outcome, Passed):
            first = passed.setdefault(outcome.round, outcome)
            assert np.array_equal(first.totals, outcome.totals), (
                "the shuffler passed on two totals of one round"
            )
            assert first.contributions == outcome.contributions
    counts = Counter(used=len(used), totals=len(passed))
    for i, card in enumerate(ground.cards):
        ledger = DurableLedger.open(ground.folder / "silos" / card.name / "ledger.db")
        ledger.verify()
        charges = [entry for entry in ledger.entries() if entry.act == "charge"]
        charged = {entry.query_id for entry in charges}
        assert len(charged) == len(charges), f"{card.name} paid twice"
        answered = {entry.query_id for entry in ledger.entries() if entry.act == "answer"}
        answers: dict[str, bytes] = {}
        for raw in {reply for name, reply in released if name == card.name}:
            if raw.startswith(HELD):  # about a hold, which releases nothing
                decode_hold_reply(raw, silo_key=card.key)
                continue
            reply = decode_reply(raw, limit=2**20, silo_key=card.key)
            if isinstance(reply, Answer | Sealed):
                assert reply.query_id in charged, f"{card.name} released what was not charged"
                assert reply.query_id in answered, f"{card.name} released what it has not kept"
                assert answers.setdefault(reply.query_id, raw) == raw, (
                    f"{card.name} gave two answers to one question"
                )
        mine, buckets = (
            [entry for entry in charges if entry.run == about["run"]],
            dict[str, np.ndarray](),
        )
        for entry in mine:
            buckets[entry.bucket] = buckets.get(entry.bucket, np.asarray(0.0)) + entry.amount
        if not ground.mixer:  # a ledger of totals prices at an order of its own
            assert float(plan.rule.total(buckets)) <= float(capacity[i]) * (1 + 1e-9), (
                f"{card.name} spent more than the run was given"
            )
        assert len(mine) <= ROUNDS[ground.engine]
        assert ledger.used() <= 1
        counts += Counter(
            charged=len(mine), released=len(answers.keys() & {entry.query_id for entry in mine})
        )
    return counts


@pytest.fixture(scope="module")
def grounds():
    with contextlib.ExitStack() as closing:
        made: dict[str, Ground] = {}

        def ground(engine: str) -> Ground:
            pytest.importorskip(
                {"flower": "flwr", "nvflare": "nvflare", "direct": "silodp", "shuffle": "silodp"}[
                    engine
                ]
            )
            if engine not in made:
                made[engine] = Ground(engine)
                closing.callback(made[engine].close)
            return made[engine]

        yield ground


def storms() -> list:
    """Most over `direct`, every fifth over NVFlare (by default there is one), and in the long suite
    some over Flower and through a shuffler, each engine's own in one process.
    """
    numbers, found = Counter[str](), []
    for i in range(STORMS):
        engine = (
            "nvflare"
            if i % 5 == 4
            else {2: "shuffle", 7: "flower"}.get(i % 10, "direct")
            if STORMS > 5
            else "direct"
        )
        found.append(
            pytest.param(
                engine,
                numbers[engine],
                marks=pytest.mark.xdist_group(f"chaos-{engine}"),
                id=f"{engine}-{numbers[engine]}",
            )
        )
        numbers[engine] += 1
    return found


@pytest.mark.parametrize(("engine", "number"), storms())
def test_a_run_comes_to_its_end_through_any_storm_and_everything_released_is_charged_once(
    grounds, engine, number
):
    ground = grounds(engine)
    out, begin = ground.home / f"run-{number}", time.monotonic()
    faults, resumed = storm(ground, number, out)
    seconds = time.monotonic() - begin
    counts = audited(ground, out, ground.home / f"journal-{number}")
    replayed(ground, out, ground.home / f"again-{number}")
    assert json.loads((out / "summary.json").read_text())["iterates"] == ROUNDS[engine]
    print(
        f"\n{engine} {number}: {', '.join(faults)}; resumed {resumed} times; "
        f"{dict(counts)}; {seconds:.1f} s"
    )
