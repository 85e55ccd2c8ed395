"""Silos that come and go, and certificates that are renewed, under one authority: nobody else's
change.
"""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from silodp.core.errors import BadInput
from silodp.host.certificates import certificates, expiring

pytestmark = pytest.mark.xdist_group("members")  # in their order: they share one federation


def files(folder: Path):
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def issued_by(kit: Path, root: Path) -> bool:
    authority = x509.load_pem_x509_certificate(root.read_bytes())
    own = [x509.load_pem_x509_certificate(path.read_bytes()) for path in kit.rglob("*.crt")]
    for certificate in own:
        certificate.verify_directly_issued_by(authority)
    return bool(own)


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    pytest.importorskip("nvflare")
    from silodp.wire.nvflare import kits

    folder = tmp_path_factory.mktemp("members") / "fed"
    kits.issue(folder, ["north", "south"], host="localhost", port=1)
    return folder


def test_a_silo_is_added_without_a_change_to_anybody_elses_kit(federation, silodp):
    before = files(federation / "kits")
    assert silodp("federation", "add", federation, "west")[0] == 0
    after = files(federation / "kits")
    assert {path: after[path] for path in before} == before
    assert {path.parts[0] for path in after.keys() - before.keys()} == {"west"}
    assert issued_by(federation / "kits/west", federation / "authority/root.pem")
    assert (federation / "kits/west/startup/rootCA.pem").read_bytes() == (
        federation / "kits/north/startup/rootCA.pem"
    ).read_bytes()
    for name in ("west", "Server!", "server"):
        assert silodp("federation", "add", federation, name)[0] == 2


def test_renewed_certificates_are_the_same_authoritys_over_the_same_keys_and_last_a_year_again(
    federation, silodp
):
    old = files(federation / "kits")
    assert silodp("federation", "renew", federation)[0] == 0
    new = files(federation / "kits")
    assert {path.name for path in new if new[path] != old.get(path)} == {"server.crt"}
    assert {path.name for path in (federation / "renewed").iterdir()} == {
        "north.crt",
        "south.crt",
        "west.crt",
    }
    authority = x509.load_pem_x509_certificate((federation / "authority/root.pem").read_bytes())
    for file, before in (
        (federation / "renewed/north.crt", "north/startup/client.crt"),
        (federation / "kits/server/startup/server.crt", "server/startup/server.crt"),
    ):
        made, was = (
            x509.load_pem_x509_certificate(file.read_bytes()),
            x509.load_pem_x509_certificate(old[Path(before)]),
        )
        made.verify_directly_issued_by(authority)
        assert (made.subject, made.public_key()) == (was.subject, was.public_key())
        assert [e.value for e in made.extensions] == [e.value for e in was.extensions]
        assert made.not_valid_after_utc >= was.not_valid_after_utc  # to the second
        assert made.serial_number != was.serial_number
    assert all(one["days"] > 350 for one in certificates(federation / "renewed"))


def test_a_silo_that_is_removed_stays_removed_and_its_name_is_not_given_again(federation, silodp):
    from silodp.wire.nvflare import kits

    assert silodp("federation", "remove", federation, "south")[0] == 0
    assert kits.removed(federation / "kits/server" / kits.REMOVED) == {"south"}
    assert "had, a silo 'south'" in silodp("federation", "add", federation, "south")[2]
    assert "no silo 'south'" in silodp("federation", "remove", federation, "south")[2]
    kits.renew(federation)
    assert not (federation / "renewed/south.crt").exists()


def test_the_hub_asks_nobody_who_was_removed(tmp_path):
    pytest.importorskip("nvflare")
    from silodp.wire.nvflare.app import ServerHub

    class Engine:
        def get_clients(self):
            return [type("Client", (), {"name": name}) for name in ("north", "south")]

    hub = ServerHub(str(tmp_path / "hub"), str(tmp_path / "removed.json"))
    hub._engine = Engine()
    assert hub._registered() == ["north", "south"]
    (tmp_path / "removed.json").write_text(json.dumps({"disabled_clients": ["south"]}))
    assert hub._registered() == ["north"]
    (tmp_path / "removed.json").write_text("{")
    with pytest.raises(ValueError, match="Expecting"):
        hub._registered()


def test_flowers_server_is_certified_anew_by_the_authority_that_silos_know(tmp_path, silodp):
    from silodp.wire.flower import keys

    folder = tmp_path / "fed"
    (folder / "server").mkdir(parents=True)
    keys.certify(folder / "server", "fl.example.org", 10)
    ca, old = (folder / "server/ca.pem").read_bytes(), (folder / "server/server.pem").read_bytes()
    code, out, _ = silodp("federation", "certificates", folder)
    assert (code, "expires in 9 days" in out) == (3, True)
    assert silodp("federation", "renew", folder)[0] == 0
    assert (folder / "server/ca.pem").read_bytes() == ca
    new = x509.load_pem_x509_certificate((folder / "server/server.pem").read_bytes())
    new.verify_directly_issued_by(x509.load_pem_x509_certificate(ca))
    assert (folder / "server/server.pem").read_bytes() != old
    assert (
        new.extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        ).value.get_values_for_type(x509.DNSName)[-1]
        == "fl.example.org"
    )
    assert silodp("federation", "certificates", folder)[0] == 0


@pytest.mark.parametrize(
    ("days", "said"), [(61, ""), (59, "expires in 58 days"), (-1, "has expired")]
)
def test_a_certificate_is_warned_of_from_sixty_days_before_its_end(tmp_path, days, said):
    from cryptography.hazmat.primitives import hashes, serialization

    key, name = (
        ec.generate_private_key(ec.SECP256R1()),
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "north")]),
    )
    made = x509.CertificateBuilder(name, name, key.public_key(), 1).not_valid_before(
        datetime.now(UTC) - timedelta(days=99)
    )
    made = made.not_valid_after(datetime.now(UTC) + timedelta(days=days)).sign(key, hashes.SHA256())
    (tmp_path / "a.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    assert [said in sentence for sentence in expiring(tmp_path)] == ([True] if said else [])


def test_a_folder_that_is_no_engines_is_refused(silodp, tmp_path):
    from silodp.wire.nvflare import kits

    for command in ("add", "remove"):
        assert silodp("federation", command, tmp_path, "x")[0] == 2
    assert "is not an engine's folder" in silodp("federation", "renew", tmp_path)[2]
    with pytest.raises(BadInput, match="authority"):
        kits.renew(tmp_path)
