"""A daemon's log: one line for each event, without data, put aside when it is long.

A line is written once its reply was sent, so that neither its time nor the file's says when an
answer was ready. With SILODP_LOG=json in the environment each is one JSON object on standard output
too, for a collector of logs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler

from silodp.core.errors import BadInput
from silodp.core.text import visible
from silodp.host import metrics

KEPT = 5
"""Logs that were put aside and are kept."""
UNTOLD = ("started", "stopped", "late")
"""Events that are no frame's; and how many replies were late depends on how long they took, which
is the operator's to know.
"""


class Log:
    """One line for each event, with the time before it. No data, no addresses."""

    def __init__(self, path: str, most: int) -> None:
        try:
            self._handler = RotatingFileHandler(
                path, maxBytes=most, backupCount=KEPT, encoding="utf-8"
            )
        except OSError as error:
            raise BadInput(f"the log {path} cannot be written: {error.strerror}") from None
        self._handler.handleError = lambda record: None
        self._json = os.environ.get("SILODP_LOG") == "json"
        self._guard = threading.Lock()
        self._unsent: list[str] = []

    def line(self, words: str, *, at_once: bool = False) -> None:
        """Writes the line once `sent` is called, or at once where nothing was computed."""
        words = visible(words)  # or a line feed in a word would look like another event
        if at_once:
            return self._write(words)
        with self._guard:
            self._unsent.append(words)

    def sent(self) -> None:
        """The reply that the last lines speak of was sent: now they are written, with this time,
        since how long it took to make is not to be told.
        """
        with self._guard:
            unsent = self._unsent
            self._unsent = []
        for words in unsent:
            self._write(words)

    def _write(self, words: str) -> None:
        self._handler.handle(logging.makeLogRecord({"msg": f"{_now()} {words}"}))
        self._tell(words)

    def _tell(self, words: str) -> None:
        event, _, rest = words.strip().partition(" ")
        if event not in UNTOLD:
            metrics.count("silodp_frames_total", code=event)
        if self._json:
            print(json.dumps({"time": _now(), "event": event, "text": rest.strip()}), flush=True)

    def close(self) -> None:
        self.sent()
        self._handler.close()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def tally(path: str) -> Counter[str]:
    """How often each word stands after the time in the log, as far as it has been kept."""
    return Counter(words[1] for words in map(str.split, lines(path)) if len(words) > 1)


def lines(path: str) -> Iterator[str]:
    """The log's lines in order, as far as it has been kept."""
    for file in (f"{path}.{i}" if i else path for i in range(KEPT, -1, -1)):
        with (
            contextlib.suppress(FileNotFoundError),
            open(file, encoding="utf-8", errors="replace") as found,
        ):
            yield from found
