"""The one Flower app that a silo's node runs, and the silo's own signature for the app.

The app has no code: it names `client` and `server` of the installed silodp. A silo signs the app
that its own installation makes, with a key that is thrown away. Its node trusts that key alone
(`--trusted-entities`). So Flower itself refuses every other app that a server sends.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import time
import zipfile
from functools import cache

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

NAME = "silodp-courier"
VERSION = "2.0.0"
SPEC = f"@silodp/{NAME}=={VERSION}"
"""How a run names the app. With its version, so that Flower keeps no older signatures of it."""
MANIFEST = f"""[project]
name = "{NAME}"
version = "{VERSION}"
description = "Carries frames; the code is the installed silodp's own."
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "silodp"
[tool.flwr.app.components]
serverapp = "silodp.wire.flower.app:server"
clientapp = "silodp.wire.flower.app:client"
""".encode()


@cache
def bundle() -> bytes:
    """Return the app as Flower's zip file. It is not compressed, so that all copies are equal."""
    content = f"pyproject.toml,{hashlib.sha256(MANIFEST).hexdigest()},{8 * len(MANIFEST)}".encode()
    with io.BytesIO() as file:
        with zipfile.ZipFile(file, "w") as packed:
            for name, text in (("pyproject.toml", MANIFEST), (".info/CONTENT", content)):
                packed.writestr(zipfile.ZipInfo(name), text)
        return file.getvalue()


def sign() -> tuple[str, str]:
    """Sign the app with a new key. Return the trusted entities, as a file for Flower's node, and
    the signature as one word for the server's operator.

    The key is thrown away, so it signs nothing else.
    """
    key = Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    name = f"silodp_{hashlib.sha256(public).hexdigest()[:32]}"
    now = int(time.time())
    # Flower's form of what is signed: the time in 8 bytes, and the app's hash.
    signed = key.sign(now.to_bytes(8, "big") + hashlib.sha256(bundle()).digest())
    # The file is YAML, which includes JSON.
    trusted = json.dumps({name: public.decode()})
    return trusted, f"{name}.{now}.{base64.urlsafe_b64encode(signed).decode()}"


def verification(word: str) -> dict[str, object]:
    """Return the signature of `sign` in the form of Flower's app store. Raise ValueError for any
    other text.
    """
    name, now, signed = word.split(".")
    return {"public_key_id": name, "signed_at": int(now), "signature": signed}
