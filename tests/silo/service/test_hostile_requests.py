"""What a listed asker may make a gate compute, remember and write down without paying for it."""

import itertools
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import test_door_holds
import test_masked_gate as masked
from test_door import POLICY, SERVER, asked, code, reply, silo
from test_door_holds import told, wants, wish

from silodp.core.errors import BadInput
from silodp.core.events import Event, TotalEvent
from silodp.core.privacy import sampled
from silodp.core.privacy.accounting import GDP, Renyi
from silodp.core.protocol.codec import encode_query
from silodp.core.protocol.offers import KeyRequest, encode_key_request
from silodp.core.protocol.quote import HoldRequest, ReleaseRequest, encode_hold
from silodp.core.sampling import DisjointBatches, FullBatch, Poisson, WithoutReplacement
from silodp.silo.ledger import reserve
from silodp.silo.ledger.chain import Entry, canonical
from silodp.silo.ledger.durable import DurableLedger
from silodp.silo.ledger.state import PASSED, LedgerState
from silodp.silo.service import limits
from silodp.silo.service.limits import (
    HOUR_BYTES,
    HOUR_WORK,
    LIBRARY_COST,
    MOST_WORK,
    PRICES,
    price_work,
)

ONE = Event(FullBatch(), 20.0)


def ended(door, run: str, number=None) -> None:
    """The run's hold is released."""
    number = next(test_door_holds.NUMBERS) if number is None else number
    request = ReleaseRequest(POLICY.silo, run, "end", POLICY.definition, number)
    assert told(door, encode_hold(request, SERVER)).code == ""


def churn(door, count: int, first: int = 0) -> None:
    """Takes and releases so many holds."""
    for k in range(first, first + count):
        assert (
            told(door, wish(f"h{k}", (Event(FullBatch(), 50.0 + k),), run=f"r{k % 7}")).code == ""
        )
        ended(door, f"r{k % 7}")


class Reading:
    """Counts what an opening reads and prices."""

    def __init__(self, monkeypatch) -> None:
        self.entries = self.prices = 0
        of, price = Entry.of.__func__, LedgerState.price

        def counted_of(kind, row):
            self.entries += 1
            return of(kind, row)

        def counted_price(state, event):
            self.prices += 1
            return price(state, event)

        monkeypatch.setattr(Entry, "of", classmethod(counted_of))
        monkeypatch.setattr(LedgerState, "price", counted_price)

    def of(self, path) -> tuple[DurableLedger, int, int]:
        self.entries = self.prices = 0
        ledger = DurableLedger.open(path)
        return ledger, self.entries, self.prices


# --- released holds ------------------------------------------------------------------------------


def test_released_holds_cost_nothing_at_the_next_opening(tmp_path, monkeypatch):
    door, ledger = silo(tmp_path)
    assert reply(door, asked("q1"))
    spent, reading = ledger.used(), Reading(monkeypatch)
    churn(door, 150)
    again, entries, prices = reading.of(ledger.path)
    assert prices == 1, "of the one charge"
    assert entries <= 2 + 1 + reserve.PASSED_MOST, "charge, answer, checkpoint and what follows it"
    assert again.used() == spent
    assert again.head() == ledger.head()
    again.verify()
    assert reading.entries >= again.head()[0], "verify reads every entry"


def test_an_open_hold_a_number_and_a_used_id_outlive_a_checkpoint(tmp_path):
    door, ledger = silo(tmp_path)
    first = wish("first", (replace(ONE, count=3),), run="kept", number=5)
    assert told(door, first).code == ""
    late = wish("late", (ONE,), run="r1", number=6)
    churn(door, 100, first=10)
    again = DurableLedger.open(ledger.path)
    assert again._file.state.mark > 0
    assert [(o.hold.id, o.hold.run) for o in reserve.listed(again)] == [("first", "kept")]
    assert reserve.listed(again)[0].share == reserve.listed(ledger)[0].share > 0
    restarted, _ = silo(tmp_path, ledger=again)
    assert told(restarted, first).code == "", "the same request finds what it took"
    assert told(restarted, late) == "lapsed", "a request that was carried past a later one"
    assert wants(restarted, "h50", run="r50") == "lapsed", "no id is taken twice"
    ended(restarted, "kept")
    assert reserve.listed(again) == []
    again.verify()


