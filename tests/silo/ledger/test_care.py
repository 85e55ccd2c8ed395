"""Witnesses, backups, moves: a ledger that was rolled back, doubled or left behind answers nothing,
whatever else agrees with it.
"""

import json
import math
import shutil

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from ledgers import CHEAP, ask, asked, make, refused, refuses, table, tampering

from silodp.core.errors import BadInput
from silodp.core.events import TotalEvent
from silodp.core.sampling import FullBatch
from silodp.host.keys import public
from silodp.silo.ledger import care, cosign
from silodp.silo.ledger.chain import Entry
from silodp.silo.ledger.durable import DurableLedger
from silodp.silo.ledger.file import LedgerFile
from silodp.silo.ledger.view import said_of, summary_of


@pytest.fixture
def witnessed(folder):
    """A ledger whose witness lies elsewhere."""
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    ledger = make(folder)
    care.appoint(ledger.path, elsewhere / "a.head")
    ask(ledger, "q1")
    return ledger


def witness(ledger):
    return ledger.path.parent / "elsewhere" / "a.head"


def snapshot(ledger):
    """A copy of the whole machine as it is now: what a virtual machine's snapshot would bring
    back.
    """
    return {path: path.read_bytes() for path in (ledger.path, ledger.anchor)}


def roll_back(copies):
    for path, content in copies.items():
        path.write_bytes(content)


# --- rolled back ---------------------------------------------------------------------------------


def test_a_ledger_that_is_rolled_back_together_with_its_anchor_is_seen_by_its_witness(witnessed):
    before = snapshot(witnessed)
    ask(witnessed, "later")
    roll_back(before)
    refused(witnessed.path, "its witness .* has seen 5, so this is an older copy")
    with refuses("ledger"):
        asked(witnessed, "new")
    with pytest.raises(BadInput, match="older copy"):
        DurableLedger.open(witnessed.path).recognise(*table())


def test_without_a_witness_the_same_goes_unseen_which_is_what_the_witness_is_for(folder):
    ledger = make(folder)
    ask(ledger, "q1")
    before = snapshot(ledger)
    ask(ledger, "later")
    roll_back(before)
    DurableLedger.open(ledger.path).verify()


def test_the_witness_has_seen_every_head_before_an_answer_leaves(witnessed):
    for name in ("a", "b"):
        ask(witnessed, name)
        count, head = witnessed.released()
        assert json.loads(witness(witnessed).read_text()) == {
            "ledger": witnessed.settings.ledger,
            "count": count,
            "head": head,
            "of": "released",
        }


@pytest.mark.parametrize("what", ["missing", "garbage", "another ledger's"])
def test_while_the_witness_cannot_be_read_or_written_nothing_is_answered(witnessed, what):
    if what == "missing":
        shutil.rmtree(witness(witnessed).parent)
    else:
        witness(witnessed).write_text(
            "{" if what == "garbage" else json.dumps({"ledger": "other", "count": 0, "head": ""})
        )
    with refuses("ledger"):
        asked(witnessed, "new")
    refused(witnessed.path, "witness")


def test_a_witness_that_stopped_in_mid_work_is_brought_up_to_date(witnessed):
    old = witness(witnessed).read_bytes()
    ask(witnessed, "later")
    newer = witness(witnessed).read_bytes()
    witness(witnessed).write_bytes(old)
    DurableLedger.open(witnessed.path)
    assert witness(witnessed).read_bytes() == newer


def test_the_anchor_itself_is_no_witness_nor_is_another_ledgers_file(witnessed, folder):
    with pytest.raises(BadInput, match="is its anchor"):
        care.appoint(witnessed.path, witnessed.anchor)
    other = make(folder, "b.ledger", data=table(seed=1))
    with pytest.raises(BadInput, match="belongs to another ledger"):
        care.appoint(other.path, witness(witnessed))


# --- co-signed -----------------------------------------------------------------------------------


