"""A ledger that is missing, altered, damaged or rolled back is refused, whoever changed it and
however well.
"""

import dataclasses
import json
import random
import shutil
from collections import Counter

import pytest
from ledgers import CHEAP, PRICE, ask, asked, make, refused, refuses, table, tampering
from typer.testing import CliRunner

from silodp.cli.app import app
from silodp.core.errors import BadInput
from silodp.core.events import Event
from silodp.core.privacy.accounting import Budget, Renyi
from silodp.core.sampling import FullBatch
from silodp.silo.ledger import chain
from silodp.silo.ledger.durable import DurableLedger
from silodp.silo.ledger.state import LedgerState

# --- missing, altered, rolled back ---------------------------------------------------------------


def test_a_missing_ledger_or_anchor_is_refused_and_never_made(folder):
    ledger = make(folder)
    anchor = ledger.anchor.read_bytes()
    ledger.anchor.unlink()
    refused(ledger.path, "anchor .* is missing")
    with refuses("ledger"):
        asked(ledger)
    ledger.anchor.write_bytes(anchor)
    ledger.path.unlink()
    refused(ledger.path, "there is no ledger at")
    with refuses("ledger"):
        asked(ledger)
    assert not ledger.path.exists()


@pytest.mark.parametrize("size", [0, 1, 100, 4096, 8192, -4096, -1])
def test_a_truncated_ledger_is_refused(used, size):
    whole = used.path.read_bytes()
    used.path.write_bytes(whole[:size])
    refused(used.path)
    with refuses("ledger"):
        asked(used, "new")


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"count": 0}', '{"ledger": "x", "count": 0, "head": ""}', "\xff"]
)
def test_a_damaged_anchor_is_refused(used, content):
    used.anchor.write_text(content)
    refused(used.path, "anchor")


@pytest.mark.parametrize(
    "change",
    [{"count": 999}, {"count": -1}, {"head": "0" * 64}, {"ledger": "another"}, {"count": "many"}],
)
def test_an_anchor_that_saw_something_else_is_refused(used, change):
    used.anchor.write_text(json.dumps(json.loads(used.anchor.read_text()) | change))
    refused(used.path, "anchor")
    with refuses("ledger"):
        asked(used, "new")


def test_an_older_copy_is_refused(used):
    old, old_anchor = used.path.read_bytes(), used.anchor.read_bytes()
    ask(used, "later")
    used.path.write_bytes(old)
    refused(used.path, "so this is an older copy")
    used.anchor.write_bytes(old_anchor)
    with refuses(
        "ledger"
        # both rolled back: a live gate still knows better; a new one would need the heads in the
        # releases
    ):
        asked(used, "new")


def test_an_older_anchor_is_brought_up_to_date(used):
    old = used.anchor.read_bytes()
    ask(used, "later")
    newer = used.anchor.read_bytes()
    used.anchor.write_bytes(old)
    DurableLedger.open(used.path)
    assert used.anchor.read_bytes() == newer


def test_a_fresh_ledger_in_its_place_is_refused(used, tmp_path):
    fresh = make(used.path.parent, "b.ledger", data=table(seed=1))
    shutil.copy(fresh.path, used.path)
    refused(used.path, "anchor .* belongs to another ledger")
    shutil.copy(fresh.anchor, used.anchor)
    with refuses("ledger"):  # with its anchor too: a live gate notices
        asked(used, "new")


def test_any_character_of_any_column_of_any_entry_breaks_its_hash(used):
    checked = 0
    for entry in used.entries():
        row = entry.row()
        assert chain.Entry.of(row) == entry
        for column, value in enumerate(row):
            others = (
                [value + 1, str(value), float(value), None]
                if isinstance(value, int)
                else [value + "x", value.encode(), None]
            )
            if isinstance(value, str):
                others += [
                    value[:i] + chr(ord(value[i]) ^ 1) + value[i + 1 :] for i in range(len(value))
                ]
            for other in others:
                with pytest.raises(chain.Altered, match="does not match its hash"):
                    chain.Entry.of((*row[:column], other, *row[column + 1 :]))
                checked += 1
    assert checked > 3000


def test_an_altered_cell_of_any_row_of_any_table_is_refused(used):
    whole, checked = used.path.read_bytes(), 0
    with tampering(used.path) as connection:
        tables = [
            name
            for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        ]
        columns = {
            name: [row[1] for row in connection.execute(f"PRAGMA table_info({name})")]
            for name in tables
        }
        rows = {
            name: connection.execute(f"SELECT {', '.join(columns[name])} FROM {name}").fetchall()
            for name in tables
        }
    for name, row, k in (
        (n, r, k) for n in tables for r in rows[n] for k in range(len(columns[n]))
    ):
        value, column, first = row[k], columns[name][k], columns[name][0]
        middle = len(value) // 2 if not isinstance(value, int) else 0
        if isinstance(value, int):
            other = value + 1000
        elif isinstance(value, bytes):
            other = (
                value[:middle] + bytes([value[middle] ^ 1 if value else 1]) + value[middle + 1 :]
            )
        else:
            other = (
                value[:middle] + chr(ord(value[middle]) ^ 1) + value[middle + 1 :] if value else "x"
            )
        if column in ("query_id", "act"):
            other = f"{value}x"  # not another query's, which the index would not let in
        with tampering(used.path) as connection:
            connection.execute(f"UPDATE {name} SET {column} = ? WHERE {first} = ?", (other, row[0]))
        refused(used.path)
        used.path.write_bytes(whole)
        checked += 1
    assert {n: len(rows[n]) for n in tables} == {
        "answers": 3,
        "entries": 12,
        "identity": 1,
        "meta": 9,
        "partitions": 1,
    }
    assert checked == 3 * 2 + 12 * 14 + 3 + 9 * 2 + 2
    DurableLedger.open(used.path).verify()