def test_holds_that_ran_out_are_ended_by_a_checkpoint_at_the_gates_start(tmp_path, monkeypatch):
    now = [time.time()]
    door, ledger = silo(tmp_path, clock=lambda: now[0])
    assert wants(door, "left").code == ""
    now[0] += POLICY.hold_seconds + 1
    silo(tmp_path, ledger=ledger, clock=lambda: now[0])
    assert [entry.act for entry in ledger.entries()] == ["hold", "checkpoint"]
    _, _, prices = Reading(monkeypatch).of(ledger.path)
    assert prices == 0
    ledger.verify()


def test_runs_of_long_ago_are_forgotten_and_their_late_requests_stay_refused(tmp_path):
    door, ledger = silo(tmp_path)
    old = wish("old", (ONE,), run="r-old", number=10)
    assert told(door, old).code == ""
    ended(door, "r-old", number=12)
    late = wish("older", (ONE,), run="r-old", number=11)
    for k in range(100):
        assert told(door, wish(f"n{k}", (ONE,), run=f"n{k}", number=100 + 2 * k)).code == ""
        ended(door, f"n{k}", number=101 + 2 * k)
    holds = ledger._file.state.holds
    assert sum(len(runs) for runs in holds.last.values()) <= 64
    assert told(door, old) == told(door, late) == "lapsed"
    ledger.verify()


def test_verify_replays_the_entries_that_an_opening_passes_over(tmp_path):
    door, ledger = silo(tmp_path)
    churn(door, 50)
    with ledger._file.transaction() as connection:
        connection.execute("UPDATE entries SET digest = 'x' WHERE sequence = 3")
    with pytest.raises(BadInput, match="entry 3 does not match its hash"):
        DurableLedger.open(ledger.path).verify()
    with ledger._file.transaction() as connection:
        connection.execute("DELETE FROM entries WHERE sequence = 3")
    with pytest.raises(BadInput, match="missing"):
        DurableLedger.open(ledger.path)


@pytest.mark.parametrize("appended", [False, True])
def test_no_checkpoint_hides_a_charge(tmp_path, appended):
    """Somebody changes the ledger but not its anchor, and may append a checkpoint."""
    door, ledger = silo(tmp_path)
    assert reply(door, asked("q1"))
    churn(door, 50)
    whole = DurableLedger.open(ledger.path)
    entries = {entry.sequence: entry for entry in whole.entries()}
    assert entries[1].act == "charge"
    fake = replace(entries[1], act="release", amount=0.0, total=0.0).chained()
    empty = LedgerState(whole.settings)
    event = canonical(empty.checkpoint([]))
    head = whole.head()
    mark = replace(
        entries[3],
        sequence=head[0] + 1,
        act="checkpoint",
        event=event,
        previous=head[1],
        query_id="",
        total=0.0,
    ).chained()
    with whole._file.transaction() as connection:
        for old in (1, 2):
            row = replace(fake, sequence=old, query_id=f"f{old}").chained().row()
            connection.execute("DELETE FROM entries WHERE sequence = ?", (old,))
            connection.execute(f"INSERT INTO entries VALUES ({', '.join('?' * len(row))})", row)
        if appended:
            row = mark.row()
            connection.execute(f"INSERT INTO entries VALUES ({', '.join('?' * len(row))})", row)
    with pytest.raises(BadInput, match="is refused"):
        DurableLedger.open(ledger.path)


# --- the work of a price -------------------------------------------------------------------------


def test_the_dearest_single_event_may_be_priced_and_two_of_them_may_not():
    renyi = Renyi(4000.0)
    for sampling in (Poisson(0.3), WithoutReplacement(0.3)):
        assert 0 < price_work(renyi, Event(sampling, 0.1)) <= MOST_WORK
    assert price_work(GDP(), ONE) == price_work(renyi, ONE) == 0
    assert price_work(GDP(), TotalEvent(FullBatch(), 4.0, 1, 2**20)) == 0


