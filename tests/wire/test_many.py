"""Many gates in one thread: all are heard, memory is bounded, and whoever is slow, endless or gone
keeps nobody.
"""

import contextlib
import selectors
import socket
import threading
from types import SimpleNamespace

import pytest

from silodp.host.frames import Frames
from silodp.wire import many
from silodp.wire.hub import Direct
from silodp.wire.many import Exchange

PATIENCE = 600.0  # to end a test that hangs; nothing waits so long when all is well
MIB = 2**20


@contextlib.contextmanager
def silos(folder, replies):
    """Gates that send these bytes once all of them have been asked, all at the same time: (paths,
    the frames that came).
    """
    listeners = {name: socket.socket(socket.AF_UNIX) for name in replies}
    for name, listener in listeners.items():
        listener.bind(str(folder / name))
        listener.listen(1)
        listener.settimeout(PATIENCE)
    stop, asked = threading.Event(), {}

    def serve() -> None:
        lines = {}
        for name, listener in listeners.items():
            line, _ = listener.accept()
            lines[name] = line
        for name, line in lines.items():
            with line.makefile("rb") as reader:
                asked[name] = reader.read(int.from_bytes(reader.read(4), "big"))
        with selectors.DefaultSelector() as selector:
            for name, line in lines.items():
                line.setblocking(False)
                selector.register(line, selectors.EVENT_WRITE, memoryview(replies[name]))
            while selector.get_map() and not stop.is_set():
                for key, _ in selector.select(0.05):
                    try:
                        left = key.data[key.fileobj.send(key.data[: 2**16]) :]
                    except OSError:  # hung up on
                        left = b""
                    selector.unregister(key.fileobj)
                    if left:
                        selector.register(key.fileobj, selectors.EVENT_WRITE, left)
        stop.wait(PATIENCE)  # and says nothing more
        for line in lines.values():
            line.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield {name: str(folder / name) for name in replies}, asked
    finally:
        stop.set()
        thread.join(PATIENCE)
        for listener in listeners.values():
            listener.close()


