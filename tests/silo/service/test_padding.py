"""`answer_after`: when a reply comes says nothing of what was computed, however frames queue; real
sockets, and a real gate.
"""

import json
import queue
import signal
import socket
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gate_process import PATIENCE, Process, asked, edited, made

import silodp
from gates import shell
from silodp.core.errors import BadInput
from silodp.core.protocol.codec import Answer, Refusal, decode_reply, encode_reply
from silodp.host import listener
from silodp.host.listener import Server
from silodp.host.log import Log, tally
from silodp.silo.service import daemon
from silodp.silo.service.pause import set_paused
from silodp.wire.socket import Socket, Unreached

NEVER = 3000.0  # seconds: no test waits for the end of such a slot


@contextmanager
def serving(folder: Path, handle, after: float, connections: int = 8):
    place = SimpleNamespace(
        socket=str(folder / "s"),
        socket_mode="0660",
        socket_group="",
        couriers=(),
        connections=connections,
        timeout=PATIENCE,
        maximum_frame=10**5,
        log_bytes=10**6,
    )
    stop, tell = socket.socketpair()
    log, ready = Log(str(folder / "log"), 10**6), threading.Event()
    server = Server(
        place,
        handle,
        refuse=lambda code: encode_reply(Refusal(code)),
        limit=10**5,
        log=log,
        after=after,
    )
    thread = threading.Thread(target=server.run, args=(stop, ready.set))
    thread.start()
    try:
        assert ready.wait(PATIENCE)
        yield place.socket
    finally:
        tell.sendall(b"!")
        thread.join(PATIENCE)
        for thing in (log, stop, tell):
            thing.close()
    assert not thread.is_alive()


def knock(path: str, frame: bytes, replies: queue.Queue) -> threading.Thread:
    """Asks in the background; the reply, or the code with which none came, and when."""

    def ask() -> None:
        try:
            reply = Socket(path).ask(frame, PATIENCE)
        except Unreached as unreached:
            reply = unreached.code.encode()
        replies.put((reply, time.monotonic()))

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def test_a_reply_comes_at_the_end_of_its_slot_and_slots_follow_each_other_however_little_was_to_do(
    tmp_path,
):
    """Frames that come together have a slot each: else the second's time would tell how long the
    first took.
    """
    replies: queue.Queue = queue.Queue()
    with serving(tmp_path, lambda frame: frame, 0.4) as path:
        for frames in (1, 3):
            begin = time.monotonic()
            threads = [knock(path, b"%d" % i, replies) for i in range(frames)]
            times = [replies.get(timeout=PATIENCE)[1] - begin for _ in threads]
            for k, took in enumerate(sorted(times), 1):
                assert took >= 0.4 * k
            for thread in threads:
                thread.join(PATIENCE)


def test_a_failure_takes_its_slot_too(tmp_path):
    def fails(frame: bytes) -> bytes:
        raise MemoryError

    with serving(tmp_path, fails, 0.4) as path:
        begin = time.monotonic()
        assert decode_reply(Socket(path).ask(b"q", PATIENCE), limit=1000) == Refusal("internal")
        assert time.monotonic() - begin >= 0.4


def test_a_reply_that_is_ready_gives_no_sign_before_its_time_and_a_stop_does_not_wait_for_it(
    tmp_path,
):
    """Whoever knocks at a full house meanwhile finds it as full as if the answer were still being
    computed.
    """
    ready, replies = threading.Event(), queue.Queue()

    def handle(frame: bytes) -> bytes:
        ready.set()
        return frame

    with serving(tmp_path, handle, NEVER, connections=1) as path:
        first = knock(path, b"first", replies)
        assert ready.wait(PATIENCE)
        for _ in range(20):
            assert decode_reply(Socket(path).ask(b"second", PATIENCE), limit=1000) == Refusal(
                "busy"
            )
        assert replies.empty()
        begin = time.monotonic()
    assert time.monotonic() - begin < PATIENCE
    first.join(PATIENCE)
    assert replies.get(timeout=PATIENCE)[0] == b"closed"


def test_a_reply_that_took_longer_is_sent_and_counted_in_the_log(tmp_path):
    def slow(frame: bytes) -> bytes:
        time.sleep(0.2 if frame == b"slow" else 0)
        return frame

    with serving(tmp_path, slow, 0.05) as path:
        for _ in range(2):
            assert Socket(path).ask(b"slow", PATIENCE) == b"slow"
    assert tally(str(tmp_path / "log"))["late"] == 2
    with serving(tmp_path, slow, 0.0) as path:
        Socket(path).ask(b"slow", PATIENCE)
    assert tally(str(tmp_path / "log"))["late"] == 2, "without answer_after nothing is late"


def test_a_gate_pads_answers_repetitions_and_refusals_alike_and_status_says_whether_it_holds(
    tmp_path,
):
    (tmp_path / "run").mkdir()
    silo = made(tmp_path, answer_after=0.7, socket=str(tmp_path / "run/gate.sock"))
    Path(silo.policy).parent.chmod(0o700)
    gate = Process(silo, tmp_path)
    try:
        for frame, code in (
            (asked(silo, "a"), "answered"),
            (asked(silo, "a"), "answered"),
            (asked(silo, "b", noise=0.1), "noise"),
        ):
            begin = time.monotonic()
            assert gate.code(frame) == code
            assert time.monotonic() - begin >= 0.7
        begin = time.monotonic()
        assert gate.code(bytes(300)) == "malformed"
        assert time.monotonic() - begin >= 0.7
        now = json.loads(shell("silo", "status", silo.policy, "--json"))
        assert (now["answer_after"], now["late"]) == (0.7, tally(gate.place.log).get("late", 0))
        assert "late" not in now["refused"]
        assert "Replies are sent after 0.7 seconds" in shell("silo", "status", silo.policy)
    finally:
        gate.end(signal.SIGTERM)


