"""The durable ledger answers in three steps, charge, store, send, by every rule, and what is spent
stays spent.
"""

import contextlib
import dataclasses
import gc
import json
import math
import os
import sqlite3
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledgers import (
    BUDGET,
    CHEAP,
    DIGEST,
    ask,
    asked,
    make,
    refuses,
    settled,
    table,
    tampering,
    watch_steps,
)

from silodp.core.errors import BadInput, Refused
from silodp.core.events import Event
from silodp.core.privacy.accounting import GDP, Budget, Committed, Renyi, budget_array
from silodp.core.sampling import DisjointBatches, FullBatch, Poisson, WithoutReplacement
from silodp.silo.ledger import file as ledgerfile
from silodp.silo.ledger.chain import Entry
from silodp.silo.ledger.durable import DurableLedger, Identity
from silodp.silo.ledger.memory import MemoryLedger

# --- charge, store, send -------------------------------------------------------------------------


def test_a_charge_adds_up_as_the_rule_says_and_survives_reopening(folder):
    ledger = make(folder)
    ask(ledger, "q1", event=Event(FullBatch(), 4.0))
    ask(ledger, "q2", event=Event(FullBatch(), 5.0, 2))
    again = DurableLedger.open(folder / "a.ledger")
    expected = {"": np.asarray(1 / 16 + 2 / 25)}
    for one in (ledger, again):
        assert one.used() == pytest.approx(
            (1 / 16 + 2 / 25) / GDP().capacity(budget_array(BUDGET)), rel=1e-15
        )
        assert one.spent() == GDP().epsilon(expected, np.asarray(BUDGET.delta))
        assert one.left() == BUDGET.epsilon - one.spent()
        one.verify()
    assert [(e.act, e.query_id, e.amount) for e in again.entries()] == [
        ("charge", "q1", 1 / 16),
        ("answer", "q1", 0.0),
        ("charge", "q2", 2 / 25),
        ("answer", "q2", 0.0),
    ]
    assert again.head() == (4, list(again.entries())[-1].hash)


def test_the_charge_is_on_disk_and_anchored_before_a_record_is_read(folder):
    ledger, seen = make(folder), []

    def compute() -> bytes:
        with tampering(ledger.path) as other:
            seen.extend(other.execute("SELECT act, query_id, hash FROM entries").fetchall())
        seen.append(json.loads(ledger.anchor.read_text())["head"])
        return b"answer"

    settled(asked(ledger), CHEAP, compute)
    assert seen[0][:2] == ("charge", "q")
    assert seen == [seen[0], seen[0][2]]


def test_commit_then_anchor_file_then_its_name_are_synced_in_this_order(folder, monkeypatch):
    ledger, steps = make(folder), []
    watch_steps(monkeypatch.setattr, lambda step: steps.append(step))
    asked(ledger).charge(CHEAP, [0])
    slip_begin, *rest = [s for s in steps if s not in ("open", "write")]
    assert (slip_begin, rest) == (
        "BEGIN",
        [
            "COMMIT",
            "BEGIN",
            "INSERT",
            "COMMIT",
            "fsync file",
            "replace",
            "fsync folder",
        ],
    )


def test_between_a_commit_and_its_anchor_no_other_process_can_write(folder, monkeypatch):
    ledger, found = make(folder), []
    write = ledgerfile.write_anchor

    def watched(place, state):
        other = sqlite3.connect(ledger.path, timeout=0, isolation_level=None)
        with contextlib.closing(other):
            (count,) = other.execute("SELECT count(*) FROM entries").fetchone()
            for begin in ("BEGIN EXCLUSIVE", "BEGIN IMMEDIATE; INSERT INTO meta VALUES ('a', 'b')"):
                with pytest.raises(sqlite3.OperationalError, match="locked"):
                    other.executescript(f"{begin}; COMMIT")
            found.append((count, state.sequence))
        write(place, state)

    monkeypatch.setattr(ledgerfile, "write_anchor", watched)
    ask(ledger)
    assert found == [(1, 1), (2, 2)]
    assert json.loads(ledger.anchor.read_text())["count"] == 2


def test_an_answer_takes_two_transactions_and_a_repetition_one(folder, monkeypatch):
    ledger, steps = make(folder), []
    about = {"query_id": "q", "digest": DIGEST, "kind": "grad", "asker": "a", "run": "r"}
    about |= {"generation": 0, "round": "", "most_local": math.inf, "now": 0.0}
    watch_steps(monkeypatch.setattr, lambda step: steps.append(step))

    def answered() -> bytes:
        with ledger.question(**about) as paid:
            if paid.answer is not None:
                return paid.answer
            paid.charge(CHEAP, [0])
            assert json.loads(ledger.anchor.read_text())["count"] == 1
        return paid.store(b"answer")

    assert answered() == b"answer"
    assert steps.count("BEGIN") == 2
    steps.clear()
    assert answered() == b"answer"
    assert "INSERT" not in steps
    assert [entry.act for entry in ledger.entries()] == ["charge", "answer"]


