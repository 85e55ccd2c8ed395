"""The gate daemon as its couriers meet it: real processes, real sockets, kill -9; and what an
operator reads of it.
"""

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from gate_process import CANARY, PATIENCE, STRANGER, Process, asked, made, slow, whole, write_data

from silodp.core.errors import BadInput
from silodp.core.figures import rounded_up
from silodp.core.protocol.codec import Answer, Refusal, decode_reply
from silodp.host.log import tally
from silodp.host.portable import running, sole
from silodp.silo.service.daemon import GateLog
from silodp.silo.service.door import FrameNote
from silodp.wire.socket import Unreached

pytestmark = pytest.mark.xdist_group("daemon")  # one gate for several tests, whose log each reads


@pytest.fixture(scope="module")
def gate():
    """One daemon for most of the tests, in a folder that every user can come to."""
    folder = Path(tempfile.mkdtemp(prefix="silodp-"))
    folder.chmod(0o755)
    process = Process(
        made(folder, timeout=PATIENCE, socket_group="65534" if os.getuid() == 0 else ""), folder
    )
    yield process
    assert process.end(signal.SIGTERM) == 0
    assert process.errors.read_bytes() == b""
    shutil.rmtree(folder)


# --- frames over the socket ----------------------------------------------------------------------


def test_a_signed_query_is_answered_over_the_socket_and_its_retry_costs_nothing(gate):
    frame = asked(gate.silo, "first")
    raw = gate.socket.ask(frame, PATIENCE)
    answer = decode_reply(raw, limit=2**20, silo_key=gate.silo.key)
    assert isinstance(answer, Answer)
    assert (answer.silo, answer.query_id, tuple(answer.value.shape)) == (
        "clinic",
        "first",
        (1, gate.silo.parameters),
    )
    assert gate.socket.ask(frame, PATIENCE) == raw
    assert gate.acts("first") == ["charge", "answer"]
    with gate.line() as line:  # many questions on one connection
        for _ in range(3):
            line.sendall(len(frame).to_bytes(4, "big") + frame)
            assert whole(line) == raw


