"""No server: every silo's own process runs the same generator, and gets the others' releases
through a relay that only carries bytes.

All peers hold the run's asker key, which each silo's policy lists. Queries are deterministic, so
all peers make the same signed frames; each brings its own gate the frame that is meant for it and
publishes the reply, under the frame's hash, for the others. The channel is the server's `Remote`
with everyone as its quorum: a relay that alters, swaps or holds back bytes stops the run, and
cannot do worse, since every peer checks every silo's signature, id and hash of the question, and
sums in the silos' order. A silo that signs two answers to one question parts the peers' iterates,
and so their next questions: their hashes differ, and the run stops there. After the last question
there is no next: compare the models' hashes (`model_hash`) by a way that the relay does not carry.
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
    """Keeps what was put under a name, and gives it to whoever asks; it may be anybody."""

    def put(self, name: str, content: bytes) -> None: ...
    def get(self, name: str) -> bytes | None: ...


LARGEST = 2**30


class Folder:
    """A relay that is a shared folder: a file for each name, whole or not there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.mkdir(parents=True, exist_ok=True)

    def put(self, name: str, content: bytes) -> None:
        atomic.write(self._path / _plain(name), content, mode=0o644, durable=False)

    def get(self, name: str) -> bytes | None:
        try:
            with open(self._path / _plain(name), "rb") as file:
                content = file.read(LARGEST + 1)
        except FileNotFoundError:
            return None
        return content if len(content) <= LARGEST else None


class Peer:
    """A carrier for one silo's own process: `gate` reaches the silo's own gate alone, the relay has
    everybody's replies.
    """

    def __init__(self, silo: str, gate: Carrier, relay: Relay) -> None:
        self._silo = silo
        self._gate = gate
        self._relay = relay
        self._seen: set[str] = set()

    def holds(
        self, cards: Sequence[Card], carrier: Carrier, plan: Plan, **settings: Any
    ) -> PeerHolds:
        """What this peer's run holds: at its own gate by itself, at the others' by their peers'
        word, which the gates have signed.
        """
        return PeerHolds(cards, self._gate, plan, silo=self._silo, relay=self._relay, **settings)

    def exchange(self, frames: Mapping[str, bytes], timeout: float) -> dict[str, bytes]:
        """Own reply from the own gate, published; the others' as they are published, within
        `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        replies = dict[str, bytes]()
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
            time.sleep(0.02)
        return replies

    def names(self) -> list[str]:
        """The own silo, and those that have been heard."""
        return [*self._gate.names(), *sorted(self._seen)]


class PeerHolds(RunHolds):
    """Each peer takes the hold of its own gate, and publishes what the gate has signed; no question
    goes out before all hold, or one refuses.

    A gate is asked once those before it hold, by name, as a server asks them.
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
        self._last = b"", b""  # to the own gate, and from it

    def _take(self) -> None:
        self._publish(b"", b"")  # what an earlier process published is over
        try:
            super()._take()
        except BadInput:
            self._publish(*self._last)  # or the others would wait
            raise

    def _frame(self, name: str) -> bytes:
        if name == self._silo:
            return super()._frame(name)
        return b""

    def _ask(self, name: str, frame: bytes, until: float) -> HoldReply | str:
        if name == self._silo:
            got = super()._ask(name, frame, until)
            if isinstance(got, HoldReply) and not got.code:
                self._publish(*self._last)
            return got
        while (got := self._published(name)) in PASSING and time.monotonic() < until:
            time.sleep(0.05)
        return got

    def _opened(self, card: Card, id: str, frame: bytes, raw: bytes) -> HoldReply | str:
        if card.name == self._silo:
            self._last = frame, raw
        return super()._opened(card, id, frame, raw)

    def _publish(self, frame: bytes, raw: bytes) -> None:
        self._relay.put(self._place(self._silo), len(frame).to_bytes(4, "big") + frame + raw)

    def _published(self, name: str) -> HoldReply | str:
        """What the gate of another silo has said to its own peer, about the very events that this
        peer counts on.
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
        return hashlib.sha256(f"{self._run}/hold/{name}".encode()).hexdigest()


def model_hash(path: Path) -> str:
    """SHA-256 of a model.safetensors' parameters: names, shapes and numbers, and nothing of how the
    file is laid out.
    """
    found = hashlib.sha256()
    for name, value in sorted(load_file(path).items()):
        found.update(
            f"{name} {value.dtype} {tuple(value.shape)}\n".encode()
            + value.contiguous().numpy().tobytes()
        )
    return found.hexdigest()


def _name(frame: bytes) -> str:
    return hashlib.sha256(frame).hexdigest()


def _plain(name: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", name):
        raise ValueError("a relay's names are hashes")
    return name