def test_a_question_that_ends_in_an_error_of_the_caller_charges_nothing_and_keeps_its_error(folder):
    ledger = make(folder)
    about = {"query_id": "q", "digest": DIGEST, "kind": "grad", "asker": "a", "run": "r"}
    about |= {"generation": 0, "round": "", "most_local": math.inf, "now": 0.0}
    with pytest.raises(BadInput, match="mine"), ledger.question(**about):
        raise BadInput("mine")
    assert not list(ledger.entries())
    assert ask(ledger) == b"an answer"


def test_sqlite_promises_that_a_commit_survives_a_power_cut(used):
    with contextlib.closing(ledgerfile.connect(used.path)) as connection:
        assert connection.execute("PRAGMA synchronous").fetchone() == (3,)  # EXTRA
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    assert sorted(p.name for p in used.path.parent.iterdir()) == ["a.ledger", "a.ledger.anchor"]


def test_a_repeated_id_returns_the_first_bytes_and_costs_nothing(folder):
    ledger = make(folder)
    assert ask(ledger, "q", b"first") == b"first"
    before = ledger.head()
    for one in (ledger, DurableLedger.open(folder / "a.ledger")):
        assert asked(one).answer == b"first"
        assert ask(one, "q", b"second") == b"first"
        late = asked(one)
        late.charge(CHEAP, [0])
        assert late.store(b"third") == late.answer == b"first"
    assert ledger.head() == before


def test_of_an_answered_question_one_entry_is_held_and_of_words_that_all_have_one_copy(folder):
    made = make(folder)
    for number in range(20):
        ask(made, f"q{number}")
    for ledger in (made, DurableLedger.open(folder / "a.ledger")):
        queries = ledger._file.state.queries.values()
        held = [
            held for known in queries for held in gc.get_referents(known) if isinstance(held, Entry)
        ]
        assert held == [known.charge for known in queries]
        assert len(held) == 20
        assert all(
            len({id(getattr(entry, word)) for entry in held}) == 1
            for word in ("act", "run", "asker", "kind", "bucket")
        )


def test_an_id_with_other_content_is_refused(folder):
    ledger = make(folder)
    ask(ledger)
    with refuses("id-reused"):
        asked(ledger, digest=b"\1" * 32)
    fresh, other = asked(ledger, "q2"), asked(ledger, "q2", b"\1" * 32)
    fresh.charge(CHEAP, [0])
    for act in (lambda: other.charge(CHEAP, [0]), lambda: other.store(b"x")):
        with refuses("id-reused"):
            act()
    for event in (
        Event(FullBatch(), 999.0),
        Event(FullBatch(), 1000.0, 2),
        Event(DisjointBatches(2), 1000.0),
    ):
        with refuses("id-reused"):
            asked(ledger, "q2").charge(event, [0])


def test_a_purged_id_is_refused_and_its_bytes_are_gone_from_the_file(folder):
    ledger = make(folder)
    ask(ledger, "q", b"marked bytes" * 50)
    late, spent = asked(ledger), ledger.used()
    late.answer = None
    assert b"marked bytes" in ledger.path.read_bytes()
    ledger.purge("q")
    ledger.purge("q")
    assert b"marked bytes" not in ledger.path.read_bytes()
    for one in (ledger, DurableLedger.open(ledger.path)):
        with refuses("purged"):
            asked(one)
        assert one.used() == spent
    for act in (lambda: late.charge(CHEAP, [0]), lambda: late.store(b"again")):
        with refuses("purged"):
            act()
    with pytest.raises(BadInput, match="has no query 'unknown'"):
        ledger.purge("unknown")


def test_what_is_charged_but_not_stored_may_be_computed_again_under_that_charge(folder):
    ledger = make(folder)
    asked(ledger).charge(CHEAP, [0])
    again = DurableLedger.open(folder / "a.ledger")
    assert asked(again).answer is None
    assert ask(again, "q", b"answer") == b"answer"
    assert [e.act for e in again.entries()] == ["charge", "answer"]


def test_nothing_is_stored_without_a_charge(folder):
    ledger = make(folder)
    with refuses("ledger"):
        asked(ledger).store(b"answer before charge")
    assert ledger.head()[0] == 0


