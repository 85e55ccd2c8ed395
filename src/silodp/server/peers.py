"""No server: every silo's own process runs the same generator, and gets the others' releases through a relay that only carries bytes.

All peers hold the run's asker key, which each silo's policy lists. Queries are deterministic, so all peers make the same signed frames;
each brings its own gate the frame that is meant for it and publishes the reply, under the frame's hash, for the others. The channel is
the server's `Remote` with everyone as its quorum: a relay that alters, swaps or holds back bytes stops the run, and cannot do worse,
since every peer checks every silo's signature, id and hash of the question, and sums in the silos' order. A silo that signs two answers
to one question parts the peers' iterates, and so their next questions: their hashes differ, and the run stops there. After the last
question there is no next: compare the models' hashes by a way that the relay does not carry.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from silodp.server.remote import Carrier


class Relay(Protocol):
    """Keeps what was put under a name, and gives it to whoever asks; it may be anybody."""

    def put(self, name: str, content: bytes) -> None: ...
    def get(self, name: str) -> bytes | None: ...


class Folder:
    """A relay that is a shared folder: a file for each name, whole or not there."""

    def __init__(self, path: Path, *, limit: int = 2**30) -> None:
        self._path, self._limit = path, limit
        path.mkdir(parents=True, exist_ok=True)

    def put(self, name: str, content: bytes) -> None:
        part = self._path / f"{_plain(name)}.{os.getpid()}.part"
        part.write_bytes(content)
        part.replace(self._path / _plain(name))

    def get(self, name: str) -> bytes | None:
        try:
            with open(self._path / _plain(name), "rb") as file:
                content = file.read(self._limit + 1)
        except FileNotFoundError:
            return None
        return content if len(content) <= self._limit else None


class Peer:
    """A carrier for one silo's own process: `gate` reaches the silo's own gate alone, the relay has everybody's replies."""

    def __init__(self, silo: str, gate: Carrier, relay: Relay, *, pause: float = 0.02) -> None:
        self._silo, self._gate, self._relay, self._pause = silo, gate, relay, pause
        self._seen: set[str] = set()

    def exchange(self, frames: Mapping[str, bytes], timeout: float) -> dict[str, bytes]:
        """Own reply from the own gate, published; the others' as they are published, within `timeout` seconds."""
        deadline, replies = time.monotonic() + timeout, dict[str, bytes]()
        if own := frames.get(self._silo):
            replies = self._gate.exchange({self._silo: own}, timeout)
            if self._silo in replies:
                self._relay.put(_name(own), replies[self._silo])
        others = {name: _name(frame) for name, frame in frames.items() if name != self._silo}
        while others:
            for name in list(others):
                if (found := self._relay.get(others[name])) is not None:
                    replies[name] = found
                    self._seen.add(name)
                    del others[name]
            if not others or time.monotonic() >= deadline:
                break
            time.sleep(self._pause)
        return replies

    def names(self) -> list[str]:
        """The own silo, and those that have been heard."""
        return [*self._gate.names(), *sorted(self._seen)]


def _name(frame: bytes) -> str:
    return hashlib.sha256(frame).hexdigest()


def _plain(name: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", name):
        raise ValueError("a relay's names are hashes")
    return name
