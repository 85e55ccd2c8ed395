"""`silodp export evidence`: one signed archive about a run, for whoever must believe it without
this machine.

The archive is a zip file whose bytes follow from its content: members in order, stored, with fixed
times. `manifest.json` lists every other member's SHA-256, and `manifest.sig` is an Ed25519
signature of the manifest. Opening packs the content again and compares all bytes, so that no byte
can be changed unnoticed, those that no reader of zip files looks at among them.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from silodp.core.errors import BadInput
from silodp.core.text import check_name, visible

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

LABEL = b"silodp evidence 1\n"
MANIFEST = "manifest.json"
SIGNATURE = "manifest.sig"
LIMIT = 256 * 2**20
ABOUT = ("run", "kind", "made", "silodp")
"""What a manifest has of the run, each a name that is shown to the reader."""


@dataclass(frozen=True)
class Evidence:
    """What an archive holds, once its signature and every hash have been found right."""

    key: str
    """The public key that signed it, in hex: whose it is, is for the reader to find out by another
    way.
    """
    about: dict[str, Any]
    files: dict[str, bytes]


def pack(files: Mapping[str, bytes], about: Mapping[str, Any], key: Ed25519PrivateKey) -> bytes:
    """The archive of these files, with these public facts in its manifest, signed."""
    manifest = {
        "format": 1,
        **about,
        "key": key.public_key().public_bytes_raw().hex(),
        "files": {name: _described(raw) for name, raw in sorted(files.items())},
    }
    raw = (json.dumps(manifest, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()
    return _zipped({**files, MANIFEST: raw, SIGNATURE: key.sign(LABEL + raw).hex().encode()})


def verify(raw: bytes, key: str | None = None) -> Evidence:
    """What the archive holds; BadInput says what is wrong with one that is not exactly as it was
    signed, or not by `key`.
    """
    from silodp.core.protocol.frames import signed_by

    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            if sum(member.file_size for member in archive.infolist()) > LIMIT:
                raise BadInput(
                    f"the archive would unpack to more than {LIMIT} bytes; it is none of "
                    "`silodp export evidence`"
                )
            members = {member.filename: archive.read(member) for member in archive.infolist()}
        manifest = members[MANIFEST]
        signature = bytes.fromhex(members[SIGNATURE].decode("ascii"))
        about = json.loads(manifest)
        files = dict(about.pop("files"))
        signer = str(about.pop("key"))
        if not signed_by(bytes.fromhex(signer), signature, LABEL + manifest):
            raise BadInput(
                "the manifest is not what was signed: the archive has been changed, and "
                "nothing in it can be believed"
            )
    except BadInput:
        raise
    except Exception:
        raise BadInput(
            "this is no archive of `silodp export evidence`, or a damaged one; ask for it again"
        ) from None
    if about.get("format") != 1:
        raise BadInput(
            f"the archive has format {visible(about.get('format'), 40)}, and this silodp reads "
            "format 1; use a later one"
        )
    for what in ABOUT:
        check_name(f"the archive's {what}", about.get(what))
    for name in (signer, *files):
        check_name("a name in the archive", name)
    if key is not None and signer != key.lower():
        raise BadInput(f"the archive is signed by {signer}, not by the key that you expect")
    held = {name: content for name, content in members.items() if name not in (MANIFEST, SIGNATURE)}
    if held.keys() != files.keys():
        raise BadInput(
            "the archive does not hold the files of its manifest: "
            f"{', '.join(sorted(held.keys() ^ files.keys()))}"
        )
    for name, content in held.items():
        if files[name] != _described(content):
            raise BadInput(f"{name} is not what was signed: the archive has been changed")
    if _zipped(members) != raw:
        raise BadInput("the archive holds bytes that were not signed, between or after its files")
    return Evidence(signer, about, held)


def _described(content: bytes) -> dict[str, Any]:
    """Return what a manifest has of one file."""
    return {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}


def _zipped(members: Mapping[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, raw in sorted(members.items()):
            member = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            member.create_system, member.external_attr = 3, 0o644 << 16
            archive.writestr(member, raw)
    return out.getvalue()
