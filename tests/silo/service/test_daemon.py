"""The gate daemon as its couriers meet it: real processes, real sockets, kill -9; and what an operator reads of it."""

import hashlib
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from silodp.cli import app as cli
from silodp.core.errors import BadInput
from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import rounded_up
from silodp.core.protocol.codec import Answer, Envelope, Refusal, decode_reply, encode_query, encode_reply
from silodp.core.query import Query
from silodp.core.statistics import Grad, LocalSteps
from silodp.host.listener import LINE_CODES, Server
from silodp.host.lock import running, sole
from silodp.host.log import tally
from silodp.silo.ledger.durable import DurableLedger
from silodp.silo.service import daemon
from silodp.silo.service.daemon import GateLog, approved_problem
from silodp.silo.service.door import FrameNote
from silodp.silo.service.policy import Place, Policy, Shuffling
from silodp.silo.service.provision import COMMENTS, Silo, provision
from silodp.wire.socket import CODES as WIRE_CODES
from silodp.wire.socket import Socket, Unreached

SERVER, STRANGER = (Ed25519PrivateKey.from_private_bytes(bytes([i]) * 32) for i in (1, 3))
ASKER = SERVER.public_key().public_bytes_raw().hex()
CANARY = 987654.125
PATIENCE = 600.0  # to end a test that hangs; nothing waits so long when all is well


def write_data(path: Path, *, seed: int = 0) -> Path:
    x = np.random.default_rng(seed).normal(size=(60, 3))
    x[17, 1] = CANARY
    path.write_text("\n".join(["a,b,c,outcome", *(f"{a!r},{b!r},{c!r},{k % 2}" for k, (a, b, c) in enumerate(x.tolist()))]))
    path.chmod(0o600)
    return path


def made(folder: Path, **changes) -> Silo:
    settings = {"data": write_data(folder / "clinic.csv"), "label": "outcome", "name": "clinic", "epsilon": 3.0, "model": "mlp:4"}
    settings |= {"askers": [ASKER], "registry": folder / "state/ledgers"}
    return provision(folder / "silo", **settings | changes)


def asked(silo: Silo, query_id: str, statistic=None, *, noise=30.0, key=SERVER) -> bytes:
    statistic = Grad(torch.zeros(1, silo.parameters)) if statistic is None else statistic
    return encode_query(Envelope(silo.name, "run-1", query_id, silo.definition, Query(statistic, Gaussian("anchor", 1.0, noise))), key)


def slow(silo: Silo, query_id: str, steps: int) -> bytes:
    """A query that takes a good while, at a small price."""
    return asked(silo, query_id, LocalSteps(torch.zeros(1, silo.parameters), steps, 1e-3), noise=2000.0)


