"""A hostile server and a hostile courier against real gate daemons, over real sockets, users and an engine: all of it fails.

Tried elsewhere, and not again here: thousands of random frames (test_malicious_server), every spelling of a frame (test_codec), garbage,
2^31 bytes, slow and many connections, kill -9 and a stop in mid-work (test_daemon), a modified engine, code in a job and files in a kit
(test_nvflare), a bundle with other code and strange messages (test_flower), a relay between peers that alters or swaps (test_direct).
"""

import contextlib
import io
import json
import math
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from gates import ASKER, PATIENCE, Gate, Gates, three_gates, wbcd, write_csv
from silodp.core.mechanisms import Gaussian
from silodp.core.protocol.codec import (
    OVERHEAD,
    QUERY,
    Answer,
    Envelope,
    Refusal,
    _body,
    _split,
    decode_reply,
    encode_query,
    encode_reply,
    sign_frame,
)
from silodp.core.protocol.frames import VERSION
from silodp.core.query import Query
from silodp.core.sampling import DisjointBatches, FullBatch, Poisson, WithoutReplacement
from silodp.core.statistics import Grad, GradDiff, Histogram, LocalSteps, Moments, SteeredSteps
from silodp.server.remote import Card, QuestionReport, Remote, Timeouts
from silodp.silo.ledger.chain import event_of
from silodp.silo.service.provision import provision
from silodp.wire.hub import Direct, Hub
from silodp.wire.socket import Socket, Unreached, _connect

pytestmark = pytest.mark.xdist_group("hostile")  # one set of daemons for all

PUBLIC = ASKER.public_key().public_bytes_raw()
SECOND, STRANGER = (Ed25519PrivateKey.from_private_bytes(bytes([i]) * 32) for i in (8, 9))
COURIER, OTHER = 65534, 65533  # users that own nothing here
ROOT = os.getuid() == 0
needs_users = pytest.mark.skipif(not ROOT, reason="needs to become another user")
LIMITS = {
    "statistics": ("Grad", "GradDiff", "LocalSteps"),
    "samplings": ("FullBatch", "DisjointBatches"),
    "clip": (1e-6, 10.0),
    "minimum_noise_multiplier": 5.0,
    "maximum_local_steps": 5,
}


def asked(
    card: Card, query_id: str, statistic=None, *, clip=1.0, noise=30.0, run="run", model=None, key=ASKER, sampling=None, of=""
) -> bytes:
    statistic = Grad(torch.zeros(1, card.parameters)) if statistic is None else statistic
    query = Query(statistic, Gaussian("anchor", clip, noise, sampling or FullBatch()))
    return encode_query(Envelope(of or card.name, run, query_id, model or card.definition, query), key)


def opened(card: Card, raw: bytes) -> Answer | Refusal:
    return decode_reply(raw, limit=2**20, silo_key=card.key)


def code(gate: Gate, frame: bytes) -> str:
    return getattr(opened(gate.card, Socket(gate.place.socket).ask(frame, PATIENCE)), "code", "answered")


@pytest.fixture(scope="module")
def gates() -> Iterator[Gates]:
    """Three silos with budget to spare, their folder open to every user as far as the sockets' own modes let them."""
    users = {"socket_group": str(COURIER), "couriers": ("0", str(COURIER))} if ROOT else {}
    with three_gates(**LIMITS | users, connections=8, queries_per_run=10**6) as made:
        made[0].folder.chmod(0o711)
        warm = {card.name: asked(card, "warm") for card in made.cards}
        assert len(made.direct().exchange(warm, PATIENCE)) == 3
        yield made


def gate_of(folder: Path, records, **changes) -> Gate:
    """One more silo, with other records or under another policy; its daemon is not started yet."""
    folder.mkdir(parents=True)
    askers = [key.public_key().public_bytes_raw().hex() for key in (ASKER, SECOND)]
    settings = {"label": "label", "name": "silo", "epsilon": 1.0, "model": "mlp:4", "askers": askers, "registry": folder / "state/ledgers"}
    silo = provision(folder / "silo", data=write_csv(folder / "data.csv", *records), **settings | LIMITS | changes)
    return Gate(folder, silo.policy, ["-m", "silodp.cli", "silo", "serve"])


@contextlib.contextmanager
def running(*gates: Gate) -> Iterator[None]:
    for gate in gates:
        gate.launch()
    try:
        for gate in gates:
            gate.wait()
        yield
    finally:
        for gate in gates:
            gate.end()


@pytest.fixture(scope="module")
def poor() -> Iterator[Gate]:
    """A silo that has epsilon = 1 in all, for whatever the tests together ask it."""
    with tempfile.TemporaryDirectory(prefix="silodp-") as folder:
        gate = gate_of(Path(folder) / "poor", wbcd()[0])
        with running(gate):
            yield gate


