"""Bytes with which a server asks a gate for its key of a run, and the gate gives it: what a
cohort's table is made of (`masks`).

Frames as in `frames`, signed by the asker there and by the silo back; bodies are one JSON text in
its one spelling. A key is public, costs nothing and says nothing of a record. A refusal comes back
as any other (`codec.Refusal`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from silodp.core.errors import BadInput
from silodp.core.protocol.canonical import as_json, hexhash, name
from silodp.core.protocol.frames import COMMON, OVERHEAD, VERSION, open_by, open_signed, sign_frame
from silodp.core.protocol.masks import Row
from silodp.core.protocol.quote import parsed_json

KEYS = b"SDPM"
OFFER = b"SDPO"
LIMIT = OVERHEAD + 2**10
_PARTS = {"identity": 32, "epoch": 16, "key": 32, "signature": 64}


@dataclass(frozen=True)
class KeyRequest:
    """Which key of this silo a run's questions may name."""

    silo: str
    run: str
    model: str


@dataclass(frozen=True)
class Offer:
    """The silo's row of every cohort of the run, but for its noise; `digest` names the request."""

    silo: str
    digest: str
    row: Row


def encode_key_request(request: KeyRequest, private_key: Ed25519PrivateKey) -> bytes:
    return sign_frame(KEYS, VERSION, _request_body(request), private_key)


def decode_key_request(frame: bytes) -> tuple[KeyRequest, str, str]:
    """(request, the asker's public key, SHA-256 of the body). On any other bytes Refused("size" |
    "malformed" | "version" | "signature").
    """
    body, key = open_signed(frame, KEYS, LIMIT)
    return parsed_json(body, _read_request, _request_body), key, hashlib.sha256(body).hexdigest()


def encode_offer(offer: Offer, private_key: Ed25519PrivateKey | None) -> bytes:
    return sign_frame(OFFER, COMMON, _offer_body(offer), private_key)


def decode_offer(frame: bytes, *, silo_key: str) -> Offer:
    """What the silo with this key has signed; on any other bytes Refused, as
    `decode_key_request`.
    """
    body = open_by(silo_key, frame, OFFER, LIMIT)
    return parsed_json(body, _read_offer, _offer_body)


def _request_body(request: KeyRequest) -> bytes:
    return as_json(
        {"model": hexhash(request.model), "run": name(request.run), "silo": name(request.silo)}
    ).encode("ascii")


def _read_request(fields: dict[str, Any]) -> KeyRequest:
    return KeyRequest(name(fields["silo"]), name(fields["run"]), hexhash(fields["model"]))


def _offer_body(offer: Offer) -> bytes:
    row = {part: getattr(offer.row, part).hex() for part in _PARTS}
    return as_json({"digest": hexhash(offer.digest), "row": row, "silo": name(offer.silo)}).encode(
        "ascii"
    )


def _read_offer(fields: dict[str, Any]) -> Offer:
    parts = [bytes.fromhex(fields["row"][part]) for part in _PARTS]
    if [len(part) for part in parts] != list(_PARTS.values()):
        raise BadInput("a part of the row is too long or too short")
    identity, epoch, key, signature = parts
    return Offer(
        name(fields["silo"]), hexhash(fields["digest"]), Row(identity, epoch, key, signature)
    )
