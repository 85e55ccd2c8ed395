"""The iterates of a run in a file, for an output rule that may need any of them. Memory contains
none of them, for any number of rounds.
"""

from __future__ import annotations

import contextlib
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from silodp.core.errors import BadInput


class NoRoom(BadInput):
    """The disk has no room for an iterate. The run has lost nothing, and can be resumed once there
    is room.
    """


class Kept:
    """Tensors of one shape and type, in a nameless file of the folder. The file is deleted with
    this object.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._like = torch.empty(0)
        self._file: IO[bytes] | None = None

    def append(self, w: Tensor) -> None:
        """Add an iterate at the end. Raise NoRoom if the disk does not take it."""
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 -- open for the whole run
                weakref.finalize(self, _close, self._file)
            self._file.seek(0, 2)
            self._file.write(w.detach().cpu().contiguous().numpy().data.cast("B"))
            self._file.flush()
        except OSError as error:
            raise NoRoom(
                f"an iterate cannot be kept in {self._folder} ({error.strerror}); make "
                "room there, and resume the run"
            ) from None
        self._count = self._count + 1
        self._like = w

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: int) -> Tensor:
        """Return the iterate of this place, counted from 0, bit for bit. Raise IndexError if there
        is none.
        """
        if not 0 <= place < self._count or self._file is None:
            raise IndexError(place)
        size = self._like.numel() * self._like.element_size()
        self._file.seek(place * size)
        raw = np.frombuffer(
            bytearray(self._file.read(size)), str(self._like.dtype).removeprefix("torch.")
        )
        return torch.from_numpy(raw).reshape(self._like.shape).to(self._like.device)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[place] for place in range(self._count))


def _close(file: IO[bytes]) -> None:
    """Close the file, and ignore a full disk."""
    # Closing writes the buffered bytes again that a full disk has refused before.
    with contextlib.suppress(OSError):
        file.close()