# --- a hostile server: one question that no policy allows ---------------------------------------------------------------------------


def spelt(frame: bytes, field: str, value: object, inside: str = "") -> bytes:
    """The question with another word in a field, which no encoder of ours would write, under the listed server's signature."""
    fields, tensors = _split(frame[OVERHEAD:])
    (fields[inside] if inside else fields)[field] = value
    return sign_frame(QUERY, VERSION, _body(fields, tensors), ASKER)


def point(card: Card, value: float = 0.0, extra: int = 0, dtype=torch.float32) -> torch.Tensor:
    return torch.full((1, card.parameters + extra), value, dtype=dtype)


class Shell:
    def __reduce__(self):
        return os.system, ("touch pickled",)


NOISES = {
    "no noise": 0.0,
    "negative noise": -30.0,
    "noise a bit below the minimum": math.nextafter(5.0, 0.0),
    "the smallest noise there is": 5e-324,
    "noise beyond the lattice": 1e300,
}
CLIPS = {"a huge clip": 1e300, "a clip a bit above the range": math.nextafter(10.0, 11.0), "a negative clip": -1.0, "a tiny clip": 1e-300}
BATCHES = {
    "batches of single records": DisjointBatches(150),
    "no batches": DisjointBatches(0),
    "minus one batch": DisjointBatches(-1),
    "a batch beyond the last": DisjointBatches(2, 2),
    "the batch before the first": DisjointBatches(2, -1),
}
STEPS = {
    "too many steps": (6, 0.1),
    "2^53 steps": (2**53, 0.1),
    "no step": (0, 0.1),
    "steps of no length": (2, 0.0),
    "steps back": (2, -1.0),
}
PATHS = ["../../silo.key", "/etc/passwd", "a\nanswered", "a\0b", "", "x" * 65, "C:\\x", "%2e%2e%2f", "~root", "\u202egnp"]
ATTACKS = {
    **{name: ("noise", lambda c, z=z: asked(c, "q", noise=z)) for name, z in NOISES.items()},
    **{name: ("clip", lambda c, z=z: asked(c, "q", clip=z)) for name, z in CLIPS.items()},
    **{name: ("batch", lambda c, s=s: asked(c, "q", sampling=s)) for name, s in BATCHES.items()},
    **{name: ("steps", lambda c, s=s: asked(c, "q", LocalSteps(point(c), *s))) for name, s in STEPS.items()},
    **{
        f"noise {z}": ("malformed", lambda c, z=z: spelt(asked(c, "q"), "noise_multiplier", z, "mechanism")) for z in ("nan", "inf", "-inf")
    },
    **{f"clip {z}": ("malformed", lambda c, z=z: spelt(asked(c, "q"), "clip", z, "mechanism")) for z in ("nan", "inf")},
    **{f"the id {p!r:.20}": ("malformed", lambda c, p=p: spelt(asked(c, "q"), "query", p)) for p in PATHS},
    **{f"the run {p!r:.20}": ("malformed", lambda c, p=p: spelt(asked(c, "q"), "run", p)) for p in PATHS},
    **{
        f"the partition {p!r:.20}": (
            "malformed",
            lambda c, p=p: spelt(asked(c, "q", sampling=DisjointBatches(2)), "partition", p, "sampling"),
        )
        for p in PATHS
    },
    "a question of another silo": ("silo", lambda c: asked(c, "q", of="silo-1")),
    "another model": ("model", lambda c: asked(c, "q", model="0" * 64)),
    "steered steps, which are not allowed": ("statistic", lambda c: asked(c, "q", SteeredSteps(point(c), 2, 0.1, point(c)))),
    "a histogram, which is not allowed": ("statistic", lambda c: asked(c, "q", Histogram(torch.zeros(1), len(c.features)))),
    "moments, which are not allowed": ("statistic", lambda c: asked(c, "q", Moments(torch.zeros(30), torch.ones(30)))),
    "a Poisson batch, which is not allowed": ("sampling", lambda c: asked(c, "q", sampling=Poisson(0.5))),
    "a random batch, which is not allowed": ("sampling", lambda c: asked(c, "q", sampling=WithoutReplacement(0.5))),
    "a point too short": ("shape", lambda c: asked(c, "q", Grad(point(c, extra=-1)))),
    "a point too long": ("shape", lambda c: asked(c, "q", Grad(point(c, extra=1)))),
    "a reference too short": ("shape", lambda c: asked(c, "q", GradDiff(point(c), point(c, extra=-1)))),
    "a point that is NaN": ("not-finite", lambda c: asked(c, "q", Grad(point(c, math.nan)))),
    "a reference that is infinite": ("not-finite", lambda c: asked(c, "q", GradDiff(point(c), point(c, -math.inf)))),
    "no signature": ("signature", lambda c: _unsigned(asked(c, "q"))),
    "the signature of another question": ("signature", lambda c: asked(c, "p")[:101] + asked(c, "q")[101:]),
    "the listed key over a stranger's signature": ("signature", lambda c: _claiming(asked(c, "q", key=STRANGER), PUBLIC)),
    "a stranger's key": ("asker", lambda c: asked(c, "q", key=STRANGER)),
    "a captured question under the courier's own key": ("asker", lambda c: sign_frame(QUERY, VERSION, asked(c, "q")[OVERHEAD:], STRANGER)),
    "a reply in a question's place": ("malformed", lambda c: encode_reply(Refusal("budget"), ASKER)),
    "a pickle that runs a command": ("malformed", lambda c: pickle.dumps(Shell())),
    "a signed pickle": ("malformed", lambda c: sign_frame(QUERY, VERSION, pickle.dumps(Shell()), ASKER)),
    "a torch file": ("malformed", lambda c: sign_frame(QUERY, VERSION, _torch_file(), ASKER)),
    "two points more than any question has": ("size", lambda c: asked(c, "q") + bytes(10**5)),
}


