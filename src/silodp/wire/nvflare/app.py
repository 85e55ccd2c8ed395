"""NVIDIA FLARE as courier: `Courier` at a silo, `ServerHub` at the server.

Both are components of a site's own resources.json, in the engine's client and server processes. No
job is ever started: no code and no configuration comes from the server, and a client or a server
that was killed is back as soon as it runs again.

Only interfaces that NVFlare offers to components are used: events, auxiliary messages, `Shareable`,
`DXO`. A question is an auxiliary message {"frame": bytes, "timeout": seconds}; the answer is
{"reply": bytes} or {"code": word}. A long question is offered, as {"ticket": word, "timeout":
seconds}, and the courier fetches it. NVFlare 2.9 writes every byte of a message that it pushes into
a string for its log, even where nothing is logged; for 40 MB that takes longer than the transfer.
Content inside a DXO is left out of that string.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from silodp.host import metrics
from silodp.host.frames import Frames
from silodp.wire.hub import GRACE, LONG, LONGEST, Turns, serve_hub
from silodp.wire.many import LARGEST
from silodp.wire.nvflare.kits import removed
from silodp.wire.site import watched
from silodp.wire.socket import CODES, Socket, Unreached
from silodp.wire.sweep import Sweep

TOPIC = "silodp"
FETCH = "silodp_fetch"
AT_ONCE = 256
"""Silos that are asked at once: each takes two threads of the engine's process until it has
answered. The others wait for their turn.
"""
BEYOND = GRACE / 2
"""Seconds beyond its time for a reply that is on its way at the end of it."""
PING = 10.0
"""Seconds in which a courier that is there says so."""


class _Until(Signal):
    """Ends a call of the engine's after so many seconds: by itself the engine waits on for as long
    as a byte comes now and then.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._end = time.monotonic() + seconds

    @property
    def triggered(self) -> bool:
        return time.monotonic() >= self._end


def _end_after(seconds: float, fl_ctx: FLContext) -> None:
    """`put`, not `set_prop`: the server's contexts have a sticky signal of its own, which that
    would not replace.
    """
    fl_ctx.put(key=ReservedKey.RUN_ABORT_SIGNAL, value=_Until(seconds), private=True, sticky=False)


class _Malformed(Exception):
    """No question is in the message."""


