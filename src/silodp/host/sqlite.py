"""Open SQLite files that must not lose a commit: a silo's ledger and a shuffler's store.

Why a rollback journal: the file is then complete by itself whenever no transaction is open, so a
copy of it is complete too. Why synchronous=EXTRA: after a power cut, a journal whose deletion was
not yet durable would undo a committed charge. EXTRA prevents that, FULL does not.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from urllib.parse import quote

BUSY = 30.0  # seconds that one process waits for another


def connect(path: Path) -> sqlite3.Connection:
    """Return a connection to an existing file. Commits are durable, deleted content is erased.

    Raise sqlite3.Error if the file is missing or cannot be used so.
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
