"""Holds in a real ledger: they keep budget for a run, refuse others, end as they should, and never
pay for anything.
"""

import itertools
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest

from silodp.cli import app as cli
from silodp.core.errors import BadInput, Refused
from silodp.core.events import Event, TotalEvent
from silodp.core.privacy.accounting import GDP, Budget, Committed, Renyi
from silodp.core.sampling import DisjointBatches, FullBatch, Poisson
from silodp.silo.ledger import reserve
from silodp.silo.ledger.durable import DurableLedger, Identity
from silodp.silo.ledger.reserve import Outcome, finish, listed, release, take
from silodp.silo.ledger.state import ENTRY_LEAST

BUDGET = Budget(3.0, 1e-5)
UNIT = float(1 / np.sqrt(GDP().capacity(np.array(BUDGET, dtype=object)) / 100))
"""The noise multiplier of which one release costs one hundredth of the budget."""
HUNDREDTH = Event(FullBatch(), UNIT)
DIGEST = "0" * 64

processes = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Caps:
    hold_share: float = 1.0
    holds_per_asker: int = 4
    hold_seconds: int = 100


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))


def table(seed=0):
    generator = np.random.default_rng(seed)
    return generator.normal(size=(40, 4)), generator.integers(0, 2, 40)


def make(folder, rule=None, data=None) -> DurableLedger:
    x, y = data or table()
    return DurableLedger.create(
        folder / "a.ledger",
        rule=rule or GDP(),
        budget=BUDGET,
        records=40,
        identity=Identity.of(x, y),
    )


NUMBERS = itertools.count()


def hold(ledger, run, *events, id="", asker="server", now=0.0, caps=None, number=None) -> Outcome:
    generation = ledger._file.snapshot().generation
    about = {
        "hold": id or f"hold of {run}",
        "digest": DIGEST,
        "asker": asker,
        "run": run,
        "number": next(NUMBERS) if number is None else number,
    }
    return take(ledger, **about, events=events, caps=caps or Caps(), now=now, generation=generation)


def charge(ledger, run, event=HUNDREDTH, *, id=None, asker="server", now=0.0) -> str:
    """ "", or the code of the refusal."""
    shuffled = {"round": os.urandom(32).hex()} if isinstance(event, TotalEvent) else {}
    try:
        about = {
            "digest": bytes(32),
            "kind": "k",
            "asker": asker,
            "run": run,
            "generation": ledger._file.snapshot().generation,
        }
        asked = ledger.for_query(query_id=id or os.urandom(8).hex(), **about, now=now, **shuffled)
        asked.charge(event, [0])
    except Refused as refusal:
        return refusal.code
    return ""


def times(count: int, event=HUNDREDTH) -> Event:
    return replace(event, count=count)


def test_what_is_held_is_kept_from_others_and_from_later_holds_but_is_not_spent(tmp_path):
    ledger = make(tmp_path)
    assert hold(ledger, "a", times(60)).code == ""
    assert ledger.used() == 0
    assert hold(ledger, "b", times(50)).code == "taken"
    assert hold(ledger, "b", times(39)).code == ""
    assert hold(ledger, "c", times(101)).code == "budget"
    assert charge(ledger, "c", times(2)) == "taken"
    assert charge(ledger, "c", times(101)) == "budget"
    assert [charge(ledger, "a") for _ in range(60)] == [""] * 60
    assert charge(ledger, "a", times(2)) == "taken", "beyond its own hold a run is as any other"
    assert charge(ledger, "b", times(39)) == ""
    assert ledger.used() == pytest.approx(0.99)
    ledger.verify()


def test_a_hold_lets_nothing_through_that_the_filter_alone_refuses(tmp_path):
    ledger = make(tmp_path)
    hold(ledger, "a", times(90))
    assert charge(ledger, "a", times(90)) == ""
    assert charge(ledger, "a", times(11)) == "budget"
    assert hold(ledger, "a", times(90), id="again").needed == 0, (
        "its run has been charged all of it"
    )
    assert charge(ledger, "a", times(11)) == "budget"


