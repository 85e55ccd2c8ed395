"""What a silo sends through a shuffler: its integers, signed under a pseudonym and sealed so that
only the shuffler can read them.

The plain text is  magic (4) | version (1) | round (32) | demanded (8) | d (8) | numbers (8 d) | key
(32) | signature (64), integers little-endian, the numbers signed, the signature (Ed25519) over all
before the key. It is sealed by HPKE (RFC 9180, base mode: X25519, HKDF-SHA256,
ChaCha20-Poly1305) with the round as its info. Its length is a function of d alone.

A round is the SHA-256 of the question without the silo's own query id, so contributions to one
round answer one question: same point, same clip, same share of noise. `demanded` is the silo's
condition: its numbers may leave the shuffler only inside a total of at least so many silos. The
key is a pseudonym on the shuffler's roster: it shows that a contribution comes from a member, and
not which.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from silodp.core.errors import Refused
from silodp.core.protocol.frames import signed_by

_MAGIC = b"SDPC\x02"
_INFO = b"silodp shuffle 1 "
_HEAD = struct.Struct("<5s32sQQ")
_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)
_ENCRYPTION = 32 + 16  # HPKE's encapsulated key and tag


@dataclass(frozen=True, eq=False)
class Contribution:
    """One silo's numbers for one round, and of how many silos a total with them must be."""

    round: str
    demanded: int

    numbers: np.ndarray  # (d,), int64


def box_length(dimension: int) -> int:
    """Return the bytes of a box of so many coordinates."""
    return _ENCRYPTION + _HEAD.size + 8 * dimension + 32 + 64


def encrypt_box(contribution: Contribution, shuffler: str, pseudonym: Ed25519PrivateKey) -> bytes:
    """Sign the contribution by the pseudonym, encrypt it, and return the box.

    Only the shuffler with this X25519 public key (hex) can open the box.
    """
    c = contribution
    head = _HEAD.pack(_MAGIC, bytes.fromhex(c.round), c.demanded, len(c.numbers))
    signed = head + np.ascontiguousarray(c.numbers, "<i8").tobytes()
    plain = signed + pseudonym.public_key().public_bytes_raw() + pseudonym.sign(signed)
    return _SUITE.encrypt(
        plain,
        X25519PublicKey.from_public_bytes(bytes.fromhex(shuffler)),
        _INFO + bytes.fromhex(c.round),
    )


def open_box(box: bytes, round: str, private_key: X25519PrivateKey) -> tuple[Contribution, str]:
    """Return the contribution and the pseudonym's public key in hex.

    Raise Refused("malformed" | "signature") on any other bytes.
    """
    try:
        plain = _SUITE.decrypt(box, private_key, _INFO + bytes.fromhex(round))
    except (InvalidTag, ValueError):
        raise Refused("malformed") from None
    if len(plain) < _HEAD.size + 96:
        raise Refused("malformed")
    magic, name, demanded, dimension = _HEAD.unpack_from(plain)
    signed = plain[:-96]
    key = plain[-96:-64]
    signature = plain[-64:]
    if (
        magic != _MAGIC
        or name.hex() != round
        or len(signed) != _HEAD.size + 8 * dimension
        or not dimension
    ):
        raise Refused("malformed")
    if not signed_by(key, signature, signed):
        raise Refused("signature")
    numbers = np.frombuffer(signed, "<i8", offset=_HEAD.size).astype(np.int64)
    if not 0 < demanded < 2**53:
        raise Refused("malformed")
    return Contribution(round, demanded, numbers), key.hex()


def add_numbers(numbers: Sequence[np.ndarray]) -> np.ndarray:
    """Return one total for each coordinate, modulo 2^64. The separate integers end here."""
    return np.stack(numbers).sum(axis=0, dtype=np.int64)