def test_another_silo_that_has_seen_a_head_sees_that_ledger_and_anchor_were_rolled_back(folder):
    own, other = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    ledger, book = make(folder), folder / "book.json"
    ask(ledger, "q1")
    before = snapshot(ledger)
    cosign.cosign(book, cosign.state(ledger, own), other)
    ask(ledger, "later")
    seen = cosign.cosign(book, cosign.state(ledger, own), other)
    assert not cosign.contradiction(ledger, seen, public(own))
    roll_back(before)
    rolled = DurableLedger.open(ledger.path)
    assert "ledger and anchor were rolled back" in cosign.contradiction(rolled, seen, public(own))
    with pytest.raises(BadInput, match="was rolled back: it now has 2 entries, and had 4"):
        cosign.cosign(book, cosign.state(rolled, own), other)
    ask(rolled, "another way")
    assert "entry 4 is not the one" in cosign.contradiction(rolled, seen, public(own))
    with pytest.raises(BadInput, match="two ledgers of this name"):
        cosign.cosign(book, cosign.state(rolled, own), other)


def test_a_statement_that_was_altered_or_is_not_cosigned_counts_for_nothing(folder):
    own, other = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    ledger = make(folder)
    ask(ledger, "q1")
    told = cosign.state(ledger, own)
    for change in (
        {"count": 1},
        {"head": "0" * 64},
        {"key": public(other)},
        {"signature": "00"},
        {"count": "2"},
        {"count": -1},
    ):
        with pytest.raises(BadInput, match="not a ledger's head"):
            cosign.cosign(folder / "book", told | change, other)
    with pytest.raises(BadInput, match="not co-signed"):
        cosign.contradiction(ledger, told, public(own))
    seen = cosign.cosign(folder / "book", told, other)
    with pytest.raises(BadInput, match="another ledger, or signed by another"):
        cosign.contradiction(ledger, seen, public(other))
    (folder / "book").write_text("[")
    with pytest.raises(BadInput, match="cannot be read; restore it"):
        cosign.cosign(folder / "book", told, other)


# --- backup and restore --------------------------------------------------------------------------


def test_a_restored_ledger_goes_on_only_if_the_witness_has_seen_its_head_and_none_after_it(
    witnessed, folder
):
    care.backup(witnessed.path, folder / "copy")
    witnessed.path.unlink()
    assert care.restore(folder / "copy", witnessed.path) == ""
    back = DurableLedger.open(witnessed.path)
    back.verify()
    assert ask(back, "q1", b"another") == b"an answer", "what was answered is repeated"
    ask(back, "q2")


def test_one_answer_after_the_backup_and_the_witness_does_not_confirm_it(witnessed, folder):
    care.backup(witnessed.path, folder / "copy")
    ask(witnessed, "after the backup")
    newest = witness(witnessed).read_bytes()
    witnessed.path.unlink()
    assert "has seen 5" in care.restore(folder / "copy", witnessed.path)
    assert witness(witnessed).read_bytes() == newest, "what the witness has seen is not overwritten"
    assert "has seen 5" in care.confirm(witnessed.path)
    refused(witnessed.path, "witness")
    care.write_off(witnessed.path)
    closed = DurableLedger.open(witnessed.path)
    closed.verify()
    assert (closed.used(), closed.spent(), closed.left()) == (1.0, 3.0, 0.0)
    assert ask(closed, "q1") == b"an answer"
    with refuses("budget"):
        ask(closed, "new")


def test_a_witness_that_was_away_confirms_later_whoever_looks_at_the_ledger_meanwhile_and_one_that_is_behind_does_not(  # noqa: E501
    witnessed, folder
):
    behind = witness(witnessed).read_bytes()
    ask(witnessed, "q2")
    care.backup(witnessed.path, folder / "copy")
    newest, away = witness(witnessed).read_bytes(), witness(witnessed)
    away.unlink()
    witnessed.path.unlink()
    assert "is missing" in care.restore(folder / "copy", witnessed.path)
    away.write_bytes(behind)
    assert "has last seen entry 3, and not entry 5" in care.confirm(witnessed.path)
    away.write_bytes(newest)
    with refuses("ledger"):
        ask(DurableLedger.open(witnessed.path), "new")
    assert away.read_bytes() == newest, "looking at it changes nothing of what will confirm it"
    assert care.confirm(witnessed.path) == ""
    ask(DurableLedger.open(witnessed.path), "new")


