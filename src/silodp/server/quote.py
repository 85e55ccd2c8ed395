"""Before a run starts every gate holds what the run will need of its budget, or the run does not
start; at its end the holds are released.

Gates are asked one after another in the order of their names, so that of two servers that want the
same budgets one gets them all. If one refuses, what was taken is released. Where another run holds
what is left, the server tries again after a random pause, a few times. A gate that is silent is
waited for as in a round, and the run begins without its hold if the quorum holds: its charges go by
its filter alone.
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
from silodp.core.privacy.accounting import rounded_up
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
"""The gate may answer the same bytes later; if it does not, it is as if it were silent."""
RELEASING = 10.0
"""Seconds in which gates are told that the run has ended; one that does not hear it waits for the
hold's own end.
"""


def run_events(plan: Plan, silo: int) -> tuple[tuple[str, Event | TotalEvent], ...]:
    """All that the plan asks of one silo: (kind, event), alike ones as one with their counts added
    up.
    """
    merged: dict[tuple[str, Sampling, tuple], tuple[Event | TotalEvent, int]] = {}
    for asked in plan.asked:
        if silo in asked.silos:
            event = _own(plan, asked.kind, asked.event, silo)
            key = asked.kind, event.sampling, tuple(getattr(event, name) for name in event.wire)
            merged[key] = event, merged[key][1] + event.count if key in merged else event.count
    return tuple(
        (kind, replace(event, count=count)) for (kind, _, _), (event, count) in merged.items()
    )


def _own(plan: Plan, kind: str, event: Event | TotalEvent, silo: int) -> Event | TotalEvent:
    """The event at the noise that this silo is asked with."""
    return replace(plan.mechanisms[kind].noisy(event).of(silo), count=int(np.asarray(event.count)))


class RunHolds:
    """What the gates hold for one run. `keep` before every question, `release` at the end; `held`
    says what each gate holds now.
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
        self._open: dict[str, str] = {}  # silo: the id of what was asked for, held or perhaps held
        self._again = 0.0
        self._number = 0
        self.held: dict[str, HoldReply] = {}

    def keep(self) -> None:
        """The first time: takes every hold, or BadInput with none taken. Later: renews them when
        half of their time is over.
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
        """Tells every gate that may hold something for the run that it has ended; whoever does not
        hear it will find out by itself.
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
            dict(
                Sending(self._carrier, min(self._timeouts.retry, RELEASING)).send(frames, RELEASING)
            )

    # --- all or none -----------------------------------------------------------------------------

    def _take(self) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            said_no = self._all()
            if said_no is None:
                return
            self.release()
            name, reply = said_no
            if reply.code != "taken" or attempt == ATTEMPTS:
                raise BadInput(self._sentence(name, reply))
            self._pause(random.SystemRandom().uniform(0, 0.25 * 2**attempt))

    def _all(self) -> tuple[str, HoldReply] | None:
        """Asks gate after gate; the first refusal, if there is one. BadInput, with nothing held, if
        fewer than the quorum answer.
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
                said = ", ".join(f"{name} {code}" for name, code in missing.items())
                self.release()
                raise BadInput(
                    f"the run cannot start: {len(self._cards) - len(missing)} of "
                    f"{len(self._cards)} silos said whether they can pay for it, and "
                    f"{self._quorum} must ({said}); nothing was charged"
                )

    def _renew(self) -> None:
        """Each gate holds for another while what the run has not asked for yet; one that does not
        answer keeps what it had.
        """
        for name in list(self._open):
            reply = self._ask(name, self._frame(name), time.monotonic())
            if isinstance(reply, HoldReply) and not reply.code:
                self.held[name] = reply

    def _frame(self, name: str) -> bytes:
        self._open[name] = id = secrets.token_hex(16)
        return encode_hold(
            HoldRequest(
                name, self._run, id, self._cards[name].definition, self._next(), self._events[name]
            ),
            self._key,
        )

    def _next(self) -> int:
        """Above all before, in this process and, by the clock, in those that had the run before
        it.
        """
        self._number = max(self._number + 1, time.time_ns() // 1000)
        return self._number

    # --- one gate --------------------------------------------------------------------------------

    def _ask(self, name: str, frame: bytes, until: float) -> HoldReply | str:
        """The gate's own word, or the code of a refusal; "silent" or another that may pass if
        nothing better came in time.
        """
        sending = Sending(self._carrier, self._timeouts.quick.retry)
        while True:
            raw = dict(sending.send({name: frame}, until - time.monotonic())).get(name)
            if name in sending.removed:
                missed = "removed"
            else:
                missed = "silent"
            if raw is not None:
                got = self._opened(self._cards[name], self._open[name], frame, raw)
            else:
                got = missed
            if not isinstance(got, str) or got not in PASSING or until <= time.monotonic():
                return got
            sending.pause(until - time.monotonic())

    def _opened(self, card: Card, id: str, frame: bytes, raw: bytes) -> HoldReply | str:
        """What the silo of this card has signed about this frame, whose hold has this id; "forged"
        for whatever else came.
        """
        if isinstance(reply := opened(raw, card.key, frame, decode_hold_reply), str):
            return reply
        wanted = card.name, self._run, id, hashlib.sha256(frame[OVERHEAD:]).hexdigest()
        if (reply.silo, reply.run, reply.hold, reply.digest) == wanted:
            return reply
        return "forged"

    def _sentence(self, name: str, reply: HoldReply) -> str:
        """What is needed, and what is left where the silo says so; nobody has paid anything."""
        card = self._cards[name]
        if reply.needed is not None:
            needed = f"{rounded_up(100 * reply.needed, 1, 'f')} %"
        else:
            needed = "more"
        if reply.left is None:
            left = ""
        else:
            left = f", and {np.floor(1000 * reply.left) / 10:.1f} % is left"
        said = {
            "budget": ("" if left else ", which has less left", "use a smaller --epsilon"),
            "taken": (
                ", and other runs hold some of it",
                "use a smaller --epsilon, or wait for the end of the other runs",
            ),
            "hold-limit": (
                ", more than its policy lets one server hold at once",
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
        if reply.code not in said:
            return (
                f"the run cannot start: silo {name} refuses to hold what it needs "
                f"({reply.code}); nothing was charged"
            )
        why, advice = said[reply.code]
        return (
            f"the run cannot start: it needs {needed} of the budget of silo {name} "
            f"(epsilon {card.epsilon:g}){left}{why}; "
            f"nothing was charged and nothing is held; {advice}"
        )