def total(k: int) -> TotalEvent:
    return TotalEvent(FullBatch(), 60.0 + k, 1, 3)


def test_a_request_that_takes_too_long_to_price_is_refused_before_any_price(tmp_path, monkeypatch):
    computed = []
    monkeypatch.setattr(sampled, "renyi", lambda *given: computed.append(given) or 1e-6)
    door, _ = silo(tmp_path, policy=replace(POLICY, queries_per_hour=10**6), rule=Renyi(8.0))
    noises = itertools.count(1)

    def dear(events: int, hold: str) -> str:
        some = (Event(WithoutReplacement(0.3), 20.0 + next(noises) / 100) for _ in range(events))
        got = told(door, wish(hold, tuple(some), run=hold))
        return got if isinstance(got, str) else got.code

    assert (dear(20, "a"), computed) == ("rule", [])
    codes = [dear(4, f"b{k}") for k in range(20)]
    assert codes[-8:] == ["rate"] * 8
    assert len(set(computed)) <= HOUR_WORK / LIBRARY_COST


def test_refused_questions_are_priced_within_the_hours_work_too(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "HOUR_WORK", 3 * LIBRARY_COST)
    policy = replace(POLICY, minimum_noise_multiplier=0.1)
    door, ledger = silo(tmp_path, policy=policy, rule=Renyi(8.0))
    frames = [
        asked(f"q{k}", noise=0.1 + k / 1000, sampling=WithoutReplacement(0.3)) for k in range(6)
    ]
    assert [code(door, frame) for frame in frames] == ["budget"] * 3 + ["rate"] * 3
    assert [code(door, frame) for frame in frames[:3]] == ["budget"] * 3, "these prices are known"
    assert list(ledger.entries()) == []


# --- rows and bytes ------------------------------------------------------------------------------


def test_the_rate_of_holds_counts_their_events_and_not_the_requests(tmp_path):
    door, ledger = silo(tmp_path, policy=replace(POLICY, queries_per_hour=10))
    four = tuple(Event(FullBatch(), 20.0 + k) for k in range(4))
    got = [told(door, wish(f"h{k}", four)) for k in range(4)]
    assert [one if isinstance(one, str) else one.code for one in got] == ["", "", "rate", "rate"]
    batches = tuple(Event(DisjointBatches(3, k, "p"), 20.0) for k in range(3))
    assert told(door, wish("b", batches)).code == "", "batches of one noise have one price"
    again, _ = silo(
        tmp_path,
        policy=replace(POLICY, queries_per_hour=10),
        ledger=DurableLedger.open(ledger.path),
    )
    assert told(again, wish("h9", four)) == "rate", "also after a restart"


def test_an_hour_of_holds_adds_a_bounded_number_of_bytes_to_the_ledger(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "HOUR_BYTES", 2**17)
    now = [time.time()]
    door, ledger = silo(tmp_path, policy=replace(POLICY, minimum_batch=0.01), clock=lambda: now[0])
    before = ledger.path.stat().st_size
    parts = tuple(Event(DisjointBatches(7, k % 7, f"p{k}"), 500.0) for k in range(60))
    codes = Counter()
    for k in range(40):
        got = told(door, wish(f"h{k}", parts, run=f"r{k}"))
        codes[got if isinstance(got, str) else got.code] += 1
        ended(door, f"r{k}")
    assert codes["rate"] >= 20
    assert ledger.path.stat().st_size - before < 2 * 2**17


# --- memory --------------------------------------------------------------------------------------


def test_refused_masked_rounds_are_forgotten(tmp_path):
    gate = masked.Silo(tmp_path)
    gate.door._policy = replace(masked.POLICY, queries_per_hour=1)
    assert gate.code(masked.asked(gate.row())) == "answered"
    codes = [
        gate.code(masked.asked(gate.row(), query_id=f"x{k}", round=f"{k + 1}")) for k in range(50)
    ]
    assert codes == ["rate"] * 50
    (run,) = gate.door._trust._runs.values()
    assert sum(len(digests) for digests in run.asked.values()) <= 1