def test_a_missing_row_of_any_table_is_refused(used):
    whole = used.path.read_bytes()
    for name, key, count in (
        ("answers", "sequence", 3),
        ("entries", "sequence", 12),
        ("identity", "key", 1),
        ("meta", "name", 9),
        ("partitions", "sequence", 1),
    ):
        for k in range(count):
            with tampering(used.path) as connection:
                connection.execute(
                    f"DELETE FROM {name} WHERE {key} = (SELECT {key} FROM {name} ORDER BY "
                    f"{key} LIMIT 1 OFFSET {k})"
                )
            refused(used.path)
            used.path.write_bytes(whole)


@pytest.mark.parametrize(
    "sql",
    [
        "INSERT INTO answers VALUES (99, x'00')",
        "INSERT INTO partitions VALUES (99, x'00')",
        "INSERT INTO meta VALUES ('more', '')",
        "CREATE TABLE more (x)",
        "CREATE TRIGGER t AFTER INSERT ON entries BEGIN DELETE FROM entries; END",
        "DROP INDEX once",
        "PRAGMA application_id = 7",
    ],
)
def test_anything_added_to_the_file_or_dropped_from_it_is_refused(used, sql):
    with tampering(used.path) as connection:
        connection.execute(sql)
    refused(used.path)


def test_a_ledger_in_another_journal_mode_is_refused(used):
    with tampering(used.path) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    refused(used.path, "journal mode")


@pytest.mark.parametrize("name", ["epsilon", "delta", "rule", "records"])
@pytest.mark.parametrize("entries", [0, 1])
def test_an_edited_setting_is_refused(folder, name, entries):
    ledger = make(folder)
    for k in range(entries):
        ask(ledger, f"q{k}")
    value = {
        "epsilon": (30.0).hex(),
        "delta": (1e-3).hex(),
        "rule": chain.canonical(chain.rule_data(Renyi(20.0))),
        "records": "4000",
    }[name]
    with tampering(ledger.path) as connection:
        connection.execute("UPDATE meta SET value = ? WHERE name = ?", (value, name))
    refused(ledger.path, "settings")
    with refuses("ledger"):
        asked(ledger, "new")


def forge(ledger: DurableLedger, change) -> str:
    """Rewrites every entry by `change(entry)` and seals them all again, as somebody may who can
    write the file; the new head.
    """
    head, rows = ledger.settings.genesis, []
    for entry in list(ledger.entries()):
        entry = dataclasses.replace(entry, **change(entry), previous=head)
        rows.append(entry.chained().row())
        head = entry.chained().hash
    with tampering(ledger.path) as connection:
        connection.execute("DELETE FROM entries")
        connection.executemany(f"INSERT INTO entries VALUES ({', '.join('?' * 14)})", rows)
    return head


@pytest.mark.parametrize(
    ("why", "change", "opens"),
    [
        ("entry 6 is not what its anchor", lambda e: {"run": "innocent"}, False),
        (
            "entry 1 costs 0.004, but its event is priced 0.04",
            lambda e: {"amount": e.amount / 10, "total": e.total / 10},
            False,
        ),
        (
            "entry 1 costs 0.04, but its event is priced 0.04",
            lambda e: {"bucket": "elsewhere"},
            False,
        ),
        (
            "entry 6 records the total 0.03, but it is 0.12",
            lambda e: {"total": e.total / 4},
            False,
        ),
        (
            "entry 1 records the total 0.01, but it is 0.04",
            lambda e: {"total": e.total / 4 if e.sequence < 5 else e.total},
            True,
        ),
        (
            "entry 2 is no charge but changes the total",
            lambda e: {"total": e.total / 4 if e.act == "answer" else e.total},
            False,
        ),
        ("entry 1 cannot be understood", lambda e: {"event": "{}"}, False),
    ],
)
def test_a_chain_that_was_forged_with_right_hashes_fails_at_the_anchor_or_in_the_replay(
    folder, why, change, opens
):
    ledger = make(folder)
    for k in range(3):
        ask(ledger, f"q{k}", event=Event(FullBatch(), 5.0))
    head = forge(ledger, change)
    if "anchor" not in why:  # the forger reaches the second place too
        ledger.anchor.write_text(
            json.dumps({"ledger": ledger.settings.ledger, "count": 6, "head": head})
        )
    if opens:
        DurableLedger.open(ledger.path)
    refused(ledger.path, why)


