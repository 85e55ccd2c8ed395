"""Store the records of N silos as one padded tensor, for batched statistics over all silos.

It contains records: nothing here may be sent, logged or put into an exception. `repr` shows the
public counts and names only.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.problem.person import Person


@dataclass(frozen=True, eq=False)
class Records:
    """The records of N silos, padded to one tensor with a leading silo axis.

    Row k of silo i is a record iff k < n_i, and n_i <= n_max. If a record is a person
    (`core.problem.person`), it has P rows of features and P targets.
    """

    x: Tensor = field(repr=False)  # (N, n_max, *features), float32; padding rows are zero
    y: Tensor = field(repr=False)  # (N, n_max): int64 classes or float32 targets; padding is zero
    counts: tuple[int, ...]  # n_i, public
    names: tuple[str, ...]
    missing: Tensor | None = field(default=None, repr=False)
    """As x, bool: whether a value was missing before it was filled in. None means where x is NaN.
    """
    void: Tensor | None = field(default=None, repr=False)
    """(N, n_max) bool: records that a gate counts as zero, whatever they contain."""

    @classmethod
    def of(
        cls,
        silos: Sequence[tuple[ArrayLike, ArrayLike]],
        names: Sequence[str] | None = None,
        missing: Sequence[np.ndarray | None] = (),
    ) -> "Records":
        """Pad one (x, y) pair per silo. Raise BadInput if their shapes do not fit.

        Integer y become int64 classes. If any silo has float y, all become float32 targets. A value
        that is not finite is kept: the gate lets such a record contribute zero. `missing` has a
        mask of each x, where values are filled in. A silo without a mask has no filled values.
        """
        if not silos:
            raise BadInput("there are no silos; at least one is needed.")
        if names is not None:
            names = tuple(names)
        else:
            names = tuple(f"silo-{i}" for i in range(len(silos)))
        if len(names) != len(silos) or len(set(names)) != len(names):
            raise BadInput(
                f"{len(silos)} silos need {len(silos)} different names, but the names are "
                f"{', '.join(map(repr, names))}."
            )
        pairs = [
            (_array(x, "features", name), _array(y, "labels", name))
            for (x, y), name in zip(silos, names, strict=True)
        ]
        shape = pairs[0][0].shape[1:]
        for (x, y), name in zip(pairs, names, strict=True):
            if y.ndim not in (1, 2) or x.ndim <= y.ndim or x.shape[1 : y.ndim] != y.shape[1:]:
                raise BadInput(
                    f"silo {name!r} needs features of shape (n, ...) and labels of shape "
                    f"(n,), but has {x.shape} and {y.shape}."
                )
            if len(x) != len(y):
                raise BadInput(
                    f"silo {name!r} has {len(x)} rows of features but {len(y)} labels; it "
                    "needs one label for each row."
                )
            if len(x) == 0:
                raise BadInput(
                    f"silo {name!r} has no records; leave the silo out, or give it at least one."
                )
            if x.shape[1:] != shape:
                raise BadInput(
                    f"silo {name!r} has records of shape {x.shape[1:]} but silo "
                    f"{names[0]!r} has {shape}; all must have the same features."
                )
        counts = tuple(len(y) for _, y in pairs)
        if any(y.dtype.kind == "f" for _, y in pairs):
            kind = np.float32
        else:
            kind = np.int64
        padded_x = np.zeros((len(pairs), max(counts), *shape), np.float32)
        padded_y = np.zeros((len(pairs), max(counts), *pairs[0][1].shape[1:]), kind)
        # A value too large for float32 becomes inf. The gate treats it like any other bad record.
        with np.errstate(over="ignore"):
            for i, (x, y) in enumerate(pairs):
                padded_x[i, : counts[i]] = x
                padded_y[i, : counts[i]] = y
        absent = None
        if any(mask is not None for mask in missing):
            padded = np.zeros(padded_x.shape, bool)
            for i, mask in enumerate(missing):
                if mask is not None:
                    padded[i, : counts[i]] = mask
            absent = torch.from_numpy(padded)
        return cls(torch.from_numpy(padded_x), torch.from_numpy(padded_y), counts, names, absent)

    @cached_property
    def mask(self) -> Tensor:
        """Return (N, n_max) bool: True for a record, False for padding."""
        counts = torch.tensor(self.counts, device=self.x.device)
        return torch.arange(self.x.shape[1], device=self.x.device) < counts[:, None]

    @cached_property
    def absent(self) -> Tensor:
        """Return (N, n_max, *features) bool: True for a missing value."""
        if self.missing is None:
            return torch.isnan(self.x)
        return self.missing

    @property
    def known_by(self) -> tuple[np.ndarray, np.ndarray, bytes, list[str] | None, str]:
        """Return what a ledger recognises the first silo's records by, without a file's cells."""
        n = self.counts[0]
        x = self.x[0, :n].cpu().numpy()
        y = self.y[0, :n].cpu().numpy()
        if y.ndim == 1:
            return (x, y, b"", None, "")
        return (np.column_stack([x.reshape(n, -1), y]), y[:, 0], b"", [""] * n, "")

    @property
    def contents(self) -> list[bytes]:
        """Return the content of each of the first silo's records as bytes."""
        n = self.counts[0]
        x, y, absent = (
            part[0, :n].cpu().reshape(n, -1).numpy() for part in (self.x, self.y, self.absent)
        )
        if self.void is None:
            void = [False] * n
        else:
            void = self.void[0, :n].tolist()
        marks = [b"void" if counts_as_zero else b"" for counts_as_zero in void]
        return [x[k].tobytes() + y[k].tobytes() + absent[k].tobytes() + marks[k] for k in range(n)]

    def select(self, silos: Sequence[int]) -> "Records":
        """Return the silos with these indices, in this order. Raise BadInput if there is none.

        n_max stays, so that masks and weights made for all silos still fit.
        """
        if len(silos) == 0:
            raise BadInput("no silo is selected; at least one is needed.")
        index = torch.as_tensor(list(silos), device=self.x.device)
        if self.missing is None:
            missing = None
        else:
            missing = self.missing[index]
        if self.void is None:
            void = None
        else:
            void = self.void[index]
        return Records(
            self.x[index],
            self.y[index],
            tuple(self.counts[i] for i in silos),
            tuple(self.names[i] for i in silos),
            missing,
            void,
        )

    def pooled(self) -> "Records":
        """Return all records in one place, as central DP trusts a server with them."""
        return Records(
            self.x[self.mask][None], self.y[self.mask][None], (sum(self.counts),), ("all",)
        )

    def to(self, device: torch.device | str) -> "Records":
        """Return the same records on `device`."""
        if self.missing is None:
            missing = None
        else:
            missing = self.missing.to(device)
        if self.void is None:
            void = None
        else:
            void = self.void.to(device)
        return Records(self.x.to(device), self.y.to(device), self.counts, self.names, missing, void)

    @property
    def features(self) -> int:
        """Return the number of features of a record, or of each row if a record is a person."""
        return math.prod(self.x.shape[self.y.dim() :])

    def check_unit(self, person: Person | None) -> None:
        """Raise BadInput if persons are to be protected and the records are not persons of so many
        rows.
        """
        if person and not (
            self.y.shape[2:] == (person.rows,)
            and self.x.shape[1:3] == self.y.shape[1:]
            and self.x.dim() > 3
        ):
            raise BadInput(
                f"the problem is about persons with {person.rows} rows each, but the "
                "records have another form; load them by its schema"
            )

    def __len__(self) -> int:
        return len(self.counts)


def _array(values: ArrayLike, what: str, name: str) -> np.ndarray:
    """Return the values as an array of numbers. Raise BadInput if they are none."""
    try:
        if isinstance(values, Tensor):
            array = values.detach().cpu().numpy()
        else:
            array = np.asarray(values)
    except (TypeError, ValueError):
        array = np.empty(0, object)
    if array.dtype.kind not in "biuf":
        raise BadInput(f"the {what} of silo {name!r} are not one rectangular array of numbers.")
    return array