def test_holds_do_not_make_a_gate_read_its_ledger_again(tmp_path, monkeypatch):
    door, ledger = silo(tmp_path)
    assert code(door, asked("q0")) == "answered"
    reading = Reading(monkeypatch)
    for k in range(10):
        churn(door, 1, first=k)
        assert code(door, asked(f"q{k + 1}", noise=10.0**3)) == "answered"
    assert reading.entries <= ledger.head()[0], "each new entry once"


# --- all of it -----------------------------------------------------------------------------------


def hostile(seed: int, count: int):
    """Requests of a listed asker who wants to harm the gate, as frames made on the way."""
    draw = random.Random(seed)
    numbers = itertools.count(1)
    about = masked.POLICY.silo, masked.POLICY.definition
    rows = {}

    def hold(events, run):
        about = masked.POLICY.silo, run, f"h{next(numbers)}", masked.POLICY.definition
        wanted = tuple(("k", event) for event in events)
        return encode_hold(HoldRequest(*about, next(numbers), wanted), masked.SERVER)

    def release(run):
        request = ReleaseRequest(about[0], run, "end", about[1], next(numbers))
        return encode_hold(request, masked.SERVER)

    def query(gate, **changes):
        row = rows.get("row") or rows.setdefault("row", gate.row())
        made = masked.asked(row, query_id=f"q{next(numbers)}", **changes)
        return encode_query(made, masked.SERVER)

    def cheap(k):
        return Event(FullBatch(), 50.0 + draw.random())

    def one(gate):
        run = f"run-{draw.randrange(10**6)}"
        match draw.randrange(10):
            case 0:
                yield hold([cheap(0)], run)
                yield release(run)
            case 1:
                yield hold([cheap(k) for k in range(draw.choice((1, 8, 64)))], run)
                yield release(run)
            case 2:
                yield hold([total(draw.randrange(2**15)) for _ in range(draw.choice((1, 25)))], run)
            case 3:
                size = draw.choice((5, 300))
                parts = (Event(DisjointBatches(5, k % 5, "p"), 60.0, k + 1) for k in range(size))
                yield hold(list(parts), run)
                yield release(run)
            case 4:
                wild = draw.choice((2**53, 2**40, 2**16 + 1))
                yield hold([TotalEvent(FullBatch(), float(wild), wild, wild)], run)
                yield hold([Event(DisjointBatches(wild, wild - 1, "p"), 1e300, wild)], run)
            case 5:
                yield release(run)
                yield draw.randbytes(draw.choice((0, 3, 109, 5000)))
                yield hold([cheap(0)], run)[:-1]
            case 6:
                yield encode_key_request(KeyRequest(about[0], run, about[1]), masked.SERVER)
            case 7:
                yield query(gate, round=run)
            case 8:
                yield query(gate, round=run, noise_multiplier=draw.choice((0.01, 1e9)))
            case 9:
                yield query(gate, round=run, attempt=draw.randrange(2**31), others=[])

    def frames(gate):
        sent = 0
        while True:
            for frame in one(gate):
                yield frame
                sent += 1
                if sent == count:
                    return

    return frames


LONG = "SILODP_LONG" in os.environ
REQUESTS = 100_000 if LONG else 1500


def memory() -> int:
    """Return the bytes of memory that this process has, where the system says so."""
    place = Path("/proc/self/statm")
    if not place.exists():
        return 0
    return int(place.read_text().split()[1]) * resource.getpagesize()


def opening(path) -> float:
    """Return the processor's seconds in which a process of its own opens the ledger, once all is
    loaded: the fewest of nine times.
    """
    code = (
        "import sys, time, numpy, scipy.special, scipy.stats\n"
        "from pathlib import Path\n"
        "from silodp.silo.ledger.durable import DurableLedger\n"
        "began = time.process_time()\n"
        "DurableLedger.open(Path(sys.argv[1]))\n"
        "print(time.process_time() - began)\n"
    )
    command = [sys.executable, "-P", "-c", code, str(path)]
    found = [subprocess.run(command, capture_output=True, check=True).stdout for _ in range(9)]
    return min(map(float, found))


