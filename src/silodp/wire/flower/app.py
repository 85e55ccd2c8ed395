"""The Flower app of a federation: `client` at a silo, `server` at the server.

Flower lists the nodes, and admits those whose keys were registered. It carries one message to each:
an invitation to the line on which frames then travel (`line.py` has the reason). A gate's socket
and the server's address are settings of the site, never of the message.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from silodp.host import metrics
from silodp.host.frames import Frames
from silodp.wire.flower.line import Lines, carry, keep_alive
from silodp.wire.hub import Turns, serve_hub
from silodp.wire.site import watched
from silodp.wire.socket import Socket

GATE = "SILODP_GATE"
LINE = "SILODP_LINE"
CA = "SILODP_CA"
SITE = "SILODP_SITE"
HUB = "SILODP_HUB"
"""The site's own settings, as environment variables of Flower's processes."""
AT_ONCE = 256
"""Most silos that are asked at the same time, each by a thread. The others wait for their turn."""
LOOK = 1.0
"""Seconds between two looks at the list of nodes."""
SIGNATURES = "signatures"
"""The folder of the server's site with each silo's signature for the app."""
CONNECT = 30.0

client = ClientApp()
server = ServerApp()


@client.query("invite")
def follow(message: Message, context: Context) -> Message:
    """Carry frames between the server's line and this site's gate until the line is closed."""
    token = message.content["invitation"]["token"]
    if isinstance(token, str) and re.fullmatch("[0-9a-f]{64}", token):
        watched("courier", Path(os.environ[SITE]))
        with contextlib.suppress(OSError), _line() as line:
            carry(line, token, Socket(os.environ[GATE]), _count)
    return Message(RecordDict(), reply_to=message)


def _line() -> ssl.SSLSocket:
    """Connect to the server's port, over TLS with the federation's CA."""
    host, _, port = os.environ[LINE].rpartition(":")
    trust = ssl.create_default_context(cafile=os.environ[CA])
    plain = socket.create_connection((host, int(port)), CONNECT)
    try:
        keep_alive(plain)
        return trust.wrap_socket(plain, server_hostname=host)
    except BaseException:
        plain.close()
        raise


def _count(code: str) -> None:
    """Count a question by its outcome, and print a failure."""
    if code != "replied":
        print(f"courier: no reply from the gate: {code}", flush=True)
    metrics.count("silodp_carried_total", code=code)


def _note(log: Path, sentence: str) -> None:
    """Append a sentence to a log of our own. Flower would copy what an app prints into its
    database.
    """
    with log.open("a") as file:
        print(time.strftime("%Y-%m-%d %H:%M:%S"), sentence, file=file)


@server.main()
def relay(grid: Grid, context: Context) -> None:
    """Serve the hub, and invite each node that has no line, until SIGTERM.

    End also when a silo's signature was added, because Flower hands signatures out at the start of
    a run.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    site = Path(os.environ[SITE])
    place = Path(os.environ[LINE])
    note = partial(_note, site / "relay.log")
    lines = Lines(note)
    signatures = site / SIGNATURES
    begun = signatures.stat().st_mtime_ns
    watched("server", site)
    place.unlink(missing_ok=True)

    def exchange(frames: Mapping[str, bytes], timeout: float) -> Iterator[tuple[str, bytes]]:
        shared = Frames.of(frames)
        connected = [name for name in lines.names() if name in shared]

        def ask(name: str, left: float) -> bytes | None:
            return lines.ask(name, shared[name], left)

        return iter(Turns(connected, ask, timeout, at_once=AT_ONCE))

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        place.chmod(0o600)
        listener.listen(64)
        for work, arguments in (
            (lines.serve, (listener, stop)),
            (serve_hub, (os.environ[HUB], exchange, lines.names, stop)),
        ):
            threading.Thread(target=work, args=arguments, daemon=True).start()
        sent: dict[str, str] = {}
        while not stop.wait(LOOK) and signatures.stat().st_mtime_ns == begun:
            invite(grid, lines, sent, note)
        stop.set()
        lines.close()


def invite(grid: Grid, lines: Lines, sent: dict[str, str], note: Callable[[str], None]) -> None:
    """Send an invitation to each node without a line, and note which invitations were answered.

    `sent` has the node's name for each message without an answer. `note` gets a sentence for each
    node that refuses.
    """
    nodes = {node.name: node.node_id for node in grid.get_nodes() if node.name}  # type: ignore[attr-defined]
    tokens = lines.invite(nodes)
    records = [
        RecordDict({"invitation": ConfigRecord({"token": token})}) for token in tokens.values()
    ]
    messages = [
        Message(record, nodes[name], "query.invite")
        for name, record in zip(tokens, records, strict=True)
    ]
    if messages:
        pushed = grid.push_messages(messages)
        sent |= {identity: name for identity, name in zip(pushed, tokens, strict=True)}
    if not sent:
        return
    for reply in grid.pull_messages(list(sent)):
        name = sent.pop(reply.metadata.reply_to_message_id, "")
        if reply.has_error():
            note(f"{name} could not be invited: Flower's code {reply.error.code}")
        lines.forget(name)
