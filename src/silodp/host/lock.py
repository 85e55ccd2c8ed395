"""One daemon for one file: whoever serves a ledger or a store holds a lock on it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator

from silodp.core.errors import BadInput


@contextlib.contextmanager
def sole(file: str, what: str = "ledger", *, patience: float = 2.0) -> Iterator[None]:
    """Holds the file for one daemon, by whatever path it is named; waits a little, since `running` holds it for an instant."""
    handle, deadline = _opened(file, what), time.monotonic() + patience
    try:
        while not _locked(handle, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise BadInput(f"another daemon serves the {what} {file}; stop it first")
            time.sleep(0.02)
        yield
    finally:
        os.close(handle)


def running(file: str, what: str = "ledger") -> bool:
    """Whether a daemon serves this file now."""
    handle = _opened(file, what)
    try:
        return not _locked(handle, fcntl.LOCK_SH)
    finally:
        os.close(handle)


def _opened(file: str, what: str) -> int:
    try:
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        raise BadInput(f"there is no {what} at {file}; restore it (a new one is made by `init` only)") from None


def _locked(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
