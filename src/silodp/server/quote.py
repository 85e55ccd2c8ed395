"""Holds of a run. Before a run starts, every gate reserves the part of its budget that the run will
need, or the run does not start. At the end of the run the holds are released.

Gates are asked one after another in the order of their names. So of two servers that want the same
budgets, one gets them all. If one gate refuses, the holds that were taken are released. If another
run holds the budget that is left, the server tries again after a random pause, a few times.

The server waits for a silent gate as it does in a round. If enough gates for the quorum hold, the
run begins without the hold of the silent gate. The charges of that gate are then limited by its
filter alone.
"""

from __future__ import annotations

import hashlib
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from silodp.core.errors import BadInput
from silodp.core.events import Event, TotalEvent
from silodp.core.figures import rounded_up
from silodp.core.protocol.card import Card
from silodp.core.protocol.codec import OVERHEAD
from silodp.core.protocol.quote import (
    HoldReply,
    HoldRequest,
    ReleaseRequest,
    decode_hold_reply,
    encode_hold,
)
from silodp.core.sampling import Sampling
from silodp.server.approval import MOVED, OLDER, approves
from silodp.server.asking import UNBOUND, Carrier, Sending, Timeouts, opened
from silodp.server.plan import Plan

ATTEMPTS = 5
PASSING = UNBOUND | {"paused", "rate", "ledger", "forged", "silent"}
"""Codes after which the gate may answer the same bytes later. If it does not, it counts as silent.
"""
RELEASING = 10.0
"""Seconds for the releases at the end of a run. A gate that gets no release waits until its hold
expires.
"""


def run_events(plan: Plan, silo: int) -> tuple[tuple[str, Event | TotalEvent], ...]:
    """Return all events of one silo in the plan, each with its kind. Equal events are one event,
    with their counts added.
    """
    merged: dict[tuple[str, Sampling, tuple], tuple[Event | TotalEvent, int]] = {}
    for asked in plan.asked:
        if silo in asked.silos:
            event = _event_at(plan, asked.kind, asked.event, silo)
            key = (asked.kind, event.sampling, tuple(getattr(event, name) for name in event.wire))
            count = event.count
            if key in merged:
                count += merged[key][1]
            merged[key] = (event, count)
    return tuple(
        (kind, replace(event, count=count)) for (kind, _, _), (event, count) in merged.items()
    )


def _event_at(plan: Plan, kind: str, event: Event | TotalEvent, silo: int) -> Event | TotalEvent:
    """Return the event with the noise of this silo."""
    return replace(plan.mechanisms[kind].noisy(event).of(silo), count=int(np.asarray(event.count)))