def test_the_budget_is_refused_before_it_is_passed_and_a_refusal_costs_nothing(folder):
    ledger = make(folder)
    share = GDP().capacity(budget_array(BUDGET)) / 4
    event = Event(FullBatch(), float(share**-0.5) * (1 + 1e-12))
    for k in range(4):
        ask(ledger, f"q{k}", event=event)
    before = ledger.head()
    with refuses("budget"):
        asked(ledger, "q4").charge(event, [0])
    assert ledger.head() == before
    assert 0.999999 < ledger.used() <= 1
    assert ledger.spent() <= BUDGET.epsilon


@pytest.mark.parametrize(
    ("code", "event"),
    [
        ("budget", Event(FullBatch(), 0.0)),
        ("noise", Event(FullBatch(), float("nan"))),
        ("noise", Event(FullBatch(), float("inf"))),
        ("noise", Event(FullBatch(), -1.0)),
        ("noise", Event(FullBatch(), 10.0, -5)),
        ("noise", Event(FullBatch(), 10.0, 0)),
        ("noise", Event(FullBatch(), "ten")),  # type: ignore[arg-type]
        ("shape", Event(FullBatch(), np.ones((2, 1)))),  # type: ignore[arg-type]
        ("batch", Event(DisjointBatches(4, 4), 10.0)),
        ("batch", Event(DisjointBatches(4, -1), 10.0)),
        ("batch", Event(DisjointBatches(4, 0, "a\nb"), 10.0)),
        ("batch", Event(DisjointBatches(4, 0, 7), 10.0)),  # type: ignore[arg-type]
        ("rule", Event(Poisson(0.1), 10.0)),
    ],
)
def test_a_senseless_event_is_refused_with_a_fixed_code(folder, code, event):
    ledger = make(folder)
    with refuses(code):
        asked(ledger).charge(event, [0])
    assert ledger.head()[0] == 0


@pytest.mark.parametrize("bad", ["", "a\x1b[2Jb", "\ud800", "x" * 201])
def test_an_id_that_would_upset_a_terminal_or_the_file_is_refused(folder, bad):
    with refuses("id"):
        asked(make(folder), bad)


def test_a_wrong_number_of_silos_is_refused(folder):
    with refuses("shape"):
        asked(make(folder)).charge(CHEAP, [0, 1])


# --- rules ---------------------------------------------------------------------------------------

