"""Mistakes that others have made, or that somebody could make, which the audit plants and must
catch. Not in the wheel.

A mistake is one class or function that takes the place of one shipped part. It says in its first
line what it does wrong and, as far as it is known, who did. Nothing here can be switched on.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from silodp.audit.pipeline import SOUND, Pipeline
from silodp.silo.answer import lattice

Planted = Callable[[], AbstractContextManager]


class Mistakes(dict[str, Pipeline]):
    """The shipped pipeline with a mistake in it, by the mistake's name. A name that is given twice
    changes two parts.
    """

    def plant(self, name: str, part: str) -> Callable[[Any], Any]:
        """What follows takes the place of this part of the pipeline."""

        def planted(mistaken: Any) -> Any:
            self[name] = replace(self.get(name, SOUND), **{part: mistaken})
            return mistaken

        return planted


def instead(where: Any, name: str, mistaken: Callable[..., Any]) -> AbstractContextManager:
    """Meanwhile `mistaken(shipped, ...)` is called where `where` has `name`, with what is shipped
    as its first argument.
    """
    shipped = getattr(where, name)
    return mock.patch.object(where, name, lambda *words, **more: mistaken(shipped, *words, **more))


def during(base: Any, method: str, planted: Callable[[Any, tuple], AbstractContextManager]) -> Any:
    """A class like `base` in whose `method` something is planted, which may depend on the object
    and on what it is called with.
    """

    def mistaken(self: Any, *words: Any) -> Any:
        with planted(self, words):
            return getattr(base, method)(self, *words)

    return type(f"Mistaken{base.__name__}", (base,), {method: mistaken})


def keyed(key: bytes) -> AbstractContextManager:
    """Meanwhile every keystream starts with this key."""

    class Constant(lattice.Keystream):
        def _rekey(self) -> None:
            super()._rekey()
            self._cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()

    return mock.patch.object(lattice, "Keystream", Constant)
