"""A daemon's log: one line for each event, without data, put aside when it is long."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler

from silodp.core.errors import BadInput

KEPT = 5
"""Logs that were put aside and are kept."""


class Log:
    """One line for each event, with the time before it. No data, no addresses."""

    def __init__(self, path: str, most: int) -> None:
        try:
            self._handler = RotatingFileHandler(path, maxBytes=most, backupCount=KEPT, encoding="utf-8")
        except OSError as error:
            raise BadInput(f"the log {path} cannot be written: {error.strerror}") from None
        self._handler.handleError = lambda record: None

    def line(self, words: str) -> None:
        when = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._handler.handle(logging.makeLogRecord({"msg": f"{when} {words}"}))

    def close(self) -> None:
        self._handler.close()


def tally(path: str) -> Counter[str]:
    """How often each word stands after the time in the log, as far as it has been kept."""
    return Counter(words[1] for words in map(str.split, lines(path)) if len(words) > 1)


def lines(path: str) -> Iterator[str]:
    """The log's lines in order, as far as it has been kept."""
    for file in (f"{path}.{i}" if i else path for i in range(KEPT, -1, -1)):
        with contextlib.suppress(FileNotFoundError), open(file, encoding="utf-8", errors="replace") as found:
            yield from found
