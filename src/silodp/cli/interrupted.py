"""Ctrl-C: print one sentence, with what was saved and how to continue, and exit with code 130."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from silodp.cli.console import complain

KEPT = "the finished part is in {}, and the same command continues from there"
CODE = 130
"""The exit code of a command that SIGINT ended: 128 plus the signal's number."""


@contextmanager
def interruptible(kept: str | Callable[[], str]) -> Iterator[None]:
    """Turn Ctrl-C into a sentence and exit code 130.

    `kept` is the second half of the sentence. A function is called only at the interrupt, so that
    it can inspect the files.
    """
    try:
        yield
    except KeyboardInterrupt:
        if not isinstance(kept, str):
            kept = kept()
        complain(f"interrupted; {kept}")
        raise typer.Exit(CODE) from None


def same_command(*more: str | Path, without: tuple[str, ...] = ()) -> str:
    """Return the running command as it can be typed again, with `more` added and the flags
    `without` removed.
    """
    words = [word for word in sys.argv[1:] if word not in without]
    return shlex.join(["silodp", *words, *map(str, more)])
