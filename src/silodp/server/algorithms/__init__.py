"""Algorithms, one per file: those of the paper and other published ones.

Each algorithm is a generator that asks a federation and yields iterates. A file of this folder is
an algorithm if it has a generator function whose signature declares a release. The algorithm has
the name of its file. No list of algorithms exists: this module reads the folder.
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
    """Return the algorithm of this name, or the algorithm that FILE.py:NAME names.

    Raise BadInput if the name is unknown, or if the file has no such algorithm.
    """
    if is_file(text):
        return guarded(Algorithm.of(load(text), text))
    if text not in ALGORITHMS:
        raise BadInput(
            f"algorithm {text!r} is unknown; choose one of {', '.join(ALGORITHMS)}, or "
            "give FILE.py:NAME"
        )
    return ALGORITHMS[text]


def _shipped() -> dict[str, Algorithm]:
    """Return the algorithms of this folder, by name."""
    algorithms = {}
    for entry in pkgutil.iter_modules(__path__):
        module = import_module(f"{__name__}.{entry.name}")
        name = entry.name.replace("_", "-")
        for run in vars(module).values():
            if inspect.isgeneratorfunction(run) and run.__module__ == module.__name__:
                algorithms[name] = Algorithm.of(run, name)
    return algorithms


ALGORITHMS: dict[str, Algorithm] = _shipped()
