"""The socket between algorithm and engine: what goes in comes out, and neither side's failure hurts
the other.
"""

import os
import socket
import stat
import threading
import time
from contextlib import contextmanager

import pytest

from silodp.host.frames import Frames
from silodp.wire import hub
from silodp.wire.hub import Hub, Later, Turns, serve_hub
from silodp.wire.socket import Unreached

PATIENCE = 600.0  # to end a test that hangs; nothing waits so long when all is well


@contextmanager
def serving(path, exchange, names=lambda: ["a", "b"], removed=set):
    stop = threading.Event()
    thread = threading.Thread(target=serve_hub, args=(path, exchange, names, stop, removed))
    thread.start()
    deadline = time.monotonic() + PATIENCE
    while not hub._listens(str(path)):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    try:
        yield Hub(path)
    finally:
        stop.set()
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_frames_and_replies_pass_unchanged_and_only_the_owner_may_come(tmp_path):
    seen = []

    def exchange(frames, timeout):
        seen.append((dict(frames), timeout))
        return {name: frame[::-1] for name, frame in frames.items() if name != "silent"}

    frames = {"a": bytes(range(256)) * 9000, "b": b"", "silent": b"x", "name with é": b"\0\1"}
    with serving(tmp_path / "hub.sock", exchange) as line:
        assert stat.S_IMODE(os.stat(tmp_path / "hub.sock").st_mode) == 0o600
        assert line.exchange(frames, 250.5) == {
            name: frame[::-1] for name, frame in frames.items() if name != "silent"
        }
        assert line.exchange({}, PATIENCE) == {}
        assert line.names() == ["a", "b"]
    assert seen == [(frames, 250.5), ({}, PATIENCE)]
    assert not (tmp_path / "hub.sock").exists()


def test_a_hub_that_is_gone_or_fails_is_one_code_and_the_next_question_is_answered(tmp_path):
    def exchange(frames, timeout):
        if b"bad" in frames.values():
            raise RuntimeError("the engine is broken")
        return {"stranger": b"not asked", "a": b"ok"}

    def code(*words) -> str:
        with pytest.raises(Unreached) as error:
            Hub(tmp_path / "hub.sock").exchange(*words)
        return error.value.code

    assert code({"a": b""}, PATIENCE) == "unreachable"
    with serving(tmp_path / "hub.sock", exchange) as line:
        assert code({"a": b"bad"}, PATIENCE) == "closed"
        assert line.exchange({"a": b"good"}, PATIENCE) == {"a": b"ok"}, (
            "whoever was not asked has no voice"
        )
    assert code({"a": b""}, PATIENCE) == "unreachable"


def test_who_was_removed_is_told_with_the_replies_of_those_who_were_asked(tmp_path):
    out = {"b"}
    with serving(
        tmp_path / "hub.sock",
        lambda frames, timeout: {"a": b"ok"},
        removed=lambda: out | {"stranger"},
    ) as line:
        assert line.exchange({"a": b"", "b": b""}, PATIENCE) == {"a": b"ok"}
        assert line.removed == {"b"}
        out.clear()
        line.exchange({"a": b"", "b": b""}, PATIENCE)
        assert line.removed == set()


def test_questions_run_side_by_side(tmp_path):
    inside, both = [], threading.Event()

    def exchange(frames, timeout):
        inside.append(1)
        if len(inside) == 2:
            both.set()
        assert both.wait(PATIENCE)
        return dict(frames)

    with serving(tmp_path / "hub.sock", exchange) as line:
        thread = threading.Thread(target=line.exchange, args=({"a": b"1"}, PATIENCE))
        thread.start()
        assert line.exchange({"a": b"2"}, PATIENCE) == {"a": b"2"}
        thread.join(PATIENCE)


def said(header: bytes) -> bytes:
    return len(header).to_bytes(4, "big") + header


HEADERS = [
    b"[]",
    b"null",
    b"{}}",
    b"\xff",
    b"{}",
    b'{"ask": "other", "timeout": 1}',
    b'{"ask": "exchange"}',
    b'{"ask": "exchange", "timeout": "x"}',
]
SIZES = [b"1e400", b"-1", b"99999999999", b"null", b"3"]
GARBAGE = [b"", b"\0\0", b"\xff\xff\xff\xff", b"\0\0\0\5ab", *map(said, HEADERS)]
GARBAGE += [
    said(b'{"ask": "exchange", "timeout": 1, "frames": [["a", ' + size + b"]]}") for size in SIZES
]
GARBAGE += [
    said(b'{"ask": "sharing", "timeout": 1, "frames": [["a", 0]], "end": ' + size + b"}")
    for size in SIZES
]


@pytest.mark.parametrize("sent", GARBAGE)
def test_garbage_is_hung_up_on_and_calls_nothing(tmp_path, sent):
    asked = []
    with serving(tmp_path / "hub.sock", lambda frames, timeout: asked.append(frames) or {}) as line:
        with socket.socket(socket.AF_UNIX) as other:
            other.settimeout(PATIENCE)
            other.connect(str(tmp_path / "hub.sock"))
            other.sendall(sent)
            other.shutdown(socket.SHUT_WR)
            assert other.recv(1) == b""
        assert asked == []
        assert line.exchange({"a": b""}, PATIENCE) == {}


