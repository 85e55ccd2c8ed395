"""Choose which of a silo's records are held out, by a public rule of the position and n alone.

No value decides, or changes, any record's part. The position must not follow from values either. If
rows are sorted by a value, such as the label, a change of one value moves other rows. Keep rows in
the order in which they arrived, or by a record number. Images are in the order of their files'
names.

Persons are ordered by their first rows, so one person's rows decide others' positions. A split of
persons is therefore by secret marks, which a key makes of their ids. A person keeps its mark, and
so its part, when rows are edited, added or removed. A gate has the marks from its ledger
(`answer.exact`). A simulation has no ids, and draws places by its own key.

No price is lowered for the split. Queries about either part are charged to one ledger and added up,
as if each part had all records.
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
    """Return (n,) bool with floor(share x n) times True, or raise BadInput for another share.

    True are the positions that a fixed hash ranks lowest, so an ordered file is split evenly too.
    """
    if not 0 <= share < 1:
        raise BadInput(f"the held-out share is {share:g}; it must be 0 or more, and less than 1")
    hashes = splitmix(np.arange(n, dtype=np.uint64) * GOLDEN)
    lowest = np.argsort(hashes, kind="stable")[: int(share * n)]
    mask = np.zeros(n, bool)
    mask[lowest] = True
    return mask


def split_records(records: Records, share: float, key: str = "") -> tuple[Records, Records]:
    """Return the training part and the held-out part of every silo, with at least one record in
    each.

    Persons are split by places that the secret key gives them. Raise BadInput if a part would be
    empty.
    """
    parts: tuple[list, list] = [], []
    for i, (n, name) in enumerate(zip(records.counts, records.names, strict=True)):
        places = held_out(n, share)
        if records.y.dim() > 2:
            places = places[_places(n, f"{key} {name}")]
        mask = torch.from_numpy(places)
        if not 0 < int(mask.sum()) < n:
            raise BadInput(
                f"a held-out share of {share:g} leaves silo {name} with {int(mask.sum())} "
                f"held-out records of {n}; use another share"
            )
        for part, keep in zip(parts, (~mask, mask), strict=True):
            part.append(
                (records.x[i, :n][keep], records.y[i, :n][keep], records.absent[i, :n][keep])
            )
    return tuple(_padded(part, records) for part in parts)  # type: ignore[return-value]


def held_out_persons(order: np.ndarray, held: np.ndarray, marks: Sequence[bytes]) -> np.ndarray:
    """Return the list number of the person at each place, where places (n,) are held out or not.

    The persons with the smallest marks are held out. `order` is a permutation that is drawn for
    each list. Within a part, the k-th place belongs to the k-th person of that part in `order`. One
    exchanged person changes the set of persons in each part by one person at most, whatever the
    marks are.
    """
    aside = held_out_set(marks, int(held.sum()))
    at = np.empty(len(order), np.int64)
    at[held] = order[aside[order]]
    at[~held] = order[~aside[order]]
    return at


def held_out_set(marks: Sequence[bytes], count: int) -> np.ndarray:
    """Return which persons of a list are held out, (n,) bool: those with the smallest marks."""
    # The place in the list decides between equal marks. The order must not decide, since it also
    # decides the places inside each part.
    by_mark = sorted(range(len(marks)), key=lambda person: (marks[person], person))
    aside = np.zeros(len(marks), bool)
    aside[by_mark[:count]] = True
    return aside


def _places(n: int, key: str) -> np.ndarray:
    """Return a permutation of range(n), uniformly random to anyone who does not know the key."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest(), "big")
    return np.random.default_rng(seed).permutation(n)


def _padded(part: list, like: Records) -> Records:
    if like.missing is None:
        missing = None
    else:
        missing = torch.nn.utils.rnn.pad_sequence([m for _, _, m in part], batch_first=True)
    return replace(Records.of([(x, y) for x, y, _ in part], like.names), missing=missing)
