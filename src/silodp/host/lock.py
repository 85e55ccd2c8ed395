"""Lock a ledger or a store, so that one daemon at a time serves it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from silodp.core.errors import BadInput
from silodp.host.portable import OWN, lock


@contextlib.contextmanager
def sole(file: str, what: str = "ledger", *, patience: float = 2.0) -> Iterator[None]:
    """Lock the file for one daemon, whatever path names it. Raise BadInput if another has it.

    It waits for `patience` seconds, since `running` holds the lock for an instant.
    """
    handle = _opened(file, what)
    deadline = time.monotonic() + patience
    try:
        while not lock(handle):
            if time.monotonic() > deadline:
                raise BadInput(f"another daemon serves the {what} {file}; stop it first")
            time.sleep(0.02)
        yield
    finally:
        os.close(handle)


def running(file: str, what: str = "ledger") -> bool:
    """Return whether a daemon serves this file now."""
    handle = _opened(file, what)
    try:
        return not lock(handle, shared=True)
    finally:
        os.close(handle)


def _opened(file: str, what: str) -> int:
    try:
        return os.open(file, os.O_RDONLY | OWN)
    except OSError:
        raise BadInput(
            f"there is no {what} at {file}; restore it (a new one is made by `init` only)"
        ) from None
