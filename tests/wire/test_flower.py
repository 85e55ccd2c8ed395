"""Flower as a courier: a real SuperLink and three real SuperNodes over TLS on loopback, with
stand-ins for the gates behind their sockets.
"""

import contextlib
import http.client
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
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.cli.build import build_fab_from_files
from flwr.common.serde import run_from_proto
from flwr.proto.control_pb2 import StartRunRequest
from flwr.proto.fab_pb2 import Fab
from flwr.proto.runtime_pb2 import PullTaskInputRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from silodp.core.errors import BadInput
from silodp.wire.flower import app as flower
from silodp.wire.flower import site as flower_site
from silodp.wire.flower.site import (
    explain,
    key,
    provision,
    restart_job,
    restart_superlink,
    start,
    start_silo,
    stop,
)
from silodp.wire.hub import Hub
from silodp.wire.socket import CODES

pytestmark = [
    pytest.mark.xdist_group("flower"),  # one federation for all
    pytest.mark.filterwarnings("ignore:GitWildMatchPattern"),  # Flower's own builder of bundles
]

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
    assert set(federation.pids) == {"superlink", "job", *SILOS}
    assert federation.ask(4 * 3_394) == SILOS
    assert federation.ask(4 * 1_000_000) == SILOS
    assert federation.hub.exchange({"nobody": b"?"}, PATIENCE) == {}


def test_a_gate_that_does_not_listen_leaves_out_its_silo_alone_and_at_once(federation):
    federation.close_gate("west")
    began = time.monotonic()
    assert federation.ask() == ["north", "south"]
    assert time.monotonic() - began < PATIENCE / 2, "nobody waited for it"
    assert (
        f"west replies with code {flower.ERRORS['unreachable']}"
        in (federation.folder / "job.log").read_text()
    )
    federation.open_gate("west")


def hostile(folder: Path, bundle: bytes, messages: list) -> list[tuple[int, str]]:
    """What a server that does as it likes gets for its messages (type, content) to one node, in a
    run of its own bundle.
    """
    server = folder / "server"
    address, root = f"127.0.0.1:{flower_site._port(server)}", (server / "ca.pem").read_bytes()
    with flower_site._control(server) as control:
        control.StartRun(StartRunRequest(fab=Fab(content=bundle)))
    with contextlib.closing(
        flower._client(address, root, flower._signed((server / "secret").read_bytes()))
    ) as door:
        while not (token := flower._acquire(door, TaskType.SERVER_APP)):
            time.sleep(0.1)
    with contextlib.closing(HttpGrid(address, root_certificates=root, token=token)) as grid:
        given = grid._runtime_client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = (
            given.task_id,
            given.run.run_id,
            given.context.node_id,
        )
        grid.set_run(run_from_proto(given.run))
        node = next(iter(grid.get_node_ids()))
        waiting, replies = (
            set(
                grid.push_messages(
                    [Message(content, node, kind, ttl=PATIENCE) for kind, content in messages]
                )
            ),
            [],
        )
        deadline = time.monotonic() + PATIENCE
        while len(replies) < len(messages) and time.monotonic() < deadline:
            came = list(grid.pull_messages(waiting))
            waiting -= {reply.metadata.reply_to_message_id for reply in came}
            replies += came
            time.sleep(0.1)
        return sorted(
            (reply.error.code, reply.error.reason) if reply.has_error() else (0, "content")
            for reply in replies
        )


def test_a_bundle_with_other_code_is_refused_and_not_run(federation, tmp_path):
    marker = tmp_path / "ran"
    code = (
        f"open({str(marker)!r}, 'w').close()\nfrom silodp.wire.flower.app import client, server\n"
    ).encode()
    manifest = flower.BUNDLE.replace(b"silodp.wire.flower.app:", b"silodp_courier:")
    bundle, _ = build_fab_from_files(
        {"pyproject.toml": manifest, "silodp_courier/__init__.py": code}
    )
    asked = RecordDict({"query": ConfigRecord({"frame": b"?", "timeout": PATIENCE})})
    assert hostile(federation.folder, bundle, [("query.ask", asked)]) == [
        (flower.ERRORS["bundle"], "bundle")
    ]
    assert not marker.exists()


