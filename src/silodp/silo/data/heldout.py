"""Which of a silo's records are held out: a public rule of the position and n alone, so that no
value decides, or moves, any record's part.

The position must not follow from values either: rows sorted by a value, such as the label, move
others along when one of them changes. Keep rows in the order in which they came, or by a record
number; images are in the order of their files' names.

Persons are ordered by their first rows, where one person's rows decide others' positions; so a
split of persons is by secret marks, which a key makes of their ids. A person keeps its mark, and so
its part, when rows are edited, added or removed (a gate has the marks from its ledger,
`answer.exact`). A simulation has no ids, and draws places by its own key.

No price is lowered for the split: what the two parts are asked is charged to one ledger and added
up, as if each held all records.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from silodp.core.errors import BadInput
from silodp.silo.data.records import Records
from silodp.silo.ledger.columns import GOLDEN, splitmix


def held_out(n: int, share: float) -> np.ndarray:
    """(n,) bool with floor(share x n) times True: the positions that a fixed hash ranks lowest, so
    an ordered file is split evenly too.
    """
    if not 0 <= share < 1:
        raise BadInput(f"the held-out share is {share:g}; it must be 0 or more, and less than 1")
    mask = np.zeros(n, bool)
    mask[
        np.argsort(splitmix(np.arange(n, dtype=np.uint64) * GOLDEN), kind="stable")[
            : int(share * n)
        ]
    ] = True
    return mask


def split_records(records: Records, share: float, key: str = "") -> tuple[Records, Records]:
    """(training part, held-out part) of every silo, with at least one record in each; of persons by
    places that the secret key gives them.
    """
    parts: tuple[list, list] = [], []
    for i, (n, name) in enumerate(zip(records.counts, records.names, strict=True)):
        mask = torch.from_numpy(
            held_out(n, share)[_places(n, f"{key} {name}")]
            if records.y.dim() > 2
            else held_out(n, share)
        )
        if not 0 < int(mask.sum()) < n:
            raise BadInput(
                f"a held-out share of {share:g} leaves silo {name} with {int(mask.sum())} "
                f"held-out records of {n}; use another"
            )
        for part, keep in zip(parts, (~mask, mask), strict=True):
            part.append(
                (records.x[i, :n][keep], records.y[i, :n][keep], records.absent[i, :n][keep])
            )
    return tuple(_padded(part, records) for part in parts)  # type: ignore[return-value]


def held_out_persons(order: np.ndarray, held: np.ndarray, marks: Sequence[bytes]) -> np.ndarray:
    """Return the list number of the person at each place, where places (n,) are held out or not.

    The persons with the smallest marks are held out. Within its part each stands where `order`, a
    permutation that is drawn anew for each list, puts it: the k-th place of a part belongs to the
    k-th person of that part in `order`. One exchanged person changes the set of persons in each
    part by one person at most, whatever the marks are.
    """
    aside = held_out_set(marks, int(held.sum()))
    at = np.empty(len(order), np.int64)
    at[held] = order[aside[order]]
    at[~held] = order[~aside[order]]
    return at


def held_out_set(marks: Sequence[bytes], count: int) -> np.ndarray:
    """Return which persons of a list are held out, (n,) bool: those with the smallest marks."""
    # Equal marks are told apart by the place in the list. The order of the places must not do it:
    # it also decides the places inside each part.
    by_mark = sorted(range(len(marks)), key=lambda person: (marks[person], person))
    aside = np.zeros(len(marks), bool)
    aside[by_mark[:count]] = True
    return aside


def _places(n: int, key: str) -> np.ndarray:
    """A uniformly random permutation of range(n), to whoever does not know the key."""
    return np.random.default_rng(
        int.from_bytes(hashlib.sha256(key.encode()).digest(), "big")
    ).permutation(n)


def _padded(part: list, like: Records) -> Records:
    if like.missing is None:
        missing = None
    else:
        missing = torch.nn.utils.rnn.pad_sequence([m for _, _, m in part], batch_first=True)
    return replace(Records.of([(x, y) for x, y, _ in part], like.names), missing=missing)
