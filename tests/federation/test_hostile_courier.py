"""A hostile courier between real gate daemons and the server: its bytes, its users, and an engine
that was taken over. All of it fails.

Tried elsewhere, and not again here: a modified engine, code in a job and files in a kit
(test_nvflare), a bundle with other code and strange messages (test_flower), a relay between peers
that alters or swaps (test_direct, test_peers).
"""

import contextlib
import json
import os
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
from hostile import (
    COURIER,
    OTHER,
    STRANGER,
    asked,
    claiming,
    code,
    hostile_gates,
    needs_users,
    opened,
    unsigned,
)

from gates import ASKER, PATIENCE, Gate, Gates, Whole
from silodp.core.mechanisms import Gaussian
from silodp.core.protocol.codec import (
    OVERHEAD,
    QUERY,
    Answer,
    Refusal,
    decode_reply,
    encode_reply,
    sign_frame,
)
from silodp.core.protocol.frames import VERSION
from silodp.core.query import Query
from silodp.core.statistics import Grad
from silodp.server.remote import QuestionReport, Remote, Timeouts
from silodp.wire.hub import Direct, Hub
from silodp.wire.socket import Socket, _connect

pytestmark = pytest.mark.xdist_group("hostile-courier")  # one set of daemons for all


@pytest.fixture(scope="module")
def gates() -> Iterator[Gates]:
    with hostile_gates() as made:
        yield made


# --- a hostile courier: other users of the machine -----------------------------------------------

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
'''  # noqa: E501


def knock(gate: Gate, words: str, user: int, groups: list[int]) -> str:
    """What a process of another user prints."""
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable
    settings = {"user": user, "group": groups[0] if groups else user, "extra_groups": groups}
    done = subprocess.run(
        [python, "-I", "-c", ATTACK + words],
        **settings,
        capture_output=True,
        text=True,
        cwd="/",
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def secrets_of(gate: Gate) -> list[str]:
    """Every file that the silo has, the data first."""
    own = [path for path in Path(gate.policy).parent.rglob("*") if path.is_file()]
    shared = [path for path in (gate.folder / "state").rglob("*") if path.is_file()]
    assert {
        Path(gate.policy),
        Path(gate.place.key),
        Path(gate.place.ledger),
        Path(gate.place.log),
    } <= set(own)
    assert shared
    return [gate.place.data, *map(str, own + shared)]


@needs_users
def test_the_couriers_user_can_neither_read_nor_write_nor_replace_nor_trace_nor_kill_anything_of_the_gate(  # noqa: E501
    gates,
):
    gate = gates[0]
    given = (secrets_of(gate), str(Path(gate.policy).parent), gate.place.socket, gate.process.pid)
    assert (
        json.loads(knock(gate, f"print(json.dumps(attack(*{given!r})))", COURIER, [COURIER])) == []
    )
    assert code(gate, asked(gate.card, "after-the-attack")) == "answered"
    owner = json.loads(knock(gate, f"print(json.dumps(attack(*{given!r}, 'read ')))", 0, [0]))
    assert {f"read {path}" for path in given[0]} <= set(owner), "the attack finds what is open"


@needs_users
def test_other_users_cannot_open_the_socket_and_one_in_its_group_that_is_not_listed_is_turned_away(
    gates,
):
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
    assert isinstance(
        opened(gate.card, bytes.fromhex(knock(gate, words, COURIER, [COURIER]))), Answer
    )


# --- a hostile courier: its end of the socket ----------------------------------------------------


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
    codes = {
        code(gate, frame[:at] + bytes([frame[at] ^ 1 << at % 8]) + frame[at + 1 :]) for at in places
    }
    assert codes == {"malformed", "version", "signature"}
    assert {code(gate, frame[:at]) for at in range(0, len(frame), 101)} == {"malformed"}
    assert gate.ledger().head() == head


class Meddler(Whole):
    """A courier of all three silos that does what it likes with what it carries."""

    def __init__(self, gates: Gates, meddle=lambda replies: replies) -> None:
        super().__init__(gates.sockets)
        self._meddle, self.sent, self.replies = (
            meddle,
            list[dict[str, bytes]](),
            list[dict[str, bytes]](),
        )

    def exchange(self, frames, timeout):
        self.sent.append(dict(frames))
        self.replies.append(super().exchange(frames, PATIENCE))
        return self._meddle(dict(self.replies[-1]))


def question(gates: Gates, noise: float = 40.0) -> Query:
    return Query(Grad(torch.zeros(1, gates.problem.dim)), Gaussian("anchor", 1.0, noise))


def remote(
    gates: Gates, carrier: Direct, run: str, heard: list[QuestionReport], **patience
) -> Remote:
    times = {"deadline": PATIENCE, "limit": PATIENCE, "retry": PATIENCE} | patience
    return Remote(
        gates.cards,
        carrier,
        run=run,
        key=ASKER,
        timeouts=Timeouts(**times),
        report=lambda told, answers: heard.append(told),
    )


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
    return replies | {"silo-1": claiming(forged, key)}


MEDDLINGS = {
    "a bit of the signature": _bent(50),
    "a bit of the ledger's head or the name": _bent(OVERHEAD + 90),
    "a bit of the value": _bent(-3),
    "another silo's answer": lambda replies: (
        replies | {"silo-1": replies["silo-0"]} if "silo-0" in replies else {}
    ),
    "an answer of the courier's own": _made_up,
    "an answer of the courier's own under the silo's key": _claimed,
    "an unsigned answer": lambda replies: replies | {"silo-1": unsigned(replies["silo-1"])},
    "a refusal of the courier's own": lambda replies: (
        replies | {"silo-1": encode_reply(Refusal("budget"), STRANGER)}
    ),
    "half an answer": lambda replies: replies | {"silo-1": replies["silo-1"][:-9]},
    "an endless answer": lambda replies: replies | {"silo-1": replies["silo-1"] + bytes(2**20)},
}


@pytest.mark.parametrize("name", MEDDLINGS)
def test_what_a_courier_puts_in_the_place_of_a_silos_answer_does_not_count(gates, name):
    heard: list[QuestionReport] = []
    run = f"meddle-{list(MEDDLINGS).index(name)}"
    channel = remote(
        gates, Meddler(gates, MEDDLINGS[name]), run, heard, deadline=0.5, limit=0.5, retry=0.5
    )
    answers = channel.ask(question(gates), [0, 1, 2])
    assert answers.silos == (0, 2)
    assert heard[0].dropped == {"silo-1": "forged"}
    assert channel.retired == {}, "the silo may be heard again by a better way"
    assert [len(gate.charges(run)) for gate in gates.gates] == [1, 1, 1]


SWAPS = {
    "another version": lambda card, frame: frame[:4] + bytes([VERSION + 1]) + frame[5:],
    "the courier's own key": lambda card, frame: sign_frame(
        QUERY, VERSION, frame[OVERHEAD:], STRANGER
    ),
    "a question about another model": lambda card, frame: asked(card, "swapped", model="0" * 64),
    "a question of another silo": lambda card, frame: asked(card, "swapped", of="silo-0"),
}


@pytest.mark.parametrize("name", SWAPS)
def test_a_courier_that_provokes_a_lasting_refusal_does_not_make_a_silo_retire(gates, name):
    heard: list[QuestionReport] = []

    class Provoking(Whole):
        def exchange(self, frames, timeout):
            swapped = (
                {"silo-1": SWAPS[name](gates.cards[1], frames["silo-1"])}
                if "silo-1" in frames
                else {}
            )
            return super().exchange(dict(frames) | swapped, PATIENCE)

    run = f"provoked-{list(SWAPS).index(name)}"
    channel = remote(
        gates, Provoking(gates.sockets), run, heard, deadline=0.5, limit=0.5, retry=0.5
    )
    assert channel.ask(question(gates), [0, 1, 2]).silos == (0, 2)
    assert (heard[0].dropped, channel.retired) == ({"silo-1": "forged"}, {})
    assert [len(gate.charges(run)) for gate in gates.gates] == [1, 0, 1]


def test_questions_that_a_courier_brings_to_other_silos_too_are_paid_for_by_none_of_them(gates):
    """Each is signed by the listed key, about the approved model, under an id that the other silo
    has never seen.
    """
    heard: list[QuestionReport] = []

    class Spreading(Whole):
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
        """Each frame twice at once and again long after; a reply to the last question before the
        one to this.
        """

        def exchange(self, frames, timeout):
            for old in reversed(self.sent):
                Whole.exchange(self, old, timeout)
            both: list[dict[str, bytes]] = []
            twice = [
                threading.Thread(target=lambda: both.append(Whole.exchange(self, frames, timeout)))
                for _ in range(2)
            ]
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
    kept = {
        tuple(sorted(frames.items())): replies
        for frames, replies in zip(carrier.sent, carrier.replies, strict=True)
    }
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


# --- a hostile courier inside a real engine ------------------------------------------------------

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
'''  # noqa: E501


