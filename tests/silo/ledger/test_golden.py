"""Ledgers that an earlier version wrote open, verify and go on; and the same acts under the same
randomness make the same rows today.

golden/*.db are the files that `acts` made with the code of silodp before its ledger was taken
apart, commit 8ec69ba, with the randomness and the clock of `fixed`.
"""

import hashlib
import math
import os
import secrets
import shutil
import sqlite3
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ledgers import settled

from silodp.core.errors import Refused
from silodp.core.events import Event, TotalEvent
from silodp.core.privacy.accounting import GDP, Budget, Committed, Renyi
from silodp.core.sampling import DisjointBatches, FullBatch, Poisson
from silodp.silo.ledger import durable, file, reserve
from silodp.silo.ledger.durable import DurableLedger, Identity

GOLDEN = Path(__file__).parent / "golden"
BUDGET = Budget(6.0, 1e-5)
RULES = {
    "gdp": GDP(),
    "renyi": Renyi(8.0),
    "committed": Committed((Event(FullBatch(), 5.0, 2), Event(Poisson(0.25), 5.0, 2))),
}
SAID = {  # spent, used, entries
    "gdp": ("0x1.a3186fb35ca8bp+0", "0x1.a3521e614534bp-4", 18),
    "renyi": ("0x1.ed22f1dec756cp+0", "0x1.30c52592e3f4fp-3", 20),
    "totals": ("0x1.1dcc0daa4fdd1p+1", "0x1.064f39fd3b128p-11", 7),
    "committed": ("0x1.7ff9f50b0aaeap-1", "0x1.fffffff768fa0p-2", 4),
}
ASKER = "aa" * 32
CAPS = SimpleNamespace(hold_share=1.0, holds_per_asker=4, hold_seconds=3600)
FULL, TOTAL = Event(FullBatch(), 5.0), TotalEvent(FullBatch(), 30.0, 1, 4)


def records() -> tuple[tuple, tuple]:
    """Forty records, and the same with four more."""
    draw = np.random.default_rng(7)
    x = draw.normal(size=(40, 3)).astype(np.float32)
    more = np.concatenate([x, draw.normal(size=(4, 3)).astype(np.float32)])
    return (x, np.arange(40) % 2), (more, np.arange(44) % 2)


def query(ledger, k, run="run", generation=0, **extra):
    about = {
        "digest": bytes([k]) * 32,
        "kind": "grad",
        "asker": ASKER,
        "run": run,
        "generation": generation,
    }
    return ledger.for_query(query_id=f"q{k}", **about, now=1e9, **extra)


def ask(ledger, k, event, **extra):
    return settled(query(ledger, k, **extra), event, lambda: b"answer %d" % k)