def _unsigned(frame: bytes) -> bytes:
    return frame[:5] + bytes(96) + frame[101:]


def _claiming(frame: bytes, key: bytes) -> bytes:
    return frame[:5] + key + frame[37:]


def _torch_file() -> bytes:
    with io.BytesIO() as file:
        torch.save({"w": torch.zeros(3)}, file)
        return file.getvalue()


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_question_that_the_policy_does_not_allow_is_refused_and_leaves_no_trace_in_the_ledger(gates, attack):
    wanted, frame = ATTACKS[attack]
    head = gates[0].ledger().head()
    assert code(gates[0], frame(gates[0].card)) == wanted
    assert gates[0].ledger().head() == head
    assert not list(gates[0].folder.rglob("pickled"))


def test_names_that_are_paths_in_disguise_name_no_file(gates):
    gate = gates[1]
    before = {path for path in gate.folder.rglob("*") if not path.name.startswith("ledger.db-")}
    assert code(gate, asked(gate.card, "..", run="..", sampling=DisjointBatches(2, 0, ".."))) == "answered"
    assert code(gate, asked(gate.card, "ledger.db", run="-rf", sampling=DisjointBatches(2, 0, "."))) == "answered"
    assert {path for path in gate.folder.rglob("*") if not path.name.startswith("ledger.db-")} == before
    gate.ledger().verify()


def test_a_point_of_huge_numbers_gets_a_finite_answer_at_the_usual_price(gates):
    card, gate = gates[2].card, gates[2]
    for i, value in enumerate((1e308, -3e38, 1e-308)):
        reply = opened(
            card, Socket(gate.place.socket).ask(asked(card, f"huge-{i}", Grad(point(card, value, dtype=torch.float64))), PATIENCE)
        )
        assert isinstance(reply, Answer)
        assert bool(torch.isfinite(reply.value).all())
        assert float(reply.value.norm()) < 100, "no larger than clip and noise make it"
    assert gate.charges("run")[-3:] == ["huge-0", "huge-1", "huge-2"]


# --- a hostile server: allowed questions, too many of them --------------------------------------------------------------------------


def within_budget(gate: Gate) -> bool:
    """delta(epsilon) of a Gaussian at the mu that was charged, by the formula of PAPER-NOTES 3 and not by the package's own."""
    full, parts = 0.0, dict[tuple[str, str], float]()
    for entry in gate.ledger().entries():
        if entry.act == "charge":
            event = event_of(json.loads(entry.event))
            price = event.count / event.noise_multiplier**2
            name, _, index = entry.bucket.rpartition("/")
            if name:
                parts[name, index] = parts.get((name, index), 0.0) + price
            else:
                full += price
    worst = {name: max(price for (other, _), price in parts.items() if other == name) for name, _ in parts}
    mu, epsilon = math.sqrt(full + sum(worst.values())), gate.card.epsilon

    def phi(z: float) -> float:
        return math.erfc(-z / math.sqrt(2)) / 2

    return phi(-epsilon / mu + mu / 2) - math.exp(epsilon) * phi(-epsilon / mu - mu / 2) <= gate.card.delta


def test_a_question_beyond_the_whole_budget_is_refused_at_once(poor):
    head = poor.ledger().head()
    assert code(poor, asked(poor.card, "all-at-once", LocalSteps(point(poor.card), 5, 0.1), noise=5.0)) == "budget"
    assert poor.ledger().head() == head


def test_many_parallel_questions_under_new_runs_and_partitions_never_pass_the_budget(poor):
    replies: dict[int, str] = {}

    def ask(i: int) -> None:
        sampling = DisjointBatches(2, i % 2, f"part-{i}") if i % 3 == 0 else None
        replies[i] = code(poor, asked(poor.card, f"race-{i}", noise=9.0, run=f"run-{i}", key=(ASKER, SECOND)[i % 2], sampling=sampling))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert set(replies.values()) == {"answered", "budget"}
    assert len(replies) == 24
    assert within_budget(poor)
    poor.ledger().verify()


