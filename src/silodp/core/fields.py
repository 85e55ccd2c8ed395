"""What kinds of field a question has, so that it can be written and read without knowing it, and
how a package's kinds are found.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from typing import TypeVar

Kind = TypeVar("Kind")
POINT = "point"
VECTOR = "vector"
INTEGER = "integer"
REAL = "real"
NAME = "name"
"""A tensor (1, d), a tensor (k,), a whole number, a number or one per run, and a short text."""


def discovered(base: type[Kind], package: str, path: Iterable[str]) -> dict[str, type[Kind]]:
    """By name, every class under `base` that a module of the package defines and that has fields of
    its own (`wire`).

    A new file in the package is a new kind: the codec can write it, a gate answers it where its
    policy names it, and the audit goes red until it has an example.
    """
    for module in pkgutil.iter_modules(path):
        importlib.import_module(f"{package}.{module.name}")
    found = {}
    left = [base]
    while left:
        kind = left.pop()
        left += kind.__subclasses__()
        if "wire" in vars(kind) and kind.__module__.startswith(f"{package}."):
            found[kind.__name__] = kind
    return dict(sorted(found.items()))
