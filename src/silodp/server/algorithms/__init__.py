"""One algorithm per file, the paper's and its rivals, each a generator that asks a federation and
yields iterates.

A file of this folder is an algorithm, named by the file, if it has a generator function whose
signature declares a release; nothing lists them.
"""

from __future__ import annotations

import inspect
import pkgutil
from functools import cache
from importlib import import_module

from silodp.core.errors import BadInput
from silodp.core.extension import is_file
from silodp.host.extension import load
from silodp.server.algorithms.guard import guarded
from silodp.server.algorithms.signature import WORDS, Algorithm, Setting, assignments

__all__ = ["ALGORITHMS", "WORDS", "Algorithm", "Setting", "assignments", "find"]


@cache
def find(text: str) -> Algorithm:
    """The algorithm of this name, or the one that FILE.py:NAME holds."""
    if is_file(text):
        return guarded(Algorithm.of(load(text), text))
    if text not in ALGORITHMS:
        raise BadInput(
            f"algorithm {text!r} is unknown; choose one of {', '.join(ALGORITHMS)}, or "
            "give FILE.py:NAME"
        )
    return ALGORITHMS[text]


def _shipped() -> dict[str, Algorithm]:
    found = {}
    for entry in pkgutil.iter_modules(__path__):
        module = import_module(f"{__name__}.{entry.name}")
        name = entry.name.replace("_", "-")
        for run in vars(module).values():
            if inspect.isgeneratorfunction(run) and run.__module__ == module.__name__:
                found[name] = Algorithm.of(run, name)
    return found


ALGORITHMS: dict[str, Algorithm] = _shipped()
