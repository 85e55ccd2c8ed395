"""Flower as a courier: bytes of a query out to the gates' sockets, bytes of a reply back, or one of
a few fixed codes.

`client` and `server` are all that the bundle names, and the bundle holds no code. `work` and `job`
are the processes that Flower's `--isolation process` leaves to a silo and to the server: they
accept that one bundle, byte for byte, and then run their own installed `client` and `server`, so
nothing that comes over the wire is ever executed. Written against Flower 1.41, whose own workers
run whatever came.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import signal
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from itertools import accumulate
from types import SimpleNamespace

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import SubStatus
from flwr.common.serde import context_from_proto, run_from_proto
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_utils import (
    pull_and_inflate_object_from_tree,
    pull_objects,
)
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid
from flwr.supernode import start_client_internal
from flwr.supernode.cli import flower_supernode
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message

from silodp.host import metrics
from silodp.host.frames import Frames
from silodp.wire.hub import GRACE, LONGEST, Later, Turns, serve_hub
from silodp.wire.many import LARGEST, ROOM
from silodp.wire.socket import CODES, Socket, Unreached

BUNDLE = b"""[project]
name = "silodp-courier"
version = "1.0.0"
description = "Carries frames; the code is the installed silodp's own."
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "silodp"
[tool.flwr.app.components]
serverapp = "silodp.wire.flower.app:server"
clientapp = "silodp.wire.flower.app:client"
"""
"""The whole app, as its pyproject.toml."""
ERRORS = {code: 1001 + i for i, code in enumerate((*CODES, "courier", "bundle"))}
"""Every code with which a courier replies in a gate's place, and its number: those of the socket, a
failure of its own, a strange bundle.
"""
POLL = 0.1
AT_ONCE = 64
"""Replies that are looked for, and read, at once, in a thread each: so many silos that reply by
halves would make the others wait until Flower gives up on one.
"""
STOP = threading.Event()

client, server = ClientApp(), ServerApp()


@cache
def bundle() -> bytes:
    """The only bundle that is accepted: the one that this installed copy makes. Not compressed, so
    that all copies make the same.
    """
    content = f"pyproject.toml,{hashlib.sha256(BUNDLE).hexdigest()},{8 * len(BUNDLE)}".encode()
    with io.BytesIO() as file:
        with zipfile.ZipFile(file, "w") as packed:
            for name, text in (("pyproject.toml", BUNDLE), (".info/CONTENT", content)):
                packed.writestr(zipfile.ZipInfo(name), text)
        return file.getvalue()


def hurry() -> None:
    """Shortens the pauses of 3, 1 and 0.5 seconds that are written into Flower, which would make an
    exchange take 4 to 6 seconds.
    """
    for pull in (pull_objects, pull_and_inflate_object_from_tree):
        pull.__kwdefaults__["initial_backoff"] = POLL / 2  # type: ignore[index]
    start_client_internal.time = SimpleNamespace(  # type: ignore[attr-defined]
        sleep=lambda seconds: time.sleep(min(seconds, 2 * POLL))
    )


# --- at a silo -----------------------------------------------------------------------------------


@client.query("ask")
def carry(message: Message, context: Context) -> Message:
    """The gate's reply to the message's frame. The gate's socket is the site's own word
    (SILODP_GATE), never the message's.
    """
    try:
        asked = message.content["query"]
        reply = Socket(os.environ["SILODP_GATE"]).ask(
            asked["frame"],  # type: ignore[index]
            min(float(asked["timeout"]), LONGEST),  # type: ignore[index]
        )
    except Unreached as unreached:
        return _refuse(message, unreached.code)
    metrics.count("silodp_carried_total", code="replied")
    return Message(RecordDict({"reply": ConfigRecord({"frame": reply})}), reply_to=message)


def supernode() -> None:
    """Flower's own SuperNode, in this process, with the arguments of this process."""
    hurry()
    flower_supernode()


def work(runtime: str, secret: bytes, alive: Callable[[], bool]) -> None:
    """Answers the messages of the SuperNode whose Runtime API is at `runtime` on this machine, one
    at a time, while `alive()`.
    """
    hurry()
    with contextlib.closing(_client(runtime, None, _signed(secret))) as door:
        while alive():
            try:
                if not (token := _acquire(door, TaskType.CLIENT_APP)):
                    time.sleep(POLL)
                    continue
                with (
                    contextlib.closing(
                        _client(runtime, None, RuntimeTokenHttpInterceptor(token))
                    ) as task,
                    _beating(task),
                ):
                    message, context, _, fab = pull_task_input(task)
                    push_message(task, _answer(message, context, fab.content), context)
                    task.PushTaskOutput(
                        PushTaskOutputRequest(sub_status=SubStatus.COMPLETED, details="")
                    )
            except Exception as error:
                # the SuperNode is starting, or gone, or sent nonsense: the next message is another
                # matter
                print(f"courier: {type(error).__name__}", flush=True)
                time.sleep(5 * POLL)


def _answer(message: Message, context: Context, given: bytes) -> Message:
    if given != bundle():
        return _refuse(message, "bundle")
    try:
        return client(message, context)
    except Exception:  # its text would travel to the server
        return _refuse(message, "courier")


def _refuse(message: Message, code: str) -> Message:
    print(f"courier: no reply from the gate: {code}", flush=True)
    metrics.count("silodp_carried_total", code=code)
    return Message(Error(ERRORS[code], code), reply_to=message)


