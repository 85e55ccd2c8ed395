"""The daemon's socket alone, with a door that the tests hold, and the courier's end of it."""

import os
import socket
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path

import pytest
from gate_process import PATIENCE, whole

from silodp.core.protocol.codec import Refusal, decode_reply, encode_reply
from silodp.host.listener import LINE_CODES, Server
from silodp.silo.service.daemon import GateLog
from silodp.silo.service.policy import DaemonSettings
from silodp.wire.socket import CODES as WIRE_CODES
from silodp.wire.socket import Socket, Unreached

# --- the server alone, with a door that the tests hold -------------------------------------------


@contextmanager
def serving(folder: Path, handle, **changes):
    place = DaemonSettings(
        **{
            field.name: ()
            if field.name in ("classes", "couriers")
            else 0.0
            if field.name == "held_out"
            else "x"
            for field in fields(DaemonSettings)
        }
        | FITTING
    )
    place = replace(place, socket=str(folder / "s"), log=str(folder / "log"), **changes)
    stop, tell = socket.socketpair()
    log, ready = GateLog(place.log, 10**6), threading.Event()
    server = Server(
        place, handle, refuse=lambda code: encode_reply(Refusal(code)), limit=10**6, log=log
    )
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
    "feature_map": "",
    "feature_map_sha256": "",
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
    with serving(
        tmp_path, lambda frame: seen.append(frame) or b"yes", couriers=(str(os.getuid() + 1),)
    ) as (place, _):
        assert refusal(Socket(place.socket).ask(b"hello", PATIENCE)) == "peer"
    with serving(
        tmp_path, lambda frame: seen.append(frame) or b"yes", couriers=(str(os.getuid()),)
    ) as (place, _):
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
            threads.append(
                threading.Thread(
                    target=lambda name=name: replies.update(
                        {name: Socket(place.socket).ask(name, PATIENCE)}
                    )
                )
            )
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
    with (
        serving(tmp_path, lambda frame: frame, timeout=0.5) as (place, _),
        socket.socket(socket.AF_UNIX) as line,
    ):
        line.connect(place.socket)
        line.sendall((10**5).to_bytes(4, "big"))
        with pytest.raises(OSError, match=r"pipe|reset"):  # noqa: PT012
            for _ in range(2000):  # a byte now and then prolongs nothing
                line.sendall(b"\0")
                time.sleep(0.05)


def test_a_server_that_stops_finishes_what_it_computes_tells_who_waits_and_hangs_up_on_who_is_silent(  # noqa: E501
    tmp_path,
):
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
            computed, queued, silent = (
                lines.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3)
            )
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


# --- the courier's end ---------------------------------------------------------------------------


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
        for sent, code in (
            (b"", "closed"),
            (b"\0\0", "closed"),
            (b"\0\0\0\5abc", "closed"),
            (b"\x7f\0\0\0", "size"),
        ):
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
