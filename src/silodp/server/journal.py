"""The transcript of a run over a network, written after every question: what a killed server needs to go on without a second spend.

It holds queries' hashes and replies, which are signed by the silos and private already. The file is a sequence of records, each
length of the payload (8, big-endian) | payload | SHA-256 of the hash before and the payload. A payload is header length (4,
big-endian) | header, JSON | the replies' frames, one after another. The first record's header names run and configuration; each other
has "sequence", "asked" (silo: SHA-256 of the query's body), "dropped" (silo: code) and "replies" ([silo, bytes], ...).
A record is on the disk before the iterate that it leads to is made. A torn last record is cut off: its question is asked again under the
same ids, and the gates have the answers. A last record {"stopped": sequence} says that the run ended in the iterate that began there.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from silodp.core.errors import BadInput

VERSION = 1
_LENGTH, _HASH = 8, 32


@dataclass(frozen=True)
class Round:
    """One question: whom it went to, under which hash, what they replied, and why the others did not count."""

    sequence: int
    asked: dict[str, str]
    replies: dict[str, bytes]
    dropped: dict[str, str]


class Journal:
    """One run's file, held by one process. `read` gives the records in order; after the last of them `write` adds new ones."""

    def __init__(self, path: Path, run: str, config: str) -> None:
        """Opens the journal of this run, or makes a new one if there is none; another run's, or a damaged one, is BadInput."""
        self.path = path
        try:
            new = not path.exists()
            self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise BadInput(f"another process runs with the journal {path}; wait for its end, or stop it") from None
        except OSError as error:
            raise BadInput(f"the journal {path} cannot be opened: {error.strerror}") from None
        self._head, self._ended = bytes(_HASH), False
        header = {"version": VERSION, "run": run, "config": config}
        first = None if new else self._next()
        self.new = first is None
        """Whether nothing was ever asked in this run."""
        if first is None:
            self._append(header, {})
            self._ended = True
            _sync_folder(path.parent)
        elif first[0] != header:
            self.close()
            raise BadInput(f"the journal {path} belongs to another run or to other settings; choose another folder, or resume that run")
        else:
            self._unmark()

    def read(self) -> Round | None:
        """The next record, or None after the last; from then on the journal takes new ones."""
        if self._ended or (found := self._next()) is None:
            self._ended = True
            return None
        header, replies = found
        return Round(header["sequence"], header["asked"], replies, header["dropped"])

    def stop(self, since: int) -> None:
        """Marks that the run has stopped in the iterate that began with question `since`: what nobody replied to is asked again then."""
        if self._ended:
            self._append({"stopped": since}, {})

    def _unmark(self) -> None:
        """Cuts off a mark at the end, with the questions before it that nobody replied to and no iterate was made of."""
        begin, head = self._file.tell(), self._head
        unanswered: list[tuple[int, int]] = []
        cut, start = None, begin
        while cut is None and (found := self._next()):
            header, replies = found
            if "stopped" in header:
                cut = min((place for sequence, place in unanswered if sequence >= header["stopped"]), default=start)
            else:
                unanswered = [] if replies else [*unanswered, (header["sequence"], start)]
            start = self._file.tell()
        if cut is not None:
            self._file.truncate(cut)
        self._file.seek(begin)
        self._head = head

    def write(self, told: Round) -> None:
        """Afterwards the record is on the disk."""
        if not self._ended:
            raise RuntimeError("a journal is read to its end before it is written")
        self._append({"sequence": told.sequence, "asked": told.asked, "dropped": told.dropped}, told.replies)

    def close(self) -> None:
        self._file.close()

    def _append(self, header: dict[str, Any], replies: Mapping[str, bytes]) -> None:
        text = json.dumps(header | ({"replies": [[name, len(raw)] for name, raw in replies.items()]} if "asked" in header else {})).encode()
        payload, head = (len(text).to_bytes(4, "big"), text, *replies.values()), hashlib.sha256(self._head)
        self._file.write(sum(map(len, payload)).to_bytes(_LENGTH, "big"))
        for part in payload:  # replies may be long: none is copied
            head.update(part)
            self._file.write(part)
        self._head = head.digest()
        self._file.write(self._head)
        self._file.flush()
        os.fsync(self._file.fileno())

    def _next(self) -> tuple[dict[str, Any], dict[str, bytes]] | None:
        start = self._file.tell()
        size = int.from_bytes(self._file.read(_LENGTH), "big")
        end = start + _LENGTH + size + _HASH
        whole = os.fstat(self._file.fileno()).st_size
        payload = self._file.read(size) if end <= whole else b""
        head = hashlib.sha256(self._head + payload).digest()
        if size and end <= whole and self._file.read(_HASH) == head:
            self._head = head
            return _parsed(payload)
        self._file.seek(min(end, whole))
        if self._file.read().strip(b"\0"):  # a torn record is the last; one before others has been damaged
            self.close()
            raise BadInput(f"the journal {self.path} is damaged at byte {start}; restore it from a copy")
        self._file.seek(start)
        self._file.truncate()
        return None


def _parsed(payload: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    end = 4 + int.from_bytes(payload[:4], "big")
    header, replies = json.loads(payload[4:end]), {}
    for name, size in header.get("replies", ()):
        replies[name] = payload[end : end + size]
        end += size
    return header, replies


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