def test_without_a_witness_a_restored_ledger_says_that_doubling_cannot_be_excluded_and_answers_nothing(  # noqa: E501
    folder,
):
    ledger = make(folder)
    ask(ledger, "q1")
    care.backup(ledger.path, folder / "copy")
    ledger.path.unlink()
    assert "cannot be excluded" in care.restore(folder / "copy", ledger.path)
    back = DurableLedger.open(ledger.path)
    for act in (
        lambda: ask(back, "new"),
        lambda: ask(back, "q1"),
        lambda: back.partition("p", 2, generation=0),
    ):
        with refuses("ledger"):
            act()
    with pytest.raises(BadInput, match="restored from a backup"):
        back.recognise(*table())
    assert "cannot be excluded" in care.confirm(ledger.path)
    care.write_off(ledger.path)
    with refuses("budget"):
        ask(DurableLedger.open(ledger.path), "new")


def test_what_was_charged_but_not_answered_in_a_backup_is_not_computed_after_a_write_off(folder):
    """The ledger that was lost may have sent its answer: this one would be a second draw of noise
    for one charge.
    """
    ledger = make(folder)
    paid = asked(ledger, "q1")
    paid.charge(CHEAP, [0])
    care.backup(ledger.path, folder / "copy")
    paid.store(b"sent, and lost with the ledger")
    ledger.path.unlink()
    care.restore(folder / "copy", ledger.path)
    care.write_off(ledger.path)
    late = asked(DurableLedger.open(ledger.path), "q1")
    with refuses("budget"):
        late.charge(CHEAP, [0])
    with refuses("budget"):
        late.store(b"a second draw")
    DurableLedger.open(ledger.path).verify()


def test_a_whole_ledger_is_not_restored_over_and_a_damaged_one_is_kept_aside(witnessed, folder):
    care.backup(witnessed.path, folder / "copy")
    with pytest.raises(BadInput, match="nothing to restore"):
        care.restore(folder / "copy", witnessed.path)
    damaged = witnessed.path.read_bytes()[:-100]
    witnessed.path.write_bytes(damaged)
    assert care.restore(folder / "copy", witnessed.path) == ""
    (lost,) = folder.glob("a.ledger.*.lost")
    assert lost.read_bytes() == damaged
    with pytest.raises(BadInput, match="exists already"):
        care.backup(witnessed.path, folder / "copy")


def test_a_backup_that_is_merely_copied_back_is_an_older_copy(witnessed, folder):
    care.backup(witnessed.path, folder / "copy")
    ask(witnessed, "later")
    shutil.copy(folder / "copy", witnessed.path)
    refused(witnessed.path, "older copy")


def test_a_witness_that_was_replaced_confirms_no_backup_from_its_own_time(witnessed, folder):
    care.backup(witnessed.path, folder / "copy")
    care.appoint(witnessed.path, folder / "elsewhere/b.head")
    ask(DurableLedger.open(witnessed.path), "after the backup")
    witnessed.path.unlink()
    assert "is not what its witness" in care.restore(folder / "copy", witnessed.path)
    refused(witnessed.path, "witness")


# --- moves ---------------------------------------------------------------------------------------


def test_a_moved_ledger_refuses_everything_where_it_was_and_goes_on_where_its_arrival_key_is(
    witnessed, folder, monkeypatch
):
    silo, arrival = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    care.bury(witnessed.path, silo, public(arrival), "gate2")
    for act in (
        lambda: ask(witnessed, "new"),
        lambda: ask(witnessed, "q1"),
        lambda: witnessed.partition("p", 2, generation=0),
    ):
        with refuses("ledger"):
            act()
    old = DurableLedger.open(witnessed.path)
    for act in (
        lambda: old.recognise(*table()),
        lambda: old.purge("q1"),
        lambda: care.write_off(witnessed.path),
        lambda: care.bury(witnessed.path, silo, public(arrival), "gate3"),
        lambda: care.appoint(witnessed.path, folder / "other"),
    ):
        with pytest.raises(BadInput, match="tombstone"):
            act()
    new = folder / "new.ledger"
    shutil.copy(witnessed.path, new)
    for wrong in (silo, Ed25519PrivateKey.generate()):
        with pytest.raises(BadInput, match="another arrival key"):
            care.arrive(new, wrong, anchor=folder / "new.anchor")
    care.arrive(new, arrival, anchor=folder / "new.anchor")
    monkeypatch.setenv("SILODP_STATE", str(folder / "state of the new machine"))
    moved = DurableLedger.open(new, anchor=folder / "new.anchor")
    moved.verify()
    assert ask(moved, "q1", b"another") == b"an answer"
    ask(moved, "q2")
    refused(witnessed.path, "older copy")  # the old one, by its witness