@needs_users
def test_code_that_has_taken_over_the_engines_client_gets_only_what_the_gate_gives_anyone(gates):
    """A real NVFlare client in front of a real gate, with hostile code in its process that has
    become the courier's user.
    """
    site = pytest.importorskip("silodp.wire.nvflare.site")
    pytest.importorskip("nvflare")
    gate = gates[0]
    with tempfile.TemporaryDirectory(prefix="silodp-") as name, contextlib.ExitStack() as running:
        folder, kit, found = (
            Path(name) / "f",
            Path(name) / "f" / "kits" / "silo-0",
            Path(name) / "loot" / "loot.json",
        )
        site.provision(folder, ["silo-0"])
        site.settle_silo(kit, Path(gate.place.socket))
        Path(name).chmod(0o711)
        found.parent.mkdir()
        os.chown(found.parent, COURIER, COURIER)
        (Path(name) / "taken.py").write_text(ATTACK + COMPONENT)
        given = [
            secrets_of(gate),
            str(Path(gate.policy).parent),
            gate.place.socket,
            gate.process.pid,
        ]
        stolen = sign_frame(QUERY, VERSION, asked(gate.card, "stolen")[OVERHEAD:], STRANGER)
        arguments = {"user": COURIER, "given": given, "frame": stolen.hex(), "found": str(found)}
        resources = json.loads((kit / "local/resources.json").read_text())
        resources["components"].append({"id": "taken", "path": "taken.Taken", "args": arguments})
        (kit / "local/resources.json").write_text(json.dumps(resources))
        running.callback(site.stop, folder)
        site.start(folder, {})
        log = running.enter_context((folder / "client.log").open("wb"))
        client = subprocess.Popen(
            site.command(kit),
            env=site.environment(kit)
            | {"PYTHONPATH": os.pathsep.join([name, site.environment(kit)["PYTHONPATH"]])},
            stdout=log,
            stderr=log,
        )
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
    assert isinstance(opened(gate.card, raw), Answer), (
        "and the honest half of the same process still carries"
    )
    assert raw == Socket(gate.place.socket).ask(frame, PATIENCE)
