"""Members with pseudonyms, a server and a shuffler's keys for tests of the shuffler: everything but
the process.
"""

import hashlib

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from silodp.core.protocol.box import Contribution, encrypt_box
from silodp.core.protocol.relay import Outcome, Request, decode_outcome, encode_request
from silodp.host.keys import public
from silodp.shuffler.door import ShufflerDoor
from silodp.shuffler.pool import Pool
from silodp.shuffler.store import RoundStore

SERVER, STRANGER, SIGN, *MEMBERS = (
    Ed25519PrivateKey.from_private_bytes(bytes([i]) * 32) for i in range(1, 9)
)
SEAL = X25519PrivateKey.from_private_bytes(bytes([9]) * 32)
ROSTER = [public(member) for member in MEMBERS]
ROUND, OTHER = "ab" * 32, "cd" * 32
DIMENSION = 6


def numbers_of(member: int) -> np.ndarray:
    """Large numbers that nothing else on a disk would be by chance."""
    random = np.random.default_rng(member)
    return random.integers(2**24, 2**26, DIMENSION) * random.choice((-1, 1), DIMENSION)


def box(member: int | Ed25519PrivateKey, round: str = ROUND, *, key: str = "", **changes) -> bytes:
    """A member's box, which demands a total of three silos."""
    own = isinstance(member, int)
    fields = {"demanded": 3, "numbers": numbers_of(member if own else 99)}
    return encrypt_box(
        Contribution(round, **fields | changes),
        key or public(SEAL),
        MEMBERS[member] if own else member,
    )


def request(*boxes: bytes, round: str = ROUND) -> Request:
    return Request(round, DIMENSION, boxes)


def frame(*boxes: bytes, round: str = ROUND, key: Ed25519PrivateKey = SERVER) -> bytes:
    return encode_request(request(*boxes, round=round), key)


def outcome(raw: bytes) -> Outcome:
    return decode_outcome(raw, limit=2**20, shuffler_key=public(SIGN))


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def pool() -> Pool:
    return Pool(SEAL, ROSTER)


def door(store: RoundStore, **changes) -> ShufflerDoor:
    return ShufflerDoor(
        pool(),
        store,
        **{"key": SIGN, "askers": [public(SERVER)], "rounds_per_hour": 1000, "limit": 2**20}
        | changes,
    )