def test_garbage_gets_a_signed_code_and_a_frame_too_long_is_not_even_read(gate):
    assert (
        gate.code(b"")
        == gate.code(b"GET / HTTP/1.1\r\n\r\n")
        == gate.code(bytes(500))
        == "malformed"
    )
    assert gate.code(asked(gate.silo, "q", key=STRANGER)) == "asker"
    head = gate.ledger().head()
    assert gate.code(bytes(2**24)) == "size"
    with (
        gate.line() as line
    ):  # two gigabytes announced, none sent: the refusal comes at once, and then the end
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
    done = subprocess.run(
        [python, "-I", "-c", courier],
        user=65534,
        group=65534,
        extra_groups=[],
        capture_output=True,
        text=True,
        cwd="/",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert bytes.fromhex(done.stdout)[4:] == b"SDPR"


# --- what an operator reads ----------------------------------------------------------------------


def test_status_says_what_is_left_and_what_was_asked_and_the_log_has_a_line_for_each(gate, silodp):
    name = "status-" + "x" * 50 + "-end"
    frames = [
        asked(gate.silo, name),
        asked(gate.silo, name),
        asked(gate.silo, "noisy", noise=0.1),
        bytes(200),
    ]
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
    share = f"{rounded_up(100 * now['used'], 1, 'f')} % of the budget is used"
    assert f"{share}: epsilon {rounded_up(now['spent_epsilon'], 4)} of 3." in words
    lines = Path(gate.place.log).read_text().splitlines()[-4:]
    price = now["used"] - before["used"]
    for line, wanted in zip(
        lines,
        (
            "answered +Grad +status-xxxx..",
            "repeated +Grad +status-",
            "noise +Grad +noisy",
            "malformed +- +- ",
        ),
        strict=True,
    ):
        assert re.match(r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00 " + wanted, line), line
    assert f"price {price:.4%} left {1 - now['used']:.4%}" in lines[0]


def test_no_value_of_a_record_is_in_any_file_but_the_silos_own_data_nor_in_what_is_printed(
    gate, silodp
):
    assert f"{CANARY}" in (gate.folder / "clinic.csv").read_text()
    assert gate.code(asked(gate.silo, "canary")) == "answered"
    assert gate.code(asked(gate.silo, "canary", noise=0.1)) == "noise"
    files = [
        path for path in gate.folder.rglob("*") if path.is_file() and path.name != "clinic.csv"
    ]
    assert {"gate.log", "silo.json", "policy.toml", "ledger.db", "stderr"} <= {
        path.name for path in files
    }
    spellings = [
        str(int(CANARY)).encode(),
        np.float32(CANARY).tobytes(),
        np.float64(CANARY).tobytes(),
    ]
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
    ("987654;1\n", "separated by semicolons"),
    ("987654,987654\n", "header"),
    ("987654,outcome\n1,1\n", "no header"),
    ("", "is empty"),
    ('"9876\n54",outcome\n1,1\n', "header"),
]


@pytest.mark.parametrize(("text", "wanted"), BAD_DATA)
def test_bad_data_are_refused_in_a_sentence_that_holds_no_value(tmp_path, silodp, text, wanted):
    (tmp_path / "c.csv").write_text(text)
    code, out, err = silodp(
        "init", tmp_path / "new", "--data", tmp_path / "c.csv", "--label", "outcome", "--epsilon", 3
    )
    assert (code, out) == (2, "")
    assert wanted in err
    assert "98765" not in err
    assert err.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_every_command_that_reads_records_refuses_bad_data_without_a_value(tmp_path, silodp):
    data = write_data(tmp_path / "c.csv")
    own = ("--silo", data, "--label", "outcome", "--rounds", 1)
    trained = (
        "train",
        *own,
        "--algorithm",
        "mb-sgd",
        "--model",
        "logistic",
        "--held-out",
        0.2,
        "--out",
        tmp_path / "run",
    )
    assert silodp(*trained, of=())[0] == 0
    for text, wanted in BAD_DATA:
        data.write_text(text)
        for words in (
            (*trained[:-1], tmp_path / "other"),
            ("tune", *own, "--out", tmp_path / "tune"),
            ("stats", "profile", *own[:4]),
            ("evaluate", tmp_path / "run"),
        ):
            code, out, err = silodp(*words, of=())
            assert (code, err.count("\n")) == (2, 1), words
            assert wanted in err
            assert "9876" not in out + err
    for text, label, classes in (
        ("Jane 987654,1\nJoe,0\n", "1", "0,1"),
        ("987654.5,1\n987655,0\n", "1", "0,1"),
        ("Jane 987654,ill\nJoe,well\n", "ill", "ill,well"),
    ):
        data.write_text(text)
        own = ("--silo", data, "--label", label, "--classes", classes)
        deployed = ("--data", data, *own[2:], "--epsilon", 3)
        for words in (
            (
                "train",
                *own,
                "--algorithm",
                "mb-sgd",
                "--model",
                "logistic",
                "--out",
                tmp_path / "new",
            ),
            ("tune", *own, "--out", tmp_path / "new"),
            ("stats", "profile", *own),
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
        log.sent()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "gate.log",
        *(f"gate.log.{i}" for i in range(1, 6)),
    ]
    assert all(path.stat().st_size <= 2000 for path in tmp_path.iterdir())
    assert 80 < tally(str(tmp_path / "gate.log"))["answered"] < 200
    log._handler.stream.close()
    log._handler.stream = open("/dev/full", "w")  # noqa: SIM115
    log.note(FrameNote("answered", "q", "Grad"))
    log.sent()
    assert capfd.readouterr().err == "", "not even a traceback"
    with pytest.raises(OSError, match="space"):
        log._handler.stream.close()
    log._handler.stream = None


# --- killed, stopped, started again --------------------------------------------------------------


def test_kill_9_in_mid_work_then_a_restart_repeats_what_was_sent_and_charges_nothing_twice(
    tmp_path,
):
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
        early, steps = (
            early + 1,
            4 * steps,
        )  # it was to be killed before the answer was stored: once more, with more to do
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
