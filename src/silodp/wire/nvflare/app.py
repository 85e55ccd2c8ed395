"""NVIDIA FLARE as courier: `Courier` at a silo, `ServerHub` at the server, both components of a
site's own resources.json.

They live in the engine's client and server processes themselves, not in a job: no code or
configuration comes from the server, a client or a server that was killed is back as soon as it runs
again, and the silo refuses every other thing that the engine can be asked for. A question is pushed
as an auxiliary message {"frame": bytes, "timeout": seconds}; the answer is {"reply": bytes} or
{"code": word}. A long one is offered, as {"ticket": word, "timeout": seconds}, and the courier asks
for it: of a message that comes unasked NVFlare 2.9.0 writes every byte out for its log, whether it
logs or not, and of 40 MB that takes longer than to carry them. What is asked for is in a DXO, of
which the log has no more than its address.
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
from nvflare.apis.fl_exception import UnsafeComponentError
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.fuel.utils.fobs import fobs as engine_format
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors

from silodp.host import metrics
from silodp.host.frames import Frames
from silodp.wire.hub import GRACE, LONG, LONGEST, Turns, serve_hub
from silodp.wire.many import LARGEST
from silodp.wire.nvflare import believed, door
from silodp.wire.nvflare.kits import removed
from silodp.wire.private import check
from silodp.wire.site import watched
from silodp.wire.socket import CODES, Socket, Unreached
from silodp.wire.sweep import Sweep

TOPIC, FETCH = "silodp", "silodp_fetch"
WITHOUT = ("nvflare.fuel.utils.fobs.datum.Datum", "numpy.ndarray")
"""Types that no message of ours has. A Datum from the wire names a file that the engine would read
when it sends it back; an array may be fetched from whoever the message says, for which a thread
would wait for 40 minutes."""
COMMANDS = "_net_manager:"
AT_ONCE = 256
"""Silos that are asked at once: each takes two threads of the engine's process until it has
answered. The others wait for their turn.
"""
BEYOND = GRACE / 2
"""Seconds beyond its time for a reply that is on its way at the end of it."""
PING = 10.0
"""Seconds in which a courier that is there says so."""


def deafen(engine: Any) -> None:
    """The engine's network commands are none of ours: one of them echoes what it gets. Nor are
    types that do more than hold values. Some are made after the components are, so this is done
    twice, and then checked."""
    for kind in WITHOUT:
        engine_format._decomposers.pop(kind, None)
        engine_format._type_name_whitelist.discard(kind)
    engine_format._dot_handlers.clear()  # what fetches
    known = _known(engine)
    for command in [name for name in known if name.startswith(COMMANDS)]:
        del known[command]


def listens(engine: Any) -> bool:
    """Whether anything that `deafen` takes away is there still."""
    kinds = (
        engine_format._decomposers.keys()
        | engine_format._type_name_whitelist
        | engine_format._dot_handlers.keys()
    )
    return (
        not kinds.isdisjoint(WITHOUT)
        or bool(engine_format._dot_handlers)
        or any(name.startswith(COMMANDS) for name in _known(engine))
    )


def _known(engine: Any) -> dict[str, Any]:
    cell = getattr(engine, "cell", None)
    return cell.core_cell.req_reg.reg if cell else {}


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
        self._gate, self._sweep = Socket(socket, limit=limit), Sweep()
        door.believe_no_sizes()  # before the engine calls anybody
        believed.call_nobody()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        engine: Any = fl_ctx.get_engine()
        if event_type == EventType.SYSTEM_BOOTSTRAP:  # before the server is told of this client
            try:
                check("nvflare")
                # The engine would obey the server's admin commands (read a file, run a job), and
                # check the site's rights only if the server asks it to. A courier needs none of
                # them.
                ClientRequestProcessors.request_processors.clear()
                deafen(engine)
                engine.register_aux_message_handler(TOPIC, self._carry)
            except Exception:
                raise UnsafeComponentError(
                    "the courier could not close the engine's commands"
                ) from None  # stops the engine
        if event_type == EventType.SYSTEM_START:
            deafen(engine)
            if engine.admin_agent.processors or not _known(engine) or listens(engine):
                self.logger.error(
                    "the engine still obeys commands of the server: the courier stops"
                )
                os._exit(2)
            watched("courier", Path(os.environ.get("SILODP_SITE", ".")))
            self._sweep.begin()

    def _carry(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        answer = Shareable()
        try:
            timeout = request.get("timeout")
            if not isinstance(timeout, float) or not 0 < timeout <= LONGEST:
                raise _Malformed
            deadline = time.monotonic() + timeout
            frame = (
                self._fetched(ticket, timeout, fl_ctx)
                if isinstance(ticket := request.get("ticket"), str)
                else request.get("frame")
            )
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
        """The long frame that the server holds for whoever has this ticket. Nothing of the server's
        is sent back to it but such a word.
        """
        if not re.fullmatch("[0-9a-f]{32}", ticket):
            return None
        engine: Any = fl_ctx.get_engine()
        _end_after(timeout, fl_ctx)
        found = engine.send_aux_request(FETCH, Shareable({"ticket": ticket}), timeout, fl_ctx).get(
            "frame"
        )
        return (
            found.data.get("frame")
            if isinstance(found, DXO) and isinstance(found.data, dict)
            else None
        )


class ServerHub(FLComponent):
    """The server's end: opens the hub at `path` for as long as the engine's server runs."""

    def __init__(self, path: str, removed: str) -> None:
        super().__init__()
        self._path, self._removed, self._stop, self._sweep = (
            Path(path),
            Path(removed),
            threading.Event(),
            Sweep(),
        )
        door.believe_no_sizes()  # before the engine lets anybody in
        door.share_fairly()
        believed.believe_certificates()
        self._engine: Any = None
        self._guarded = False
        self._offered: dict[str, Callable[[], bytes]] = {}
        """What couriers may ask for, each once, under a word that only they were told."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type in (
            EventType.SYSTEM_BOOTSTRAP,
            EventType.SYSTEM_START,
        ):  # a silo may be hostile too
            try:
                check("nvflare")
                deafen(fl_ctx.get_engine())
                if not self._guarded and (cell := getattr(fl_ctx.get_engine(), "cell", None)):
                    believed.know_by_certificate(cell)
                    self._guarded = True
            except Exception as error:
                self.logger.error(
                    f"the engine's commands could not be closed: {error}: the server stops"
                )
                os._exit(2)
        if event_type == EventType.SYSTEM_START:
            self._engine = fl_ctx.get_engine()
            if not _known(self._engine) or listens(self._engine) or not self._guarded:
                self.logger.error("the engine still obeys commands of the silos: the server stops")
                os._exit(2)
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
        """Whoever is connected and was not removed since; the engine itself is told of a removal,
        and lets its client in no more.
        """
        gone, there = removed(self._removed), {client.name for client in self._engine.get_clients()}
        if there & gone:
            self._engine.disable_clients(sorted(there & gone))
        return sorted(there - gone)

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
        known, given = [name for name in self._registered() if name in frames], Frames.of(frames)
        return iter(
            Turns(
                known,
                lambda name, left: self._ask(name, given, left),
                timeout,
                at_once=AT_ONCE,
                beyond=BEYOND,
            )
        )

    def _ask(self, name: str, frames: Frames, left: float) -> bytes | None:
        deadline = time.monotonic() + left
        answer = (
            self._offer(name, frames, left) if frames.size(name) >= LONG else {"code": "malformed"}
        )
        if (
            answer.get("code") == "malformed"
        ):  # it is short, or the courier's silodp is one that knew no tickets
            answer = self._send(name, {"frame": frames[name]}, deadline - time.monotonic())
        reply, code = answer.get("reply"), answer.get("code")
        self._sweep.carried(frames.size(name))  # whether or not it answered
        if isinstance(reply, bytes) and len(reply) <= LARGEST:
            return reply
        self.logger.warning(
            f"{name} did not answer: "
            f"{code if isinstance(code, str) and code in CODES else 'silent'}"
        )  # no word of its own
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
        offered = self._offered.pop(ticket, None) if isinstance(ticket, str) else None
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