class RunHolds:
    """The holds of one run at the gates. Call `keep` before every question, and `release` at the
    end. `held` has the reply of each gate that holds now.
    """

    def __init__(
        self,
        cards: Sequence[Card],
        carrier: Carrier,
        plan: Plan,
        *,
        run: str,
        key: Ed25519PrivateKey,
        timeouts: Timeouts,
        quorum: int,
        report: Callable[[Mapping[str, HoldReply]], None] = lambda held: None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        events = {card.name: run_events(plan, i) for i, card in enumerate(cards)}
        self._cards = {
            card.name: card
            for card in sorted(cards, key=lambda card: card.name)
            if events[card.name]
        }
        self._events = events
        self._carrier = carrier
        self._run = run
        self._key = key
        self._timeouts = timeouts
        self._quorum = min(quorum, len(self._cards))
        self._report = report
        self._pause = pause
        self._open: dict[str, str] = {}
        """The id of each hold that was requested, by silo. The gate may or may not hold it."""
        self._again = 0.0
        """When the holds are renewed, by the monotonic clock."""
        self._number = 0
        self.held: dict[str, HoldReply] = {}

    def keep(self) -> None:
        """Take every hold, the first time. Raise BadInput with no hold left if that fails.

        Later, renew the holds when half of their time is over.
        """
        if not self.held:
            self._take()
            self._report(self.held)
        elif time.monotonic() > self._again:
            self._renew()
        else:
            return
        self._again = (
            time.monotonic() + min((reply.seconds for reply in self.held.values()), default=0) / 2
        )

    def release(self) -> None:
        """Send every gate that may hold something for the run that the run has ended.

        A gate that gets no release waits until its hold expires.
        """
        frames = {
            name: encode_hold(
                ReleaseRequest(name, self._run, id, self._cards[name].definition, self._next()),
                self._key,
            )
            for name, id in self._open.items()
        }
        self._open = {}
        self.held = {}
        if frames:
            sending = Sending(self._carrier, min(self._timeouts.retry, RELEASING))
            # The frames go out while the replies are read. The replies themselves are not used.
            dict(sending.send(frames, RELEASING))

    # --- all or none -----------------------------------------------------------------------------

    def _take(self) -> None:
        """Take all holds or none, in several attempts. Raise BadInput if a gate refuses."""
        for attempt in range(1, ATTEMPTS + 1):
            refusal = self._take_each()
            if refusal is None:
                return
            self.release()
            name, reply = refusal
            if reply.code != "taken" or attempt == ATTEMPTS:
                raise BadInput(self._sentence(name, reply))
            self._pause(random.SystemRandom().uniform(0, 0.25 * 2**attempt))

    def _take_each(self) -> tuple[str, HoldReply] | None:
        """Ask gate after gate for its hold. Return the first refusal, or None if there is none.

        Raise BadInput with no hold left if fewer gates than the quorum answer.
        """
        begin = time.monotonic()
        missing = dict.fromkeys(self._cards, "silent")
        frames = {name: self._frame(name) for name in self._cards}
        while True:
            for name in list(missing):
                reply = self._ask(name, frames[name], begin + self._timeouts.deadline)
                if isinstance(reply, str) and reply not in PASSING | {"removed"}:
                    return name, HoldReply(name, self._run, self._open.get(name, ""), "", reply)
                if isinstance(reply, str):
                    missing[name] = reply
                elif reply.code:
                    return name, reply
                else:
                    self.held[name] = reply
                    del missing[name]
            if len(self.held) >= self._quorum:
                return None
            if time.monotonic() > begin + self._timeouts.limit:
                codes = ", ".join(f"{name} {code}" for name, code in missing.items())
                self.release()
                raise BadInput(
                    f"the run cannot start: {len(self._cards) - len(missing)} of "
                    f"{len(self._cards)} silos replied whether they can pay for it, and "
                    f"{self._quorum} must ({codes}); nothing was charged"
                )

    def _renew(self) -> None:
        """Ask each gate to hold for longer what the run still needs. A gate that does not answer
        keeps its hold as it is.
        """
        for name in list(self._open):
            reply = self._ask(name, self._frame(name), time.monotonic())
            if isinstance(reply, HoldReply) and not reply.code:
                self.held[name] = reply

    def _frame(self, name: str) -> bytes:
        """Return a signed request for a new hold of this silo."""
        self._open[name] = id = secrets.token_hex(16)
        return encode_hold(
            HoldRequest(
                name, self._run, id, self._cards[name].definition, self._next(), self._events[name]
            ),
            self._key,
        )

    def _next(self) -> int:
        """Return a number above all earlier numbers of this run. The clock covers the numbers of
        earlier processes.
        """
        self._number = max(self._number + 1, time.time_ns() // 1000)
        return self._number

    # --- one gate --------------------------------------------------------------------------------

    def _ask(self, name: str, frame: bytes, until: float) -> HoldReply | str:
        """Return the gate's signed reply, or the code of a refusal.

        A passing code, such as "silent", is returned if no final reply came before `until`.
        """
        sending = Sending(self._carrier, self._timeouts.quick.retry)
        while True:
            raw = dict(sending.send({name: frame}, until - time.monotonic())).get(name)
            if raw is not None:
                reply = self._opened(self._cards[name], self._open[name], frame, raw)
            elif name in sending.removed:
                reply = "removed"
            else:
                reply = "silent"
            if not isinstance(reply, str) or reply not in PASSING or until <= time.monotonic():
                return reply
            sending.pause(until - time.monotonic())

    def _opened(self, card: Card, id: str, frame: bytes, raw: bytes) -> HoldReply | str:
        """Return the reply that the card's silo has signed about this frame and the hold with this
        id.

        Return the code of its refusal, or "forged" for anything else.
        """
        if isinstance(reply := opened(raw, card.key, frame, decode_hold_reply), str):
            return reply
        wanted = (card.name, self._run, id, hashlib.sha256(frame[OVERHEAD:]).hexdigest())
        if (reply.silo, reply.run, reply.hold, reply.digest) == wanted:
            return reply
        return "forged"

    def _sentence(self, name: str, reply: HoldReply) -> str:
        """Return the message about a refusal: what the run needs, what is left if the silo reports
        it, and what to do.
        """
        card = self._cards[name]
        if reply.needed is not None:
            needed = f"{rounded_up(100 * reply.needed, 1, 'f')} %"
        else:
            needed = "more"
        if reply.left is None:
            left = ""
        else:
            left = f", and {np.floor(1000 * reply.left) / 10:.1f} % is left"
        if left:
            less = ""
        else:
            less = ", which has less left"
        reasons = {
            "budget": (less, "use a smaller --epsilon"),
            "taken": (
                ", and other runs have reserved some of it",
                "use a smaller --epsilon, or wait for the end of the other runs",
            ),
            "hold-limit": (
                ", more than its policy allows one server to reserve at once",
                "use a smaller --epsilon, or end your other runs",
            ),
        }
        if reply.code == "model":
            return (
                f"the run cannot start: silo {name} does not answer about {approves(card)}: "
                f"{MOVED}; nothing was charged"
            )
        if reply.code == "version":
            return (
                f"the run cannot start: silo {name} does not understand this server: {OLDER}; "
                "nothing was charged"
            )
        if reply.code not in reasons:
            return (
                f"the run cannot start: silo {name} refuses to reserve its price "
                f"({reply.code}); nothing was charged"
            )
        reason, advice = reasons[reply.code]
        return (
            f"the run cannot start: it needs {needed} of the budget of silo {name} "
            f"(epsilon {card.epsilon:g}){left}{reason}; "
            f"nothing was charged or reserved; {advice}"
        )
