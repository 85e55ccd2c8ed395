"""Flower as a courier: a real SuperLink and three real SuperNodes over TLS on loopback, with
stand-ins for the gates behind their sockets.
"""

import base64
import contextlib
import hashlib
import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from silodp.core.errors import BadInput
from silodp.wire.flower import bundle as flower_bundle
from silodp.wire.flower import site as flower_site
from silodp.wire.flower.front import Refused, only_fleet
from silodp.wire.flower.site import (
    explain,
    key,
    provision,
    restart_server,
    start,
    start_silo,
    stop,
)
from silodp.wire.hub import Hub
from silodp.wire.site import connected

pytestmark = pytest.mark.xdist_group("flower")  # one federation for all

SILOS = ["north", "south", "west"]
PATIENCE = 600.0  # to end a test that hangs; nothing waits so long when all is well
GATE = """
import socket, sys, threading
def serve(line):
    with line:
        file = line.makefile("rb")
        size = int.from_bytes(file.read(4), "big")
        line.sendall(size.to_bytes(4, "big") + file.read(size)[::-1])
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen(8)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""


class Federation:
    def __init__(self, folder: Path) -> None:
        self.folder, self.hub = folder / "f", Hub(folder / "f" / "hub.sock")
        self.sockets = {name: folder / f"{name}.sock" for name in SILOS}
        self.gates: dict[str, subprocess.Popen] = {}
        self.pids: dict[str, int] = {}

    def open_gate(self, name: str) -> None:
        self.sockets[name].unlink(missing_ok=True)
        self.gates[name] = subprocess.Popen([sys.executable, "-c", GATE, str(self.sockets[name])])

    def close_gate(self, name: str) -> None:
        self.gates[name].kill()
        self.gates[name].wait()

    def hub_names(self) -> list[str]:
        """Return the connected silos; none where there is no hub."""
        return connected(self.folder) or []

    def ask(self, size: int = 100, timeout: float = PATIENCE) -> list[str]:
        """Who replied; and each reply is the frame of that silo, from the other end."""
        frames = {name: os.urandom(size) for name in SILOS}
        replies = self.hub.exchange(frames, timeout)
        assert all(reply == frames[name][::-1] for name, reply in replies.items())
        return sorted(replies)


@pytest.fixture(scope="module")
def federation():
    with tempfile.TemporaryDirectory(prefix="sdp") as folder:
        made = Federation(Path(folder))
        provision(made.folder, SILOS)
        for name in SILOS:
            made.open_gate(name)
        try:
            made.pids = start(made.folder, made.sockets)
            yield made
        finally:
            stop(made.folder)
            for name in SILOS:
                made.close_gate(name)


def test_frames_arrive_and_replies_come_back_intact(federation):
    assert federation.hub.names() == SILOS
    assert set(federation.pids) == {"server", *SILOS}
    assert federation.ask(4 * 3_394) == SILOS
    assert federation.ask(4 * 1_000_000) == SILOS
    assert federation.hub.exchange({"nobody": b"?"}, PATIENCE) == {}


def test_a_gate_that_does_not_listen_leaves_out_its_silo_alone_and_at_once(federation):
    federation.close_gate("west")
    began = time.monotonic()
    assert federation.ask() == ["north", "south"]
    assert time.monotonic() - began < PATIENCE / 2, "nobody waited for it"
    log = (federation.folder / "server" / "relay.log").read_text()
    assert "west replies with unreachable" in log
    federation.open_gate("west")


APP = {
    "pyproject.toml": """[project]
name = "silodp-courier"
version = "2.0.0"
description = "With code of its own"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "silodp"
[tool.flwr.app.components]
serverapp = "mine.app:server"
clientapp = "mine.app:client"
""",
    "mine/__init__.py": "",
    "mine/app.py": """
import time
from pathlib import Path
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
client = ClientApp()
server = ServerApp()
RAN, HEARD = Path({ran!r}), Path({heard!r})
@client.query("invite")
def run(message, context):
    RAN.touch()
    return Message(RecordDict(), reply_to=message)
