"""Recognise a data set by a keyed sketch of its records.

The sketch survives reordering, edits, growth, renaming and copying. A record's mark is the
HMAC-SHA256 of its values in sorted order, under a key that never leaves the ledger and the
registry. So neither the order of rows or columns nor the choice of the label column matters.
`columns` has profiles of some columns each. They survive added and dropped columns, also together
with added, removed and edited rows. Values themselves are never stored. The file's cells are
compared, not what a schema makes of them. Another file format, or another spelling of true and
false, makes no difference.

Recognised: data with 1 in 20 of the smaller set's whole rows (where rows repeat by chance, more, up
to half), or with enough people in columns that stayed. Enough is at least 21, 21 n / 2,000 in a
larger set of n, and more the coarser the columns. Not recognised: data that was rescaled or retyped
throughout, images that were compressed again with loss, fewer people in rows that all changed, and
few coarse columns (an age and a sex, say) once the rows have grown several times over or half were
replaced. Different people whose rows are mostly alike, as of yes and no alone, are taken for the
same.

If records are persons, they are recognised by their ids as well: each has a mark of its own, the
HMAC of its id under the same key. New rows of known persons are then known persons, though no row
was ever there before. The operator of a federation that was started on one machine keeps its silos
apart. There an id is not taken for the same person in two silos, since many hospitals count from 1.

The registry is a folder with one file for each ledger on this machine. With it, a copy of the data
does not get a budget of its own.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from silodp.core.errors import BadInput
from silodp.host import atomic
from silodp.host.portable import lock
from silodp.silo.ledger.columns import (
    CORE,
    PERSON,
    Profile,
    by_chance,
    comparable,
    exactly,
    merged,
    persons_of,
    profiles_of,
    unpacked,
)

MARK = 16  # bytes of a mark
KEPT = 100_000
"""Most marks kept of a data set. Of a larger one the smallest marks are kept, which are a random
sample under the key.
"""
SAME = 0.05
"""Two data sets are versions of the same one if this share of the smaller one's records is in both,
in addition to twice the share expected by chance ...
"""
MOSTLY = 0.5  # ... or this share, whatever is expected by chance
PROFILES = 300  # kept of a data set whose columns change again and again
_CHUNK = 2**22


@dataclass(frozen=True, eq=False, repr=False)
class Identity:
    """Digests of the records, in memory only.

    Without the ledger's key they could be found by guessing records, so they are never stored.
    """

    count: int
    rows: list[bytes]
    profiles: list[Profile]
    layout: bytes
    person: str = ""
    """If records are persons: the column with their ids."""

    @classmethod
    def of(
        cls,
        x: Any,
        y: Any,
        exact: bytes = b"",
        persons: Sequence[str] | None = None,
        person: str = "",
    ) -> Identity:
        """Return the identity of records x (n, ...) with labels y (n,). Raise BadInput for other
        shapes.

        Values are compared as `comparable` returns them. The layout is exact: `exact` is the digest
        of the source of x and y, if that has more detail than they have. If records are persons, x
        and y have their rows, and `persons` has an id for each person, "" for one without, from the
        column `person`.
        """
        x = np.asarray(x)
        y = np.asarray(y)
        if x.ndim < 2 or y.ndim != 1 or len(x) != len(y) or len(y) == 0:
            raise BadInput(
                "records need features of shape (n, ...) and labels of shape (n,), n > 0, "
                f"but have {x.shape} and {y.shape}"
            )
        flat = x.reshape(len(x), -1)
        rows = []
        step = max(1, _CHUNK // (flat.shape[1] + 1))
        for start in range(0, len(x), step):
            table = comparable(
                np.column_stack([flat[start : start + step], y[start : start + step]])
            )
            rows += [hashlib.sha256(row.tobytes()).digest() for row in np.sort(table, axis=1)]
        profiles = profiles_of([*flat.T, y])
        layout = exactly([x, y]) + exact
        if persons is None:
            return cls(len(rows), rows, profiles, layout)
        return cls(
            len(persons),
            rows,
            [persons_of(persons), *profiles],
            layout + exactly([np.array(persons)]),
            person,
        )

    @property
    def by_person(self) -> bool:
        """Return whether the records are persons."""
        return any(profile.kind == PERSON for profile in self.profiles)

    def sketch(self, key: bytes) -> Sketch:
        """Return the marks of the records under this key."""
        rows = {tag(key, b"row", digest)[:MARK] for digest in self.rows}
        return Sketch(
            key,
            _packed(rows),
            b"".join(
                profile.keyed(partial(tag, key, b"part")).packed() for profile in self.profiles
            ),
        )

    def layout_under(self, key: bytes) -> str:
        """Return a mark of the whole table in its order.

        While it stays the same, row k is the same record, and a stored partition may be used.
        """
        return tag(key, b"layout", self.layout).hex()


@dataclass(frozen=True, repr=False)
class Sketch:
    """The stored marks: sorted, different, and concatenated."""

    key: bytes
    rows: bytes
    profiles: bytes

    @property
    def by_person(self) -> bool:
        """Return whether the records are persons."""
        return any(profile.kind == PERSON for profile in unpacked(self.profiles))

    def digest(self) -> str:
        """Return a keyed hash of all marks."""
        return tag(
            self.key, b"sketch", len(self.rows).to_bytes(8, "big") + self.rows + self.profiles
        ).hex()

    def merged(self, other: Sketch) -> Sketch:
        """Return both sets of marks, so that a record that was once in the data set stays known."""
        profiles = merged(unpacked(self.profiles), unpacked(other.profiles), PROFILES)
        return Sketch(
            self.key,
            _packed(_split(self.rows) | _split(other.rows)),
            b"".join(profile.packed() for profile in profiles),
        )

    def compare(self, identity: Identity) -> Likeness:
        """Return how much the records have in common with the sketch."""
        other = identity.sketch(self.key)
        mine = _split(self.rows)
        theirs = _split(other.rows)
        # Of a large set only the smallest marks are kept, so that only the marks below both cuts
        # can be compared.
        cut = min((max(s) for s in (mine, theirs) if len(s) >= KEPT), default=b"\xff" * MARK)
        mine = {m for m in mine if m <= cut}
        theirs = {m for m in theirs if m <= cut}
        shared = len(mine & theirs)
        columns = 0.0
        persons = 0.0
        chance = 0.0
        for new in unpacked(other.profiles):
            for old in unpacked(self.profiles):
                if old.kind != PERSON:
                    columns = max(columns, old.share(new))
                elif new.kind == PERSON:
                    persons = max(persons, old.share(new))
                if old.kind == new.kind == CORE:
                    chance = max(chance, by_chance(old, new))
        return Likeness(
            known=shared / max(1, len(theirs)),
            records=shared / max(1, min(len(mine), len(theirs))),
            columns=columns,
            persons=persons,
            chance=chance,
        )


@dataclass(frozen=True)
class Likeness:
    """How much a data set has in common with a sketch."""

    known: float
    """The share of its records whose marks are in the sketch."""
    records: float
    """The share of the smaller one's records that are in both."""
    columns: float
    """About the share of the smaller one's people that are in both, by some of the columns."""
    chance: float
    """About the share of records that different people of the same kind would have in common with
    the larger one.
    """
    persons: float = 0.0
    """The share of the smaller one's persons whose ids are in both."""

    @property
    def same(self) -> bool:
        """Return whether both are taken for the same data set."""
        return (
            self.records >= min(MOSTLY, SAME + 2 * self.chance)
            or max(self.columns, self.persons) >= SAME
        )

    def words(self) -> str:
        """Return the largest share in words."""
        if self.persons > max(self.records, self.columns):
            return f"{self.persons:.0%} of its persons, by their ids,"
        if self.records >= self.columns:
            return f"{self.records:.0%} of its records"
        return f"some columns of about {self.columns:.0%} of its records"