def test_a_moved_ledger_does_not_arrive_a_second_time_where_its_anchor_has_seen_more(
    folder, monkeypatch
):
    ledger, arrival, new = make(folder), Ed25519PrivateKey.generate(), folder / "new.ledger"
    care.bury(ledger.path, Ed25519PrivateKey.generate(), public(arrival), "gate2")
    shutil.copy(ledger.path, new)
    care.arrive(new, arrival, anchor=folder / "new.anchor")
    monkeypatch.setenv("SILODP_STATE", str(folder / "state of the new machine"))
    ask(DurableLedger.open(new, anchor=folder / "new.anchor"), "q2")
    shutil.copy(ledger.path, new)
    with pytest.raises(BadInput, match="older copy"):
        care.arrive(new, arrival, anchor=folder / "new.anchor")


def test_an_arrival_that_the_arrival_key_did_not_sign_is_an_altered_chain(folder):
    ledger, silo, arrival = make(folder), Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    care.bury(ledger.path, silo, public(arrival), "gate2")
    for act, event in (
        ("arrive", {"signature": "00" * 64}),
        ("confirm", {}),
        ("write-off", {}),
        ("witness", {"file": "/x"}),
        ("restore", {"backup": ""}),
        ("charge", {}),
        ("answer", {}),
    ):
        copy = folder / f"{act}.ledger"
        shutil.copy(ledger.path, copy)
        entry = (
            LedgerFile(ledger.path, None).snapshot().draft(act, "", event=event)
            if act != "charge"
            else None
        )
        entry = (
            entry
            or Entry(
                2, "", "charge", "q", "", "", "", "", "{}", "", 0.0, 0.0, ledger.head()[1]
            ).chained()
        )
        with tampering(copy) as connection:
            connection.execute(f"INSERT INTO entries VALUES ({', '.join('?' * 14)})", entry.row())
        shutil.copy(ledger.anchor, f"{copy}.anchor")
        refused(copy, "cannot come after|comes after the ledger was closed")


def test_a_charge_after_a_write_off_is_an_altered_chain(folder):
    ledger, spare = make(folder), make(folder, "spare.ledger", data=table(seed=1))
    care.write_off(ledger.path)
    ask(spare, "q")
    charge = next(entry for entry in spare.entries() if entry.act == "charge")
    count, head = ledger.head()
    forged = Entry(count + 1, *charge.row()[1:10], charge.amount, charge.total, head).chained()
    with tampering(ledger.path) as connection:
        connection.execute(f"INSERT INTO entries VALUES ({', '.join('?' * 14)})", forged.row())
    refused(ledger.path, "after the rest of the budget was written off")


# --- the commands --------------------------------------------------------------------------------


def test_fsck_says_all_that_is_wrong_and_exits_with_2_only_if_something_is(
    silodp, witnessed, folder
):
    own, other = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    key = folder / "silo.key"
    key.write_text(own.private_bytes_raw().hex())
    (folder / "other.key").write_text(other.private_bytes_raw().hex())
    path, head, seen = witnessed.path, folder / "head", folder / "seen"
    assert silodp("ledger", "fsck", path)[0] == 0
    before = snapshot(witnessed)
    ask(witnessed, "later")
    assert silodp("ledger", "head", path, "--key", key, "--out", head)[0] == 0
    assert (
        silodp(
            "ledger", "cosign", folder / "book", head, "--key", folder / "other.key", "--out", seen
        )[0]
        == 0
    )
    assert silodp("ledger", "fsck", path, "--seen", seen, "--key", key)[0] == 0
    roll_back(before)
    code, out, _ = silodp("ledger", "fsck", path, "--json")
    assert code == 2
    assert "older copy" in json.loads(out)["wrong"][0]
    roll_back(
        before | {witness(witnessed): json.dumps(json.loads(witnessed.anchor.read_text())).encode()}
    )
    code, out, _ = silodp("ledger", "fsck", path, "--seen", seen, "--key", key)
    assert (code, "rolled back" in out) == (2, True)
    path.unlink()
    assert silodp("ledger", "fsck", path)[0] == 2


