"""Encode and decode the frames by which a server reserves budget at a gate, and releases it.

The server sends the events of a run. The gate answers whether they fit its budget. If they fit, the
gate reserves that amount for the run.

Frames are as in `frames`. The asker signs the request and the silo signs the reply. A body is one
JSON text in its one spelling: sorted keys, no spaces, and numbers that are not integers as
hexadecimal text. A refusal that does not concern holds is a `codec.Refusal`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from silodp.core.errors import BadInput
from silodp.core.events import Event, TotalEvent
from silodp.core.protocol.canonical import (
    as_json,
    hexhash,
    integer,
    name,
    read_event,
    real,
    write_event,
)
from silodp.core.protocol.frames import (
    COMMON,
    OVERHEAD,
    VERSION,
    open_by,
    open_signed,
    parsed,
    sign_frame,
)

HOLD = b"SDPH"
HELD = b"SDPK"
LIMIT = OVERHEAD + 2**18
"""The longest frame about a hold, in bytes. A run of 1,500 batches of a partition fits."""
MOST = 64
"""The most events in one request, where the batches of a partition count as one.

A gate prices each event, so their number is bounded. A run has a handful of them.
"""


_SHORT = {"noise_multiplier": "noise"}
"""The fields of an event that a hold spells differently from an answer."""


@dataclass(frozen=True, eq=False)
class HoldRequest:
    """All events that a run will charge to one silo, as (kind, event) with the counts added up.

    A gate takes a hold with one `hold` id once. Each request of a run has a higher `number` than
    the request before. A gate refuses a request that arrives after a later one.
    """

    silo: str
    run: str
    hold: str
    model: str
    number: int
    events: tuple[tuple[str, Event | TotalEvent], ...]


@dataclass(frozen=True)
class ReleaseRequest:
    """A request to free what is reserved for a run under a lower number.

    The server sends it when the run has ended, or will not begin.
    """

    silo: str
    run: str
    hold: str
    model: str
    number: int


@dataclass(frozen=True)
class HoldReply:
    """The result of a request about a hold.

    `code` is empty if the gate has reserved the amount for `seconds`, or has released the hold.
    `needed` is the share of the ledger's capacity that the run still needs. It is a function of the
    request and of the run's own charges. `left` is the share that is neither spent nor reserved for
    other runs. The reply contains `left` only where the policy lets this asker see it.
    """

    silo: str
    run: str
    hold: str
    digest: str
    code: str = ""
    seconds: int = 0
    needed: float | None = None
    left: float | None = None


def encode_hold(request: HoldRequest | ReleaseRequest, private_key: Ed25519PrivateKey) -> bytes:
    """Return the signed frame. Raise BadInput if the run has more events than fit into a frame."""
    frame = sign_frame(HOLD, VERSION, _request_body(request), private_key)
    if len(frame) > LIMIT:
        raise BadInput(
            f"the run has {len(getattr(request, 'events', ()))} different events, and a hold "
            "has no room for so many; use fewer batches"
        )
    return frame


def decode_hold(frame: bytes) -> tuple[HoldRequest | ReleaseRequest, str, str]:
    """Return the request, the asker's public key and the SHA-256 of the body.

    Raise Refused("size" | "malformed" | "version" | "signature") on any other bytes.
    """
    body, key = open_signed(frame, HOLD, LIMIT)
    return parsed_json(body, _read_request, _request_body), key, hashlib.sha256(body).hexdigest()


def encode_hold_reply(reply: HoldReply, private_key: Ed25519PrivateKey | None) -> bytes:
    """Return the frame of a reply, signed if there is a key."""
    return sign_frame(HELD, COMMON, _reply_body(reply), private_key)


def decode_hold_reply(frame: bytes, *, silo_key: str) -> HoldReply:
    """Return the reply that the silo with this key has signed.

    Raise Refused as `decode_hold` does.
    """
    body = open_by(silo_key, frame, HELD, LIMIT)
    return parsed_json(body, _read_reply, _reply_body)


# --- bodies --------------------------------------------------------------------------------------


def _request_body(request: HoldRequest | ReleaseRequest) -> bytes:
    """Return the body of a request.

    Raise BadInput if it has no events, or more prices than `MOST`.
    """
    fields: dict[str, Any] = {
        "hold": name(request.hold),
        "model": hexhash(request.model),
        "number": integer(request.number),
        "run": name(request.run),
        "silo": name(request.silo),
    }
    if isinstance(request, HoldRequest):
        rows = [_row(kind, event) for kind, event in request.events]
        if not rows or _prices(rows) > MOST:
            raise BadInput(
                f"a hold has {len(rows)} events; it must have at least one, and at most "
                f"{MOST} prices (batches of a partition with the same noise share one)"
            )
        fields["events"] = rows
    return as_json(fields).encode("ascii")


def _prices(rows: list[dict[str, Any]]) -> int:
    """Return how many rows a gate has to price one by one.

    Batches of a partition with the same noise count as one row.
    """
    batches = [
        row | {"kind": "", "count": 0, "sampling": row["sampling"] | {"index": 0}}
        for row in rows
        if "index" in row["sampling"]
    ]
    return len(rows) - len(batches) + len({as_json(row) for row in batches})


def _row(kind: str, event: Event | TotalEvent) -> dict[str, Any]:
    """Return one event as a hold spells it."""
    return {"kind": name(kind)} | {
        _SHORT.get(field, field): value for field, value in write_event(event).items()
    }


def _read_request(fields: dict[str, Any]) -> HoldRequest | ReleaseRequest:
    """Return the request in these fields. Without events it is a ReleaseRequest."""
    names = (
        name(fields["silo"]),
        name(fields["run"]),
        name(fields["hold"]),
        hexhash(fields["model"]),
        integer(fields["number"]),
    )
    if "events" not in fields:
        return ReleaseRequest(*names)
    return HoldRequest(*names, tuple((name(row["kind"]), _event(row)) for row in fields["events"]))


def _event(row: dict[str, Any]) -> Event | TotalEvent:
    """Return the event in one row of a hold."""
    long = {short: field for field, short in _SHORT.items()}
    return read_event(
        {long.get(field, field): value for field, value in row.items() if field != "kind"}
    )


def _reply_body(reply: HoldReply) -> bytes:
    """Return the body of a reply."""
    fields: dict[str, Any] = {
        "digest": hexhash(reply.digest),
        "hold": name(reply.hold),
        "run": name(reply.run),
        "seconds": integer(reply.seconds),
        "silo": name(reply.silo),
    }
    if reply.code:
        fields["code"] = name(reply.code)
    if reply.needed is not None:
        fields["needed"] = real(reply.needed)
    if reply.left is not None:
        fields["left"] = real(reply.left)
    return as_json(fields).encode("ascii")


def _read_reply(fields: dict[str, Any]) -> HoldReply:
    """Return the reply in these fields."""
    names = (
        name(fields["silo"]),
        name(fields["run"]),
        name(fields["hold"]),
        hexhash(fields["digest"]),
    )
    reply = HoldReply(*names, fields.get("code", ""), integer(fields["seconds"]))
    shares = {
        field: float.fromhex(fields[field]) for field in ("needed", "left") if field in fields
    }
    return dataclasses.replace(reply, **shares)


def parsed_json(
    body: bytes, read: Callable[[dict[str, Any]], Any], write: Callable[[Any], bytes]
) -> Any:
    """Return what `read` makes of a body that is JSON. Raise Refused as `frames.parsed` does."""
    return parsed(body, lambda text: read(json.loads(text)), write)