def test_a_run_that_asks_elsewhere_than_it_holds_takes_nothing_from_the_holds_of_others(tmp_path):
    ledger, elsewhere = make(tmp_path), Event(DisjointBatches(10, 0, "p"), UNIT, 50)
    assert (
        hold(ledger, "b", times(40), asker="B").code
        == hold(ledger, "a", elsewhere, asker="A").code
        == ""
    )
    assert charge(ledger, "a", times(5), asker="A") == "", "there is room for both"
    assert len(listed(ledger, 0.0)) == 2
    assert charge(ledger, "a", times(56), asker="A") == "taken"
    assert len(listed(ledger, 0.0)) == 2, "who is refused loses nothing"
    assert charge(ledger, "a", times(45), asker="A") == ""
    assert [o.hold.run for o in listed(ledger, 0.0)] == ["b"], (
        "there was not room for both: its own hold has ended"
    )
    assert [entry.act for entry in ledger.entries()][-2:] == ["release", "charge"]
    assert [charge(ledger, "b", times(8), asker="B") for _ in range(5)] == [""] * 5
    ledger.verify()
    assert DurableLedger.open(ledger.path).used() == pytest.approx(0.9)


def test_a_run_alone_that_asks_elsewhere_than_it_holds_may_have_all_that_is_left(tmp_path):
    ledger = make(tmp_path)
    assert hold(ledger, "a", Event(DisjointBatches(10, 0, "p"), UNIT, 90)).code == ""
    assert charge(ledger, "a", times(11)) == ""
    assert listed(ledger, 0.0) == [], "what cannot be kept is not promised"
    assert charge(ledger, "a", times(88)) == ""
    ledger.verify()


def test_a_hold_ends_with_its_run_by_its_time_by_the_officer_and_when_their_number_changes(
    tmp_path, capsys, monkeypatch
):
    ledger = make(tmp_path)

    def kept() -> bool:
        return hold(ledger, "other", times(50), now=10.0).code == "taken"

    assert (hold(ledger, "a", times(60)).code, kept()) == ("", True)
    assert not finish(ledger, asker="stranger", run="a", number=10**9), "another's"
    assert not finish(ledger, asker="server", run="b", number=10**9), "another run's"
    assert (finish(ledger, asker="server", run="a", number=next(NUMBERS)), kept()) == (True, False)
    finish(ledger, asker="server", run="other", number=next(NUMBERS))
    with pytest.raises(
        Refused, match="lapsed"
    ):  # whoever repeats the bytes of a request takes nothing again
        hold(ledger, "a", times(60))
    with pytest.raises(Refused, match="id-reused"):
        hold(ledger, "a", times(60), id="x") and hold(
            ledger, "a", times(60), id="x", asker="stranger"
        )
    with monkeypatch.context() as patch:
        patch.setattr(
            "silodp.silo.ledger.reserve._priced",
            lambda *given: pytest.fail("what is refused anyway is not priced"),
        )
        with pytest.raises(Refused, match="id-reused"):
            hold(ledger, "a", times(60), id="x", asker="stranger")
    assert charge(ledger, "c", times(50), now=99.0) == "taken"
    assert (
        charge(ledger, "c", times(1), now=100.0) == charge(ledger, "c", times(49), now=101.0) == ""
    )
    assert hold(ledger, "b", times(40), now=101.0).code == ""
    assert [entry.act for entry in ledger.entries()][-1] == "hold"
    assert charge(ledger, "c", times(30), now=5.0) == "taken", (
        "the clock has gone back: b's hold lives, a's stays ended"
    )
    assert charge(ledger, "b", times(40), now=5.0) == ""
    assert (
        hold(ledger, "d", times(5), now=time.time()).code
        == hold(ledger, "f", times(4), now=time.time()).code
        == ""
    )
    assert charge(ledger, "f", times(4), now=time.time()) == ""
    monkeypatch.setattr("sys.argv", ["silodp", "ledger", "show", str(ledger.path)])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    assert "% is reserved for run d of server" in (shown := capsys.readouterr().out)
    assert "reserved for run f" not in shown, (
        "all that f holds was charged, and keeps nothing from anybody"
    )
    for said in ("Released 2 holds", "Nothing is reserved"):
        monkeypatch.setattr("sys.argv", ["silodp", "ledger", "release", str(ledger.path)])
        with pytest.raises(SystemExit, match="0"):
            cli.main()
        assert said in capsys.readouterr().out
    assert hold(ledger, "e", times(5), id="e").code == ""
    x, y = table()
    x[0, 0] += 1
    ledger.recognise(x, y)
    assert [open.hold.id for open in listed(ledger, 0.0)] == ["e"], "an edit is nobody's to know"
    ledger.recognise(x[1:], y[1:])
    assert listed(ledger, 0.0) == []
    ledger.verify()
    assert DurableLedger.open(ledger.path).used() == ledger.used()