@server.main()
def main(grid, context):
    nodes = list(grid.get_nodes())
    sent = grid.push_messages([Message(RecordDict(), n.node_id, "query.invite") for n in nodes])
    left, found = set(sent), {{}}
    HEARD.with_suffix(".begun").touch()
    deadline = time.time() + 600
    while left and time.time() < deadline:
        for reply in grid.pull_messages(left):
            left.discard(reply.metadata.reply_to_message_id)
            found[reply.metadata.src_node_id] = reply.error.reason if reply.has_error() else "ran"
        time.sleep(0.2)
    HEARD.write_text(str(sorted(found.values())))
""",
}


def hostile_run(folder: Path, *words: str) -> None:
    """Begin a run as the server's operator can, who does as he likes."""
    done = flower_site._flwr(folder / "server", "run", *words)
    assert done.returncode == 0, done.stdout


def until(holds) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_an_app_that_the_silo_has_not_signed_is_refused_by_its_node_and_not_run(
    federation, tmp_path
):
    """By the node's own `--trusted-entities`. Afterwards nodes go on with the app of their own."""
    ran, heard = tmp_path / "ran", tmp_path / "heard"
    app = tmp_path / "app"
    (app / "mine").mkdir(parents=True)
    for name, text in APP.items():
        filled = text.format(ran=str(ran), heard=str(heard)) if name == "mine/app.py" else text
        (app / name).write_text(filled)
    before = relays(federation.folder)
    hostile_run(federation.folder, str(app), "fed")
    until(heard.with_suffix(".begun").exists)
    # A node has one message at a time, and carries frames: its line is closed to make room.
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    until(heard.exists)
    assert heard.read_text() == str(["The FAB could not be verified."] * len(SILOS))
    assert not ran.exists()
    until(lambda: federation.hub_names() == SILOS)
    assert federation.ask() == SILOS