def test_hostile_requests_leave_a_bounded_ledger_a_bounded_memory_and_a_fast_opening(
    tmp_path, monkeypatch, capsys
):
    """With SILODP_LONG=1 there are 100,000 requests, and the figures are printed."""
    gate = masked.Silo(tmp_path)
    row = gate.row()
    for k in range(60):  # as many as the policy lets an asker charge in an hour
        assert gate.code(masked.asked(row, query_id=f"paid{k}", round=f"paid{k}")) == "answered"
        row = gate.row()
    policy = replace(masked.POLICY, queries_per_hour=60, epsilon=20.0)
    gate.door._policy = policy
    gate.door._limits._policy = policy
    reading = Reading(monkeypatch)
    _, untouched, prices = reading.of(gate.ledger.path)
    assert prices == 60
    figures = {"bytes": [gate.ledger.path.stat().st_size], "memory": [memory()]}
    if LONG:
        figures["opening"] = [opening(gate.ledger.path)]
    codes = Counter()
    seconds = []
    monkeypatch.setattr(gate.door, "_noted", lambda note: codes.update([note.code]))
    for frame in hostile(1, REQUESTS)(gate):
        began = time.perf_counter()
        gate.door.handle(frame)
        seconds.append(time.perf_counter() - began)
    figures["bytes"].append(gate.ledger.path.stat().st_size)
    figures["memory"].append(memory())
    if LONG:
        figures["opening"].append(opening(gate.ledger.path))
        with capsys.disabled():
            print(f"\n{REQUESTS} requests, before and after: {figures}")
            print(f"seconds of one: median {statistics.median(seconds)}, most {max(seconds)}")
            print(dict(codes))
    assert {"rate", "malformed", "held", "released", "offered"} <= set(codes)
    assert not {"internal", "answered"} & set(codes)
    entries = list(gate.ledger.entries())
    acts = Counter(entry.act for entry in entries)
    assert acts["hold"] <= 60
    assert acts["charge"] == 60
    assert sum(len(e.event) for e in entries if e.act in PASSED) < HOUR_BYTES
    asker = gate.door._limits._requests[policy.askers[0]]
    assert len(asker.holds) <= 60
    assert len(asker.work) <= 61
    assert len(asker.priced) <= PRICES
    assert all(len(run.asked) <= 60 for run in gate.door._trust._runs.values())
    again, read, prices = reading.of(gate.ledger.path)
    assert read <= 1.2 * untouched
    assert prices == 60, "of charges alone, and of no hold"
    assert len(again._file.state.holds.unpriced) <= policy.holds_per_asker
    assert again.used() == gate.ledger.used()
    assert len(reserve.listed(again)) > 0, "holds that count are priced when they are looked at"
    again.verify()


def test_holds_that_are_left_open_cost_nothing_at_the_next_opening(tmp_path, monkeypatch):
    """An asker lets dear ones run out: no process prices them, for they count no more."""
    gate, now = masked.Silo(tmp_path), [time.time()]
    gate.door._clock = lambda: now[0]
    notes = []
    monkeypatch.setattr(gate.door, "_noted", lambda note: notes.append(note.code))
    for k in range(masked.POLICY.holds_per_asker):
        about = masked.POLICY.silo, f"r{k}", f"h{k}", masked.POLICY.definition
        wanted = HoldRequest(*about, next(test_door_holds.NUMBERS), (("k", total(k)),))
        gate.door.handle(encode_hold(wanted, masked.SERVER))
    assert set(notes) == {"held"}
    reading = Reading(monkeypatch)
    again, _, prices = reading.of(gate.ledger.path)
    assert prices == 0
    assert len(reserve.listed(again, now[0])) == len(notes) == reading.prices
    now[0] += masked.POLICY.hold_seconds + 1
    again, _, prices = reading.of(gate.ledger.path)
    assert (reserve.listed(again, now[0]), reading.prices) == ([], 0)
    again.verify()
