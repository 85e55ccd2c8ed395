"""A federation's certificates by NVFlare's own provisioner: kits for all, for one more, and anew
before they expire, under one authority.

folder/authority has root.pem, root.key (who has it can add a silo: keep it offline) and
federation.json, what was provisioned; folder/kits has what is handed out. A silo that is added, and
certificates that are renewed, are issued by the same authority, so that nobody else's change.
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
"""The file of the server's kit in which NVFlare itself keeps whom it lets in no more."""
START = "sub_start.sh"
"""The script of a kit that starts its engine; with --once in the foreground, as one process."""
DAYS = 360
AUTHORITY_DAYS = 3650
"""The authority outlives the certificates, which last NVFlare's 360 days, so that these can be
renewed one by one.
"""


def issue(folder: Path, silos: Sequence[str], *, host: str, port: int) -> None:
    """A new authority, and kits for the server, each silo and an administrator."""
    _check(silos)
    if (folder / "kits").exists():
        raise BadInput(f"{folder} has kits already: choose a folder without")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    made = _provisioned(folder / "authority", silos, host, port)
    shutil.move(made["kits"], folder / "kits")
    for kept in ("authority", "kits"):  # keys: the provisioner leaves some readable
        (folder / kept).chmod(0o700)
    write(folder / "authority" / "root.pem", made["root.pem"])
    write(folder / "authority" / "root.key", made["root.key"])
    _note(folder, host, port, silos)


def add(folder: Path, silos: Sequence[str]) -> None:
    """Kits for silos that come later, in folder/kits; nobody else's certificates change, and the
    server lets them in as it is.
    """
    _check(silos)
    about = _about(folder)
    if known := sorted(set(silos) & {*about["silos"], *_removed(folder)}):
        raise BadInput(
            f"{folder} has, or had, a silo {known[0]!r}: choose another name, since the "
            "old certificate stays valid until it expires"
        )
    with tempfile.TemporaryDirectory(dir=folder) as apart:
        made = _provisioned(Path(apart), silos, about["host"], about["port"], _root(folder))
        for name in silos:
            shutil.move(Path(made["kits"]) / name, folder / "kits" / name)
    _note(folder, about["host"], about["port"], [*about["silos"], *silos])


def renew(folder: Path) -> list[str]:
    """A new certificate over the same key for each silo, in folder/renewed, and for the server, in
    its kit; old ones stay valid until they expire.

    Keys stay where they are, so that nothing secret travels; and the server's must: NVFlare lets in
    again whom it knows by a token that this key signed.
    """
    about = _about(folder)
    renewed = folder / "renewed"
    certificates = folder / "authority" / "certificates"
    shutil.rmtree(renewed, ignore_errors=True)
    renewed.mkdir(mode=0o700)
    for name in about["silos"]:
        write(
            certificates / f"{name}.crt",
            _recertified((certificates / f"{name}.crt").read_bytes(), _root(folder)),
        )
        write(renewed / f"{name}.crt", (certificates / f"{name}.crt").read_bytes())
    own = folder / "kits" / SERVER / "startup" / "server.crt"
    write(own, _recertified(own.read_bytes(), _root(folder)))
    return list(about["silos"])


def _recertified(certificate: bytes, root: tuple[bytes, bytes]) -> bytes:
    """The certificate once more, valid from now on."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

    old = x509.load_pem_x509_certificate(certificate)
    authority = x509.load_pem_x509_certificate(root[0])
    key = load_pem_private_key(root[1], None)
    now = datetime.now(UTC)
    made = x509.CertificateBuilder(
        authority.subject, old.subject, old.public_key(), x509.random_serial_number()
    ).not_valid_before(now)
    made = made.not_valid_after(min(now + timedelta(days=DAYS), authority.not_valid_after_utc))
    for extension in old.extensions:
        made = made.add_extension(extension.value, extension.critical)
    return made.sign(cast(Any, key), hashes.SHA256()).public_bytes(Encoding.PEM)


def remove(folder: Path, silos: Sequence[str]) -> None:
    """From now on the server lets these in no more, asks them nothing, and renews nothing of
    theirs; the others notice nothing.
    """
    about = _about(folder)
    if strange := sorted(set(silos) - set(about["silos"])):
        raise BadInput(f"{folder} has no silo {strange[0]!r}; it has {', '.join(about['silos'])}")
    content = json.dumps({"disabled_clients": sorted({*_removed(folder), *silos})})
    write(folder / "kits" / SERVER / REMOVED, content)
    _note(
        folder, about["host"], about["port"], [name for name in about["silos"] if name not in silos]
    )


def removed(file: Path) -> set[str]:
    """Whom the server lets in no more; raises where the file cannot be read, so that nobody is
    asked then.
    """
    if file.exists():
        return {str(name) for name in json.loads(file.read_text())["disabled_clients"]}
    return set()


def _removed(folder: Path) -> set[str]:
    return removed(folder / "kits" / SERVER / REMOVED)


def _check(silos: Sequence[str]) -> None:
    for name in silos:
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", name) or name == SERVER:
            raise BadInput(
                f"silo name {name!r}: must be lower-case letters, digits and inner "
                f"hyphens, at most 63, and not {SERVER!r}"
            )
    if len(set(silos)) != len(silos) or not silos:
        raise BadInput(f"silos {list(silos)}: must be at least one name, each once")


def _note(folder: Path, host: str, port: int, silos: Sequence[str]) -> None:
    """What was provisioned, and every silo's certificate, which is public, to renew it by."""
    (folder / "authority" / "certificates").mkdir(mode=0o700, exist_ok=True)
    for name in silos:
        if not (kept := folder / "authority" / "certificates" / f"{name}.crt").exists():
            write(kept, (folder / "kits" / name / "startup" / "client.crt").read_bytes())
    write(
        folder / "authority" / "federation.json",
        json.dumps({"host": host, "port": port, "silos": list(silos)}) + "\n",
    )


