"""Read and write key files.

A private key is 64 hexadecimal digits and a line feed, in a file for its owner alone. A key file is
never overwritten.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from silodp.core.errors import BadInput
from silodp.host.atomic import new_files

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey


def make_key(path: Path) -> Ed25519PrivateKey:
    """Return a new signing key, and write it to a new file. Raise BadInput if the path exists."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    with new_files(path.parent, {path.name: key_text(key)}, mode=0o777):
        return key


def read_key(path: str | Path) -> Ed25519PrivateKey:
    """Return the signing key in this file. Raise BadInput if there is none."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(_bytes(path))


def read_opening_key(path: str | Path) -> X25519PrivateKey:
    """Return the key in this file that opens boxes. Raise BadInput if there is none."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(_bytes(path))


def key_text(key: Ed25519PrivateKey | X25519PrivateKey) -> str:
    """Return the content of the file of this private key."""
    return key.private_bytes_raw().hex() + "\n"


def public(key: Ed25519PrivateKey | X25519PrivateKey) -> str:
    """Return the public key in hexadecimal, as policies, rosters and cards list it."""
    return key.public_key().public_bytes_raw().hex()


def _bytes(path: str | Path) -> bytes:
    try:
        key = bytes.fromhex(Path(path).read_text("ascii").strip())
    except OSError as error:
        raise BadInput(
            f"the key file {path} cannot be read: {error.strerror}; restore it"
        ) from None
    except ValueError:
        key = b""
    if len(key) != 32:
        raise BadInput(f"the key file {path} must contain 64 hexadecimal digits; restore it")
    return key