class Clock:
    """Seconds that pass only where the test says so."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


def framed(reply: bytes) -> bytes:
    return len(reply).to_bytes(4, "big") + reply


def test_every_gate_gets_its_own_frame_and_every_reply_comes_whole_without_a_thread_for_each(
    tmp_path,
):
    replies = {f"s{i}": bytes([i]) * (1000 * i) for i in range(40)}
    frames = Frames.sharing(
        ((name, name.encode() + b"|" + bytes(300_000)) for name in [*replies, "gone"]),
        lambda frame: 4,
    )
    with silos(tmp_path, {name: framed(reply) for name, reply in replies.items()}) as (
        paths,
        asked,
    ):
        threads = threading.active_count()
        found = {}
        for name, reply in Direct(paths | {"gone": str(tmp_path / "no"), "long": "x" * 200}).stream(
            frames, PATIENCE
        ):
            found[name] = reply
            assert threading.active_count() <= threads
        assert found == replies
        assert asked == {name: frames[name] for name in replies}


def test_replies_beyond_the_room_wait_at_their_gates_and_all_come(tmp_path, monkeypatch):
    monkeypatch.setattr(many, "ROOM", 3 * MIB)
    replies = {f"s{i}": bytes([i]) * (MIB + i) for i in range(12)}
    with silos(tmp_path, {name: framed(reply) for name, reply in replies.items()}) as (paths, _):
        exchange, found, held = (
            Exchange(paths, Frames.of(dict.fromkeys(paths, b"?")), PATIENCE),
            {},
            [],
        )
        for name, reply in exchange:
            found[name] = reply
            held.append(exchange._buffered)
        assert found == replies
        assert max(held) <= many.ROOM + 2 * MIB
        assert exchange._buffered == 0


def test_gates_that_stop_in_the_middle_of_their_replies_do_not_starve_the_rest(
    tmp_path, monkeypatch
):
    """Five of them fill the room and lack one byte each; they are let go of, and the others are
    read.
    """
    monkeypatch.setattr(many, "ROOM", 3 * MIB)
    monkeypatch.setattr(many, "TURN", 1.0)
    honest = {f"s{i}": bytes([i]) * MIB for i in range(6)}
    slow = {f"slow{i}": framed(bytes(MIB))[:-1] for i in range(5)}
    with silos(tmp_path, slow | {name: framed(reply) for name, reply in honest.items()}) as (
        paths,
        _,
    ):
        found = {}
        for name, reply in Direct(paths).stream(dict.fromkeys(paths, b"?"), PATIENCE):
            found[name] = reply
            if len(found) == len(honest):
                break
        assert found == honest


def test_a_gate_that_goes_on_slowly_keeps_the_others_for_so_long_in_all_and_no_longer(
    tmp_path, monkeypatch
):
    clock, (here, there) = Clock(), socket.socketpair()
    monkeypatch.setattr(many, "time", clock)
    exchange, line = (
        Exchange({}, Frames.of({}), PATIENCE),
        many._Line("slow", here, Frames.of({"slow": b"?"})),
    )
    line._length, line.came = (32 * MIB).to_bytes(4, "big"), bytearray(1)
    exchange._open.add(line)
    with selectors.DefaultSelector() as selector, there:
        selector.register(here, selectors.EVENT_READ, line)
        while exchange._open and clock.now < PATIENCE:
            exchange._alone(PATIENCE, selector)
            clock.now += 1.0
            line.came += bytes(MIB // 4)  # it never stops for long
    assert clock.now <= many.TURN + 32 * MIB / many.PACE + 2


def test_a_gate_that_announces_too_much_or_hangs_up_is_left_out_at_once(tmp_path):
    replies = {
        "a": framed(b"ok"),
        "b": (many.LARGEST + 1).to_bytes(4, "big") + bytes(100),
        "c": framed(b""),
        "d": b"\xff\xff\xff\xff",
    }
    with silos(tmp_path, replies) as (paths, _):
        assert dict(Exchange(paths, Frames.of(dict.fromkeys(paths, b"?")), PATIENCE)) == {
            "a": b"ok",
            "c": b"",
        }


def test_a_reply_that_is_longer_than_the_question_allows_is_not_read(tmp_path):
    with silos(tmp_path, {"a": framed(b"x" * 100), "b": framed(b"x" * 101)}) as (paths, _):
        frames = Frames({name: (b"ask", b"") for name in paths}, most=100).only(paths)
        assert dict(Exchange(paths, frames, PATIENCE)) == {"a": b"x" * 100}


def test_the_time_in_which_a_reply_is_used_is_not_the_silos(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(many, "time", clock)
    replies = {f"s{i}": framed(bytes(MIB)) for i in range(5)}
    with silos(tmp_path, replies) as (paths, _):
        found = []
        for name, _ in Exchange(paths, Frames.of(dict.fromkeys(paths, b"?")), 10.0):
            found.append(name)
            clock.now += 1000.0
        assert sorted(found) == sorted(replies)


def test_when_the_time_is_over_whoever_has_not_replied_is_silent(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(many, "time", clock)
    with silos(tmp_path, {"a": framed(b"ok"), "b": framed(bytes(100))[:50]}) as (paths, _):
        exchange = Exchange(paths, Frames.of(dict.fromkeys(paths, b"?")), PATIENCE)
        found = iter(exchange)
        assert next(found) == ("a", b"ok")
        exchange._deadline = 0.0
        assert list(found) == []


@pytest.mark.parametrize("fails", ["socket", "door"])
def test_too_many_lines_and_a_door_with_a_queue_are_tried_again(tmp_path, monkeypatch, fails):
    turns = iter(range(100))

    class Rare(socket.socket):
        def __init__(self, *given) -> None:
            if fails == "socket" and next(turns) == 1:
                raise OSError(24, "too many open files")
            super().__init__(*given)

        def connect(self, path) -> None:
            if fails == "door" and next(turns) < 2:
                raise BlockingIOError(11, "again")
            super().connect(path)

    replies = {name: framed(name.encode()) for name in "abc"}
    with silos(tmp_path, replies) as (paths, _):
        kinds = {name: getattr(socket, name) for name in ("AF_UNIX", "SOCK_STREAM")}
        monkeypatch.setattr(many, "socket", SimpleNamespace(socket=Rare, **kinds))
        assert dict(Direct(paths).stream(dict.fromkeys(paths, b"?"), PATIENCE)) == {
            name: name.encode() for name in "abc"
        }
