"""A federation's certificates by NVFlare's own provisioner: kits for all silos, for one more silo,
and new certificates before the old ones expire, all under one authority.

folder/authority has root.pem, root.key and federation.json, the record of what was provisioned.
Anyone with root.key can add a silo, so keep it offline. folder/kits has the kits to hand out. The
same authority issues the certificates of added silos and renewed certificates, so the certificates
of others do not change.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

from silodp.core.errors import BadInput
from silodp.host.atomic import write

PROJECT = "silodp"
SERVER = "server"
ADMIN = "admin@silodp.org"
ORG = "silodp"
REMOVED = "disabled_clients.json"
"""The file of the server's kit in which NVFlare records the silos that it no longer admits."""
START = "sub_start.sh"
"""The script of a kit that starts its engine. With --once the engine runs in the foreground, as one
process.
"""
DAYS = 360
"""Days for which NVFlare's certificates are valid."""
AUTHORITY_DAYS = 3650
"""Days for which the authority is valid. It outlives the certificates, so that they can be renewed
one by one.
"""


def issue(folder: Path, silos: Sequence[str], *, host: str, port: int) -> None:
    """Make a new authority, and kits for the server, each silo and an administrator.

    Raise BadInput if the folder has kits already, or for a silo name that cannot be used.
    """
    _check(silos)
    if (folder / "kits").exists():
        raise BadInput(f"{folder} has kits already: choose a folder without")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    provisioned = _provisioned(folder / "authority", silos, host, port)
    shutil.move(provisioned["kits"], folder / "kits")
    # Both folders have keys, and the provisioner leaves some of them readable.
    for name in ("authority", "kits"):
        (folder / name).chmod(0o700)
    write(folder / "authority" / "root.pem", provisioned["root.pem"])
    write(folder / "authority" / "root.key", provisioned["root.key"])
    _note(folder, host, port, silos)


def add(folder: Path, silos: Sequence[str]) -> None:
    """Make kits for silos that join later, in folder/kits.

    The certificates of others do not change, and the server admits the new silos without a change.
    Raise BadInput for a name that is in use or was used.
    """
    _check(silos)
    federation = _federation(folder)
    host = federation["host"]
    port = federation["port"]
    if used := sorted(set(silos) & {*federation["silos"], *_removed(folder)}):
        raise BadInput(
            f"{folder} has, or had, a silo {used[0]!r}: choose another name, since the "
            "old certificate stays valid until it expires"
        )
    with tempfile.TemporaryDirectory(dir=folder) as workspace:
        provisioned = _provisioned(Path(workspace), silos, host, port, _root(folder))
        for name in silos:
            shutil.move(Path(provisioned["kits"]) / name, folder / "kits" / name)
    _note(folder, host, port, [*federation["silos"], *silos])


def renew(folder: Path) -> list[str]:
    """Make a new certificate over the same key for each silo, in folder/renewed, and for the
    server, in its kit. Return the names of the silos.

    Old certificates stay valid until they expire. Keys stay in their places, so nothing secret
    travels. The server's key must stay the same: NVFlare recognises a returning client by a token
    that this key signed.
    """
    federation = _federation(folder)
    renewed = folder / "renewed"
    certificates = folder / "authority" / "certificates"
    shutil.rmtree(renewed, ignore_errors=True)
    renewed.mkdir(mode=0o700)
    for name in federation["silos"]:
        certificate = certificates / f"{name}.crt"
        write(certificate, _recertified(certificate.read_bytes(), _root(folder)))
        write(renewed / f"{name}.crt", certificate.read_bytes())
    of_server = folder / "kits" / SERVER / "startup" / "server.crt"
    write(of_server, _recertified(of_server.read_bytes(), _root(folder)))
    return list(federation["silos"])


