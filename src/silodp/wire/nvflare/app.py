"""NVIDIA FLARE as carrier: `Courier` at a silo, `ServerHub` at the server.

Both are components of a site's own resources.json, in the engine's client and server processes. No
job is ever started. No code and no configuration comes from the server. A client or a server that
was killed works again as soon as it runs again.

This module uses only the interfaces that NVFlare offers to components: events, auxiliary messages,
`Shareable`, `DXO`. A question is an auxiliary message {"frame": bytes, "timeout": seconds}. The
answer is {"reply": bytes} or {"code": word}. A long question is offered, as {"ticket": word,
"timeout": seconds}, and the courier fetches it. The reason is that NVFlare 2.9 writes every byte of
a message that it pushes into a string for its log, even if nothing is logged. For 40 MB this takes
longer than the transfer. Content inside a DXO is left out of that string.
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
"""Most silos that are asked at the same time. Each needs two threads of the engine's process until
it has answered. The others wait for their turn.
"""
BEYOND = GRACE / 2
"""Seconds beyond the deadline for a reply that is on its way."""
PING = 10.0
"""Seconds in which a connected courier answers a ping."""


class _Until(Signal):
    """A signal that ends a call of the engine after some seconds. Otherwise the engine waits for as
    long as a byte comes now and then.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._end = time.monotonic() + seconds

    @property
    def triggered(self) -> bool:
        """Return whether the time is over."""
        return time.monotonic() >= self._end


def _end_after(seconds: float, fl_ctx: FLContext) -> None:
    """Limit the calls of this context to some seconds.

    This uses `put`, not `set_prop`. The server's contexts have a sticky signal of their own, which
    `set_prop` would not replace.
    """
    fl_ctx.put(key=ReservedKey.RUN_ABORT_SIGNAL, value=_Until(seconds), private=True, sticky=False)


class _Malformed(Exception):
    """The message contains no question."""


class Courier(FLComponent):
    """The silo's end. It carries frames to the gate at `socket`, which the silo's own
    resources.json names, and does nothing else.
    """

    def __init__(self, socket: str, limit: int = LARGEST) -> None:
        super().__init__()
        self._gate = Socket(socket, limit=limit)
        self._sweep = Sweep()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Register for messages when the engine begins, and start monitoring when the site runs."""
        # This event comes before the server has registered this client.
        if event_type == EventType.SYSTEM_BOOTSTRAP:
            engine: Any = fl_ctx.get_engine()
            engine.register_aux_message_handler(TOPIC, self._carry)
        if event_type == EventType.SYSTEM_START:
            watched("courier", Path(os.environ.get("SILODP_SITE", ".")))
            self._sweep.begin()

    def _carry(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        """Ask the gate the question of a message, and return the reply or a code."""
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
            # The text of an exception must not go to the server.
            answer["code"] = "courier"
        metrics.count("silodp_carried_total", code=answer.get("code", "replied"))
        self._sweep.carried(len(answer.get("reply", b"")))
        return answer

    def _fetched(self, ticket: str, timeout: float, fl_ctx: FLContext) -> object:
        """Fetch the long frame for which the server gave this ticket. Return None if the server
        does not send it.

        Only a word of the right form is sent back to the server.
        """
        if not re.fullmatch("[0-9a-f]{32}", ticket):
            return None
        engine: Any = fl_ctx.get_engine()
        _end_after(timeout, fl_ctx)
        request = Shareable({"ticket": ticket})
        content = engine.send_aux_request(FETCH, request, timeout, fl_ctx).get("frame")
        if isinstance(content, DXO) and isinstance(content.data, dict):
            return content.data.get("frame")
        return None


class ServerHub(FLComponent):
    """The server's end. It opens the hub at `path` for as long as the engine's server runs."""

    def __init__(self, path: str, removed: str) -> None:
        super().__init__()
        self._path = Path(path)
        self._removed = Path(removed)
        self._stop = threading.Event()
        self._sweep = Sweep()
        self._engine: Any = None
        self._offered: dict[str, Callable[[], bytes]] = {}
        """Frames that couriers may fetch, each once, by the ticket that only its courier has."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Open the hub when the engine's server runs, and close it when the server ends."""
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
        """Return the silos whose couriers answer. The engine still lists a courier that was killed
        until its heartbeats are missed.
        """
        answers = Turns(self._registered(), self._answers, GRACE - PING, at_once=AT_ONCE)
        return sorted(name for name, _ in answers)

    def _answers(self, name: str, left: float) -> bool | None:
        """Return True if the silo's courier answers a ping, and None otherwise."""
        return "code" in self._send(name, {}, min(left, PING)) or None

    def _exchange(self, frames: Mapping[str, bytes], timeout: float) -> Iterator[tuple[str, bytes]]:
        """Yield (silo, reply) as replies come.

        Each silo is asked by a call of its own, because the engine's multicast fails in 2.9.0. The
        call waits for the answer, so it runs in a thread.
        """
        registered = [name for name in self._registered() if name in frames]
        shared = Frames.of(frames)

        def ask(name: str, left: float) -> bytes | None:
            return self._ask(name, shared, left)

        return iter(Turns(registered, ask, timeout, at_once=AT_ONCE, beyond=BEYOND))

    def _ask(self, name: str, frames: Frames, left: float) -> bytes | None:
        """Return the reply of a silo. Return None, and log a code, if there is none."""
        if frames.size(name) >= LONG:
            answer = self._offer(name, frames, left)
        else:
            answer = self._send(name, {"frame": frames[name]}, left)
        # The engine keeps the frame also if the silo did not answer.
        self._sweep.carried(frames.size(name))
        reply = answer.get("reply")
        if isinstance(reply, bytes) and len(reply) <= LARGEST:
            return reply
        code = answer.get("code")
        # A silo's own words do not reach the log.
        if not isinstance(code, str) or code not in CODES:
            code = "silent"
        self.logger.warning(f"{name} did not answer: {code}")
        return None

    def _offer(self, name: str, frames: Frames, left: float) -> Mapping[str, Any]:
        """Offer a long frame to a silo's courier under a new ticket, and return its answer."""
        ticket = secrets.token_hex(16)
        self._offered[ticket] = lambda: frames[name]
        try:
            return self._send(name, {"ticket": ticket}, left)
        finally:
            self._offered.pop(ticket, None)

    def _give(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the frame of a ticket, once. Return nothing for a message without a valid
        ticket.
        """
        ticket = request.get("ticket")
        if not isinstance(ticket, str):
            return Shareable({})
        offered = self._offered.pop(ticket, None)
        if offered is None:
            return Shareable({})
        return Shareable({"frame": DXO(DataKind.APP_DEFINED, {"frame": offered()})})

    def _send(self, name: str, content: dict[str, Any], left: float) -> Mapping[str, Any]:
        """Send a message to one silo's courier, and return its answer, or an empty one."""
        if left <= 0:
            return {}
        with self._engine.new_context() as fl_ctx:
            request = Shareable(content | {"timeout": left})
            _end_after(left + BEYOND, fl_ctx)
            answers = self._engine.send_aux_request(
                [name], TOPIC, request, left, fl_ctx, optional=True
            )
        return (answers or {}).get(name, {})
