"""Write a daemon's log: one line for each event, without data, rotated when it is long.

A line is written after its reply was sent. So neither the line's time nor the file's shows when an
answer was ready. With SILODP_LOG=json in the environment each line is also printed as one JSON
object, for a collector of logs.
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
"""Number of older log files that are kept."""
NOT_COUNTED = ("started", "stopped", "late")
"""Events that `silodp_frames_total` leaves out. The first two are about no frame. The number of
late replies depends on how long answers took, so it stays in the operator's log.
"""


class Log:
    """A daemon's log: one line for each event, with its time, without data or addresses."""

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
        """Write the line once `sent` is called, or at once for an event that computed nothing."""
        # A line feed in a word would otherwise look like another event.
        words = visible(words)
        if at_once:
            return self._write(words)
        with self._guard:
            self._unsent.append(words)

    def sent(self) -> None:
        """Write the waiting lines, since their reply was sent.

        They get the present time: how long the reply took must not be visible.
        """
        with self._guard:
            unsent = self._unsent
            self._unsent = []
        for words in unsent:
            self._write(words)

    def _write(self, words: str) -> None:
        self._handler.handle(logging.makeLogRecord({"msg": f"{_now()} {words}"}))
        self._report(words)

    def _report(self, words: str) -> None:
        event, _, rest = words.strip().partition(" ")
        if event not in NOT_COUNTED:
            metrics.count("silodp_frames_total", code=event)
        if self._json:
            print(json.dumps({"time": _now(), "event": event, "text": rest.strip()}), flush=True)

    def close(self) -> None:
        self.sent()
        self._handler.close()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def tally(path: str) -> Counter[str]:
    """Return how often each event occurs in the log files that are kept."""
    return Counter(words[1] for words in map(str.split, lines(path)) if len(words) > 1)


def lines(path: str) -> Iterator[str]:
    """Yield the lines of the log files that are kept, oldest first."""
    older = [f"{path}.{number}" for number in range(KEPT, 0, -1)]
    for name in (*older, path):
        with (
            contextlib.suppress(FileNotFoundError),
            open(name, encoding="utf-8", errors="replace") as file,
        ):
            yield from file