def test_the_same_question_split_into_many_cheap_ones_under_new_names_has_one_budget(poor):
    codes = [code(poor, asked(poor.card, f"cheap-{i}", noise=50.0, run=f"cheap-run-{i}")) for i in range(40)]
    while codes[-1] == "answered":
        codes.append(code(poor, asked(poor.card, f"cheap-{len(codes)}", noise=50.0, run=f"cheap-run-{len(codes)}")))
        assert len(codes) < 200
    assert set(codes[codes.index("budget") :]) == {"budget"}
    assert within_budget(poor)
    assert poor.ledger().left() < 0.1


def test_an_id_with_other_content_another_run_or_another_asker_gets_nothing_of_the_first_answer(poor, gates):
    card, gate = gates[0].card, gates[0]
    frame = asked(card, "taken")
    raw = Socket(gate.place.socket).ask(frame, PATIENCE)
    head = gate.ledger().head()
    for other in (
        asked(card, "taken", noise=31.0),
        asked(card, "taken", clip=0.5),
        asked(card, "taken", Grad(point(card, 1.0))),
        asked(card, "taken", Grad(point(card, dtype=torch.float64))),
        asked(card, "taken", run="another"),
    ):
        assert code(gate, other) == "id-reused"
    assert gate.ledger().head() == head
    assert Socket(gate.place.socket).ask(frame, PATIENCE) == raw
    charged = [entry.query_id for entry in poor.ledger().entries() if entry.act == "charge"]
    if not charged:
        assert code(poor, asked(poor.card, "first")) == "answered"
        charged = ["first"]
    for key in (ASKER, SECOND):  # one of them did not ask it, and the content is another
        assert code(poor, asked(poor.card, charged[0], noise=33.0, key=key)) == "id-reused"


# --- two silos that differ in one record --------------------------------------------------------------------------------------------

CANARY = 7654321.0


@pytest.fixture(scope="module")
def neighbours() -> Iterator[tuple[Gate, Gate]]:
    """They have one name and one key, few answers to give, and one record that is far from all others in the second."""
    (x, y), rates = wbcd()[1], {"queries_per_run": 2, "queries_per_hour": 4}
    other = x.copy()
    other[11] = CANARY
    with tempfile.TemporaryDirectory(prefix="silodp-") as name:
        first, second = (gate_of(Path(name) / folder, (records, y), **rates) for folder, records in (("a", x), ("b", other)))
        shutil.copy(first.place.key, second.place.key)
        second.card = replace(second.card, key=first.card.key)
        with running(first, second):
            yield first, second


def test_refusals_are_the_same_bytes_for_neighbours_and_answers_as_long_and_so_is_the_log(neighbours):
    card = neighbours[0].card
    flood = [frame(card) for _, frame in ATTACKS.values()]
    flood += [asked(card, f"n-{i}", noise=40.0, run=f"run-{i // 3}") for i in range(9)]  # answered, run-limit, rate
    flood += [asked(card, "n-0", noise=40.0, run="run-0"), asked(card, "n-0", noise=41.0), asked(card, "n-9", noise=5.0, run="run-9")]
    seen = set()
    for frame in flood:
        raw, beside = (Socket(gate.place.socket).ask(frame, PATIENCE) for gate in neighbours)
        reply = opened(card, raw)
        if isinstance(reply, Refusal):
            assert raw == beside
        else:
            assert isinstance(opened(card, beside), Answer)
            assert len(raw) == len(beside)
            assert raw != beside
        seen.add(getattr(reply, "code", "answered"))
    assert {"answered", "run-limit", "rate", "id-reused", "noise", "asker", "size"} <= seen
    logs = [[line.split()[1:] for line in Path(gate.place.log).read_text().splitlines()] for gate in neighbours]
    assert logs[0][1:] == logs[1][1:]  # after the line with the ledger's own start
    assert neighbours[0].card == neighbours[1].card, "what a silo tells of itself does not depend on its records"


def test_a_new_run_name_for_every_question_does_not_pass_the_hourly_rate(neighbours):
    gate = neighbours[0]
    codes = [code(gate, asked(gate.card, f"fast-{i}", noise=40.0, run=f"fast-{i}")) for i in range(6)]
    assert codes[-2:] == ["rate", "rate"]
    charged = [entry.run for entry in gate.ledger().entries() if entry.act == "charge"]
    assert len(charged) == 4
    assert max(map(charged.count, charged)) <= 2


