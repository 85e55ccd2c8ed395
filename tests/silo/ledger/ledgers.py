"""Small ledgers for tests: made, asked, and opened by somebody who does not go through the
ledger.
"""

import contextlib
import os
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from silodp.core.errors import BadInput, Refused
from silodp.core.events import Event
from silodp.core.privacy.accounting import GDP, Budget
from silodp.core.sampling import FullBatch
from silodp.silo.ledger import file as ledgerfile
from silodp.silo.ledger.durable import DurableLedger, Identity

BUDGET = Budget(3.0, 1e-5)
CHEAP = Event(FullBatch(), 1000.0)
PRICE = 1 / 1000.0**2
DIGEST = bytes(32)


def table(n=40, seed=0, features=4):
    generator = np.random.default_rng(seed)
    return generator.normal(size=(n, features)), generator.integers(0, 2, n)


def make(
    folder, name="a.ledger", *, rule=None, budget=BUDGET, data=None, **options
) -> DurableLedger:
    x, y = data or table()
    return DurableLedger.create(
        folder / name,
        rule=rule or GDP(),
        budget=budget,
        records=len(y),
        identity=Identity.of(x, y),
        **options,
    )


def asked(ledger, query_id="q", digest=DIGEST, generation=None):
    """By whoever has the records that the ledger was last shown, unless a generation says which."""
    records = ledger._file.state.generation if generation is None else generation
    return ledger.for_query(
        query_id=query_id, digest=digest, kind="grad", asker="server", run="run", generation=records
    )


def settled(paid, event, compute) -> bytes:
    """What a gate does with a query, in its order: the stored answer, or else charge, compute,
    store.
    """
    if paid.answer is None:
        paid.charge(event, [0])
    return paid.answer if paid.answer is not None else paid.store(compute())


def ask(ledger, query_id="q", answer=b"an answer", event=CHEAP) -> bytes:
    return settled(asked(ledger, query_id), event, lambda: answer)


def refuses(code: str):
    return pytest.raises(Refused, match=f"^{code}$")


def refused(path: Path, because: str = "ledger") -> None:
    with pytest.raises(BadInput, match=because):
        DurableLedger.open(path).verify()


@contextlib.contextmanager
def tampering(path: Path):
    """The file, open to somebody who does not go through the ledger."""
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        yield connection


def watch_steps(put, before) -> None:
    """Calls `before(name)` just before each step that changes a file, and before and after each
    commit.
    """

    class Watched(sqlite3.Connection):
        def execute(self, sql, *rest):
            word = sql.split()[0]
            if word in ("BEGIN", "INSERT", "COMMIT", "ROLLBACK"):
                before(word)
            return super().execute(sql, *rest)

    def watched(name, function):
        def call(*args, **options):
            before(
                "fsync folder"
                if name == "fsync" and os.path.isdir(f"/proc/self/fd/{args[0]}")
                else {"fsync": "fsync file"}.get(name, name)
            )
            return function(*args, **options)

        return call

    connect = sqlite3.connect
    put(
        ledgerfile.sqlite3,
        "connect",
        lambda *args, **options: connect(*args, factory=Watched, **options),
    )
    for name in ("open", "write", "fsync", "replace"):
        put(os, name, watched(name, getattr(os, name)))