class Courier(FLComponent):
    """The silo's end: carries frames to the gate at `socket`, which the silo's own resources.json
    names, and does nothing else.
    """

    def __init__(self, socket: str, limit: int = LARGEST) -> None:
        super().__init__()
        self._gate = Socket(socket, limit=limit)
        self._sweep = Sweep()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.SYSTEM_BOOTSTRAP:  # before the server knows this client
            engine: Any = fl_ctx.get_engine()
            engine.register_aux_message_handler(TOPIC, self._carry)
        if event_type == EventType.SYSTEM_START:
            watched("courier", Path(os.environ.get("SILODP_SITE", ".")))
            self._sweep.begin()

    def _carry(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        answer = Shareable()
        try:
            timeout = request.get("timeout")
            if not isinstance(timeout, float) or not 0 < timeout <= LONGEST:
                raise _Malformed
            deadline = time.monotonic() + timeout
            ticket = request.get("ticket")
            if isinstance(ticket, str):
                frame = self._fetched(ticket, timeout, fl_ctx)
            else:
                frame = request.get("frame")
            if not isinstance(frame, bytes):
                raise _Malformed
            answer["reply"] = self._gate.ask(frame, deadline - time.monotonic())
        except _Malformed:
            answer["code"] = "malformed"
        except Unreached as missed:
            answer["code"] = missed.code
        except Exception:
            answer["code"] = "courier"  # no exception's text goes to the server
        metrics.count("silodp_carried_total", code=answer.get("code", "replied"))
        self._sweep.carried(len(answer.get("reply", b"")))
        return answer

    def _fetched(self, ticket: str, timeout: float, fl_ctx: FLContext) -> object:
        """Fetch the long frame for which the server gave this ticket.

        Only a word of the right form is sent back to the server.
        """
        if not re.fullmatch("[0-9a-f]{32}", ticket):
            return None
        engine: Any = fl_ctx.get_engine()
        _end_after(timeout, fl_ctx)
        request = Shareable({"ticket": ticket})
        found = engine.send_aux_request(FETCH, request, timeout, fl_ctx).get("frame")
        if isinstance(found, DXO) and isinstance(found.data, dict):
            return found.data.get("frame")
        return None


class ServerHub(FLComponent):
    """The server's end: opens the hub at `path` for as long as the engine's server runs."""

    def __init__(self, path: str, removed: str) -> None:
        super().__init__()
        self._path = Path(path)
        self._removed = Path(removed)
        self._stop = threading.Event()
        self._sweep = Sweep()
        self._engine: Any = None
        self._offered: dict[str, Callable[[], bytes]] = {}
        """What couriers may ask for, each once, under a word that only they were told."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.SYSTEM_START:
            self._engine = fl_ctx.get_engine()
            self._engine.register_aux_message_handler(FETCH, self._give)
            watched("server", Path(os.environ.get("SILODP_SITE", ".")))
            hub = (
                self._path,
                self._exchange,
                self._names,
                self._stop,
                lambda: removed(self._removed),
            )
            self._sweep.begin()
            threading.Thread(target=serve_hub, args=hub, daemon=True).start()
        if event_type == EventType.SYSTEM_END:
            self._stop.set()

    def _registered(self) -> list[str]:
        """Return the connected silos that the operator has not removed."""
        connected = {client.name for client in self._engine.get_clients()}
        return sorted(connected - removed(self._removed))

    def _names(self) -> list[str]:
        """The silos whose couriers answer: the engine goes on listing one that was killed until its
        heartbeats are missed.
        """
        return sorted(
            name
            for name, _ in Turns(self._registered(), self._answers, GRACE - PING, at_once=AT_ONCE)
        )

    def _answers(self, name: str, left: float) -> bool | None:
        return "code" in self._send(name, {}, min(left, PING)) or None

    def _exchange(self, frames: Mapping[str, bytes], timeout: float) -> Iterator[tuple[str, bytes]]:
        """Each silo by itself: the engine's own multicast fails in 2.9.0, and its call for one
        waits for the answer, in a thread.
        """
        known = [name for name in self._registered() if name in frames]
        given = Frames.of(frames)

        def ask(name: str, left: float) -> bytes | None:
            return self._ask(name, given, left)

        return iter(Turns(known, ask, timeout, at_once=AT_ONCE, beyond=BEYOND))

    def _ask(self, name: str, frames: Frames, left: float) -> bytes | None:
        if frames.size(name) >= LONG:
            answer = self._offer(name, frames, left)
        else:
            answer = self._send(name, {"frame": frames[name]}, left)
        self._sweep.carried(frames.size(name))  # whether or not it answered
        reply = answer.get("reply")
        if isinstance(reply, bytes) and len(reply) <= LARGEST:
            return reply
        code = answer.get("code")
        # A silo's own words do not reach the log.
        known = isinstance(code, str) and code in CODES
        self.logger.warning(f"{name} did not answer: {code if known else 'silent'}")
        return None

    def _offer(self, name: str, frames: Frames, left: float) -> Mapping[str, Any]:
        self._offered[ticket := secrets.token_hex(16)] = lambda: frames[name]
        try:
            return self._send(name, {"ticket": ticket}, left)
        finally:
            self._offered.pop(ticket, None)

    def _give(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        """What was offered to this courier, once; whoever names no ticket that is out gets
        nothing.
        """
        ticket = request.get("ticket")
        if isinstance(ticket, str):
            offered = self._offered.pop(ticket, None)
        else:
            offered = None
        return Shareable(
            {"frame": DXO(DataKind.APP_DEFINED, {"frame": offered()})} if offered else {}
        )

    def _send(self, name: str, content: dict[str, Any], left: float) -> Mapping[str, Any]:
        if left <= 0:
            return {}
        with self._engine.new_context() as fl_ctx:
            request = Shareable(content | {"timeout": left})
            _end_after(left + BEYOND, fl_ctx)
            answers = self._engine.send_aux_request(
                [name], TOPIC, request, left, fl_ctx, optional=True
            )
        return (answers or {}).get(name, {})