def test_one_asker_holds_no_more_than_its_share_and_number_whatever_it_calls_its_runs(tmp_path):
    ledger = make(tmp_path)
    caps = Caps(hold_share=0.5, holds_per_asker=3)
    assert hold(ledger, "a", times(51), caps=caps).code == "hold-limit"
    assert [hold(ledger, run, times(20), caps=caps).code for run in "abc"] == ["", "", "hold-limit"]
    assert [hold(ledger, run, times(1), caps=caps).code for run in "def"] == [
        "",
        "hold-limit",
        "hold-limit",
    ]
    assert hold(ledger, "a", times(5), id="smaller", caps=caps).code == "", (
        "a new hold replaces the run's own"
    )
    assert hold(ledger, "z", times(50), asker="honest", caps=caps).code == "", (
        "the others' half is theirs"
    )
    assert hold(ledger, "later", times(50), caps=caps, now=101.0).code == "", (
        "and what is held comes back by itself"
    )


def test_a_hold_that_reserves_nothing_any_more_takes_no_place_among_those_that_one_asker_may_have(
    tmp_path,
):
    ledger, caps = make(tmp_path), Caps(holds_per_asker=2)
    assert [hold(ledger, run, times(10), caps=caps).code for run in "ab"] == ["", ""]
    assert charge(ledger, "a", times(9)) == ""
    assert hold(ledger, "c", times(10), caps=caps).code == "hold-limit", (
        "a hundredth of it is still reserved"
    )
    assert charge(ledger, "a") == ""
    assert hold(ledger, "c", times(10), caps=caps).code == "", (
        "all of it was charged, though the hold is open"
    )
    assert hold(ledger, "d", times(10), caps=caps).code == "hold-limit"
    assert [open.hold.run for open in listed(ledger, 0.0)] == ["a", "b", "c"], (
        "and the officer may still end it"
    )
    ledger.verify()


def test_the_same_request_again_finds_its_hold_and_writes_nothing(tmp_path):
    ledger = make(tmp_path)
    first = hold(ledger, "a", times(60))
    head = ledger.head()
    assert hold(ledger, "a", times(60)) == first
    assert ledger.head() == head


def test_a_run_ends_with_all_that_is_held_for_it_and_nothing_that_is_carried_late_undoes_that(
    tmp_path,
):
    ledger = make(tmp_path)
    assert (
        hold(ledger, "a", times(60), id="first", number=1).code
        == hold(ledger, "a", times(60), id="third", number=3).code
        == ""
    )
    with pytest.raises(Refused, match="lapsed"):
        hold(ledger, "a", times(60), id="second", number=2)
    assert not finish(ledger, asker="server", run="a", number=2), (
        "nor does an old release end what was held since"
    )
    assert finish(ledger, asker="server", run="a", number=5)
    assert listed(ledger, 0.0) == []
    again = DurableLedger.open(ledger.path)
    again.verify()
    for number in (4, 5):
        with pytest.raises(Refused, match="lapsed"):
            hold(again, "a", times(60), id="fourth", number=number)
    assert hold(again, "a", times(60), id="anew", number=6).code == "", (
        "a run that is resumed goes on"
    )
    assert hold(again, "a", times(20), id="b", asker="stranger", number=0).code == "", (
        "another's numbers are its own"
    )


def test_what_costs_more_than_any_number_is_not_held(tmp_path):
    ledger = make(tmp_path)
    assert hold(ledger, "a", Event(FullBatch(), 0.0)).code == "budget"
    assert listed(ledger, 0.0) == []


