"""Ctrl-C: one sentence that says what was kept and how to go on, and exit code 130."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from silodp.cli.console import complain

KEPT = "what was finished is kept in {}, and the same command goes on from there"
CODE = 130
"""What a shell gives a command that ended by SIGINT: 128 and the signal's number."""


@contextmanager
def interruptible(kept: str | Callable[[], str]) -> Iterator[None]:
    """For work that takes long. `kept` is the sentence's second half; it is asked for only then, so
    that it can look at what there is.
    """
    try:
        yield
    except KeyboardInterrupt:
        complain(f"interrupted; {kept if isinstance(kept, str) else kept()}")
        raise typer.Exit(CODE) from None


def same_command(*more: str | Path, without: tuple[str, ...] = ()) -> str:
    """The command that is running, in words that can be typed again, with `more` behind it and the
    flags `without` taken out.
    """
    words = [word for word in sys.argv[1:] if word not in without]
    return shlex.join(["silodp", *words, *map(str, more)])
