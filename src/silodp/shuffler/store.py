"""What has been passed on, in SQLite: one reply for each round, for good. No count of a silo ever
comes here.

A reply is on disk before it is sent, and whoever asks about its round again gets these bytes,
whatever boxes it brings: two totals of one round, with and without a silo, would have that silo's
counts as their difference. The file is made with its keys by `silodp federation shuffler init`, and
is never made anew nor restored from a copy: a store that has forgotten a round might pass it on
again. If it is lost, make another shuffler; what was sealed for the old one's key stays closed.
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
    """The rounds that the shuffler with these public keys (hex) has passed on. Every question opens
    the file anew.
    """

    def __init__(self, path: Path, *, seal: str, sign: str) -> None:
        """Raises BadInput unless the file is there, whole and that of these keys."""
        self._path = path
        self._keys = (seal, sign)
        try:
            with contextlib.closing(connect(self._path)) as connection:
                found = tuple(
                    sql
                    for (sql,) in connection.execute(
                        "SELECT sql FROM sqlite_master WHERE sql <> '' ORDER BY name"
                    )
                )
                if (
                    connection.execute("PRAGMA application_id").fetchone() != (APPLICATION,)
                    or found != TABLES
                ):
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
        """A store without a round, in a file that must be there and empty."""
        with contextlib.closing(connect(path)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(f"PRAGMA application_id = {APPLICATION}")
            for table in TABLES:
                connection.execute(table)
            connection.execute("INSERT INTO keys VALUES (?, ?)", (seal, sign))
            connection.execute("COMMIT")
        return cls(path, seal=seal, sign=sign)

    def reply(self, round: str) -> bytes | None:
        """The bytes that were stored for the round, if it has been passed on."""
        with _failing_closed(), contextlib.closing(connect(self._path)) as connection:
            return self._read(connection, round)

    def keep(self, round: str, reply: bytes, now: float) -> bytes:
        """The round's reply, which is durable from here on: these bytes, or those that were there
        before.
        """
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
        """Rounds passed on after this time (seconds since 1970), those from the future among them,
        should the clock have gone back.
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
    """One fixed code, whatever is wrong with the file or the disk."""
    try:
        yield
    except (sqlite3.Error, OSError, Refused, TypeError):
        raise Refused("store") from None
