"""A run without a server. Every silo's own process runs the same generator, and gets the releases
of the others through a relay that only carries bytes.

All peers have the run's asker key, which each silo's policy lists. Queries are deterministic, so
all peers make the same signed frames. Each peer brings its own gate the frame that is meant for it.
It publishes the reply for the others, under the hash of the frame.

The channel is the server's `Remote`, with all silos as its quorum. A relay that alters, swaps or
withholds bytes stops the run. It can do nothing worse: every peer checks every silo's signature, id
and hash of the question, and adds answers in the order of the silos.

A silo that signs two answers to one question gives the peers different iterates, and so different
next questions. Their hashes differ, and the run stops there. After the last question there is no
next one. So compare the models' hashes (`model_hash`) on a way that the relay does not control.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from safetensors.torch import load_file

from silodp.core.errors import BadInput, Refused
from silodp.core.protocol.card import Card
from silodp.core.protocol.quote import HoldReply, HoldRequest, decode_hold, encode_hold
from silodp.host import atomic
from silodp.server.asking import Carrier
from silodp.server.plan import Plan
from silodp.server.quote import PASSING, RunHolds


class Relay(Protocol):
    """A store that keeps what was put under a name, and returns it to anyone. Anyone may operate
    it.
    """

    def put(self, name: str, content: bytes) -> None:
        """Store the content under the name."""

    def get(self, name: str) -> bytes | None:
        """Return the content of this name, or None if there is none."""


LARGEST = 2**30
"""Most bytes of one content. A longer one is treated as missing."""


class Folder:
    """A relay that is a shared folder, with one file for each name. A file is complete or does not
    exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.mkdir(parents=True, exist_ok=True)

    def put(self, name: str, content: bytes) -> None:
        """Write the file of this name."""
        atomic.write(self._path / _plain(name), content, mode=0o644, durable=False)

    def get(self, name: str) -> bytes | None:
        """Return the content of the file, or None if it does not exist or is too long."""
        try:
            with open(self._path / _plain(name), "rb") as file:
                content = file.read(LARGEST + 1)
        except FileNotFoundError:
            return None
        if len(content) > LARGEST:
            return None
        return content


class Peer:
    """The carrier of one silo's own process. `gate` reaches the silo's own gate alone. The relay
    has the replies of all silos.
    """

    def __init__(self, silo: str, gate: Carrier, relay: Relay) -> None:
        self._silo = silo
        self._gate = gate
        self._relay = relay
        self._heard: set[str] = set()

    def holds(
        self, cards: Sequence[Card], carrier: Carrier, plan: Plan, **settings: Any
    ) -> PeerHolds:
        """Return the holds of this peer's run.

        The peer takes the hold of its own gate itself. For each other gate it reads what the gate
        has signed, published by that silo's peer.
        """
        return PeerHolds(cards, self._gate, plan, silo=self._silo, relay=self._relay, **settings)

    def exchange(self, frames: Mapping[str, bytes], timeout: float) -> dict[str, bytes]:
        """Return the replies that came within `timeout` seconds.

        The reply of the peer's own gate is published. The other replies are read from the relay as
        their peers publish them.
        """
        deadline = time.monotonic() + timeout
        replies = dict[str, bytes]()
        if frame := frames.get(self._silo):
            replies = self._gate.exchange({self._silo: frame}, timeout)
            if self._silo in replies:
                self._relay.put(_name(frame), replies[self._silo])
        others = {name: _name(frame) for name, frame in frames.items() if name != self._silo}
        while others:
            for name in list(others):
                reply = self._relay.get(others[name])
                if reply is not None:
                    replies[name] = reply
                    self._heard.add(name)
                    del others[name]
            if not others or time.monotonic() >= deadline:
                break
            time.sleep(0.02)
        return replies

    def names(self) -> list[str]:
        """Return the names of the own silo and of the silos with a published reply."""
        return [*self._gate.names(), *sorted(self._heard)]