def test_batches_of_a_partition_are_held_as_their_maximum(tmp_path):
    ledger = make(tmp_path)
    batches = [Event(DisjointBatches(4, k, "p"), UNIT, 60) for k in range(4)]
    assert hold(ledger, "a", *batches).code == ""
    assert hold(ledger, "b", times(41)).code == "taken"
    assert hold(ledger, "b", times(39)).code == ""
    assert [charge(ledger, "a", event) for event in batches] == [""] * 4
    assert charge(ledger, "b", times(39)) == ""
    ledger.verify()


def partition(noise: float) -> list[Event]:
    return [Event(DisjointBatches(3, k, "p"), noise) for k in range(3)]


RULES = {
    "gdp": (GDP(), [HUNDREDTH, Event(FullBatch(), UNIT / 1.4), *partition(UNIT / 1.5)]),
    "renyi": (Renyi(8.0), [Event(FullBatch(), 12.0), Event(Poisson(0.3), 5.0), *partition(9.0)]),
    "committed": (
        Committed((Event(FullBatch(), 13.0, 50), Event(Poisson(0.25), 8.0, 40))),
        [Event(FullBatch(), 13.0), Event(Poisson(0.25), 8.0)],
    ),
    "totals": (
        GDP(),
        [Event(FullBatch(), 13.0), TotalEvent(FullBatch(), 8.0, 1, 4), *partition(10.0)],
    ),
}


def costing(ledger, chosen: Counter[int], events, share: float) -> Counter[int]:
    """So many of each that all together cost about this share of the budget."""
    buckets: dict[str, np.ndarray] = {}
    for k, n in chosen.items():
        bucket, amount = ledger._file.state.price(times(n, events[k]))
        buckets[bucket] = buckets.get(bucket, np.zeros(())) + amount
    grown = share * ledger.capacity / float(ledger.settings.rule.total(buckets))
    return Counter({k: max(1, round(n * grown)) for k, n in chosen.items()})


@pytest.mark.parametrize("rule", RULES)
def test_whatever_askers_do_the_budget_holds_and_no_charge_that_is_held_for_is_refused(
    tmp_path, rule
):
    """Random holds, charges within them and beside them, releases and expiries of three askers; the
    sum is kept a second time, by the rule.
    """
    fates: Counter[str] = Counter()
    for world in range(3):
        (folder := tmp_path / str(world)).mkdir()
        fates += one_world(folder, *RULES[rule], random.Random(f"{world} {rule}"))
    assert fates["go on True "] >= 10, fates
    for seen in ("hold ", "hold taken", "hold budget"):
        assert fates[seen], fates
    assert fates["loose taken"] + fates["go on False taken"], fates
    assert rule == "committed" or fates["stray "], fates


def one_world(folder, given, events, coin) -> Counter[str]:
    ledger, now, spent = (
        make(folder, given, data=table(coin.randrange(10**6))),
        0.0,
        dict[str, float](),
    )
    plans: dict[tuple[str, str], Counter[int]] = {}
    charged: dict[tuple[str, str], Counter[int]] = {}
    live: dict[tuple[str, str], tuple[str, float]] = {}  # the hold's id, and until when
    fates: Counter[str] = Counter()

    def pay(who: tuple[str, str], k: int, count: int) -> str:
        code = charge(ledger, who[1], times(count, events[k]), asker=who[0], now=now)
        if not code:
            bucket, amount = ledger._file.snapshot().price(times(count, events[k]))
            spent[bucket] = spent.get(bucket, 0.0) + amount
        return code

    for step in range(60):
        now += coin.choice([0.0, 1.0, 4.0])
        act = coin.choices(["hold", "loose", "go on", "release", "stray"], [3, 1.5, 5, 0.5, 1.5])[0]
        who = coin.choice([*plans, (coin.choice("xyz"), f"run {step}")])
        left = plans.get(who, Counter()) - charged.get(who, Counter())
        holds = who in live and live[who][1] > now
        if act == "hold":
            chosen = Counter(
                {
                    k: coin.randint(1, 4)
                    for k in coin.sample(range(len(events)), coin.randint(1, len(events)))
                }
            )
            plan = plans.setdefault(who, costing(ledger, chosen, events, coin.uniform(0.1, 0.5)))
            asked = (times(n, events[k]) for k, n in plan.items())
            got = hold(
                ledger, who[1], *asked, id=f"h{step}", asker=who[0], now=now, caps=Caps(0.7, 2, 40)
            )
            live |= {who: (f"h{step}", now + 40)} if not got.code else {}
            fates[f"hold {got.code}"] += 1
        elif act == "release" and holds:
            live.pop(who)
            assert finish(ledger, asker=who[0], run=who[1], number=next(NUMBERS))
        elif act == "loose":
            ((k, count),) = costing(
                ledger, Counter({coin.randrange(len(events)): 1}), events, coin.uniform(0.01, 0.3)
            ).items()
            fates[f"loose {pay(('w', 'loose'), k, count)}"] += 1
        elif act == "stray" and holds:
            price = ledger._file.snapshot().price
            planned = {price(events[k])[0] for k in plans[who]}
            if strays := [k for k in range(len(events)) if price(events[k])[0] not in planned]:
                ((k, count),) = costing(
                    ledger, Counter({coin.choice(strays): 1}), events, coin.uniform(0.05, 0.4)
                ).items()
                fates[f"stray {pay(who, k, count)}"] += 1
                if live[who][0] not in {o.hold.id for o in listed(ledger, now)}:
                    fates["stray ended its hold"] += 1
                    del live[who]
        elif act == "go on" and left:
            k = coin.choice(sorted(left))
            count = coin.randint(1, left[k])
            code = pay(who, k, count)
            assert not (holds and code), (step, code, fates)
            charged.setdefault(who, Counter())[k] += count if not code else 0
            fates[f"go on {holds} {code}"] += 1
        assert float(given.total({b: np.asarray(a) for b, a in spent.items()})) <= ledger.capacity
    ledger.verify()
    return fates