def _about(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "authority" / "federation.json").read_text())
    except (OSError, ValueError):
        raise BadInput(
            f"{folder}: authority/federation.json cannot be read; bring the authority's "
            "folder back, as `provision` made it"
        ) from None


def _root(folder: Path) -> tuple[bytes, bytes]:
    try:
        return (folder / "authority" / "root.pem").read_bytes(), (
            folder / "authority" / "root.key"
        ).read_bytes()
    except OSError as error:
        raise BadInput(
            f"{error.filename} cannot be read: {error.strerror}; bring the authority's "
            "folder back, as `provision` made it"
        ) from None


def start_script(name: str) -> bytes:
    """Return the script by which this installation of NVFlare starts a client of this name, or the
    server.

    NVFlare's provisioner writes it. A script that comes with a kit is another operator's word.
    """
    from nvflare.lighter.constants import CtxKey
    from nvflare.lighter.impl.static_file import StaticFileBuilder
    from nvflare.lighter.impl.workspace import WorkspaceBuilder
    from nvflare.lighter.provision import prepare_project
    from nvflare.lighter.provisioner import Provisioner

    silos = [] if name == SERVER else [name]
    builders = [
        WorkspaceBuilder(["master_template.yml"]),
        StaticFileBuilder(config_folder="config", scheme="tcp"),
    ]
    with tempfile.TemporaryDirectory() as apart:
        project = prepare_project(_project(silos, "localhost", 1))
        made = Provisioner(apart, builders).provision(project, logger=_Quiet())
        return (Path(made[CtxKey.CURRENT_PROD_DIR]) / name / "startup" / START).read_bytes()


def _provisioned(
    workspace: Path,
    silos: Sequence[str],
    host: str,
    port: int,
    root: tuple[bytes, bytes] | None = None,
) -> dict[str, Any]:
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
        project.serialized_root_cert, project.root_private_key = (
            root[0],
            load_pem_private_key(root[1], password=None),
        )
    made = Provisioner(str(workspace), builders).provision(project, logger=_Quiet())
    if made.get(CtxKey.BUILD_ERROR):
        raise BadInput(
            f"{workspace}: NVFlare could not provision it: "
            f"{'; '.join(map(str, made.get(CtxKey.ERRORS) or ()))}"
        )
    authority = {
        "root.pem": serialize_cert(made[CtxKey.ROOT_CERT]),
        "root.key": serialize_pri_key(made[CtxKey.ROOT_PRI_KEY]),
    }
    return authority | {"kits": made[CtxKey.CURRENT_PROD_DIR]}


def _project(silos: Sequence[str], host: str, port: int) -> dict[str, Any]:
    """Return a project for NVFlare's provisioner: the server, these silos, an administrator."""
    server = {"default_host": host, "fed_learn_port": port, "admin_port": port}
    people = [{"name": SERVER, "type": "server", "org": ORG} | server]
    people += [{"name": name, "type": "client", "org": ORG} for name in silos]
    people += [{"name": ADMIN, "type": "admin", "org": ORG, "role": "project_admin"}]
    return {"api_version": 3, "name": PROJECT, "description": "", "participants": people}


class _Quiet:
    """NVFlare's provisioner prints unless it has somewhere to write; its errors come back in the
    context.
    """

    def debug(self, *_: object) -> None: ...

    info = warning = error = debug
