"""SQLite files that must not forget: a silo's ledger and a shuffler's store.

Why a rollback journal and synchronous=EXTRA: the file is then whole by itself whenever no
transaction is open, so that a copy of it is whole; and after a power cut a journal whose deletion
was not yet durable would undo a charge that had been committed, which EXTRA prevents (FULL does
not).
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from urllib.parse import quote

BUSY = 30.0  # seconds that one process waits for another


def connect(path: Path) -> sqlite3.Connection:
    """The file, which must be there, opened so that what is committed stays and what is deleted is
    gone.
    """
    connection = sqlite3.connect(
        f"file:{quote(str(path))}?mode=rw", uri=True, timeout=BUSY, isolation_level=None
    )
    try:
        for pragma in (
            "synchronous = EXTRA",
            "fullfsync = ON",
            "secure_delete = ON",
            "trusted_schema = OFF",
            "cell_size_check = ON",
        ):
            connection.execute(f"PRAGMA {pragma}")
        if connection.execute("PRAGMA journal_mode").fetchone() != ("delete",):
            raise sqlite3.OperationalError("its journal mode was changed")
    except BaseException:
        connection.close()
        raise
    return connection
