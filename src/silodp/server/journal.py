"""The transcript of a run over a network, written after every question: what a killed server needs
to go on without a second spend.

It holds hashes of queries and of replies, and what was made of the replies (a mean, a total), which
is private already. The file is a sequence of records, each  length of the payload (8, big-endian) |
payload | SHA-256 of the hash before and the payload. A payload is header length (4, big-endian) |
header, JSON | frames that are kept whole, one after another | the numbers of the mean. The first
record's header names run and configuration; each other is of a question, with "sequence", "asked"
(silo: SHA-256 of the query's body), "dropped" (silo: code), "doubted" (silos), "heard" (silo:
`Heard`), "replies" ([name, bytes], ...) and "value" (type, shape); or of an iterate, with its
number and SHA-256.

Replies themselves are in the file "replies" beside it (`replies`): each before anything is made of
it, and until the iterate is here. A record is on the disk before the iterate that it leads to is
made. A torn last record is cut off, and made again of the replies, or of the gates' answers to the
same ids. A last record {"stopped": sequence} says that the run ended in the iterate that began
there.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from silodp.core.errors import BadInput
from silodp.host.portable import OWN, lock, sync_folder
from silodp.server.replies import Replies

VERSION = 2
_LENGTH = 8
_HASH = 32


@dataclass(frozen=True)
class Heard:
    """What is kept of a silo's reply: its SHA-256, the silo's ledger as it says (entries, hash of
    the last), how long the answer is as a vector, and of a sealed one the SHA-256 of the box."""

    sha256: str
    count: int
    head: str
    norm: float | None = None
    box: str = ""


@dataclass(frozen=True)
class Round:
    """One question: whom it went to, under which hash, what was heard and made of it, and why the
    others did not count.
    """

    sequence: int
    asked: dict[str, str]
    dropped: dict[str, str]
    heard: dict[str, Heard] = field(default_factory=dict)
    replies: dict[str, bytes] = field(default_factory=dict)
    """Those that are kept whole: they are short, or the total itself."""
    value: np.ndarray | None = field(default=None, compare=False)
    refused_late: tuple[str, ...] = ()
    """Silos that refused a later frame. An earlier one may have been charged. The file calls them
    "doubted".
    """


class Journal:
    """One run's file, held by one process. `read` gives the records in order; after the last of
    them `write` adds new ones.
    """

    def __init__(self, path: Path, run: str, config: str) -> None:
        """Opens the journal of this run, or makes a new one if there is none; another run's, or a
        damaged one, is BadInput.
        """
        self.path = path
        self.replies = Replies()
        try:
            new = not path.exists()
            self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | OWN, 0o600), "r+b")
        except OSError as error:
            raise BadInput(f"the journal {path} cannot be opened: {error.strerror}") from None
        if not lock(self._file):
            self.close()
            raise BadInput(
                f"another process runs with the journal {path}; wait for its end, or stop it"
            )
        self._head = bytes(_HASH)
        self._ended = False
        self.reached = -1
        """The last question that may have gone out before the journal was opened: the one after the
        last that is here, or none of a new one.
        """
        self.replies = Replies(path.with_name("replies"))
        header = {"version": VERSION, "run": run, "config": config}
        first = None if new else self._next()
        self.new = first is None
        """Whether nothing was ever asked in this run."""
        if first is None:
            self._append(header)
            self._ended = True
            sync_folder(path.parent)
        elif first.get("version") != VERSION:
            self.close()
            raise BadInput(
                f"the journal {path} is of another version of silodp; a run is resumed by "
                "the version that began it"
            )
        elif first != header:
            self.close()
            raise BadInput(
                f"the journal {path} belongs to another run or to other settings; choose "
                "another folder, or resume that run"
            )
        else:
            self._unmark()

    def read(self) -> Round | None:
        """The next record, or None after the last; from then on the journal takes new ones."""
        found = None if self._ended else self._next()
        while found and "iterate" in found:  # of a run whose iterates nobody wants to compare
            found = self._next()
        if found is None:
            self._ended = True
            return None
        told = {name: Heard(**about) for name, about in found["heard"].items()}
        refused_late = tuple(found.get("doubted", ()))
        return Round(
            found["sequence"],
            found["asked"],
            found["dropped"],
            told,
            found["frames"],
            found["numbers"],
            refused_late,
        )

    def iterate(self, number: int, sha256: str) -> None:
        """The iterate is there: what it was made of is let go of. BadInput where the journal has
        another one.
        """
        header = {"iterate": number, "sha256": sha256}
        if not self._ended and (found := self._next()) is not None:
            if any(found.get(name) != value for name, value in header.items()):
                raise BadInput(
                    f"iterate {number} is not the one in the journal {self.path}; the run "
                    "can only go on with the same versions"
                )
            return
        self._ended = True
        self._append(header)
        self.replies.clear()

    def stop(self, since: int) -> None:
        """Marks that the run has stopped in the iterate that began with question `since`: what
        nobody replied to is asked again then.
        """
        if self._ended:
            self._append({"stopped": since})

    def _unmark(self) -> None:
        """Cuts off a mark at the end, with the questions before it that nobody replied to and no
        iterate was made of.
        """
        begin = self._file.tell()
        head = self._head
        unanswered: list[tuple[int, int]] = []
        cut = None
        start = begin
        self.reached = 0
        while cut is None and (header := self._next()):
            if "stopped" in header:
                cut = min(
                    (place for sequence, place in unanswered if sequence >= header["stopped"]),
                    default=start,
                )
            elif "sequence" in header:
                self.reached = header["sequence"] + 1
                if header["heard"] or header["replies"]:
                    unanswered = []
                else:
                    unanswered = [*unanswered, (header["sequence"], start)]
            start = self._file.tell()
        if cut is not None:
            self._file.truncate(cut)
        self._file.seek(begin)
        self._head = head

    def write(self, told: Round) -> None:
        """Afterwards the record is on the disk."""
        if not self._ended:
            raise RuntimeError("a journal is read to its end before it is written")
        header = {
            "sequence": told.sequence,
            "asked": told.asked,
            "dropped": told.dropped,
            "doubted": told.refused_late,
        }
        header |= {"heard": {name: vars(heard) for name, heard in told.heard.items()}}
        header |= {"replies": [[name, len(raw)] for name, raw in told.replies.items()]}
        if told.value is None:
            value = []
        else:
            value = [np.ascontiguousarray(told.value)]
        header |= {"value": [[part.dtype.str, part.shape] for part in value]}
        self.replies.sync()
        self._append(
            header,
            *told.replies.values(),
            *(part.reshape(-1).view(np.uint8).data for part in value),
        )

    def close(self) -> None:
        self._file.close()
        self.replies.close()

    def _append(self, header: dict[str, Any], *parts: bytes | memoryview) -> None:
        text = json.dumps(header).encode()
        payload = (len(text).to_bytes(4, "big"), text, *parts)
        head = hashlib.sha256(self._head)
        self._file.write(sum(map(len, payload)).to_bytes(_LENGTH, "big"))
        for part in payload:  # which may be long: none is copied
            head.update(part)
            self._file.write(part)
        self._head = head.digest()
        self._file.write(self._head)
        self._file.flush()
        os.fsync(self._file.fileno())

    def _next(self) -> dict[str, Any] | None:
        """The next record's header, with its frames and its numbers."""
        start = self._file.tell()
        size = int.from_bytes(self._file.read(_LENGTH), "big")
        end = start + _LENGTH + size + _HASH
        whole = os.fstat(self._file.fileno()).st_size
        if end <= whole:
            payload = self._file.read(size)
        else:
            payload = b""
        head = hashlib.sha256(self._head + payload).digest()
        if size and end <= whole and self._file.read(_HASH) == head:
            self._head = head
            return _parsed(payload)
        said = (
            start + _LENGTH + self._said(start + _LENGTH) + _HASH
        )  # the length itself may be what was damaged
        if self._follows(end) or self._follows(
            said
        ):  # a torn record is the last; one before others has been damaged
            self.close()
            raise BadInput(
                f"the journal {self.path} is damaged at byte {start}; restore it from a copy"
            )
        self._file.seek(start)
        self._file.truncate()
        return None

    def _follows(self, place: int) -> bool:
        """Whether anything was ever written after this place."""
        self._file.seek(min(place, os.fstat(self._file.fileno()).st_size))
        return bool(self._file.read().strip(b"\0"))

    def _said(self, place: int) -> int:
        """How long a payload is by its own header; nothing beyond the file where that is torn."""
        self._file.seek(place)
        whole = os.fstat(self._file.fileno()).st_size
        try:
            size = int.from_bytes(self._file.read(4), "big")
            header = json.loads(self._file.read(min(size, whole)))
            numbers = sum(
                np.dtype(kind).itemsize * math.prod(shape)
                for kind, shape in header.get("value", ())
            )
            return 4 + size + sum(length for _, length in header.get("replies", ())) + numbers
        except (ValueError, TypeError, AttributeError):
            return whole


def _parsed(payload: bytes) -> dict[str, Any]:
    end = 4 + int.from_bytes(payload[:4], "big")
    header: dict[str, Any] = json.loads(payload[4:end])
    if "asked" in header:
        header |= {"frames": {}, "numbers": None}
        for name, size in header["replies"]:
            header["frames"][name] = payload[end : end + size]
            end += size
        for kind, shape in header["value"]:
            header["numbers"] = np.frombuffer(payload, np.dtype(kind), offset=end).reshape(shape)
    return header