SCHEDULE = (Event(Poisson(0.25), 4.0, 6), Event(FullBatch(), 5.0, 3))
full = st.just(FullBatch())
disjoint = st.builds(DisjointBatches, st.just(3), st.integers(0, 2), st.sampled_from(["a", "b"]))
noise = st.sampled_from([2.0, 3.5, 6.0])
RULES = {
    "gdp": (GDP(), st.builds(Event, full | disjoint, noise, st.integers(1, 3))),
    "renyi": (
        Renyi(6.0),
        st.builds(
            Event,
            full | disjoint | st.just(Poisson(0.5)) | st.just(WithoutReplacement(0.2)),
            noise,
            st.integers(1, 3),
        ),
    ),
    "committed": (
        Committed(SCHEDULE),
        st.sampled_from([dataclasses.replace(e, count=c) for e in SCHEDULE for c in (1, 2)]),
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_the_running_total_is_the_rules_own_and_never_passes_its_capacity(name):
    rule, events = RULES[name]
    budget = Budget(6.0, 1e-4)

    @settings(max_examples=12, deadline=None, database=None, derandomize=True)
    @given(st.lists(events, min_size=1, max_size=14))
    def check(sequence):
        with tempfile.TemporaryDirectory(
            dir="/dev/shm" if os.path.isdir("/dev/shm") else None
        ) as place:
            ledger = make(Path(place), rule=rule, budget=budget, registry=Path(place) / "registry")
            memory = MemoryLedger(rule, budget, [40])
            buckets = {}
            for k, event in enumerate(sequence):
                try:
                    memory.charge(event, [0])
                except Refused:
                    with refuses("budget"):
                        ask(ledger, f"q{k}", event=event)
                    continue
                ask(ledger, f"q{k}", event=event)
                key, amount = rule.price(event, np.asarray(40))
                buckets[key] = buckets.get(key, 0.0) + amount
            assert ledger.used() * ledger.capacity == pytest.approx(
                float(rule.total(buckets)), rel=1e-12
            )
            assert ledger.used() <= 1
            assert ledger.spent() == pytest.approx(memory.epsilon().item(), rel=1e-12)
            DurableLedger.open(ledger.path).verify()

    check()


def test_a_record_of_a_partition_pays_for_its_worst_batch_only(folder):
    ledger = make(folder)
    for index in range(4):
        ask(ledger, f"q{index}", event=Event(DisjointBatches(4, index), 10.0 + index))
    assert ledger.used() * ledger.capacity == pytest.approx(1 / 100)
    assert {e.bucket for e in ledger.entries() if e.act == "charge"} == {
        f"run@0/4/{k}" for k in range(4)
    }


def test_an_infinite_budget_an_order_grid_and_a_schedule_that_does_not_fit_are_refused(folder):
    for options, why in (
        ({"budget": Budget(float("inf"), 1e-5)}, "epsilon is inf"),
        ({"rule": Renyi(np.array([2.0, 3.0]))}, "one order"),
        ({"rule": Renyi(1.5)}, "nothing could ever be asked"),
        ({"rule": Committed((Event(FullBatch(), 0.1),))}, "nothing could ever be asked"),
    ):
        with pytest.raises(BadInput, match=why):
            make(folder, **options)
    with pytest.raises(BadInput, match="records is 39, but the identity is of 40"):
        DurableLedger.create(
            folder / "a.ledger",
            rule=GDP(),
            budget=BUDGET,
            records=39,
            identity=Identity.of(*table()),
        )
    assert list(folder.iterdir()) == []
    make(folder)


# --- partitions ----------------------------------------------------------------------------------


def test_a_partition_is_drawn_once_and_stays_through_reopening(folder):
    ledger = make(folder)
    first = ledger.partition("run", 4, generation=0)
    assert sorted(first) == list(range(40))
    again = DurableLedger.open(ledger.path)
    assert again.recognise(*table()) == (1.0, 0)
    for one in (ledger, again):
        assert (one.partition("run", 4, generation=0) == first).all()
    assert [e.act for e in again.entries()] == ["partition"]
    assert not (
        ledger.partition("run", 8, generation=0) == first
    ).all()  # 1 in 40! if both were drawn fairly


def test_when_rows_move_a_partition_is_drawn_anew_and_charged_on_top(folder):
    ledger, (x, y) = make(folder), table()
    first, event = ledger.partition("run", 4, generation=0), Event(DisjointBatches(4, 0), 10.0)
    ask(ledger, "q1", event=event)
    asked(ledger, "q2").charge(event, [0])
    known, moved = ledger.recognise(x[::-1], y[::-1])
    assert known == 1.0
    assert not (ledger.partition("run", 4, generation=moved) == first).all()
    ask(ledger, "q3", event=Event(DisjointBatches(4, 1), 10.0))
    assert ledger.used() * ledger.capacity == pytest.approx(3 / 100)
    with refuses(
        "id-reused"
    ):  # its charge was for the old partition, and would not cover an answer on the new one
        asked(ledger, "q2").charge(event, [0])


def test_whoever_has_the_rows_as_they_were_is_answered_nothing(folder):
    ledger, (x, y) = make(folder), table()
    other = DurableLedger.open(ledger.path)
    _, moved = other.recognise(x[::-1], y[::-1])
    for one in (ledger, other):
        with refuses("ledger"):
            one.partition("run", 4, generation=0)
        for event in (CHEAP, Event(DisjointBatches(4), 10.0)):
            with refuses("ledger"):
                asked(one, generation=0).charge(event, [0])
    assert other.head()[0] == 1
    asked(ledger, generation=moved).charge(CHEAP, [0])


def test_a_file_that_grew_is_priced_by_the_records_that_it_has_now(folder):
    """Of 5 records floor(0.39 n) are one in five, of 40 they are fifteen: a price four times as
    high.
    """
    budget, event = Budget(50.0, 1e-5), Event(WithoutReplacement(0.39), 1.0)
    x, y = table()
    small = make(folder, rule=Renyi(2.0), budget=budget, data=(x[:5], y[:5]))
    asked(small, "small").charge(event, [0])
    small.recognise(x, y)
    asked(small, "grown").charge(event, [0])
    made = make(
        folder,
        "b.ledger",
        rule=Renyi(2.0),
        budget=budget,
        data=table(seed=9),
        registry=folder / "r",
    )
    asked(made, "new").charge(event, [0])
    amounts = [
        [entry.amount for entry in ledger.entries() if entry.act == "charge"]
        for ledger in (small, made)
    ]
    assert amounts[0][1] == amounts[1][0]
    assert amounts[0][1] > 1.5 * amounts[0][0]
    assert DurableLedger.open(small.path).spent() == small.spent()
