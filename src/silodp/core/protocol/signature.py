"""Verify Ed25519 signatures."""

from __future__ import annotations

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey


def signed_by(key: bytes, signature: bytes, content: bytes) -> bool:
    """Return whether the key signed the content.

    Return False also for bytes that are not an Ed25519 key or not a signature.
    """
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, content)
    except (InvalidSignature, ValueError):
        return False
    return True
