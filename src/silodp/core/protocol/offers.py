"""Encode and decode the frames by which a gate offers its key of a run.

The keys go into a cohort's table (`masks`).

Frames are as in `frames`. The asker signs the request and the silo signs the offer. A body is one
JSON text in its one spelling. A key is public, costs nothing and depends on no record. A refusal is
a `codec.Refusal`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from silodp.core.errors import BadInput
from silodp.core.protocol.canonical import as_json, hexhash, name
from silodp.core.protocol.frames import (
    COMMON,
    KEYS,
    OVERHEAD,
    VERSION,
    open_by,
    open_signed,
    sign_frame,
)
from silodp.core.protocol.masks import Row
from silodp.core.protocol.quote import parsed_json

OFFER = b"SDPO"
LIMIT = OVERHEAD + 2**10
_PARTS = {"identity": 32, "epoch": 16, "key": 32, "signature": 64}


@dataclass(frozen=True)
class KeyRequest:
    """A request for the key of this silo that a run's queries may name."""

    silo: str
    run: str
    model: str


@dataclass(frozen=True)
class Offer:
    """The silo's row in every cohort of the run, without its noise. `digest` names the request."""

    silo: str
    digest: str
    row: Row


def encode_key_request(request: KeyRequest, private_key: Ed25519PrivateKey) -> bytes:
    """Return the signed frame of a request."""
    return sign_frame(KEYS, VERSION, _request_body(request), private_key)


def decode_key_request(frame: bytes) -> tuple[KeyRequest, str, str]:
    """Return the request, the asker's public key and the SHA-256 of the body.

    Raise Refused("size" | "malformed" | "version" | "signature") on any other bytes.
    """
    body, key = open_signed(frame, KEYS, LIMIT)
    return parsed_json(body, _read_request, _request_body), key, hashlib.sha256(body).hexdigest()


def encode_offer(offer: Offer, private_key: Ed25519PrivateKey | None) -> bytes:
    """Return the frame of an offer, signed if there is a key."""
    return sign_frame(OFFER, COMMON, _offer_body(offer), private_key)


def decode_offer(frame: bytes, *, silo_key: str) -> Offer:
    """Return the offer that the silo with this key has signed.

    Raise Refused as `decode_key_request` does.
    """
    body = open_by(silo_key, frame, OFFER, LIMIT)
    return parsed_json(body, _read_offer, _offer_body)


def _request_body(request: KeyRequest) -> bytes:
    """Return the body of a request."""
    return as_json(
        {"model": hexhash(request.model), "run": name(request.run), "silo": name(request.silo)}
    ).encode("ascii")


def _read_request(fields: dict[str, Any]) -> KeyRequest:
    """Return the request in these fields."""
    return KeyRequest(name(fields["silo"]), name(fields["run"]), hexhash(fields["model"]))


def _offer_body(offer: Offer) -> bytes:
    """Return the body of an offer."""
    row = {part: getattr(offer.row, part).hex() for part in _PARTS}
    return as_json({"digest": hexhash(offer.digest), "row": row, "silo": name(offer.silo)}).encode(
        "ascii"
    )


def _read_offer(fields: dict[str, Any]) -> Offer:
    """Return the offer in these fields. Raise BadInput if a part of its row has another length."""
    parts = [bytes.fromhex(fields["row"][part]) for part in _PARTS]
    if [len(part) for part in parts] != list(_PARTS.values()):
        raise BadInput(
            f"the parts of the row have {[len(part) for part in parts]} bytes; they must have "
            f"{list(_PARTS.values())}"
        )
    identity, epoch, key, signature = parts
    return Offer(
        name(fields["silo"]), hexhash(fields["digest"]), Row(identity, epoch, key, signature)
    )
