"""Whether a key signed something."""

from __future__ import annotations

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey


def signed_by(key: bytes, signature: bytes, content: bytes) -> bool:
    """False too for bytes that are no Ed25519 key or no signature."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, content)
    except (InvalidSignature, ValueError):
        return False
    return True
