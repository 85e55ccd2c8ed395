"""A map of features by its words: one that ships, or FILE.py:NAME, in simulation, at a gate and
where a model is used alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.extension import approved, is_file, made, parse
from silodp.core.features import maps
from silodp.core.keyboard import raise_if_ctrl_c

CHUNK = 250
"""Pictures at once, always as many: a record's features are the same numbers whatever the records
beside it are.
"""


@dataclass(frozen=True)
class FeatureMap:
    """A public function of one record's raw features, the same for every record and fixed before
    any is seen.
    """

    text: str
    function: Callable[[Tensor], Tensor] | maps.Constants
    """Of a map that ships, its constants."""
    shape: tuple[int, ...] = ()
    """Of a picture, where a schema says so."""
    fresh: Callable[[], Callable[[Tensor], Tensor]] | None = None
    """Makes the function of a file once more, out of the file's own bytes: the copy remembers
    nothing.
    """

    @property
    def source(self) -> str:
        """What names the function in a problem's definition: the hash of its file, and its name."""
        if isinstance(self.function, maps.Constants):
            return maps.source(self.text, self.function)
        return f"{getattr(self.function, '__module__', '')}.{parse(self.text)[1]}"

    def width(self, features: int) -> int:
        """The number of features that it makes of so many; a user's function is tried on made-up
        records.
        """
        if not isinstance(self.function, maps.Constants):
            made_up = torch.rand(1, features, generator=torch.Generator().manual_seed(0))
            return self.tried(torch.cat([torch.zeros_like(made_up), made_up])).shape[1]
        maps.shape_of(features, self.shape)
        return maps.parse(self.text)[1]

    def tried(self, x: Tensor) -> Tensor:
        """As `of`, for made-up records x (n, k): nobody's, so that the reason of a failure is told,
        and twice, since both must be the same.
        """
        try:
            found = self.unchecked(x)
            again = self.unchecked(x.flip(0)).flip(0)
        except Exception as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise BadInput(
                f"the features {self.text} cannot be made ({why}); mend the function"
            ) from None
        self._refuse_unusable(found)
        if not torch.allclose(found, again):
            raise BadInput(
                f"the features {self.text} are other ones when they are made again; let "
                "them follow from the record alone"
            )
        if not isinstance(self.function, maps.Constants):
            self.refuse_memory(x.shape[1])
        return found

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
                    f"the features {self.text} of a record depend on the records that were made "
                    "before it; let them follow from the record alone, with nothing kept between "
                    "two calls"
                )
        return alone

    def _tried_bits(self, x: Tensor) -> Tensor:
        """Return a digest (n, 32) of what one copy of the function makes of each record, in order;
        of a record on which it raises, of that.
        """
        function = self._copy()
        found = []
        for row in x:
            try:
                made = torch.as_tensor(function(row.clone())).detach().double().contiguous()
                content = repr(tuple(made.shape)).encode() + made.numpy().tobytes()
            except BaseException as error:
                raise_if_ctrl_c(error)
                content = b"raised"
            found.append(list(hashlib.sha256(content).digest()))
        return torch.tensor(found, dtype=torch.uint8)

    def _copy(self) -> Callable[[Tensor], Tensor]:
        if self.fresh:
            return self.fresh()
        assert not isinstance(self.function, maps.Constants)
        return self.function

    def of(self, x: Tensor) -> Tensor:
        """Rows (n, k) to (n, m); BadInput, without a word of a record (the reason of a failure
        could hold one), if it fails or gives no finite row.

        A user's function is shown each row alone; a map that ships has a record's features depend
        on that record alone by its arithmetic.
        """
        try:
            found = self.unchecked(x)
        except BadInput:
            raise
        except Exception as error:
            raise BadInput(
                f"the features {self.text} cannot be made ({type(error).__name__}); mend "
                "the function"
            ) from None
        self._refuse_unusable(found)
        return found

    def _refuse_unusable(self, found: Tensor) -> None:
        if found.dim() != 2 or not bool(found.isfinite().all()):
            raise BadInput(
                f"the features {self.text} must be a vector of finite numbers for every "
                "record; bound them in the function"
            )

    def of_each(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features (n, m) of rows (n, k), and which rows (n,) have none.

        A row has none if it is not finite, if the function raises on it, or if it gives other than
        m finite numbers. Its features are zero. A user's function is made once more for each row,
        so that what it keeps in its own file is forgotten: no row moves another row's features.
        """
        sound = x.isfinite().all(1)
        x = x.where(sound[:, None], 0.0)
        if isinstance(self.function, maps.Constants):
            found = self._shipped(self.function, x)
        else:
            width = self.width(x.shape[1])
            found = torch.stack([self._by_itself(row, width) for row in x])
        sound &= found.isfinite().all(1)
        return found.where(sound[:, None], 0.0), ~sound

    def _by_itself(self, row: Tensor, width: int) -> Tensor:
        """Return what a fresh copy of the function makes of a row (k,), or NaN (width,)."""
        try:
            found = torch.as_tensor(self._copy()(row.clone()), dtype=row.dtype).detach().clone()
            if found.shape == (width,):
                return found
        except BaseException as error:  # a map that ends the program ends nothing
            raise_if_ctrl_c(error)
        return row.new_full((width,), torch.nan)

    def unchecked(self, x: Tensor) -> Tensor:
        if isinstance(self.function, maps.Constants):
            return self._shipped(self.function, x)
        return self._alone(self.function, x)

    @property
    def at_once(self) -> int:
        """How many records its kernels are given at a time."""
        if isinstance(self.function, maps.Constants):
            return CHUNK
        return 1

    def _alone(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        rows = [torch.as_tensor(function(row.clone()), dtype=x.dtype) for row in x]
        return torch.stack(rows) if rows else x

    def _shipped(self, constants: maps.Constants, x: Tensor) -> Tensor:
        shape = maps.shape_of(x.shape[1], self.shape)
        parts = []
        for start in range(0, len(x), CHUNK):
            part = x[start : start + CHUNK]
            whole = torch.cat([part, part.new_zeros(CHUNK - len(part), part.shape[1])]).float()
            parts.append(
                maps.of(self.text, whole.reshape(CHUNK, *shape), constants)[: len(part)].to(x.dtype)
            )
        if parts:
            return torch.cat(parts)
        return x.new_zeros(0, maps.parse(self.text)[1])


def _every_size(features: int) -> Tensor:
    """Return made-up records (n, features): zeros, ends of a schema's range, numbers of all sizes,
    small ones before large ones, and single features.
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
    """The map that the words name, for pictures of `shape` where that is known; `load` finds what
    FILE.py calls NAME, and a shipped map's constants. `fresh` does so in a file that is run again.
    """
    if not is_file(text):
        return FeatureMap(text, load(maps.parse(text)[0]), shape)
    function = approved(text, made(text, load))
    if not hasattr(function, "__call__"):  # noqa: B004
        raise BadInput(
            f"{text} is no function; it should take one record's features (k,) to others (m,)"
        )
    return FeatureMap(text, function, fresh=(lambda: made(text, fresh)) if fresh else None)