def test_a_stopped_gate_is_gone_and_one_whose_policy_has_expired_gives_nothing_not_even_what_it_gave(neighbours):
    gate = neighbours[1]
    given, frame = asked(gate.card, "n-0", noise=40.0, run="run-0"), asked(gate.card, "late", noise=40.0, run="late")
    assert code(gate, given) == "answered"
    head = gate.ledger().head()
    assert gate.end() == 0
    with pytest.raises(Unreached, match="unreachable"):
        Socket(gate.place.socket).ask(frame, 1.0)
    policy = Path(gate.policy)
    lines = ["expires = 2020-01-01" if line.startswith("expires") else line for line in policy.read_text().splitlines()]
    policy.write_text("\n".join(lines))
    gate.launch()
    gate.wait()
    assert code(gate, frame) == code(gate, given) == "expired"
    assert gate.ledger().head() == head


# --- a hostile courier: other users of the machine ----------------------------------------------------------------------------------

ATTACK = '''
import ctypes, json, os, signal, socket

def denied(act):
    """No, for whatever reason; or what it gave."""
    try:
        return "" if act() is None else "given"
    except OSError as no:
        return "no"

def attack(files, folder, gate, pid, only=""):
    """What the gate's machine lets this process do, by name: everything that is not refused."""
    def opens(path, how=os.O_RDONLY):
        return lambda: os.read(os.open(path, how), 1) if how == os.O_RDONLY else os.open(path, how)

    def bind(path):
        socket.socket(socket.AF_UNIX).bind(path)
        return True

    def trace(request):
        if ctypes.CDLL(None, use_errno=True).ptrace(request, pid, 0, 0) != 0:
            raise OSError("refused")
        return True

    def done(act, *given):
        return lambda: act(*given) or True

    tries = {f"read {path}": opens(path) for path in files} | {f"write {path}": opens(path, os.O_WRONLY) for path in files}
    tries |= {f"read /proc/{pid}/{name}": opens(f"/proc/{pid}/{name}") for name in ("mem", "environ", "maps", "fd/0", "auxv")}
    tries |= {f"list {path}": done(os.listdir, path) for path in (folder, f"/proc/{pid}/fd", f"/proc/{pid}/cwd/")}
    tries |= {
        "unlink the socket": done(os.unlink, gate), "rename the socket": done(os.rename, gate, gate + "2"),
        "open the socket to all": done(os.chmod, gate, 0o666), "put a socket beside it": lambda: bind(folder + "/gate2.sock"),
        "make a file": lambda: os.open(folder + "/new", os.O_CREAT | os.O_WRONLY), "link": done(os.symlink, "/etc/passwd", folder + "/link"),
        "rename the folder": done(os.rename, folder, folder + "2"), "own the data": done(os.chown, files[0], os.getuid(), -1),
        "stop the gate": done(os.kill, pid, signal.SIGSTOP), "kill the gate": done(os.kill, pid, signal.SIGKILL),
        "trace the gate": lambda: trace(16), "become its user": done(os.setuid, 0), "become its group": done(os.setgid, 0),
    }
    return [name for name, act in tries.items() if name.startswith(only) and denied(act) != "no"]

def ask(gate, frame):
    line = socket.socket(socket.AF_UNIX)
    line.settimeout(600)
    line.connect(gate)
    try:
        line.sendall(len(frame).to_bytes(4, "big") + frame)
    except BrokenPipeError:
        pass  # turned away: the reply says why
    file = line.makefile("rb")
    return file.read(int.from_bytes(file.read(4), "big"))
'''