class Process:
    """`silodp silo serve`, and a courier's way to it."""

    def __init__(self, silo: Silo, folder: Path) -> None:
        self.silo, self.folder, self.place = silo, folder, Place.load(silo.policy)
        self.socket, self.errors = Socket(self.place.socket), folder / "stderr"
        self.start()

    def start(self) -> None:
        environment = os.environ | {"SILODP_STATE": str(self.folder / "state"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "silodp.cli", "silo", "serve", self.silo.policy]
        self.errors.touch(0o600)
        with self.errors.open("ab") as errors:
            self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert self.process.stdout
        assert self.process.stdout.readline().startswith("clinic answers at "), self.errors.read_text()

    def end(self, kind: signal.Signals) -> int:
        self.process.send_signal(kind)
        code = self.process.wait(PATIENCE)
        assert self.process.stdout
        self.process.stdout.close()
        return code

    def reply(self, frame: bytes) -> Answer | Refusal:
        return decode_reply(self.socket.ask(frame, PATIENCE), limit=2**20, silo_key=self.silo.key)

    def code(self, frame: bytes) -> str:
        return getattr(self.reply(frame), "code", "answered")

    def ledger(self) -> DurableLedger:
        return DurableLedger.open(Path(self.place.ledger))

    def acts(self, query_id: str) -> list[str]:
        return [entry.act for entry in self.ledger().entries() if entry.query_id == query_id]

    @contextmanager
    def line(self):
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(PATIENCE)
            line.connect(self.place.socket)
            yield line


@pytest.fixture(scope="module")
def gate():
    """One daemon for most of the tests, in a folder that every user can come to."""
    folder = Path(tempfile.mkdtemp(prefix="silodp-"))
    folder.chmod(0o755)
    process = Process(made(folder, timeout=PATIENCE, socket_group="65534" if os.getuid() == 0 else ""), folder)
    yield process
    assert process.end(signal.SIGTERM) == 0
    assert process.errors.read_bytes() == b""
    shutil.rmtree(folder)


# --- frames over the socket ---------------------------------------------------------------------------------------------------------


def test_a_signed_query_is_answered_over_the_socket_and_its_retry_costs_nothing(gate):
    frame = asked(gate.silo, "first")
    raw = gate.socket.ask(frame, PATIENCE)
    answer = decode_reply(raw, limit=2**20, silo_key=gate.silo.key)
    assert isinstance(answer, Answer)
    assert (answer.silo, answer.query_id, tuple(answer.value.shape)) == ("clinic", "first", (1, gate.silo.parameters))
    assert gate.socket.ask(frame, PATIENCE) == raw
    assert gate.acts("first") == ["charge", "answer"]
    with gate.line() as line:  # many questions on one connection
        for _ in range(3):
            line.sendall(len(frame).to_bytes(4, "big") + frame)
            assert whole(line) == raw


def whole(line: socket.socket) -> bytes:
    """One reply, or what came of it before the other side hung up."""
    received = b""
    while len(received) < 4 or len(received) < 4 + int.from_bytes(received[:4], "big"):
        piece = line.recv(2**16)
        if not piece:
            break
        received += piece
    return received[4:]


def test_garbage_gets_a_signed_code_and_a_frame_too_long_is_not_even_read(gate):
    assert gate.code(b"") == gate.code(b"GET / HTTP/1.1\r\n\r\n") == gate.code(bytes(500)) == "malformed"
    assert gate.code(asked(gate.silo, "q", key=STRANGER)) == "asker"
    head = gate.ledger().head()
    assert gate.code(bytes(2**24)) == "size"
    with gate.line() as line:  # two gigabytes announced, none sent: the refusal comes at once, and then the end
        line.sendall((2**31).to_bytes(4, "big"))
        assert decode_reply(whole(line), limit=1000, silo_key=gate.silo.key) == Refusal("size")
        assert line.recv(1) == b""
    assert gate.ledger().head() == head


def test_slow_couriers_keep_nobody_out(gate):
    with ExitStack() as lines:
        for _ in range(gate.place.connections + 3):
            line = lines.enter_context(gate.line())
            line.sendall(b"\0\0")
        assert gate.code(asked(gate.silo, "beside-the-slow")) == "answered"


def test_twenty_connections_at_once_are_all_answered_and_each_id_is_charged_once(gate):
    replies: dict[int, bytes] = {}

    def ask(i: int) -> None:
        replies[i] = gate.socket.ask(asked(gate.silo, f"at-once-{i % 5}"), PATIENCE)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(replies) == 20
    assert all(replies[i] == replies[i % 5] for i in range(20))
    assert len(set(replies.values())) == 5
    assert all(gate.acts(f"at-once-{i}") == ["charge", "answer"] for i in range(5))


def test_the_couriers_user_can_open_the_socket_and_nothing_else(gate):
    if os.getuid() != 0:
        pytest.skip("needs to become another user")
    found = os.stat(gate.place.socket)
    assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o660, 65534)
    files = [str(path) for path in gate.folder.rglob("*") if path.is_file()]
    assert len(files) >= 7
    frame = asked(gate.silo, "courier")
    courier = f"""
import os, socket, sys
for path in {files!r}:
    for how in (os.O_RDONLY, os.O_WRONLY):
        try:
            os.open(path, how)
        except PermissionError:
            continue
        sys.exit(path)
try:
    os.listdir({str(gate.folder / "silo")!r})
    sys.exit("listed")
except PermissionError:
    pass
line = socket.socket(socket.AF_UNIX)
line.connect({gate.place.socket!r})
line.sendall(bytes.fromhex({(len(frame).to_bytes(4, "big") + frame).hex()!r}))
print(line.recv(8).hex())
"""
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable
    done = subprocess.run([python, "-I", "-c", courier], user=65534, group=65534, extra_groups=[], capture_output=True, text=True, cwd="/")
    assert (done.returncode, done.stderr) == (0, "")
    assert bytes.fromhex(done.stdout)[4:] == b"SDPR"