def _recertified(certificate: bytes, root: tuple[bytes, bytes]) -> bytes:
    """Return the same certificate, valid from now on."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

    old = x509.load_pem_x509_certificate(certificate)
    authority = x509.load_pem_x509_certificate(root[0])
    key = load_pem_private_key(root[1], None)
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(
        authority.subject, old.subject, old.public_key(), x509.random_serial_number()
    ).not_valid_before(now)
    end = min(now + timedelta(days=DAYS), authority.not_valid_after_utc)
    builder = builder.not_valid_after(end)
    for extension in old.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    return builder.sign(cast(Any, key), hashes.SHA256()).public_bytes(Encoding.PEM)


def remove(folder: Path, silos: Sequence[str]) -> None:
    """Have the server admit these silos no longer, ask them nothing, and renew none of their
    certificates.

    Nothing changes for the others. Raise BadInput for an unknown silo.
    """
    federation = _federation(folder)
    if unknown := sorted(set(silos) - set(federation["silos"])):
        listed = ", ".join(federation["silos"])
        raise BadInput(f"{folder} has no silo {unknown[0]!r}; it has {listed}")
    content = json.dumps({"disabled_clients": sorted({*_removed(folder), *silos})})
    write(folder / "kits" / SERVER / REMOVED, content)
    others = [name for name in federation["silos"] if name not in silos]
    _note(folder, federation["host"], federation["port"], others)


def removed(file: Path) -> set[str]:
    """Return the silos that the server no longer admits.

    Raise OSError or ValueError if the file cannot be read, so that no silo is asked then.
    """
    if file.exists():
        return {str(name) for name in json.loads(file.read_text())["disabled_clients"]}
    return set()


def _removed(folder: Path) -> set[str]:
    """Return the silos that the server of this folder no longer admits."""
    return removed(folder / "kits" / SERVER / REMOVED)


def _check(silos: Sequence[str]) -> None:
    """Raise BadInput unless these are different names that certificates and folders can have."""
    for name in silos:
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", name) or name == SERVER:
            raise BadInput(
                f"silo name {name!r}: must be lower-case letters, digits and inner "
                f"hyphens, at most 63, and not {SERVER!r}"
            )
    if len(set(silos)) != len(silos) or not silos:
        raise BadInput(f"silos {list(silos)}: must be at least one name, each once")


def _note(folder: Path, host: str, port: int, silos: Sequence[str]) -> None:
    """Record what was provisioned, and every silo's certificate. Certificates are public, and are
    needed to renew them.
    """
    (folder / "authority" / "certificates").mkdir(mode=0o700, exist_ok=True)
    for name in silos:
        certificate = folder / "authority" / "certificates" / f"{name}.crt"
        if not certificate.exists():
            issued = folder / "kits" / name / "startup" / "client.crt"
            write(certificate, issued.read_bytes())
    write(
        folder / "authority" / "federation.json",
        json.dumps({"host": host, "port": port, "silos": list(silos)}) + "\n",
    )


def _federation(folder: Path) -> dict[str, Any]:
    """Return the record of what was provisioned. Raise BadInput if it cannot be read."""
    try:
        return json.loads((folder / "authority" / "federation.json").read_text())
    except (OSError, ValueError):
        raise BadInput(
            f"{folder}: authority/federation.json cannot be read; bring the authority's "
            "folder back, as `provision` made it"
        ) from None


def _root(folder: Path) -> tuple[bytes, bytes]:
    """Return the authority's certificate and key. Raise BadInput if they cannot be read."""
    try:
        certificate = (folder / "authority" / "root.pem").read_bytes()
        key = (folder / "authority" / "root.key").read_bytes()
        return certificate, key
    except OSError as error:
        raise BadInput(
            f"{error.filename} cannot be read: {error.strerror}; bring the authority's "
            "folder back, as `provision` made it"
        ) from None


def start_script(name: str) -> bytes:
    """Return the script by which this installation of NVFlare starts a client of this name, or the
    server.

    NVFlare's provisioner writes it. A script that comes with a kit is of another operator, who is
    not trusted.
    """
    from nvflare.lighter.constants import CtxKey
    from nvflare.lighter.impl.static_file import StaticFileBuilder
    from nvflare.lighter.impl.workspace import WorkspaceBuilder
    from nvflare.lighter.provision import prepare_project
    from nvflare.lighter.provisioner import Provisioner

    if name == SERVER:
        silos = []
    else:
        silos = [name]
    builders = [
        WorkspaceBuilder(["master_template.yml"]),
        StaticFileBuilder(config_folder="config", scheme="tcp"),
    ]
    with tempfile.TemporaryDirectory() as workspace:
        project = prepare_project(_project(silos, "localhost", 1))
        context = Provisioner(workspace, builders).provision(project, logger=_Quiet())
        return (Path(context[CtxKey.CURRENT_PROD_DIR]) / name / "startup" / START).read_bytes()


def _provisioned(
    workspace: Path,
    silos: Sequence[str],
    host: str,
    port: int,
    root: tuple[bytes, bytes] | None = None,
) -> dict[str, Any]:
    """Run NVFlare's provisioner. Return the folder of the kits, and the authority's certificate and
    key.

    `root` is an authority that exists already. Raise BadInput if NVFlare reports errors.
    """
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from nvflare.lighter.constants import CtxKey
    from nvflare.lighter.impl.cert import CertBuilder
    from nvflare.lighter.impl.signature import SignatureBuilder
    from nvflare.lighter.impl.static_file import StaticFileBuilder
    from nvflare.lighter.impl.workspace import WorkspaceBuilder
    from nvflare.lighter.provision import prepare_project
    from nvflare.lighter.provisioner import Provisioner
    from nvflare.lighter.utils import serialize_cert, serialize_pri_key

    builders = [
        WorkspaceBuilder(["master_template.yml"]),
        StaticFileBuilder(config_folder="config", scheme="tcp"),
    ]
    builders += [CertBuilder(root_valid_days=AUTHORITY_DAYS), SignatureBuilder()]
    project = prepare_project(_project(silos, host, port))
    if root:
        project.serialized_root_cert = root[0]
        project.root_private_key = load_pem_private_key(root[1], password=None)
    context = Provisioner(str(workspace), builders).provision(project, logger=_Quiet())
    if context.get(CtxKey.BUILD_ERROR):
        raise BadInput(
            f"{workspace}: NVFlare could not provision it: "
            f"{'; '.join(map(str, context.get(CtxKey.ERRORS) or ()))}"
        )
    return {
        "root.pem": serialize_cert(context[CtxKey.ROOT_CERT]),
        "root.key": serialize_pri_key(context[CtxKey.ROOT_PRI_KEY]),
        "kits": context[CtxKey.CURRENT_PROD_DIR],
    }


def _project(silos: Sequence[str], host: str, port: int) -> dict[str, Any]:
    """Return a project for NVFlare's provisioner: the server, these silos, an administrator."""
    server = {"default_host": host, "fed_learn_port": port, "admin_port": port}
    people = [{"name": SERVER, "type": "server", "org": ORG} | server]
    people += [{"name": name, "type": "client", "org": ORG} for name in silos]
    people += [{"name": ADMIN, "type": "admin", "org": ORG, "role": "project_admin"}]
    return {"api_version": 3, "name": PROJECT, "description": "", "participants": people}


class _Quiet:
    """A logger without output. Without a logger NVFlare's provisioner prints. Its errors are in the
    context.
    """

    def debug(self, *_: object) -> None: ...

    info = warning = error = debug