def _holding_for_ever(path) -> None:
    ledger = DurableLedger.open(path)
    for k in range(10**6):
        assert (
            hold(ledger, f"r{k % 3}", times(1), id=os.urandom(8).hex(), number=time.time_ns()).code
            == ""
        )
        if k % 2:
            release(ledger, [listed(ledger, 0.0)[0].hold.id])


def test_kill_9_while_holds_are_taken_and_released_leaves_a_whole_ledger_with_nothing_spent(
    tmp_path,
):
    ledger, coin = make(tmp_path), random.Random(5)
    for _ in range(6):
        before = ledger.head()[0]
        process = processes.Process(target=_holding_for_ever, args=(ledger.path,))
        process.start()
        deadline = time.monotonic() + 600
        while ledger.head()[0] < before + 2 and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(coin.uniform(0, 0.05))
        process.kill()
        process.join(600)
        assert process.exitcode == -signal.SIGKILL
        again = DurableLedger.open(ledger.path)
        again.verify()
        assert again.head()[0] > before
        assert again.used() == 0
        assert len(listed(again, 0.0)) <= 3, "each run has one hold"
    assert hold(again, "last", times(96), caps=Caps(holds_per_asker=10)).code == "", (
        "what the dead held is theirs, and no more"
    )
    assert hold(again, "new", times(99), id="n", now=101.0).code == "", "and comes back by itself"


@pytest.mark.parametrize("change", ["until", "events", "act"])
def test_an_altered_hold_is_refused(tmp_path, change):
    import sqlite3

    ledger = make(tmp_path)
    hold(ledger, "a", times(60))
    with sqlite3.connect(ledger.path) as connection:
        text = {
            "until": ("event", '"until":100', '"until":999'),
            "events": ("event", '"count":60', '"count":1'),
            "act": ("act", "hold", "release"),
        }
        column, old, new = text[change]
        connection.execute(f"UPDATE entries SET {column} = replace({column}, ?, ?)", (old, new))
    with pytest.raises(BadInput, match="entry 1 does not match its hash"):
        DurableLedger.open(ledger.path)


def test_checkpoints_at_most_double_what_holds_add_to_the_file_however_many_ask(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(reserve, "PASSED_MOST", 1)
    ledger = make(tmp_path)
    cheap = Event(FullBatch(), 100 * UNIT)
    for k in range(40):
        assert hold(ledger, f"run-{k}", cheap, asker=f"{k:064x}").code == ""
    entries = list(ledger.entries())
    held = sum(len(e.event) + ENTRY_LEAST for e in entries if e.act == "hold")
    marks = [len(e.event) for e in entries if e.act == "checkpoint"]
    assert marks
    assert sum(marks) <= held
    ledger.verify()