# --- at the server -------------------------------------------------------------------------------


@server.main()
def relay(grid: Grid, context: Context) -> None:
    """Serves the hub at SILODP_HUB until STOP."""
    serve_hub(os.environ["SILODP_HUB"], partial(exchange, grid), lambda: sorted(_nodes(grid)), STOP)


def exchange(
    grid: Grid, frames: Mapping[str, bytes], timeout: float
) -> Iterator[tuple[str, bytes]]:
    """One message per connected silo; the replies as they come within `timeout` seconds. A silo
    that replies by halves delays no other.
    """
    deadline = time.monotonic() + timeout
    nodes = _nodes(grid)
    asked, sent = [name for name in frames if name in nodes], list[str]()
    while batch := _batch(asked[len(sent) :], Frames.of(frames)):
        records = [
            RecordDict({"query": ConfigRecord({"frame": frames[name], "timeout": timeout})})
            for name in batch
        ]
        messages = [
            Message(record, nodes[name], "query.ask", ttl=timeout + GRACE)
            for name, record in zip(batch, records, strict=True)
        ]
        sent += list(grid.push_messages(messages)) or [""] * len(batch)
    pushed, pauses = dict(zip(asked, sent, strict=True)), dict.fromkeys(asked, POLL)

    def pull(name: str, left: float) -> bytes | Later | None:
        for reply in (
            grid.pull_messages([pushed[name]]) if pushed[name] else ()
        ):  # Flower reads a reply to its end before it gives another
            if isinstance(frame := _frame(reply), bytes) and len(frame) <= LARGEST:
                return frame
            code = (
                frame if isinstance(frame, str) and re.fullmatch(r"code \d+", frame) else "no frame"
            )
            print(f"courier: {name} replies with {code}", flush=True)
            return None
        pauses[name] = min(1.3 * pauses[name], 1.0)
        return Later(pauses[name]) if pushed[name] else None

    yield from Turns(asked, pull, deadline - time.monotonic(), at_once=AT_ONCE)


def _batch(names: list[str], frames: Frames) -> list[str]:
    """The first of them, whose frames fit into the room for what is held at once; one at least."""
    ends = accumulate(frames.size(name) for name in names)
    return names[: max(1, sum(end <= ROOM for end in ends))]


def _frame(reply: Message) -> object:
    if reply.has_error():
        return f"code {reply.error.code}"
    with contextlib.suppress(Exception):  # whatever a silo likes to send
        return reply.content["reply"]["frame"]  # type: ignore[index]
    return "no frame"


def _nodes(grid: Grid) -> dict[str, int]:
    """Connected nodes by the name under which the server's operator registered their key."""
    return {node.name: node.node_id for node in grid.get_nodes() if node.name}  # type: ignore[attr-defined]


def job(runtime: str, root: bytes, secret: bytes) -> None:
    """Waits for a run of the bundle at the SuperLink, then is its ServerApp until SIGTERM, or until
    the SuperLink ends the run.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: STOP.set())
    hurry()
    with contextlib.closing(_client(runtime, root, _signed(secret))) as door:
        while not STOP.is_set():
            if not (token := _acquire(door, TaskType.SERVER_APP)):
                STOP.wait(POLL)
                continue
            task, grid = (
                _client(runtime, root, RuntimeTokenHttpInterceptor(token)),
                HttpGrid(runtime, root_certificates=root, token=token),
            )
            with contextlib.closing(task), contextlib.closing(grid), _beating(task, STOP.set):
                given = task.PullTaskInput(PullTaskInputRequest())
                if accepted := given.fab.content == bundle():
                    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = (
                        given.task_id,
                        given.run.run_id,
                        given.context.node_id,
                    )
                    grid.set_run(run_from_proto(given.run))
                    server(grid, context_from_proto(given.context))
                status = SubStatus.COMPLETED if accepted else SubStatus.FAILED
                with contextlib.suppress(
                    Exception
                ):  # a SuperLink that is gone has ended the run itself
                    task.PushTaskOutput(
                        PushTaskOutputRequest(
                            sub_status=status, details="" if accepted else "bundle"
                        )
                    )


# --- Flower's Runtime API ------------------------------------------------------------------------


def _client(
    runtime: str,
    root: bytes | None,
    credential: RuntimeTokenHttpInterceptor | SuperExecAuthHttpInterceptor,
) -> RuntimeHttpClient:
    return RuntimeHttpClient.from_server_address(
        runtime,
        root is None,
        root,
        [RuntimeVersionHttpInterceptor(component_name="silodp"), credential],
    )


def _signed(secret: bytes) -> SuperExecAuthHttpInterceptor:
    return SuperExecAuthHttpInterceptor(
        master_secret=secret, protected_methods={"/flwr.proto.Runtime/AcquireTask"}
    )


def _acquire(door: RuntimeHttpClient, kind: TaskType) -> str:
    return door.AcquireTask(AcquireTaskRequest(supported_task_types=[kind])).token


@contextmanager
def _beating(task: RuntimeHttpClient, ended: Callable[[], None] = lambda: None) -> Iterator[None]:
    """A task that is silent for a minute is given up by Flower; `ended` is called when Flower says
    that it is over.
    """

    def beat() -> bool:
        with contextlib.suppress(Exception):
            if not task.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success:
                ended()
        return True

    sender = HeartbeatSender(beat)
    sender.start()
    try:
        yield
    finally:
        sender.stop()
