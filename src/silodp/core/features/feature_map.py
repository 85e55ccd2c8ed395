"""A map of features by its words: one that ships, or FILE.py:NAME, in simulation, at a gate and
where a model is used alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.extension import approved, is_file, made, parse
from silodp.core.features import maps

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
            found, again = self.unchecked(x), self.unchecked(x.flip(0)).flip(0)
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
        return found

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

    def unchecked(self, x: Tensor) -> Tensor:
        return (
            self._shipped(self.function, x)
            if isinstance(self.function, maps.Constants)
            else self._alone(self.function, x)
        )

    @property
    def at_once(self) -> int:
        """How many records its kernels are given at a time."""
        return CHUNK if isinstance(self.function, maps.Constants) else 1

    def _alone(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        rows = [torch.as_tensor(function(row.clone()), dtype=x.dtype) for row in x]
        return torch.stack(rows) if rows else x

    def _shipped(self, constants: maps.Constants, x: Tensor) -> Tensor:
        shape, parts = maps.shape_of(x.shape[1], self.shape), []
        for start in range(0, len(x), CHUNK):
            part = x[start : start + CHUNK]
            whole = torch.cat([part, part.new_zeros(CHUNK - len(part), part.shape[1])]).float()
            parts.append(
                maps.of(self.text, whole.reshape(CHUNK, *shape), constants)[: len(part)].to(x.dtype)
            )
        return torch.cat(parts) if parts else x.new_zeros(0, maps.parse(self.text)[1])


def feature_map(text: str, load: Callable[[str], Any], shape: tuple[int, ...] = ()) -> FeatureMap:
    """The map that the words name, for pictures of `shape` where that is known; `load` finds what
    FILE.py calls NAME, and a shipped map's constants.
    """
    if not is_file(text):
        return FeatureMap(text, load(maps.parse(text)[0]), shape)
    function = approved(text, made(text, load))
    if not hasattr(function, "__call__"):  # noqa: B004
        raise BadInput(
            f"{text} is no function; it should take one record's features (k,) to others (m,)"
        )
    return FeatureMap(text, function)