def test_padding_holds_up_neither_pause_nor_status_nor_the_end_and_loses_no_answer(tmp_path):
    (tmp_path / "run").mkdir()
    silo, replies = (
        made(tmp_path, answer_after=NEVER, socket=str(tmp_path / "run/gate.sock")),
        queue.Queue(),
    )
    Path(silo.policy).parent.chmod(0o700)
    gate = Process(silo, tmp_path)
    asking = knock(gate.place.socket, asked(silo, "kept"), replies)
    deadline = time.monotonic() + PATIENCE
    while gate.acts("kept") != ["charge", "answer"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    set_paused(silo.policy, True)
    now = json.loads(shell("silo", "status", silo.policy, "--json"))
    assert (now["running"], now["paused"], now["answered"]) == (True, True, 1)
    set_paused(silo.policy, False)
    assert replies.empty()
    assert gate.end(signal.SIGTERM) == 0
    asking.join(PATIENCE)
    assert replies.get(timeout=PATIENCE)[0] == b"closed"
    gate.silo = SimpleNamespace(policy=edited(silo, answer_after="0.0"), key=silo.key)
    gate.start()
    try:
        assert isinstance(gate.reply(asked(silo, "kept")), Answer)
        assert gate.acts("kept") == ["charge", "answer"]
    finally:
        gate.end(signal.SIGTERM)


def test_with_answer_after_nobody_else_may_read_the_times_of_ledger_anchor_and_log(
    passable, monkeypatch
):
    monkeypatch.setenv("SILODP_STATE", str(passable / "state"))
    silo = made(passable, answer_after=1.0)

    def started() -> None:
        stop, tell = socket.socketpair()
        with stop, tell:
            tell.sendall(b"!")
            daemon.serve(silo.policy, stop, lambda *_: None)

    with pytest.raises(BadInput, match=r"ledger\.db and read from its times"):
        started()
    Path(silo.policy).parent.chmod(0o700)
    started()


@pytest.mark.parametrize("wrong", [-1.0, 3601, "1", True, float("nan")])
def test_a_time_that_makes_no_sense_is_refused(tmp_path, wrong):
    with pytest.raises(BadInput, match="answer_after is"):
        made(tmp_path, answer_after=wrong)


def test_where_frames_are_answered_small_numbers_are_not_flushed_to_zero(tmp_path):
    """Nothing here sets that mode, which is a thread's own: bounds need no 2^-1022, and slower
    small numbers are the padding's matter.
    """

    def handle(frame: bytes) -> bytes:
        least = np.float64(5e-324)
        many = torch.full(
            (300_000,), 2.0**-1022, dtype=torch.float64
        )  # enough for all of torch's threads
        kept = [
            float(least * 1.0) > 0,
            bool((many * 0.5 > 0).all()),
            bool(((many @ (many * 0 + 0.5)) > 0).item()),
        ]
        single = torch.full((300_000,), 2.0**-126, dtype=torch.float32)
        return bytes([*kept, bool((single * 0.5 > 0).all())])

    with serving(tmp_path, handle, 0.0) as path:
        assert Socket(path).ask(b"q", PATIENCE) == bytes([1, 1, 1, 1])
    sources = [
        file.read_text()
        for file in Path(silodp.__file__).parent.rglob("*.[pc]*")
        if file.suffix in (".py", ".c")
    ]
    assert not any("set_flush_denormal(" in text or "_MM_SET_FLUSH" in text for text in sources)


@pytest.mark.parametrize(("took", "sent"), [(0.2, 1.0), (1.0, 1.0), (1.2, 2.0), (4.5, 5.0)])
def test_a_late_reply_is_sent_at_the_end_of_a_later_slot(monkeypatch, took, sent):
    """Its time says how many slots it took, and nothing finer; the next slot begins then."""
    now, sends, lines = [0.0], [], []

    def pause(seconds: float) -> bool:
        now[0] += seconds
        return False

    def handle(frame: bytes) -> bytes:
        now[0] += took if frame == b"slow" else 0.0
        return frame

    jobs: queue.Queue = queue.Queue()
    for frame in (b"slow", b"quick"):
        jobs.put((frame, 0.0, SimpleNamespace(put=lambda answer: sends.append(now[0]))))
    jobs.put(None)
    monkeypatch.setattr(listener, "time", SimpleNamespace(monotonic=lambda: now[0]))
    Server._work(
        SimpleNamespace(
            _jobs=jobs,
            _after=1.0,
            _handle=handle,
            _refusals={},
            _stopping=SimpleNamespace(wait=pause, is_set=lambda: False),
            _log=SimpleNamespace(line=lines.append, sent=lambda: None),
        )
    )
    assert sends == [sent, sent + 1.0]
    assert len(lines) == (took > 1.0)
