"""`silodp export evidence`: one signed archive about a run, for readers without access to this
machine.

The archive is a zip file whose bytes follow from its content: members in order, stored, with fixed
times. `manifest.json` lists the SHA-256 of every other member. `manifest.sig` is an Ed25519
signature of the manifest. Verification packs the content again and compares all bytes. So any
changed byte is detected, including bytes that readers of zip files skip.
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
"""What a manifest contains of the run. Each is a name that the reader sees."""


@dataclass(frozen=True)
class Evidence:
    """The content of an archive whose signature and hashes are all correct."""

    key: str
    """The public key that signed it, in hex. The reader must confirm its owner over another
    channel.
    """
    about: dict[str, Any]
    files: dict[str, bytes]


def pack(files: Mapping[str, bytes], about: Mapping[str, Any], key: Ed25519PrivateKey) -> bytes:
    """Return the signed archive of these files, with the public facts `about` in its manifest."""
    manifest = {
        "format": 1,
        **about,
        "key": key.public_key().public_bytes_raw().hex(),
        "files": {name: _described(raw) for name, raw in sorted(files.items())},
    }
    raw = (json.dumps(manifest, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()
    return _zipped({**files, MANIFEST: raw, SIGNATURE: key.sign(LABEL + raw).hex().encode()})


def verify(raw: bytes, key: str | None = None) -> Evidence:
    """Return the content of the archive.

    Raise BadInput if any byte differs from what was signed, or if `key` did not sign it.
    """
    from silodp.core.protocol.frames import signed_by

    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            if sum(member.file_size for member in archive.infolist()) > LIMIT:
                raise BadInput(
                    f"the archive would unpack to more than {LIMIT} bytes; `silodp "
                    "export evidence` writes none as large"
                )
            members = {member.filename: archive.read(member) for member in archive.infolist()}
        manifest = members[MANIFEST]
        signature = bytes.fromhex(members[SIGNATURE].decode("ascii"))
        about = json.loads(manifest)
        files = dict(about.pop("files"))
        signer = str(about.pop("key"))
        if not signed_by(bytes.fromhex(signer), signature, LABEL + manifest):
            raise BadInput(
                "the manifest is not what was signed: the archive was changed; trust nothing in it"
            )
    except BadInput:
        raise
    except Exception:
        raise BadInput(
            "this is not an archive of `silodp export evidence`, or it is damaged; ask for it again"
        ) from None
    if about.get("format") != 1:
        raise BadInput(
            f"the archive has format {visible(about.get('format'), 40)}, but this "
            "silodp reads only format 1; use a later silodp"
        )
    for what in ABOUT:
        check_name(f"the archive's {what}", about.get(what))
    for name in (signer, *files):
        check_name("a name in the archive", name)
    if key is not None and signer != key.lower():
        raise BadInput(f"the archive is signed by {signer}, not by the key that you expect")
    contents = {
        name: content for name, content in members.items() if name not in (MANIFEST, SIGNATURE)
    }
    if contents.keys() != files.keys():
        raise BadInput(
            "the archive and its manifest list different files: "
            f"{', '.join(sorted(contents.keys() ^ files.keys()))}"
        )
    for name, content in contents.items():
        if files[name] != _described(content):
            raise BadInput(f"{name} is not what was signed: the archive has been changed")
    if _zipped(members) != raw:
        raise BadInput("the archive contains unsigned bytes, between or after its files")
    return Evidence(signer, about, contents)


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