def test_a_replay_takes_no_entry_that_cannot_come_next(folder):
    state = LedgerState(make(folder).settings)
    charge = {
        "act": "charge",
        "event": chain.plain(CHEAP),
        "bucket": "",
        "amount": PRICE,
        "query_id": "q",
    }
    answer = {"act": "answer", "event": {"sha256": ""}, "query_id": "q"}
    purge = {"act": "purge", "event": {}, "query_id": "q"}
    partition = {"act": "partition", "event": {"partition": "run", "batches": 2}}
    for entry, impossible in (
        (charge, [answer, purge, answer | {"query_id": ""}, partition | {"act": "unknown"}]),
        (answer, [charge, answer | {"query_id": "other"}, partition | {"query_id": "q"}]),
        (partition, [answer]),
        (purge, [partition]),
        (charge | {"query_id": "r"}, [purge, answer]),
    ):
        for other in impossible:
            with pytest.raises(chain.Altered):
                state.apply(state.draft(time="", **other))
        taken = state.draft(time="", **entry)
        for broken in ({"sequence": taken.sequence + 1}, {"previous": "0" * 64}):
            with pytest.raises(chain.Altered):
                state.apply(dataclasses.replace(taken, **broken))
        state.apply(taken)
    assert (state.sequence, state.total) == (5, 2 * PRICE)


@pytest.mark.parametrize("more", [{"levels": 2}, {"noise_bits": 9}, {"note": ""}])
def test_a_replay_takes_no_event_with_a_field_of_another_kind(folder, more):
    """Of a total whose fields were taken away but for one, a Gaussian of any noise could be
    made.
    """
    state = LedgerState(make(folder).settings)
    event = chain.plain(CHEAP) | {"own": state.records, "round": "0" * 64} | more
    with pytest.raises(chain.Altered):
        state.apply(state.draft("charge", "", event=event, bucket="", amount=PRICE, query_id="q"))


def test_a_total_above_the_budget_does_not_verify(folder, monkeypatch):
    ledger = make(folder, budget=Budget(0.5, 1e-5))
    monkeypatch.setattr(
        LedgerState, "capacity", property(lambda self: 1e9, lambda self, value: None), raising=False
    )
    ask(ledger, event=Event(FullBatch(), 1.0))
    monkeypatch.undo()
    refused(ledger.path, "is above the")


def test_a_corrupted_answer_is_not_sent(folder):
    ledger = make(folder)
    ask(ledger)
    with tampering(ledger.path) as connection:
        connection.execute("UPDATE answers SET bytes = x'00'")
    with refuses("ledger"):
        asked(ledger)
    with refuses("ledger"):
        asked(DurableLedger.open(ledger.path))


def test_a_lost_answer_is_not_computed_again(folder):
    ledger = make(folder)
    ask(ledger)
    with tampering(ledger.path) as connection:
        connection.execute("DELETE FROM answers")
    with refuses("ledger"):
        asked(ledger)


def test_random_damage_to_the_file_is_refused_or_changes_nothing(used):
    generator, whole = random.Random(7), used.path.read_bytes()
    entries, spent, seen = list(used.entries()), used.spent(), Counter()
    for _ in range(150):
        damaged = bytearray(whole)
        damaged[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        used.path.write_bytes(damaged)
        try:
            other = DurableLedger.open(used.path)
            other.verify()
            assert (list(other.entries()), other.spent()) == (entries, spent)
            seen["harmless"] += 1
        except BadInput:
            seen["refused"] += 1
        used.path.write_bytes(whole)
    assert seen["refused"] > 20


@pytest.mark.parametrize("sequence", [0, -1])
def test_an_entry_before_the_first_is_seen(used, sequence):
    """No replay reads it, but whoever lists entries would."""
    first = next(iter(used.entries()))
    planted = dataclasses.replace(first, sequence=sequence, query_id="planted")
    with tampering(used.path) as connection:
        connection.execute(
            f"INSERT INTO entries VALUES ({', '.join('?' * len(planted.row()))})", planted.row()
        )
    refused(used.path, "entries before its first")


def test_verify_says_what_the_anchor_has_not_seen_and_does_not_bring_it_up(folder):
    ledger = make(folder)
    before = ledger.anchor.read_bytes()
    ask(ledger, "q1")
    ledger.anchor.write_bytes(before)  # as a process leaves it that is killed between the two
    said = " ".join(CliRunner().invoke(app, ["ledger", "verify", str(ledger.path)]).output.split())
    assert "2 entries" in said
    assert "The anchor covers 0 of them" in said
    assert ledger.anchor.read_bytes() == before
    DurableLedger.open(ledger.path)
    assert (
        "the anchor has seen"
        not in CliRunner().invoke(app, ["ledger", "verify", str(ledger.path)]).output
    )
