"""The line of a Flower federation without Flower: who is let in, and what a silo can send."""

import socket
import threading

import pytest

from silodp.wire.flower import line as flower_line
from silodp.wire.flower.line import QUESTION, REFUSED, REPLIED, REPLY, Lines, carry
from silodp.wire.hub import Turns
from silodp.wire.socket import Socket, Unreached

PATIENCE = 60.0


@pytest.fixture
def lines(tmp_path):
    """Lines that are served at a socket. `connect(token)` gives a courier's end."""
    made, stop = Lines(lambda sentence: made.noted.append(sentence)), threading.Event()
    made.noted = []
    ends = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "line.sock"))
        listener.listen(8)
        serving = threading.Thread(target=made.serve, args=(listener, stop))
        serving.start()

        def connect(token):
            end = socket.socket(socket.AF_UNIX)
            ends.append(end)
            end.settimeout(PATIENCE)
            end.connect(str(tmp_path / "line.sock"))
            end.sendall(f"SILODP {token}\r\n\r\n".encode())
            return end

        made.connect = connect
        yield made
        stop.set()
        serving.join()
        made.close()
    for end in ends:
        end.close()


def joined(lines, name):
    """A courier's end of the line of this node."""
    (token,) = lines.invite([*lines.names(), name]).values()
    end = lines.connect(token)
    while name not in lines.names():
        pass
    return end


def question(end):
    """Return the number of the next question, and its frame."""
    number, _, size = QUESTION.unpack(read(end, QUESTION.size))
    return number, read(end, size)


def read(end, size):
    found = b""
    while len(found) < size:
        piece = end.recv(size - len(found))
        assert piece
        found += piece
    return found


def replying(end, *replies):
    """Send these bytes, each after a question, with the question's number where it asks for it."""

    def work():
        for make in replies:
            number, frame = question(end)
            end.sendall(make(number, frame))

    threading.Thread(target=work, daemon=True).start()


def good(number, frame):
    return REPLY.pack(number, REPLIED, len(frame)) + frame[::-1]


def test_a_token_is_good_once_and_names_its_node(lines):
    (token,) = lines.invite(["north"]).values()
    assert lines.invite(["north"]) == {}, "the invitation is fresh"
    assert lines.connect("0" * 64).recv(1) == b""
    first = lines.connect(token)
    while lines.names() != ["north"]:
        pass
    assert lines.connect(token).recv(1) == b"", "it was shown before"
    replying(first, good)
    assert lines.ask("north", b"frame", PATIENCE) == b"emarf"
    assert lines.ask("south", b"frame", PATIENCE) is None


def test_a_node_that_is_no_longer_listed_loses_its_line_and_its_invitations(lines):
    end = joined(lines, "north")
    (token,) = lines.invite(["north", "south"]).values()
    lines.invite([])
    assert (lines.names(), end.recv(1)) == ([], b"")
    assert lines.connect(token).recv(1) == b""


def test_a_node_whose_line_broke_is_invited_again(lines, monkeypatch):
    monkeypatch.setattr(flower_line, "AGAIN", 0.0)
    joined(lines, "north").close()
    while lines.names():
        pass
    assert lines.invite(["north"]) == {}, "its answer to the invitation has not come"
    lines.forget("north")
    assert list(lines.invite(["north"])) == ["north"]


def test_silos_that_reply_with_rubbish_or_by_halves_cost_nobody_else_the_round(lines, monkeypatch):
    monkeypatch.setattr(flower_line, "WHOLE", 0.2)
    rubbish = {
        "code": lambda number, frame: REPLY.pack(number, REFUSED, 7) + b"timeout",
        "words": lambda number, frame: REPLY.pack(number, REFUSED, 9) + b"<b>No</b>",
        "kind": lambda number, frame: REPLY.pack(number, 7, 2) + b"no",
        "long": lambda number, frame: REPLY.pack(number, REPLIED, 2**32 - 1),
        "halves": lambda number, frame: good(number, frame)[:-1],
        "west": good,
    }
    ends = {name: joined(lines, name) for name in rubbish}
    for name, make in rubbish.items():
        replying(ends[name], make)

    def ask(name, left):
        return lines.ask(name, b"frame", left)

    assert dict(Turns(list(rubbish), ask, 1.0, at_once=8, beyond=PATIENCE)) == {"west": b"emarf"}
    assert sorted(lines.noted) == [
        "code replies with timeout",
        "kind replies with no code",
        "words replies with no code",
    ]
    assert lines.names() == ["code", "kind", "west", "words"], "the others are hung up on"


def test_a_silo_that_reads_nothing_is_hung_up_on(lines):
    joined(lines, "north")
    assert lines.ask("north", bytes(2**24), 0.1) is None
    assert lines.names() == []


def test_a_late_reply_is_not_taken_for_the_next_questions(lines):
    end = joined(lines, "north")
    assert lines.ask("north", b"first", 0.1) is None
    late = question(end)

    def both(number, frame):
        return good(*late) + good(number, frame)

    replying(end, both)
    assert lines.ask("north", b"second", PATIENCE) == b"dnoces"


def test_the_courier_gives_the_gates_reply_or_a_fixed_code_and_no_word_of_an_exception():
    here, there = socket.socketpair()
    here.settimeout(PATIENCE)
    counted = []

    class Gate(Socket):
        def ask(self, frame, timeout):
            if frame == b"away":
                raise Unreached("unreachable")
            if frame == b"fails":
                raise ValueError("a secret word")
            return frame[::-1]

    work = threading.Thread(target=carry, args=(there, "a" * 64, Gate("none"), counted.append))
    work.start()
    assert read(here, flower_line.GREETING_BYTES) == b"SILODP " + b"a" * 64 + b"\r\n\r\n"
    for number, frame, kind, reply in (
        (1, b"frame", REPLIED, b"emarf"),
        (2, b"away", REFUSED, b"unreachable"),
        (3, b"fails", REFUSED, b"courier"),
    ):
        here.sendall(QUESTION.pack(number, 5, len(frame)) + frame)
        assert REPLY.unpack(read(here, REPLY.size)) == (number, kind, len(reply))
        assert read(here, len(reply)) == reply
    here.close()
    work.join(PATIENCE)
    assert not work.is_alive()
    there.close()
    assert counted == ["replied", "unreachable", "courier"]
