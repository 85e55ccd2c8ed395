"""Pairwise masks: a silo's numbers plus, for every other member of the cohort, a pseudorandom
vector that the two of them share; their sum is the total.

Of two members the one with the smaller identity adds the vector of the pair and the other subtracts
it, modulo 2^32 or 2^64, so over the whole cohort they cancel. Any set of answers that lacks an
honest member's is pseudorandom without that member's keys (X25519 as a random oracle's
Diffie-Hellman, HKDF, ChaCha20): what is promised of masked totals is computational differential
privacy.

A member is an Ed25519 identity, which officers have pinned, and an X25519 key, which its gate made
for one answer and keeps in memory alone; the identity signs the key, for one problem, run and epoch
(one life of the gate's process). The table of the cohort is in the query, and the query's digest in
every pair's key, so two members share a vector only if they saw one and the same question: same
table, noise, point, clip, round, attempt.

Bytes, all fixed, with vectors in docs/vectors/masks.json. A row of the table is  identity (32) |
epoch (16) | key (32) | signature (64) | records (8, little-endian); rows stand in rising order of
identities. The pair's key is HKDF-SHA256 of the shared secret with the digest as salt and _PAIR |
smaller identity | larger | key of the smaller | key of the larger  as info; its vector is the
ChaCha20 key stream with nonce and counter 0, words little-endian, word i for coordinate i.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from silodp.core.errors import BadInput, Refused
from silodp.core.mechanisms.masked import MODULUS_BITS
from silodp.core.protocol.frames import signed_by

_KEY = b"silodp masks 1 key"
_PAIR = b"silodp masks 1 pair"
_ROW = struct.Struct("<32s16s32s64sQ")
ROW = _ROW.size
EPOCH = 16
MODULI = {bits: np.dtype(f"<u{bits // 8}") for bits in MODULUS_BITS}
"""Bits of the modulus, and the words that are added modulo 2 to the power of it."""
MOST_RECORDS = 2**53


@dataclass(frozen=True)
class Row:
    """A member of a cohort: who it is, the key that it made for this run and its next answer, and
    how many records it contributes.
    """

    identity: bytes
    epoch: bytes
    key: bytes
    signature: bytes
    records: int = 0


# --- keys and the table --------------------------------------------------------------------------


def offered(
    identity: Ed25519PrivateKey, own: X25519PrivateKey, *, definition: str, run: str, epoch: bytes
) -> Row:
    """Return the row of a member that has made the key `own` for this run, signed by its identity;
    its records follow from a query.
    """
    row = Row(
        identity.public_key().public_bytes_raw(),
        epoch,
        own.public_key().public_bytes_raw(),
        bytes(64),
    )
    return replace(row, signature=identity.sign(_statement(row, definition, run)))


def is_signed(row: Row, *, definition: str, run: str) -> bool:
    """Return whether the identity itself has signed this key, for this problem, run and epoch."""
    try:
        return signed_by(row.identity, row.signature, _statement(row, definition, run))
    except ValueError:
        return False


def _statement(row: Row, definition: str, run: str) -> bytes:
    if len(row.identity) != 32 or len(row.epoch) != EPOCH or len(row.key) != 32:
        raise BadInput("an identity and a key have 32 bytes, and an epoch 16")
    return (
        _KEY
        + bytes.fromhex(definition)
        + hashlib.sha256(run.encode()).digest()
        + row.epoch
        + row.identity
        + row.key
    )


def write_table(rows: Iterable[Row]) -> bytes:
    """Return the one spelling of a cohort."""
    ordered = sorted(rows, key=lambda row: row.identity)
    return b"".join(
        _ROW.pack(row.identity, row.epoch, row.key, row.signature, row.records) for row in ordered
    )


def read_table(raw: bytes) -> tuple[Row, ...]:
    """Return rows in strictly rising order of identities, so that no member is in a cohort twice.

    Each row has records. Raise Refused("cohort") for any other bytes.
    """
    if len(raw) % ROW == 0:
        rows = tuple(Row(*fields) for fields in _ROW.iter_unpack(raw))
    else:
        rows = ()
    rising = all(a.identity < b.identity for a, b in itertools.pairwise(rows))
    if (
        len(rows) < 2
        or not rising
        or len({row.key for row in rows}) < len(rows)
        or not all(0 < r.records < MOST_RECORDS for r in rows)
    ):
        raise Refused("cohort")
    return rows


def modulus_for(largest: float) -> int:
    """Return the fewest bits in which no total of either sign and up to `largest` wraps around."""
    for bits in MODULI:
        if largest < 2 ** (bits - 1):
            return bits
    raise BadInput(
        f"a total may reach {largest:.3g}, more than 64 bits hold; use less noise or fewer records"
    )


# --- masks ---------------------------------------------------------------------------------------


def pair_key(secret: bytes, mine: Row, other: Row, digest: str) -> bytes:
    """Return the key of one pair's vector for one question, the same at both ends."""
    low, high = sorted((mine, other), key=lambda row: row.identity)
    info = _PAIR + low.identity + high.identity + low.key + high.key
    return HKDF(SHA256(), length=32, salt=bytes.fromhex(digest), info=info).derive(secret)


def stream(key: bytes, dimension: int, modulus: int) -> np.ndarray:
    """Return the vector of this key: uniform words, one for each coordinate."""
    words = MODULI[modulus]
    zeros = bytes(dimension * words.itemsize)
    return np.frombuffer(Cipher(ChaCha20(key, bytes(16)), None).encryptor().update(zeros), words)


def secret_with(own: X25519PrivateKey, other: Row) -> bytes:
    """Return what the two keys share; Refused("cohort") where that would be all zero: the other's
    is a point of small order.
    """
    try:
        return own.exchange(X25519PublicKey.from_public_bytes(other.key))
    except ValueError:
        raise Refused("cohort") from None


def masked(
    numbers: np.ndarray,
    own: X25519PrivateKey,
    mine: Row,
    rows: Sequence[Row],
    digest: str,
    modulus: int,
) -> bytes:
    """Return the numbers, plus the vectors of the pairs in which `mine` comes first and minus those
    in which it comes second, as words.

    Refused("cohort") where `mine` is not one of the rows or another's key has no secret with this
    one (a point of small order).
    """
    if mine not in rows or own.public_key().public_bytes_raw() != mine.key:
        raise Refused("cohort")
    words = np.ascontiguousarray(numbers).astype(MODULI[modulus])
    for other in rows:
        if other.identity != mine.identity:
            vector = stream(
                pair_key(secret_with(own, other), mine, other, digest), len(words), modulus
            )
            if mine.identity < other.identity:
                words = words + vector
            else:
                words = words - vector
    return words.tobytes()


def add_masked(answers: Iterable[bytes], modulus: int) -> np.ndarray:
    """Return the sum modulo 2^modulus, of either sign (int64): the total, if these are the answers
    of a whole cohort, and else noise.
    """
    words = (np.frombuffer(answer, MODULI[modulus]) for answer in answers)
    total = functools.reduce(np.add, words)
    return total.view(f"<i{modulus // 8}").astype(np.int64)
