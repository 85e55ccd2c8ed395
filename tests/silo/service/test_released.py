"""What leaves a silo is the same whether or not its file was edited: count and head of releases,
witness, co-signed heads, figures for monitoring, and what an officer hands on as evidence.
"""

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from test_door import asked, reply, silo, table

from silodp.cli.evidence import _excerpt
from silodp.core.protocol.codec import Answer
from silodp.silo.ledger import care, cosign
from silodp.silo.ledger.chain import canonical
from silodp.silo.ledger.durable import DurableLedger
from silodp.silo.ledger.view import queries_of, summary_of

KEY = Ed25519PrivateKey.from_private_bytes(bytes([9]) * 32)
SILENT = "2026-01-01T00:00:00.000+00:00"


@pytest.fixture(autouse=True)
def still(monkeypatch):
    """The clock stands, and salts are alike: what is left to differ follows from records."""
    for module in ("file", "cosign"):
        monkeypatch.setattr(f"silodp.silo.ledger.{module}.now", lambda: SILENT)
    monkeypatch.setattr("secrets.token_hex", lambda n=32: "5a" * n)


def edited():
    x, y = table()
    x[3, 1] += 1.0
    return x, y


def kept(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def begun(tmp_path):
    """A gate that has answered once, its witness elsewhere, and all its files as they are then."""
    folder = tmp_path / "silo"
    door, ledger = silo(folder)
    care.appoint(ledger.path, folder / "elsewhere.head")
    assert isinstance(reply(door, asked("before")), Answer)
    return folder, kept(folder)


def restarted(begun, data) -> tuple:
    """The gate with this file, from where it was: itself, and its ledger."""
    folder, files = begun
    for path, content in files.items():
        path.write_bytes(content)
    ledger = DurableLedger.open(folder / "ledger.db")
    return silo(folder, data=data, ledger=ledger)


def test_a_restart_with_an_edited_cell_changes_no_count_and_no_head_of_a_release(begun):
    found = []
    for data in (table(), edited()):
        door, ledger = restarted(begun, data)
        replies = [reply(door, asked(name)) for name in ("a", "b")]
        found.append([(one.count, one.head) for one in replies])
        ledger.verify()
    assert found[0] == found[1]


def test_two_edits_and_restarts_in_between_change_nothing_either(begun):
    found = []
    for once, twice in ((table(), table()), (edited(), table())):
        _, ledger = restarted(begun, once)
        door, _ = silo(begun[0], data=twice, ledger=DurableLedger.open(ledger.path))
        answer = reply(door, asked("a"))
        found.append((answer.count, answer.head))
    assert found[0] == found[1]


def test_a_witness_and_a_cosigned_head_tell_of_no_edit(begun):
    found = []
    for data in (table(), edited()):
        _, ledger = restarted(begun, data)
        place = begun[0] / "elsewhere.head"
        before = place.read_text(), json.dumps(cosign.state(ledger, KEY))
        door, _ = silo(begun[0], data=data, ledger=ledger)
        reply(door, asked("a"))
        found.append((before, place.read_text(), json.dumps(cosign.state(ledger, KEY))))
    assert found[0] == found[1]


def test_an_edit_does_not_touch_the_witness_whose_date_others_see(begun):
    place = begun[0] / "elsewhere.head"
    restarted(begun, table())
    before = place.stat().st_mtime_ns, place.stat().st_ino
    silo(begun[0], data=edited(), ledger=DurableLedger.open(begun[0] / "ledger.db"))
    assert (place.stat().st_mtime_ns, place.stat().st_ino) == before


def test_what_an_officer_hands_on_as_evidence_tells_of_no_edit_and_has_no_path(begun, tmp_path):
    found = []
    for data in (table(), edited()):
        door, ledger = restarted(begun, data)
        reply(door, asked("a"))
        shown = tmp_path / "shown.json"
        shown.write_text(json.dumps(summary_of(ledger) | {"queries": queries_of(ledger)}))
        assert str(tmp_path) in shown.read_text()
        found.append(_excerpt(shown))
    assert found[0] == found[1]
    assert str(tmp_path) not in json.dumps(found)
    assert len(found[0]["queries"]) == 2


def test_ledgers_that_went_different_ways_never_have_the_same_head(begun, monkeypatch):
    """Rolled back and asked the same once more, at the same time: an answer's salt differs."""
    heads = []
    for salt in ("00", "ff"):
        monkeypatch.setattr("secrets.token_hex", lambda n=32, salt=salt: salt * n)
        door, _ = restarted(begun, table())
        reply(door, asked("a"))
        heads.append(reply(door, asked("b")).head)
    assert heads[0] != heads[1]


def test_a_witness_of_an_earlier_version_is_believed_and_brought_to_the_new_form(begun):
    folder, place = begun[0], begun[0] / "elsewhere.head"
    _, ledger = restarted(begun, table())
    count, head = ledger.head()
    old = canonical({"ledger": ledger.settings.ledger, "count": count, "head": head})
    place.write_text(old)
    door, _ = silo(folder, ledger=DurableLedger.open(ledger.path))
    assert isinstance(reply(door, asked("a")), Answer)
    count, head = ledger.released()
    about = {"ledger": ledger.settings.ledger, "count": count, "head": head, "of": "released"}
    assert json.loads(place.read_text()) == about
    place.write_text(old.replace(f'"count":{json.loads(old)["count"]}', '"count":99'))
    assert reply(door, asked("b")).code == "ledger"


def test_a_head_of_an_earlier_version_that_was_cosigned_still_shows_a_rollback(begun, tmp_path):
    _, ledger = restarted(begun, table())
    (count, head), other = ledger.head(), Ed25519PrivateKey.from_private_bytes(bytes([8]) * 32)
    about = {"ledger": ledger.settings.ledger, "count": count, "head": head, "time": SILENT}
    signature = cosign.signed(KEY, "head", *map(str, about.values()))
    old = about | {"key": cosign.public(KEY), "signature": signature}
    book = tmp_path / "book.json"
    seen = cosign.cosign(book, old, other)
    new = cosign.cosign(book, cosign.state(ledger, KEY), other)
    for statement in (seen, new):
        assert cosign.contradiction(ledger, statement, cosign.public(KEY)) == ""
    door, _ = silo(begun[0], ledger=ledger)
    reply(door, asked("a"))
    later = cosign.cosign(book, cosign.state(ledger, KEY), other)
    _, rolled = restarted(begun, table())
    assert "rolled back" in cosign.contradiction(rolled, later, cosign.public(KEY))
    rolled_back = json.dumps(cosign.state(rolled, KEY))
    with pytest.raises(Exception, match="rolled back"):
        cosign.cosign(book, json.loads(rolled_back), other)
