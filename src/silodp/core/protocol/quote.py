"""Bytes of quotes and holds: the server sends a gate the run's events, the gate says whether they
fit and holds that amount for the run.

Frames as in `frames`, signed by the asker there and by the silo back. A body is one JSON text in
its one spelling: sorted keys, no spaces, numbers that are not whole as hexadecimal text. A refusal
that has nothing to do with holds comes back as any other (`codec.Refusal`).
"""

from __future__ import annotations

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
"""Bytes of the longest frame about a hold: a run of 1,500 batches of a partition fits."""
MOST = 64
"""Events in one request, the batches of a partition as one: a gate prices each, and a run has a
handful.
"""


_SHORT = {"noise_multiplier": "noise"}
"""How a hold spells an event's fields, where not as an answer does."""


@dataclass(frozen=True, eq=False)
class HoldRequest:
    """Everything that a run will ask of one silo: (kind, event) with the counts added up. Under one
    `hold` id a hold is taken once.

    Each request of a run has a higher `number` than the one before: a gate takes none that was
    carried past a later one.
    """

    silo: str
    run: str
    hold: str
    model: str
    number: int
    events: tuple[tuple[str, Event | TotalEvent], ...]


@dataclass(frozen=True)
class ReleaseRequest:
    """The run has ended, or will not begin: whatever is held for it under a lower number is free
    again.
    """

    silo: str
    run: str
    hold: str
    model: str
    number: int


@dataclass(frozen=True)
class HoldReply:
    """What became of a request about a hold: `code` is empty if the amount is held (for so many
    `seconds`), or the hold released.

    `needed` is the share of the ledger's capacity that the run still needs, a function of the
    request and of the run's own charges; `left`, the share that is neither spent nor held for other
    runs, is told only where the policy lets this asker see it.
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
    """The signed frame; BadInput where the run has more events than a frame holds."""
    frame = sign_frame(HOLD, VERSION, _request_body(request), private_key)
    if len(frame) > LIMIT:
        raise BadInput(
            f"the run has {len(getattr(request, 'events', ()))} different events, more "
            "than a hold can name; use fewer batches"
        )
    return frame


def decode_hold(frame: bytes) -> tuple[HoldRequest | ReleaseRequest, str, str]:
    """(request, the asker's public key, SHA-256 of the body). On any other bytes Refused("size" |
    "malformed" | "version" | "signature").
    """
    body, key = open_signed(frame, HOLD, LIMIT)
    return parsed_json(body, _read_request, _request_body), key, hashlib.sha256(body).hexdigest()


def encode_hold_reply(reply: HoldReply, private_key: Ed25519PrivateKey | None) -> bytes:
    return sign_frame(HELD, COMMON, _reply_body(reply), private_key)


def decode_hold_reply(frame: bytes, *, silo_key: str) -> HoldReply:
    """What the silo with this key has signed; on any other bytes Refused, as `decode_hold`."""
    body = open_by(silo_key, frame, HELD, LIMIT)
    return parsed_json(body, _read_reply, _reply_body)


# --- bodies --------------------------------------------------------------------------------------


def _request_body(request: HoldRequest | ReleaseRequest) -> bytes:
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
                f"a hold is of {len(rows)} events; it must be of at least one, and of at "
                f"most {MOST} prices (batches of a partition: one)"
            )
        fields["events"] = rows
    return as_json(fields).encode("ascii")


def _prices(rows: list[dict[str, Any]]) -> int:
    """How many rows a gate has to price one by one: of the batches of a partition with the same
    noise, one.
    """
    batches = [
        row | {"kind": "", "count": 0, "sampling": row["sampling"] | {"index": 0}}
        for row in rows
        if "index" in row["sampling"]
    ]
    return len(rows) - len(batches) + len({as_json(row) for row in batches})


def _row(kind: str, event: Event | TotalEvent) -> dict[str, Any]:
    return {"kind": name(kind)} | {
        _SHORT.get(field, field): value for field, value in write_event(event).items()
    }


def _read_request(fields: dict[str, Any]) -> HoldRequest | ReleaseRequest:
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
    long = {short: field for field, short in _SHORT.items()}
    return read_event(
        {long.get(field, field): value for field, value in row.items() if field != "kind"}
    )


def _reply_body(reply: HoldReply) -> bytes:
    fields: dict[str, Any] = {
        "digest": hexhash(reply.digest),
        "hold": name(reply.hold),
        "run": name(reply.run),
        "seconds": integer(reply.seconds),
        "silo": name(reply.silo),
    }
    if reply.code:
        fields |= {"code": name(reply.code)}
    else:
        fields |= {}
    fields |= {
        field: real(value)
        for field in ("needed", "left")
        if (value := getattr(reply, field)) is not None
    }
    return as_json(fields).encode("ascii")


def _read_reply(fields: dict[str, Any]) -> HoldReply:
    names = (
        name(fields["silo"]),
        name(fields["run"]),
        name(fields["hold"]),
        hexhash(fields["digest"]),
    )
    told = (
        float.fromhex(fields[field]) if field in fields else None for field in ("needed", "left")
    )
    return HoldReply(*names, fields.get("code", ""), integer(fields["seconds"]), *told)


def parsed_json(
    body: bytes, read: Callable[[dict[str, Any]], Any], write: Callable[[Any], bytes]
) -> Any:
    return parsed(body, lambda text: read(json.loads(text)), write)
