"""The transcript of a run over a network, written after every question. A server that was killed
needs it to continue without charging twice.

It contains hashes of queries and of replies, and what was made of the replies (a mean, a total),
which is private already. The file is a sequence of records, each  length of the payload (8,
big-endian) | payload | SHA-256 of the hash before and the payload. A payload is header length (4,
big-endian) | header, JSON | complete frames, one after another | the numbers of the mean.

The first record's header names the run and its configuration. Each other record is of a question or
of an iterate. The record of a question has "sequence", "asked" (silo: SHA-256 of the query's body),
"dropped" (silo: code), "doubted" (silos), "heard" (silo: `Heard`), "replies" ([name, bytes], ...)
and "value" (type, shape). The record of an iterate has its number and SHA-256.

Replies themselves are in the file "replies" beside the journal (`replies`). Each reply is there
before anything is made of it, and until the iterate is in the journal. A record is on the disk
before the iterate that it leads to is made. A torn last record is cut off. It is made again from
the replies, or from the gates' answers to the same ids. A last record {"stopped": sequence} means
that the run ended in the iterate that began with this question.
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
    """What the journal keeps of a silo's reply.

    It is the reply's SHA-256, the number of entries of the silo's ledger and the hash of the last
    entry, the norm of the answer, and for a sealed answer the SHA-256 of its box.
    """

    sha256: str
    count: int
    head: str
    norm: float | None = None
    box: str = ""


@dataclass(frozen=True)
class Round:
    """One question: the hash of the frame for each silo, the replies, the result, and the codes of
    the silos that did not count.
    """

    sequence: int
    asked: dict[str, str]
    dropped: dict[str, str]
    heard: dict[str, Heard] = field(default_factory=dict)
    replies: dict[str, bytes] = field(default_factory=dict)
    """Replies that are stored complete, because they are short, or are the total itself."""
    value: np.ndarray | None = field(default=None, compare=False)
    refused_late: tuple[str, ...] = ()
    """Silos that refused a later frame. An earlier one may have been charged. The file calls them
    "doubted".
    """


class Journal:
    """The file of one run, locked by one process. `read` returns the records in order. After the
    last one `write` adds new records.

    A resumed run asks every question again from the first. The answers come from here until `read`
    returns None. Then questions go out.
    """

    def __init__(self, path: Path, run: str, config: str) -> None:
        """Open the journal of this run, or create it.

        Raise BadInput if the file cannot be opened, is in use, is damaged, or belongs to another
        run or version.
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
        self._at_end = False
        self.reached = -1
        """The number of the last question that may have gone out before the journal was opened: the
        one after the last recorded question, or -1 in a new journal.
        """
        self.replies = Replies(path.with_name("replies"))
        header = {"version": VERSION, "run": run, "config": config}
        if new:
            first = None
        else:
            first = self._next()
        self.new = first is None
        """Whether no question of this run is recorded."""
        if first is None:
            self._append(header)
            self._at_end = True
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
            self._remove_stop_mark()

    def read(self) -> Round | None:
        """Return the next question, or None after the last. From then on the journal takes new
        records.
        """
        if self._at_end:
            return None
        header = self._next()
        # `iterate` reads the record of an iterate. Without a call of it the record is skipped.
        while header and "iterate" in header:
            header = self._next()
        if header is None:
            self._at_end = True
            return None
        heard = {name: Heard(**fields) for name, fields in header["heard"].items()}
        refused_late = tuple(header.get("doubted", ()))
        return Round(
            header["sequence"],
            header["asked"],
            header["dropped"],
            heard,
            header["frames"],
            header["numbers"],
            refused_late,
        )

    def iterate(self, number: int, sha256: str) -> None:
        """Record the iterate, and delete the replies that it was made of.

        In a resumed run, compare the iterate with the recorded one. Raise BadInput if they differ.
        """
        header = {"iterate": number, "sha256": sha256}
        if not self._at_end and (recorded := self._next()) is not None:
            if any(recorded.get(name) != value for name, value in header.items()):
                raise BadInput(
                    f"iterate {number} is not the one in the journal {self.path}; resume the run "
                    "with the versions that began it"
                )
            return
        self._at_end = True
        self._append(header)
        self.replies.clear()

    def stop(self, since: int) -> None:
        """Record that the run has stopped in the iterate that began with question `since`.

        When the run is resumed, its questions from there on that got no reply are asked again.
        """
        if self._at_end:
            self._append({"stopped": since})

    def _remove_stop_mark(self) -> None:
        """Remove the mark of a stop at the end, and the questions before it that got no reply and
        led to no iterate. Set `reached`.
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

    def write(self, question: Round) -> None:
        """Write the record of a question, and wait until it is on the disk.

        Raise RuntimeError if the journal is not read to its end.
        """
        if not self._at_end:
            raise RuntimeError("a journal is read to its end before it is written")
        header = {
            "sequence": question.sequence,
            "asked": question.asked,
            "dropped": question.dropped,
            "doubted": question.refused_late,
        }
        header |= {"heard": {name: vars(heard) for name, heard in question.heard.items()}}
        header |= {"replies": [[name, len(raw)] for name, raw in question.replies.items()]}
        if question.value is None:
            value = []
        else:
            value = [np.ascontiguousarray(question.value)]
        header |= {"value": [[part.dtype.str, part.shape] for part in value]}
        self.replies.sync()
        self._append(
            header,
            *question.replies.values(),
            *(part.reshape(-1).view(np.uint8).data for part in value),
        )

    def close(self) -> None:
        """Close the journal and its replies."""
        self._file.close()
        self.replies.close()

    def _append(self, header: dict[str, Any], *parts: bytes | memoryview) -> None:
        """Write a record of this header and these parts, and wait until it is on the disk."""
        text = json.dumps(header).encode()
        payload = (len(text).to_bytes(4, "big"), text, *parts)
        head = hashlib.sha256(self._head)
        self._file.write(sum(map(len, payload)).to_bytes(_LENGTH, "big"))
        # The parts may be long, so they are not joined into one copy.
        for part in payload:
            head.update(part)
            self._file.write(part)
        self._head = head.digest()
        self._file.write(self._head)
        self._file.flush()
        os.fsync(self._file.fileno())

    def _next(self) -> dict[str, Any] | None:
        """Return the next record's header, with its frames and its numbers.

        Return None at the end of the file, where a torn record is cut off. Raise BadInput if a
        record before others is damaged.
        """
        start = self._file.tell()
        size = int.from_bytes(self._file.read(_LENGTH), "big")
        end = start + _LENGTH + size + _HASH
        file_size = os.fstat(self._file.fileno()).st_size
        if end <= file_size:
            payload = self._file.read(size)
        else:
            payload = b""
        head = hashlib.sha256(self._head + payload).digest()
        if size and end <= file_size and self._file.read(_HASH) == head:
            self._head = head
            return _parsed(payload)
        # The damage may be in the length itself. So the end by the record's header counts too.
        declared_end = start + _LENGTH + self._declared_length(start + _LENGTH) + _HASH
        # A torn record is the last one. If others follow, the record was damaged later.
        if self._follows(end) or self._follows(declared_end):
            self.close()
            raise BadInput(
                f"the journal {self.path} is damaged at byte {start}; restore it from a copy"
            )
        self._file.seek(start)
        self._file.truncate()
        return None

    def _follows(self, place: int) -> bool:
        """Return whether bytes other than zero follow this place."""
        self._file.seek(min(place, os.fstat(self._file.fileno()).st_size))
        return bool(self._file.read().strip(b"\0"))

    def _declared_length(self, place: int) -> int:
        """Return the length of a payload by its own header, or the file's size if that is torn."""
        self._file.seek(place)
        file_size = os.fstat(self._file.fileno()).st_size
        try:
            size = int.from_bytes(self._file.read(4), "big")
            header = json.loads(self._file.read(min(size, file_size)))
            numbers = sum(
                np.dtype(kind).itemsize * math.prod(shape)
                for kind, shape in header.get("value", ())
            )
            return 4 + size + sum(length for _, length in header.get("replies", ())) + numbers
        except (ValueError, TypeError, AttributeError):
            return file_size


def _parsed(payload: bytes) -> dict[str, Any]:
    """Return the header of a payload. The record of a question also gets its "frames" and
    "numbers".
    """
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
