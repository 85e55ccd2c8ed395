"""Replies of silos on the disk, from the moment they have come until the iterate that was made of
them is in the journal.

They are what a killed server need not ask for again, so that no gate has to keep an answer for as
long as a run may lie still; and they are what lets a server hold a sum in memory in place of all
that is added. Each is  header length (4, big-endian) | header, JSON | SHA-256 of the header | the
frame, and the header has the frame's length and SHA-256. Whatever is torn at the end is cut off: it
is asked for again, and the gate has it.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import NamedTuple

from silodp.host.portable import OWN

_HASH = 32


class Key(NamedTuple):
    """Of which question, by number and by SHA-256 of its body, and of whom."""

    sequence: int
    name: str
    digest: str


class Replies:
    """The file at `path`, which whoever holds the journal beside it holds too; without a path, in
    memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._held: dict[Key, bytes] = {}
        self._places: dict[Key, tuple[int, int]] = {}
        self._file = (
            None
            if path is None
            else os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | OWN, 0o600), "r+b")
        )
        if self._file:
            whole = self._read()
            self._file.truncate(whole)
            self._file.seek(whole)

    def _read(self) -> int:
        """Finds what is there; the place where what is whole ends."""
        assert self._file
        end, size = 0, os.fstat(self._file.fileno()).st_size
        while end + 4 < size:
            self._file.seek(end)
            try:
                text = self._file.read(int.from_bytes(self._file.read(4), "big"))
                if self._file.read(_HASH) != hashlib.sha256(text).digest():
                    break
                *key, length, sha256 = json.loads(text)
            except ValueError:
                break
            begin, key = self._file.tell(), Key(*key)
            if (
                begin + length > size
                or hashlib.sha256(self._file.read(length)).hexdigest() != sha256
            ):
                break
            self._places[key], end = (begin, length), begin + length
        return end

    def keep(self, key: Key, frame: bytes) -> str:
        """SHA-256 of the frame, which outlives this process from now on, and the machine after
        `sync`.
        """
        sha256 = hashlib.sha256(frame).hexdigest()
        if self._file is None:
            self._held[key] = frame
        elif key not in self._places:
            header = json.dumps([*key, len(frame), sha256]).encode()
            self._file.write(
                len(header).to_bytes(4, "big") + header + hashlib.sha256(header).digest()
            )
            self._places[key] = self._file.tell(), len(frame)
            self._file.write(frame)
            self._file.flush()
        return sha256

    def get(self, key: Key) -> bytes:
        """The frame; KeyError where it is not there."""
        if self._file is None:
            return self._held[key]
        begin, size = self._places[key]
        return os.pread(self._file.fileno(), size, begin)

    def __contains__(self, key: Key) -> bool:
        return key in self._held or key in self._places

    def sync(self) -> None:
        if self._file:
            os.fsync(self._file.fileno())

    def clear(self) -> None:
        """What was made of them is durable."""
        self._held.clear()
        self._places.clear()
        if self._file:
            self._file.seek(0)
            self._file.truncate()

    def close(self) -> None:
        if self._file:
            self._file.close()
