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

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)

from silodp.core.errors import Refused

VERSION = 4

PACKED = 3
COMMON = 2
"""The version of every frame that version 3 has not changed."""
SPOKEN = (COMMON, PACKED, VERSION)
OVERHEAD = 4 + 1 + 32 + 64 + 8
_UNSIGNED = bytes(32), bytes(64)


def signed_by(key: bytes, signature: bytes, content: bytes) -> bool:
    """Return whether an Ed25519 key signed the content.

    Return False also for bytes that are not a key or not a signature.
    """
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, content)
    except (InvalidSignature, ValueError):
        return False
    return True


def sign_frame(
    magic: bytes,
    version: int,
    body: bytes | Sequence[bytes | memoryview],
    private_key: Ed25519PrivateKey | None,
) -> bytes:
    """Return the frame of a body, or of the pieces of a body.

    It is signed if there is a key. Nothing in it is encrypted.
    """
    signed = magic + version.to_bytes(1)
    if isinstance(body, bytes):
        pieces: Sequence[bytes | memoryview] = (body,)
    else:
        pieces = body
    key, signature = _UNSIGNED
    if private_key is not None:
        key = private_key.public_key().public_bytes_raw()
        signature = private_key.sign(b"".join((signed, *pieces)))
    return b"".join((signed, key, signature, sum(map(len, pieces)).to_bytes(8, "little"), *pieces))


def open_frame(frame: bytes, magic: bytes, limit: int) -> tuple[bytes, str | None]:
    """Return the body of a frame and the key that signed it.

    The key is None for the all-zero key and signature of an unsigned frame. Raise Refused("size" |
    "malformed" | "version" | "signature") on any other bytes.
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
    """Return the body of a signed frame and the key, which may be any key.

    Raise Refused("signature") if it is unsigned, and otherwise as `open_frame` does.
    """
    body, key = open_frame(frame, magic, limit)
    if key is None:
        raise Refused("signature")
    return body, key


def open_by(key: str, frame: bytes, magic: bytes, limit: int) -> bytes:
    """Return the body of a frame that this key has signed.

    Raise Refused("signature") for another key, and otherwise as `open_signed` does.
    """
    body, signer = open_signed(frame, magic, limit)
    if signer != key:
        raise Refused("signature")
    return body


def parsed(body: bytes, read: Callable[[bytes], Any], write: Callable[[Any], bytes]) -> Any:
    """Return what `read` makes of the body.

    Raise Refused("malformed") on any error, or if `write` makes another body of that value.
    """
    try:
        value = read(body)
        if write(value) == body:
            return value
    except Exception:
        # These bytes come from outside. A parser can raise anything, and nothing of it may leave
        # the gate.
        pass
    raise Refused("malformed")
