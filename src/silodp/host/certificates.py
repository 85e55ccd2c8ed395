"""The certificates in a folder: whose, valid to when, and a sentence for those that expire soon."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

SOON = 60
"""Days before its end from which on a certificate is warned of."""


def certificates(folder: Path) -> list[dict[str, Any]]:
    """Every certificate in the folder, once: subject, until (a day), days (left, negative once it
    has expired), sha256.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    found = {}
    for path in sorted([*folder.rglob("*.crt"), *folder.rglob("*.pem")]) if folder.exists() else ():
        with contextlib.suppress(ValueError, OSError):
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
            subject = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
            digest = certificate.fingerprint(hashes.SHA256()).hex()
            if subject:
                name = str(subject[0].value)
            else:
                name = path.name
            until = certificate.not_valid_after_utc
            found[digest] = {
                "subject": name,
                "until": until.date().isoformat(),
                "days": (until - datetime.now(UTC)).days,
                "sha256": digest,
            }
    return list(found.values())


def expiring(folder: Path, soon: int = SOON) -> list[str]:
    """A sentence for each certificate that has expired, or will within so many days."""
    said = []
    for one in sorted(certificates(folder), key=lambda one: one["days"]):
        if one["days"] < soon:
            if one["days"] >= 0:
                when = f"expires in {one['days']} days"
            else:
                when = "has expired"
            said.append(
                f"the certificate of {one['subject']} {when}, on {one['until']}; the "
                "server's operator renews it: silodp federation renew"
            )
    return said
