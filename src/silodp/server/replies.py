"""Replies of silos on the disk, until the iterate that was made of them is in the journal.

They have two uses. A server that was killed need not ask for them again, so a gate can delete an
answer although the run has paused. A server can also keep a sum in memory in place of all answers.

Each reply is  header length (4, big-endian) | header, JSON | SHA-256 of the header | the frame. The
header has the frame's length and SHA-256. A torn reply at the end is cut off. The server asks for
it again, and the gate still stores it.
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
    """The name of a reply: the question's number, the silo, and the SHA-256 of the question's
    body.
    """

    sequence: int
    name: str
    digest: str


class Replies:
    """Replies in the file at `path`, or in memory without a path. The lock of the journal beside
    the file is its lock too.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._in_memory: dict[Key, bytes] = {}
        self._places: dict[Key, tuple[int, int]] = {}
        """Where each frame begins in the file, and its length."""
        self._file = None
        if path is not None:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | OWN, 0o600)
            self._file = os.fdopen(descriptor, "r+b")
            end = self._read()
            self._file.truncate(end)
            self._file.seek(end)

    def _read(self) -> int:
        """Find the replies in the file. Return the place where the last complete one ends."""
        assert self._file
        end = 0
        size = os.fstat(self._file.fileno()).st_size
        while end + 4 < size:
            self._file.seek(end)
            try:
                text = self._file.read(int.from_bytes(self._file.read(4), "big"))
                if self._file.read(_HASH) != hashlib.sha256(text).digest():
                    break
                *key, length, sha256 = json.loads(text)
            except ValueError:
                break
            begin = self._file.tell()
            if begin + length > size:
                break
            if hashlib.sha256(self._file.read(length)).hexdigest() != sha256:
                break
            end = begin + length
            self._places[Key(*key)] = (begin, length)
        return end

    def keep(self, key: Key, frame: bytes) -> str:
        """Store the frame and return its SHA-256. The frame survives this process from now on, and
        the machine after `sync`.
        """
        sha256 = hashlib.sha256(frame).hexdigest()
        if self._file is None:
            self._in_memory[key] = frame
        elif key not in self._places:
            header = json.dumps([*key, len(frame), sha256]).encode()
            self._file.write(
                len(header).to_bytes(4, "big") + header + hashlib.sha256(header).digest()
            )
            self._places[key] = (self._file.tell(), len(frame))
            self._file.write(frame)
            self._file.flush()
        return sha256

    def get(self, key: Key) -> bytes:
        """Return the frame. Raise KeyError if there is none."""
        if self._file is None:
            return self._in_memory[key]
        begin, size = self._places[key]
        return os.pread(self._file.fileno(), size, begin)

    def __contains__(self, key: Key) -> bool:
        return key in self._in_memory or key in self._places

    def sync(self) -> None:
        """Flush the file to the disk."""
        if self._file:
            os.fsync(self._file.fileno())

    def clear(self) -> None:
        """Delete all replies. The journal has what was made of them."""
        self._in_memory.clear()
        self._places.clear()
        if self._file:
            self._file.seek(0)
            self._file.truncate()

    def close(self) -> None:
        """Close the file."""
        if self._file:
            self._file.close()