def test_a_move_and_a_restore_by_their_commands(silodp, folder):
    ledger, key = make(folder), folder / "silo.key"
    key.write_text(Ed25519PrivateKey.generate().private_bytes_raw().hex())
    ask(ledger, "q1")
    assert silodp("ledger", "backup", ledger.path, folder / "copy")[0] == 0
    ledger.path.unlink()
    code, out, _ = silodp("ledger", "restore", folder / "copy", ledger.path)
    assert (code, "cannot be excluded" in " ".join(out.split())) == (2, True)
    assert silodp("ledger", "confirm", ledger.path)[0] == 2
    assert "--all" in silodp("ledger", "write-off", ledger.path)[2]
    assert silodp("ledger", "write-off", ledger.path, "--all")[0] == 0
    arrival = silodp("ledger", "expect", folder / "arrival.key")[1].strip()
    assert (
        silodp("ledger", "bury", ledger.path, "--arrival", arrival, "--key", key, "--to", "gate2")[
            0
        ]
        == 0
    )
    assert silodp("ledger", "bury", ledger.path, "--arrival", arrival, "--key", key)[0] == 2
    assert silodp("ledger", "arrive", ledger.path, "--key", folder / "arrival.key")[0] == 0
    assert not (folder / "arrival.key").exists()
    assert silodp("ledger", "verify", ledger.path)[0] == 0


# --- what is not known is not called unspent -----------------------------------------------------


def test_all_counts_as_spent_while_nobody_knows_what_was_answered_after_a_backup(folder):
    ledger = make(folder)
    about = {"digest": bytes(32), "kind": "total", "asker": "server", "run": "run"}
    paid = ledger.for_query(query_id="total", generation=0, round="cd" * 32, **about)
    paid.charge(TotalEvent(FullBatch(), 50.0, 1, 4), [0])
    paid.store(b"an answer")
    care.backup(ledger.path, folder / "copy")
    ledger.path.unlink()
    assert care.restore(folder / "copy", ledger.path) == care.UNWITNESSED
    for _ in range(2):
        restored = DurableLedger.open(ledger.path)
        summary = summary_of(restored)
        assert (restored.spent(), restored.left(), restored.used(), restored.local()) == (
            3.0,
            0.0,
            1.0,
            math.inf,
        )
        assert (summary["spent_epsilon"], summary["local_epsilon"]) == (3.0, None)
        assert (
            "own numbers (the shuffler itself, or under masks all other silos and the "
            "server together): no bound"
        ) in said_of(summary)
        care.write_off(ledger.path)
    assert summary["closed"] == ""


def test_a_restored_ledger_says_that_it_is_closed_and_is_as_it_was_once_its_witness_confirms_it(
    witnessed,
):
    copy = witnessed.path.with_suffix(".copy")
    care.backup(witnessed.path, copy)
    spent, seen = witnessed.spent(), witness(witnessed).read_bytes()
    witness(witnessed).unlink()
    witnessed.path.unlink()
    assert care.restore(copy, witnessed.path)
    witness(witnessed).write_bytes(seen)
    assert summary_of(DurableLedger.open(witnessed.path))["closed"].startswith(
        "it was restored from a backup"
    )
    assert care.confirm(witnessed.path) == ""
    again = DurableLedger.open(witnessed.path)
    assert (again.spent(), again.closed) == (spent, "")


@pytest.mark.parametrize(
    "event", [{}, {"witness": "", "count": 2}, {"witness": "/elsewhere", "count": 2}]
)
def test_no_hand_made_word_confirms_a_ledger_without_a_witness(folder, event):
    ledger = make(folder)
    ask(ledger, "q1")
    care.backup(ledger.path, folder / "copy")
    ledger.path.unlink()
    care.restore(folder / "copy", ledger.path)
    forged = (
        DurableLedger.open(ledger.path)
        ._file.snapshot()
        .draft("confirm", "2026-01-01T00:00:00.000+00:00", event=event)
    )
    with tampering(ledger.path) as connection:
        connection.execute(
            f"INSERT INTO entries VALUES ({', '.join('?' * len(forged.row()))})", forged.row()
        )
    refused(ledger.path)
