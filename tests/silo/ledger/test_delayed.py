"""The ledger as others may see it: nothing of a charge before the end of its slot, whenever its
answer was ready.
"""

from dataclasses import dataclass
from datetime import UTC, datetime

import pytest
from ledgers import CHEAP, asked, make, refused

from silodp.core.events import Event
from silodp.core.sampling import FullBatch
from silodp.silo.ledger.delayed import delayed
from silodp.silo.ledger.reserve import PASSED_MOST, take
from silodp.silo.ledger.view import queries_of, summary_of

BEGIN = 1_750_000_000.0
SLOT = 3.0


@pytest.fixture
def clock(monkeypatch):
    """The time of entries, in seconds after BEGIN."""
    at = [0.0]

    def now() -> str:
        return datetime.fromtimestamp(BEGIN + at[0], UTC).isoformat(timespec="milliseconds")

    monkeypatch.setattr("silodp.silo.ledger.file.now", now)
    return at


def answered(ledger, clock, name: str, begin: float, took: float) -> None:
    clock[0] = begin
    paid = asked(ledger, name)
    paid.charge(CHEAP, [0])
    clock[0] = begin + took
    paid.store(b"an answer")


@dataclass(frozen=True)
class Caps:
    hold_share: float = 1.0
    holds_per_asker: int = 4
    hold_seconds: int = 100


def held(ledger, number: int, now: float) -> str:
    """Takes a hold for one run, in the place of the one before it."""
    about = {"hold": f"h{number}", "digest": "0" * 64, "asker": "server", "run": "run"}
    events = [Event(FullBatch(), 100.0)]
    generation = ledger._file.state.generation
    took = take(
        ledger,
        **about,
        number=number,
        events=events,
        caps=Caps(),
        now=now,
        generation=generation,
    )
    return took.code


def seen(ledger, at: float):
    return delayed(ledger.path, lambda: SLOT, clock=lambda: BEGIN + at)


@pytest.mark.parametrize("took", [0.02, 0.16, 2.9])
def test_a_charge_and_its_answer_are_seen_at_the_end_of_the_slot_however_long_it_took(
    folder, clock, took
):
    ledger = make(folder)
    answered(ledger, clock, "q", 0.0, took)
    for at in (0.0, took, 2.999):
        hidden = seen(ledger, at)
        assert queries_of(hidden) == []
        assert (hidden.used(), hidden.head()[0], hidden.released()[0]) == (0.0, 0, 0)
        assert list(hidden.entries()) == []
        assert hidden.stored("q") is None
    shown = seen(ledger, SLOT)
    assert [q["answer"] for q in queries_of(shown)] == ["kept"]
    assert summary_of(shown)["count"] == summary_of(ledger)["count"] == 2


def test_an_answer_that_was_late_is_seen_at_the_end_of_the_slot_in_which_it_came(folder, clock):
    ledger = make(folder)
    answered(ledger, clock, "q", 0.0, 4.0)
    for at, fate in ((2.9, []), (3.0, ["not yet"]), (5.9, ["not yet"]), (6.0, ["kept"])):
        assert [q["answer"] for q in queries_of(seen(ledger, at))] == fate


def test_one_page_follows_as_slots_end_and_shows_all_where_there_is_no_slot(folder, clock):
    ledger, at = make(folder), [0.0]
    page = delayed(ledger.path, lambda: SLOT, clock=lambda: BEGIN + at[0])
    for k in range(3):
        answered(ledger, clock, f"q{k}", SLOT * k, 0.1)
        at[0] = SLOT * k + 2.0
        assert len(queries_of(page)) == k
    at[0] = 3 * SLOT
    assert len(queries_of(page)) == 3
    answered(ledger, clock, "now", 100.0, 0.1)
    assert len(queries_of(delayed(ledger.path, lambda: 0.0, clock=lambda: BEGIN))) == 4
    page.verify()


def test_a_clock_that_was_put_back_hides_nothing_for_long(folder, clock):
    ledger = make(folder)
    answered(ledger, clock, "q", 1e6, 0.1)
    assert len(queries_of(seen(ledger, 0.0))) == 1


def test_looking_writes_neither_anchor_nor_ledger_and_still_sees_a_rollback(folder, clock):
    ledger = make(folder)
    before = ledger.path.read_bytes(), ledger.anchor.read_bytes()
    answered(ledger, clock, "q", 0.0, 0.1)
    after = ledger.anchor.read_bytes()
    page = seen(ledger, 1.0)
    assert page.used() == 0.0
    assert ledger.anchor.read_bytes() == after
    ledger.path.write_bytes(before[0])
    refused(ledger.path, "older copy")
    with pytest.raises(Exception, match="entry 2 is gone"):
        page.used()


def test_a_checkpoint_shows_no_charge_before_the_end_of_its_slot(folder, clock):
    ledger = make(folder)
    answered(ledger, clock, "q", 0.0, 0.1)
    clock[0] = 0.2
    for k in range(PASSED_MOST):
        assert held(ledger, k, BEGIN) == ""
    assert [entry.act for entry in ledger.entries()].count("checkpoint") > 0
    hidden = seen(ledger, 2.9)
    assert queries_of(hidden) == []
    assert (hidden.used(), hidden.head()[0], hidden.released()[0]) == (0.0, 0, 0)
    assert list(hidden.entries()) == []
    assert summary_of(hidden)["holds"] == []
    shown = seen(ledger, 0.2 + SLOT)
    assert [q["answer"] for q in queries_of(shown)] == ["kept"]
    assert shown.head() == ledger.head()


def test_the_policy_is_read_once_for_each_look_and_not_for_each_entry(folder, clock):
    ledger, reads = make(folder), []
    for k in range(2 * PASSED_MOST):
        assert held(ledger, k, BEGIN) == ""
    page = delayed(ledger.path, lambda: reads.append(1) or SLOT, clock=lambda: BEGIN + SLOT)
    assert len(reads) == 1
    assert page.used() == 0.0
    assert len(reads) == 2
    assert page.head() == ledger.head()


def test_an_answer_that_was_just_purged_is_gone_and_no_fault_of_the_ledger(folder, clock):
    ledger = make(folder)
    answered(ledger, clock, "q", 0.0, 0.1)
    page = seen(ledger, 10.0)
    assert page.stored("q") == b"an answer"
    clock[0] = 9.0
    ledger.purge("q")
    assert page.stored("q") is None
    assert [q["answer"] for q in queries_of(page)] == ["kept"], "until its slot ends"