def test_a_message_that_makes_the_courier_fail_gets_a_code_and_no_word_of_the_exception(federation):
    other = RecordDict({"query": ConfigRecord({"frame": "/etc/passwd", "timeout": 5.0})})
    messages = [
        ("train", RecordDict()),
        ("query.shell", RecordDict()),
        ("query.ask", RecordDict()),
        ("query.ask", other),
    ]
    assert (
        hostile(federation.folder, flower.bundle(), messages)
        == [(flower.ERRORS["courier"], "courier")] * 4
    )
    assert set(flower.ERRORS) == {*CODES, "courier", "bundle"}


def test_other_machines_reach_the_fleet_alone_and_tasks_need_the_secret(federation):
    server = federation.folder / "server"
    trust = ssl.create_default_context(cafile=str(server / "ca.pem"))

    def status(path: str, source: str, port: int = flower_site._port(server)) -> int:
        kind = {"context": trust} if port == flower_site._port(server) else {}
        line = (http.client.HTTPSConnection if kind else http.client.HTTPConnection)(
            "127.0.0.1", port, source_address=(source, 0), **kind
        )
        with contextlib.closing(line):
            line.request(
                "POST",
                path,
                b"",
                {"content-type": PROTOBUF_MEDIA_TYPE, "accept": PROTOBUF_MEDIA_TYPE},
            )
            return line.getresponse().status

    here, elsewhere = "127.0.0.1", "127.0.0.2"
    for path in (
        "/v1/control/list-nodes",
        "/v1/control/start-run",
        "/v1/runtime/acquire-task",
        "/docs",
        "//v1/fleet/../control/list-nodes",
    ):
        assert status(path, elsewhere) == 403
    assert status("/v1/control/list-nodes", here) == 200
    assert status("/v1/fleet/pull-messages", elsewhere) == 401
    assert status("/v1/runtime/acquire-task", here) == 401
    log = (federation.folder / "silos" / "north" / "node.log").read_text()
    node = int(log.split("http://127.0.0.1:")[1].split()[0])
    assert status("/v1/runtime/acquire-task", here, node) == 401


