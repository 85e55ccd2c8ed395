"""Key files: a private key is 64 hexadecimal digits and a line feed, in a file for its owner alone
that is never written over.
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
    """A new key that signs, in a new file."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    made = Ed25519PrivateKey.generate()
    with new_files(path.parent, {path.name: key_text(made)}, mode=0o777):
        return made


def read_key(path: str | Path) -> Ed25519PrivateKey:
    """The key that signs in this file; BadInput where there is none."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(_bytes(path))


def read_opening_key(path: str | Path) -> X25519PrivateKey:
    """The key that opens boxes in this file; BadInput where there is none."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(_bytes(path))


def key_text(key: Ed25519PrivateKey | X25519PrivateKey) -> str:
    """What the file of this private key holds."""
    return key.private_bytes_raw().hex() + "\n"


def public(key: Ed25519PrivateKey | X25519PrivateKey) -> str:
    """The public half, as policies, rosters and cards name it."""
    return key.public_key().public_bytes_raw().hex()


def _bytes(path: str | Path) -> bytes:
    try:
        found = bytes.fromhex(Path(path).read_text("ascii").strip())
    except OSError as error:
        raise BadInput(
            f"the key file {path} cannot be read: {error.strerror}; restore it"
        ) from None
    except ValueError:
        found = b""
    if len(found) != 32:
        raise BadInput(f"the key file {path} must hold 64 hexadecimal digits; restore it")
    return found
