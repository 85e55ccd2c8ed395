"""Encode and decode the frames between the server and a shuffler: boxes, and one total.

Frames are as in `frames`. There is no pickle, no I/O and no torch. A body has one of three forms:

- A request: round (32) | d (8) | n (8) | n boxes of box_length(d).
- A total: 1 (1) | round (32) | contributions (8) | d (8) | n (8) | d totals (8, signed) | n x
  (SHA-256 of a box (32) | code (16)).
- A refusal: 0 (1) | SHA-256 of the request's whole frame, or zeros (32) | code (16).

Integers are little-endian. Codes are padded with zero bytes. Dropped boxes are in the order of
their hashes. A body in any other spelling is refused. A total names its round and no request,
because it answers every request about that round.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from silodp.core.errors import BadInput
from silodp.core.protocol import frames
from silodp.core.protocol.box import box_length

REQUEST = b"SDPB"
OUTCOME = b"SDPT"
DROPPED: dict[str, str] = {
    "malformed": "It is not a box that this shuffler can open, for this round.",
    "signature": "Its content is not signed by the pseudonym that it names.",
    "stranger": "Its pseudonym is not on the shuffler's roster.",
    "differs": "It has another number of coordinates than the request.",
    "duplicate": "Another box of the same pseudonym was taken.",
    "too-few": "It demands a total of more silos than there are.",
}
"""The reasons for which a box is left out of a total."""
DECLINED: dict[str, str] = {
    "size": "The frame is longer than the shuffler's settings allow.",
    "malformed": "The frame is not a request in the one form that this protocol has.",
    "version": "The frame has another version of the protocol.",
    "signature": "The frame is unsigned, or its signature does not belong to its key and content.",
    "asker": "The key that signed the request is not one that the shuffler lists.",
    "rate": "The shuffler has passed on as many totals in the last hour as its settings allow.",
    "too-few": (
        "Fewer than two boxes are left whose demands the total would meet; more boxes may be sent."
    ),
    "store": (
        "The store of earlier totals cannot be read or written; the shuffler's operator must look "
        "at it."
    ),
    "peer": "The process that connected runs as a user that the settings do not list.",
    "busy": "As many frames are waiting as the settings have connections; ask again.",
    "stopping": "The shuffler is being stopped; ask again when it is running again.",
    "internal": "The shuffler could not answer, for a reason that does not depend on any number.",
}
"""The reasons for which the shuffler passes nothing on."""
_REQUEST = struct.Struct("<32sQQ")
_PASSED = struct.Struct("<B32sQQQ")
_DECLINED = struct.Struct("<B32s16s")
_DROP = struct.Struct("<32s16s")
_HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True)
class Request:
    """The boxes of one round, whose query has d coordinates."""

    round: str
    dimension: int
    boxes: tuple[bytes, ...]


@dataclass(frozen=True, eq=False)
class Passed:
    """The one total of a round, over `contributions` silos.

    `dropped` gives the SHA-256 of each box that was left out, and why.
    """

    round: str
    contributions: int
    totals: np.ndarray  # (d,), int64
    dropped: dict[str, str]


@dataclass(frozen=True)
class Declined:
    """A shuffler's refusal: a code, and the SHA-256 of the request's whole frame.

    The hash is empty if the daemon refused before it read a frame.
    """

    code: str
    digest: str = field(default="", compare=False)


Outcome = Passed | Declined


def outcome_length(dimension: int, boxes: int) -> int:
    """Return the bytes of the longest frame that answers so many boxes."""
    return frames.OVERHEAD + _PASSED.size + 8 * dimension + boxes * _DROP.size


def encode_request(request: Request, private_key: Ed25519PrivateKey) -> bytes:
    """Return the signed frame of a request."""
    return frames.sign_frame(REQUEST, frames.VERSION, _request_body(request), private_key)


def decode_request(frame: bytes, *, limit: int) -> tuple[Request, str]:
    """Return the request and the asker's public key in hex.

    Raise Refused("size" | "malformed" | "version" | "signature") on any other bytes.
    """
    body, key = frames.open_signed(frame, REQUEST, limit)
    return frames.parsed(body, _read_request, _request_body), key


def encode_outcome(outcome: Outcome, private_key: Ed25519PrivateKey) -> bytes:
    """Return the signed frame of a total or a refusal."""
    return frames.sign_frame(OUTCOME, frames.VERSION, _outcome_body(outcome), private_key)


def decode_outcome(frame: bytes, *, limit: int, shuffler_key: str) -> Outcome:
    """Return the outcome that the shuffler with this Ed25519 public key (hex) has signed.

    Raise Refused as `decode_request` does.
    """
    body = frames.open_by(shuffler_key, frame, OUTCOME, limit)
    return frames.parsed(body, _read_outcome, _outcome_body)


# --- bodies --------------------------------------------------------------------------------------


def _request_body(request: Request) -> bytes:
    """Return the body of a request. Raise BadInput if a box or a number is out of range."""
    if {len(box) for box in request.boxes} - {box_length(request.dimension)}:
        raise BadInput(
            f"the boxes have lengths {sorted({len(box) for box in request.boxes})}; a box of "
            f"{request.dimension} coordinates must have {box_length(request.dimension)} bytes"
        )
    if not 1 <= request.dimension < 2**40 or not request.boxes:
        raise BadInput(
            f"a request has {request.dimension} coordinates and {len(request.boxes)} boxes; each "
            "must be at least 1"
        )
    head = _REQUEST.pack(_raw(request.round), request.dimension, len(request.boxes))
    return head + b"".join(request.boxes)


def _read_request(body: bytes) -> Request:
    """Return the request in a body. Raise BadInput if its length does not match."""
    name, dimension, count = _REQUEST.unpack_from(body)
    length = box_length(dimension)
    if len(body) != _REQUEST.size + count * length:
        raise BadInput(
            f"a request of {count} boxes has {len(body)} bytes; it must have "
            f"{_REQUEST.size + count * length}"
        )
    starts = range(_REQUEST.size, len(body), length)
    return Request(name.hex(), dimension, tuple(body[at : at + length] for at in starts))


def _outcome_body(outcome: Outcome) -> bytes:
    """Return the body of an outcome. Raise BadInput if there are no totals."""
    if isinstance(outcome, Declined):
        return _DECLINED.pack(0, _raw(outcome.digest or "0" * 64), _word(outcome.code, DECLINED))
    totals = np.ascontiguousarray(outcome.totals, "<i8")
    if totals.ndim != 1 or not totals.size:
        raise BadInput(
            f"the totals have the shape {totals.shape}; there must be one for each coordinate"
        )
    sizes = outcome.contributions, len(totals), len(outcome.dropped)
    drops = b"".join(
        _DROP.pack(_raw(digest), _word(code, DROPPED))
        for digest, code in sorted(outcome.dropped.items())
    )
    return _PASSED.pack(1, _raw(outcome.round), *sizes) + totals.tobytes() + drops


def _read_outcome(body: bytes) -> Outcome:
    """Return the outcome in a body. Raise BadInput if its length does not match."""
    if len(body) == _DECLINED.size:
        _, digest, code = _DECLINED.unpack(body)
        if any(digest):
            return Declined(_unpadded(code), digest.hex())
        return Declined(_unpadded(code))
    _, name, contributions, dimension, count = _PASSED.unpack_from(body)
    start = _PASSED.size + 8 * dimension
    if len(body) != start + count * _DROP.size:
        raise BadInput(
            f"an outcome of {dimension} totals and {count} dropped boxes has {len(body)} bytes; "
            f"it must have {start + count * _DROP.size}"
        )
    totals = np.frombuffer(body, "<i8", dimension, _PASSED.size).astype(np.int64)
    dropped = {digest.hex(): _unpadded(code) for digest, code in _DROP.iter_unpack(body[start:])}
    return Passed(name.hex(), contributions, totals, dropped)


def _raw(digest: str) -> bytes:
    """Return the bytes of a hash in hex. Raise BadInput on another text."""
    if not isinstance(digest, str) or not _HASH.fullmatch(digest):
        raise BadInput(f"a round or hash is {digest!r:.80}; it must be 64 hexadecimal digits")
    return bytes.fromhex(digest)


def _word(code: str, codes: dict[str, str]) -> bytes:
    """Return a code as bytes. Raise BadInput if it is not among the codes of this kind."""
    if code not in codes:
        raise BadInput(f"the code is {code!r:.40}; it must be one of {', '.join(codes)}")
    return code.encode("ascii")


def _unpadded(code: bytes) -> str:
    """Return a code without its zero bytes."""
    return code.rstrip(b"\0").decode("ascii")
