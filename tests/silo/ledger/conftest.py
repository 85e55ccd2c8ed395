"""Every test of a ledger has a registry of its own."""

import pytest
from ledgers import CHEAP, ask, asked, make, table

from silodp.core.events import Event
from silodp.core.sampling import DisjointBatches
from silodp.silo.ledger.durable import DurableLedger


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))


@pytest.fixture
def used(folder) -> DurableLedger:
    """A ledger with every act in it: charges, answers, a purge, a partition, changed records."""
    ledger = make(folder)
    for name in ("q1", "q2", "q3"):
        ask(ledger, name)
    ledger.purge("q2")
    ledger.partition("run", 4, generation=0)
    ask(ledger, "q4", event=Event(DisjointBatches(4, 1), 500.0, 2))
    x, y = table()
    x[0, 0] += 1
    ledger.recognise(x, y)
    asked(ledger, "q5").charge(CHEAP, [0])
    return ledger