# --- what an operator reads ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def silodp(monkeypatch, capsys, tmp_path):
    """Runs a command as the shell does: (exit code, standard output, standard error)."""
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))

    def run(*words, of=("silo",)) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["silodp", *of, *map(str, words)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return run


def test_status_says_what_is_left_and_what_was_asked_and_the_log_has_a_line_for_each(gate, silodp):
    name = "status-" + "x" * 50 + "-end"
    frames = [asked(gate.silo, name), asked(gate.silo, name), asked(gate.silo, "noisy", noise=0.1), bytes(200)]
    assert gate.code(asked(gate.silo, "before-status")) == "answered"
    before = json.loads(silodp("status", gate.silo.policy, "--json")[1])
    assert [gate.code(frame) for frame in frames] == ["answered", "answered", "noise", "malformed"]
    code, text, _ = silodp("status", gate.silo.policy, "--json")
    now = json.loads(text)
    assert (code, now["running"], now["silo"], now["records"]) == (0, True, "clinic", 60)
    assert (now["count"], now["head"]) == gate.ledger().head()
    assert now["answered"] == before["answered"] + 1
    assert now["repeated"] == before["repeated"] + 1
    assert now["refused"]["noise"] == before["refused"].get("noise", 0) + 1
    assert now["spent_epsilon"] + now["left_epsilon"] == pytest.approx(3.0)
    assert now["used"] - before["used"] > 0
    words = silodp("status", gate.silo.policy)[1]
    assert "the gate runs" in words
    assert f"Epsilon {rounded_up(now['spent_epsilon'], 4)} of 3 is spent" in words
    assert f"{1 - now['used']:.1%} of the budget is left" in words
    lines = Path(gate.place.log).read_text().splitlines()[-4:]
    price = now["used"] - before["used"]
    for line, wanted in zip(
        lines, ("answered +Grad +status-xxxx..", "repeated +Grad +status-", "noise +Grad +noisy", "malformed +- +- "), strict=True
    ):
        assert re.match(r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00 " + wanted, line), line
    assert f"price {price:.4%} left {1 - now['used']:.4%}" in lines[0]


def test_no_value_of_a_record_is_in_any_file_but_the_silos_own_data_nor_in_what_is_printed(gate, silodp):
    assert f"{CANARY}" in (gate.folder / "clinic.csv").read_text()
    assert gate.code(asked(gate.silo, "canary")) == "answered"
    assert gate.code(asked(gate.silo, "canary", noise=0.1)) == "noise"
    files = [path for path in gate.folder.rglob("*") if path.is_file() and path.name != "clinic.csv"]
    assert {"gate.log", "silo.json", "policy.toml", "ledger.db", "stderr"} <= {path.name for path in files}
    spellings = [str(int(CANARY)).encode(), np.float32(CANARY).tobytes(), np.float64(CANARY).tobytes()]
    for path in files:
        assert not any(spelling in path.read_bytes() for spelling in spellings), path
    assert "987654" not in "".join(silodp("status", gate.silo.policy)[1:])


BAD_DATA = [
    ("a,outcome\nCANARY 987654,1\n", "column 1, row 1"),
    ("a,outcome\n1.0,987654\n", "column 'outcome', row 1"),
    ('a,outcome\n1.0,"987654, row 7 (counted"\n', "column 'outcome', row 1 (counted"),
    ('a,outcome\n"987654, column b, row 7 (counted",1\n', "column 1, row 1 (counted"),
    ("a,outcome\n1.0,1,987654\n", "row 1"),
    ("987654,1\n987655,0\n", "header"),
    ("987654;1\n", "header"),
    ("987654,987654\n", "header"),
    ("987654,outcome\n1,1\n", "no header"),
    ("", "is empty"),
    ('"9876\n54",outcome\n1,1\n', "header"),
]


@pytest.mark.parametrize(("text", "wanted"), BAD_DATA)
def test_bad_data_are_refused_in_a_sentence_that_holds_no_value(tmp_path, silodp, text, wanted):
    (tmp_path / "c.csv").write_text(text)
    code, out, err = silodp("init", tmp_path / "new", "--data", tmp_path / "c.csv", "--label", "outcome", "--epsilon", 3)
    assert (code, out) == (2, "")
    assert wanted in err
    assert "98765" not in err
    assert err.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_every_command_that_reads_records_refuses_bad_data_without_a_value(tmp_path, silodp):
    data = write_data(tmp_path / "c.csv")
    own = ("--silo", data, "--label", "outcome", "--rounds", 1)
    trained = ("train", *own, "--algorithm", "mb-sgd", "--model", "logistic", "--held-out", 0.2, "--out", tmp_path / "run")
    assert silodp(*trained, of=())[0] == 0
    for text, wanted in BAD_DATA:
        data.write_text(text)
        for words in (
            (*trained[:-1], tmp_path / "other"),
            ("tune", *own, "--out", tmp_path / "tune"),
            ("profile", *own[:4]),
            ("evaluate", tmp_path / "run"),
        ):
            code, out, err = silodp(*words, of=())
            assert (code, err.count("\n")) == (2, 1), words
            assert wanted in err
            assert "9876" not in out + err
    for text, label, classes in (
        ("Jane 987654,1\nJoe,0\n", "1", "0,1"), ("987654.5,1\n987655,0\n", "1", "0,1"), ("Jane 987654,ill\nJoe,well\n", "ill", "ill,well"),
    ):  # fmt: skip
        data.write_text(text)
        own = ("--silo", data, "--label", label, "--classes", classes)
        deployed = ("--data", data, *own[2:], "--epsilon", 3)
        for words in (
            ("train", *own, "--algorithm", "mb-sgd", "--model", "logistic", "--out", tmp_path / "new"),
            ("tune", *own, "--out", tmp_path / "new"),
            ("profile", *own),
            ("silo", "init", tmp_path / "new", *deployed),
            ("ledger", "create", tmp_path / "new", *deployed),
        ):
            code, out, err = silodp(*words, of=())
            assert (code, err.count("\n")) == (2, 1), words
            assert "seems to have no header" in err
            assert not any(cell in out + err for cell in ("9876", "Jane"))
            assert not (tmp_path / "new").exists()


def test_a_log_is_put_aside_by_size_and_a_disk_that_is_full_stops_nothing(tmp_path, capfd):
    log = GateLog(str(tmp_path / "gate.log"), 2000)
    for i in range(200):
        log.note(FrameNote("answered", f"q{i}", "Grad"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gate.log", *(f"gate.log.{i}" for i in range(1, 6))]
    assert all(path.stat().st_size <= 2000 for path in tmp_path.iterdir())
    assert 80 < tally(str(tmp_path / "gate.log"))["answered"] < 200
    log._handler.stream.close()
    log._handler.stream = open("/dev/full", "w")  # noqa: SIM115
    log.note(FrameNote("answered", "q", "Grad"))
    assert capfd.readouterr().err == "", "not even a traceback"
    with pytest.raises(OSError, match="space"):
        log._handler.stream.close()
    log._handler.stream = None


# --- killed, stopped, started again -------------------------------------------------------------------------------------------------


def test_kill_9_in_mid_work_then_a_restart_repeats_what_was_sent_and_charges_nothing_twice(tmp_path):
    process = Process(made(tmp_path, maximum_local_steps=10**6), tmp_path)
    silo = process.silo
    first, steps, early = process.socket.ask(asked(silo, "q1"), PATIENCE), 150, 0
    outcome: list[object] = []

    def ask() -> None:
        try:
            outcome.append(process.socket.ask(frame, PATIENCE))
        except Unreached as error:
            outcome.append(error.code)

    def until_charged(query_id: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while "charge" not in process.acts(query_id):
            assert time.monotonic() < deadline
            time.sleep(0.005)

    while True:
        name, outcome = f"q2-{early}", []
        frame = slow(silo, name, steps)
        asking = threading.Thread(target=ask)
        asking.start()
        until_charged(name)
        assert process.end(signal.SIGKILL) == -signal.SIGKILL
        asking.join(PATIENCE)
        if process.acts(name) == ["charge"]:
            break
        early, steps = early + 1, 4 * steps  # it was to be killed before the answer was stored: once more, with more to do
        assert early < 6
        process.start()
    assert outcome == ["closed"]
    assert Path(process.place.socket).exists(), "nobody removed it"
    assert not running(process.place.ledger)
    process.start()
    assert process.socket.ask(asked(silo, "q1"), PATIENCE) == first
    again = process.socket.ask(frame, PATIENCE)
    assert isinstance(decode_reply(again, limit=2**20, silo_key=silo.key), Answer)
    assert process.socket.ask(frame, PATIENCE) == again
    assert [process.acts(q) for q in ("q1", name)] == [["charge", "answer"]] * 2
    with pytest.raises(BadInput, match="another daemon"), sole(process.place.ledger, patience=0.1):
        pass
    # SIGTERM while an answer is computed: it is sent
    frame, outcome = slow(silo, "q3", 400), []
    asking = threading.Thread(target=ask)
    asking.start()
    until_charged("q3")
    assert process.end(signal.SIGTERM) == 0
    asking.join(PATIENCE)
    assert isinstance(outcome[0], bytes)
    assert isinstance(decode_reply(outcome[0], limit=2**20, silo_key=silo.key), Answer)
    assert process.acts("q3") == ["charge", "answer"]
    assert not Path(process.place.socket).exists()
    with pytest.raises(Unreached, match="unreachable"):
        process.socket.ask(frame, 1.0)
    process.ledger().verify()
    assert [line.split()[1] for line in Path(process.place.log).read_text().splitlines()] == [
        *("started", "answered", *("answered", "started") * early),
        *("started", "repeated", "answered", "repeated", "answered", "stopped"),
    ]
    assert process.errors.read_bytes() == b""


# --- what a daemon does not start with ----------------------------------------------------------------------------------------------


def started(policy: str) -> str:
    """What keeps the daemon from starting; it would otherwise stop at once."""
    stop, tell = socket.socketpair()
    with stop, tell:
        tell.sendall(b"!")
        try:
            daemon.serve(policy, stop, lambda *_: None)
        except BadInput as error:
            return str(error)
    return "started"


def edited(silo: Silo, **changes: str) -> str:
    text = Path(silo.policy).read_text()
    for name, value in changes.items():
        text, times = re.subn(rf"(?m)^{name} = .*$", f"{name} = {value}", text)
        assert times == 1
    path = Path(silo.policy).with_name("edited.toml")
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def idle(tmp_path, monkeypatch) -> Silo:
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))
    return made(tmp_path)


def test_a_second_daemon_other_models_other_modes_and_no_asker_are_refused(idle, tmp_path):
    folder = Path(idle.policy).parent
    assert started(idle.policy) == "started"
    with sole(str(folder / "ledger.db")):
        (tmp_path / "link").symlink_to(folder / "ledger.db")
        assert running(str(tmp_path / "link"))
        assert "another daemon" in started(edited(idle, ledger=f'"{tmp_path}/link"'))
    assert "approves the definition" in started(edited(idle, model='"mlp:5"'))
    assert "approves the definition" in started(edited(idle, prox='"l1:0.1"'))
    assert "approves the definition" in started(edited(idle, definition=f'"{"0" * 64}"'))
    assert "askers" in started(edited(idle, askers="[]"))
    assert "budget" in started(edited(idle, epsilon="30.0"))
    for mode in ("0666", "0777", "660", "0060", "rw"):
        assert "socket_mode" in started(edited(idle, socket_mode=f'"{mode}"')), mode
    for name in ("silo.key", "ledger.db", "../clinic.csv"):
        for mode in (0o604, 0o640, 0o660):
            (folder / name).chmod(mode)
            assert f"has mode {mode:04o}" in started(idle.policy), name
        (folder / name).chmod(0o600)
    path = edited(idle)
    Path(path).chmod(0o622)
    assert "could write it" in started(path)
    assert "couriers" in started(edited(idle, couriers='["nobody-of-that-name"]'))
    assert "socket_group" in started(edited(idle, socket_group='"nobody-of-that-name"'))
    (folder / "gate.sock").write_text("not a socket")
    assert "is not a socket" in started(idle.policy)
    (folder / "gate.sock").unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(folder / "gate.sock"))
        other.listen()
        assert "another process listens" in started(idle.policy)
    assert started(idle.policy) == "started", "what nobody listens at is stale"
    (folder / "ledger.db").unlink()
    assert "there is no ledger" in started(idle.policy)
    assert not (folder / "ledger.db").exists()


def test_a_model_in_a_file_is_approved_by_the_bytes_that_run(tmp_path, monkeypatch):
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))
    model = tmp_path / "net.py"
    model.write_text(NET)
    model.chmod(0o600)
    silo = made(tmp_path, model=f"{model}:build")
    assert Place.load(silo.policy).model_sha256 == hashlib.sha256(model.read_bytes()).hexdigest()
    assert started(silo.policy) == "started"
    model.write_text(NET.replace("self.a(x)", "self.a(x) * 2"))  # the same definition, another function
    assert "approves a model file" in started(silo.policy)
    sha = hashlib.sha256(model.read_bytes()).hexdigest()
    assert started(edited(silo, model_sha256=f'"{sha}"')) == "started"
    model.chmod(0o602)
    assert "could write it" in started(edited(silo, model_sha256=f'"{sha}"'))


