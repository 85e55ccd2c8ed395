"""Lets go of frames that an engine has done with and still holds, in objects that name each other.

NVFlare's task of a message that was sent and its future are such a pair (`TxTask`, `StreamFuture`):
they keep the message's bytes, and a buffer of a piece's length, until Python looks for circles. It
does so by the number of objects, of which a message has few, and never by their bytes: 100 MiB of 4
MB questions had come together before it looked, and 50 silos that fetch 40 MB each would come to 2
GB.
"""

from __future__ import annotations

import gc
import threading

ROOM = 2**26
"""Bytes that may have been carried, and lie about, before they are looked for."""
PIECE = 2**20
"""Bytes that a message leaves however short it is: the engine's buffer for a piece."""


class Sweep:
    """Looks for what lies about whenever frames of `room` bytes have been carried since it last
    did.
    """

    def __init__(self, room: int = ROOM) -> None:
        self._room = room
        self._carried = 0
        self._guard = threading.Lock()

    def begin(self) -> None:
        """What is there once the process has started stays, and is looked at no more: a look takes
        a tenth of the time then.
        """
        gc.collect()
        gc.freeze()

    def carried(self, size: int) -> None:
        """Notes a message of so many bytes."""
        with self._guard:
            self._carried += size + PIECE
            if due := self._carried >= self._room:
                self._carried = 0
        if due:
            gc.collect()
