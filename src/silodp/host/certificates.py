"""List the certificates in a folder, and warn of those that expire soon."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

SOON = 60
"""Days before a certificate's end from which on `expiring` warns of it."""


def certificates(folder: Path) -> list[dict[str, Any]]:
    """Return every certificate in the folder, each once.

    Each has a subject, `until` (a day), `days` left (negative after its end) and `sha256`.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    if not folder.exists():
        return []
    by_digest = {}
    for path in sorted([*folder.rglob("*.crt"), *folder.rglob("*.pem")]):
        with contextlib.suppress(ValueError, OSError):
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
            subject = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
            digest = certificate.fingerprint(hashes.SHA256()).hex()
            if subject:
                name = str(subject[0].value)
            else:
                name = path.name
            until = certificate.not_valid_after_utc
            by_digest[digest] = {
                "subject": name,
                "until": until.date().isoformat(),
                "days": (until - datetime.now(UTC)).days,
                "sha256": digest,
            }
    return list(by_digest.values())


def expiring(folder: Path, soon: int = SOON) -> list[str]:
    """Return a sentence for each certificate that has expired or will within `soon` days."""
    sentences = []
    for certificate in sorted(certificates(folder), key=lambda each: each["days"]):
        days = certificate["days"]
        if days < soon:
            if days >= 0:
                when = f"expires in {days} days"
            else:
                when = "has expired"
            sentences.append(
                f"the certificate of {certificate['subject']} {when}, on {certificate['until']}; "
                "the server's operator renews it: silodp federation renew"
            )
    return sentences