def test_a_loss_and_a_prox_in_files_are_approved_by_the_bytes_that_run(tmp_path, monkeypatch):
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))
    words = {"loss": (OWN_LOSS, "own"), "prox": (OWN_PROX, "Own:0.1")}
    files = {what: tmp_path / f"{what}.py" for what in words}
    for what, file in files.items():
        file.write_text(words[what][0])
        file.chmod(0o600)
    silo = made(tmp_path, **{what: f"{file}:{words[what][1]}" for what, file in files.items()})
    place = Place.load(silo.policy)
    assert place.loss_sha256 == hashlib.sha256(OWN_LOSS.encode()).hexdigest()
    assert place.prox_sha256 == hashlib.sha256(OWN_PROX.encode()).hexdigest()
    definition = approved_problem(place, 3, None).definition()
    assert place.loss_sha256 in definition
    assert place.prox_sha256 in definition
    assert started(silo.policy) == "started"
    for what, file in files.items():
        ran = tmp_path / f"{what} ran"
        file.write_text(f"open({str(ran)!r}, 'w').close()\n{words[what][0]}")
        assert f"approves a {what} file" in started(silo.policy)
        assert not ran.exists(), "what was not approved is not run"
        sha = hashlib.sha256(file.read_bytes()).hexdigest()
        other = edited(silo, **{f"{what}_sha256": f'"{sha}"'})
        assert "definition" in started(other), "and what is approved is another problem"
        file.write_text(words[what][0])
    sub_module = f'"part:0:3:{files["prox"]}:Own:0.1"'
    assert "cannot be read" in started(edited(silo, prox=sub_module)), "a file is named by its path alone"


