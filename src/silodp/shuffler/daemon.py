"""Run the shuffler's process, `silodp federation shuffler serve`.

It serves the door on a Unix socket. Its log contains no count.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from silodp.core.protocol.relay import Declined, encode_outcome
from silodp.host import daemon
from silodp.host.keys import public, read_key, read_opening_key
from silodp.host.listener import Server
from silodp.host.lock import sole
from silodp.host.log import Log
from silodp.host.ownership import entrust
from silodp.shuffler.door import RoundNote, ShufflerDoor
from silodp.shuffler.pool import Pool
from silodp.shuffler.settings import ShufflerSettings
from silodp.shuffler.store import RoundStore


def read_keys(settings: ShufflerSettings) -> tuple[X25519PrivateKey, Ed25519PrivateKey]:
    """Return the key that opens boxes and the key that signs totals."""
    return read_opening_key(settings.seal_key), read_key(settings.sign_key)


def line_of(note: RoundNote) -> str:
    """Return the log line of a frame: code, round, number of boxes, and dropped boxes by reason."""
    dropped = ", ".join(f"{code} {count}" for code, count in sorted(note.dropped.items()))
    return f"{note.code:<10} round {note.round:.16} boxes {note.boxes} dropped {dropped or 0}"


def serve(path: str | Path, stop: socket.socket, ready: Callable[[ShufflerSettings], None]) -> None:
    """Serve until `stop` can be read. Raise BadInput if a file or a setting is not as required."""
    entrust([path])  # before the file is read
    settings = ShufflerSettings.load(path)
    daemon.check_files(settings, secret=(settings.seal_key, settings.sign_key, settings.store))
    with (
        sole(settings.store, "store"),
        contextlib.closing(Log(settings.log, settings.log_bytes)) as log,
    ):
        seal, sign = read_keys(settings)
        store = RoundStore(Path(settings.store), seal=public(seal), sign=public(sign))
        door = ShufflerDoor(
            Pool(seal, settings.roster),
            store,
            key=sign,
            askers=settings.askers,
            rounds_per_hour=settings.rounds_per_hour,
            limit=settings.maximum_frame,
            noted=lambda note: log.line(line_of(note)),
        )
        server = Server(
            settings,
            door.handle,
            refuse=lambda code: encode_outcome(Declined(code), sign),
            limit=settings.maximum_frame,
            log=log,
        )
        started = f"{len(settings.roster)} members, {store.since(0)} rounds passed on so far"
        daemon.serve(
            server, log, stop, role="shuffler", started=started, ready=lambda: ready(settings)
        )
