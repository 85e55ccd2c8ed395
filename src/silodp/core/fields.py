"""Define the kinds of field of a query, and find the kinds in a package.

So a query can be written and read by code that does not depend on its kind.
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
"""The kinds: a tensor (1, d), a tensor (k,), an integer, a number or one per run, a short text."""


def discovered(base: type[Kind], package: str, path: Iterable[str]) -> dict[str, type[Kind]]:
    """Return, by name, every class under `base` that a module of the package defines.

    The class must have its own fields (`wire`). A new file in the package is a new kind: the codec
    can write it, a gate answers it if its policy names it, and the audit fails until it has an
    example.
    """
    for module in pkgutil.iter_modules(path):
        importlib.import_module(f"{package}.{module.name}")
    kinds = {}
    left = [base]
    while left:
        kind = left.pop()
        left += kind.__subclasses__()
        if "wire" in vars(kind) and kind.__module__.startswith(f"{package}."):
            kinds[kind.__name__] = kind
    return dict(sorted(kinds.items()))