def relays(folder: Path) -> list[int]:
    """Return the processes that are a ServerApp of this federation's server."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes()
            home = f"SILODP_SITE={folder / 'server'}\0".encode()
            if b"flwr-serverapp" in words and home in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def test_a_signature_is_for_one_app_and_a_node_trusts_the_key_of_its_own_alone(tmp_path):
    key(tmp_path / "north")
    key(tmp_path / "south")
    trusted = [json.loads((tmp_path / n / "trusted.yaml").read_text()) for n in ("north", "south")]
    assert [len(one) for one in trusted] == [1, 1]
    assert not trusted[0].keys() & trusted[1].keys()
    word = (tmp_path / "north" / "node.pub").read_text().split()[2]
    found = flower_bundle.verification(word)
    assert found["public_key_id"] in trusted[0]
    public = load_ssh_public_key(trusted[0][found["public_key_id"]].encode())
    signed = found["signed_at"].to_bytes(8, "big")
    signature = base64.urlsafe_b64decode(found["signature"])
    public.verify(signature, signed + hashlib.sha256(flower_bundle.bundle()).digest())
    with pytest.raises(InvalidSignature):
        public.verify(signature, signed + hashlib.sha256(flower_bundle.bundle() + b" ").digest())
    left = [file.name for file in (tmp_path / "north").iterdir()]
    assert sorted(left) == ["node.key", "node.pub", "secret", "trusted.yaml"], "the key is not kept"


def test_other_machines_reach_the_fleet_alone_and_tasks_need_the_secret(federation):
    server = federation.folder / "server"
    trust = ssl.create_default_context(cafile=str(server / "ca.pem"))
    front, inner = flower_site._port(server), flower_site._inner(server)
    kinds = {"content-type": "application/protobuf", "accept": "application/protobuf"}

    def status(path: str, port: int, secure: bool = True) -> int:
        if secure:
            line = http.client.HTTPSConnection("127.0.0.1", port, context=trust)
        else:
            line = http.client.HTTPConnection("127.0.0.1", port)
        with contextlib.closing(line):
            line.request("POST", path, b"", kinds)
            return line.getresponse().status

    for path in ("/v1/control/list-nodes", "/v1/runtime/acquire-task", "/docs"):
        assert status(path, front) == 403
    assert status("//v1/fleet/../control/list-nodes", front) == 403
    assert status("/v1/fleet/pull-messages", front) == 401, "which nodes sign"
    assert status("/v1/runtime/acquire-task", inner) == 401
    with pytest.raises(ConnectionRefusedError):  # another address of this very machine
        socket.create_connection(("127.0.0.2", inner), 2.0)
    log = (federation.folder / "silos" / "north" / "node.log").read_text()
    node = int(log.split("http://127.0.0.1:")[1].split()[0])
    assert status("/v1/runtime/acquire-task", node, secure=False) == 401


@pytest.mark.parametrize(
    "head",
    [
        b"POST /v1/control/start-run HTTP/1.1",
        b"POST /v1/fleet/../control/start-run HTTP/1.1",
        b"POST /v1/fleet/%2e%2e/control/start-run HTTP/1.1",
        b"POST /v1/fleet/x?y HTTP/1.1",
        b"POST  /v1/fleet/x HTTP/1.1",
        b"POST /v1/fleet/x HTTP/1.0",
        b"CONNECT /v1/fleet/x HTTP/1.1",
        b"POST /v1/fleet/x HTTP/1.1\r\nTransfer-Encoding: chunked",
        b"POST /v1/fleet/x HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4",
        b"POST /v1/fleet/x HTTP/1.1\r\nContent-Length: +3",
        b"POST /v1/fleet/x HTTP/1.1\r\nContent-Length: 1048577",
        b"POST /v1/fleet/x HTTP/1.1\r\nContent-Length : 3",
        b"POST /v1/fleet/x HTTP/1.1\r\nA: b\r\n folded: c",
        b"POST /v1/fleet/x HTTP/1.1\r\nA: b\nPOST /v1/control/start-run HTTP/1.1",
    ],
)
def test_no_other_request_passes_the_front_door_in_any_spelling(head):
    with pytest.raises(Refused):
        only_fleet(head + b"\r\n\r\n")


def test_a_request_of_a_node_reaches_superlink_as_the_only_one_of_its_connection():
    head = b"POST /v1/fleet/x HTTP/1.1\r\nHost: a\r\nConnection: keep-alive\r\nUpgrade: h2c\r\n"
    assert only_fleet(head + b"Content-Length: 3\r\nX-Sig: s\r\n\r\n") == (
        b"POST /v1/fleet/x HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nX-Sig: s\r\n"
        b"Connection: close\r\n\r\n",
        3,
    )


def test_a_killed_node_is_missed_at_once_and_comes_back(federation):
    os.killpg(federation.pids["north"], signal.SIGKILL)
    until(lambda: federation.hub_names() == ["south", "west"])
    assert federation.ask() == ["south", "west"], "nobody waits for it"
    start_silo(federation.folder, "north", federation.sockets["north"])
    until(lambda: federation.hub_names() == SILOS)
    assert federation.ask() == SILOS


def test_a_killed_relay_is_begun_again_and_a_killed_server_is_started_again_and_nodes_come_back(
    federation,
):
    for pid in relays(federation.folder):
        os.kill(pid, signal.SIGKILL)
    until(lambda: federation.hub_names() == SILOS and federation.ask() == SILOS)
    os.killpg(federation.pids["server"], signal.SIGKILL)
    restart_server(federation.folder)
    until(lambda: federation.hub_names() == SILOS)
    assert federation.ask() == SILOS


@contextlib.contextmanager
def expired_server(folder: Path):
    """A TLS server whose certificate expired yesterday; the handshake is all that a node gets to
    see of it.
    """
    flower_site.certify(folder, "localhost", -1)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    line, _ = listener.accept()
                    with (
                        contextlib.suppress(OSError),
                        line,
                        context.wrap_socket(line, server_side=True) as safe,
                    ):
                        safe.recv(1)

        threading.Thread(target=serve, daemon=True).start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def node(superlink: int, ca: Path, *more: str) -> subprocess.Popen:
    words = [flower_site._program("flower-supernode"), f"--superlink=127.0.0.1:{superlink}"]
    words += [f"--root-certificates={ca}", f"--port={flower_site.free_port()}"]
    words += ["--isolation=process", *more]
    environment = os.environ | flower_site.QUIET
    return subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_whoever_is_refused_is_told_why_in_one_sentence(federation, tmp_path):
    port, ca = (
        flower_site._port(federation.folder / "server"),
        federation.folder / "server" / "ca.pem",
    )
    key(tmp_path / "stranger")
    (tmp_path / "stranger" / "ca.pem").write_bytes(ca.read_bytes())
    (tmp_path / "other").mkdir()
    (tmp_path / "late").mkdir()
    flower_site.certify(tmp_path / "other", "localhost", 1)
    command = [
        sys.executable,
        "-m",
        "silodp.wire.flower.site",
        "silo",
        str(tmp_path / "stranger"),
        f"--superlink=127.0.0.1:{port}",
    ]
    with expired_server(tmp_path / "late") as late:
        refused = {
            "does not know this node's key": subprocess.Popen(
                [*command, "--gate=no.sock"], stdout=subprocess.PIPE, text=True
            ),
            "This node has no key": node(port, ca),
            "was not issued by the CA": node(
                port,
                tmp_path / "other" / "ca.pem",
                f"--auth-supernode-private-key={tmp_path / 'stranger/node.key'}",
            ),
            "certificate has expired": node(late, tmp_path / "late" / "ca.pem"),
        }
        try:
            said = {
                sentence: process.communicate(timeout=PATIENCE)[0]
                for sentence, process in refused.items()
            }
        finally:
            for process in refused.values():
                process.kill()
                process.wait()
    assert all(process.returncode for process in refused.values())
    assert "does not know this node's key" in said.pop(
        "does not know this node's key"
    )  # the courier's own last line
    assert [sentence for sentence, log in said.items() if sentence not in explain(log)] == []
    assert federation.hub.names() == SILOS


def test_names_and_paths_that_cannot_work_are_refused(tmp_path):
    for silos in (["a", "a"], ["../up"], ["server"]):
        with pytest.raises(BadInput):
            provision(tmp_path / "f", silos)
    with pytest.raises(BadInput, match="too long"):
        start(tmp_path / ("x" * 110), {})
    with pytest.raises(BadInput, match="not provisioned"):
        start(tmp_path, {"north": tmp_path / "gate.sock"})


def test_a_silo_that_is_removed_is_asked_no_more_and_one_is_added_and_the_server_certified_anew_while_the_others_go_on(  # noqa: E501
    federation, silodp
):
    folder, hub = federation.folder, federation.hub
    assert silodp("federation", "remove", folder, "west")[0] == 0
    until(lambda: federation.hub_names() == ["north", "south"])
    assert federation.ask() == ["north", "south"]
    assert "no silo 'west'" in silodp("federation", "remove", folder, "west")[2]
    flower_site.key(folder / "silos" / "east")
    (folder / "silos" / "east" / "ca.pem").write_bytes((folder / "server" / "ca.pem").read_bytes())
    assert "NAME=node.pub" in silodp("federation", "add", folder, "east")[2]
    assert (
        silodp("federation", "add", folder, f"east={folder / 'silos' / 'east' / 'node.pub'}")[0]
        == 0
    )
    assert silodp("federation", "renew", folder)[0] == 0
    restart_server(folder)  # with the new certificate; nodes come back by themselves
    flower_site.start_silo(folder, "east", federation.sockets["west"])
    deadline = time.monotonic() + PATIENCE
    while federation.hub_names() != ["east", "north", "south"]:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert hub.exchange({"east": b"abc", "north": b"de", "west": b"?"}, PATIENCE) == {
        "east": b"cba",
        "north": b"ed",
    }


def test_stop_leaves_no_process_behind(federation):
    stop(federation.folder)
    left = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            left += [entry] if str(federation.folder).encode() in entry.read_bytes() else []
    assert left == []