def tag(key: bytes, domain: bytes, content: bytes) -> bytes:
    """Return the HMAC-SHA256 of the content under this key and domain."""
    return hmac.digest(key, domain + b"\0" + content, "sha256")


def _packed(marks: set[bytes]) -> bytes:
    return b"".join(sorted(marks)[:KEPT])


def _split(packed: bytes) -> set[bytes]:
    return {packed[i : i + MARK] for i in range(0, len(packed), MARK)}


# --- the registry --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Registered:
    """A ledger in the registry."""

    ledger: str
    path: Path
    sketch: Sketch


def _federated(one: Path, other: Path) -> bool:
    """Return whether both are ledgers of silos in one federation's folder, FOLDER/silos/NAME.

    `silodp federation up` makes such folders.
    """
    silos = one.resolve().parent.parent
    return (
        silos.name == "silos"
        and silos == other.resolve().parent.parent
        and (silos.parent / "asker.key").exists()
    )


class Registry:
    """The ledgers on this machine.

    Its folder is by default ~/.local/state/silodp/ledgers, or $SILODP_STATE/ledgers.
    """

    def __init__(self, folder: Path | None = None) -> None:
        if folder is None:
            try:
                state = os.environ.get("SILODP_STATE") or Path.home() / ".local/state/silodp"
            except RuntimeError:
                raise BadInput(
                    "there is no home folder to keep the registry of ledgers in; set "
                    "SILODP_STATE to a folder"
                ) from None
            folder = Path(state) / "ledgers"
        self.folder = folder

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the registry for one process, from the search for a data set to the writing of its
        entry.
        """
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise BadInput(
                f"the registry of ledgers {self.folder} cannot be written "
                f"({error.strerror}); set SILODP_STATE to a folder that can"
            ) from None
        try:
            lock(handle, wait=True)
            yield
        finally:
            os.close(handle)

    def __iter__(self) -> Iterator[Registered]:
        for file in sorted(self.folder.glob("*.json")):
            try:
                data = json.loads(file.read_text())
                sketch = Sketch(
                    *(
                        base64.b64decode(data[name], validate=True)
                        for name in ("key", "rows", "parts")
                    )
                )
                unpacked(sketch.profiles)
                yield Registered(data["ledger"], Path(data["path"]), sketch)
            except (OSError, ValueError, KeyError, TypeError):
                raise BadInput(
                    f"the registry file {file} cannot be read, so it is not known which "
                    "records already have a ledger; restore that file"
                ) from None

    def write(self, entry: Registered) -> None:
        """Write the entry of a ledger. Raise BadInput if that fails."""
        sketch = entry.sketch
        fields = {"key": sketch.key, "rows": sketch.rows, "parts": sketch.profiles}
        encoded = {name: base64.b64encode(content).decode() for name, content in fields.items()}
        try:
            atomic.write(
                self.folder / f"{entry.ledger}.json",
                json.dumps({"ledger": entry.ledger, "path": str(entry.path), **encoded}),
            )
        except OSError as error:
            raise BadInput(
                f"the registry of ledgers {self.folder} cannot be written ({error.strerror}); "
                "set SILODP_STATE to another folder"
            ) from None

    def keep(self, entry: Registered) -> None:
        """Write the entry of a ledger if it has changed."""
        if entry not in list(self):
            self.write(entry)

    def forget(self, ledger: str) -> None:
        """Remove the entry of a ledger."""
        (self.folder / f"{ledger}.json").unlink(missing_ok=True)

    def refuse_copy(self, ledger: str, path: Path) -> None:
        """Raise BadInput if the ledger of this name also exists at another path.

        Of two copies, neither sees what the other spends.
        """
        for entry in self:
            if (
                entry.ledger == ledger
                and entry.path.exists()
                and not (entry.path == path or entry.path.samefile(path))
            ):
                raise BadInput(
                    f"{path} is a copy of the ledger {entry.path}; use that one, since "
                    "neither sees what the other spends"
                )

    def refuse_known(self, identity: Identity, path: Path, *, but: str = "") -> None:
        """Raise BadInput if these records belong to another ledger than the one named `but`.

        `path` is where the ledger of these records is.
        """
        for entry in self:
            likeness = entry.sketch.compare(identity)
            if _federated(path, entry.path):
                likeness = replace(likeness, persons=0.0)
            if entry.ledger != but and likeness.same:
                if entry.path.exists():
                    gone = ""
                else:
                    gone = ", which is missing and must be restored"
                raise BadInput(
                    f"this data set has {likeness.words()} in common with the one whose "
                    f"ledger is {entry.path}{gone}; that budget is the one that "
                    "these people have, so put this file in the place of that gate's data "
                    "file (if they are other people, and their few values "
                    "merely look alike, run this gate as a user of its own, with a "
                    "registry of its own)"
                )