def acts(path: Path, name: str, registry: Path) -> None:
    """Everything that a ledger of this rule can be asked to write down."""
    before, after = records()
    ledger = DurableLedger.create(
        path,
        rule=RULES[name],
        budget=BUDGET,
        records=40,
        identity=Identity.of(*before),
        registry=registry,
    )

    def hold(id, run, *events, generation=0):
        about = {"digest": "cc" * 32, "asker": ASKER, "caps": CAPS, "now": 1e9, "number": 0}
        assert not reserve.take(
            ledger, hold=id, run=run, events=events, generation=generation, **about
        ).code

    ask(ledger, 0, FULL)
    if name == "committed":
        return ask(ledger, 1, Event(Poisson(0.25), 5.0))
    ledger.partition("p", 4, generation=0)
    ask(ledger, 1, Event(DisjointBatches(4, 1, "p"), 6.0))
    if name == "renyi":
        ask(ledger, 2, Event(Poisson(0.25), 5.0))
    ledger.purge("q0")
    hold("h0", "other", FULL, FULL)
    ask(ledger, 3, FULL, run="other")
    assert reserve.finish(ledger, asker=ASKER, run="other", number=1)
    hold("h1", "third", FULL)
    _, later = ledger.recognise(*after, registry=registry)
    ledger.partition("p", 4, generation=later)
    ask(ledger, 4, Event(DisjointBatches(4, 3, "p"), 6.0), generation=later)
    hold("h2", "fourth", FULL, generation=later)
    query(ledger, 5, generation=later).charge(FULL, [0])
    assert reserve.release(ledger, ["h2"]) == 1


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The three ledgers by today's code, one after the other from one stream of bits, as the golden
    ones were.
    """
    folder, drawn = tmp_path_factory.mktemp("made"), iter(range(1, 10**6))

    def bits(n):
        return hashlib.shake_256(next(drawn).to_bytes(8, "big")).digest(n)

    with pytest.MonkeyPatch.context() as fixed:
        fixed.setattr(secrets, "token_bytes", bits)
        fixed.setattr(secrets, "token_hex", lambda n: bits(n).hex())
        fixed.setattr(os, "urandom", bits)
        fixed.setattr(
            "silodp.host.atomic.secrets", SimpleNamespace(token_hex=lambda n: "part")
        )  # a file's name, and not in it
        for module in (durable, file):
            fixed.setattr(module, "now", lambda: "2026-01-01T00:00:00.000+00:00")
        for name in RULES:
            if name == "committed":  # before it, one of the former rule took five
                for _ in range(5):
                    next(drawn)
            acts(folder / f"{name}.db", name, folder / "registry" / name)
    return folder


def rows(path: Path) -> dict[str, list]:
    with sqlite3.connect(path) as connection:
        tables = connection.execute("SELECT name, sql FROM sqlite_master ORDER BY name").fetchall()
        return {
            sql: connection.execute(f"SELECT * FROM {name}").fetchall()
            for name, sql in tables
            if sql.startswith("CREATE TABLE")
        }


@pytest.mark.parametrize("name", RULES)
def test_the_same_acts_make_the_same_rows_and_the_same_anchor_as_ever(made, name):
    assert rows(made / f"{name}.db") == rows(GOLDEN / f"{name}.db")
    assert (made / f"{name}.db.anchor").read_bytes() == (GOLDEN / f"{name}.db.anchor").read_bytes()


@pytest.fixture
def golden(tmp_path):
    def copied(name):
        for end in ("db", "db.anchor"):
            shutil.copy(GOLDEN / f"{name}.{end}", tmp_path)
        ledger = DurableLedger.open(tmp_path / f"{name}.db")
        ledger.verify()
        return ledger

    return copied


@pytest.mark.parametrize("name", SAID)
def test_an_old_ledger_opens_says_what_it_said_and_goes_on(golden, tmp_path, name):
    ledger = golden(name)
    spent, used, count = SAID[name]
    assert ledger.spent() == pytest.approx(float.fromhex(spent), rel=1e-9)
    assert ledger.used() == pytest.approx(float.fromhex(used), rel=1e-9)
    assert ledger.head()[0] == count
    before, after = records()
    known, now = ledger.recognise(
        *(before if count < 10 else after), registry=tmp_path / "registry"
    )
    assert known == 1.0
    assert ask(ledger, 1, None) == b"answer 1", (
        "a stored answer is given again, and nothing is charged"
    )
    assert ledger.head()[0] == count
    if count > 10:
        with pytest.raises(Refused, match="purged"):
            query(ledger, 0)
        assert ask(ledger, 5, FULL, generation=now) == b"answer 5", (
            "what was charged and not answered is answered under its charge"
        )
        assert ledger.used() == pytest.approx(float.fromhex(used), rel=1e-9)
    if name == "totals":
        with pytest.raises(Refused, match="round"):
            ask(ledger, 9, TOTAL, round="ab" * 32)
        assert ledger.local() == math.inf, "nothing prices binomial noise any more"
        with pytest.raises(Refused, match="local"):
            ask(ledger, 8, TOTAL, round="ef" * 32, most_local=1e6)
        ask(ledger, 8, TOTAL, round="ef" * 32)
    ask(ledger, 9, FULL if name != "totals" else Event(FullBatch(), 40.0), generation=now)
    assert ledger.used() > float.fromhex(used)
    ledger.verify()
    assert DurableLedger.open(ledger.path).head() == ledger.head()


def test_what_an_old_ledger_holds_for_a_run_is_kept_from_others(golden, tmp_path):
    ledger = golden("totals")
    (hold,) = ledger._file.snapshot().holds.live(1e9)
    assert (hold.id, hold.run, hold.until) == ("h0", "other", 1_000_003_600)
    assert reserve.release(ledger, ["h0"]) == 1
    ledger.verify()
