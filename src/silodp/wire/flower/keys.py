"""The keys of a Flower federation: a silo's node key, a CA, and the server's certificate from the
CA.
"""

from __future__ import annotations

import datetime
import ipaddress
import secrets
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from silodp.host.atomic import write
from silodp.wire.flower.bundle import sign

_PLAIN = serialization.NoEncryption()
ISSUER = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "silodp federation CA")])
AUTHORITY_DAYS = 3650
"""Days for which the CA is valid. The server's certificate is shorter, and is renewed by the CA."""


def key(folder: Path) -> None:
    """Make a silo's folder: a node key, the secret of its own worker, and the entities that its
    node trusts.

    node.pub goes to the server's operator. Its comment is the silo's signature for the app.
    """
    folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    node = ec.generate_private_key(ec.SECP384R1())
    trusted, signature = sign()
    write(
        folder / "node.key",
        node.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, _PLAIN),
    )
    write(
        folder / "node.pub",
        node.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
        + f" {signature}\n".encode(),
    )
    write(folder / "trusted.yaml", trusted)
    write(folder / "secret", secrets.token_bytes(32))


def certify(folder: Path, host: str, days: int) -> None:
    """Make a CA (ca.pem, ca.key), and the server's certificate (server.pem, server.key).

    The certificate is valid for `days` days, for `host` and loopback.
    """
    authority = ec.generate_private_key(ec.SECP256R1())
    identifier = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    extensions = (
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (_usage(key_cert_sign=True), True),
        (identifier, False),
    )
    certificate = _issue(authority, ISSUER, authority, AUTHORITY_DAYS, *extensions)
    _keep(folder, "ca", authority, certificate)
    renew(folder, host, days)


def renew(folder: Path, host: str, days: int = 365) -> None:
    """Make a new certificate of the server, from the CA that silos have already. Nothing changes
    for silos.
    """
    authority: Any = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    holder = ec.generate_private_key(ec.SECP256R1())
    names: list[x509.GeneralName] = [
        x509.DNSName("localhost"),
        x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
    ]
    try:
        names.append(x509.IPAddress(ipaddress.ip_address(host)))
    except ValueError:
        names.append(x509.DNSName(host))
    identifier = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    server = _issue(
        authority,
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)]),
        holder,
        days,
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage(digital_signature=True), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.SubjectAlternativeName(names), False),
        (x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), False),
    )
    _keep(folder, "server", holder, server)


def host_of(folder: Path) -> str:
    """Return the host of the server's certificate."""
    certificate = x509.load_pem_x509_certificate((folder / "server.pem").read_bytes())
    return str(certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def _issue(
    authority: ec.EllipticCurvePrivateKey,
    name: x509.Name,
    holder: ec.EllipticCurvePrivateKey,
    days: int,
    *more: tuple[x509.ExtensionType, bool],
) -> bytes:
    """Return a certificate from the CA, in PEM."""
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(ISSUER)
        .public_key(holder.public_key())
    )
    # The start is two days ago, for machines with a slow clock.
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(
        now - datetime.timedelta(days=2)
    )
    builder = builder.not_valid_after(now + datetime.timedelta(days=days))
    for extension, critical in more:
        builder = builder.add_extension(extension, critical)
    return builder.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _keep(folder: Path, name: str, holder: ec.EllipticCurvePrivateKey, certificate: bytes) -> None:
    """Write a key and its certificate."""
    write(
        folder / f"{name}.key",
        holder.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, _PLAIN),
    )
    write(folder / f"{name}.pem", certificate)


def _usage(**used: bool) -> x509.KeyUsage:
    """Return the usage of a key: the named uses, and no others."""
    every = (
        "digital_signature",
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "key_cert_sign",
    )
    return x509.KeyUsage(
        **{
            name: used.get(name, False)
            for name in (*every, "crl_sign", "encipher_only", "decipher_only")
        }
    )