class PeerHolds(RunHolds):
    """Holds of a run among peers. Each peer takes the hold of its own gate, and publishes what the
    gate has signed.

    No question goes out before all gates hold, or one refuses. A peer asks its gate after the gates
    with earlier names hold, in the same order as a server.
    """

    def __init__(
        self,
        cards: Sequence[Card],
        gate: Carrier,
        plan: Plan,
        *,
        silo: str,
        relay: Relay,
        **settings: Any,
    ) -> None:
        super().__init__(cards, gate, plan, **settings)
        self._silo = silo
        self._relay = relay
        self._last = (b"", b"")
        """The last frame to the own gate, and its reply."""

    def _take(self) -> None:
        """Take all holds. Raise BadInput if one gate refuses."""
        # The reply that an earlier process published is no longer true.
        self._publish(b"", b"")
        try:
            super()._take()
        except BadInput:
            # Without the refusal the other peers would wait.
            self._publish(*self._last)
            raise

    def _frame(self, name: str) -> bytes:
        """Return the request to the own gate, or nothing for another gate."""
        if name == self._silo:
            return super()._frame(name)
        return b""

    def _ask(self, name: str, frame: bytes, until: float) -> HoldReply | str:
        """Return the reply of a gate, or a code: ask the own gate, and read the relay for another
        one.
        """
        if name == self._silo:
            reply = super()._ask(name, frame, until)
            if isinstance(reply, HoldReply) and not reply.code:
                self._publish(*self._last)
            return reply
        while (reply := self._published(name)) in PASSING and time.monotonic() < until:
            time.sleep(0.05)
        return reply

    def _opened(self, card: Card, id: str, frame: bytes, raw: bytes) -> HoldReply | str:
        """Return the checked reply, and remember it if it is of the own gate."""
        if card.name == self._silo:
            self._last = (frame, raw)
        return super()._opened(card, id, frame, raw)

    def _publish(self, frame: bytes, raw: bytes) -> None:
        """Put the frame to the own gate and the gate's reply into the relay."""
        self._relay.put(self._place(self._silo), len(frame).to_bytes(4, "big") + frame + raw)

    def _published(self, name: str) -> HoldReply | str:
        """Return what another silo's gate has signed about the events that this peer expects, or a
        code.

        The code is "silent" if nothing is published, and "forged" if the frame is not the expected
        one.
        """
        content = self._relay.get(self._place(name)) or bytes(4)
        size = 4 + int.from_bytes(content[:4], "big")
        frame = content[4:size]
        raw = content[size:]
        if not raw:
            return "silent"
        try:
            request, _, _ = decode_hold(frame)
        except Refused:
            return "forged"
        card = self._cards[name]
        wanted = HoldRequest(
            name, self._run, request.hold, card.definition, request.number, self._events[name]
        )
        if frame == encode_hold(wanted, self._key):
            return self._opened(card, request.hold, frame, raw)
        return "forged"

    def _place(self, name: str) -> str:
        """Return the relay's name for the hold of a silo."""
        return hashlib.sha256(f"{self._run}/hold/{name}".encode()).hexdigest()


def model_hash(path: Path) -> str:
    """Return the SHA-256 of a model.safetensors' parameters: names, types, shapes and numbers. The
    layout of the file does not matter.
    """
    sha256 = hashlib.sha256()
    for name, value in sorted(load_file(path).items()):
        sha256.update(
            f"{name} {value.dtype} {tuple(value.shape)}\n".encode()
            + value.contiguous().numpy().tobytes()
        )
    return sha256.hexdigest()


def _name(frame: bytes) -> str:
    """Return the relay's name for the reply to a frame."""
    return hashlib.sha256(frame).hexdigest()


def _plain(name: str) -> str:
    """Return the name. Raise ValueError unless it is a hash, so that no name leaves the folder."""
    if not re.fullmatch(r"[0-9a-f]{64}", name):
        raise ValueError("a relay's names are hashes")
    return name
