"""Find and apply a feature map: a shipped one, or a user's FILE.py:NAME.

Simulation, gates and users of a model all compute features here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from silodp.core.errors import BadInput, raise_if_ctrl_c
from silodp.core.extension import approved, instantiate, is_file, parse
from silodp.core.features import maps

CHUNK = 250
"""How many pictures are computed together.

The number is always the same, so that a record's features do not depend on the records beside it.
"""


@dataclass(frozen=True)
class FeatureMap:
    """A public function of one record's raw features.

    It is the same for every record and fixed before any record is read.
    """

    text: str
    function: Callable[[Tensor], Tensor] | maps.Constants
    """A user's function, or the constants of a map that ships."""
    shape: tuple[int, ...] = ()
    """The shape of a picture, if a schema gives one."""
    fresh: Callable[[], Callable[[Tensor], Tensor]] | None = None
    """Return a new copy of a file's function, from the file's bytes. It has no memory of calls."""

    @property
    def source(self) -> str:
        """Return the text that names the function in a problem's definition.

        It contains the hash of the function's file, and the function's name.
        """
        if isinstance(self.function, maps.Constants):
            return maps.source(self.text, self.function)
        return f"{getattr(self.function, '__module__', '')}.{parse(self.text)[1]}"

    def width(self, features: int) -> int:
        """Return the number of features that the map makes of so many raw features.

        A user's function is tried on made-up records. Raise BadInput if it fails on them.
        """
        if not isinstance(self.function, maps.Constants):
            made_up = torch.rand(1, features, generator=torch.Generator().manual_seed(0))
            return self.tried(torch.cat([torch.zeros_like(made_up), made_up])).shape[1]
        maps.shape_of(features, self.shape)
        return maps.parse(self.text)[1]

    def tried(self, x: Tensor) -> Tensor:
        """Return the features of made-up records x (n, k).

        The records are made up, so a BadInput may give the reason of a failure. The function
        is called twice. Raise BadInput if the two results differ.
        """
        try:
            features = self.unchecked(x)
            again = self.unchecked(x.flip(0)).flip(0)
        except Exception as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise BadInput(
                f"the features {self.text} cannot be computed ({why}); correct the function"
            ) from None
        self._refuse_unusable(features)
        if not torch.allclose(features, again):
            raise BadInput(
                f"the features {self.text} differ when they are computed again; make them depend "
                "on the record alone"
            )
        if not isinstance(self.function, maps.Constants):
            self.refuse_memory(x.shape[1])
        return features

    def refuse_memory(self, features: int) -> Tensor:
        """Raise BadInput if what a user's function makes of a record depends on any other record.

        Each made-up record is shown to a fresh copy of the function, alone. Then one copy is shown
        all of them in order, in the reverse order, and each of them twice. The bits must be the
        same. Return the bits, for a comparison with another process.
        """
        x = _every_size(features)
        back = torch.arange(len(x)).flip(0)
        twice = torch.arange(len(x)).repeat_interleave(2)
        orders = [torch.arange(len(x)), back, twice, torch.cat([back, twice])]
        alone = torch.cat([self._tried_bits(row[None]) for row in x])
        for order in orders:
            if not torch.equal(self._tried_bits(x[order]), alone[order]):
                raise BadInput(
                    f"the features {self.text} of a record depend on the records before it; make "
                    "them depend on the record alone, and keep nothing between two calls"
                )
        return alone

    def _tried_bits(self, x: Tensor) -> Tensor:
        """Return a digest (n, 32) of what one copy of the function makes of each record, in order.

        If the function raises on a record, the digest is of that fact.
        """
        function = self._copy()
        digests = []
        for row in x:
            try:
                features = torch.as_tensor(function(row.clone())).detach().double().contiguous()
                content = repr(tuple(features.shape)).encode() + features.numpy().tobytes()
            except BaseException as error:  # a user's function may also try to end the program
                raise_if_ctrl_c(error)
                content = b"raised"
            digests.append(list(hashlib.sha256(content).digest()))
        return torch.tensor(digests, dtype=torch.uint8)

    def _copy(self) -> Callable[[Tensor], Tensor]:
        """Return a fresh copy of the user's function if there is a way to make one."""
        if self.fresh:
            return self.fresh()
        assert not isinstance(self.function, maps.Constants)
        return self.function

    def of(self, x: Tensor) -> Tensor:
        """Return the features (n, m) of rows (n, k).

        Raise BadInput if the function fails or gives a row that is not finite. The message contains
        nothing of a record: the reason of a failure could.

        A user's function gets each row alone. A shipped map computes a record's features from that
        record alone, by its arithmetic.
        """
        try:
            features = self.unchecked(x)
        except BadInput:
            raise
        except Exception as error:
            raise BadInput(
                f"the features {self.text} cannot be computed ({type(error).__name__}); correct "
                "the function"
            ) from None
        self._refuse_unusable(features)
        return features

    def _refuse_unusable(self, features: Tensor) -> None:
        """Raise BadInput unless the features are vectors of finite numbers."""
        if features.dim() != 2 or not bool(features.isfinite().all()):
            raise BadInput(
                f"the features {self.text} must be a vector of finite numbers for every "
                "record; bound them in the function"
            )

    def of_each(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features (n, m) of rows (n, k), and which rows (n,) have none.

        A row has none if it is not finite, if the function raises on it, or if the result is not m
        finite numbers. Such a row's features are zero. Each row gets a fresh copy of a user's
        function, which has forgotten everything. So no row changes another row's features.
        """
        sound = x.isfinite().all(1)
        x = x.where(sound[:, None], 0.0)
        if isinstance(self.function, maps.Constants):
            features = self._shipped(self.function, x)
        else:
            width = self.width(x.shape[1])
            features = torch.stack([self._by_itself(row, width) for row in x])
        sound &= features.isfinite().all(1)
        return features.where(sound[:, None], 0.0), ~sound

    def _by_itself(self, row: Tensor, width: int) -> Tensor:
        """Return what a fresh copy of the function makes of a row (k,), or NaN (width,)."""
        try:
            features = torch.as_tensor(self._copy()(row.clone()), dtype=row.dtype)
            features = features.detach().clone()
            if features.shape == (width,):
                return features
        except BaseException as error:  # a user's function may also try to end the program
            raise_if_ctrl_c(error)
        return row.new_full((width,), torch.nan)

    def unchecked(self, x: Tensor) -> Tensor:
        """Return the features of rows without any check."""
        if isinstance(self.function, maps.Constants):
            return self._shipped(self.function, x)
        return self._alone(self.function, x)

    @property
    def at_once(self) -> int:
        """Return how many records the map's kernels compute together."""
        if isinstance(self.function, maps.Constants):
            return CHUNK
        return 1

    def _alone(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return what a user's function makes of each row, one by one."""
        rows = [torch.as_tensor(function(row.clone()), dtype=x.dtype) for row in x]
        if rows:
            return torch.stack(rows)
        return x

    def _shipped(self, constants: maps.Constants, x: Tensor) -> Tensor:
        """Return the features by a map that ships, in batches of `CHUNK` filled up with zeros."""
        shape = maps.shape_of(x.shape[1], self.shape)
        parts = []
        for start in range(0, len(x), CHUNK):
            part = x[start : start + CHUNK]
            padding = part.new_zeros(CHUNK - len(part), part.shape[1])
            pictures = torch.cat([part, padding]).float().reshape(CHUNK, *shape)
            features = maps.of(self.text, pictures, constants)
            parts.append(features[: len(part)].to(x.dtype))
        if parts:
            return torch.cat(parts)
        return x.new_zeros(0, maps.parse(self.text)[1])


def _every_size(features: int) -> Tensor:
    """Return made-up records (n, features).

    They are zeros, ends of a schema's range, numbers of all sizes with small ones before large
    ones, and single features.
    """
    generator = torch.Generator().manual_seed(1)
    sizes = torch.tensor([0.0, 1e-6, 1e-3, 0.1, 0.5, 1.0, 1.0, 3.0, 1e3, 1e6, 1e12, 1e30])
    drawn = torch.rand(len(sizes), features, generator=generator) * 2 - 1
    single = torch.eye(features)[: min(features, 4)]
    ends = torch.ones(2, features) * torch.tensor([[1.0], [-1.0]])
    return torch.cat([drawn * sizes[:, None], ends, single, drawn.round() + 0.0])


def feature_map(
    text: str,
    load: Callable[[str], Any],
    shape: tuple[int, ...] = (),
    fresh: Callable[[str], Any] | None = None,
) -> FeatureMap:
    """Return the map that the text names, for pictures of `shape` if that is given.

    `load` finds what FILE.py calls NAME, and a shipped map's constants. `fresh` finds it in a file
    that is executed again. Raise BadInput if there is no such map.
    """
    if not is_file(text):
        return FeatureMap(text, load(maps.parse(text)[0]), shape)
    function = approved(text, instantiate(text, load))
    if not hasattr(function, "__call__"):  # noqa: B004
        raise BadInput(
            f"{text} is not a function; it must map one record's features (k,) to others (m,)"
        )
    if fresh is None:
        return FeatureMap(text, function)
    return FeatureMap(text, function, fresh=lambda: instantiate(text, fresh))
