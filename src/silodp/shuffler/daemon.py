"""The shuffler's process, `silodp shuffler serve`: the door on a Unix socket, with a log that has no count in it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from silodp.core.errors import BadInput
from silodp.core.protocol.relay import Declined, encode_outcome
from silodp.host.listening import Log, Server, sole, tell_systemd
from silodp.host.ownership import entrust, exposed, group_of
from silodp.shuffler.door import Door, Note
from silodp.shuffler.pool import Pool
from silodp.shuffler.settings import Settings
from silodp.shuffler.store import Store


def read_keys(settings: Settings) -> tuple[X25519PrivateKey, Ed25519PrivateKey]:
    """(the key that opens boxes, the key that signs totals), 64 hexadecimal digits each in a file."""
    found = []
    for path in (settings.seal_key, settings.sign_key):
        try:
            found.append(bytes.fromhex(Path(path).read_text("ascii").strip()))
        except (OSError, ValueError):
            raise BadInput(f"the key file {path} cannot be read; restore it, 64 hexadecimal digits") from None
        if len(found[-1]) != 32:
            raise BadInput(f"the key file {path} must hold 64 hexadecimal digits; restore it")
    return X25519PrivateKey.from_private_bytes(found[0]), Ed25519PrivateKey.from_private_bytes(found[1])


def public(key: X25519PrivateKey | Ed25519PrivateKey) -> str:
    return key.public_key().public_bytes_raw().hex()


def line_of(note: Note) -> str:
    """What became of a frame, which round, how many boxes, how many were dropped and why."""
    dropped = ", ".join(f"{code} {count}" for code, count in sorted(note.dropped.items()))
    return f"{note.code:<10} round {note.round:.16} boxes {note.boxes} dropped {dropped or 0}"


def serve(path: str | Path, stop: socket.socket, ready: Callable[[Settings], None]) -> None:
    """Returns once `stop` can be read; BadInput if anything is not as it must be."""
    entrust([path])  # before a word of it is believed
    settings = Settings.load(path)
    entrust((settings.seal_key, settings.sign_key, settings.store, settings.log, settings.socket))
    for file in (settings.seal_key, settings.sign_key, settings.store):
        if sentence := exposed(file, group_of(settings.socket_group)):
            raise BadInput(sentence)
    with sole(settings.store, "store"), contextlib.closing(Log(settings.log, settings.log_bytes)) as log:
        seal, sign = read_keys(settings)
        store = Store(Path(settings.store), seal=public(seal), sign=public(sign))
        door = Door(
            Pool(seal, settings.roster, largest=settings.largest), store, key=sign, askers=settings.askers,
            rounds_per_hour=settings.rounds_per_hour, limit=settings.maximum_frame, noted=lambda note: log.line(line_of(note)),
        )  # fmt: skip
        server = Server(
            settings, door.handle, refuse=lambda code: encode_outcome(Declined(code), sign), limit=settings.maximum_frame, log=log
        )

        def listening() -> None:
            log.line(f"started    {len(settings.roster)} members, {store.since(0)} rounds passed on so far")
            tell_systemd("READY=1")
            ready(settings)

        server.run(stop, listening)
        log.line("stopped")
