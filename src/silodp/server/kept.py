"""A run's iterates in a file, for an output rule that may want any of them: memory holds none, however many rounds a run has."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


class Kept:
    """Tensors of one shape and type, in a file of the folder that has no name and is gone with this object."""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (it lives as long as the run)
        weakref.finalize(self, self._file.close)
        self._count, self._like = 0, torch.empty(0)

    def append(self, w: Tensor) -> None:
        self._file.write(w.detach().cpu().contiguous().numpy().data.cast("B"))
        self._count, self._like = self._count + 1, w

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: int) -> Tensor:
        """The iterate of this place, counted from the first, to the last bit."""
        if not 0 <= place < self._count:
            raise IndexError(place)
        self._file.flush()
        size = self._like.numel() * self._like.element_size()
        raw = np.frombuffer(bytearray(os.pread(self._file.fileno(), size, place * size)), str(self._like.dtype).removeprefix("torch."))
        return torch.from_numpy(raw).reshape(self._like.shape).to(self._like.device)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[place] for place in range(self._count))