def test_a_second_hub_and_a_file_in_the_way_are_refused_and_a_dead_ones_socket_is_not(tmp_path):
    path = tmp_path / "hub.sock"
    with serving(path, lambda frames, timeout: dict(frames)) as line:
        with pytest.raises(FileExistsError):
            serve_hub(path, lambda *_: {}, list, threading.Event())
        assert line.exchange({"a": b"1"}, PATIENCE) == {"a": b"1"}
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with serving(path, lambda frames, timeout: dict(frames)) as line:
        assert line.exchange({"a": b"1"}, PATIENCE) == {"a": b"1"}
    path.write_text("mine")
    with pytest.raises(FileExistsError):
        serve_hub(path, lambda *_: {}, list, threading.Event())
    assert path.read_text() == "mine"


def test_a_reply_longer_than_what_is_carried_is_one_code(tmp_path, monkeypatch):
    with serving(tmp_path / "hub.sock", lambda frames, timeout: {"a": bytes(2000)}) as line:
        assert len(line.exchange({"a": b""}, PATIENCE)["a"]) == 2000
        monkeypatch.setattr(hub, "MAX_BYTES", 1000)
        with pytest.raises(Unreached, match="size"):
            line.exchange({"a": bytes(1001)}, PATIENCE)
        with pytest.raises(Unreached, match="closed"):
            line.exchange({"a": b""}, PATIENCE)


def test_an_end_that_all_frames_share_crosses_the_socket_once_and_belongs_to_each(
    tmp_path, monkeypatch
):
    whole = {name: name.encode() * 9 + b"|" + bytes(range(256)) * 20 for name in ("a", "bb", "ccc")}
    seen = []

    def exchange(frames, timeout):
        seen.append(dict(frames))
        return {name: frame for name, frame in frames.items() if name == "a"}

    with serving(tmp_path / "hub.sock", exchange) as line:
        monkeypatch.setattr(hub, "LONG", 1000)
        monkeypatch.setattr(hub, "MAX_BYTES", 6000)  # of one frame, and not of three
        frames = Frames.sharing(whole.items(), lambda frame: frame.index(b"|") + 1)
        assert line.exchange(frames, PATIENCE) == {"a": whole["a"]}
        assert line.exchange(frames.only(["bb"]), PATIENCE) == {}
        with pytest.raises(Unreached, match="size"):
            line.exchange(whole, PATIENCE)
    assert seen == [whole, {"bb": whole["bb"]}]


def test_many_silos_take_turns_with_a_few_threads_and_all_are_heard():
    busy, most, guard, asked = 0, 0, threading.Lock(), []

    def ask(name, left):
        nonlocal busy, most
        with guard:
            asked.append(name)
            busy += 1
            most = max(most, busy)
        time.sleep(0.002)
        with guard:
            busy -= 1
        if name == "s7":
            raise RuntimeError("of one silo alone")
        return (
            None
            if name == "s8"
            else Later(0.01)
            if name == "s9" and asked.count("s9") < 3
            else name.encode()
        )

    names = [f"s{i}" for i in range(50)]
    found = dict(Turns(names, ask, PATIENCE, at_once=4))
    assert found == {name: name.encode() for name in names if name not in ("s7", "s8")}
    assert 1 <= most <= 4
    assert asked.count("s9") == 3
    assert len(asked) == 52
    orders = []
    for _ in range(2):
        list(Turns(names, lambda name, left: orders.append(name), PATIENCE, at_once=1))
    assert sorted(orders[:50]) == sorted(orders[50:]) == sorted(names)
    assert orders[:50] != orders[50:], (
        "the order is drawn anew; that two of 50 are alike has probability 1 / 50!"
    )
    assert list(Turns([], ask, PATIENCE, at_once=4)) == []


def test_a_reply_that_nobody_takes_keeps_its_thread_from_asking_and_that_time_is_not_the_silos():
    asked, began = [], time.monotonic()

    def ask(name, left):
        asked.append((name, left))
        return name

    turns = iter(Turns([f"s{i}" for i in range(30)], ask, PATIENCE, at_once=3))
    next(turns)
    time.sleep(0.3)
    assert len(asked) <= 1 + 1 + 3, "one was taken, one lies ready, and each thread has one"
    assert len(list(turns)) == 29
    assert min(left for _, left in asked[-20:]) >= PATIENCE - (time.monotonic() - began - 0.3), (
        "what was waited for here is given back"
    )


def test_who_has_no_turn_before_the_time_is_over_is_left_out_and_what_is_on_its_way_may_come_later():  # noqa: E501
    gate, began = threading.Event(), time.monotonic()

    def ask(name, left):
        gate.wait({"slow": 0.4, "hung": PATIENCE}.get(name, min(left, 0.2)))
        return name if name in ("slow", "hung") else None

    assert list(Turns([f"s{i}" for i in range(1000)], ask, 0.5, at_once=2)) == []
    assert time.monotonic() - began < 60
    assert list(Turns(["slow"], ask, 0.2, at_once=2, beyond=PATIENCE)) == [("slow", "slow")]
    assert list(Turns(["hung"], ask, 0.2, at_once=2)) == []
    gate.set()
