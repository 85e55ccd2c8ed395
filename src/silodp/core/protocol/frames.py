"""The outside of every message here: magic (4) | version (1) | Ed25519 public key (32) | signature
(64) | body length (8) | body.

The length is little-endian; the signature covers magic, version and body. What a body says is for
others to read, and only after this.

Version 3 has packed answers (`packing`), and 4 has the totals of today, with their boxes and their
shuffler. A server asks in its own version, so that an older gate says "version" before anything is
charged. A gate packs an answer only for a server that has asked in 3 or 4, and then replies in 3.
What is about a total is in 4, and everything else in 2, which all can read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from silodp.core.errors import Refused
from silodp.core.protocol.signature import signed_by

VERSION = 4
PACKED = 3
COMMON = 2
"""The version of everything that 3 and 4 have not changed."""
SPOKEN = (COMMON, PACKED, VERSION)
OVERHEAD = 4 + 1 + 32 + 64 + 8
_UNSIGNED = bytes(32), bytes(64)


def sign_frame(
    magic: bytes,
    version: int,
    body: bytes | Sequence[bytes | memoryview],
    private_key: Ed25519PrivateKey | None,
) -> bytes:
    """The frame of a body, or of the pieces of one, signed where there is a key; nothing in it is
    encrypted.
    """
    signed = magic + version.to_bytes(1)
    pieces = (body,) if isinstance(body, bytes) else body
    key, signature = _UNSIGNED
    if private_key is not None:
        key = private_key.public_key().public_bytes_raw()
        signature = private_key.sign(b"".join((signed, *pieces)))
    return b"".join((signed, key, signature, sum(map(len, pieces)).to_bytes(8, "little"), *pieces))


def open_frame(frame: bytes, magic: bytes, limit: int) -> tuple[bytes, str | None]:
    """The body of a frame and the key whose signature it bears; None for the all-zero key and
    signature of an unsigned one.

    On any other bytes whatever: Refused("size" | "malformed" | "version" | "signature").
    """
    if len(frame) > limit:
        raise Refused("size")
    if len(frame) < OVERHEAD or frame[:4] != magic:
        raise Refused("malformed")
    if frame[4] not in SPOKEN:
        raise Refused("version")
    key = frame[5:37]
    signature = frame[37:101]
    body = frame[OVERHEAD:]
    if int.from_bytes(frame[101:OVERHEAD], "little") != len(body):
        raise Refused("malformed")
    if (key, signature) == _UNSIGNED:
        return body, None
    if not signed_by(key, signature, frame[:5] + body):
        raise Refused("signature")
    return body, key.hex()


def open_signed(frame: bytes, magic: bytes, limit: int) -> tuple[bytes, str]:
    """The body of a frame that is signed, by whomever, and the key; else as `open_frame`."""
    body, key = open_frame(frame, magic, limit)
    if key is None:
        raise Refused("signature")
    return body, key


def open_by(key: str, frame: bytes, magic: bytes, limit: int) -> bytes:
    """The body of a frame that this key has signed, and no other."""
    body, found = open_signed(frame, magic, limit)
    if found != key:
        raise Refused("signature")
    return body


def parsed(body: bytes, read: Callable[[bytes], Any], write: Callable[[Any], bytes]) -> Any:
    """What `read` makes of the body, if `write` makes the same body of it; else
    Refused("malformed"), whatever went wrong.
    """
    try:
        value = read(body)
        if write(value) == body:
            return value
    except (
        Exception
    ):  # bytes from outside: whatever a parser complains of, none of it may get through
        pass
    raise Refused("malformed")
