"""Store in SQLite what has been passed on: one reply for each round, for good.

No count of a silo is ever stored here. A reply is on disk before it is sent. A repeated request for
its round gets these bytes again, whatever boxes it brings: two totals of one round, with and
without a silo, would have that silo's counts as their difference. `silodp federation shuffler init`
makes the file with its keys. The file is never made a second time nor restored from a copy, since a
store that has lost a round might pass it on again. If it is lost, make another shuffler. What was
sealed for the old shuffler's key stays closed.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from silodp.core.errors import BadInput, Refused
from silodp.core.protocol.relay import Passed, decode_outcome
from silodp.host.sqlite import connect

APPLICATION = 0x51100DB2
TABLES = (  # by name
    "CREATE TABLE keys (seal TEXT NOT NULL, sign TEXT NOT NULL)",
    (
        "CREATE TABLE rounds (round BLOB PRIMARY KEY, time REAL NOT NULL, reply BLOB NOT NULL) "
        "WITHOUT ROWID"
    ),
)


class RoundStore:
    """The rounds that the shuffler with these public keys (hex) has passed on.

    Every method opens the file again.
    """

    def __init__(self, path: Path, *, seal: str, sign: str) -> None:
        """Open a store. Raise BadInput unless the file exists, is intact and has these keys."""
        self._path = path
        self._keys = (seal, sign)
        try:
            with contextlib.closing(connect(self._path)) as connection:
                rows = connection.execute(
                    "SELECT sql FROM sqlite_master WHERE sql <> '' ORDER BY name"
                )
                tables = tuple(sql for (sql,) in rows)
                application = connection.execute("PRAGMA application_id").fetchone()
                if application != (APPLICATION,) or tables != TABLES:
                    raise BadInput(
                        f"{path} is not a shuffler's store; if the store is lost, make "
                        "another shuffler in a new folder"
                    )
                if connection.execute("SELECT seal, sign FROM keys").fetchall() != [self._keys]:
                    raise BadInput(
                        f"the store {path} was made with other keys; use the keys that "
                        "`silodp federation shuffler init` made with it"
                    )
                if connection.execute("PRAGMA integrity_check(1)").fetchall() != [("ok",)]:
                    raise BadInput(
                        f"the store {path} is damaged; make another shuffler in a new folder"
                    )
        except sqlite3.Error as error:
            raise BadInput(
                f"the store {path} cannot be used ({error}); if it is lost, make another "
                "shuffler in a new folder"
            ) from None

    @classmethod
    def create(cls, path: Path, *, seal: str, sign: str) -> RoundStore:
        """Return a store without rounds, in a file that must exist and be empty."""
        with contextlib.closing(connect(path)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(f"PRAGMA application_id = {APPLICATION}")
            for table in TABLES:
                connection.execute(table)
            connection.execute("INSERT INTO keys VALUES (?, ?)", (seal, sign))
            connection.execute("COMMIT")
        return cls(path, seal=seal, sign=sign)

    def reply(self, round: str) -> bytes | None:
        """Return the bytes that were stored for the round, or None if it was not passed on."""
        with _failing_closed(), contextlib.closing(connect(self._path)) as connection:
            return self._read(connection, round)

    def keep(self, round: str, reply: bytes, now: float) -> bytes:
        """Store the round's reply durably, unless it has one. Return the stored reply."""
        with _failing_closed(), contextlib.closing(connect(self._path)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            if (before := self._read(connection, round)) is not None:
                return before
            connection.execute(
                "INSERT INTO rounds VALUES (?, ?, ?)", (bytes.fromhex(round), now, reply)
            )
            connection.execute("COMMIT")
            return reply

    def since(self, time: float) -> int:
        """Return how many rounds were passed on after this time (seconds since 1970).

        Rounds from the future count too, in case the clock was put back.
        """
        with _failing_closed(), contextlib.closing(connect(self._path)) as connection:
            return connection.execute(
                "SELECT count(*) FROM rounds WHERE time > ?", (time,)
            ).fetchone()[0]

    def _read(self, connection: sqlite3.Connection, round: str) -> bytes | None:
        row = connection.execute(
            "SELECT reply FROM rounds WHERE round = ?", (bytes.fromhex(round),)
        ).fetchone()
        if row is None:
            return None
        outcome = decode_outcome(row[0], limit=len(row[0]), shuffler_key=self._keys[1])
        if not isinstance(outcome, Passed) or outcome.round != round:
            raise Refused("store")
        return row[0]


@contextlib.contextmanager
def _failing_closed() -> Iterator[None]:
    """Raise Refused("store"), whatever is wrong with the file or the disk."""
    try:
        yield
    except (sqlite3.Error, OSError, Refused, TypeError):
        raise Refused("store") from None