OWN_LOSS = "def own(output, target):\n    return (output[..., 0] - target).abs()\n"
OWN_PROX = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Own:
    strength: float

    def value(self, w):
        return self.strength / 2 * w.square().sum(-1)

    def __call__(self, w, step):
        return w / (1 + self.strength * step)
"""

NET = """
from torch import nn


class Net(nn.Module):
    def __init__(self, features, outputs):
        super().__init__()
        self.a = nn.Linear(features, outputs)

    def forward(self, x):
        return self.a(x)


def build(features, outputs):
    return Net(features, outputs)
"""


def test_init_writes_a_policy_with_a_comment_for_every_field_and_writes_over_nothing(tmp_path, silodp):
    data = write_data(tmp_path / "clinic.csv")
    data.chmod(0o644)
    words = ("init", tmp_path / "a", "--data", data, "--label", "outcome", "--model", "mlp:4", "--epsilon", 3)
    code, out, err = silodp(*words)
    assert (code, err) == (0, "")
    for sentence in ("60 records, 3 features", "60 records only", "differ in scale", "mode 0644", "public key into askers"):
        assert sentence in out
    assert "98765" not in out
    before = {path: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert {path.name for path in before} == {"policy.toml", "silo.key", "silo.json", "ledger.db", "ledger.db.anchor"}
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in before)
    text = (tmp_path / "a/policy.toml").read_text()
    for kind, table in zip((Policy, Place), text.split("[daemon]"), strict=True):
        assert sorted(re.findall(r"(?m)^# .+\n(\w+) = ", table)) == sorted(field.name for field in fields(kind))
    assert {field.name for kind in (Policy, Place, Shuffling) for field in fields(kind)} == set(COMMENTS)
    assert Place.load(tmp_path / "a/policy.toml").data == str(data)
    code, _, err = silodp(*words)
    assert (code, "nothing is ever written over" in err) == (2, True)
    code, _, err = silodp(*(tmp_path / "b" if word == tmp_path / "a" else word for word in words))
    assert (code, "in common with the one whose ledger is" in err) == (2, True)
    assert not list((tmp_path / "b").iterdir())
    assert before == {path: path.read_bytes() for path in (tmp_path / "a").iterdir()}


@pytest.mark.parametrize("name", [field.name for field in fields(Place)])
def test_a_missing_misspelt_or_mistyped_setting_is_named(tmp_path, name):
    text = "\n".join(["[daemon]", *(f"{key} = {value}" for key, value in SETTINGS.items())]) + "\n"
    path = tmp_path / "policy.toml"
    path.write_text(text)
    assert Place.load(path).ledger == str(tmp_path / "ledger.db")
    absent = () if name in ("schema", "held_out", "loss", "loss_sha256", "prox_sha256") else ("",)  # older policies have none
    for new in (*absent, f"{name}s = 1\n", f"{name} = {{}}\n", f"{name} = true\n", f"{name} = -1\n", f"{name} = [1]\n"):
        path.write_text(re.sub(rf"(?m)^{name} = .*\n", new, text))
        with pytest.raises(BadInput, match=name):
            Place.load(path)
    path.write_text("")
    with pytest.raises(BadInput, match="no table"):
        Place.load(path)


SETTINGS = {name: '"x"' for name in ("data", "label", "model", "prox", "key", "log", "socket")}
SETTINGS |= {
    "classes": "[]",
    "couriers": "[]",
    **dict.fromkeys(("model_sha256", "prox_sha256", "loss_sha256", "loss"), '""'),
    "schema": '""',
    "held_out": "0.0",
    "socket_group": '""',
    "socket_mode": '"0600"',
    "ledger": '"ledger.db"',
}
SETTINGS |= {"log_bytes": "5000", "connections": "4", "timeout": "2", "maximum_frame": "10000"}


# --- the server alone, with a door that the tests hold ------------------------------------------------------------------------------


@contextmanager
def serving(folder: Path, handle, **changes):
    place = Place(
        **{field.name: () if field.name in ("classes", "couriers") else 0.0 if field.name == "held_out" else "x" for field in fields(Place)}
        | FITTING
    )
    place = replace(place, socket=str(folder / "s"), log=str(folder / "log"), **changes)
    stop, tell = socket.socketpair()
    log, ready = GateLog(place.log, 10**6), threading.Event()
    server = Server(place, handle, refuse=lambda code: encode_reply(Refusal(code)), limit=10**6, log=log)
    thread = threading.Thread(target=server.run, args=(stop, ready.set))
    thread.start()
    try:
        assert ready.wait(PATIENCE)
        yield place, server
    finally:
        tell.sendall(b"!")
        thread.join(PATIENCE)
        log.close()
        stop.close()
        tell.close()
    assert not thread.is_alive()


FITTING = {
    "model_sha256": "",
    "prox_sha256": "",
    "loss_sha256": "",
    "socket_group": "",
    "socket_mode": "0660",
    "log_bytes": 10**6,
    "connections": 3,
    "timeout": 20.0,
}
FITTING |= {"maximum_frame": 10**5}


def refusal(raw: bytes) -> str:
    got = decode_reply(raw, limit=1000)
    assert isinstance(got, Refusal)
    return got.code


def test_only_the_users_that_the_policy_lists_may_knock(tmp_path):
    seen: list[bytes] = []
    with serving(tmp_path, lambda frame: seen.append(frame) or b"yes", couriers=(str(os.getuid() + 1),)) as (place, _):
        assert refusal(Socket(place.socket).ask(b"hello", PATIENCE)) == "peer"
    with serving(tmp_path, lambda frame: seen.append(frame) or b"yes", couriers=(str(os.getuid()),)) as (place, _):
        assert Socket(place.socket).ask(b"hello", PATIENCE) == b"yes"
    assert seen == [b"hello"]
    assert Path(place.log).read_text().split()[1] == "peer"


def test_frames_reach_the_door_one_at_a_time_and_in_turn_and_a_full_house_is_busy(tmp_path):
    go, order, inside = threading.Event(), [], []

    def handle(frame: bytes) -> bytes:
        inside.append(1)
        assert len(inside) == 1
        order.append(frame)
        assert go.wait(PATIENCE)
        inside.pop()
        return frame * 2

    with serving(tmp_path, handle) as (place, server):
        replies: dict[bytes, bytes] = {}
        threads = []
        for name in (b"a", b"b", b"c"):
            threads.append(threading.Thread(target=lambda name=name: replies.update({name: Socket(place.socket).ask(name, PATIENCE)})))
            threads[-1].start()
            deadline = time.monotonic() + PATIENCE
            while len(order) + server._jobs.qsize() < len(threads):
                assert time.monotonic() < deadline
                time.sleep(0.005)
        assert refusal(Socket(place.socket).ask(b"d", PATIENCE)) == "busy"
        assert order == [b"a"]
        go.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert order == [b"a", b"b", b"c"]
    assert replies == {b"a": b"aa", b"b": b"bb", b"c": b"cc"}


def test_whoever_sends_a_byte_now_and_then_is_hung_up_on(tmp_path):
    with serving(tmp_path, lambda frame: frame, timeout=0.5) as (place, _), socket.socket(socket.AF_UNIX) as line:
        line.connect(place.socket)
        line.sendall((10**5).to_bytes(4, "big"))
        with pytest.raises(OSError, match=r"pipe|reset"):  # noqa: PT012
            for _ in range(2000):  # a byte now and then prolongs nothing
                line.sendall(b"\0")
                time.sleep(0.05)


def test_a_server_that_stops_finishes_what_it_computes_tells_who_waits_and_hangs_up_on_who_is_silent(tmp_path):
    begun, go = threading.Event(), threading.Event()

    def handle(frame: bytes) -> bytes:
        begun.set()
        assert go.wait(PATIENCE)
        return frame * 2

    def until(holds) -> None:
        deadline = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    with ExitStack() as lines:
        with serving(tmp_path, handle) as (place, server):
            computed, queued, silent = (lines.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3))
            for line in (computed, queued, silent):
                line.settimeout(PATIENCE)
                line.connect(place.socket)
            computed.sendall(b"\0\0\0\1a")
            assert begun.wait(PATIENCE)
            queued.sendall(b"\0\0\0\1b")
            until(lambda: server._jobs.qsize() == 1 and len(server._open) == 3)
            finishing = threading.Thread(target=lambda: (until(server._stopping.is_set), go.set()))
            finishing.start()
        finishing.join(PATIENCE)
        assert whole(computed) == b"aa"
        assert refusal(whole(queued)) == "stopping"
        assert silent.recv(1) == b""


def test_the_policys_longest_frame_binds_even_below_the_models(tmp_path):
    with serving(tmp_path, lambda frame: b"%d" % len(frame)) as (place, _):
        assert Socket(place.socket).ask(bytes(10**5), PATIENCE) == b"100000"
        assert refusal(Socket(place.socket).ask(bytes(10**5 + 1), PATIENCE)) == "size"


def test_a_door_that_fails_is_one_code_and_every_code_of_the_line_is_a_sentence(tmp_path, capfd):
    def broken(frame: bytes) -> bytes:
        raise MemoryError("income 51234")

    with serving(tmp_path, broken) as (place, _):
        raw = Socket(place.socket).ask(b"q", PATIENCE)
    assert refusal(raw) == "internal"
    assert capfd.readouterr() == ("", "")
    assert all(text.endswith(".") for text in (*LINE_CODES.values(), *WIRE_CODES.values()))


# --- the courier's end --------------------------------------------------------------------------------------------------------------


def test_a_courier_learns_a_fixed_code_when_no_reply_comes(tmp_path):
    def ask(frame=b"q", timeout=0.2, **limit) -> str:
        with pytest.raises(Unreached) as error:
            Socket(tmp_path / "s", **limit).ask(frame, timeout)
        assert error.value.code in WIRE_CODES
        return str(error.value)

    assert ask() == "unreachable"
    (tmp_path / "s").write_text("a file")
    assert ask() == "unreachable"
    (tmp_path / "s").unlink()
    assert ask(bytes(11), limit=10) == "size"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        assert ask() == "timeout"
        listener.accept()[0].close()
        for sent, code in ((b"", "closed"), (b"\0\0", "closed"), (b"\0\0\0\5abc", "closed"), (b"\x7f\0\0\0", "size")):
            thread = threading.Thread(target=_say, args=(listener, sent))
            thread.start()
            assert ask(timeout=PATIENCE) == code, sent
            thread.join()
    assert ask() == "unreachable"


def _say(listener: socket.socket, words: bytes) -> None:
    line, _ = listener.accept()
    with line:
        line.recv(100)
        line.sendall(words)