@pytest.mark.parametrize(
    "unseen",
    [
        "",
        (
            "from silodp.wire.flower import door as flower_door; flower_door.close_to_others = "
            "lambda: None"
        ),
    ],
    ids=["before it listens", "as it listens"],
)
def test_a_superlink_whose_flower_does_not_call_the_filter_ends_at_once_and_says_why(
    tmp_path, unseen
):
    provision(tmp_path, ["north"])
    words = f"""
import sys
import flwr.superlink.main as flower
from silodp.wire.flower import site as flower_site
asked = flower._get_middleware
flower._get_middleware = lambda: [layer for layer in asked() if layer.cls.__name__ != "FleetOnly"]
{unseen}
sys.argv = ["flower_site", "superlink", {str(tmp_path / "server")!r}]
sys.exit(flower_site.main())
"""
    environment = os.environ | flower_site.QUIET | {"FLWR_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-c", words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=170,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert "SuperLink lets other machines reach its control interface" in done.stderr


def test_a_killed_node_costs_a_round_its_deadline_and_comes_back(federation):
    os.kill(federation.pids["north"], signal.SIGKILL)
    timeout, replied = 8.0, []
    while replied != ["south", "west"]:  # on a busy machine they may need longer
        began = time.monotonic()
        replied = federation.ask(timeout=timeout)
        assert timeout <= time.monotonic() - began < timeout + 60
        assert "north" not in replied
        timeout *= 2
        assert timeout < PATIENCE
    start_silo(federation.folder, "north", federation.sockets["north"])
    until = time.monotonic() + PATIENCE
    while federation.ask(timeout=timeout / 2) != SILOS:
        assert time.monotonic() < until


def test_a_killed_job_and_a_killed_superlink_are_started_again_and_nodes_come_back(federation):
    os.kill(federation.pids["job"], signal.SIGKILL)
    assert restart_job(federation.folder) != federation.pids["job"]
    assert federation.hub.names() == SILOS
    os.kill(federation.pids["superlink"], signal.SIGKILL)
    restart_superlink(federation.folder)
    restart_job(federation.folder)
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
    arguments = [
        f"--superlink=127.0.0.1:{superlink}",
        f"--root-certificates={ca}",
        f"--port={flower_site.free_port()}",
        *more,
    ]
    command = [
        sys.executable,
        "-c",
        "from silodp.wire.flower.app import supernode; supernode()",
        "--isolation=process",
        *arguments,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


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


def test_silos_that_reply_with_rubbish_or_by_halves_cost_nobody_else_the_round():
    good = RecordDict({"reply": ConfigRecord({"frame": b"release"})})
    rubbish = {
        "north": RecordDict(),
        "south": RecordDict({"reply": ConfigRecord({"frame": [1, 2]})}),
        "west": good,
    }

    stalled = threading.Event()

    class Grid:
        def get_nodes(self):
            return [
                SimpleNamespace(name=name, node_id=i)
                for i, name in enumerate([*rubbish, "halves", ""])
            ]

        def push_messages(self, messages):
            self.sent = {str(message.metadata.dst_node_id): message for message in messages}
            return list(self.sent)

        def pull_messages(self, identities):
            (identity,) = identities
            if identity == "3":
                stalled.wait(PATIENCE)
                return []
            return [Message(list(rubbish.values())[int(identity)], reply_to=self.sent[identity])]

    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    timeout, replies = 1.0, {}
    while "west" not in replies:  # on a busy machine it may need longer
        began = time.monotonic()
        replies = dict(
            flower.exchange(Grid(), dict.fromkeys([*rubbish, "halves"], b"query"), timeout)
        )
        assert time.monotonic() - began < timeout + 60
        timeout *= 2
        assert timeout < PATIENCE
    assert replies == {"west": b"release"}
    stalled.set()


def test_long_questions_are_handed_over_a_few_at_a_time_and_one_that_the_engine_refuses_is_the_only_one_missing(  # noqa: E501
    monkeypatch,
):
    monkeypatch.setattr(flower, "ROOM", 2500)
    batches = []

    class Grid:
        def get_nodes(self):
            return [SimpleNamespace(name=name, node_id=i + 1) for i, name in enumerate("abcde")]

        def push_messages(self, messages):
            batches.append({str(message.metadata.dst_node_id): message for message in messages})
            return (
                []
                if any(len(message.content["query"]["frame"]) > 5000 for message in messages)
                else list(batches[-1])
            )

        def pull_messages(self, identities):
            (message,) = (
                batch[identity] for identity in identities for batch in batches if identity in batch
            )
            return [
                Message(
                    RecordDict(
                        {"reply": ConfigRecord({"frame": message.content["query"]["frame"]})}
                    ),
                    reply_to=message,
                )
            ]

    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    frames = {
        "a": b"a" * 1000,
        "b": b"b" * 1000,
        "c": b"c" * 1000,
        "d": b"d" * 6000,
        "e": b"e" * 1000,
    }
    assert dict(flower.exchange(Grid(), frames, 600.0)) == {
        name: frame for name, frame in frames.items() if name != "d"
    }
    assert [list(batch) for batch in batches] == [["1", "2"], ["3"], ["4"], ["5"]]


def test_names_and_paths_that_cannot_work_are_refused(tmp_path):
    for silos in (["a", "a"], ["../up"], ["job"]):
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
    assert hub.names() == ["north", "south"]
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
    restart_superlink(folder)  # with the new certificate; nodes come back by themselves
    restart_job(folder)
    flower_site.start_silo(folder, "east", federation.sockets["west"])
    deadline = time.monotonic() + PATIENCE
    while hub.names() != ["east", "north", "south"]:
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
