"""A run's iterates in a file, for an output rule that may want any of them: memory holds none,
however many rounds a run has.
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
    """A run that ended so has lost nothing, and goes on once there is room."""


class Kept:
    """Tensors of one shape and type, in a file of the folder that has no name and is gone with this
    object.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._like = torch.empty(0)
        self._file: IO[bytes] | None = None

    def append(self, w: Tensor) -> None:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 (it lives as long as the run)
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
        """The iterate of this place, counted from the first, to the last bit."""
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
    with contextlib.suppress(
        OSError
    ):  # what a full disk has not taken, it is asked to take once more
        file.close()