def knock(gate: Gate, words: str, user: int, groups: list[int]) -> str:
    """What a process of another user prints."""
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable
    settings = {"user": user, "group": groups[0] if groups else user, "extra_groups": groups}
    done = subprocess.run([python, "-I", "-c", ATTACK + words], **settings, capture_output=True, text=True, cwd="/", timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def secrets_of(gate: Gate) -> list[str]:
    """Every file that the silo has, the data first."""
    own = [path for path in Path(gate.policy).parent.rglob("*") if path.is_file()]
    shared = [path for path in (gate.folder / "state").rglob("*") if path.is_file()]
    assert {Path(gate.policy), Path(gate.place.key), Path(gate.place.ledger), Path(gate.place.log)} <= set(own)
    assert shared
    return [gate.place.data, *map(str, own + shared)]


@needs_users
def test_the_couriers_user_can_neither_read_nor_write_nor_replace_nor_trace_nor_kill_anything_of_the_gate(gates):
    gate = gates[0]
    given = (secrets_of(gate), str(Path(gate.policy).parent), gate.place.socket, gate.process.pid)
    assert json.loads(knock(gate, f"print(json.dumps(attack(*{given!r})))", COURIER, [COURIER])) == []
    assert code(gate, asked(gate.card, "after-the-attack")) == "answered"
    owner = json.loads(knock(gate, f"print(json.dumps(attack(*{given!r}, 'read ')))", 0, [0]))
    assert {f"read {path}" for path in given[0]} <= set(owner), "the attack finds what is open"


@needs_users
def test_other_users_cannot_open_the_socket_and_one_in_its_group_that_is_not_listed_is_turned_away(gates):
    gate = gates[0]
    frame = asked(gate.card, "by-another-user")
    words = f"""
try:
    print(ask({gate.place.socket!r}, bytes.fromhex({frame.hex()!r})).hex())
except PermissionError:
    print("denied")
"""
    assert knock(gate, words, OTHER, []) == "denied"
    assert opened(gate.card, bytes.fromhex(knock(gate, words, OTHER, [COURIER]))) == Refusal("peer")
    assert "by-another-user" not in gate.charges("run")
    assert isinstance(opened(gate.card, bytes.fromhex(knock(gate, words, COURIER, [COURIER]))), Answer)


# --- a hostile courier: its end of the socket ---------------------------------------------------------------------------------------


def test_thousands_of_broken_frames_and_held_connections_leave_the_gate_as_it_was(gates):
    gate, frame = gates[0], asked(gates[0].card, "among-the-broken")
    own, whole = Path(f"/proc/{gate.process.pid}"), len(frame).to_bytes(4, "big") + frame
    assert code(gate, frame) == "answered"
    head = gate.ledger().head()
    pieces = [
        b"",
        b"\0",
        b"\xff\xff\xff\xff",
        b"\x80\0\0\0",
        b"\0\0\0\0",
        whole[:3],
        whole[:4],
        whole[:60],
        whole[:-1],
        whole + b"\xff" * 9,
    ]
    with contextlib.ExitStack() as held:
        for i in range(600):
            line = socket.socket(socket.AF_UNIX)
            _connect(line, gate.place.socket, time.monotonic() + PATIENCE)
            with contextlib.suppress(OSError):
                line.sendall(pieces[i % len(pieces)])
            (held.enter_context(line) if i % 20 == 0 else line.close())
        assert code(gate, frame) == "answered", "beside 30 connections that are held"
        assert len(list((own / "task").iterdir())) < 40
    deadline = time.monotonic() + PATIENCE
    while len(list((own / "fd").iterdir())) > 20 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(list((own / "fd").iterdir())) <= 20
    assert gate.ledger().head() == head
    assert gate.process.poll() is None


def test_no_bit_of_a_question_can_be_altered_on_its_way(gates):
    gate, frame = gates[1], asked(gates[1].card, "to-be-altered")
    head = gate.ledger().head()
    places = [*range(OVERHEAD), *range(OVERHEAD, len(frame), 29), len(frame) - 1]
    codes = {code(gate, frame[:at] + bytes([frame[at] ^ 1 << at % 8]) + frame[at + 1 :]) for at in places}
    assert codes == {"malformed", "version", "signature"}
    assert {code(gate, frame[:at]) for at in range(0, len(frame), 101)} == {"malformed"}
    assert gate.ledger().head() == head


class Meddler(Direct):
    """A courier of all three silos that does what it likes with what it carries."""

    def __init__(self, gates: Gates, meddle=lambda replies: replies) -> None:
        super().__init__(gates.sockets)
        self._meddle, self.sent, self.replies = meddle, list[dict[str, bytes]](), list[dict[str, bytes]]()

    def exchange(self, frames, timeout):
        self.sent.append(dict(frames))
        self.replies.append(super().exchange(frames, PATIENCE))
        return self._meddle(dict(self.replies[-1]))


def question(gates: Gates, noise: float = 40.0) -> Query:
    return Query(Grad(torch.zeros(1, gates.problem.dim)), Gaussian("anchor", 1.0, noise))


def remote(gates: Gates, carrier: Direct, run: str, heard: list[QuestionReport], **patience) -> Remote:
    times = {"deadline": PATIENCE, "limit": PATIENCE, "retry": PATIENCE} | patience
    return Remote(gates.cards, carrier, run=run, key=ASKER, timeouts=Timeouts(**times), report=lambda told, answers: heard.append(told))


def _bent(at: int):
    def bend(replies: dict[str, bytes]) -> dict[str, bytes]:
        raw = replies["silo-1"]
        at_ = at % len(raw)
        return replies | {"silo-1": raw[:at_] + bytes([raw[at_] ^ 16]) + raw[at_ + 1 :]}

    return bend


def _made_up(replies: dict[str, bytes]) -> dict[str, bytes]:
    """The silo's own answer, ten times as large, under the courier's key and the silo's name."""
    answer = decode_reply(replies["silo-1"], limit=2**20)
    assert isinstance(answer, Answer)
    return replies | {"silo-1": encode_reply(replace(answer, value=10 * answer.value), STRANGER)}


def _claimed(replies: dict[str, bytes]) -> dict[str, bytes]:
    forged, key = _made_up(replies)["silo-1"], replies["silo-1"][5:37]
    return replies | {"silo-1": _claiming(forged, key)}


MEDDLINGS = {
    "a bit of the signature": _bent(50),
    "a bit of the ledger's head or the name": _bent(OVERHEAD + 90),
    "a bit of the value": _bent(-3),
    "another silo's answer": lambda replies: replies | {"silo-1": replies["silo-0"]} if "silo-0" in replies else {},
    "an answer of the courier's own": _made_up,
    "an answer of the courier's own under the silo's key": _claimed,
    "an unsigned answer": lambda replies: replies | {"silo-1": _unsigned(replies["silo-1"])},
    "a refusal of the courier's own": lambda replies: replies | {"silo-1": encode_reply(Refusal("budget"), STRANGER)},
    "half an answer": lambda replies: replies | {"silo-1": replies["silo-1"][:-9]},
    "an endless answer": lambda replies: replies | {"silo-1": replies["silo-1"] + bytes(2**20)},
}


@pytest.mark.parametrize("name", MEDDLINGS)
def test_what_a_courier_puts_in_the_place_of_a_silos_answer_does_not_count(gates, name):
    heard: list[QuestionReport] = []
    run = f"meddle-{list(MEDDLINGS).index(name)}"
    channel = remote(gates, Meddler(gates, MEDDLINGS[name]), run, heard, deadline=0.5, limit=0.5, retry=0.5)
    answers = channel.ask(question(gates), [0, 1, 2])
    assert answers.silos == (0, 2)
    assert heard[0].dropped == {"silo-1": "forged"}
    assert channel.retired == {}, "the silo may be heard again by a better way"
    assert [len(gate.charges(run)) for gate in gates.gates] == [1, 1, 1]


SWAPS = {
    "another version": lambda card, frame: frame[:4] + bytes([VERSION + 1]) + frame[5:],
    "the courier's own key": lambda card, frame: sign_frame(QUERY, VERSION, frame[OVERHEAD:], STRANGER),
    "a question about another model": lambda card, frame: asked(card, "swapped", model="0" * 64),
    "a question of another silo": lambda card, frame: asked(card, "swapped", of="silo-0"),
}


@pytest.mark.parametrize("name", SWAPS)
def test_a_courier_that_provokes_a_lasting_refusal_does_not_make_a_silo_retire(gates, name):
    heard: list[QuestionReport] = []

    class Provoking(Direct):
        def exchange(self, frames, timeout):
            swapped = {"silo-1": SWAPS[name](gates.cards[1], frames["silo-1"])} if "silo-1" in frames else {}
            return super().exchange(dict(frames) | swapped, PATIENCE)

    run = f"provoked-{list(SWAPS).index(name)}"
    channel = remote(gates, Provoking(gates.sockets), run, heard, deadline=0.5, limit=0.5, retry=0.5)
    assert channel.ask(question(gates), [0, 1, 2]).silos == (0, 2)
    assert (heard[0].dropped, channel.retired) == ({"silo-1": "forged"}, {})
    assert [len(gate.charges(run)) for gate in gates.gates] == [1, 0, 1]


def test_questions_that_a_courier_brings_to_other_silos_too_are_paid_for_by_none_of_them(gates):
    """Each is signed by the listed key, about the approved model, under an id that the other silo has never seen."""
    heard: list[QuestionReport] = []

    class Spreading(Direct):
        def exchange(self, frames, timeout):
            for frame in frames.values():
                super().exchange(dict.fromkeys(gates.sockets, frame), PATIENCE)
            return super().exchange(frames, timeout)

    channel = remote(gates, Spreading(gates.sockets), "spread", heard)
    assert channel.ask(question(gates), [0, 1, 2]).silos == (0, 1, 2)
    assert [len(gate.charges("spread")) for gate in gates.gates] == [1, 1, 1]


def test_frames_that_are_doubled_delayed_or_out_of_order_change_no_answer_and_cost_nothing(gates):
    heard: list[QuestionReport] = []

    class Muddled(Meddler):
        """Each frame twice at once and again long after; a reply to the last question before the one to this."""

        def exchange(self, frames, timeout):
            for old in reversed(self.sent):
                Direct.exchange(self, old, timeout)
            both: list[dict[str, bytes]] = []
            twice = [threading.Thread(target=lambda: both.append(Direct.exchange(self, frames, timeout))) for _ in range(2)]
            for thread in twice:
                thread.start()
            for thread in twice:
                thread.join()
            assert both[0] == both[1], "both got the one answer"
            self.sent.append(dict(frames))
            self.replies.append(both[0])
            return self.replies[-2] if len(self.replies) > 1 else self.replies[-1]

    carrier = Muddled(gates)
    channel = remote(gates, carrier, "muddled", heard)
    values = [channel.ask(question(gates), [0, 1, 2]).value for _ in range(3)]
    assert [told.dropped for told in heard] == [{}] * 3
    for i in range(3):
        assert len(set(gates[i].charges("muddled"))) == len(gates[i].charges("muddled")) == 3
    kept = {tuple(sorted(frames.items())): replies for frames, replies in zip(carrier.sent, carrier.replies, strict=True)}
    assert len(kept) == 3
    for value, replies in zip(values, kept.values(), strict=True):
        own = [opened(card, replies[card.name]).value[0] for card in gates.cards]
        assert torch.equal(value[0], torch.stack(own).float())


def test_replies_that_are_dropped_are_asked_for_again_and_come_back_as_the_same_bytes(gates):
    heard: list[QuestionReport] = []
    losses = iter((("silo-0", "silo-1", "silo-2"), ("silo-1",), ("silo-1",), ()))

    def lose(replies: dict[str, bytes]) -> dict[str, bytes]:
        lost = next(losses, ())
        return {name: raw for name, raw in replies.items() if name not in lost}

    carrier = Meddler(gates, lose)
    answers = remote(gates, carrier, "dropped", heard).ask(question(gates), [0, 1, 2])
    assert answers.silos == (0, 1, 2)
    assert len(carrier.replies) == 4
    assert len({replies["silo-1"] for replies in carrier.replies}) == 1
    assert len({frames["silo-1"] for frames in carrier.sent}) == 1
    assert [len(gate.charges("dropped")) for gate in gates.gates] == [1, 1, 1]


# --- a hostile courier inside a real engine -----------------------------------------------------------------------------------------

COMPONENT = '''
from pathlib import Path
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent

class Taken(FLComponent):
    """What a server that has broken into the engine's client could run there: it writes down all that it got."""

    def __init__(self, user, given, frame, found):
        super().__init__()
        self.user, self.given, self.frame, self.found = user, given, frame, found

    def handle_event(self, event_type, fl_ctx):
        if event_type == EventType.SYSTEM_START and os.fork() == 0:
            os.setgroups([])
            os.setgid(self.user)
            os.setuid(self.user)
            reply = ask(self.given[2], bytes.fromhex(self.frame)).hex()
            loot = {"user": os.getuid(), "got": attack(*self.given), "reply": reply}
            Path(self.found + ".part").write_text(json.dumps(loot))
            os.rename(self.found + ".part", self.found)
            os._exit(0)
'''


@needs_users
def test_code_that_has_taken_over_the_engines_client_gets_only_what_the_gate_gives_anyone(gates):
    """A real NVFlare client in front of a real gate, with hostile code in its process that has become the courier's user."""
    site = pytest.importorskip("silodp.wire.nvflare.site")
    pytest.importorskip("nvflare")
    gate = gates[0]
    with tempfile.TemporaryDirectory(prefix="silodp-") as name, contextlib.ExitStack() as running:
        folder, kit, found = Path(name) / "f", Path(name) / "f" / "kits" / "silo-0", Path(name) / "loot" / "loot.json"
        site.provision(folder, ["silo-0"])
        site.settle_silo(kit, Path(gate.place.socket))
        Path(name).chmod(0o711)
        found.parent.mkdir()
        os.chown(found.parent, COURIER, COURIER)
        (Path(name) / "taken.py").write_text(ATTACK + COMPONENT)
        given = [secrets_of(gate), str(Path(gate.policy).parent), gate.place.socket, gate.process.pid]
        stolen = sign_frame(QUERY, VERSION, asked(gate.card, "stolen")[OVERHEAD:], STRANGER)
        arguments = {"user": COURIER, "given": given, "frame": stolen.hex(), "found": str(found)}
        resources = json.loads((kit / "local/resources.json").read_text())
        resources["components"].append({"id": "taken", "path": "taken.Taken", "args": arguments})
        (kit / "local/resources.json").write_text(json.dumps(resources))
        running.callback(site.stop, folder)
        site.start(folder, {})
        log = running.enter_context((folder / "client.log").open("wb"))
        client = subprocess.Popen(site.command(kit), env=os.environ | {"PYTHONPATH": name}, stdout=log, stderr=log)
        running.callback(client.wait, PATIENCE)
        running.callback(client.kill)
        hub, deadline = Hub(folder / "hub.sock"), time.monotonic() + PATIENCE
        while hub.names() != ["silo-0"] or not found.exists():
            assert client.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        loot, frame = json.loads(found.read_text()), asked(gate.card, "through-the-engine")
        raw = hub.exchange({"silo-0": frame}, PATIENCE)["silo-0"]
    assert loot["user"] == COURIER
    assert loot["got"] == []
    assert opened(gate.card, bytes.fromhex(loot["reply"])) == Refusal("asker")
    assert isinstance(opened(gate.card, raw), Answer), "and the honest half of the same process still carries"
    assert raw == Socket(gate.place.socket).ask(frame, PATIENCE)
