"""Keep code in the current folder from running in a process of silodp.

An empty entry in PYTHONPATH, which `export PYTHONPATH=x:$PYTHONPATH` leaves behind, means the
current folder to Python, in spite of `-P` and PYTHONSAFEPATH. A relative entry means a folder
below it. silodp leaves both out of its own path as soon as its first line runs, and out of the
environment of every process that it starts.

What Python imports before that line, a `sitecustomize.py` or a module of its own standard library,
silodp cannot prevent.
This module imports nothing that `import silodp` has not loaded already.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "PYTHONPATH"
SAFE = {"PYTHONSAFEPATH": "1"}
"""What `-P` is, for processes that start Python processes of their own."""


def child_environment() -> dict[str, str]:
    """Return this process's environment for a child that must not run the current folder's code."""
    environment = dict(os.environ) | SAFE
    entries, _ = _sorted_entries(environment.pop(VARIABLE, ""))
    if entries:
        environment[VARIABLE] = os.pathsep.join(entries)
    return environment


@contextmanager
def safe_children() -> Iterator[None]:
    """Give `child_environment` to processes that libraries start, such as workers of a pool."""
    before = {name: os.environ.get(name) for name in (VARIABLE, *SAFE)}
    for name in before:
        _set(name, child_environment().get(name))
    try:
        yield
    finally:
        for name, value in before.items():
            _set(name, value)


def leave_out_current_folder() -> None:
    """Remove from `sys.path` what empty and relative entries of PYTHONPATH have put there.

    Python writes such an entry as an absolute path, so the variable is read again here.
    """
    kept, relative = _sorted_entries(os.environ.get(VARIABLE, ""))
    unsafe = {os.path.abspath(entry) for entry in relative} - set(kept)
    sys.path[:] = [entry for entry in sys.path if os.path.isabs(entry) and entry not in unsafe]


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _sorted_entries(variable: str) -> tuple[list[str], list[str]]:
    """Return the absolute entries of the variable's value, and the others."""
    if not variable:  # Python ignores a variable that is empty as a whole
        return [], []
    entries = variable.split(os.pathsep)
    absolute = [entry for entry in entries if os.path.isabs(entry)]
    return absolute, [entry for entry in entries if not os.path.isabs(entry)]
